"""Read the logs of a cluster while they grow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import InputError
from ..text import clean
from .ledger import ClusterRecord

CHUNK = 1 << 20


Paths = Callable[[], list[Path]]


def choose(
    record: ClusterRecord, worker: str | None, everything: bool, tell: Callable[[str], None]
) -> Paths:
    """Return what lists the log files that were asked for: the command's output, a worker's job, or all so far."""
    folder = record.path / "logs"
    if everything:
        return lambda: sorted(folder.glob("*.log"))
    if worker is not None:
        number = worker.removeprefix(f"{record.id}-").split("-")[0]
        if not number.isdigit() or int(number) not in record.jobs:
            raise InputError(
                f"{record.id} has no worker {worker!r}",
                hint=f"gpujobs status {record.id} lists them",
            )
        return lambda: [folder / f"job-{number}.log"]
    if record.run:
        return lambda: [folder / "run.log"]
    tell("the cluster has no `run:`; this is the dask scheduler's log")
    return lambda: [folder / "scheduler.log"]


def lines(paths: Paths, headers: bool, over_now: Callable[[], bool]) -> Iterator[str]:
    """Yield the lines of the logs, until ``over_now()`` says that nothing more will come."""
    follower = LogFollower(paths, headers)
    while True:
        over = over_now()
        yield from follower.new_lines(last=over)
        if over:
            return
        time.sleep(0.5)


class LogFollower:
    """Yields what was added to files since the last time; a line that is not complete waits for its end."""

    def __init__(self, paths: Paths, headers: bool = False) -> None:
        self.paths, self.headers = paths, headers
        self.places: dict[Path, int] = {}

    def new_lines(self, last: bool = False) -> Iterator[str]:
        """Yield new lines, without control characters. ``last``: also one that has no end yet."""
        for path in self.paths():
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
            file.seek(self.places.setdefault(path, 0))
            while chunk := file.readline(CHUNK):
                if not chunk.endswith(b"\n") and len(chunk) < CHUNK and not last:
                    return
                self.places[path] += len(chunk)
                yield chunk.decode(errors="replace").rstrip("\r\n")
