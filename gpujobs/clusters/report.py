"""What a cluster is doing: the batch scheduler's word and the jobs' own records, put together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from ..injob.names import HEAD, job_worker_names
from ..schedulers import JobId, JobState, JobStatus
from ..schedulers.base import NOT_LISTED
from .folder import FolderState
from .ledger import ClusterRecord


class ClusterState(StrEnum):
    """What a whole cluster is doing."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


CANCELLED = "cancelled by gpujobs"
GRACE = 60.0
"""Seconds for which a job that no queue lists may still turn up in accounting."""


@dataclass(frozen=True)
class JobReport:
    """One job."""

    number: int
    id: str
    state: JobState
    native: str
    reason: str
    node: str
    exit_code: int | None
    starts: str
    expected: tuple[str, ...]
    """Names of its workers."""
    connected: tuple[str, ...]
    head: bool
    stuck: bool = False
    """It has failed, and stays in the queue until it is cancelled."""


@dataclass(frozen=True)
class ClusterReport:
    """One cluster."""

    record: ClusterRecord
    state: ClusterState
    reason: str
    exit_code: int | None
    jobs: tuple[JobReport, ...]
    facts: FolderState

    @property
    def connected(self) -> int:
        """How many workers are registered with the dask scheduler."""
        return (
            len(self.facts.workers)
            if self.state in (ClusterState.STARTING, ClusterState.RUNNING)
            else 0
        )

    @property
    def active(self) -> bool:
        """Some job may still be there."""
        return any(job.state.active for job in self.jobs)

    @property
    def over(self) -> bool:
        """Nothing more will come of it."""
        return self.state in (ClusterState.DONE, ClusterState.FAILED, ClusterState.CANCELLED)


def view(
    record: ClusterRecord, facts: FolderState, statuses: Mapping[JobId, JobStatus]
) -> ClusterReport:
    """Return the cluster of ``record`` with what the batch scheduler and the folder say of it."""
    jobs = []
    for submission in record.submissions:
        workers = 0 if submission.group == HEAD else record.workers_per_job
        for number, sent in submission.jobs.items():
            job = facts.claims.get(number, sent)  # the same, unless the number was sent twice
            jobs.append(_job(record, number, job, workers, facts, statuses.get(job)))
    state, reason, exit_code = _state(record, facts, jobs)
    return ClusterReport(record, state, reason, exit_code, tuple(jobs), facts)


def _job(
    record: ClusterRecord,
    number: int,
    job: JobId,
    workers: int,
    facts: FolderState,
    status: JobStatus | None,
) -> JobReport:
    status = status or JobStatus(JobState.UNKNOWN)
    left = facts.records.get(number)
    if left and status.state not in (JobState.PENDING, JobState.SUSPENDED):
        status = _with_record(status, left)
    # A cancel that was asked for explains what the batch scheduler calls failed or killed.
    asked = number in record.removed or (facts.ended or {}).get("reason") == CANCELLED
    never_started = (
        facts.ended is not None and number not in facts.claims
    )  # it was cancelled with the cluster
    if (asked and status.state is JobState.FAILED) or (
        status == NOT_LISTED and (asked or never_started)
    ):
        status = replace(status, state=JobState.CANCELLED)
    expected = tuple(job_worker_names(record.id, number, workers, record.ranks)) if workers else ()
    return JobReport(
        number=number,
        id=str(job),
        state=status.state,
        native=status.native,
        reason=facts.reasons.get(number) or status.reason,
        node=status.node or str((left or {}).get("host", "")),
        exit_code=status.exit_code,
        starts=status.starts,
        expected=expected,
        connected=tuple(name for name in expected if name in facts.workers),
        head=(facts.head or {}).get("job") == number,
        stuck=status.stuck,
    )


def vanished(started: bool) -> JobStatus:
    """Return what became of a job that neither the queue nor accounting knows, long after it was there."""
    if started:
        return JobStatus(JobState.FAILED, reason="it left the queue without a word of how it ended")
    return JobStatus(
        JobState.CANCELLED, reason="it left the queue before it started: somebody deleted it"
    )


def _with_record(status: JobStatus, left: Mapping[str, object]) -> JobStatus:
    """Take the job's own record of its end, except where the batch scheduler knows better why."""
    code = left.get("exit_code")
    code = code if isinstance(code, int) else None
    if status.state in (JobState.RUNNING, JobState.UNKNOWN, JobState.FAILED, JobState.COMPLETED):
        state = (
            JobState.COMPLETED
            if code == 0
            else JobState.CANCELLED
            if code == 143
            else JobState.FAILED
        )
        return replace(status, state=state, exit_code=code)
    return replace(status, exit_code=code)


def _state(
    record: ClusterRecord, facts: FolderState, jobs: list[JobReport]
) -> tuple[ClusterState, str, int | None]:
    if facts.ended is not None:
        code, reason = facts.ended.get("exit_code"), str(facts.ended.get("reason", ""))
        if reason == CANCELLED:
            return ClusterState.CANCELLED, reason, code
        return (ClusterState.DONE if code == 0 else ClusterState.FAILED), reason, code
    if record.intent is not None and not jobs:
        return ClusterState.PENDING, "being submitted", None
    if not any(job.state.active for job in jobs):
        states = sorted({job.state.value for job in jobs})
        cancelled = states == ["CANCELLED"]
        reason = next(
            (job.reason for job in jobs if job.reason and job.state is not JobState.COMPLETED), ""
        )
        state = ClusterState.CANCELLED if cancelled else ClusterState.FAILED
        return (
            state,
            f"all its jobs are over: {', '.join(states)}" + (f" ({reason})" if reason else ""),
            None,
        )
    if facts.workers and len(facts.workers) >= record.workers:
        return ClusterState.RUNNING, "", None
    if facts.head or any(job.state is JobState.RUNNING for job in jobs):
        return (
            ClusterState.STARTING if not facts.workers else ClusterState.RUNNING,
            _waiting(jobs),
            None,
        )
    return ClusterState.PENDING, _waiting(jobs), None


def _waiting(jobs: list[JobReport]) -> str:
    pending = [job for job in jobs if job.state is JobState.PENDING]
    if not pending:
        return ""
    reasons = sorted({job.reason for job in pending if job.reason})
    return f"{len(pending)} pending" + (f" ({', '.join(reasons)})" if reasons else "")
