"""Folders of clusters that may be removed: their sizes, a note about them, and their removal."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..batch import receive
from ..errors import GpujobsError
from ..injob.names import RECORD
from . import clusterfolder as folders
from .clusterfolder import SPEC, PresentFolders, disk_errors, folder_problem
from .ledger import ClusterRecord, Ledger

MUCH_SPACE, MANY_FILES = 2**30, 10_000
"""Bytes and files of ended clusters that `gpujobs status` notes."""
_WALK = 0.3
"""Seconds for which `gpujobs status` looks into the folders."""
_RECENT = 3600.0
"""Seconds for which a command of `gpujobs --host` may still use its folder."""


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
    gpujobs has not made, that others can write to, or that has files of another user.
    """
    records = ledger.all()
    for record in _ended(records):
        if found := _measure(record.path, record):
            yield found
    active = [_texts(record) for record in records if not record.finished]
    for path in _sent(records):
        found = _measure(path)
        named = any(text is None or path.name in text for text in active)
        if found and time.time() - found.changed > _RECENT and not named:
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
        folders.remove(found.path)  # which removes links, not what they refer to
        if record:
            ledger.remove(record.id)


def note(records: Sequence[ClusterRecord], present: PresentFolders) -> str:
    """Return that ended clusters have left large folders, or ""; takes a third of a second.

    ``records``: of all clusters. Those that have had their last word know the size of their folder.
    ``present``: of these folders.
    """
    told = [one.last for one in records if one.finished and one.last and one.path in present]
    size, files = sum(one.size for one in told), sum(one.files for one in told)
    if text := _much(size, files):
        return text
    until = time.monotonic() + _WALK
    walks = (_walk(one.path) for one in _ended([one for one in records if not one.last]))
    for status in itertools.chain.from_iterable(walks):
        size, files = size + status.st_blocks * 512, files + 1
        if text := _much(size, files):
            return text
        if time.monotonic() > until:
            break
    return ""


def _much(size: int, files: int) -> str:
    if size > MUCH_SPACE:
        return "ended clusters have left more than 1GiB: see `gpujobs clean`"
    if files > MANY_FILES:
        return f"ended clusters have left more than {MANY_FILES} files: see `gpujobs clean`"
    return ""


def used_space(folder: Path) -> tuple[int, int]:
    """Return the size of all that is in a folder, in bytes, and the number of its files."""
    blocks = [status.st_blocks for status in _walk(folder)]
    return sum(blocks) * 512, len(blocks)


def _ended(records: Sequence[ClusterRecord]) -> Iterator[ClusterRecord]:
    awaited = {record.after for record in records if not record.finished}
    for record in records:
        own = record.path.name == record.id and not record.planned
        if own and record.finished and record.id not in awaited and _is_safe(record.path):
            yield record


def _sent(records: Sequence[ClusterRecord]) -> Iterator[Path]:
    """Yield the folders with files that came from a laptop, and those of interrupted commands."""
    home = Path.home() / receive.HOME
    roots = sorted({home, *(one.path.parent for one in records)})
    for place in (home / "sent", *(root / "uploads" for root in roots)):
        yield from _folders(place)
    known = {record.path for record in records}
    for root in roots:
        yield from (path for path in _folders(root) if path not in known and _is_unused(path))
    for folder in _folders(home / "folders"):  # job folders, whose records are in them
        if all((record.parent / "ended").exists() for record in folder.glob(f"*/*/{RECORD}")):
            yield folder


def _is_unused(folder: Path) -> bool:
    """Return whether nothing was submitted from ``folder``: its command was killed before.

    A cluster of another ledger, of the same home on another host, has scripts.
    """
    if (folder / RECORD).exists() or (folder / "gpujobs").exists():  # a job folder; the package
        return False
    scripts = folder / "scripts"
    return not (scripts.is_dir() and any(scripts.iterdir()))


def _folders(root: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(path for path in root.iterdir() if _is_safe(path))
    return []


def _is_safe(path: Path) -> bool:
    return path.is_dir() and folders.is_ours(path) and not folder_problem(path)


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


def _texts(record: ClusterRecord) -> str | None:
    """Return a cluster's specification and scripts, which name folders; None if not readable."""
    with contextlib.suppress(OSError):
        paths = (record.path / SPEC, *(record.path / "scripts").iterdir())
        return "\n".join(path.read_text("utf-8", "replace") for path in paths)
    return None
