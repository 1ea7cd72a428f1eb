"""The time line of a job: pending, starting, running, and what it lost.

Times are in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from .report import JobPhase
from .usage import JobUsage, Steps, UsageReport, steps


class PhaseKind(StrEnum):
    """The state of a job for some time."""

    PENDING = "pending"
    STARTING = "starting"
    """It runs, and some of its workers have not connected yet."""
    RUNNING = "running"
    """With all its workers."""
    LOST = "lost"
    """It runs, and workers that were connected are not any more."""
    FAILED = "failed"
    """The moment of its end, if it failed or was replaced."""
    REPLACED = "replaced"
    """From its end until the workers of the job in its place are connected."""


@dataclass(frozen=True)
class Phase:
    """A part of the time line of a job."""

    kind: PhaseKind
    since: float
    until: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.until - self.since


def timeline(usage: UsageReport, job: JobUsage) -> list[Phase]:
    """Return the time line of a job, without parts of no length except `PhaseKind.FAILED`."""
    phases = [*_before_running(job), *_with_workers(job), *_after(usage, job)]
    return [one for one in phases if one.seconds > 0 or one.kind is PhaseKind.FAILED]


def total(phases: list[Phase], kind: PhaseKind) -> float:
    """Return the seconds of all phases of a kind."""
    return sum(phase.seconds for phase in phases if phase.kind is kind)


def _before_running(job: JobUsage) -> Iterator[Phase]:
    started = job.started
    never_ran = started is None and job.report.phase is JobPhase.FAILED
    if job.submitted is not None and not never_ran:  # when it left the queue is not known
        yield Phase(PhaseKind.PENDING, job.submitted, started or job.until)
    if started is not None:
        yield Phase(PhaseKind.STARTING, started, job.served or job.until)


def _with_workers(job: JobUsage) -> Iterator[Phase]:
    """Yield when all workers were connected, and when not any more, alternately."""
    if job.served is None:
        return
    changes = [(job.served, PhaseKind.RUNNING), *_changes(job, job.served)]
    if changes[-1][1] is PhaseKind.LOST and not job.failed:
        changes.pop()  # these workers are not lost: they exit before their job
    ends = [*(time for time, _ in changes[1:]), job.until]
    for (since, kind), until in zip(changes, ends, strict=True):
        yield Phase(kind, since, until)


def _changes(job: JobUsage, served: float) -> Iterator[tuple[float, PhaseKind]]:
    """Yield when workers were lost, and when all were connected again, until the job's end."""
    before = PhaseKind.RUNNING
    for time, workers in _connected(job):
        kind = PhaseKind.LOST
        if workers == len(job.report.workers):
            kind = PhaseKind.RUNNING
        if served < time < job.until and kind is not before:
            yield time, kind
            before = kind


def _connected(job: JobUsage) -> Steps:
    return steps((one.since, one.until or job.until, 1) for one in job.connections)


def _after(usage: UsageReport, job: JobUsage) -> Iterator[Phase]:
    if job.failed and job.ended is not None:
        yield Phase(PhaseKind.FAILED, job.ended, job.ended)
    for new in usage.jobs:
        if new.report.number == job.replaced_by:
            yield Phase(PhaseKind.REPLACED, job.until, new.served or new.until)
