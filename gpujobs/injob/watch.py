"""Notice a dask scheduler that is gone, and jobs that will not come.

A worker that is still starting searches for the dask scheduler for its `death_timeout`, and so does
a worker that its nanny has restarted. Until then it would hold its GPU for nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from .folder import HEARTBEAT, Folder, JsonObject, modified_at
from .names import JUDGE, RECORD, RUN, VERDICT
from .network import Reach, reach
from .options import SuperviseOptions
from .process import ManagedProcess

_INTERVAL = 20.0
_ATTEMPTS = 3
"""Failed connections in a row after which the dask scheduler is gone."""
_FIRST_QUERY = 15
_QUERY_INTERVAL = 60.0
"""Seconds between two queries about the jobs of a cluster."""
_VERDICT_INTERVAL = 2.0
_REASONS_SHOWN = 3
_SILENCE_TIMEOUT = 60.0
"""Seconds without a sign of life after which its process may be dead, or only stopped."""


def silence(sign: Path, clock: Path) -> float:
    """Return the age of the file ``sign`` in seconds, by the file server's clock.

    Infinity if it is missing. ``clock``: a file that this process may write.
    """
    try:
        clock.touch()
        return modified_at(clock) - modified_at(sign)
    except OSError:
        return float("inf")


class SchedulerWatch:
    """Watches the dask scheduler of a cluster from a job of workers."""

    def __init__(self, folder: Path, job: int) -> None:
        self._folder = folder
        self._clock = folder / "jobs" / f"{job}.now"
        self._time = time.monotonic()
        self._failed = 0

    def silence(self, sign: str) -> float:
        """Return the age of the file ``sign`` in seconds (see `silence`)."""
        return silence(self._folder / sign, self._clock)

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


def cannot_start(gone: Mapping[str, str]) -> str:
    """Return that `run` cannot start, for the reasons of the jobs that do not come."""
    reasons = list(gone.values())
    more = len(reasons) - _REASONS_SHOWN
    shown = reasons[:_REASONS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return f"{RUN} cannot start: {'; '.join(shown)}"


class JobsWatch:
    """Asks about the other jobs of the cluster while workers are missing.

    `judge.pyz` asks, in a process of its own: it needs seconds if the batch scheduler is away.
    """

    def __init__(self, options: SuperviseOptions, environ: Mapping[str, str]) -> None:
        self._folder, self._environ = Folder(options.folder), environ
        self._clock = self._folder.path / "jobs" / f"{options.job}.now"
        self._log = self._folder.logs / f"job-{options.job}.log"
        self._request = f"ask-{options.job}" if options.ask_outside else ""
        now = time.monotonic()
        # If several jobs wait for a head, they do not all ask at once.
        self._next_query = now + _FIRST_QUERY + options.job % _FIRST_QUERY
        self._next_look = now
        self._judge: ManagedProcess | None = None

    def verdict(self) -> JsonObject:
        """Return the last verdict, {} if it is not yet due to look again; call this often."""
        now = time.monotonic()
        if now < self._next_look:
            return {}
        self._next_look = now + _VERDICT_INTERVAL
        if now >= self._next_query and self._workers_are_missing():
            self._ask()
        return self._folder.read(VERDICT)

    def _workers_are_missing(self) -> bool:
        groups = self._folder.read(RECORD).get("groups", [])
        wanted: int = sum(group["workers"] for group in groups)
        return len(self._folder.registered()) < wanted

    def _ask(self) -> None:
        """Start to ask, unless another process has asked within the last minute."""
        age = silence(self._folder.path / VERDICT, self._clock)
        if age < _QUERY_INTERVAL or (self._judge is not None and self._judge.running):
            return
        self._next_query = time.monotonic() + _QUERY_INTERVAL
        path = self._folder.path
        argv = [sys.executable, str(path / JUDGE), str(path)]
        if self._request:
            argv.append(str(path / self._request))
        self._judge = ManagedProcess("judge", argv, self._log, self._environ)
