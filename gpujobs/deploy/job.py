"""A job of a cluster that this process owns."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..clusters.report import JobPhase, JobReport


@dataclass
class PoolJob:
    """A job of the pool. Times are those of the monotonic clock, in seconds."""

    report: JobReport
    devices: tuple[str, ...] = ()
    """GPUs of this machine that it uses; none if a batch scheduler assigns them."""
    submitted: float = field(default_factory=time.monotonic)
    running_since: float | None = None
    lost_since: float | None = None
    idle_since: float | None = None
    leaving: bool = False
    """Its walltime is nearly over; it no longer counts towards the target."""

    def update(self, report: JobReport, now: float) -> bool:
        """Take over a new report; return whether the phase has changed."""
        changed = report.phase is not self.report.phase
        self.report = report
        if report.phase.waits:
            self.running_since = self.lost_since = None
        elif self.running_since is None:
            self.running_since = now
        if report.phase is not JobPhase.LOST:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = now
        return changed
