"""Logs of a job, and its walltime."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from itertools import takewhile
from pathlib import Path

_TAIL = 32768
"""Bytes at the end of a log that are searched for the reason of a failure."""
_LONGEST_LINE = 300
_KILLED = 137
_ERROR = re.compile(
    r"error|exception|fatal|fail|cannot|could not|unable|invalid|no such|not found|denied|abort",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"\bINFO\b|resource_tracker|warnings\.warn|UCX +WARN|^\S+ gpujobs: |: line \d+: +\d+ \w+"
)
"""Lines that are no reason: of loggers, of Python's warnings, of bash about a killed process."""
_BOX = re.compile(r"^-{20,}$", re.MULTILINE)
"""Open MPI puts its messages between lines of dashes."""
_CHAINED = re.compile(
    r"\n\n(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):\n\n"
)
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*)?")
_WRAPPER = "Error during deserialization"
"""Of dask: says nothing about the exception that caused it."""
_DESERIALIZE = "deserializ"
_IMPORT_PATH = "workers import from `workdir`, the folder of the program, and PYTHONPATH"
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named \S+")
_KEYWORDS = re.compile(r"ValueError: Unexpected keyword arguments: ")
"""Of dask's `Client(n_workers=2)`, which has an address in a job."""
_NO_GPU = re.compile(r"NVMLError_(LibraryNotFound|DriverNotLoaded|NotFound)|libnvidia-ml\.so")
"""NVML found no driver, or no device."""


def log(text: str) -> None:
    """Write one line to the job's log, if there is room: a full disk ends no job."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')} gpujobs: {text}", file=sys.stderr, flush=True)


def with_reason(message: str, reason: str) -> str:
    """Return a message with the reason, if one is known."""
    return f"{message}: {reason}" if reason else message


def reason_in(path: Path, exit_code: int | None = None, *, offset: int = 0) -> str:
    """Return the line of a log that says best why its process failed, at most 300 characters.

    That is the last line with an error in it, else the last one with a letter or digit; if it is
    the end of a chain of exceptions, the first one of the chain precedes it. A process that was
    killed has written no reason. ``offset``: where its part of the log begins.
    """
    if exit_code == _KILLED:
        return ""
    text = _tail(path, offset)
    line = in_plain_words(_exceptions(text) or _last_error(text))
    if _DESERIALIZE in text:  # a task or its arguments
        line = _NO_MODULE.sub(f"\\g<0> ({_IMPORT_PATH})", line, count=1)
    return line[:_LONGEST_LINE]


def error_in(path: Path) -> str:
    """Return the last error in a log, as `reason_in`; "" if there is none."""
    reason = reason_in(path)
    return reason if _ERROR.search(reason) else ""


def _last_error(text: str) -> str:
    found = ""
    for line in text.splitlines():
        if any(map(str.isalnum, line)) and not _NOISE.search(line):
            is_better = _ERROR.search(line) or not _ERROR.search(found)
            found = line if is_better else found
    return found.strip()


def _exceptions(text: str) -> str:
    """Return the first and the last exception of the chain at the end; "" if there is none."""
    *parts, last = _CHAINED.split(text)
    end = _exception(last)
    if not parts or not end or _last_error(last) not in end or last.count(_TRACEBACK) > 1:
        return ""
    while len(parts) > 1 and parts[-1].startswith(_TRACEBACK) and parts[-1].count(_TRACEBACK) == 1:
        parts.pop()
    first = _exception(parts[-1].rpartition(_TRACEBACK)[2])
    return first if _WRAPPER in end else "; then ".join(filter(None, (first, end)))


def _exception(traceback: str) -> str:
    """Return the exception at the end of a traceback, as one line."""
    lines = traceback.splitlines()
    starts = (number for number, line in enumerate(lines) if _EXCEPTION.fullmatch(line))
    start = next(starts, len(lines))
    own = takewhile(lambda line: line and not _NOISE.search(line), lines[start:])
    return " ".join(line.strip() for line in own)


def in_plain_words(line: str) -> str:
    """Return the reason in ``line``, explained if it is an error of NVML or of `Client(…)`."""
    if _KEYWORDS.search(line):
        return (
            f"{line}: in a job, Client() connects to the job's cluster, whose size the profile says"
        )
    if not _NO_GPU.search(line):
        return line
    return f"the node has no NVIDIA driver, or the job has no GPU ({line})"


def launcher_reason(path: Path, offset: int) -> str:
    """Return the first paragraph of the first message of an MPI launcher, as one line.

    The last line of such a message is a general advice. A message of the first moment, about the
    user root, has a line of dashes only at its end.
    """
    boxes = [box.strip() for box in _BOX.split(_tail(path, offset))]
    if boxes[1:] == [""]:
        boxes.insert(0, "")
    if len(boxes) < 3:
        return reason_in(path, offset=offset)
    paragraph = boxes[1].partition("\n\n")[0]
    return " ".join(paragraph.split())[:_LONGEST_LINE]


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

    def workers_lifetime(self) -> int:
        """Return for how many seconds a worker that starts now may run."""
        return max(10, int(self.left() - self._warning))
