"""A job of a cluster that this process owns."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from distributed.core import Status

from ..clusters.report import JobPhase, JobReport

STEADY = 30.0
"""Seconds that all workers of a job stay connected until its start has succeeded."""

_STATUS = {
    JobPhase.SUBMITTED: Status.created,
    JobPhase.PENDING: Status.created,
    JobPhase.STARTING: Status.starting,
    JobPhase.RUNNING: Status.running,
    JobPhase.SUSPENDED: Status.paused,
    JobPhase.LOST: Status.undefined,
    JobPhase.LEAVING: Status.closing,
    JobPhase.FAILED: Status.failed,
    JobPhase.ENDED: Status.closed,
}


@dataclass
class PoolJob:
    """A job of the pool. Times are those of the monotonic clock, in seconds."""

    report: JobReport
    submitted: float
    devices: tuple[str, ...] = ()
    """GPUs of this machine that it uses; none if a batch scheduler assigns them."""
    running_since: float | None = None
    connected_since: float | None = None
    lost_since: float | None = None
    idle_since: float | None = None
    leaving: bool = False
    """Its walltime is nearly over; it no longer counts towards the target."""
    requeued: bool = False
    """The batch scheduler requeued it, and its workers have not connected again yet."""
    counted: bool = False
    """Its success has been counted."""
    cancels: int = 0
    """How often it has been cancelled."""
    cancel_again: float = 0.0
    """When it is cancelled again if the batch scheduler still has it, once it is released."""

    def update(self, report: JobReport, now: float) -> bool:
        """Take over a new report; return whether the phase has changed."""
        report = self.judged(report)
        changed = report.phase is not self.report.phase
        self.report = report
        if report.phase.waits:
            self.requeued = self.requeued or self.running_since is not None
            self.running_since = self.connected_since = None
            self.leaving = False
        elif self.running_since is None:
            self.running_since = now
        self._update_connection(now)
        return changed

    def judged(self, report: JobReport) -> JobReport:
        """Return the report with all that is known of a requeued job: its workers start again."""
        if self.requeued and report.phase is JobPhase.LOST:
            return replace(report, phase=JobPhase.STARTING)
        return report

    def _update_connection(self, now: float) -> None:
        phase = self.report.phase
        if phase is JobPhase.RUNNING:
            self.requeued = False
            self.connected_since = self.connected_since or now
        if phase is not JobPhase.LOST:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = now

    def steady(self, now: float) -> bool:
        """Return whether its workers have been connected long enough to call it a success."""
        if self.connected_since is None:
            return False
        return (self.lost_since or now) - self.connected_since >= STEADY

    def waited(self, now: float) -> float:
        """Return for how many seconds it has waited, or did wait, in the queue."""
        return (self.running_since or now) - self.submitted

    # -- as dask's clusters show their workers -----------------------------------------------------
    def __await__(self) -> Generator[None, None, PoolJob]:
        return self
        yield

    @property
    def status(self) -> Status:
        """Its phase, in dask's words."""
        return _STATUS[self.report.phase]

    @property
    def job_id(self) -> str:
        """The batch scheduler's id."""
        return self.report.id
