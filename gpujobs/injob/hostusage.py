"""The CPU time and the host memory of a job on one node."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_FIRST_TIME = 11
"""Of the four CPU times in `stat`, behind the command: own and of children that have exited."""


class HostMeter:
    """Measures the processes of a job, which have its folder and its number in their environment.

    So it finds them under any launcher, and also those whose parent has exited.
    """

    def __init__(self, folder: str, job: int, proc: Path = Path("/proc")) -> None:
        self._marks = {f"GPUJOBS_FOLDER={folder}".encode(), f"GPUJOBS_JOB={job}".encode()}
        self._proc = proc
        self._known: dict[str, bool] = {}
        """Whether a process belongs to the job, by its id."""
        self._before = sum(self._cpu_seconds(pid) for pid in self._members())

    def measure(self) -> tuple[float, int]:
        """Return the CPU seconds since the last call, and the peak of memory in bytes.

        That is the sum of the peaks of all processes, so that none between two calls is missed.
        """
        members = self._members()
        total = sum(map(self._cpu_seconds, members))
        seconds, self._before = max(0.0, total - self._before), total
        return seconds, sum(map(self._peak, members))

    def _members(self) -> list[str]:
        pids = [name for name in os.listdir(self._proc) if name.isdecimal()]  # noqa: PTH208 - only names
        self._known = {pid: self._is_known(pid) for pid in pids}
        return [pid for pid, own in self._known.items() if own]

    def _is_known(self, pid: str) -> bool:
        if pid not in self._known:
            return self._marks <= set(self._read(pid, "environ").split(b"\0"))
        return self._known[pid]

    def _cpu_seconds(self, pid: str) -> float:
        fields = self._read(pid, "stat").rpartition(b")")[2].split()
        return sum(map(int, fields[_FIRST_TIME : _FIRST_TIME + 4])) / _TICKS

    def _peak(self, pid: str) -> int:
        """Return the peak of a process without the files that it has mapped, such as libraries."""
        lines = (line.split() for line in self._read(pid, "status").splitlines())
        sizes = {words[0]: int(words[1]) for words in lines if words[2:] == [b"kB"]}
        return max(0, sizes.get(b"VmHWM:", 0) - sizes.get(b"RssFile:", 0)) * 1024

    def _read(self, pid: str, name: str) -> bytes:
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            return (self._proc / pid / name).read_bytes()
        return b""
