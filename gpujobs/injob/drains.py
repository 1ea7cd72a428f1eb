"""Installs `drain` and `rest` in a dask scheduler, and says what became of workers that left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import Scheduler

from .drain import Drain
from .log import log
from .rest import Rest


class DrainLog:
    """What became of workers that left: an event for each, and words for the user."""

    def __init__(self, scheduler: Scheduler, add: Callable[..., None], *, in_owner: bool) -> None:
        """``add`` takes the keys of an event of the dask scheduler.

        ``in_owner``: the dask scheduler is in the process of the user, who sees its clients.
        """
        self._scheduler = scheduler
        self._add = add
        self._in_owner = in_owner

    def note(self, name: str, event: str, **more: Any) -> None:
        """Add an event about a worker; ``lost`` of ``more``: its tasks, seconds by prefix."""
        self._add(event=event, worker=name, **more)

    def tell(self, text: str) -> None:
        """Say something: clients print it, and a job has it in its log."""
        self._scheduler.log_event("warn", text)
        if not self._in_owner:
            log(text)


def install_drain(scheduler: Scheduler, add: Callable[..., None], *, in_owner: bool) -> None:
    """Let workers leave a dask scheduler, by its calls and when their walltimes are nearly over."""
    drain_log = DrainLog(scheduler, add, in_owner=in_owner)
    drain = Drain(scheduler, drain_log.note, drain_log.tell)
    drain.install()
    Rest(scheduler, drain, drain_log.tell).install()
