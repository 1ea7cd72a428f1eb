"""Logs of a job."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_TAIL = 8192
"""Bytes at the end of a log that are searched for its last line."""
_LONGEST_LINE = 300


def log(text: str) -> None:
    """Write one line to the job's log."""
    print(f"{time.strftime('%H:%M:%S')} gpujobs: {text}", file=sys.stderr, flush=True)


def last_line(path: Path) -> str:
    """Return the last line of a log with a letter or digit in it, at most 300 characters."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").replace("\0", "").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        if any(map(str.isalnum, line)):
            return line.strip()[:_LONGEST_LINE]
    return ""


def append_output_to(path: Path) -> None:
    """Append all further output of this process to a log: its stdout may be that of `run`."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
