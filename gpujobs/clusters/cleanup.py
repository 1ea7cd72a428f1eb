"""Room for the clusters' folders: the space that is left, the folders that may be removed."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..batch import process, receive
from ..errors import GpujobsError
from ..injob.names import RECORD
from ..text import measured_size_text
from .folder import SPEC, disk_errors, folder_problem
from .ledger import ClusterRecord, Ledger

LEAST_SPACE, LEAST_FILES = 2**30, 10_000
"""Free bytes and inodes below which a file system, or a quota, is nearly full."""
_QUOTA_TIMEOUT = 5.0
_AMOUNT = re.compile(r"(?<!\S)\[?(\d{1,18})\]?\**(?!\S)")
"""Of a quota: a star says that it is above the limit, brackets that Lustre misses a server."""
_WALK = 0.3
"""Seconds for which `gpujobs status` looks into the folders."""
_RECENT = 3600.0
"""Seconds for which a command of `gpujobs --host` may still use its folder."""


# -- space that is left ----------------------------------------------------------------------------
def space_problems(root: Path, quota_command: Sequence[str] = ()) -> Iterator[str]:
    """Yield why there is little room in the folder ``root`` and in the home folder.

    ``quota_command``: of the site; without a usable output, only file systems are reported.
    """
    places = (root, Path(os.path.expanduser("~")))  # noqa: PTH111 - some users have none
    existing = (next(filter(Path.is_dir, (path, *path.parents)), path) for path in places)
    for there in dict.fromkeys(existing):
        with contextlib.suppress(OSError):
            disk = os.statvfs(there)
            files = _left((disk.f_files - disk.f_favail, disk.f_files))  # some count none
            yield from _shortage(f"{there}", disk.f_bavail * disk.f_frsize, files)
    if quota_command:
        result = process.run(quota_command, timeout=_QUOTA_TIMEOUT)
        yield from quota_problems(result.stdout)  # `quota` exits with 1 if one is exceeded


def quota_problems(output: str) -> Iterator[str]:
    """Yield which quotas in the output of `quota`, `lfs quota` or `mmlsquota` have little left.

    A row has the used amount, the quota and the limit, 0 if there is none, first in KiB, then of
    files, which follow `|` with mmlsquota. After each limit there may be one more number, such as
    the grace period with `quota -p`. Other lines are not read.
    """
    name = ""
    for line in output.splitlines():
        space, files = map(_AMOUNT.findall, line.partition("|")[::2])
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
    used, *limits = map(int, amounts[:3])
    return max(0, min(filter(None, limits), default=math.inf) - used)


# -- folders that may be removed -------------------------------------------------------------------
@dataclass(frozen=True)
class Leftover:
    """A folder that is not needed any more; ``record`` of a cluster's. ``size`` is in bytes."""

    path: Path
    changed: float
    """Seconds since the epoch: the last change of a file in it."""
    size: int
    files: int
    record: ClusterRecord | None = None


def leftovers(ledger: Ledger) -> Iterator[Leftover]:
    """Yield the folders that may be removed, those of clusters first.

    Not that of a cluster that is active, or after which an active one starts; nor a folder that
    is a symbolic link, that others can write to, or that has files of another user.
    """
    records = ledger.all()
    for record in _ended(records):
        if found := _measure(record.path, record):
            yield found
    active = [_texts(record) for record in records if not record.finished]
    for path in _sent(records):
        found = _measure(path)
        if found and time.time() - found.changed > _RECENT and not _is_named(path.name, active):
            yield found


def remove(found: Leftover, ledger: Ledger) -> None:
    """Remove a folder, and the record of its cluster. Raises GpujobsError.

    Nothing is removed if the cluster has been submitted again meanwhile.
    """
    record = found.record
    lock = ledger.exclusive(record.id) if record else contextlib.nullcontext()
    with lock, disk_errors(found.path):
        if record and not ledger.get(record.id).finished:
            raise GpujobsError(f"{record.id} is active")
        if problem := folder_problem(found.path):
            raise GpujobsError(problem)
        shutil.rmtree(found.path)  # which removes links, not what they refer to
        if record:
            ledger.remove(record.id)


def note(ledger: Ledger) -> str:
    """Return that ended clusters have left large folders, or ""; takes a third of a second."""
    size = files = 0
    until = time.monotonic() + _WALK
    walks = (_walk(record.path) for record in _ended(ledger.all()))
    for status in itertools.chain.from_iterable(walks):
        size, files = size + status.st_blocks * 512, files + 1
        if size > LEAST_SPACE:
            return "ended clusters have left more than 1GiB: see `gpujobs clean`"
        if files > LEAST_FILES:
            return f"ended clusters have left more than {LEAST_FILES} files: see `gpujobs clean`"
        if time.monotonic() > until:
            break
    return ""


def _ended(records: Sequence[ClusterRecord]) -> Iterator[ClusterRecord]:
    awaited = {record.after for record in records if not record.finished}
    for record in records:
        own = record.path.name == record.id and not record.planned
        if own and record.finished and record.id not in awaited and _is_safe(record.path):
            yield record


def _sent(records: Sequence[ClusterRecord]) -> Iterator[Path]:
    """Yield the folders with files that came from a laptop."""
    home = Path.home() / receive.HOME
    uploads = {folder / "uploads" for folder in (home, *(one.path.parent for one in records))}
    for root in (home / "sent", *sorted(uploads)):
        yield from _folders(root)
    for folder in _folders(home / "folders"):  # job folders, whose records are in them
        if all((record.parent / "ended").exists() for record in folder.glob(f"*/*/{RECORD}")):
            yield folder


def _folders(root: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in root.iterdir() if _is_safe(path))
    return []


def _is_safe(path: Path) -> bool:
    return path.is_dir() and not folder_problem(path)


def _measure(path: Path, record: ClusterRecord | None = None) -> Leftover | None:
    """Return the size of a folder; None if a file in it belongs to another user."""
    statuses = [path.lstat(), *_walk(path)]
    if any(status.st_uid != os.getuid() for status in statuses):
        return None
    size = sum(status.st_blocks for status in statuses) * 512
    return Leftover(path, max(one.st_mtime for one in statuses), size, len(statuses) - 1, record)


def _walk(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of everything in a folder; links are not followed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))


def _is_named(name: str, texts: Sequence[str | None]) -> bool:
    return any(text is None or name in text for text in texts)


def _texts(record: ClusterRecord) -> str | None:
    """Return a cluster's specification and scripts, which name folders; None if not readable."""
    with contextlib.suppress(OSError):
        paths = (record.path / SPEC, *(record.path / "scripts").iterdir())
        return "\n".join(path.read_text("utf-8", "replace") for path in paths)
    return None
