"""Brings one group of workers as close to its target as is possible."""

from __future__ import annotations

import asyncio
import logging

from ..errors import GpujobsError, InputError, RefusedError, UnavailableError
from ..text import plural
from .daskside import DaskSide
from .group import WorkerGroup
from .pool import JobPool
from .room import possible, room

logger = logging.getLogger("gpujobs")


class GroupScaler:
    """Submits the missing jobs of one group, as far as the batch scheduler accepts them.

    ``lock``: held while the jobs of the pool change.
    """

    def __init__(
        self, pool: JobPool, dask: DaskSide, group: WorkerGroup, lock: asyncio.Lock
    ) -> None:
        self.pool = pool
        self.dask = dask
        self.group = group
        self._lock = lock
        self._reported = ""

    async def grow(self, workers: int) -> None:
        """Raise the target to ``workers``, or to as many as are possible, for `adapt`.

        Failures are not forgotten: adaptive scaling asks every second.
        """
        jobs, why_not = possible(self.pool, self.group, self.group.jobs_for(workers))
        self._report(why_not)
        if self.pool.error_of(self.group) is not None:
            return
        self.group.target = jobs
        await self.replace()
        self.pool.write_groups()

    async def replace(self) -> None:
        """Submit the jobs that are missing, as far as possible, unless too many have failed."""
        pool, attempts = self.pool, self.group.attempts
        async with self._lock:
            if pool.error_of(self.group) is not None:
                return
            if self._missing() <= 0 or attempts.pausing():
                return
            if not await pool.recover():
                attempts.postpone()
            alive, missing = self._present(), self._missing()
            if missing <= 0 or pool.unanswered:
                return
            if not attempts.exhausted(missing, alive):
                await self._submit_possible(missing)
            if attempts.exhausted(missing, alive):
                self.group.stop_submitting(pool.jobs.past)
                self.group.target = self._present()

    def _missing(self) -> int:
        return min(self.group.target - self._present(), room(self.pool, self.group))

    def _present(self) -> int:
        return len(self.pool.jobs.counting(self.group.name))

    async def _submit_possible(self, count: int) -> None:
        attempts, before = self.group.attempts, self._present()
        try:
            error = await self._submit_what_fits(count)
        except UnavailableError as unavailable:
            logger.warning("%s: %s", self.pool.id, unavailable)
            attempts.postpone()
            return
        if error is None:
            return
        accepted = self._present()
        occupied = self.pool.jobs.occupied()[self.group.name]
        if occupied > accepted:  # there may be room when those that leave have left
            self.group.ceiling.refused(occupied, error)
        elif self.dask.adapts(self.group.name) and accepted:
            self.group.ceiling.refused(accepted, error)
            self.group.target = accepted
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
            await self.pool.submit(self.group, count)
        except (RefusedError, InputError) as error:
            return error
        return None

    def _report(self, why_not: str) -> None:
        """Log why fewer jobs are submitted than wanted; the same reason only once."""
        reason = why_not.removeprefix(self.group.label).partition(": ")[2]
        if reason and reason != self._reported:
            self.dask.log(f"{self.pool.id}: {why_not}")
        self._reported = reason or self._reported
