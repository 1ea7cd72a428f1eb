"""Keywords of the cluster classes, as the same document that a profile file gives.

A keyword is a key of the profile, or one of dask-jobqueue's with the same meaning. Keywords that
can have no meaning here are refused with the name of their replacement. The keys of the user's dask
configuration count as keywords; a keyword of the same meaning has priority.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config.document import PYTHON, Document, Loc
from ..config.fields import comma_list, count, positive
from ..config.hints import in_python, unknown_keyword
from ..config.model import build, key_names, keys_of
from ..config.profile import Profile
from ..config.site import Site
from ..config.sitefiles import NoSiteHereError, SiteFile
from ..config.spec import ClusterSpec, make_spec
from ..errors import InputError, Position, Problem
from ..injob.names import WorkerSize
from ..planning.workeroptions import CUDA
from .conversions import (
    Setting,
    directives,
    extra_args_settings,
    job_settings,
    memory,
    prologue,
    protocol_settings,
    seconds,
    worker_settings,
)
from .options import CONFIGURABLE, Configuration, check_mapping

# -- the keywords of each class --------------------------------------------------------------------
PER_JOB = ("cores", "memory", "processes")
"""dask-jobqueue's numbers of one job, which are converted together."""
PARAMETERS = (
    "site", "n_workers", "log_directory", "scheduler", "scheduler_options", "soonest",
    "asynchronous", "loop", "silence_logs", "quiet",
)  # fmt: skip
"""Parameters of the classes that are not part of the profile."""


@dataclass(frozen=True)
class Vocabulary:
    """The keywords of a class in addition to the keys of a profile."""

    synonyms: Mapping[str, Loc]
    """Other names of keys."""
    converted: Mapping[str, tuple[Loc, Callable[[Any], Any]]]
    """Other names of keys whose values are written differently."""
    several: Mapping[str, Callable[[Any], Iterable[Setting]]]
    """Keywords that set several keys."""
    refused: Mapping[str, str]
    """Keywords without a meaning here, and their replacements."""
    per_job: tuple[str, ...] = PER_JOB

    def known(self) -> list[str]:
        """Return all keywords that are not refused."""
        profile = (name for name in keys_of(Profile) if name not in self.refused)
        return [*profile, *self.synonyms, *self.converted, *self.several, *self.per_job]

    def suggestion(self, name: str) -> str:
        """Return a hint for an unknown keyword."""
        keys = [key for key in key_names(Profile) if key.partition(".")[0] not in self.refused]
        keys = [key for key in keys if not key.startswith("groups.")]
        return unknown_keyword(name, [*self.known(), *PARAMETERS], self.refused, keys)

    def settings(self, name: str, value: Any) -> Iterable[Setting]:
        """Return the settings of one keyword. Raises ValueError."""
        if name == "gpus_per_job" and count(value) == 0:
            return [(("gpus",), 0)]
        if name in self.several:
            return self.several[name](value)
        if name in self.converted:
            loc, convert = self.converted[name]
            return [(loc, convert(value))]
        if name in self.synonyms:
            return [(self.synonyms[name], value)]
        if isinstance(value, Mapping) and value:
            return [((name, key), item) for key, item in value.items()]
        return [((name,), value)]


JOBQUEUE = Vocabulary(
    synonyms={
        "project": ("account",),
        "job_name": ("name",),
        "job_cpu": ("cpus_per_job",),
        "ncpus": ("cpus_per_job",),
        "local_directory": ("workers", "local_directory"),
        "python": ("environment", "python"),
        "container": ("environment", "container"),
        "interface": ("network", "interface"),
        "worker_memory": ("workers", "memory"),
        "worker_threads": ("workers", "threads"),
        "worker_class": ("workers", "worker_class"),
    },
    converted={
        "job_extra_directives": (("directives",), directives),
        "job_extra": (("directives",), directives),
        "job_script_prologue": (("environment", "setup"), prologue),
        "env_extra": (("environment", "setup"), prologue),
        "death_timeout": (("workers", "death_timeout"), seconds),
        "gpus_per_worker": (("workers", "gpus_per_worker"), positive),
        "worker_gpu": (("workers", "gpus_per_worker"), positive),
        "workers_per_gpu": (("workers", "workers_per_gpu"), positive),
        "job_mem": (("memory_per_job",), memory),
        "mem": (("memory_per_job",), memory),
    },
    several={
        "protocol": lambda value: protocol_settings(str(value)),
        "worker_options": lambda value: worker_settings(dict(value)),
        "worker_extra_args": extra_args_settings,
        "extra": extra_args_settings,
    },
    refused={
        "resource_spec": (
            "leave it out: cores and memory are requested, by `request` of the site file"
        ),
        "header_skip": "use `request` of the site file: a job has its lines and no others",
        "job_directives_skip": "use `request` of the site file: a job has its lines and no others",
        "shebang": "use `shell` of the site file",
        "nanny": "use worker_class",
        "worker_command": "use worker_class",
        "shared_temp_directory": "use `directory` of the site file: it holds the certificates",
        "security": "use network={'encryption': …}: each cluster makes its own certificate",
        "host": "use scheduler_options={'host': …}",
        "dashboard_address": "use scheduler_options={'dashboard_address': …}",
        "scheduler_cls": "use scheduler_options",
        "job_cls": "use site",
        "lsf_units": "use `request` of the site file, which contains the unit",
        "use_stdin": "leave it out: scripts are always passed on standard input",
        "gpus": "use n_workers: each worker has one GPU; GPUs of one job: gpus_per_job",
        "run": "use `gpujobs submit`, which runs a command in the cluster",
        "idle_timeout": "use scheduler_options={'idle_timeout': …}",
        "client_timeout": "leave it out: the cluster ends with the Python process that owns it",
        "after": "use `gpujobs submit --after`",
        "prefer": "use soonest=True",
        "requeue": "leave it out: a job close to its walltime gets a successor",
        "walltime_exit": "leave it out: it is for `run` of `gpujobs submit`",
        "start_workers": "use wait_for_workers",
    },
)
"""Of dask-jobqueue, with the same meaning here."""


# -- keywords as a profile -------------------------------------------------------------------------
_KEYS = tuple(key_names(Profile))
DEFAULT_WALLTIME = "30m"
"""dask-jobqueue's, for users without a site file."""


class Given(NamedTuple):
    """A keyword, or a key of the user's dask configuration."""

    name: str
    value: Any
    place: str
    keyword: bool

    def problem(self, message: str, hint: str = "") -> Problem:
        """Return a problem of this keyword."""
        return Problem(message, Position(self.place), hint=hint)


@contextlib.contextmanager
def hints_in_python() -> Iterator[None]:
    """Write the hints of errors about a profile as keywords."""
    try:
        yield
    except InputError as error:
        problems = [
            replace(problem, hint=in_python(problem.hint, _KEYS)) for problem in error.problems
        ]
        raise InputError(problems) from None


def spec_of(
    keywords: Mapping[str, Any],
    site: str | None,
    n_workers: int,
    batch_schedulers: tuple[str, ...] = (),
    configuration: Configuration | None = None,
    vocabulary: Vocabulary = JOBQUEUE,
) -> ClusterSpec:
    """Return the specification that keywords describe: whole jobs with ``n_workers`` or more.

    Raises InputError, also if the site's batch scheduler is not one of ``batch_schedulers``.
    """
    _check_site(site)
    _check_number(n_workers)
    document = _with_size(document_of(keywords, configuration, vocabulary), n_workers)
    try:
        spec = make_spec(document, site=site)
    except NoSiteHereError:
        if not batch_schedulers or "queue" not in document.value:
            raise
        spec = make_spec(document, site=_site_of(document, batch_schedulers[0]))
    found = spec.site.site.scheduler
    if batch_schedulers and found not in batch_schedulers:
        message = f"site {spec.site.name} uses {found}, not {' or '.join(batch_schedulers)}"
        raise InputError(message, hint="use GPUJobQueueCluster, which takes any site")
    return spec


def _check_site(site: object) -> None:
    if site is not None and not isinstance(site, str):
        message = f"site: {site!r} is not the name of a site"
        hint = f"n_workers={site!r}" if isinstance(site, int) else "the name of a site, as text"
        raise InputError(message, hint=hint)


def _check_number(n_workers: object) -> None:
    if not isinstance(n_workers, int) or isinstance(n_workers, bool) or n_workers < 0:
        message = f"n_workers: {n_workers!r} is not a number of workers (0, 1, 2, …)"
        hint = "GPULocalCluster() takes all free GPUs" if n_workers == "auto" else ""
        raise InputError(message, hint=hint)


def _with_size(document: Document, n_workers: int) -> Document:
    value: dict[str, Any] = dict(document.value)
    if not isinstance(value.get("workers", {}), Mapping):
        return document  # it is refused later
    if value.get("groups"):
        if n_workers:
            message = "n_workers: a cluster with groups has a number of each"
            raise InputError(message, hint="groups={'gpu': {'gpus': 8}}, or scale(gpu=8)")
        return document
    if value.get("gpus") == 0:
        value["workers"] = {**value.get("workers", {}), "count": n_workers or 1}
    elif n_workers or "gpus_per_job" in value:
        size = _worker_size(value)
        per_job = positive(value.get("gpus_per_job", size.gpus))
        workers = max(1, size.workers(per_job))
        value["gpus"] = max(1, math.ceil(n_workers / workers)) * per_job
    elif value.get("layout") == "mpi":
        message = "layout='mpi' is one allocation, which needs a number of GPUs"
        raise InputError(message, hint="n_workers=8")
    return Document(value, document.positions, document.keys, document.source)


def _worker_size(profile: Mapping[str, Any]) -> WorkerSize:
    """Return how many GPUs a worker has. Raises ValueError."""
    workers = profile.get("workers")
    if not isinstance(workers, Mapping):
        workers = {}
    return WorkerSize(
        positive(workers.get("gpus_per_worker", 1)), positive(workers.get("workers_per_gpu", 1))
    )


def _site_of(document: Document, batch_scheduler: str) -> SiteFile:
    """Return a site with one queue, as far as the keywords describe it.

    Users of dask-jobqueue have no site file.
    """
    profile = document.value
    queue: dict[str, Any] = {
        f"{resource}_per_node": profile[f"{resource}_per_job"]
        for resource in ("cpus", "memory")
        if f"{resource}_per_job" in profile
    }
    if profile.get("gpus") != 0:
        queue["gpus_per_node"] = profile.get("gpus_per_job", _worker_size(profile).gpus)
    site = {
        "description": "from keywords",
        "scheduler": batch_scheduler,
        "queues": {str(profile["queue"]): queue},
        "defaults": {"walltime": DEFAULT_WALLTIME},
    }
    described = Document(site, source="keywords (no site file)")
    path = Path.cwd() / "none.yaml"
    return SiteFile("none", path, build(Site, described), described)


def document_of(
    keywords: Mapping[str, Any],
    configuration: Configuration | None = None,
    vocabulary: Vocabulary = JOBQUEUE,
) -> Document:
    """Return the profile that keywords and the user's dask configuration describe.

    Every position names its keyword. Raises InputError with all problems.
    """
    converter = _Converter(vocabulary)
    found = _given(keywords, configuration or Configuration(), vocabulary)
    for given in found:
        converter.add(given)
    converter.add_per_job(
        {given.name: given for given in found if given.name not in vocabulary.refused}
    )
    return converter.document()


def _given(
    keywords: Mapping[str, Any], configuration: Configuration, vocabulary: Vocabulary
) -> list[Given]:
    """Return what counts, keywords last."""
    own = [
        Given(name, value, f"keyword {name}", keyword=True)
        for name, value in keywords.items()
        if value is not None
    ]
    names = {given.name for given in own} | set(CONFIGURABLE)
    configured = [
        Given(name, value, configuration.place(name), keyword=False)
        for name, value in configuration.values.items()
        if name not in names
        and not (name in vocabulary.refused and name in configuration.unchanged)
    ]
    return [*configured, *own]


class _Converter:
    """Collects the settings and the problems of keywords."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.problems: list[Problem] = []
        self.values: dict[str, Any] = {}
        self.sources: dict[Loc, Given] = {}

    def add(self, given: Given) -> None:
        """Convert one keyword; those of `PER_JOB` are converted together."""
        name, words = given.name, self.vocabulary
        if name in words.refused:
            self.problems.append(given.problem("has no meaning here", words.refused[name]))
        elif name not in words.known():
            self.problems.append(given.problem("unknown keyword", words.suggestion(name)))
        elif name not in PER_JOB:
            try:
                for setting in words.settings(name, given.value):
                    self._put(setting, given)
            except ValueError as error:
                self.problems.append(given.problem(str(error)))

    def add_per_job(self, found: Mapping[str, Given]) -> None:
        """Convert dask-jobqueue's numbers of one job."""
        try:
            values = {name: given.value for name, given in found.items()}
            for name, setting in job_settings(values, _worker_size(self.values)):
                self._put(setting, found[name])
        except ValueError as error:
            places = [found[name].place for name in PER_JOB if name in found]
            place = Position(", ".join(places) or "keyword gpus_per_job")
            self.problems.append(Problem(str(error), place))

    def document(self) -> Document:
        """Return the profile. Raises InputError with all problems."""
        if self.problems:
            raise InputError(self.problems)
        positions: dict[Loc, Position] = {}
        for loc, given in self.sources.items():
            for length in range(1, len(loc) + 1):
                positions[loc[:length]] = Position(given.place)
        return Document(self.values, positions, dict(positions), PYTHON)

    def _put(self, setting: Setting, given: Given) -> None:
        loc, value = setting
        before = self.sources.get(loc)
        mapping: dict[Any, Any] = self.values
        for step in loc[:-1]:
            mapping = mapping.setdefault(step, {})
        if before and before.name != given.name:
            if before.keyword > given.keyword:
                return
            if before.keyword == given.keyword and mapping[loc[-1]] != value:
                message = f"sets `{'.'.join(map(str, loc))}`, as {before.place} does"
                self.problems.append(given.problem(message))
        mapping[loc[-1]] = value
        self.sources[loc] = given


# -- the keywords of dask_cuda.LocalCUDACluster, for clusters on this machine ----------------------
DEVICE_SIZES = (
    "device_memory_limit",
    "rmm_pool_size",
    "rmm_maximum_pool_size",
    "rmm_release_threshold",
)
"""Options of workers that dask-cuda also takes as a number of bytes."""
UCX_TRANSPORTS = ("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink")
"""Options of workers that need ucxx."""


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


def _device_size(value: Any) -> Any:
    """Return a size of device memory: a whole number is in bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return f"{value}B"
    return value


def _memory_limit(value: Any) -> Iterator[Setting]:
    """Yield the host memory of a worker: bytes, a fraction of this machine's, or a text."""
    if value == "auto":
        return
    if isinstance(value, float) and value <= 1:
        import psutil

        value = int(value * psutil.virtual_memory().total)
    if value == 0:
        raise ValueError("0 is no limit, which is not possible here; leave it out")
    yield ("workers", "memory"), memory(int(value) if isinstance(value, float) else value)


def _ucx_transport(name: str, value: Any) -> Iterator[Setting]:
    yield ("workers", name), value
    if value is True:
        yield ("network", "protocol"), "ucxx"


def _ucx_transports() -> dict[str, Any]:
    return {name: lambda value, name=name: _ucx_transport(name, value) for name in UCX_TRANSPORTS}


_OWN_PARAMETERS = ("host", "dashboard_address")
"""Keywords of dask-jobqueue without a meaning that GPULocalCluster has."""

LOCAL = Vocabulary(
    synonyms={
        **JOBQUEUE.synonyms,
        **{name: ("workers", name) for name in CUDA},
        "threads_per_worker": ("workers", "threads"),
        "rmm_allocator_external_lib_list": ("workers", "set_rmm_allocator_for_libs"),
    },
    converted={
        **JOBQUEUE.converted,
        **{name: (("workers", name), _device_size) for name in DEVICE_SIZES},
    },
    several={
        **JOBQUEUE.several,
        **_ucx_transports(),
        "memory_limit": _memory_limit,
    },
    refused={
        **{name: hint for name, hint in JOBQUEUE.refused.items() if name not in _OWN_PARAMETERS},
        "blocked_handlers": "use scheduler_kwargs={'blocked_handlers': …}",
        "data": "use device_memory_limit and memory_limit: an object cannot be passed to a job",
        "ip": "use host",
        "jit_unspill": "use enable_cudf_spill: dask-cuda has no jit_unspill any more",
        "log_spilling": "use cudf_spill_stats, with enable_cudf_spill",
        "processes": "leave it out: every worker is a process",
        "scheduler_sync_interval": "leave it out: the jobs are watched all the time",
        "service_kwargs": "use scheduler_kwargs={'service_kwargs': …}",
        "services": "leave it out: dask no longer uses it",
        "start": "leave it out: dask no longer uses it",
        "worker_dashboard_address": "leave it out: the workers have no dashboard",
        "worker_services": "leave it out: dask no longer uses it",
    },
)
"""Of LocalCUDACluster and dask-jobqueue."""
