"""The jobs of a cluster that this process owns: submit, remove and replace them.

Knows nothing of dask's classes. `ClusterMonitor` judges the jobs; this module decides what follows.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ..batch.client import SchedulerClient
from ..batch.process import HOST, System
from ..clusters import badnodes, scale
from ..clusters import clusterfolder as folders
from ..clusters.folderstate import FolderState, read_state
from ..clusters.ledger import ClusterRecord, Ledger, Submission
from ..clusters.monitor import ClusterMonitor, client_of, job_error, recover_submission, with_log
from ..clusters.report import ClusterReport, JobPhase, JobReport, ended_message
from ..clusters.resize import add_jobs, limits_of, note_removed, note_returned, plan_of_more
from ..clusters.submit import FAILED, array_limit, new_record, with_avoided
from ..config.spec import ClusterSpec
from ..errors import GpujobsError, InputError, JobFailedError, NoSuchClusterError, RefusedError
from ..injob.folder import EndKind
from ..injob.gpus import shared_gpu_message
from ..injob.names import HEAD
from ..planning.limits import exceeded, most_allowed
from ..planning.plan import JobGroup, Plan
from ..planning.render import JobRoles, can_avoid, render_jobs
from ..schedulers import JobState
from ..text import plural
from .group import Halt, Scope, WorkerGroup, count_ends
from .pooljobs import Cancelled, EndsTasks, PoolJob, PoolJobs

# -- cancel jobs until the batch scheduler no longer has them --------------------------------------
CLOSE_TIMEOUT = 12.0
"""Seconds for which closing waits for a batch scheduler that is away; the jobs then exit alone."""

logger = logging.getLogger("gpujobs")
_background: set[asyncio.Task[None]] = set()
"""A task without a reference may be collected."""


def in_background(work: Awaitable[object], name: str) -> None:
    """Do ``work`` of the cluster ``name`` in a task; an error is logged."""

    async def run() -> None:
        try:
            await work
        except GpujobsError as error:
            logger.warning("%s: %s", name, error)

    task = asyncio.ensure_future(run())
    _background.add(task)
    task.add_done_callback(_background.discard)


class Canceller:
    """Cancels jobs of the cluster ``name``. Those in `PoolJobs.released` are cancelled again."""

    def __init__(self, client: SchedulerClient, name: str, jobs: PoolJobs) -> None:
        self._client = client
        self._name = name
        self._jobs = jobs

    async def cancel(self, jobs: Collection[PoolJob]) -> None:
        """Cancel jobs. Raises RefusedError or UnavailableError."""
        now = self._client.system.monotonic()
        for job in jobs:
            before = job.way_out if isinstance(job.way_out, Cancelled) else Cancelled()
            job.way_out = before.once_more(now)
        ids = [job.report.job for job in jobs]
        cancelled = set(ids)
        others = [job for job in self._jobs.present_ids() if job not in cancelled]
        await asyncio.to_thread(self._client.cancel, ids, [self._name], others)

    def cancel_soon(self, jobs: Collection[PoolJob]) -> None:
        """Do `cancel` in the background; an error is logged."""
        if jobs:
            in_background(self.cancel(jobs), self._name)

    def repeat(self, now: float) -> None:
        """Cancel again the released jobs that the batch scheduler still has."""
        due = []
        for job in self._jobs.released.values():
            if isinstance(job.way_out, Cancelled) and now >= job.way_out.again:
                due.append(job)
        self.cancel_soon(due)


# -- the pool --------------------------------------------------------------------------------------
WORKERS = JobRoles(scheduler=False, workers=True, run=False, replaces="owner")
LOST_TIMEOUT = 60.0
"""Seconds after which a running job whose workers have disconnected is cancelled."""
QUERY_DELAY = 1.0
"""Seconds between a change and the query for it."""

Retire = Callable[[Sequence[str]], Awaitable[None]]
"""Closes the workers of these names after they have transferred their data."""

_KIND_OF_HEAD = {JobState.CANCELLED: EndKind.CANCELLED, JobState.TIMEOUT: EndKind.WALLTIME}
"""Why a cluster has ended if its head ended in this state; else it has failed."""


class JobPool:
    """The jobs of a cluster that this process owns. Blocking calls run in threads."""

    def __init__(
        self, spec: ClusterSpec, plan: Plan, ledger: Ledger, system: System = HOST
    ) -> None:
        self.system = system
        self.plan = plan
        self.ledger = ledger
        self._failures = badnodes.FailuresReader(ledger)
        self.id = ledger.new_id(plan.name)
        self.record: ClusterRecord = new_record(plan, self.id, "owner")
        self.groups = {group.group: WorkerGroup(group, system) for group in plan.groups}
        walltimes = {group.group: group.walltime for group in plan.groups}
        self.jobs = PoolJobs(walltimes, plan.profile.start_timeout)
        self.halt: Halt | None = None
        """Why no group gets more jobs: the cluster has ended."""
        self.conflict: Exception | None = None
        """Two workers share a GPU."""
        self.report: ClusterReport | None = None
        self.unanswered = False
        """A submission got no reply, and its jobs may be accepted all the same."""
        self._limit: int | None = None
        self._plan = plan
        """With the bad nodes that new jobs avoid."""
        self._site_folder = spec.site.path.parent
        self._next_number = 0
        self._closing = threading.Event()
        self._client = client_of(self.record, stopping=self._closing.is_set, system=system)
        self.monitor = ClusterMonitor(
            [self.record], ledger, stopping=self._closing.is_set, system=system
        )
        self._canceller = Canceller(self._client, self.id, self.jobs)

    @property
    def cluster_ended(self) -> bool:
        """Whether the whole cluster has ended."""
        return self.report is not None and self.report.folder.ended is not None

    @property
    def folder_state(self) -> FolderState:
        """The state of the cluster's folder at the last refresh."""
        return self.report.folder if self.report else FolderState()

    @property
    def may_have_jobs(self) -> bool:
        """Whether the batch scheduler may have a job of the cluster, or have had one."""
        try:
            record = self.ledger.get(self.id)
        except NoSuchClusterError:  # it failed before
            return False
        return self.unanswered or bool(record.submissions) or record.intent is not None

    # -- may a group get more jobs -----------------------------------------------------------------
    def halts(self, group: WorkerGroup | None = None) -> list[Halt]:
        """Return why a group gets no more jobs now, or any group; the first is the reason."""
        groups = self.groups.values() if group is None else [group]
        found = [halt for group in groups for halt in group.present_halts]
        return sorted([*filter(None, [self.halt]), *found], key=lambda halt: halt.scope)

    def stopped(self, group: WorkerGroup) -> bool:
        """Return whether no more jobs of a group are submitted."""
        return any(halt.stops for halt in self.halts(group))

    @property
    def errors(self) -> list[Exception]:
        """Why no more jobs are submitted, of the whole cluster or of some groups."""
        return [halt.error for halt in self.halts() if halt.stops and halt.error]

    def present(self, group: WorkerGroup) -> int:
        """Return how many jobs of a group count towards its target."""
        return len(self.jobs.counting(group.name))

    def missing(self, group: WorkerGroup) -> int:
        """Return how many jobs of a group are to be submitted now, as far as may be."""
        return min(group.target - self.present(group), self.room(group))

    def room(self, group: WorkerGroup) -> int:
        """Return how many more jobs may be submitted now; jobs that leave count until they end."""
        occupied = self.jobs.occupied()
        halts = [*self.halts(group), *self._limits(group, sys.maxsize, occupied)]
        most = [halt.jobs for halt in halts]
        if group.maximum is not None:
            most.append(group.maximum)
        return min(most, default=sys.maxsize) - occupied[group.name]

    def possible(self, group: WorkerGroup, jobs: int) -> tuple[int, str]:
        """Return how many of ``jobs`` jobs of a group are possible, and why not all, or ""."""
        halts = [*self._limits(group, jobs, self.jobs.numbers()), *group.present_halts]
        for halt in halts:
            if halt.scope is Scope.NUMBER and halt.jobs < jobs:
                label = "" if group.label in halt.text else group.label
                return halt.jobs, f"{label}{plural(halt.jobs, 'job')} of {jobs}: {halt.text}"
        return jobs, ""

    def _limits(self, group: WorkerGroup, jobs: int, numbers: Mapping[str, int]) -> Iterator[Halt]:
        """Yield the limits below ``jobs`` jobs; ``numbers``: of the jobs of each group."""
        limits = limits_of(self.plan, self.record, group.name, numbers)
        if limit := exceeded(limits, jobs):
            yield Halt(Scope.NUMBER, InputError(limit.rule), most_allowed(limits) or 0)
        devices, gpus = len(self.plan.devices), group.jobs.shape.gpus
        if devices and gpus:
            free = devices - len(self.jobs.devices(but=group.name))
            reason = f"this machine has {plural(devices, 'free GPU')}"
            yield Halt(Scope.NUMBER, InputError(reason), free // gpus)

    def latest(self, connected: Iterable[str] | None) -> list[JobReport]:
        """Return the active jobs as they are now, then the past ones, newest first."""
        if not self.record.submissions:
            return self.jobs.reports()
        return self.jobs.latest(self.monitor.latest(connected).jobs)

    # -- submit ------------------------------------------------------------------------------------
    async def submit(self, group: WorkerGroup, count: int) -> None:
        """Submit ``count`` jobs of a group as one array, or as few arrays as the site allows."""
        if self.cluster_ended:
            raise self.ended_error()
        numbers = self.jobs.numbers()
        numbers[group.name] += count
        self._plan = await asyncio.to_thread(
            plan_of_more, self.plan, self.record, group.name, numbers, self._client, self.ledger
        )
        limit = await self._array_limit(count)
        await self._submit(group.jobs, WORKERS, count, self._free_devices(group.jobs, count), limit)

    async def submit_head(self) -> PoolJob:
        """Submit the job of the dask scheduler: one of its own shape, or the first worker job."""
        self._plan = await asyncio.to_thread(
            with_avoided, self.plan, self._client, self.ledger, self.id
        )
        jobs = next(jobs for jobs in self.plan.all_jobs if self.plan.may_be_head(jobs))
        workers = self.plan.head is None
        roles = JobRoles(scheduler=True, workers=workers, run=False, replaces="owner")
        devices = self._free_devices(jobs, 1) if workers else ()
        number = self._next_number
        await self._submit(jobs, roles, 1, devices)
        if number not in self.jobs.active:
            raise self.ended_error()
        job = self.jobs.active[number]
        job.report = replace(job.report, head=True)
        return job

    def next_script(self, group: str | None) -> str:
        """Return the script of the next job of a group; None: of the first one."""
        jobs = self.plan.groups[0] if group is None else self.plan.group(group)
        (script,) = render_jobs(
            self._plan, self.id, jobs, WORKERS, self._next_number, 1, site_folder=self._site_folder
        )
        return script.text

    async def _array_limit(self, count: int) -> int | None:
        """Return the most jobs of one array; the batch scheduler is queried once."""
        if count > 1 and self._limit is None:
            self._limit = await asyncio.to_thread(array_limit, self.plan, self._client, count)
        return self._limit

    def _free_devices(self, group: JobGroup, count: int) -> tuple[str, ...]:
        """Return GPUs of this machine for ``count`` jobs; none with a batch scheduler.

        Raises RefusedError if too few are free.
        """
        if not self.plan.devices or self.plan.site.machines:  # whose only job has all
            return self.plan.devices
        used = self.jobs.devices()
        free = [device for device in self.plan.devices if device not in used]
        wanted = count * group.shape.gpus_per_node
        if len(free) < wanted:
            total = len(self.plan.devices)
            raise RefusedError(
                f"{wanted} more GPUs wanted; {len(free)} of this machine's {total} are free"
            )
        return tuple(free[:wanted])

    async def _submit(
        self,
        group: JobGroup,
        roles: JobRoles,
        count: int,
        devices: tuple[str, ...],
        limit: int | None = None,
    ) -> None:
        numbers = range(self._next_number, self._next_number + count)
        self._next_number = numbers.stop
        added = add_jobs(
            self._plan,
            self.record,
            group,
            roles,
            numbers,
            self._client,
            self.ledger,
            limit=limit,
            devices=devices,
            site_folder=self._site_folder,
        )
        self.unanswered = True
        try:
            while (record := await asyncio.to_thread(self._send_next, added)) is not None:
                self.record = record
                self._add(record.submissions[-1])
        except (InputError, RefusedError):
            self.unanswered = False  # this is the answer
            raise
        self.unanswered = False
        self.query_soon()

    def _send_next(self, added: Iterator[ClusterRecord]) -> ClusterRecord | None:
        """Submit the next of the arrays ``added``; return the record.

        None: all were submitted, or the cluster was closed. Then an array whose reply came later is
        cancelled, in the thread of its submission: the event loop may have ended.
        """
        if self._closing.is_set():
            return None
        try:
            record = next(added, None)
        finally:
            if self._closing.is_set():
                self._cancel_all()
        return None if self._closing.is_set() else record

    def _add(self, submission: Submission) -> None:
        """Add the jobs of a submission that was accepted now."""
        now = self.system.monotonic()
        jobs = next(jobs for jobs in self.plan.all_jobs if jobs.group == submission.group)
        workers = submission.group != HEAD
        for number, job in submission.jobs.items():
            names = self.plan.job_worker_names(self.id, number, jobs) if workers else []
            report = JobReport(
                number=number,
                job=job,
                phase=JobPhase.WAITING,
                state=JobState.UNKNOWN,
                unseen=True,
                group=jobs.group if workers else "",
                workers=tuple(names),
                id=self.plan.scheduler.show_id(job),
            )
            self.jobs.add(PoolJob(report, now, devices=submission.devices_of(number)))

    async def recover(self) -> bool:
        """Add the jobs of a submission without a reply; return whether its outcome is known.

        Until then nothing is to be submitted: a second submission would replace the intent.
        """
        if not self.unanswered:
            return True

        def recover() -> ClusterRecord:
            record = self.ledger.get(self.id)
            return recover_submission(record, self.ledger, at_once=True, system=self.system)

        self.record = await asyncio.to_thread(recover)
        self._adopt(self.record)
        return not self.unanswered

    def _adopt(self, record: ClusterRecord) -> None:
        """Add the jobs of submissions that were found again."""
        for submission in record.submissions:
            if not self.jobs.knows(submission.first):
                self._add(submission)
        self.unanswered = self.unanswered and record.intent is not None

    # -- remove ------------------------------------------------------------------------------------
    async def remove(
        self, jobs: Sequence[PoolJob], retire: Retire, *, bad_node: bool = False
    ) -> None:
        """Remove jobs. Those with workers are cancelled when ``retire`` has let these leave.

        That may take as long as their tasks: it goes on in the background. ``bad_node``: their
        nodes are bad, so that they are not taken back.
        """
        if not jobs:
            return
        reason = "its node is bad" if bad_node else "removed"
        leaving = [job for job in jobs if job.report.connected]
        others = [job for job in jobs if not job.report.connected]
        for job in leaving:  # first of all, so that they are not replaced
            self.jobs.release(job, JobPhase.LEAVING, reason, EndsTasks(may_return=not bad_node))
        for job in others:
            self.jobs.release(job, JobPhase.LEAVING, reason, Cancelled())
        reports = [job.report for job in jobs]
        self.record = await asyncio.to_thread(note_removed, self.record, reports, self.ledger)
        if leaving:
            in_background(self._cancel_later(leaving, retire), self.id)
        self.query_soon()
        if others:
            await self._canceller.cancel(others)

    async def _cancel_later(self, jobs: Sequence[PoolJob], retire: Retire) -> None:
        """Cancel jobs when their workers have left; most have ended by then."""
        await retire([name for job in jobs for name in job.report.connected])
        if not self._closing.is_set():
            self.query_soon()
            left = [job for job in jobs if isinstance(job.way_out, EndsTasks)]  # others stay
            if left:
                await self._canceller.cancel(left)

    async def take_back(self, jobs: Sequence[PoolJob]) -> None:
        """Count jobs again that were removed, and whose workers stay after all."""
        for job in jobs:
            self.jobs.take_back(job)
        reports = [job.report for job in jobs]
        self.record = await asyncio.to_thread(note_returned, self.record, reports, self.ledger)

    async def on_bad_nodes(self) -> list[PoolJob]:
        """Return the running jobs with GPUs on nodes that have turned bad since, and log why.

        Only of groups whose jobs are replaced, by ones that can avoid these nodes.
        """
        if not can_avoid(self.plan):
            return []
        replaced = [group for group in self.groups.values() if not self.stopped(group)]
        with_gpus = [group for group in replaced if group.jobs.shape.gpus]
        jobs = [job for group in with_gpus for job in self.jobs.counting(group.name)]
        reports = [job.report for job in jobs if job.report.connected and not job.report.head]
        if not reports:
            return []
        found = await asyncio.to_thread(self._failures.read)
        bad = badnodes.turned_bad(reports, found, self.id)
        leaving = [job for job in jobs if job.report.number in bad]
        for job in leaving:
            failure = bad[job.report.number]
            message = "%s: job %s leaves node %s, which is bad: %s"
            logger.warning(message, self.id, job.report.id, failure.node, failure.reason)
        return leaving

    def end(self, kind: EndKind, reason: str) -> None:
        """Write `ended`: every job that finds it exits."""
        code = FAILED if kind is EndKind.FAILED else 0
        folders.end(self.record.path, kind, code, reason)

    def end_jobs(self) -> asyncio.Future[None]:
        """Start `end_all` at once, in a thread of its own: those of the program may all be busy."""
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "gpujobs-close")
        try:
            return loop.run_in_executor(thread, self.end_all)
        except RuntimeError:  # Python is exiting, and starts no threads any more
            self.end_all()
            done = loop.create_future()
            done.set_result(None)
            return done
        finally:
            thread.shutdown(wait=False)

    def end_all(self) -> None:
        """Cancel all jobs; those that cannot be cancelled now find `ended` and exit."""
        self._closing.set()
        for job in list(self.jobs.active.values()):
            self.jobs.release(job, JobPhase.ENDED, "the cluster was closed", Cancelled())
        self.end(EndKind.CLOSED, "closed by its owner")
        self._cancel_all()

    def _cancel_all(self) -> None:
        """Cancel all submissions, also one whose reply has not come: it is looked for."""
        record = self.ledger.get(self.id)
        try:
            scale.cancel(record, self.ledger, timeout=CLOSE_TIMEOUT, system=self.system)
        except GpujobsError as error:
            logger.warning("%s was closed, but %s; its jobs exit by themselves", self.id, error)

    def write_groups(self) -> None:
        """Write into the ledger how many workers are wanted, and why groups get no more jobs."""
        present = self.jobs.numbers(counting=True)
        groups = tuple(
            self.groups[item.name].as_record(item, present[item.name])
            for item in self.record.groups
        )
        if groups != self.record.groups:
            self.record = self._update(groups=groups)

    def lower_targets(self) -> None:
        """Of groups that get no more jobs: want no more than there are."""
        numbers = self.jobs.numbers(counting=True)
        for group in self.groups.values():
            if self.stopped(group):
                group.target = min(group.target, numbers[group.name])

    def _update(self, **changes: object) -> ClusterRecord:
        return self.ledger.update(self.id, **changes)

    # -- watch -------------------------------------------------------------------------------------
    def query_soon(self, seconds: float = QUERY_DELAY) -> None:
        """Something has changed: query the batch scheduler at the next refresh."""
        self.monitor.query_soon(seconds)

    async def refresh(
        self, connected: frozenset[str] | None, lock: asyncio.Lock
    ) -> list[JobReport]:
        """Take in a new report; return the jobs that have ended since the last one.

        ``connected``: the names of the workers that dask reports, None if that is unknown.
        ``lock``: held while jobs are judged: one that is being removed is not to be replaced.
        """
        report = self.report = await asyncio.to_thread(self.monitor.report, connected)
        now = self.system.monotonic()
        async with lock:
            record = report.record
            if self.unanswered:  # this submission may have begun after the report
                record = self.record = await asyncio.to_thread(self.ledger.get, self.id)
            self._adopt(record)
            changed = self.jobs.update(report, now)
            ended: list[PoolJob] = []
            others: list[PoolJob] = []
            for job in self.jobs.active.values():
                (ended if self._has_ended(job, now) else others).append(job)
            count_ends(self.groups, others, ended, now)
            reports = [self._finish(job, now) for job in ended]
        if changed:
            self.query_soon()
        self._canceller.repeat(now)
        self._check_cluster(report)
        return reports

    def _has_ended(self, job: PoolJob, now: float) -> bool:
        if job.away(now) > LOST_TIMEOUT:
            return not job.report.head  # which ends by itself, or is seen to have ended
        return not job.report.active

    def _finish(self, job: PoolJob, now: float) -> JobReport:
        """Move a job that has ended to the past ones; `Canceller.repeat` ends it in the queue."""
        report = job.report
        reason = report.reason or report.state.value
        if report.lacks_workers:
            reason = "it runs, but its workers disconnected"
        elif report.in_vain:
            job.report = with_log(self.record, report)
        elif not job.steady(now) and (why := job_error(self.record, report)):
            reason = f"{reason}: {why}"
        if report.head:  # which may have written why
            kind = _KIND_OF_HEAD.get(report.state, EndKind.FAILED)
            self.end(kind, f"the dask scheduler's job {report.id} ended: {reason}")
        if not report.in_queue:
            return self.jobs.finish(job, JobPhase.ENDED, reason)
        return self.jobs.release(job, JobPhase.ENDED, reason, Cancelled())

    def _check_cluster(self, report: ClusterReport) -> None:
        """Note why no more jobs are to be submitted."""
        if message := shared_gpu_message(report.folder.dask.connected):
            hint = "two jobs were given the same GPU: contact the support of the site"
            self.conflict = JobFailedError(message, hint=hint)
        if self.cluster_ended and not self._closing.is_set() and self.halt is None:
            self.halt = Halt(Scope.CLUSTER, self.ended_error())
            jobs = self.jobs.active.values()
            self._canceller.cancel_soon([job for job in jobs if job.report.waits])

    def ended_error(self) -> JobFailedError:
        """Return the error of a cluster that has ended or was closed."""
        if self.report is not None and self.cluster_ended:
            return JobFailedError(ended_message(self.id, self.report.reason))
        ended = read_state(self.record.path).ended  # written since the last report
        return JobFailedError(ended_message(self.id, ended.reason if ended else "it was closed"))
