"""The space that is left on file systems and in quotas."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..config.site import Site
from ..planning.plan import Plan
from ..text import measured_size_text, with_home

LEAST_SPACE, LEAST_FILES = 2**30, 10_000
"""Free bytes and inodes below which a file system, or a quota, is nearly full."""
_QUOTA_TIMEOUT = 5.0
_AMOUNT = re.compile(r"(?<!\S)\[?(\d{1,18})\]?\**(?!\S)")
"""Of a quota: a star says that it is above the limit, brackets that Lustre misses a server."""


def space_problems(root: Path, quota_command: Sequence[str] = ()) -> Iterator[str]:
    """Yield why there is little room in the folder ``root`` and in the home folder.

    ``quota_command``: of the site; without a usable output, only file systems are reported.
    """
    home = Path(with_home("~"))  # some users have none
    for there in dict.fromkeys((_existing(root), _existing(home))):
        yield from _disk_problems(there)
    if quota_command:
        from ..batch import process

        result = process.run(quota_command, timeout=_QUOTA_TIMEOUT)
        yield from quota_problems(result.stdout)  # `quota` exits with 1 if one is exceeded


def _disk_problems(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        files = _left((disk.f_files - disk.f_favail, disk.f_files))  # some count none
        yield from _shortage(f"{folder}", disk.f_bavail * disk.f_frsize, files)


def _existing(path: Path) -> Path:
    """Return the first folder of ``path`` and its parents that exists."""
    for folder in (path, *path.parents):
        if folder.is_dir():
            return folder
    return path


def space_notes(plan: Plan, site: Site) -> Iterator[str]:
    """Yield the warnings of `space_problems` about the folder of the clusters."""
    for problem in space_problems(Path(plan.root), site.quota_command):
        yield f"warning: {problem}"


def quota_problems(output: str) -> Iterator[str]:
    """Yield which quotas in the output of `quota`, `lfs quota` or `mmlsquota` have little left.

    A row has the used amount, the quota and the limit, 0 if there is none, first in KiB, then of
    files, which follow `|` with mmlsquota. After each limit there may be one more number, such as
    the grace period with `quota -p`. Other lines are not read.
    """
    name = ""
    for line in output.splitlines():
        before, _, after = line.partition("|")
        space, files = _AMOUNT.findall(before), _AMOUNT.findall(after)
        if line.strip() and not _AMOUNT.match(line.strip()):  # else the row continues a long name
            name = line.split()[0]
        if len(space) in (6, 8):
            space, files = space[: len(space) // 2], space[len(space) // 2 :]
        if min(len(space), len(files)) >= 3:
            yield from _shortage(f"the quota of {name}", _left(space) * 1024, _left(files))


def _shortage(name: str, space: float, files: float) -> Iterator[str]:
    if space < LEAST_SPACE:
        yield f"{name} has only {measured_size_text(int(space))} left"
    elif files < LEAST_FILES:
        yield f"{name} has room for only {files} more files"


def _left(amounts: Sequence[str | int]) -> float:
    """Return the least of the limits, of which 0 is none, less what is used."""
    used, *numbers = (int(amount) for amount in amounts[:3])
    limits = [number for number in numbers if number]
    return max(0, min(limits, default=math.inf) - used)
