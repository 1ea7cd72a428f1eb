"""Read the logs of a cluster while they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import InputError
from .folder import read
from .ledger import Record
from .text import clean

CHUNK = 1 << 20


def choose(record: Record, worker: str | None, everything: bool, tell: Callable[[str], None]) -> list[Path]:
    """Return the log files that were asked for: the command's output, a worker's job, or all."""
    folder = record.path / "logs"
    if everything:
        return sorted(path for path in folder.glob("*.log") if path.stat().st_size)
    if worker is not None:
        number = worker.removeprefix(f"{record.id}-").split("-")[0]
        if not number.isdigit() or int(number) not in record.jobs:
            raise InputError(f"{record.id} has no worker {worker!r}", hint=f"gpujobs status {record.id} lists them")
        return [folder / f"job-{number}.log", *sorted(folder.glob(f"*[-_]{number}.log"))][:1]
    if record.run:
        return [folder / "run.log"]
    tell("the cluster has no `run:`; this is the dask scheduler's log")
    return [folder / "scheduler.log"]


def lines(record: Record, paths: list[Path], follow: bool) -> Iterator[str]:
    """Yield the lines of the logs; with ``follow`` until the cluster has ended."""
    follower = Follower(paths, headers=len(paths) > 1)
    while True:
        over = not follow or record.finished or read(record.path).ended is not None
        yield from follower.new_lines(last=over)
        if over:
            return
        time.sleep(0.5)


class Follower:
    """Yields what was added to files since the last time; a line that is not complete waits for its end."""

    def __init__(self, paths: list[Path], headers: bool = False) -> None:
        self.places = dict.fromkeys(paths, 0)
        self.headers = headers

    def new_lines(self, last: bool = False) -> Iterator[str]:
        """Yield new lines, without control characters. ``last``: also one that has no end yet."""
        for path in self.places:
            first = True
            for line in self._lines(path, last):
                if first and self.headers:
                    yield f"==> {path.name} <=="
                first = False
                yield clean(line)

    def _lines(self, path: Path, last: bool) -> Iterator[str]:
        try:
            file = path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self.places[path])
            while chunk := file.readline(CHUNK):
                if not chunk.endswith(b"\n") and len(chunk) < CHUNK and not last:
                    return
                self.places[path] += len(chunk)
                yield chunk.decode(errors="replace").rstrip("\r\n")
