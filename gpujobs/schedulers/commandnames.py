"""Names of the commands of a batch scheduler, which the key `commands` of a site may replace."""

from __future__ import annotations

from collections.abc import Iterator

from .base import Scheduler
from .jobs import JobId, JobState, JobStatus

_JOB = JobId("1")
_PENDING = {_JOB: JobStatus(JobState.PENDING)}


def needed_commands(scheduler: Scheduler) -> set[str]:
    """Return the commands that submit, query and cancel; nothing works without them."""
    commands = (
        scheduler.submit_command(),
        scheduler.find_command("name", "user"),
        scheduler.status_command([_JOB], ["name"], "user"),
        *scheduler.cancel_commands({_JOB.submission: ()}),
    )
    return {command[0] for command in commands}


def all_commands(scheduler: Scheduler) -> set[str]:
    """Return also the commands that report limits, estimates, details and ended jobs."""
    return needed_commands(scheduler) | {command[0] for command in _optional(scheduler)}


def _optional(scheduler: Scheduler) -> Iterator[list[str]]:
    yield from scheduler.accounting_commands([_JOB])
    commands = (
        scheduler.limit_command(),
        scheduler.estimate_command(),
        scheduler.detail_command(_PENDING),
    )
    yield from filter(None, commands)
