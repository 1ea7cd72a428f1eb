"""The memory that this process and its children may use: a job may have a part of its node."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_LIMITS = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}
"""The file with the limit of a group, by the type of its file system: version 2 and version 1."""


def available_memory(proc: Path = Path("/proc/self")) -> int:
    """Return the memory of this host in bytes, or that of the job if a cgroup limits it."""
    import psutil

    return min([int(psutil.virtual_memory().total), *_limits(proc)])


def _limits(proc: Path) -> Iterator[int]:
    """Yield the limits of the groups of a process, and of those above them."""
    for mounted, kind, group in _groups(proc):
        for folder in (mounted / group, *(mounted / group).parents):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                yield int((folder / _LIMITS[kind]).read_text(encoding="ascii"))
            if folder == mounted:
                break


def _groups(proc: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield where groups are mounted, the type of their file system, and the process's own one."""
    with contextlib.suppress(OSError, ValueError):
        rows = [line.split(":", 2) for line in _lines(proc / "cgroup")]
        for line in _lines(proc / "mountinfo"):
            left, _, right = line.partition(" - ")
            root, mounted = left.split()[3:5]
            kind, _, options = right.split()[:3]
            if kind == "cgroup2":
                own = [path for number, _, path in rows if number == "0"]
            elif kind == "cgroup" and "memory" in options.split(","):
                own = [path for _, names, path in rows if "memory" in names.split(",")]
            else:
                continue
            for path in own:  # in a container, only its own group may be mounted
                yield Path(mounted), kind, path.removeprefix(root).lstrip("/")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
