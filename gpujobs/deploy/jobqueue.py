"""The one import of dask_jobqueue, and the user's dask configuration."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InputError


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

__all__ = ["Configuration", "JobQueueCluster", "configured"]


class Refused:
    """An attribute of dask-jobqueue's clusters that cannot exist here; ``hint`` is the cure."""

    def __init__(self, hint: str) -> None:
        self.hint = hint

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        """Raise AttributeError."""
        raise AttributeError(f"{self.name} has no meaning here; {self.hint}")


class JobQueueCluster(dask_jobqueue.JobQueueCluster):  # type: ignore[misc]
    """dask-jobqueue's class without the parts that describe its own jobs."""

    job_cls = Refused("use job_script() for the script, `jobs` for the jobs")
    _dummy_job = Refused("use job_script() for the script, `jobs` for the jobs")
    new_worker_spec = Refused("use scale(), which submits whole jobs")
    shared_temp_directory = Refused("use `folder`, which has the certificates")


@dataclass(frozen=True)
class Configuration:
    """The user's part of a section of dask's configuration; ``-`` in names is ``_`` here."""

    section: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    unchanged: frozenset[str] = frozenset()
    """Names whose value is dask-jobqueue's default, written by the user nevertheless."""

    def place(self, name: str) -> str:
        """Return the key of ``name`` for messages."""
        return f"dask configuration jobqueue.{self.section}.{name.replace('_', '-')}"


def configured(batch_scheduler: str, section: str | None = None) -> Configuration:
    """Return the user's dask configuration under ``jobqueue.SECTION``.

    The section is the one of ``batch_scheduler`` if none is named. dask-jobqueue fills it with
    defaults of its own, such as a walltime of 30 minutes, which would hide the site's. A value that
    equals such a default counts only if it is in a file or in an environment variable. Empty values
    never count. Raises InputError if the named section does not exist.
    """
    import dask.config

    name = section or batch_scheduler
    if section and section not in (dask.config.get("jobqueue", None) or {}):
        raise InputError(f"config_name: dask's configuration has no section jobqueue.{section}")
    shipped = _section(_shipped_defaults(), batch_scheduler)
    written = _section(dask.config.collect(env=_environment()), name)
    values = {
        key: value
        for key, value in _section(dask.config.config, name).items()
        if key in written or value != shipped.get(key)
    }
    unchanged = frozenset(key for key, value in values.items() if value == shipped.get(key))
    return Configuration(name, values, unchanged)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = (config.get("jobqueue") or {}).get(name) or {}
    return {
        key.replace("-", "_"): value
        for key, value in section.items()
        if value is not None and value not in ("", [], {})
    }


def _environment() -> dict[str, str]:
    """Return the environment without the configuration that a parent process passes on.

    That one contains dask-jobqueue's defaults.
    """
    return {
        name: value for name, value in os.environ.items() if name != "DASK_INTERNAL_INHERIT_CONFIG"
    }


def _shipped_defaults() -> dict[str, Any]:
    import yaml  # a dependency of dask

    path = Path(dask_jobqueue.__file__).parent / "jobqueue.yaml"
    defaults: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return defaults
