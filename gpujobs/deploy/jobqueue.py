"""The one import of dask_jobqueue, and the user's dask configuration."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ignore calls of signal.signal.

    dask_jobqueue.runner sets a handler for SIGINT at import, which a library must not do and which
    is an error in a thread.
    """
    original = signal.signal
    signal.signal = lambda *arguments: None
    try:
        yield
    finally:
        signal.signal = original


with _signal_handlers_kept():
    import dask_jobqueue
    from dask_jobqueue import JobQueueCluster

__all__ = ["JobQueueCluster", "configured"]

# Keys of `jobqueue.NAME` in dask's configuration that have a meaning here.
_CONFIGURED = (
    "queue",
    "account",
    "walltime",
    "interface",
    "python",
    "local-directory",
    "job-extra-directives",
    "job-script-prologue",
    "worker-extra-args",
    "cores",
    "memory",
    "processes",
    "log-directory",
    "death-timeout",
)


def configured(name: str) -> dict[str, Any]:
    """Return the user's dask configuration under ``jobqueue.NAME`` as keywords.

    dask-jobqueue fills that section with defaults of its own, such as a walltime of 30 minutes.
    They are left out: they are not the user's choice and would hide the site's.
    """
    import dask.config

    shipped = _shipped_defaults(name)
    section = dask.config.get(f"jobqueue.{name}", {}) or {}
    found = {}
    for key in _CONFIGURED:
        value = section.get(key, section.get(key.replace("-", "_")))
        if value is not None and value != shipped.get(key):
            found[key.replace("-", "_")] = value
    return found


def _shipped_defaults(name: str) -> dict[str, Any]:
    import yaml  # a dependency of dask

    path = Path(dask_jobqueue.__file__).parent / "jobqueue.yaml"
    defaults: dict[str, Any] = yaml.safe_load(path.read_text())["jobqueue"].get(name, {})
    return defaults
