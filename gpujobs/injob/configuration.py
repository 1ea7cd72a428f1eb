"""Dask's configuration in a job: what gpujobs adds to it is below what the user has set.

An option of dask's commands hides the value that the user's configuration has for it. So a default
of gpujobs is not an option of these commands: it becomes a value of the configuration, unless the
user has set one. Modules that dask preloads are added to those of the user.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .names import DASHBOARD, PRELOAD, PREPARES
from .network import initialise_driver, initialise_ucx

if TYPE_CHECKING:
    from .options import DaskOptions

RESOURCES = "distributed.worker.resources"
DIRECTORY = "temporary-directory"
LIFE = "GPUJOBS_LIFE"
"""Variable of a job's workers: ``STARTED ENDS TASK_TIME``, see `life_variable`."""

WALLTIME = "the walltime"
"""Why workers leave whose job has no time for another task."""
MARGIN = 5.0
"""Seconds between the end of the longest task and that of the job, besides those for the data."""


def life_variable(started: float, ends: float, task_time: float = 0.0) -> str:
    """Return `LIFE`: when the job started and must have left, seconds since the epoch of its node.

    ``ends``: infinity without a walltime. ``task_time``: of the longest task, as the user states.
    """
    return f"{started} {ends} {task_time}"


def parse_resources(text: str) -> dict[str, float]:
    """Return ``GPU=1 MEMORY=10``, as dask writes resources, as a mapping."""
    pairs = (word.split("=") for word in text.split())
    return {name: float(amount) for name, amount in pairs}


def add_defaults(resources: str, directory: str) -> None:
    """Add what workers have by default to dask's configuration, unless the user has set it.

    Call this before distributed is imported, which adds its own defaults: until then, the
    configuration is the user's.
    """
    import dask

    get = dask.config.get
    defaults: dict[str, object] = {}
    if resources:
        defaults[RESOURCES] = {**parse_resources(resources), **(get(RESOURCES, None) or {})}
    if directory and not get(DIRECTORY, None):
        defaults[DIRECTORY] = directory
    dask.config.set(defaults)


def preloads(role: str) -> list[str]:
    """Return the modules that the processes of ``role`` preload: the user's, and ours."""
    import dask

    configured = dask.config.get(f"distributed.{role}.preload", None) or []
    return [*([configured] if isinstance(configured, str) else configured), PRELOAD]


def preload_options(role: str, arguments: Sequence[str]) -> list[str]:
    """Return the options for `preloads`; the configuration is hidden by those of ``arguments``."""
    given = any(word.startswith("--preload=") for word in arguments)
    names = [PRELOAD] if given else preloads(role)
    return [f"--preload={name}" for name in names]


# -- dask's commands -------------------------------------------------------------------------------
_WITHOUT_DASHBOARD = "--no-dashboard"


def run_scheduler(options: DaskOptions) -> None:
    """Run dask's command for the dask scheduler in this process, as `python -m` does."""
    set_import_path()
    module, *arguments = options.command
    sys.argv = [module, *arguments, *preload_options("scheduler", arguments)]
    if _WITHOUT_DASHBOARD not in arguments:  # later than dask does it
        sys.argv += [_WITHOUT_DASHBOARD, f"--preload={DASHBOARD}"]
    prepares = os.environ.pop(PREPARES, "")
    if prepares:
        initialise_driver()
    with collecting_no_garbage(), contextlib.suppress(ImportError):
        importlib.import_module("distributed")  # dask's command reports an error
    if prepares:  # it is not decided yet that this process is used
        initialise_ucx()
        sys.stdin.read()
    runpy.run_module(module, run_name="__main__")


@contextlib.contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Import large packages: Python would look for garbage in what they keep, again and again.

    It does so in an eighth of the time that the import of dask takes, and finds none.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def set_import_path() -> None:
    """Import from the working directory first, and from the archive last."""
    archive = sys.path.pop(0)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, "")
    if archive not in sys.path:
        sys.path.append(archive)
