"""Keywords of the cluster classes, as the same document that a profile file gives.

A keyword is a key of the profile, or one of dask-jobqueue's or dask-cuda's with the same meaning.
Those that can have no meaning here are refused with the name of their replacement. The keys of the
user's dask configuration count as keywords; a keyword of the same meaning has priority.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..clusters.cgroups import available_memory
from ..config.document import PYTHON, Document, Loc
from ..config.fields import count, one_or_several, positive, sequence
from ..config.fields import size as n_bytes
from ..config.hints import unknown_keyword
from ..config.model import build, key_names, keys_of
from ..config.profile import Profile, Workers
from ..config.site import Site
from ..config.sitefiles import NoSiteHereError, SiteFile
from ..config.spec import ClusterSpec, make_spec
from ..errors import InputError, Position, Problem
from ..injob.names import WorkerSize
from ..planning.workeroptions import CUDA
from .options import CONFIGURABLE, Configuration

Setting = tuple[Loc, Any]
"""A key of the profile and its value."""
Reader = Callable[[Any], Iterable[Setting]]
"""Returns the settings of the value of a keyword. Raises ValueError."""

PER_JOB = ("cores", "memory", "processes")
"""dask-jobqueue's numbers of one job, which are converted together."""
PARAMETERS = (
    "site", "n_workers", "log_directory", "scheduler", "scheduler_options", "soonest",
    "asynchronous", "loop", "silence_logs", "quiet", "host",
)  # fmt: skip
"""Parameters of the classes that are not part of the profile."""

# -- values of keywords, converted to keys of the profile ------------------------------------------
_LISTS = ("preload",)
"""Options of `dask worker` that may be given several times."""
_EXPANDED = ("local_directory",)
"""Options in which the job expands variables."""


def to(key: str, convert: Callable[[Any], Any] = lambda value: value) -> Reader:
    """Return the reader of a keyword that sets ``key`` to its converted value."""
    loc = tuple(key.split("."))
    return lambda value: [(loc, convert(value))]


def directives(value: Any) -> Any:
    """Return directives; dask-jobqueue takes the keys of a mapping, too."""
    if isinstance(value, Mapping) and not any(value.values()):
        return list(value)
    return value


def prologue(value: Any) -> str:
    """Return lines of bash as one text."""
    if isinstance(value, str):
        return value
    return "\n".join(str(line) for line in sequence(value))


def seconds(value: Any) -> Any:
    """Return a time: a number without a unit is in seconds, as in dask."""
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return f"{value}s"
    return value


def memory(value: Any, above: float = -math.inf) -> Any:
    """Return a size: a number without a unit, ``above`` fractions, is in bytes, as in dask."""
    if isinstance(value, int) and not isinstance(value, bool) and value > above:
        return f"{value}B"
    return value


device_size = partial(memory, above=1)


def protocol_settings(scheme: Any) -> list[Setting]:
    """Return the settings of a protocol of dask, such as ``tls://``."""
    encrypted = {"tls": "tcp", "wss": "ws"}
    name = str(scheme).removesuffix("://")
    if name not in encrypted:
        return [(("network", "protocol"), name)]
    protocol = (("network", "protocol"), encrypted[name])
    return [protocol, (("network", "encryption"), True)]


def worker_settings(options: Any) -> Iterator[Setting]:
    """Yield options of workers: those that are keys of the profile under their own names."""
    fields = set(keys_of(Workers)) - {"options"}
    given = dict(options)
    for key in sorted(given, key=lambda key: key not in fields):
        yield (("workers", key) if key in fields else ("workers", "options", key)), given[key]


def gpus_settings(value: Any) -> list[Setting]:
    """Return the setting of `gpus_per_job`; 0: jobs of CPU workers."""
    return [(("gpus",), 0)] if count(value) == 0 else [(("gpus_per_job",), value)]


def memory_limit_settings(value: Any) -> Iterator[Setting]:
    """Yield the host memory of a worker: bytes, a fraction of this machine's, or a text."""
    if value == "auto":
        return
    if isinstance(value, float) and value <= 1:
        value = int(value * available_memory())
    if value == 0:
        raise ValueError("0 (no limit) is not supported; leave it out")
    yield ("workers", "memory"), memory(int(value) if isinstance(value, float) else value)


def ucx_settings(name: str, value: Any) -> Iterator[Setting]:
    """Yield the settings of a transport of UCX, which needs ucxx."""
    yield ("workers", name), value
    if value is True:
        yield ("network", "protocol"), "ucxx"


WORKER_OPTIONS: dict[str, Reader] = {
    "nthreads": to("workers.threads"),
    "memory_limit": to("workers.memory"),
    "interface": to("network.interface"),
    "death_timeout": to("workers.death_timeout", seconds),
    "protocol": protocol_settings,
}
"""Options of `dask worker` that are keys of the profile under another name."""


def extra_args_settings(value: Any) -> Iterator[Setting]:
    """Yield the settings of words of dask's command line. Raises ValueError.

    A word may have several parts, as in ``["--resources GPU=2", "--lifetime", "1h"]``.
    """
    for name, option in _options(_split(value)).items():
        read = WORKER_OPTIONS.get(name)
        yield from read(option) if read else worker_settings({name: option})


def _split(value: Any) -> list[str]:
    text = " ".join(str(word) for word in sequence(value))
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def _options(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _pairs(words):
        if "$" in str(value) and name not in _EXPANDED:
            raise ValueError(f"{value!r}: variables are not expanded here")
        if name in _LISTS:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise ValueError(f"--{name.replace('_', '-')} is given twice")
        else:
            found[name] = value
    return found


def _pairs(words: Sequence[str]) -> list[tuple[str, str | bool]]:
    pairs: list[tuple[str, str | bool]] = []
    for word in words:
        if word.startswith("--"):
            pairs.append(_option(word))
        elif pairs and pairs[-1][1] is True:
            pairs[-1] = (pairs[-1][0], word)
        else:
            raise ValueError(f"{word!r} does not follow an option")
    return pairs


def _option(word: str) -> tuple[str, str | bool]:
    name, equals, text = word[2:].partition("=")
    name = name.replace("-", "_")
    if equals:
        return name, text
    if name.startswith("no_"):
        return name.removeprefix("no_"), False
    return name, True


# -- the numbers of one job ------------------------------------------------------------------------
def job_settings(given: Mapping[str, Any], size: WorkerSize) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of dask-jobqueue's numbers of one job, each with its keyword.

    ``size`` is that of the workers. `cores` and `memory` are requested for the job and divided
    among its workers. If ``given`` also has what to request (`job_cpu`, `job_mem`), they are only
    divided. Raises ValueError.
    """
    cpu_workers = "gpus_per_job" in given and count(given["gpus_per_job"]) == 0
    workers = _workers_of_job(given, size, cpu_workers)
    if "processes" in given and not cpu_workers:
        yield "processes", (("gpus_per_job",), size.gpus_of(workers))
    if "cores" in given:
        if {"job_cpu", "ncpus"} & given.keys():
            yield "cores", (("workers", "threads"), positive(given["cores"]) // workers)
        else:
            yield "cores", (("cpus_per_job",), given["cores"])
    if "memory" in given:
        if {"job_mem", "mem"} & given.keys():
            yield "memory", (("workers", "memory"), f"{n_bytes(given['memory']) // workers}B")
        else:
            yield "memory", (("memory_per_job",), given["memory"])


def job_notes(given: Mapping[str, Any]) -> list[str]:
    """Return in which way a job differs from the one of dask-jobqueue for the same keywords."""
    sizes = {"processes", "gpus_per_job", "gpus_per_worker", "workers_per_gpu", "groups"}
    cores = given.get("cores") or 1
    if sizes & given.keys() or positive(cores) < 2:
        return []
    return [
        f"cores={cores}: a job has one GPU, and one worker with these cores; dask-jobqueue starts "
        "several. processes=… or gpus_per_job=… is the number of workers"
    ]


def _workers_of_job(given: Mapping[str, Any], size: WorkerSize, cpu_workers: bool) -> int:
    expected, why = None, ""
    if cpu_workers:
        expected, why = 1, "a job of CPU workers has one"
    elif "gpus_per_job" in given:
        gpus = positive(given["gpus_per_job"])
        expected = size.workers(gpus)
        why = f"gpus_per_job is {gpus}, {_size_text(size)}"
    if "processes" not in given:
        return expected or size.per_gpu
    processes = positive(given["processes"])
    if not cpu_workers and processes % size.per_gpu:
        raise ValueError(f"processes is {processes}, but there are {_size_text(size)}")
    if expected is not None and processes != expected:
        raise ValueError(f"processes is {processes}, but {why}")
    return processes


def _size_text(size: WorkerSize) -> str:
    if size.usual:
        return "one worker per GPU"
    return f"{size.gpus} GPUs per worker" if size.gpus > 1 else f"{size.per_gpu} workers per GPU"


# -- the keywords of each class --------------------------------------------------------------------
class Vocabulary(dict[str, Reader | str]):
    """The keywords of a class in addition to the keys of a profile.

    The value is a function that returns settings, or a text: the keyword has no meaning here, and
    the text names its replacement.
    """

    def known(self) -> list[str]:
        """Return all keywords that are not refused."""
        return [name for name in {**dict.fromkeys(keys_of(Profile)), **self} if self.takes(name)]

    def takes(self, name: str) -> bool:
        """Return whether a keyword, or a key of the profile, is not refused."""
        return not isinstance(self.get(name), str)

    def suggestion(self, name: str) -> str:
        """Return a hint for an unknown keyword."""
        keys = [
            key
            for key in key_names(Profile)
            if self.takes(key.partition(".")[0]) and not key.startswith("groups.")
        ]
        refused = {word: hint for word, hint in self.items() if isinstance(hint, str)}
        return unknown_keyword(name, [*self.known(), *PARAMETERS], refused, keys)

    def settings(self, name: str, value: Any) -> Iterable[Setting]:
        """Return the settings of a keyword that is not refused. Raises ValueError."""
        read = self.get(name)
        if callable(read):
            return read(value)
        if isinstance(value, Mapping) and value:
            return [((name, key), item) for key, item in value.items()]
        return [((name,), value)]


JOBQUEUE = Vocabulary(
    {
        "project": to("account"),
        "job_name": to("name"),
        "job_cpu": to("cpus_per_job"),
        "ncpus": to("cpus_per_job"),
        "local_directory": to("workers.local_directory"),
        "python": to("environment.python"),
        "container": to("environment.container"),
        "interface": to("network.interface"),
        "worker_memory": to("workers.memory"),
        "worker_threads": to("workers.threads"),
        "worker_class": to("workers.worker_class"),
        "job_extra_directives": to("directives", directives),
        "job_extra": to("directives", directives),
        "job_script_prologue": to("environment.setup", prologue),
        "env_extra": to("environment.setup", prologue),
        "death_timeout": to("workers.death_timeout", seconds),
        "gpus_per_worker": to("workers.gpus_per_worker", positive),
        "worker_gpu": to("workers.gpus_per_worker", positive),
        "workers_per_gpu": to("workers.workers_per_gpu", positive),
        "gpus_per_job": gpus_settings,
        "job_mem": to("memory_per_job", memory),
        "mem": to("memory_per_job", memory),
        "protocol": protocol_settings,
        "worker_options": worker_settings,
        "worker_extra_args": extra_args_settings,
        "extra": extra_args_settings,
        **dict.fromkeys(PER_JOB, lambda value: ()),
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
    }
)
"""Of dask-jobqueue, with the same meaning here."""

LOCAL = Vocabulary(
    {
        **{name: word for name, word in JOBQUEUE.items() if name != "dashboard_address"},
        **{name: to(f"workers.{name}") for name in CUDA},
        "device_memory_limit": to("workers.device_memory_limit", device_size),
        "rmm_pool_size": to("workers.rmm_pool_size", device_size),
        "rmm_maximum_pool_size": to("workers.rmm_maximum_pool_size", device_size),
        "rmm_release_threshold": to("workers.rmm_release_threshold", device_size),
        "enable_tcp_over_ucx": partial(ucx_settings, "enable_tcp_over_ucx"),
        "enable_infiniband": partial(ucx_settings, "enable_infiniband"),
        "enable_nvlink": partial(ucx_settings, "enable_nvlink"),
        "threads_per_worker": to("workers.threads"),
        "rmm_allocator_external_lib_list": to("workers.set_rmm_allocator_for_libs"),
        "memory_limit": memory_limit_settings,
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
    }
)
"""Of LocalCUDACluster and dask-jobqueue."""

# -- keywords as a profile -------------------------------------------------------------------------
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
    document = profile_of(keywords, n_workers, configuration, vocabulary)
    try:
        spec = make_spec(document, site=site)
    except NoSiteHereError:
        if not batch_schedulers or "queue" not in document.value:
            raise
        spec = make_spec(document, site=_site_of(document, batch_schedulers[0]))
    spec.check_batch_scheduler(batch_schedulers)
    return spec


def profile_of(
    keywords: Mapping[str, Any],
    n_workers: int,
    configuration: Configuration | None,
    vocabulary: Vocabulary,
) -> Document:
    """Return the profile that keywords describe, with a number of GPUs. Raises InputError."""
    _check_number(n_workers)
    return _with_size(document_of(keywords, configuration, vocabulary), n_workers)


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
        count = Document(n_workers or 1, source=PYTHON)
        return Document({"workers": {"count": count}}).over(document)
    if n_workers or "gpus_per_job" in value:
        size = _worker_size(value)
        per_job = positive(value.get("gpus_per_job", size.gpus))
        workers = max(1, size.workers(per_job))
        gpus = max(1, math.ceil(n_workers / workers)) * per_job
        return Document({"gpus": Document(gpus, source=PYTHON)}).over(document)
    if value.get("layout", "workers") != "workers":
        message = f"layout={value['layout']!r} is one allocation, which needs a number of GPUs"
        raise InputError(message, hint="n_workers=8")
    return document


def _worker_size(profile: Mapping[str, Any]) -> WorkerSize:
    """Return how many GPUs a worker has. Raises ValueError."""
    workers = profile.get("workers")
    if not isinstance(workers, Mapping):
        workers = {}
    return WorkerSize(
        positive(workers.get("gpus_per_worker", 1)), positive(workers.get("workers_per_gpu", 1))
    )


def _site_of(document: Document, batch_scheduler: str) -> SiteFile:
    """Return a site with one queue from the keywords: users of dask-jobqueue have no site file."""
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
        "queues": {str(name): queue for name in one_or_several(profile["queue"])},
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
    converter.add_per_job({given.name: given for given in found if vocabulary.takes(given.name)})
    if converter.problems:
        raise InputError(converter.problems)
    return converter.whole


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
        and not (name in configuration.unchanged and not vocabulary.takes(name))
    ]
    return [*configured, *own]


class _Converter:
    """Collects the settings and the problems of keywords."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.problems: list[Problem] = []
        self.whole = Document({}, source=PYTHON)
        self.sources: dict[Loc, Given] = {}

    def add(self, given: Given) -> None:
        """Convert one keyword; those of `PER_JOB` are converted together."""
        name, words = given.name, self.vocabulary
        if isinstance(hint := words.get(name), str):
            self.problems.append(given.problem("has no meaning here", hint))
        elif name not in words.known():
            self.problems.append(given.problem("unknown keyword", words.suggestion(name)))
        else:
            try:
                for setting in words.settings(name, given.value):
                    self._put(setting, given)
            except ValueError as error:
                self.problems.append(given.problem(str(error)))

    def add_per_job(self, found: Mapping[str, Given]) -> None:
        """Convert dask-jobqueue's numbers of one job."""
        try:
            values = {name: given.value for name, given in found.items()}
            for name, setting in job_settings(values, _worker_size(self.whole.value)):
                self._put(setting, found[name])
        except ValueError as error:
            places = [found[name].place for name in PER_JOB if name in found]
            place = Position(", ".join(places) or "keyword gpus_per_job")
            self.problems.append(Problem(str(error), place))

    def _put(self, setting: Setting, given: Given) -> None:
        loc, before = setting[0], self.sources.get(setting[0])
        part = Document(setting[1], source=given.place)
        if before and before.name != given.name:
            if before.keyword > given.keyword:
                return
            if before.keyword == given.keyword and self.whole.value_at(loc) != part.plain:
                message = f"sets `{'.'.join(map(str, loc))}`, as {before.place} does"
                self.problems.append(given.problem(message))
        self.sources[loc] = given
        for step in reversed(loc[1:]):
            part = Document({step: part}, part.place)
        self.whole = Document({loc[0]: part}, source=PYTHON).over(self.whole)
