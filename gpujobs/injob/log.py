"""Logs of a job, and its walltime."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path

from .reason import error_of, launcher_reason_of, reason_of

_TAIL = 32768
"""Bytes at the end of a log that are searched for the reason of a failure."""
_LONGEST_LINE = 300
_KILLED = 137


def log(text: str) -> None:
    """Write one line to the job's log, if there is room: a full disk ends no job."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} gpujobs: {text}", file=sys.stderr, flush=True)


def with_reason(message: str, reason: str) -> str:
    """Return a message with the reason, if one is known."""
    return f"{message}: {reason}" if reason else message


def reason_in(path: Path, exit_code: int | None = None, *, offset: int = 0) -> str:
    """Return the line of a log that says best why its process failed, at most 300 characters.

    A process that was killed has written no reason. ``offset``: where its part of the log begins.
    """
    if exit_code == _KILLED:
        return ""
    return reason_of(_tail(path, offset))[:_LONGEST_LINE]


def error_in(path: Path) -> str:
    """Return the last error in a log, as `reason_in`; "" if there is none."""
    return error_of(_tail(path, 0))[:_LONGEST_LINE]


def launcher_reason(path: Path, offset: int) -> str:
    """Return why an MPI launcher failed, from its part of a log."""
    return launcher_reason_of(_tail(path, offset))[:_LONGEST_LINE]


def failed_node(path: Path, offset: int) -> str:
    """Return which node of the job has failed, if the launcher of Slurm has said so; else ""."""
    found = re.search(r"error: (Node failure on \S+)", _tail(path, offset))
    return found[1] if found else ""


def nodes_seen(path: Path, offset: int, ranks_per_node: int) -> int | None:
    """Return how many nodes an Open MPI launcher found, if it has complained about their number."""
    mapped = re.search(r"Procs mapped: +(\d+)", _tail(path, offset))
    return int(mapped[1]) // ranks_per_node if mapped else None


def _tail(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(offset, path.stat().st_size - _TAIL))
            return file.read().decode(errors="replace").replace("\0", "")
    except OSError:
        return ""


def append_output_to(path: Path) -> None:
    """Append all further output of this process to a log: its stdout may be that of `run`."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


# -- the walltime of a job -------------------------------------------------------------------------
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

    def workers_lifetime(self) -> float:
        """Return for how many seconds a worker that starts now may run."""
        return max(10.0, self.left() - self._warning)
