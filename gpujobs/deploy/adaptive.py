"""Adaptive scaling by whole jobs: a job of four GPUs is not released if one worker is idle."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from dask.utils import parse_timedelta
from distributed.deploy.adaptive import Adaptive

from ..errors import InputError
from ..injob.demand import HANDLER
from .group import WorkerGroup
from .job import PoolJob

SHORTEST_HOLD, LONGEST_HOLD = 120.0, 1800.0
"""Bounds of the time for which idle jobs are kept, in seconds."""


class JobAdaptive(Adaptive):  # type: ignore[misc]
    """Requests whole jobs, and releases whole idle ones.

    ``hold``: time for which all workers of a job must be idle before it is released; default: as
    long as a job of this cluster has waited in the queue, within 2 and 30 minutes. ``grace``:
    seconds for which a job without connected workers is kept although nothing needs it.
    ``group``: only the workers of this group, by the tasks that they can run.
    """

    def __init__(
        self,
        *args: Any,
        group: str = "",
        grace: float = 30.0,
        hold: float | str | None = None,
        **kwargs: Any,
    ) -> None:
        self.group = group
        self.grace = grace
        self._demands: deque[tuple[float, int]] = deque()
        """Needed jobs, with the time."""
        self._hold: float | None = None if hold is None else parse_timedelta(hold)
        super().__init__(*args, **kwargs)

    @property
    def hold(self) -> float:
        """Seconds for which an idle job is kept."""
        if self._hold is not None:
            return self._hold
        waited: float = self.cluster.longest_wait
        return min(LONGEST_HOLD, max(SHORTEST_HOLD, waited))

    async def target(self) -> int:
        """Return the number of workers that the tasks need."""
        if not self.group:
            wanted: int = await super().target()
            return wanted
        call = getattr(self.scheduler, HANDLER)
        found: int = await call(
            **self.cluster.demand_of(self.group), target_duration=self.target_duration
        )
        return found

    async def scale_up(self, n: int) -> None:
        """Request as many of ``n`` workers as are possible."""
        await self.cluster.grow(self.group, n)

    async def scale_down(self, workers: Sequence[str]) -> None:
        """Release the jobs of these workers, which transfer their data."""
        await self.cluster.scale_down(workers)

    async def recommendations(self, target: int) -> dict[str, Any]:
        """Return the next step to ``target`` workers: up, down, or the same."""
        now = self.cluster.now()
        jobs: list[PoolJob] = self.cluster.counting_jobs(self.group)
        await self._note_idle_jobs(jobs, now)
        group: WorkerGroup = self.cluster.worker_group(self.group)
        maximum = most_jobs(self, group)
        wanted = min(group.jobs_for(target), maximum)
        self.cluster.set_demand(self.group, wanted, maximum)
        self._demands.append((now, wanted))
        if wanted > len(jobs):
            return {"status": "up", "n": wanted * group.size}
        if released := self._releasable(jobs, wanted, now):
            names = [name for job in released for name in job.report.workers]
            return {"status": "down", "workers": names}
        return {"status": "same"}

    def _releasable(self, jobs: list[PoolJob], wanted: int, now: float) -> list[PoolJob]:
        """Return the jobs to release: first those without workers, then idle ones."""
        candidates = [job for job in jobs if not job.report.head]
        unused = [
            job for job in candidates if not job.report.connected and now - job.queued >= self.grace
        ]
        unused = unused[: max(0, len(jobs) - self._recent_demand(now))]
        idle = [
            job
            for job in candidates
            if job.idle_since is not None and now - job.idle_since >= self.hold
        ]
        return [*unused, *idle][: len(jobs) - wanted]

    def _recent_demand(self, now: float) -> int:
        """Return the most jobs that were needed within the last `grace` seconds."""
        while len(self._demands) > 1 and self._demands[1][0] <= now - self.grace:
            self._demands.popleft()
        if self._demands[0][0] > now - self.grace:  # it is not known for long enough
            return sys.maxsize
        return max(jobs for _, jobs in self._demands)

    async def _note_idle_jobs(self, jobs: list[PoolJob], now: float) -> None:
        busy = await self._busy_workers()
        for job in jobs:
            if not job.report.connected or busy.intersection(job.report.workers):
                job.idle_since = None
            elif job.idle_since is None:
                job.idle_since = now

    async def _busy_workers(self) -> set[str]:
        workers = self.cluster.scheduler_info["workers"]
        processing = await self.scheduler.processing()
        return {
            workers[address]["name"]
            for address, keys in processing.items()
            if keys and address in workers
        }


def most_jobs(adaptive: Adaptive, group: WorkerGroup) -> int:
    """Return how many whole jobs have at most `maximum` workers."""
    if math.isinf(adaptive.maximum):
        return sys.maxsize
    return int(adaptive.maximum) // group.size


def check_bounds(adaptive: Adaptive, group: WorkerGroup) -> None:
    """Stop ``adaptive`` and raise InputError if no number of whole jobs is within its bounds."""
    least, most = group.jobs_for(adaptive.minimum), most_jobs(adaptive, group)
    if least <= most and (most or not adaptive.maximum):
        return
    adaptive.stop()
    bounds = f"{adaptive.minimum} to {adaptive.maximum} workers"
    message = f"adapt: no number of jobs of {group.size} workers has {bounds}"
    raise InputError(message, hint=f"workers come in whole jobs: use multiples of {group.size}")
