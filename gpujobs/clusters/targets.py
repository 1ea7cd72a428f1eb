"""The changes of the target size of a cluster: a file beside its record, for `gpujobs report`.

`adapt` changes the target for days, and the record is written as a whole at each change.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from ..injob.folder import DamagedError, parse_json, read_file
from .clusterfolder import disk_errors

MOST_WORKERS = 10**6
"""Of all jobs that a cluster ever had; a record with more of them is damaged."""
Count = Annotated[int, range(MOST_WORKERS + 1)]

_MOST_BYTES = 2**24
"""Of the file: about 250,000 changes; later ones are not written."""
_MOST_TARGETS = 10_000
"""Which are read: the first ones, and the last."""


@dataclass(frozen=True)
class Target:
    """The target number of workers of a group from a time on, in seconds since the epoch."""

    time: float
    workers: Count
    group: str = ""


@dataclass(frozen=True)
class Targets:
    """All changes of the targets of a cluster, oldest first, with the first targets."""

    changes: tuple[Target, ...] = ()
    problem: str = ""
    """Why some are missing."""


def append_targets(path: Path, targets: Iterable[Target]) -> None:
    """Add ``targets`` to a file, unless it is very large. Raises GpujobsError.

    Each line begins with a line feed: what a full disk has cut off stays a line of its own.
    """
    text = "".join(f"\n{json.dumps(asdict(target))}" for target in targets)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with disk_errors(path), os.fdopen(os.open(path, flags, 0o600), "ab") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file")
        if status.st_size < _MOST_BYTES:
            file.write(text.encode())


def read_targets(path: Path, older: Sequence[Target], groups: Iterable[str]) -> Targets:
    """Return the targets of ``groups`` in a file; a missing file has none.

    ``older``: those in a record of an older gpujobs, which the file may have, too.
    """
    try:
        lines = read_file(path, 2 * _MOST_BYTES).splitlines()
    except FileNotFoundError:
        lines = []
    except DamagedError as error:
        return Targets(tuple(older), str(error))
    found = dict.fromkeys(older)
    known, damaged = set(groups), 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            target = parse_json(line, Target)
        except DamagedError:
            if number < len(lines):  # the last one may be being written
                damaged += 1
            continue
        if target.group in known:
            found[target] = None
        else:
            damaged += 1
    changes = sorted(found, key=lambda target: target.time)
    first, later = changes[: len(known)], changes[len(known) :]
    changes = [*first, *later[-_MOST_TARGETS:]]
    problem = f"{path} is damaged: lines are left out ({damaged})" if damaged else ""
    return Targets(tuple(changes), problem)
