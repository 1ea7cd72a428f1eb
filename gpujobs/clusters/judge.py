"""The one judge of submitted clusters.

A record, the state of the cluster's folder and the batch scheduler's answers go in, a
`ClusterReport` comes out. Pure: no process, no clock, no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import InputError
from ..injob.folder import Ended, EndKind, all_gpus
from ..injob.jobevents import ExitRecord
from ..injob.names import HEAD
from ..schedulers import NOT_LISTED, JobId, JobState, JobStatus, Scheduler, get_scheduler
from .folderstate import FolderState
from .ledger import ClusterRecord, Submission
from .report import (
    ClusterReport,
    ClusterState,
    JobPhase,
    JobReport,
    WorkerGpu,
    gone_jobs,
    has_all_workers,
    reasons_text,
)

OWNER_GONE = "the Python process that owned it is gone"


# -- the state of a whole cluster, from those of its jobs; a part of `judge` -----------------------
_STATE_OF_KIND = {
    EndKind.DONE: ClusterState.DONE,
    EndKind.IDLE: ClusterState.DONE,
    EndKind.CLOSED: ClusterState.DONE,
    EndKind.SHUTDOWN: ClusterState.DONE,
    EndKind.CANCELLED: ClusterState.CANCELLED,
    EndKind.WALLTIME: ClusterState.FAILED,
    EndKind.FAILED: ClusterState.FAILED,
}


def current_attempt(folder: FolderState, jobs: tuple[JobReport, ...]) -> int:
    """Return which start of the cluster this is; after its end, that of the last head."""
    if folder.ended is not None:
        return next((job.attempt for job in jobs if job.number == folder.head), 1)
    last = max((job.attempt for job in jobs), default=1)
    return min((job.attempt for job in jobs if job.active), default=last)


def cluster_state(
    record: ClusterRecord,
    folder: FolderState,
    jobs: tuple[JobReport, ...],
    connected: frozenset[str],
    *,
    owner_lives: bool,
    gone_owner: str = "",
) -> tuple[ClusterState, str]:
    """Return the state of a cluster and its reason.

    ``jobs``: of the current attempt. ``connected``: names of its workers. See `judge` for the
    others.
    """
    if folder.ended is not None:
        return _state_of(folder.ended), _end_reason(folder.ended, jobs)
    if gone_owner:  # its jobs are about to end by themselves
        return ClusterState.FAILED, f"{OWNER_GONE}: {gone_owner}"
    if record.intent is not None and not jobs:
        return ClusterState.PENDING, "being submitted"
    if record.unseen and not jobs:
        return ClusterState.PENDING, "no job has started: they wait, or are not submitted"
    if not any(job.active for job in jobs):
        return _without_jobs(record, folder, jobs, owner_lives=owner_lives)
    present = [job for job in jobs if job.active and job.phase is not JobPhase.LEAVING]
    if present and all(job.suspended for job in present):
        return ClusterState.SUSPENDED, "all its jobs are suspended"
    if connected and has_all_workers(record, jobs):
        return ClusterState.RUNNING, _suspended(jobs)
    started = any(job.number == folder.head or job.state is JobState.RUNNING for job in jobs)
    if not started:
        if folder.waits_for:
            return ClusterState.PENDING, f"waits for {folder.waits_for}"
        return ClusterState.PENDING, _waiting(record, jobs)
    state = ClusterState.RUNNING if connected else ClusterState.STARTING
    return state, _waiting(record, jobs)


def _without_jobs(
    record: ClusterRecord, folder: FolderState, jobs: tuple[JobReport, ...], *, owner_lives: bool
) -> tuple[ClusterState, str]:
    """Return the state of a cluster that no job of ``jobs`` is active for, and its reason."""
    if owner_lives:  # which may submit others
        state = ClusterState.RUNNING if folder.dask.address else ClusterState.STARTING
        lost = tuple(job for job in jobs if job.number not in record.removed)
        return state, f"no jobs{_first_failure(lost)}"
    silent = folder.removed or folder.refused  # nothing there tells of the owner
    if record.replaces == "owner" and not silent:
        return ClusterState.FAILED, f"{OWNER_GONE}{_first_failure(jobs)}"
    return _all_ended(jobs, removed=folder.removed)


def _state_of(ended: Ended) -> ClusterState:
    if ended.kind is EndKind.IDLE and ended.exit_code:  # `run` was stopped
        return ClusterState.FAILED
    return _STATE_OF_KIND[ended.kind]


def _all_ended(jobs: tuple[JobReport, ...], *, removed: bool) -> tuple[ClusterState, str]:
    states = sorted({job.state.value for job in jobs})
    if removed and states == ["COMPLETED"]:
        return ClusterState.DONE, "its folder was removed"
    state = ClusterState.CANCELLED if states == ["CANCELLED"] else ClusterState.FAILED
    return state, f"all its jobs have ended: {', '.join(states)}{_first_failure(jobs)}"


def _first_failure(jobs: tuple[JobReport, ...]) -> str:
    """Return the reason of the first job that failed, in parentheses; "" without one."""
    for job in jobs:
        if job.reason and job.state is not JobState.COMPLETED:
            return f" ({job.reason})"
    return ""


def _end_reason(ended: Ended, jobs: tuple[JobReport, ...]) -> str:
    if ended.kind is EndKind.DONE:  # the batch scheduler may start a job of it again, in vain
        return ended.reason
    if any(job.number == ended.job and job.state is JobState.PENDING for job in jobs):
        return "the batch scheduler requeued the head's job, whose state is lost: submit again"
    return ended.reason


def _waiting(record: ClusterRecord, jobs: tuple[JobReport, ...]) -> str:
    """Return why workers are missing: ``2 waiting (Resources), job 1 did not start: …``."""
    groups: dict[str, list[JobReport]] = {}
    for job in jobs:
        if job.state is JobState.PENDING:
            groups.setdefault(job.group, []).append(job)
    parts = [_waiting_jobs(group, waiting) for group, waiting in groups.items()]
    gone = [] if record.replaces == "owner" else gone_jobs(record, jobs).values()
    return ", ".join(filter(None, [*parts, _suspended(jobs), *gone]))


def _waiting_jobs(group: str, jobs: list[JobReport]) -> str:
    return f"{len(jobs)} {f'{group} ' if group else ''}waiting{reasons_text(jobs)}"


def _suspended(jobs: tuple[JobReport, ...]) -> str:
    number = sum(job.suspended for job in jobs)
    return f"{number} suspended" if number else ""


# -- the state of each job -------------------------------------------------------------------------
UNLISTED_TIMEOUT = 60.0
"""Seconds after which a job that neither queue nor accounting lists has ended."""
NEVER_STARTED_TIMEOUT = 20.0
"""The same for a job that has not started: no exit status can follow. LSF may list a new job 10 s
late."""
NOT_LAUNCHED = "launch failed: its script did not run"
LOST_TIMEOUT = 300.0
"""Seconds after which a job without its workers is lost, whatever the batch scheduler says."""
TERMINATED = 143
"""Exit code of a job that was stopped by SIGTERM."""

Answers = Mapping[JobId, JobStatus]
"""The batch scheduler's answers; a job without one has not been queried yet."""


def judge(
    record: ClusterRecord,
    folder: FolderState,
    answers: Answers,
    *,
    now: float,
    connected: Iterable[str] | None = None,
    owner_lives: bool = False,
    gone_owner: str = "",
) -> ClusterReport:
    """Return the report of a cluster.

    ``now``: seconds since the epoch. ``connected``: names of the connected workers, if the caller
    knows better than the folder. ``owner_lives``: the process that owns it may submit jobs.
    ``gone_owner``: the process that owned it, if it is known to be gone.
    """
    names = frozenset(folder.dask.connected if connected is None else connected)
    if record.finished:
        answers = _outcomes(record, folder)
    judged = _Judge(record, folder, answers, names, now, live=connected is not None)
    jobs = tuple(judged.jobs())
    names = names.difference(*(job.workers for job in jobs if job.phase is JobPhase.LEAVING))
    attempt = current_attempt(folder, jobs)
    current = tuple(job for job in jobs if job.attempt == attempt)
    if record.attempts > 1:
        names = names.intersection(name for job in current for name in job.workers)
        jobs = tuple(_without_failed_start(job, attempt) for job in jobs)
    state, reason = cluster_state(
        record, folder, current, names, owner_lives=owner_lives, gone_owner=gone_owner
    )
    ended = folder.ended
    running = state in (ClusterState.STARTING, ClusterState.RUNNING, ClusterState.SUSPENDED)
    return ClusterReport(
        record=record,
        state=state,
        kind=ended.kind if ended else None,
        reason=reason,
        exit_code=ended.exit_code if ended else None,
        jobs=jobs,
        folder=folder,
        connected=len(names) if running else 0,
        attempt=attempt,
    )


def _without_failed_start(job: JobReport, attempt: int) -> JobReport:
    """Return a job; the workers of one of an earlier attempt need not have connected."""
    if job.attempt < attempt and job.state is not JobState.FAILED:
        return replace(job, in_vain=False)
    return job


def unlisted_since(
    record: ClusterRecord, folder: FolderState, answers: Answers, now: float
) -> dict[str, float]:
    """Return the record's ``unlisted`` after the ``answers`` of one query.

    Of jobs that were not asked for, it stays: another process may have asked.
    """
    unlisted = dict(record.unlisted)
    for number, job in record.current_jobs(folder.claims).items():
        if folder.job(number).left or answers.get(job, NOT_LISTED) != NOT_LISTED:
            unlisted.pop(str(number), None)
        elif job in answers:
            unlisted.setdefault(str(number), now)
    return unlisted


def lost_job_status(started: bool) -> JobStatus:
    """Return the status of a job that has disappeared from queue and accounting."""
    if started:
        reason = "the job disappeared from the queue without an exit status"
        return JobStatus(JobState.FAILED, reason=reason)
    reason = "it left the queue before it started: deleted, or its launch failed"
    return JobStatus(JobState.CANCELLED, reason=reason)


def _outcomes(record: ClusterRecord, folder: FolderState) -> Answers:
    """Return the final statuses of a finished cluster, which the batch scheduler forgets."""
    jobs = {str(number): job for number, job in record.current_jobs(folder.claims).items()}
    states = JobState.__members__
    return {
        jobs[number]: JobStatus(states[state], reason=record.reasons.get(number, ""))
        for number, state in record.outcomes.items()
        if number in jobs and state in states
    }


@dataclass(frozen=True)
class _Judge:
    """Judges the jobs of one cluster."""

    record: ClusterRecord
    folder: FolderState
    answers: Answers
    connected: frozenset[str]
    now: float
    live: bool

    @cached_property
    def _current(self) -> dict[int, JobId]:
        """The job that does the work of each number."""
        return self.record.current_jobs(self.folder.claims)

    def jobs(self) -> Iterable[JobReport]:
        for submission in self.record.submissions:
            for number in submission.numbers:
                yield self._job(number, submission)

    @cached_property
    def _seen(self) -> frozenset[str]:
        """Names of all workers that were ever connected."""
        return self.folder.dask.seen

    @cached_property
    def _replaced(self) -> set[int]:
        """Numbers of jobs that the batch scheduler lost in a crash: their ids were given again."""
        last = {job: number for number, job in self._current.items()}
        return {number for number, job in self._current.items() if last[job] != number}

    @cached_property
    def _answered(self) -> bool:
        """Whether the batch scheduler has answered about a job of the cluster."""
        return any(job in self.answers for job in self.record.jobs.values())

    def _job(self, number: int, submission: Submission) -> JobReport:
        job, group = self._current[number], submission.group
        workers = self.record.worker_names(number, group)
        connected = tuple(name for name in workers if name in self.connected)
        answer = self.answers.get(job)
        status = self._status(number, answer, connected)
        status = self._explain_launch(number, status, workers)
        status = self._expire_lost(number, status, workers)
        return JobReport(
            number=number,
            job=job,
            phase=self._phase(number, status, workers, connected),
            state=status.state,
            native=status.native,
            reason=self._reason(number, status),
            exit_code=status.exit_code,
            node=status.node or self.folder.job(number).node,
            began=self.folder.job(number).began,
            has_run=self._has_run(number),
            expected_start=status.starts,
            head=self.folder.head == number,
            attempt=submission.attempt,
            group="" if group == HEAD else group,
            workers=workers,
            connected=connected,
            gpus=tuple(gpu for name in connected for gpu in self._gpus(name)),
            unseen=status.state is not JobState.PENDING and not self._answered,
            in_vain=self._ended_in_vain(number, status, workers, connected),
            stuck=status.stuck,
            id=self.scheduler.show_id(job) if self.scheduler else str(job),
        )

    @cached_property
    def scheduler(self) -> Scheduler | None:
        """The batch scheduler, for its spelling of ids; None if its package is gone."""
        try:
            return get_scheduler(self.record.scheduler)(self.record.multi_cluster)
        except InputError:
            return None

    def _status(
        self, number: int, answer: JobStatus | None, connected: tuple[str, ...]
    ) -> JobStatus:
        """Return how a job is doing by all sources; its own exit record wins over old answers."""
        if number in self._replaced:
            return lost_job_status(started=self.folder.job(number).started)
        if answer is None:
            answer = JobStatus(JobState.UNKNOWN)
        status = self._expire_unlisted(number, answer)
        exit_record = self.folder.job(number).left
        if exit_record and self._decides(exit_record, status):
            status = _with_exit_record(status, exit_record)
        elif connected and not exit_record and self._outdated(number, answer.state):
            # A job whose worker is connected runs, even if the batch scheduler does not list it.
            status = JobStatus(JobState.RUNNING, status.native, node=status.node)
        return self._explain_cancel(number, status)

    def _explain_launch(
        self, number: int, status: JobStatus, workers: tuple[str, ...]
    ) -> JobStatus:
        """Slurm says COMPLETED of a job whose node could not start the script."""
        ran = self._has_run(number) or not self._seen.isdisjoint(workers)
        if status.state is not JobState.COMPLETED or ran or self.folder.removed:
            return status
        return replace(status, state=JobState.FAILED, reason=NOT_LAUNCHED)

    def _expire_lost(self, number: int, status: JobStatus, workers: tuple[str, ...]) -> JobStatus:
        """Torque calls the jobs of a lost node running until it is back, then completed.

        A Python owner gives up its jobs by itself.
        """
        lost = (JobState.RUNNING, JobState.UNKNOWN, JobState.COMPLETED)
        spared = (*self.record.removed, self.folder.head)
        if self.record.replaces == "owner" or number in spared or status.state not in lost:
            return status
        if self.folder.job(number).left:
            return status
        reason = self._loss(number, workers)
        if not reason:
            return status
        stuck = status.state.active
        return replace(status, state=JobState.NODE_FAIL, reason=reason, stuck=stuck)

    def _loss(self, number: int, workers: tuple[str, ...]) -> str:
        """Return that the workers of a job have stayed away for too long, or ""."""
        folder, limit = self.folder, LOST_TIMEOUT
        if not workers or folder.head is None:
            return ""
        if self._seen.isdisjoint(workers):
            reason, limit = "it has had no workers", limit + self.record.start_timeout
            starts = (folder.job(job).began for job in (number, folder.head))
            since = max(math.inf if began is None else began for began in starts)
        else:
            reason = "its workers have been gone"
            since = max(folder.dask.gone.get(name, math.inf) for name in workers)
        if folder.end_time(self.now) - since <= limit:
            return ""
        return f"{reason} for more than {limit / 60:.0f} min"

    def _has_run(self, number: int) -> bool:
        job = self.folder.job(number)
        return job.started or job.left is not None

    def _decides(self, left: ExitRecord, status: JobStatus) -> bool:
        """Return whether a job's exit record is its end: one that was requeued starts again."""
        if status.state in (JobState.PENDING, JobState.SUSPENDED):
            return False
        # A requeue begins with SIGTERM; the next answer of the batch scheduler decides. Also for
        # a removed job: if its cancel was lost, it starts again. In an ended cluster it would exit.
        unknown = status.state is JobState.UNKNOWN and status != NOT_LISTED
        undecided = status.state is JobState.RUNNING or unknown
        ended = self.folder.ended is not None
        return ended or left.exit_code != TERMINATED or not undecided

    def _outdated(self, number: int, state: JobState) -> bool:
        """Return whether a connected worker proves ``state``, an answer, to be out of date.

        A list of workers in the folder proves nothing: it stays as it was without the dask
        scheduler. That of the head's job is newer than any connection to it.
        """
        if not self.live:
            return False
        return state is JobState.UNKNOWN or (self.folder.head != number and not state.active)

    def _expire_unlisted(self, number: int, status: JobStatus) -> JobStatus:
        since = self.record.unlisted.get(str(number))
        if status != NOT_LISTED or since is None:
            return status
        since = max(since, self.folder.job(number).alive)  # an answer may be wrong for long
        if self.folder.ended is not None:  # it may have been unlisted for long before this query
            since = min(since, self.folder.ended.time)
        started = self.folder.job(number).started
        if self.now - since <= (UNLISTED_TIMEOUT if started else NEVER_STARTED_TIMEOUT):
            return status
        return lost_job_status(started=started)

    def _reason(self, number: int, status: JobStatus) -> str:
        if status.state is not JobState.PENDING:
            return self.folder.job(number).reason or status.reason
        if not status.requeued:
            return status.reason
        return f"requeued: {status.reason}" if status.reason else "requeued"

    def _explain_cancel(self, number: int, status: JobStatus) -> JobStatus:
        """A cancel that was requested explains a state that the batch scheduler calls failed."""
        ended = self.folder.ended
        requested = number in self.record.removed
        if ended is not None and ended.kind is EndKind.CANCELLED:
            requested = True
        ended_before_start = ended is not None and not self.folder.job(number).started
        failed = requested and status.state is JobState.FAILED
        gone = status == NOT_LISTED and (requested or ended_before_start)
        return replace(status, state=JobState.CANCELLED) if failed or gone else status

    def _gpus(self, worker: str) -> Iterator[WorkerGpu]:
        row = self.folder.dask.connected.get(worker, {})
        binding = row.get("binding") or {}
        for gpu in all_gpus(row.get("gpu")):
            node, uuid, model = gpu.get("node", ""), str(gpu["uuid"]), gpu.get("model")
            memory, mps = gpu.get("memory"), gpu.get("mps", False)
            yield WorkerGpu(worker, node, uuid, model, memory, binding=binding, mps=mps)

    def _phase(
        self,
        number: int,
        status: JobStatus,
        workers: tuple[str, ...],
        connected: tuple[str, ...],
    ) -> JobPhase:
        if not status.state.active:
            return JobPhase.ENDED
        if number in self.record.removed:
            return JobPhase.LEAVING
        if status.state is JobState.SUSPENDED:
            return JobPhase.AWAY
        runs = status.state is JobState.RUNNING
        if len(connected) == len(workers) and (workers or runs):
            return JobPhase.RUNNING
        if status.state is JobState.PENDING:
            return JobPhase.WAITING
        if workers and self._served(workers, connected):
            return JobPhase.AWAY
        if runs or connected or self.folder.job(number).started:
            return JobPhase.STARTING
        return JobPhase.WAITING

    def _served(self, workers: tuple[str, ...], connected: tuple[str, ...]) -> bool:
        """Return whether all workers of a job have been connected, or are."""
        return self._seen.issuperset(set(workers).difference(connected))

    def _ended_in_vain(
        self, number: int, status: JobStatus, workers: tuple[str, ...], connected: tuple[str, ...]
    ) -> bool:
        """Return whether a job has ended before its workers connected, unless it was asked to."""
        if status.state.active or (workers and self._served(workers, connected)):
            return False
        asked = self.folder.ended is not None or number in self.record.removed
        return not asked or status.state is JobState.FAILED


def _with_exit_record(status: JobStatus, left: ExitRecord) -> JobStatus:
    """Return the status with the job's own exit code; the batch scheduler may know better why."""
    code = left.exit_code
    undecided = (JobState.RUNNING, JobState.UNKNOWN, JobState.FAILED, JobState.COMPLETED)
    if status.state not in undecided:
        return replace(status, exit_code=code)
    states: dict[int | None, JobState] = {0: JobState.COMPLETED, TERMINATED: JobState.CANCELLED}
    state = states.get(code, JobState.FAILED)
    reason = "" if status.state is JobState.UNKNOWN else status.reason  # that was about the query
    return replace(status, state=state, reason=reason, exit_code=code)
