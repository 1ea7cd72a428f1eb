"""Adaptive scaling by whole jobs: a job of four GPUs is not given back because one of its workers idles."""

from __future__ import annotations

import math
import time
from typing import Any

from distributed.deploy.adaptive import Adaptive


class JobAdaptive(Adaptive):  # type: ignore[misc]
    """Asks for whole jobs, gives back whole idle ones, and lets a young pending job wait for its turn.

    ``hold``: seconds for which all workers of a job must be idle; ``grace``: seconds for which a job that has not
    started is kept although nothing needs it (what cancels pending jobs too soon never gets one).
    """

    def __init__(self, *args: Any, grace: float = 30.0, hold: float = 3.0, **kwargs: Any) -> None:
        self.grace, self.hold = grace, hold
        super().__init__(*args, **kwargs)

    async def recommendations(self, target: int) -> dict[str, Any]:
        """Return what to do to get to ``target`` workers: up, down, or the same."""
        cluster, now = self.cluster, time.monotonic()
        jobs = cluster.counting_jobs()
        await self._note_idle_jobs(jobs, now)
        wanted = math.ceil(target / cluster.workers_per_job)
        if wanted > len(jobs):
            return {"status": "up", "n": wanted * cluster.workers_per_job}
        if wanted < len(jobs):
            unused = [job for job in jobs if not job.connected and now - job.born >= self.grace]
            idle = [
                job
                for job in jobs
                if job.idle_since is not None and now - job.idle_since >= self.hold
            ]
            chosen = [job for job in (*unused, *idle) if not job.head][: len(jobs) - wanted]
            if chosen:
                return {
                    "status": "down",
                    "workers": [name for job in chosen for name in job.workers],
                }
        return {"status": "same"}

    async def _note_idle_jobs(self, jobs: list[Any], now: float) -> None:
        workers = self.cluster.scheduler_info["workers"]
        processing = await self.scheduler.processing()
        busy = {
            workers[address]["name"]
            for address, keys in processing.items()
            if keys and address in workers
        }
        for job in jobs:
            idle = job.connected and not busy.intersection(job.workers)
            job.idle_since = (job.idle_since or now) if idle else None
