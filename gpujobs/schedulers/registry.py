"""Finds the class of a batch scheduler by the name that site files use.

A class registers itself when its module is imported (see `Scheduler`). A name that is not
registered yet is looked up as a module of this package, then as an entry point of the group
``gpujobs.schedulers``; only that one module is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ..errors import InputError
from ..text import did_you_mean
from .base import REGISTERED, Scheduler
from .jobs import JobId, JobState, JobStatus

ENTRY_POINTS = "gpujobs.schedulers"
"""Group of the entry points of other packages: ``NAME = "package.module"``."""


def get_scheduler(name: str) -> type[Scheduler]:
    """Return the class of the batch scheduler ``name``; InputError if there is none."""
    if name not in REGISTERED:
        _import_built_in(name)
    if name not in REGISTERED:
        _import_entry_point(name)
    if name not in REGISTERED:
        raise InputError(_unknown(name))
    return REGISTERED[name]


def scheduler_names() -> list[str]:
    """Return the names of all batch schedulers that can be used here, sorted."""
    import pkgutil

    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return sorted({*REGISTERED, *_entry_point_names()})


def _import_built_in(name: str) -> None:
    if name.isidentifier() and find_spec(f"{__package__}.{name}"):
        importlib.import_module(f"{__package__}.{name}")


def _import_entry_point(name: str) -> None:
    from importlib.metadata import entry_points  # slow, and seldom needed

    for entry in entry_points(group=ENTRY_POINTS, name=name):
        try:
            entry.load()
        except Exception as error:  # whatever another package's code raises
            cause = f"{type(error).__name__}: {error}"
            message = f"batch scheduler {name}: {entry.value} cannot be imported ({cause})"
            raise InputError(message) from error


def _entry_point_names() -> set[str]:
    from importlib.metadata import entry_points

    return {entry.name for entry in entry_points(group=ENTRY_POINTS)}


def _unknown(name: str) -> str:
    known = scheduler_names()
    message = f"{name!r} is not one of the known batch schedulers ({', '.join(known)})"
    return "; ".join(filter(None, (message, did_you_mean(name.lower(), known))))


# -- names of the commands of a batch scheduler, which the key `commands` of a site may replace ----
_JOB = JobId("1")
_PENDING = {_JOB: JobStatus(JobState.PENDING)}


def needed_commands(scheduler: Scheduler) -> set[str]:
    """Return the commands that submit, query and cancel; nothing works without them."""
    commands = (
        scheduler.submit_command(),
        scheduler.find_command("name", "user"),
        scheduler.status_command([_JOB], ["name"], "user"),
        *scheduler.cancel_commands({_JOB.submission: ()}),
    )
    return {command[0] for command in commands}


def all_commands(scheduler: Scheduler) -> set[str]:
    """Return also the commands that report limits, estimates, details and ended jobs."""
    return needed_commands(scheduler) | {command[0] for command in _optional(scheduler)}


def _optional(scheduler: Scheduler) -> Iterator[list[str]]:
    yield from scheduler.accounting_commands([_JOB])
    commands = (
        scheduler.limit_command(),
        scheduler.estimate_command(),
        scheduler.detail_command(_PENDING),
    )
    yield from filter(None, commands)
