"""Keeps the jobs of a pool at a target: submits, removes and replaces whole jobs."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Sequence
from typing import Protocol

from ..clusters.report import JobPhase, ended_message
from ..errors import GpujobsError, InputError, JobFailedError, RefusedError, UnavailableError
from ..injob.folder import EndKind
from ..text import plural
from .ceiling import Ceiling
from .job import PoolJob
from .pool import JobPool

REFRESH_INTERVAL = 1.0
"""Seconds between two looks at the cluster's folder."""
UPDATE_TIMEOUT = 5.0
"""Seconds for which `Scaler.update` waits for a batch scheduler that is away."""

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
    def connected(self) -> frozenset[str] | None:
        """Names of the connected workers; None if the dask scheduler cannot be queried."""

    def end_of_scheduler(self) -> tuple[EndKind, str] | None:
        """Return why a dask scheduler in this process has closed; None if it runs."""

    async def running_workers(self, leaving: Collection[str]) -> int:
        """Return how many workers are ready for tasks, without those that are ``leaving``."""

    async def load(self) -> dict[str, int]:
        """Return how many tasks each worker has, by name."""

    async def retire(self, names: list[str]) -> None:
        """Let workers transfer their data and close them."""

    def disconnect(self) -> None:
        """Stop what queries the dask scheduler regularly: it is gone."""

    def log(self, message: str) -> None:
        """Show a line to the user."""


class Scaler:
    """Keeps a pool at ``target`` jobs with workers."""

    def __init__(self, pool: JobPool, dask: DaskSide) -> None:
        self.pool = pool
        self.dask = dask
        self.target = 0
        self.ceiling = Ceiling(pool.plan)
        self._reported = ""
        self._lock = asyncio.Lock()
        self._refreshing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    # -- target ------------------------------------------------------------------------------------
    def set_target(self, jobs: int) -> None:
        """Set the number of jobs; earlier failures are forgotten."""
        self.target = jobs
        self.forget_failures()

    def forget_failures(self) -> None:
        """Submit again after failed starts and refusals."""
        self.ceiling.forget()
        self.pool.forget_failures()

    def check_elastic(self) -> None:
        """Raise InputError if the cluster cannot be resized."""
        if not self.pool.plan.layout.elastic:
            hint = "make another cluster, with n_workers=…"
            raise InputError(
                f"{self.pool.id} is one MPI allocation, which cannot be resized", hint=hint
            )

    async def reach_target(self) -> None:
        """Submit or remove jobs until the target is met; all that is missing, or nothing."""
        async with self._lock:
            self._check_scheduler()
            counting = self.pool.jobs.counting()
            surplus = len(counting) - self.target
            if surplus > 0:
                await self._remove(surplus, counting)
            elif surplus < 0:
                await self._submit(-surplus)

    async def _remove(self, count: int, counting: Sequence[PoolJob]) -> None:
        busy = any(job.report.connected for job in counting)
        load = await self.dask.load() if busy else {}
        await self.pool.remove(self.pool.jobs.cheapest(count, load), self.dask.retire)

    async def _submit(self, count: int) -> None:
        try:
            await self.pool.submit(count)
        except Exception as error:
            self.target = len(self.pool.jobs.counting())
            self.pool.error = error
            raise
        finally:
            self.watch_soon()

    async def release(self, workers: Collection[str]) -> None:
        """Remove the jobs whose workers are all among ``workers``; lower the target."""
        async with self._lock:
            chosen = [
                job
                for job in self.pool.jobs.counting()
                if set(job.report.workers) <= set(workers) and not job.report.head
            ]
            self.target -= len(chosen)
            self.pool.write_target(self.target)
            await self.pool.remove(chosen, self.dask.retire)

    # -- as many as possible -----------------------------------------------------------------------
    async def grow(self, workers: int) -> None:
        """Raise the target to ``workers``, or to as many as are possible, for `adapt`.

        Failures are not forgotten: adaptive scaling asks every second.
        """
        wanted = math.ceil(workers / self.pool.workers_per_job)
        jobs, why_not = self.ceiling.clamp(wanted)
        self._report(why_not)
        if self.pool.error is not None:
            return
        self.target = max(jobs, len(self.pool.jobs.counting()))
        await self._replace()
        self.pool.write_target(self.target)
        self.watch_soon()

    async def _replace(self) -> None:
        """Submit the jobs that are missing, as far as possible, unless too many have failed."""
        pool = self.pool
        async with self._lock:
            alive = len(pool.jobs.counting())
            missing = self.target - alive
            if missing <= 0 or pool.attempts.pausing():
                return
            if not pool.attempts.exhausted(missing, alive):
                await self._submit_possible(missing)
            if pool.attempts.exhausted(missing, alive):
                pool.stop_submitting()
            if pool.error is not None:
                self.target = len(pool.jobs.counting())

    async def _submit_possible(self, count: int) -> None:
        attempts, before = self.pool.attempts, len(self.pool.jobs.counting())
        try:
            error = await self._submit_what_fits(count)
        except UnavailableError as unavailable:
            logger.warning("%s: %s", self.pool.id, unavailable)
            attempts.postpone()
            return
        if error is None:
            return
        accepted = len(self.pool.jobs.counting())
        if self.dask.adapts and accepted:
            self.ceiling.refused(accepted, error)
            self.target = accepted
        elif accepted == before:
            attempts.failed(error=error)
        self._report(f"{accepted - before} of {plural(count, 'job')} accepted: {error}")

    async def _submit_what_fits(self, count: int) -> GpujobsError | None:
        """Submit up to ``count`` jobs in few submissions; return why not all were accepted."""
        error = await self._try(count)
        if error is None or count == 1 or await self._try(1) is not None:
            return error  # if one job is refused, so are all
        left, size = count - 1, count // 2
        while size:
            if left >= size and await self._try(size) is None:
                left -= size
            else:
                size //= 2
        return error

    async def _try(self, count: int) -> GpujobsError | None:
        try:
            await self.pool.submit(count)
        except (RefusedError, InputError) as error:
            return error
        return None

    def _report(self, why_not: str) -> None:
        """Log why fewer jobs are submitted than wanted; the same reason only once."""
        reason = why_not.partition(": ")[2]
        if reason and reason != self._reported:
            self.dask.log(f"{self.pool.id}: {why_not}")
        self._reported = reason or self._reported

    # -- watch -------------------------------------------------------------------------------------
    def watch_soon(self) -> None:
        """Start the task that watches the jobs, unless it runs."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="gpujobs-watch")

    def stop(self) -> None:
        """Stop watching."""
        if self._watching is not None and self._watching is not asyncio.current_task():
            self._watching.cancel()

    async def update(self) -> None:
        """Query the batch scheduler now, unless its answers are new; wait a moment for it."""
        if not self.pool.record.submissions or self.pool.up_to_date or not self.dask.open:
            return
        self.pool.query_soon(0)
        await self.refresh()

    async def refresh(self) -> None:
        """Take in the present state of all jobs; wait a moment if the batch scheduler is away."""
        refresh = asyncio.ensure_future(self._try_refresh())
        await asyncio.wait([refresh], timeout=UPDATE_TIMEOUT)

    async def _watch(self) -> None:
        while self.dask.open and (self.pool.jobs.active or self._wants_jobs()):
            await asyncio.sleep(REFRESH_INTERVAL)
            await self._try_refresh()

    def _wants_jobs(self) -> bool:
        return self.target > 0 and self.pool.error is None

    async def _try_refresh(self) -> None:
        try:
            async with self._refreshing:
                await self._refresh()
        except (GpujobsError, OSError) as error:
            logger.warning("%s: %s", self.pool.id, error)

    def _check_scheduler(self) -> None:
        """Raise JobFailedError if the dask scheduler of this process has closed."""
        if end := self.dask.end_of_scheduler():
            kind, reason = end
            self.pool.end(kind, reason)
            raise JobFailedError(ended_message(self.pool.id, reason))

    async def _refresh(self) -> None:
        pool, had_conflict, had_error = self.pool, self.pool.conflict, self.pool.error
        if end := self.dask.end_of_scheduler():
            pool.end(*end)
        for job in await pool.refresh(self.dask.connected, self._lock):
            when = " before its workers connected" if job.phase is JobPhase.FAILED else ""
            self.dask.log(f"job {job.id} of {pool.id} ended{when}: {job.reason or 'released'}")
        if pool.conflict is not None and had_conflict is None:
            logger.error("%s: %s", pool.id, pool.conflict)
        if pool.error is None and self.dask.open:
            await self._replace()
        if pool.error is not None:
            self.target = min(self.target, len(pool.jobs.counting()))
            if had_error is None:
                self._report_error(pool.error)

    def _report_error(self, error: Exception) -> None:
        """Log once why no more jobs are submitted."""
        ended = self.pool.folder_state.ended
        if ended is not None:
            self.dask.disconnect()
        if ended is not None and ended.kind in (EndKind.IDLE, EndKind.SHUTDOWN):
            self.dask.log(str(error))
        else:
            logger.error("%s", error)
