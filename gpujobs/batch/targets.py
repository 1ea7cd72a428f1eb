"""The targets of a cancel: submissions, and indexes of jobs in them."""

from __future__ import annotations

from collections.abc import Iterable

from ..schedulers import JobId, JobState, JobStatus


def cancel_targets(jobs: Iterable[JobId], remaining: Iterable[JobId] = ()) -> dict[str, list[int]]:
    """Return submissions, and the indexes of the jobs to cancel; no indexes: all of them.

    A submission of which no job is ``remaining`` is cancelled as a whole, which is one word.
    """
    kept = {job.submission for job in remaining}
    targets: dict[str, list[int]] = {}
    for job in jobs:
        indexes = targets.setdefault(job.submission, [])
        if job.index is not None and job.submission in kept:
            indexes.append(job.index)
    return targets


def waits_in_queue(status: JobStatus) -> bool:
    """Return whether a job still has to be cancelled: it waits, or has failed and stays."""
    return status.stuck or status.state is JobState.PENDING
