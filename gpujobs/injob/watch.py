"""Notice that the dask scheduler is gone, if the workers do not notice it themselves.

A worker that is still starting searches for the dask scheduler for its `death_timeout`, and so does
a worker that its nanny has restarted. Until then it would hold its GPU for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from .folder import HEARTBEAT, modified_at
from .network import Reach, reach

_INTERVAL = 20.0
_ATTEMPTS = 3
"""Failed connections in a row after which the dask scheduler is gone."""
_SILENCE_TIMEOUT = 60.0
"""Seconds without a sign of life after which its process may be dead, or only stopped."""


class SchedulerWatch:
    """Watches the dask scheduler of a cluster from a job of workers."""

    def __init__(self, folder: Path, job: int) -> None:
        self._folder = folder
        self._clock = folder / "jobs" / f"{job}.now"
        self._time = time.monotonic()
        self._failed = 0

    def silence(self, sign: str) -> float:
        """Return the age of the file ``sign`` in seconds, by the file server's clock.

        Infinity if it is missing.
        """
        try:
            self._clock.touch()
            return modified_at(self._clock) - modified_at(self._folder / sign)
        except OSError:
            return float("inf")

    def _owner_is_silent(self) -> bool:
        """Return whether the head, or else the client with the dask scheduler, may be dead."""
        has_head = (self._folder / "head").is_dir()
        return self.silence(HEARTBEAT if has_head else "lease") > _SILENCE_TIMEOUT

    def is_gone(self, address: str, environ: Mapping[str, str], *, registered: bool) -> bool:
        """Return whether the dask scheduler is gone; call this again and again.

        ``registered``: all workers of the job are registered. They notice most ends themselves, so
        that only a silent owner is a reason to connect. An owner that is stopped still has its
        port: connections succeed, but nothing answers.
        """
        if time.monotonic() - self._time < _INTERVAL:
            return False
        self._time = time.monotonic()
        if registered and not self._owner_is_silent():
            self._failed = 0
        elif reach(address, environ) is Reach.NOTHING:
            self._failed += 1
        else:
            self._failed = 0
        return self._failed >= _ATTEMPTS
