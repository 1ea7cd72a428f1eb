"""What cluster objects share, and the one import of dask_jobqueue."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed


@contextlib.contextmanager
def _signals_untouched() -> Iterator[None]:
    """dask_jobqueue.runner sets a handler for SIGINT when it is imported: wrong in a library, an error in a thread."""
    real, signal.signal = signal.signal, lambda *arguments: None
    try:
        yield
    finally:
        signal.signal = real


with _signals_untouched():
    import dask_jobqueue
    from dask_jobqueue import JobQueueCluster

__all__ = ["JobQueueCluster", "configured", "distributed"]

# Keys of `jobqueue.NAME` in dask's configuration that mean something here.
_CONFIGURED = (
    "queue", "account", "walltime", "interface", "python", "local-directory", "job-extra-directives",
    "job-script-prologue", "worker-extra-args", "cores", "memory", "processes", "log-directory", "death-timeout",
)  # fmt: skip


def configured(name: str) -> dict[str, Any]:
    """Return what the user's dask configuration says under ``jobqueue.NAME``, as keywords.

    dask-jobqueue fills that section with defaults of its own (a walltime of 30 minutes, say): those are not the
    user's word, and would hide the site's.
    """
    import dask.config
    import yaml  # dask's own

    shipped = yaml.safe_load((Path(dask_jobqueue.__file__).parent / "jobqueue.yaml").read_text())[
        "jobqueue"
    ].get(name, {})
    section = dask.config.get(f"jobqueue.{name}", {}) or {}
    found = {}
    for key in _CONFIGURED:
        value = section.get(key, section.get(key.replace("-", "_")))
        if value is not None and value != shipped.get(key):
            found[key.replace("-", "_")] = value
    return found
