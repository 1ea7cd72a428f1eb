"""Installs `drain` and `rest` in a dask scheduler, and writes `drains.jsonl` in its folder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Protocol

from distributed import Scheduler

from .drain import Drain
from .folder import LOST_TASKS, Folder, LostTasks
from .log import log
from .rest import Rest

_MOST_LINES = 50_000
"""Lines of the file at most: a worker may leave and stay again and again."""


class Lines(Protocol):
    """Lines of a file, see `registry.AppendedLines`."""

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line."""

    async def write(self) -> None:
        """Append the lines to the file."""


class DrainLog:
    """What became of workers that left: a line for each event, and words for the user."""

    def __init__(
        self, scheduler: Scheduler, folder: Folder, lines: Lines, *, in_owner: bool
    ) -> None:
        """``in_owner``: the dask scheduler is in the process of the user, who sees its clients."""
        self._scheduler = scheduler
        self._folder = folder
        self._lost: dict[str, LostTasks] = {}
        self._lines = lines
        self._in_owner = in_owner
        self._number = 0
        self._writing: asyncio.Task[None] | None = None

    def note(self, name: str, event: str, **more: object) -> None:
        """Add a line about a worker; ``lost`` of `more`: its tasks, seconds by prefix."""
        self._add_lost(more.get("lost"))
        self._number += 1
        if self._number > _MOST_LINES:
            return
        self._lines.add({"time": round(time.time(), 2), "event": event, "worker": name, **more})
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    def tell(self, text: str) -> None:
        """Say something: clients print it, and a job has it in its log."""
        self._scheduler.log_event("warn", text)
        if not self._in_owner:
            log(text)

    def _add_lost(self, lost: object) -> None:
        for prefix, seconds in lost.items() if isinstance(lost, dict) else ():
            known = self._lost.get(prefix, {"number": 0, "seconds": 0.0})
            longest = max(seconds, known["seconds"])
            self._lost[prefix] = {"number": known["number"] + 1, "seconds": longest}

    async def _write(self) -> None:
        await asyncio.sleep(0.25)  # several workers may leave at once
        with contextlib.suppress(OSError):  # a full disk: the next event may find room
            await self._lines.write()
            if self._lost:
                await asyncio.to_thread(self._folder.write, LOST_TASKS, self._lost)


def install_drain(scheduler: Scheduler, folder: Folder, lines: Lines, *, in_owner: bool) -> None:
    """Let workers leave a dask scheduler, by its calls and when their walltimes are nearly over."""
    drain_log = DrainLog(scheduler, folder, lines, in_owner=in_owner)
    drain = Drain(scheduler, drain_log.note, drain_log.tell)
    drain.install()
    Rest(scheduler, drain, drain_log.tell).install()
