"""Keeps the jobs of a pool at a target: submits, removes and replaces whole jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from dask.utils import parse_bytes, parse_timedelta

from ..clusters.report import JobPhase
from ..errors import GpujobsError, InputError
from ..text import plural
from .job import PoolJob
from .pool import JobPool
from .table import phase_counts

REFRESH_INTERVAL = 1.0
"""Seconds between two looks at the cluster's folder."""
WAIT_INTERVAL = 0.1

logger = logging.getLogger("gpujobs")


class DaskSide(Protocol):
    """The part of a dask cluster that the scaler needs."""

    @property
    def open(self) -> bool:
        """Whether the cluster has been started and not closed."""

    @property
    def adapts(self) -> bool:
        """Whether the cluster scales adaptively."""

    @property
    def connected(self) -> frozenset[str]:
        """Names of the connected workers."""

    async def running_workers(self) -> int:
        """Return how many workers are ready for tasks."""

    async def load(self) -> dict[str, int]:
        """Return how many tasks each worker has, by name."""

    async def retire(self, names: list[str]) -> None:
        """Let workers transfer their data and close them."""

    def log(self, message: str) -> None:
        """Show a line to the user."""


class Scaler:
    """Keeps a pool at ``target`` jobs with workers."""

    def __init__(self, pool: JobPool, dask: DaskSide) -> None:
        self.pool = pool
        self.dask = dask
        self.target = 0
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    # -- target ------------------------------------------------------------------------------------
    def set_target(self, jobs: int) -> None:
        """Set the number of jobs; earlier failures are forgotten."""
        self.target = jobs
        self.pool.forget_failures()

    def check_elastic(self) -> None:
        """Raise InputError if the cluster cannot be resized."""
        if not self.pool.plan.layout.elastic:
            hint = "make another cluster, with n_workers=…"
            raise InputError(
                f"{self.pool.id} is one MPI allocation, which cannot be resized", hint=hint
            )

    def jobs_for(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: str | int | None = None,
        cores: int | None = None,
    ) -> int:
        """Return the jobs that together have ``n`` workers, ``memory`` and ``cores``."""
        for name, value in (("n", n), ("jobs", jobs), ("cores", cores)):
            if value is not None and not _is_amount(value):
                raise InputError(f"scale: {name}={value!r} is not a number of at least 0")
        if jobs is not None:
            return math.ceil(jobs)
        plan, workers = self.pool.plan, [n or 0]
        if memory is not None and plan.workers.shape.worker_memory:
            workers.append(math.ceil(parse_bytes(memory) / plan.workers.shape.worker_memory))
        if cores is not None:
            workers.append(math.ceil(cores / plan.workers.shape.worker_threads))
        return self._whole_jobs(max(workers))

    def _whole_jobs(self, workers: int) -> int:
        size = self.pool.workers_per_job
        jobs = math.ceil(workers / size)
        if jobs * size != workers:
            count = plural(jobs, "job")
            self.dask.log(f"{workers} workers are {count} of {size}: {jobs * size} workers")
        return jobs

    async def reach_target(self) -> None:
        """Submit or remove jobs until the target is met."""
        async with self._lock:
            counting = self.pool.counting()
            surplus = len(counting) - self.target
            if surplus > 0:
                await self._remove(surplus, counting)
            elif surplus < 0:
                await self._submit(-surplus)

    async def _remove(self, count: int, counting: Sequence[PoolJob]) -> None:
        busy = any(job.report.connected for job in counting)
        load = await self.dask.load() if busy else {}
        await self.pool.remove(self.pool.cheapest(count, load), self.dask.retire)

    async def _submit(self, count: int) -> None:
        try:
            await self.pool.submit(count)
        except Exception as error:
            self.target = len(self.pool.counting())
            self.pool.error = error
            raise
        finally:
            self.watch_soon()

    async def release(self, workers: Collection[str]) -> None:
        """Remove the jobs whose workers are all among ``workers``; lower the target."""
        async with self._lock:
            chosen = [
                job
                for job in self.pool.counting()
                if set(job.report.workers) <= set(workers) and not job.report.head
            ]
            self.target -= len(chosen)
            self.pool.write_target(self.target)
            await self.pool.remove(chosen, self.dask.retire)

    # -- watch -------------------------------------------------------------------------------------
    def watch_soon(self) -> None:
        """Start the task that watches the jobs, unless it runs."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="gpujobs-watch")

    def stop(self) -> None:
        """Stop watching."""
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()

    async def _watch(self) -> None:
        while self.pool.jobs and self.dask.open:
            await asyncio.sleep(REFRESH_INTERVAL)
            try:
                await self._refresh()
            except (GpujobsError, OSError) as error:
                logger.warning("%s: %s", self.pool.id, error)

    async def _refresh(self) -> None:
        pool, had_conflict = self.pool, self.pool.conflict is not None
        for job in await pool.refresh(self.dask.connected, self._lock):
            when = " before its workers connected" if job.phase is JobPhase.FAILED else ""
            self.dask.log(f"job {job.id} of {pool.id} ended{when}: {job.reason or 'released'}")
        if pool.conflict is not None and not had_conflict:
            logger.error("%s: %s", pool.id, pool.conflict)
        if pool.error is not None:
            self.target = min(self.target, len(pool.counting()))
        elif len(pool.counting()) < self.target and self.dask.open:
            with contextlib.suppress(GpujobsError):  # kept in `pool.error`, for wait_for
                await self.reach_target()

    # -- wait --------------------------------------------------------------------------------------
    async def wait_for(self, n_workers: int, timeout: float | str | None) -> None:
        """Wait until ``n_workers`` are ready. Raises why that cannot happen, or TimeoutError."""
        deadline = time.monotonic() + parse_timedelta(timeout) if timeout else math.inf
        while (found := await self.dask.running_workers()) < n_workers:
            self._check_reachable(n_workers)
            if time.monotonic() > deadline:
                jobs = phase_counts(job.report for job in self.pool.jobs.values()) or "no jobs"
                raise TimeoutError(f"{found} of {n_workers} workers after {timeout} s: {jobs}")
            await asyncio.sleep(WAIT_INTERVAL)
        if self.pool.conflict is not None:
            raise self.pool.conflict

    def _check_reachable(self, n_workers: int) -> None:
        pool = self.pool
        for error in (pool.conflict, pool.error):
            if error is not None:
                raise error
        planned = max(self.target, len(pool.counting())) * pool.workers_per_job
        if n_workers > planned and not self.dask.adapts:
            message = f"waiting for {n_workers} workers, but only {planned} were asked for"
            raise InputError(message, hint="scale() first")


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
