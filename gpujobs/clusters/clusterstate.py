"""The state of a whole cluster, from those of its jobs; a part of `judge`."""

from __future__ import annotations

from ..injob.folder import Ended, EndKind
from ..schedulers import JobState
from .folderstate import FolderState
from .records import ClusterRecord
from .report import ClusterState, JobPhase, JobReport, gone_jobs, has_all_workers

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
    """Return which start of the cluster this is: the first one with jobs that have not ended.

    After the end of the cluster, that of the last head.
    """
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
    owned: bool,
) -> tuple[ClusterState, str]:
    """Return the state of a cluster and its reason.

    ``jobs``: of the current attempt. ``connected``: names of its workers. ``owned``: a process that
    lives owns the cluster, and may submit jobs.
    """
    if folder.ended is not None:
        return _state_of(folder.ended), _end_reason(folder.ended, jobs)
    if record.intent is not None and not jobs:
        return ClusterState.PENDING, "being submitted"
    if not any(job.active for job in jobs):
        if owned and folder.address:
            return ClusterState.RUNNING, "no jobs"
        if owned:
            return ClusterState.STARTING, "no jobs"
        return _all_ended(jobs, removed=folder.removed)
    phases = {job.phase for job in jobs if job.active and job.phase is not JobPhase.LEAVING}
    if phases == {JobPhase.SUSPENDED}:
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


def _state_of(ended: Ended) -> ClusterState:
    if ended.kind is EndKind.IDLE and ended.exit_code:  # `run` was stopped
        return ClusterState.FAILED
    return _STATE_OF_KIND[ended.kind]


def _all_ended(jobs: tuple[JobReport, ...], *, removed: bool) -> tuple[ClusterState, str]:
    states = sorted({job.state.value for job in jobs})
    if removed and states == ["COMPLETED"]:
        return ClusterState.DONE, "its folder was removed"
    failed = (job.reason for job in jobs if job.reason and job.state is not JobState.COMPLETED)
    detail = "".join(f" ({reason})" for reason in list(failed)[:1])
    state = ClusterState.CANCELLED if states == ["CANCELLED"] else ClusterState.FAILED
    return state, f"all its jobs have ended: {', '.join(states)}{detail}"


def _end_reason(ended: Ended, jobs: tuple[JobReport, ...]) -> str:
    if any(job.number == ended.job and job.state is JobState.PENDING for job in jobs):
        return "the batch scheduler requeued the head's job, whose state is lost: submit again"
    return ended.reason


def _waiting(record: ClusterRecord, jobs: tuple[JobReport, ...]) -> str:
    """Return why workers are missing: ``2 pending (Resources), job 1 did not start: …``."""
    groups: dict[str, list[JobReport]] = {}
    for job in jobs:
        if job.state is JobState.PENDING:
            groups.setdefault(job.group, []).append(job)
    parts = [_pending(group, pending) for group, pending in groups.items()]
    gone = [] if record.owner == "client" else gone_jobs(record, jobs).values()
    return ", ".join(filter(None, [*parts, _suspended(jobs), *gone]))


def _pending(group: str, jobs: list[JobReport]) -> str:
    reasons = sorted({job.reason for job in jobs if job.reason})
    detail = f" ({', '.join(reasons)})" if reasons else ""
    return f"{len(jobs)} {f'{group} ' if group else ''}pending{detail}"


def _suspended(jobs: tuple[JobReport, ...]) -> str:
    number = sum(job.phase is JobPhase.SUSPENDED for job in jobs)
    return f"{number} suspended" if number else ""
