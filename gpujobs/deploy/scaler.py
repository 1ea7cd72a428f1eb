"""Keeps the jobs of a pool at a target: submits, removes and replaces whole jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence

from dask.utils import parse_timedelta

from ..clusters.progress import Progress
from ..clusters.report import job_counts
from ..errors import GpujobsError, InputError, RefusedError, UnavailableError
from ..injob.drain import DATA_TIMEOUT
from ..injob.folder import EndKind
from ..text import clock_text, plural
from .daskscheduler import DaskControl
from .group import REFUSAL_TIME, Halt, Scope, WorkerGroup
from .pool import JobPool, in_background
from .pooljobs import EndsTasks, PoolJob

# -- retire the workers of released jobs -----------------------------------------------------------
BAD_NODE_TIME = 300.0
"""Seconds that tasks have on a node that has turned bad."""
LEAVE_INTERVAL = 0.2
"""Seconds between two looks whether workers have left."""


class Retirer:
    """Retires workers, whose jobs are cancelled when they have left."""

    def __init__(self, dask: DaskControl) -> None:
        self._dask = dask
        self._leaving: set[str] = set()
        """Names of the workers that were asked to leave, until they have left or stay after all."""

    async def retire(
        self, names: Iterable[str], why: str = "scale", limit: float | None = None
    ) -> None:
        """Let workers end their tasks and transfer their data; return when they have left.

        Their tasks have ``limit`` seconds.
        """
        asked = frozenset(names)
        self._leaving |= asked
        try:
            if await self._dask.drain(asked, why, limit):
                while self._dask.running and self._connected & asked & self._leaving:
                    await asyncio.sleep(LEAVE_INTERVAL)
        finally:
            self._leaving -= asked

    @property
    def _connected(self) -> frozenset[str]:
        """Names of the connected workers; none if the connection is lost."""
        return self._dask.connected or frozenset()

    async def retire_from_bad_nodes(self, names: Iterable[str]) -> None:
        """Do `retire`, but wait no longer than `BAD_NODE_TIME`: tasks of a failing GPU may hang."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BAD_NODE_TIME + DATA_TIMEOUT):
                await self.retire(names, why="its node is bad", limit=BAD_NODE_TIME)

    async def keep(self, jobs: Sequence[PoolJob]) -> list[PoolJob]:
        """Let jobs stay whose workers are being retired; return those of which all workers stay."""
        names = [name for job in jobs for name in job.report.workers]
        staying = await self._dask.undrain(names)
        kept: list[PoolJob] = []
        others: list[str] = []
        for job in jobs:
            if staying.issuperset(job.report.workers):
                kept.append(job)
                self._leaving.difference_update(job.report.workers)
            else:
                job.way_out = EndsTasks(may_return=False)
                others += job.report.workers
        if others:
            in_background(self._dask.drain(others, "scale", None), "retire")
        return kept

    def retire_late(self, released: Iterable[PoolJob]) -> None:
        """Retire workers that connected after the release of their jobs: they would get tasks."""
        unasked = self._connected - self._leaving
        late = [name for job in released for name in job.report.workers if name in unasked]
        if late:
            in_background(self.retire(late), "retire")


# -- all groups of a pool --------------------------------------------------------------------------
logger = logging.getLogger("gpujobs")

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
        self._looks: set[asyncio.Task[None]] = set()
        """Calls of `refresh` that still wait for the batch scheduler."""
        self._stopped = False
        self._setups: set[str] = set()
        """Failed lines of `setup` that were shown."""
        self._gave_up = False
        """Whether clients were given an error, because no more jobs are submitted."""
        self._logged: dict[str, str] = {}
        """Why fewer jobs of a group were submitted than wanted, by group."""

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
        """Submit or remove jobs until all targets are met; then raise the first error."""
        errors: list[Exception] = []
        async with self._lock:
            if end := self.dask.end_of_scheduler():
                self.pool.end(*end)
            if end or self.pool.halt is not None:  # its last jobs may still count
                raise self.pool.ended_error()
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
                        group.target = self.pool.present(group)
                        group.halt(Scope.SCALE, error)
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
        while not work.done() and not self.pool.unanswered:  # a query or a cancel goes on
            await asyncio.wait([work], timeout=REFRESH_INTERVAL)
        if work.done():
            return work.result()
        message = "%s: the batch scheduler does not respond; the jobs are submitted when it does"
        logger.warning(message, self.pool.id)
        in_background(self._finish(work, wanted), self.pool.id)

    async def _finish(self, work: Awaitable[None], wanted: Mapping[WorkerGroup, int]) -> None:
        try:
            await work
        except UnavailableError:
            for group, jobs in wanted.items():
                halt = group.halts.get(Scope.SCALE)
                if halt and isinstance(halt.error, UnavailableError):
                    group.target = jobs
                    del group.halts[Scope.SCALE]
            self.watch_soon()
        except Exception as error:
            logger.error("%s: %s", self.pool.id, error)

    async def _reach_target(self, group: WorkerGroup) -> None:
        counting = self.pool.jobs.counting(group.name)
        if len(counting) > group.most:
            await self._remove(group, len(counting) - group.most, counting)
        if len(counting) >= group.target or self.pool.stopped(group):  # or another one is scaled
            return
        await self._take_back(group)
        present = self.pool.present(group)
        missing = group.target - present
        if missing <= 0:
            return
        if self.pool.unanswered:
            message = "a submission got no reply, and its jobs may still be accepted"
            raise UnavailableError(message, hint="try again in two minutes")
        # Jobs that are about to leave count for the limits: their successors may have to wait.
        leaving = self.pool.jobs.occupied()[group.name] - present
        count = max(missing - leaving, min(missing, self.pool.room(group)))
        try:
            if count > 0:
                await self.pool.submit(group, count)
        finally:
            self.watch_soon()

    async def _take_back(self, group: WorkerGroup) -> None:
        """Let jobs stay that are about to leave, as far as jobs of a group are missing."""
        missing = group.target - self.pool.present(group)
        if missing <= 0:
            return
        connected = self.dask.connected or frozenset()
        found = self.pool.jobs.returnable(group.name, self.pool.system.monotonic())
        found = [job for job in found if connected.issuperset(job.report.workers)][:missing]
        if found and (kept := await self._retirer.keep(found)):
            await self.pool.take_back(kept)
            self.dask.log(f"{self.pool.id}: {plural(len(kept), 'job')} that began to leave stays")

    async def _remove_surplus(self) -> None:
        """Remove jobs above the targets.

        They were found after the call that wanted them has failed, or were requeued when their
        successors had been submitted.
        """
        async with self._lock:
            for group in self.pool.groups.values():
                if self.pool.present(group) > group.target:
                    await self._reach_target(group)

    async def _remove(self, group: WorkerGroup, count: int, counting: Sequence[PoolJob]) -> None:
        busy = any(job.report.connected for job in counting)
        load = (await self.dask.load() if busy else None) or {}
        chosen = self.pool.jobs.cheapest(group.name, count, load)
        await self.pool.remove(chosen, self._retirer.retire)

    async def release(self, workers: Collection[str]) -> None:
        """Remove the jobs whose workers are all among ``workers``, and still idle."""
        async with self._lock:
            load = await self.dask.load()
            if load is None:  # they may be busy
                return
            idle = {name for name in workers if not load.get(name)}
            chosen = [
                job
                for job in self.pool.jobs.counting()
                if idle.issuperset(job.report.workers) and not job.report.head
            ]
            await self.pool.remove(chosen, self._retirer.retire)

    def set_demand(self, group: str, jobs: int, maximum: int) -> None:
        """Want ``jobs`` jobs of a group; those above stay, up to ``maximum``, until released."""
        self.pool.groups[group].target = jobs
        self.pool.groups[group].maximum = maximum
        self.pool.lower_targets()  # otherwise each second writes two targets
        self.pool.write_groups()

    async def grow(self, name: str, workers: int) -> None:
        """Raise a target for `adapt`, as far as possible; failures are not forgotten."""
        pool, group = self.pool, self.pool.groups[name]
        if not pool.stopped(group):
            group.target, why_not = pool.possible(group, group.jobs_for(workers))
            self._log_once(group, why_not)
            await self._replace(group)
            pool.write_groups()
        self.watch_soon()

    # -- replace, as far as the batch scheduler accepts jobs ---------------------------------------
    async def _replace(self, group: WorkerGroup) -> None:
        """Submit the jobs that are missing, as far as possible, unless too many have failed."""
        pool = self.pool
        async with self._lock:
            await self._take_back(group)
            if pool.missing(group) <= 0:
                return
            if not await pool.recover():
                group.pause()
            alive, missing = pool.present(group), pool.missing(group)
            if missing <= 0 or pool.unanswered:
                return
            if not group.failures.exhausted(missing, alive):
                await self._submit_possible(group, missing)
            if group.failures.exhausted(missing, alive):
                group.stop_submitting(pool.jobs.past)
                group.target = pool.present(group)

    async def _submit_possible(self, group: WorkerGroup, count: int) -> None:
        pool, before = self.pool, self.pool.present(group)
        try:
            error = await self._submit_what_fits(group, count)
        except UnavailableError as unavailable:
            logger.warning("%s: %s", pool.id, unavailable)
            group.pause()
            return
        if error is None:
            return
        accepted, occupied = pool.present(group), pool.jobs.occupied()[group.name]
        if occupied > accepted:  # there may be room when those that leave have left
            group.halt(Scope.NUMBER, error, occupied, REFUSAL_TIME)
        elif self.dask.adapts(group.name) and accepted:
            group.halt(Scope.NUMBER, error, accepted, REFUSAL_TIME)
            group.target = accepted
        elif accepted == before:
            group.failed(error=error)
        self._log_once(group, f"{accepted - before} of {plural(count, 'job')} accepted: {error}")

    async def _submit_what_fits(self, group: WorkerGroup, count: int) -> GpujobsError | None:
        """Submit up to ``count`` jobs in few submissions; return why not all were accepted."""
        error = await self._try(group, count)
        if error is None or count == 1 or await self._try(group, 1) is not None:
            return error  # if one job is refused, so are all
        left, size = count - 1, count // 2
        while size:
            if left >= size and await self._try(group, size) is None:
                left -= size
            else:
                size //= 2
        return error

    async def _try(self, group: WorkerGroup, count: int) -> GpujobsError | None:
        try:
            await self.pool.submit(group, count)
        except (RefusedError, InputError) as error:
            return error
        return None

    def _log_once(self, group: WorkerGroup, why_not: str) -> None:
        """Log why fewer jobs are submitted than wanted; the same reason only once."""
        reason = why_not.removeprefix(group.label).partition(": ")[2]
        if reason and reason != self._logged.get(group.name):
            self.dask.log(f"{self.pool.id}: {why_not}")
            self._logged[group.name] = reason

    # -- watch -------------------------------------------------------------------------------------
    def watch_soon(self) -> None:
        """Start the task that watches the jobs, unless it runs; it ends when there are none."""
        if not self._stopped and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch(), name="gpujobs-watch")

    def stop(self) -> None:
        """Stop watching, also for callers of `refresh`; both do nothing from then on."""
        self._stopped = True
        for task in filter(None, (self._watching, *self._looks)):
            if task is not asyncio.current_task():
                task.cancel()

    async def update(self) -> None:
        """Query the batch scheduler now, unless its answers are new; wait a moment for it."""
        pool = self.pool
        due = pool.record.submissions and pool.monitor.age >= pool.record.poll
        if due and self.dask.open:
            pool.query_soon(0)
            await self.refresh()

    async def refresh(self) -> None:
        """Take in the present state of all jobs; wait a moment if the batch scheduler is away."""
        if self._stopped:
            return
        look = asyncio.create_task(self._try_refresh(), name="gpujobs-look")
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)
        await asyncio.wait([look], timeout=UPDATE_TIMEOUT)

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
        return any(group.target > 0 and not pool.stopped(group) for group in pool.groups.values())

    async def _try_refresh(self) -> None:
        try:
            async with self._refreshing:
                await self._refresh()
        except (GpujobsError, OSError) as error:
            logger.warning("%s: %s", self.pool.id, error)

    async def _refresh(self) -> None:
        pool, had_conflict, known = self.pool, self.pool.conflict, self.pool.halts()
        if end := self.dask.end_of_scheduler():
            pool.end(*end)
        async with self._lock:  # no job is taken back between the answer and its use
            if found := await self.dask.drained():
                pool.jobs.drained, pool.jobs.task_time = found
        for job in await pool.refresh(self.dask.connected, self._lock):
            when = " before its workers connected" if job.in_vain else ""
            self.dask.log(f"job {job.id} of {pool.id} ended{when}: {job.reason or 'released'}")
        self._note_setups()
        self._retirer.retire_late(pool.jobs.released.values())
        await self._leave_bad_nodes()
        await self._remove_surplus()
        if pool.conflict is not None and had_conflict is None:
            logger.error("%s: %s", pool.id, pool.conflict)
        if self.dask.open:
            for group in pool.groups.values():
                await self._replace(group)
        pool.lower_targets()
        pool.write_groups()
        for halt in pool.halts():
            if halt.stops and halt not in known:
                self._report(halt)
        await self._fail_clients()

    async def _leave_bad_nodes(self) -> None:
        """Let the jobs leave whose nodes have turned bad; they are replaced as lost ones are."""
        async with self._lock:
            leaving = await self.pool.on_bad_nodes()
            retire = self._retirer.retire_from_bad_nodes
            await self.pool.remove(leaving, retire, bad_node=True)

    async def _fail_clients(self) -> None:
        """Fail what clients wait for if no job has workers, and none will be submitted."""
        pool = self.pool
        working = any(job.report.workers for job in pool.jobs.active.values())
        if pool.errors and not (
            self._gave_up or working or self._wants_jobs() or pool.cluster_ended
        ):
            self._gave_up = True
            await self.dask.give_up(pool.errors[0])

    def _note_setups(self) -> None:
        """Show each line of `setup` that failed in a job, once."""
        found = self.pool.folder_state.failed_setups
        for text in sorted(found - self._setups):
            self.dask.log(f"setup: {text}")
        self._setups |= found

    def _report(self, halt: Halt) -> None:
        """Log once why no more jobs are submitted."""
        ended = self.pool.folder_state.ended
        if ended is not None:
            self.dask.disconnect()
        if ended is not None and ended.kind in (EndKind.IDLE, EndKind.SHUTDOWN):
            self.dask.log(str(halt.error))
        else:
            logger.error("%s", halt.text)  # who waits gets all of it


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
                waited = f"{deadline - started:g} s"
                raise TimeoutError(
                    f"{found} of {plural(n_workers, 'worker')} after {waited}: {jobs}"
                )
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
    if scaler.pool.cluster_ended or not scaler.dask.open:
        return 0
    return await scaler.dask.running_workers(scaler.pool.jobs.leaving_workers())


def _check_reachable(scaler: Scaler, n_workers: int) -> None:
    pool = scaler.pool
    if pool.conflict is not None:
        raise pool.conflict
    if pool.halt is not None or not scaler.dask.open:
        raise pool.ended_error()
    missing, reasons = _missing(scaler, n_workers)
    if missing <= 0:
        return
    for halt in pool.halts():
        if halt.scope <= Scope.SCALE and halt.error:
            raise halt.error
    if reasons:
        raise InputError(f"waiting for {plural(n_workers, 'worker')}, but {'; '.join(reasons)}")
    planned = n_workers - missing
    message = f"waiting for {plural(n_workers, 'worker')}, but only {planned} were asked for"
    raise InputError(message, hint="scale() first")


def _missing(scaler: Scaler, n_workers: int) -> tuple[int, list[str]]:
    """Return how many of ``n_workers`` cannot come, and why groups that adapt do not bring them."""
    pool, missing, reasons = scaler.pool, n_workers, []
    for group in sorted(pool.groups.values(), key=lambda group: scaler.dask.adapts(group.name)):
        jobs = max(group.target, len(pool.jobs.counting(group.name)))
        if scaler.dask.adapts(group.name) and not pool.stopped(
            group
        ):  # last: it may bring the rest
            jobs, why_not = pool.possible(group, group.jobs_for(max(0, missing)))
            reasons.append(why_not)
        missing -= jobs * group.size
    return missing, reasons
