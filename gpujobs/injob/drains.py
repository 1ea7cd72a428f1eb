"""Installs `drain` and `rest` in a dask scheduler."""

from __future__ import annotations

from collections.abc import Callable

from distributed import Scheduler

from .drain import Drain
from .events import Event
from .log import log
from .rest import Rest


def install_drain(scheduler: Scheduler, note: Callable[[Event], None], *, in_owner: bool) -> None:
    """Let workers leave a dask scheduler, by its calls and when their walltimes are nearly over.

    ``note`` gets what becomes of them. ``in_owner``: the dask scheduler is in the process of the
    user, who sees its clients.
    """

    def tell(text: str) -> None:
        scheduler.log_event("warn", text)  # which clients print
        if not in_owner:
            log(text)

    drain = Drain(scheduler, note, tell)
    drain.install()
    Rest(scheduler, drain, tell).install()
