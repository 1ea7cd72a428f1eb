"""A job of a cluster that this process owns."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace

from distributed.core import Status

from ..clusters.report import JobPhase, JobReport

STEADY = 30.0
"""Seconds that all workers of a job stay connected until its start has succeeded."""

_STATUS = {
    JobPhase.SUBMITTED: Status.running,  # as in dask-jobqueue: it was submitted
    JobPhase.PENDING: Status.running,
    JobPhase.STARTING: Status.running,
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
    queued: float
    """When it was submitted, or last requeued."""
    devices: tuple[str, ...] = ()
    """GPUs of this machine that it uses; none if a batch scheduler assigns them."""
    start_timeout: float = math.inf
    """Seconds for which a requeued job may be without its workers."""
    running_since: float | None = None
    connected_since: float | None = None
    lost_since: float | None = None
    idle_since: float | None = None
    leaving: bool = False
    """Its walltime is nearly over; it no longer counts towards the target."""
    requeued: bool = False
    """The batch scheduler has requeued it at some time."""
    restarting: bool = False
    """It was requeued, and its workers have not connected again yet."""
    began: float | None = None
    """When it last started, by the clock of its node."""
    counted: bool = False
    """Its success has been counted."""
    cancels: int = 0
    """How often it has been cancelled."""
    cancel_again: float = 0.0
    """When it is cancelled again if the batch scheduler still has it, once it is released."""

    def update(self, report: JobReport, now: float) -> bool:
        """Take over a new report; return whether the phase has changed."""
        if self.running_since is not None and (report.phase.waits or self._has_restarted(report)):
            self._requeue(now)
        self.began = report.began or self.began
        if self.running_since is None and not report.phase.waits:
            self.running_since = now
        self._update_restart(now)
        report = self.judged(report)
        changed = report.phase is not self.report.phase
        self.report = report
        self._update_connection(now)
        return changed

    def _has_restarted(self, report: JobReport) -> bool:
        """Return whether it was requeued, and started again before anybody saw it waiting."""
        return None not in (self.began, report.began) and self.began != report.began

    def _requeue(self, now: float) -> None:
        self.requeued, self.queued = True, now
        self.running_since = self.connected_since = None
        self.leaving = False

    def _update_restart(self, now: float) -> None:
        """End the excuse for missing workers in time: they may have come and gone unseen."""
        ran = now - (self.running_since or now)
        waits_for_workers = self.connected_since is None and ran <= self.start_timeout
        self.restarting = self.requeued and waits_for_workers

    def judged(self, report: JobReport) -> JobReport:
        """Return the report with all that is known of a requeued job: its workers start again."""
        if self.restarting and report.phase is JobPhase.LOST:
            return replace(report, phase=JobPhase.STARTING)
        return report

    def _update_connection(self, now: float) -> None:
        phase = self.report.phase
        if phase is JobPhase.RUNNING:
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
        """Return for how many seconds it has waited, or did wait, since it was last queued."""
        return (self.running_since or now) - self.queued

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
