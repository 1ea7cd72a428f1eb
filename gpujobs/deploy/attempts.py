"""Bounds the submissions that replace jobs, so that no cause of failure submits without end."""

from __future__ import annotations

from ..batch.system import HOST, System

MOST_ATTEMPTS = 3
"""Jobs per missing job that may end without success, one after another."""
PAUSES = (0.0, 5.0, 15.0, 45.0, 135.0, 300.0)
"""Seconds before the next replacement, after so many rounds of failures."""


class Attempts:
    """Counts the jobs in a row that brought no worker that stays, and what refuses them."""

    def __init__(self, system: System = HOST) -> None:
        self._system = system
        self.failures = 0
        """Jobs in a row that ended without success."""
        self.error: Exception | None = None
        """The last refusal, if that is why jobs are missing."""
        self._rounds = 0
        self._not_before = 0.0

    def succeeded(self) -> None:
        """Workers have connected and stay: start again."""
        self.failures = self._rounds = 0
        self.error = None
        self._not_before = 0.0

    def failed(self, jobs: int = 1, error: Exception | None = None) -> None:
        """Note ``jobs`` jobs that failed at the same time; ``error``: a refusal instead of jobs."""
        self.failures += jobs
        self.error = error
        self.postpone()

    def postpone(self) -> None:
        """Pause before the next submission, each time for longer."""
        pause = PAUSES[min(self._rounds, len(PAUSES) - 1)]
        self._rounds += 1
        self._not_before = self._system.monotonic() + pause

    def exhausted(self, missing: int, alive: int) -> bool:
        """Return whether to stop: ``missing`` jobs are to be replaced, ``alive`` ones remain."""
        if not self.failures:
            return False
        # If nothing is left, the cause concerns all jobs: a broken setup need not be tried thrice.
        limit = MOST_ATTEMPTS * max(1, missing if alive else 1)
        return self.failures >= limit

    def pausing(self) -> bool:
        """Return whether the next submission must wait."""
        return self._system.monotonic() < self._not_before
