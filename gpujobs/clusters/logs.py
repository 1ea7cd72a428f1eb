"""Read the logs of a cluster while they grow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import InputError
from ..injob.folder import DamagedError, open_file
from ..injob.names import group_prefix
from ..text import clean
from .clusterfolder import check_folder
from .ledger import ClusterRecord

CHUNK = 1 << 20
"""Bytes that are read of one line at most."""
READ_INTERVAL = 0.5
"""Seconds between two reads of a log that is followed."""

Paths = Callable[[], list[Path]]

logger = logging.getLogger("gpujobs")


def choose(record: ClusterRecord, worker: str | None, everything: bool) -> Paths:
    """Return a function that lists the chosen logs. Raises InputError for an unknown worker."""
    check_folder(record.path)
    folder = record.path / "logs"
    if everything:
        return lambda: sorted(folder.glob("*.log"))
    if worker is not None:
        number = _job_number(record, worker)
        if number is None:
            hint = f"gpujobs status {record.argument} lists them"
            raise InputError(f"{record.id} has no worker {worker!r}", hint=hint)
        return lambda: [folder / f"job-{number}.log"]
    if record.run:
        return lambda: [folder / "run.log"]
    logger.info("the cluster has no `run:`; this is the log of the dask scheduler")
    return lambda: [folder / "scheduler.log"]


def _job_number(record: ClusterRecord, worker: str) -> int | None:
    """Return the number of the job of a worker, from its name; None if there is no such job."""
    for group in record.groups:
        rest = worker.removeprefix(group_prefix(record.id, group.name))
        number = rest.split("-")[0]
        if rest != worker and number in map(str, record.jobs):
            return int(number)
    return None


def lines(paths: Paths, headers: bool, complete: Callable[[], bool]) -> Iterator[str]:
    """Yield the lines of the logs until ``complete()`` returns that nothing more will come."""
    follower = LogFollower(paths, headers)
    while True:
        last = complete()
        yield from follower.new_lines(last=last)
        if last:
            return
        time.sleep(READ_INTERVAL)


class LogFollower:
    """Yields the lines added to files since the last call; an incomplete line waits for its end."""

    def __init__(self, paths: Paths, headers: bool = False) -> None:
        self.paths = paths
        self.headers = headers
        self._offsets: dict[Path, int] = {}
        self._damaged: set[Path] = set()

    def new_lines(self, last: bool = False) -> Iterator[str]:
        """Yield new lines, without control characters; if ``last``, also an incomplete one."""
        for path in self.paths():
            header = f"==> {path.name} <==" if self.headers else ""
            for line in self._new_lines_of(path, last):
                if header:
                    yield header
                    header = ""
                yield clean(line)

    def _new_lines_of(self, path: Path, last: bool) -> Iterator[str]:
        try:
            file = open_file(path)
        except FileNotFoundError:
            return
        except DamagedError as error:
            if path not in self._damaged:
                logger.warning("%s", error)
            self._damaged.add(path)
            return
        with file:
            file.seek(self._offsets.setdefault(path, 0))
            while chunk := file.readline(CHUNK):
                if not chunk.endswith(b"\n") and len(chunk) < CHUNK and not last:
                    return
                self._offsets[path] += len(chunk)
                yield chunk.decode(errors="replace").rstrip("\r\n")
