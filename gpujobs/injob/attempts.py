"""The attempts of a cluster: it starts again after its walltime, a preemption or a failed node.

The jobs of all attempts are submitted at once. Those of each attempt wait until all jobs of the one
before have ended, and exit at once if the cluster itself has ended.
"""

from __future__ import annotations

import signal
import time

from .folder import SCRIPT_ENDED, Folder
from .names import VERDICT
from .options import SuperviseOptions

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""Signals that end a job. LSF sends the first one to all of its processes."""
STOPPED_CODES = (None, 0, *(128 + number for number in _STOPS))
"""Exit codes of a `run` that was stopped, and that the next attempt continues; None: it runs."""

_FILE = "attempt"
_STATE = (
    "head",
    "scheduler.json",
    "workers.json",
    "transport.json",
    "idle",
    "rank-error",
    SCRIPT_ENDED,
    "ranks.sh",
    VERDICT,
)
"""What describes one attempt; `trial-*` too."""
_BEGIN_TIMEOUT = 120.0
"""Seconds in which another job sets up the folder; NFS may show its file 60 s late."""


def over(attempt: int) -> str:
    """Return the name of the file whose presence means that ``attempt`` has ended."""
    return f"over-{attempt}"


def end_attempt(folder: Folder, attempt: int, reason: str) -> None:
    """End an attempt: each of its jobs exits when it finds the file."""
    folder.create(over(attempt), f"{reason}\n")


def last_attempt_text(options: SuperviseOptions) -> str:
    """Return that no attempt follows, for the reason of an end; "" without `requeue`."""
    if options.attempts == 1 or options.attempt < options.attempts:
        return ""
    return f", in the last of {options.attempts} attempts (`requeue`)"


def ids_to_cancel(folder: Folder, attempt: int) -> list[str]:
    """Return the ids whose waiting jobs a head cancels: of its attempt, or of the whole cluster."""
    name = f"job-ids-{attempt}" if over(attempt) in folder.names() else "job-ids"
    return folder.read_text(name).split()


def begin_attempt(folder: Folder, attempt: int) -> bool:
    """Set up the folder for ``attempt``; one of its jobs does that, and the others wait for it.

    The state of the attempt before moves to ``attempt-N``. Returns False after a timeout.
    """
    if attempt == 1:
        return True
    before = attempt - 1
    try:
        (folder.path / f"attempt-{before}").mkdir(mode=0o700)
    except FileExistsError:
        return _wait_for(folder, attempt)
    end_attempt(folder, before, "the next attempt has begun")
    for name in folder.names():
        if name in _STATE or name.startswith("trial-"):
            (folder.path / name).rename(folder.path / f"attempt-{before}" / name)
    folder.write(_FILE, {"attempt": attempt})
    return True


def _wait_for(folder: Folder, attempt: int) -> bool:
    deadline = time.monotonic() + _BEGIN_TIMEOUT
    while folder.read(_FILE).get("attempt") != attempt:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True
