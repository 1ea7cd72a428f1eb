"""Options of a cluster object outside the profile; the only import of dask_jobqueue."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from dask.utils import parse_bytes

from ..config.fields import comma_list
from ..config.hints import in_python
from ..config.model import key_names
from ..config.profile import Profile
from ..errors import InputError
from ..planning.plan import JobGroup, Plan
from ..text import plural, with_home
from .group import WorkerGroup


# -- the one import of dask_jobqueue, and the user's dask configuration ----------------------------
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

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "job_cls" in vars(cls):
            message = f"{cls.__name__}.job_cls has no meaning here: gpujobs writes the script"
            hint = "`config_name` of the cluster class is a section of dask's configuration"
            raise InputError(message, hint=f"{hint}; more is in a site file")


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
    import yaml  # a dependency of dask

    name = section or batch_scheduler
    if section and section not in (dask.config.get("jobqueue", None) or {}):
        raise InputError(f"config_name: dask's configuration has no section jobqueue.{section}")
    defaults = Path(dask_jobqueue.__file__).parent / "jobqueue.yaml"
    shipped = _section(yaml.safe_load(defaults.read_text(encoding="utf-8")), batch_scheduler)
    # A parent process passes on its configuration, with dask-jobqueue's defaults.
    own = {name: os.environ[name] for name in os.environ.keys() - {"DASK_INTERNAL_INHERIT_CONFIG"}}
    written = _section(dask.config.collect(env=own), name)
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


def with_keywords(error: InputError) -> InputError:
    """Return an error about a profile whose hints are written as keywords."""
    keys = tuple(key_names(Profile))
    return InputError(
        [replace(problem, hint=in_python(problem.hint, keys)) for problem in error.problems]
    )


# -- how many jobs a cluster object starts with ----------------------------------------------------
def first_jobs(plan: Plan, n_workers: int | None) -> dict[str, int]:
    """Return the number of jobs of each group.

    ``n_workers`` is that keyword; None: the plan is that of a profile file, with all its workers.
    By keywords, a group starts with its `gpus` or `workers.count`, if it has one.
    """
    if n_workers is None:
        return {group.group: group.shape.jobs for group in plan.groups}
    return {group.group: _by_keywords(group, n_workers) for group in plan.groups}


def _by_keywords(group: JobGroup, n_workers: int) -> int:
    if not group.group:
        return math.ceil(n_workers / group.shape.workers)
    profile = group.profile
    has_number = profile.workers.count or (profile.gpus and "gpus" in profile.given)
    return group.shape.jobs if has_number else 0


# -- the number of jobs that `scale` requests, from any way to say it ------------------------------
@dataclass(frozen=True)
class Amount:
    """The arguments of `scale`, of which the largest counts; ``jobs`` only without ``n``."""

    n: int | None = None
    jobs: int | None = None
    memory: str | int | None = None
    cores: int | None = None

    def in_jobs(self, group: WorkerGroup, log: Callable[[str], None]) -> int:
        """Return the number of whole jobs of a group; ``log`` is called if that is more workers.

        Raises InputError.
        """
        for name, value in (("n", self.n), ("jobs", self.jobs), ("cores", self.cores)):
            if not _is_amount(value):
                raise InputError(f"scale: {name}={value!r} is not a number of at least 0")
        workers, size = self._workers(group), group.size
        jobs = group.jobs_for(workers)
        if jobs * size != workers:
            these = "1 worker is" if workers == 1 else f"{workers} workers are"
            log(f"{these} {plural(jobs, 'job')} of {size}: {plural(jobs * size, 'worker')}")
        if self.jobs is not None and self.n is None:
            return max(jobs, math.ceil(self.jobs))
        return jobs

    def _workers(self, group: WorkerGroup) -> int:
        workers, shape = [self.n or 0], group.jobs.shape
        if self.memory is not None:
            if not shape.worker_memory:
                message = "scale: the memory of a worker is not known; give a number of workers"
                raise InputError(message, hint="or set worker_memory=…")
            workers.append(math.ceil(parse_bytes(self.memory) / shape.worker_memory))
        if self.cores is not None:
            workers.append(math.ceil(self.cores / shape.worker_threads))
        return max(workers)


def _is_amount(value: float | None) -> bool:
    """Return whether a number is at least 0, or not given."""
    number = 0 if value is None else value
    return isinstance(number, int | float) and not isinstance(number, bool) and number >= 0


# -- options of a cluster object -------------------------------------------------------------------
CONFIGURABLE = ("log_directory", "scheduler_options")
"""Options that the user's dask configuration may have."""


def check_mapping(place: str, value: object) -> None:
    """Raise InputError if a value, named ``place`` in the message, is not a mapping."""
    if not isinstance(value, Mapping):
        message = f"{place}: {value!r} is not a mapping"
        raise InputError(message, hint="scheduler_options={'dashboard_address': ':8787'}")


@dataclass(frozen=True)
class ClusterOptions:
    """See `GPUJobQueueCluster` for the meaning of each."""

    scheduler: str = "local"
    scheduler_options: dict[str, Any] = field(default_factory=dict)
    scheduler_options_place: str = "scheduler_options"
    """Names them in messages."""
    log_directory: Path | None = None
    asynchronous: bool = False
    loop: Any = None
    silence_logs: Any = "error"
    quiet: bool = False

    @classmethod
    def of(
        cls, values: Mapping[str, Any], configuration: Configuration | None = None
    ) -> ClusterOptions:
        """Return the options with these values; None stands for the default. Raises InputError.

        ``configuration`` is the user's dask configuration, which replaces the defaults.
        """
        configured = configuration or Configuration()
        given = {name: value for name, value in configured.values.items() if name in CONFIGURABLE}
        if "scheduler_options" in given and values.get("scheduler_options") is None:
            given["scheduler_options_place"] = configured.place("scheduler_options")
        given.update({name: value for name, value in values.items() if value is not None})
        if logs := given.get("log_directory"):
            if not isinstance(logs, str | Path):
                raise InputError(f"log_directory: {logs!r} is not the path of a folder")
            given["log_directory"] = Path(with_home(_expanded(str(logs))))
        options = cls(**given)
        if options.scheduler not in ("local", "job"):
            raise InputError(f"scheduler: {options.scheduler!r} is neither 'local' nor 'job'")
        place = options.scheduler_options_place
        check_mapping(place, options.scheduler_options)
        if options.scheduler_options and not options.local_scheduler:
            names = ", ".join(options.scheduler_options)
            message = f"{place}: not used with scheduler='job': {names}"
            hint = "scheduler='local'; for the dashboard: network={'dashboard': 'on'} or 'off'"
            raise InputError(message, hint=hint)
        return options

    @property
    def local_scheduler(self) -> bool:
        """Whether the dask scheduler runs in this process."""
        return self.scheduler == "local"


def _expanded(folder: str) -> str:
    """Return the path of a folder with its variables. Raises InputError if one is not set here."""
    path = os.path.expandvars(folder)
    if left := re.search(r"\$\w+|\$\{[^}]*\}", path):
        raise InputError(f"log_directory: {folder!r}: {left[0]} is not set here")
    return path


# -- options of GPULocalCluster, as those of dask_cuda.LocalCUDACluster ----------------------------
def device_list(value: object) -> tuple[str, ...] | None:
    """Return the GPUs of the keyword CUDA_VISIBLE_DEVICES. Raises InputError."""
    if value is None:
        return None
    items = comma_list(value) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items:
        message = f"CUDA_VISIBLE_DEVICES: {value!r} is not a list of GPUs"
        raise InputError(message, hint="CUDA_VISIBLE_DEVICES='0,1' or [0, 1]")
    devices = tuple(str(item).strip() for item in items)
    if len(set(devices)) < len(devices):
        raise InputError(f"CUDA_VISIBLE_DEVICES: {value!r} names a GPU twice")
    return devices


def options_of_scheduler(
    options: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any] | None,
    **own: object,
) -> dict[str, Any]:
    """Return the options of the dask scheduler from keywords; ``own`` is by name, None: not given.

    Raises InputError if two keywords set the same option, or one is not a mapping.
    """
    for place, value in (("scheduler_options", options), ("scheduler_kwargs", kwargs)):
        check_mapping(place, {} if value is None else value)
    found: dict[str, Any] = dict(options or {})
    given = {name: value for name, value in own.items() if value is not None}
    for name, value in [*(kwargs or {}).items(), *given.items()]:
        if found.setdefault(name, value) != value:
            raise InputError(f"keyword {name}: scheduler_options or scheduler_kwargs sets it, too")
    return found
