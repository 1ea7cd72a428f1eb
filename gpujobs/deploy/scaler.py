"""Keeps the jobs of a pool at a target: submits, removes and replaces whole jobs."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence

from dask.utils import parse_timedelta

from ..clusters.progress import Progress
from ..clusters.report import JobPhase, ended_message, job_counts
from ..clusters.scale import limits_of
from ..errors import GpujobsError, InputError, JobFailedError, RefusedError, UnavailableError
from ..injob.folder import EndKind
from ..planning.limits import exceeded, most_allowed
from ..text import clock_text, plural
from .group import Ceiling, WorkerGroup, without_log
from .head import DaskControl
from .job import PoolJob
from .pool import JobPool


# -- retire the workers of released jobs -----------------------------------------------------------
class Retirer:
    """Retires workers; those that are being retired are left alone."""

    def __init__(self, dask: DaskControl) -> None:
        self._dask = dask
        self._names: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()

    async def retire(self, names: Iterable[str]) -> None:
        """Let workers transfer their data and close them."""
        new = [name for name in names if name not in self._names]
        if not new:
            return
        self._names.update(new)
        try:
            await self._dask.retire(new)
        finally:
            self._names.difference_update(new)

    def retire_late(self, released: Iterable[PoolJob]) -> None:
        """Retire, in the background, connected workers of jobs that are to be cancelled.

        They have connected after the release, and would get tasks until the cancel is confirmed.
        """
        connected = (self._dask.connected or frozenset()).difference(self._names)
        late = [name for job in released for name in job.report.workers if name in connected]
        if late:
            task = asyncio.ensure_future(self.retire(late))
            self._background.add(task)  # a task without a reference may be collected
            task.add_done_callback(self._background.discard)


# -- the room for more jobs of a group -------------------------------------------------------------
def possible(pool: JobPool, group: WorkerGroup, jobs: int) -> tuple[int, str]:
    """Return how many of ``jobs`` jobs of a group are possible, and why not all, or ""."""
    ceiling = _ceiling(pool, group, jobs, pool.jobs.numbers())
    if not ceiling.reason:
        return jobs, ""
    label = "" if group.label in ceiling.reason else group.label
    return ceiling.jobs, f"{label}{plural(ceiling.jobs, 'job')} of {jobs}: {ceiling.reason}"


def room(pool: JobPool, group: WorkerGroup) -> int:
    """Return how many more jobs of a group may be submitted now.

    Jobs that leave count until they have ended.
    """
    occupied = pool.jobs.occupied()
    most = _ceiling(pool, group, sys.maxsize, occupied).jobs
    if group.maximum is not None:
        most = min(most, group.maximum)
    return most - occupied[group.name]


def _ceiling(pool: JobPool, group: WorkerGroup, jobs: int, numbers: Mapping[str, int]) -> Ceiling:
    """Return the first ceiling below ``jobs`` jobs; ``numbers``: of the jobs of each group."""
    ceilings = [group.ceiling]
    devices, gpus = len(pool.plan.devices), group.jobs.shape.gpus
    if devices and gpus:
        free = devices - len(pool.jobs.devices(but=group.name))
        reason = f"this machine has {plural(devices, 'free GPU')}"
        ceilings.insert(0, Ceiling(free // gpus, reason))
    limits = limits_of(pool.plan, pool.record, group.name, numbers)
    if limit := exceeded(limits, jobs):
        ceilings.insert(0, Ceiling(most_allowed(limits) or 0, limit.rule))
    return next((ceiling for ceiling in ceilings if ceiling.jobs < jobs), Ceiling(jobs))


# -- one group of workers --------------------------------------------------------------------------
logger = logging.getLogger("gpujobs")


class GroupScaler:
    """Submits the missing jobs of one group, as far as the batch scheduler accepts them.

    ``lock``: held while the jobs of the pool change.
    """

    def __init__(
        self, pool: JobPool, dask: DaskControl, group: WorkerGroup, lock: asyncio.Lock
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
        pool, failures = self.pool, self.group.failures
        async with self._lock:
            if pool.error_of(self.group) is not None:
                return
            if self._missing() <= 0 or failures.pausing():
                return
            if not await pool.recover():
                failures.postpone()
            alive, missing = self._present(), self._missing()
            if missing <= 0 or pool.unanswered:
                return
            if not failures.exhausted(missing, alive):
                await self._submit_possible(missing)
            if failures.exhausted(missing, alive):
                self.group.stop_submitting(pool.jobs.past)
                self.group.target = self._present()

    def _missing(self) -> int:
        return min(self.group.target - self._present(), room(self.pool, self.group))

    def _present(self) -> int:
        return len(self.pool.jobs.counting(self.group.name))

    async def _submit_possible(self, count: int) -> None:
        failures, before = self.group.failures, self._present()
        try:
            error = await self._submit_what_fits(count)
        except UnavailableError as unavailable:
            logger.warning("%s: %s", self.pool.id, unavailable)
            failures.postpone()
            return
        if error is None:
            return
        accepted = self._present()
        occupied = self.pool.jobs.occupied()[self.group.name]
        if occupied > accepted:  # there may be room when those that leave have left
            self.group.refuse(occupied, error)
        elif self.dask.adapts(self.group.name) and accepted:
            self.group.refuse(accepted, error)
            self.group.target = accepted
        elif accepted == before:
            failures.failed(error=error)
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


# -- all groups of a pool --------------------------------------------------------------------------
REFRESH_INTERVAL = 1.0
"""Seconds between two looks at the cluster's folder."""
SUBMIT_TIMEOUT = 15.0
"""Seconds for which `scale` waits for a batch scheduler that is away."""
UPDATE_TIMEOUT = 5.0
"""Seconds for which `Scaler.update` waits for a batch scheduler that is away."""


class Scaler:
    """Keeps every group of workers of a pool at its target."""

    def __init__(
        self, pool: JobPool, dask: DaskControl, interval: float = REFRESH_INTERVAL
    ) -> None:
        self.pool = pool
        self.interval = interval
        self.dask = dask
        self._retirer = Retirer(dask)
        self._lock = asyncio.Lock()
        self._refreshing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._late: asyncio.Task[None] | None = None  # a task without a reference may be collected
        self._stopped = False
        self._setups: set[str] = set()
        """Failed lines of `setup` that were shown."""
        self._gave_up = False
        """Whether clients were given an error, because no more jobs are submitted."""
        self._groups = {
            name: GroupScaler(pool, dask, group, self._lock) for name, group in pool.groups.items()
        }

    # -- target ------------------------------------------------------------------------------------
    def set_targets(self, jobs: Mapping[str, int]) -> None:
        """Set the number of jobs of groups; earlier failures are forgotten."""
        for name, number in jobs.items():
            self.pool.groups[name].target = number
            self.pool.groups[name].maximum = None
        self.forget_failures(jobs)

    def forget_failures(self, groups: Iterable[str]) -> None:
        """Submit jobs of these groups again after failed starts and refusals."""
        for name in groups:
            self.pool.groups[name].forget_failures()
        self.pool.write_groups()

    def check_elastic(self) -> None:
        """Raise InputError if the cluster cannot be resized."""
        if not self.pool.record.elastic:
            hint = "make another cluster, with n_workers=…"
            raise InputError(
                f"{self.pool.id} is one allocation, which cannot be resized", hint=hint
            )

    async def reach_targets(self) -> None:
        """Submit or remove jobs until all targets are met; of each group all jobs, or none.

        Raises the first error, after all groups have been tried.
        """
        errors: list[Exception] = []
        async with self._lock:
            self._check_scheduler()
            if self.pool.error is not None:  # its last jobs may still count
                raise self.pool.error
            if self._gave_up:
                self._gave_up = False
                await self.dask.give_up(None)
            await self.pool.recover()
            for group in self.pool.groups.values():
                wanted = group.target
                try:
                    await self._reach_target(group)
                except Exception as error:
                    errors.append(error)
                    if group.target == wanted:  # else it was scaled meanwhile
                        group.target = len(self.pool.jobs.counting(group.name))
                        group.refused = error
        if errors:
            self.pool.write_groups()
            raise errors[0]

    async def reach_targets_soon(self) -> None:
        """Do `reach_targets`, but do not wait long for a submission without a reply.

        It then goes on in the background; what cannot be submitted now is tried again.
        """
        wanted = {group: group.target for group in self.pool.groups.values()}
        work = asyncio.ensure_future(self.reach_targets())
        await asyncio.wait([work], timeout=SUBMIT_TIMEOUT)
        while not work.done() and not self.pool.unanswered:  # workers transfer their data
            await asyncio.wait([work], timeout=REFRESH_INTERVAL)
        if work.done():
            return work.result()
        message = "%s: the batch scheduler does not respond; the jobs are submitted when it does"
        logger.warning(message, self.pool.id)
        self._late = asyncio.ensure_future(self._finish(work, wanted))

    async def _finish(self, work: Awaitable[None], wanted: Mapping[WorkerGroup, int]) -> None:
        try:
            await work
        except UnavailableError:
            for group, jobs in wanted.items():
                if isinstance(group.refused, UnavailableError):
                    group.target, group.refused = jobs, None
            self.watch_soon()
        except Exception as error:
            logger.error("%s: %s", self.pool.id, error)

    async def _reach_target(self, group: WorkerGroup) -> None:
        counting = self.pool.jobs.counting(group.name)
        surplus = len(counting) - group.target
        if surplus > 0 and group.maximum is None:  # else idle jobs are kept for some time
            await self._remove(group, surplus, counting)
        if surplus >= 0 or group.error is not None:  # with an error: another group is scaled
            return
        if self.pool.unanswered:
            message = "a submission got no reply, and its jobs may still be accepted"
            raise UnavailableError(message, hint="try again in two minutes")
        # Jobs that are about to leave count for the limits: their successors may have to wait.
        leaving = self.pool.jobs.numbers()[group.name] - len(counting)
        count = max(-surplus - leaving, min(-surplus, room(self.pool, group)))
        try:
            if count > 0:
                await self.pool.submit(group, count)
        finally:
            self.watch_soon()

    async def _remove_surplus(self) -> None:
        """Remove jobs above the targets.

        They were found after the call that wanted them has failed, or were requeued when their
        successors had been submitted.
        """
        async with self._lock:
            for group in self.pool.groups.values():
                if len(self.pool.jobs.counting(group.name)) > group.target:
                    await self._reach_target(group)

    async def _remove(self, group: WorkerGroup, count: int, counting: Sequence[PoolJob]) -> None:
        busy = any(job.report.connected for job in counting)
        load = await self.dask.load() if busy else {}
        chosen = self.pool.jobs.cheapest(group.name, count, load)
        await self.pool.remove(chosen, self._retirer.retire)

    async def release(self, workers: Collection[str]) -> None:
        """Remove the jobs whose workers are all among ``workers``, and still idle."""
        async with self._lock:
            load = await self.dask.load()
            idle = {name for name in workers if not load.get(name)}
            chosen = [
                job
                for job in self.pool.jobs.counting()
                if idle.issuperset(job.report.workers) and not job.report.head
            ]
            await self.pool.remove(chosen, self._retirer.retire)

    def set_demand(self, group: str, jobs: int, maximum: int) -> None:
        """Want ``jobs`` jobs of a group, of which there may be ``maximum`` at any time.

        Jobs above that stay until they are released.
        """
        self.pool.groups[group].target = jobs
        self.pool.groups[group].maximum = maximum
        self.pool.lower_targets()  # otherwise each second writes two targets
        self.pool.write_groups()

    async def grow(self, group: str, workers: int) -> None:
        """Raise the target of a group to ``workers``, or to as many as are possible."""
        await self._groups[group].grow(workers)
        self.watch_soon()

    # -- watch -------------------------------------------------------------------------------------
    def watch_soon(self) -> None:
        """Start the task that watches the jobs, unless it runs; it ends when there are none."""
        if not self._stopped and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch(), name="gpujobs-watch")

    def stop(self) -> None:
        """Stop watching; `watch_soon` does nothing from then on."""
        self._stopped = True
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
        while True:
            await asyncio.sleep(self.interval)
            if not self.dask.open:
                return
            await self._try_refresh()
            if not (self._has_jobs() or self._wants_jobs()):
                return

    def _has_jobs(self) -> bool:
        pool = self.pool
        return bool(pool.jobs.active or pool.jobs.released or pool.unanswered)

    def _wants_jobs(self) -> bool:
        pool = self.pool
        groups = [group for group in pool.groups.values() if pool.error_of(group) is None]
        return any(group.target > 0 for group in groups)

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
        pool, had_conflict, known = self.pool, self.pool.conflict, self.pool.errors
        if end := self.dask.end_of_scheduler():
            pool.end(*end)
        for job in await pool.refresh(self.dask.connected, self._lock):
            when = " before its workers connected" if job.phase is JobPhase.FAILED else ""
            self.dask.log(f"job {job.id} of {pool.id} ended{when}: {job.reason or 'released'}")
        self._note_setups()
        self._retirer.retire_late(pool.jobs.released.values())
        await self._remove_surplus()
        if pool.conflict is not None and had_conflict is None:
            logger.error("%s: %s", pool.id, pool.conflict)
        if self.dask.open:
            for scaler in self._groups.values():
                await scaler.replace()
        pool.lower_targets()
        pool.write_groups()
        for error in pool.errors:
            if error not in known:
                self._report_error(error)
        await self._fail_clients()

    async def _fail_clients(self) -> None:
        """Fail what clients wait for if no job has workers, and none will be submitted."""
        pool = self.pool
        working = any(job.report.workers for job in pool.jobs.active.values())
        if pool.errors and not (self._gave_up or working or self._wants_jobs() or pool.ended):
            self._gave_up = True
            await self.dask.give_up(pool.errors[0])

    def _note_setups(self) -> None:
        """Show each line of `setup` that failed in a job, once."""
        found = set(self.pool.folder_state.setups.values())
        for text in sorted(found - self._setups):
            self.dask.log(f"setup: {text}")
        self._setups |= found

    def _report_error(self, error: Exception) -> None:
        """Log once why no more jobs are submitted."""
        ended = self.pool.folder_state.ended
        if ended is not None:
            self.dask.disconnect()
        if ended is not None and ended.kind in (EndKind.IDLE, EndKind.SHUTDOWN):
            self.dask.log(str(error))
        else:
            logger.error("%s", without_log(error))  # who waits gets all of it


# -- `wait_for_workers` ----------------------------------------------------------------------------
INTERVAL = 0.1
"""Seconds between two queries of the dask scheduler."""


async def wait_for(
    scaler: Scaler, n_workers: int, timeout: float | str | None, progress: Progress
) -> None:
    """Wait until ``n_workers`` are ready. Raises why that cannot happen, or TimeoutError."""
    pool, started = scaler.pool, time.monotonic()
    deadline = started + parse_timedelta(timeout) if timeout else math.inf
    try:
        while (found := await _ready(scaler)) < n_workers:
            _check_reachable(scaler, n_workers)
            jobs = _jobs_text(pool)
            if time.monotonic() > deadline:
                jobs += pool.jobs.last_failure()
                raise TimeoutError(f"{found} of {n_workers} workers after {timeout} s: {jobs}")
            progress.show(
                f"{found}/{n_workers} workers, {jobs}", clock_text(time.monotonic() - started)
            )
            await asyncio.sleep(INTERVAL)
        await scaler.refresh()
    finally:
        progress.clear()
    if pool.conflict is not None:
        raise pool.conflict


def _jobs_text(pool: JobPool) -> str:
    jobs = (job.report for job in pool.jobs.active.values())
    return job_counts(jobs, reasons=True) or "no jobs"


async def _ready(scaler: Scaler) -> int:
    """Return how many workers are ready; 0 if the cluster has ended or was closed."""
    if scaler.pool.ended or not scaler.dask.open:
        return 0
    return await scaler.dask.running_workers(scaler.pool.jobs.leaving_workers())


def _check_reachable(scaler: Scaler, n_workers: int) -> None:
    pool = scaler.pool
    closed = None if scaler.dask.open else pool.ended_error()
    for error in (pool.conflict, pool.error, closed):
        if error is not None:
            raise error
    missing, reasons = _missing(scaler, n_workers)
    if missing <= 0:
        return
    refusals = (group.refused for group in pool.groups.values())
    if errors := [*pool.errors, *filter(None, refusals)]:
        raise errors[0]
    if reasons:
        raise InputError(f"waiting for {n_workers} workers, but {'; '.join(reasons)}")
    planned = n_workers - missing
    message = f"waiting for {n_workers} workers, but only {planned} were asked for"
    raise InputError(message, hint="scale() first")


def _missing(scaler: Scaler, n_workers: int) -> tuple[int, list[str]]:
    """Return how many of ``n_workers`` cannot come, and why groups that adapt do not bring them."""
    pool, missing, reasons = scaler.pool, n_workers, []
    for group in sorted(pool.groups.values(), key=lambda group: scaler.dask.adapts(group.name)):
        jobs = max(group.target, len(pool.jobs.counting(group.name)))
        if scaler.dask.adapts(group.name) and group.error is None:  # last: it may bring the rest
            jobs, why_not = possible(pool, group, group.jobs_for(max(0, missing)))
            reasons.append(why_not)
        missing -= jobs * group.size
    return missing, reasons
