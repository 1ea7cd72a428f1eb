"""The walltime of a job."""

from __future__ import annotations

import time

_SIGNAL_EARLY = 60
"""Seconds by which Slurm may send the signal before the walltime earlier than requested."""


class Walltime:
    """The time that a job has left; it does not change when the clock of the node is set."""

    def __init__(self, started: float, seconds: int, warning: int) -> None:
        """``started``: seconds since the epoch. ``seconds``: 0 means no limit."""
        self._unlimited = seconds == 0
        self._warning = warning
        self._ends = time.monotonic() + started + seconds - time.time()

    def left(self) -> float:
        """Return the seconds until the walltime; infinity without one."""
        return float("inf") if self._unlimited else self._ends - time.monotonic()

    def nearly_over(self) -> bool:
        """Return whether the job must stop now."""
        return self.left() < self._warning

    def explains_signal(self) -> bool:
        """Return whether a signal of the batch scheduler may be its warning before the walltime."""
        return self.left() <= self._warning + _SIGNAL_EARLY

    def workers_lifetime(self) -> int:
        """Return for how many seconds a worker that starts now may run."""
        return max(10, int(self.left() - self._warning))
