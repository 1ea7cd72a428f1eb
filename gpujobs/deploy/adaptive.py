"""Adaptive scaling by whole jobs: a job of four GPUs is not released if one worker is idle."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from distributed.deploy.adaptive import Adaptive
from distributed.deploy.spec import SpecCluster

from .job import PoolJob
from .scaler import Scaler


class JobAdaptive(Adaptive):  # type: ignore[misc]
    """Requests whole jobs, and releases whole idle ones.

    ``hold``: seconds for which all workers of a job must be idle before it is released.
    ``grace``: seconds for which a job that has not started is kept although nothing needs it.
    """

    def __init__(self, *args: Any, grace: float = 30.0, hold: float = 3.0, **kwargs: Any) -> None:
        self.grace = grace
        self.hold = hold
        super().__init__(*args, **kwargs)

    async def recommendations(self, target: int) -> dict[str, Any]:
        """Return the next step to ``target`` workers: up, down, or the same."""
        now = time.monotonic()
        jobs: list[PoolJob] = self.cluster.counting_jobs()
        await self._note_idle_jobs(jobs, now)
        size = self.cluster.workers_per_job
        wanted = math.ceil(target / size)
        if wanted > len(jobs):
            return {"status": "up", "n": wanted * size}
        released = self._releasable(jobs, now)[: len(jobs) - wanted]
        if released:
            names = [name for job in released for name in job.report.workers]
            return {"status": "down", "workers": names}
        return {"status": "same"}

    def _releasable(self, jobs: list[PoolJob], now: float) -> list[PoolJob]:
        """Return the jobs that may be released: first those without workers, then idle ones."""
        candidates = [job for job in jobs if not job.report.head]
        unused = [
            job
            for job in candidates
            if not job.report.connected and now - job.submitted >= self.grace
        ]
        idle = [
            job
            for job in candidates
            if job.idle_since is not None and now - job.idle_since >= self.hold
        ]
        return [*unused, *idle]

    async def _note_idle_jobs(self, jobs: list[PoolJob], now: float) -> None:
        workers = self.cluster.scheduler_info["workers"]
        processing = await self.scheduler.processing()
        busy = {
            workers[address]["name"]
            for address, keys in processing.items()
            if keys and address in workers
        }
        for job in jobs:
            if not job.report.connected or busy.intersection(job.report.workers):
                job.idle_since = None
            elif job.idle_since is None:
                job.idle_since = now


class Adaptable:
    """The methods of a cluster that adaptive scaling calls, and those that start it."""

    workers_per_job: int
    _scaler: Scaler

    async def scale_down(self, workers: Sequence[str]) -> None:
        """Release the jobs whose workers are all named; `Adaptive` calls this."""
        await self._scaler.release(workers)

    def adapt(
        self,
        *args: Any,
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        Adaptive: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Scale between ``minimum`` and ``maximum`` workers by the load, in whole jobs."""
        self._scaler.check_elastic()
        if minimum_jobs is not None:
            kwargs["minimum"] = minimum_jobs * self.workers_per_job
        if maximum_jobs is not None:
            kwargs["maximum"] = maximum_jobs * self.workers_per_job
        return SpecCluster.adapt(self, *args, Adaptive=Adaptive or JobAdaptive, **kwargs)

    def counting_jobs(self) -> list[PoolJob]:
        """Return the jobs that count towards the target."""
        return self._scaler.pool.counting()

    @property
    def plan(self) -> set[str]:
        """Names of the workers that there should be."""
        return {name for job in self._scaler.pool.counting() for name in job.report.workers}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are submitted."""
        return {name for job in self._scaler.pool.jobs.values() for name in job.report.workers}
