"""Keywords of the cluster classes, as the same document that a profile file gives.

A keyword is a key of the profile, or one of dask-jobqueue's with the same meaning. Keywords that
can have no meaning here are refused with the name of their replacement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config.document import Document, Loc
from ..config.fields import count, positive, sequence, size
from ..config.model import build, key_names, keys_of, suggest
from ..config.profile import Profile, Workers
from ..config.site import Site
from ..config.sitefiles import NoSiteHereError, SiteFile
from ..config.spec import ClusterSpec, make_spec
from ..errors import InputError, Position, Problem

SYNONYMS: dict[str, Loc] = {
    "job_extra_directives": ("directives",),
    "local_directory": ("workers", "local_directory"),
    "python": ("environment", "python"),
    "interface": ("network", "interface"),
    "worker_memory": ("workers", "memory"),
    "worker_threads": ("workers", "threads"),
    "worker_class": ("workers", "worker_class"),
}
"""dask-jobqueue's names for keys of the profile."""
REFUSED = {
    "project": "account",
    "job_cpu": "cores",
    "job_mem": "memory",
    "ncpus": "cores",
    "mem": "memory",
    "resource_spec": "`request` of the site file",
    "job_extra": "directives",
    "extra": "worker_options",
    "env_extra": "environment={'setup': …}, or env={…}",
    "header_skip": "`request` of the site file, which is complete: only its lines are written",
    "job_directives_skip": "`request` of the site file, which is complete",
    "shebang": "`shell` of the site file",
    "nanny": "worker_class",
    "worker_command": "worker_class",
    "shared_temp_directory": "`directory` of the site file: it holds the certificates",
    "security": "network={'encryption': …}: each cluster makes its own certificate",
    "host": "scheduler_options={'host': …}",
    "dashboard_address": "scheduler_options={'dashboard_address': …}",
    "scheduler_cls": "scheduler_options",
    "job_cls": "site",
    "config_name": "site",
    "gpus": "n_workers",
    "run": "`gpujobs submit`, which runs a command in the cluster",
    "start_workers": "wait_for_workers",
}
"""Keywords without a meaning here, and their replacements."""
PER_JOB = ("cores", "memory", "processes")
"""dask-jobqueue's numbers of one job."""
CONVERTED = (
    "worker_options",
    "worker_extra_args",
    "job_script_prologue",
    "death_timeout",
    "protocol",
    *PER_JOB,
)
"""Keywords whose value is converted."""

Setting = tuple[Loc, Any]
"""A key of the profile and its value."""


def spec_of(
    keywords: Mapping[str, Any],
    site: str | None,
    n_workers: int,
    batch_schedulers: tuple[str, ...] = (),
) -> ClusterSpec:
    """Return the specification that keywords describe: whole jobs with ``n_workers`` or more.

    Raises InputError, also if the site's batch scheduler is not one of ``batch_schedulers``.
    """
    if not isinstance(n_workers, int) or isinstance(n_workers, bool) or n_workers < 0:
        raise InputError(f"n_workers: {n_workers!r} is not a number of workers (0, 1, 2, …)")
    document = _with_size(document_of(keywords), n_workers)
    try:
        spec = make_spec(document, site=site)
    except NoSiteHereError:
        if not batch_schedulers or "queue" not in keywords:
            raise
        described = _site_of(keywords, document, batch_schedulers[0])
        spec = make_spec(document, site=described)
    found = spec.site.site.scheduler
    if batch_schedulers and found not in batch_schedulers:
        message = f"site {spec.site.name} has {found}, not {' or '.join(batch_schedulers)}"
        raise InputError(message, hint="use GPUJobQueueCluster, which takes any site")
    return spec


def _with_size(document: Document, n_workers: int) -> Document:
    value: dict[str, Any] = dict(document.value)
    if value.get("gpus") == 0:
        value["workers"] = {**value.get("workers", {}), "count": n_workers or 1}
    elif n_workers or "gpus_per_job" in value:
        per_job = positive(value.get("gpus_per_job", 1))
        value["gpus"] = max(1, math.ceil(n_workers / per_job)) * per_job
    elif value.get("layout") == "mpi":
        message = "layout='mpi' is one allocation, which needs a number of GPUs"
        raise InputError(message, hint="n_workers=8")
    return Document(value, document.positions, document.keys, document.source)


def _site_of(keywords: Mapping[str, Any], document: Document, batch_scheduler: str) -> SiteFile:
    """Return a site with one queue, as far as the keywords describe it.

    Users of dask-jobqueue have no site file.
    """
    queue: dict[str, Any] = {}
    if keywords.get("cores") is not None:
        queue["cpus_per_node"] = keywords["cores"]
    if keywords.get("memory") is not None:
        queue["memory_per_node"] = keywords["memory"]
    if document.value.get("gpus") != 0:
        queue["gpus_per_node"] = document.value.get("gpus_per_job", 1)
    site = {
        "description": "from keywords",
        "scheduler": batch_scheduler,
        "queues": {str(keywords["queue"]): queue},
    }
    described = Document(site, source="keywords (no site file)")
    path = Path.cwd() / "none.yaml"
    return SiteFile("none", path, build(Site, described), described)


def document_of(keywords: Mapping[str, Any], source: str = "keyword") -> Document:
    """Return the profile that ``keywords`` describe; every position names its keyword."""
    converter = _Converter(source)
    for name, value in keywords.items():
        converter.add(name, value)
    converter.add_per_job(keywords)
    return converter.document()


class _Converter:
    """Collects the settings and the problems of keywords."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.values: dict[str, Any] = {}
        self.positions: dict[Loc, Position] = {}

    def add(self, name: str, value: Any) -> None:
        """Convert one keyword; those of `PER_JOB` are converted together."""
        place = Position(f"{self.source} {name}")
        if name in REFUSED:
            self._report(Problem("has no meaning here", place, hint=f"use {REFUSED[name]}"))
        elif name not in _known():
            self._report(Problem("unknown keyword", place, hint=_suggestion(name)))
        elif value is not None and name not in PER_JOB:
            try:
                self._put_all(_settings(name, value), name)
            except ValueError as error:
                self._report(Problem(str(error), place))

    def add_per_job(self, keywords: Mapping[str, Any]) -> None:
        """Convert dask-jobqueue's numbers of one job."""
        given = {name: keywords[name] for name in PER_JOB if keywords.get(name) is not None}
        try:
            settings = list(_per_job_settings(given, keywords.get("gpus_per_job")))
            self._put_all(settings, "/".join(given))
        except ValueError as error:
            place = Position(f"{self.source}s cores, memory, processes")
            self._report(Problem(str(error), place))

    def document(self) -> Document:
        """Return the profile. Raises InputError with all problems."""
        if self.problems:
            raise InputError(self.problems)
        keys = dict(self.positions)
        return Document(self.values, self.positions, keys, f"{self.source}s")

    def _report(self, problem: Problem) -> None:
        self.problems.append(problem)

    def _put_all(self, settings: list[Setting], keyword: str) -> None:
        position = Position(f"{self.source} {keyword}")
        for loc, value in settings:
            mapping: dict[Any, Any] = self.values
            for step in loc[:-1]:
                mapping = mapping.setdefault(step, {})
            mapping[loc[-1]] = value
            for length in range(1, len(loc) + 1):
                self.positions[loc[:length]] = position


def _known() -> list[str]:
    profile = (name for name in keys_of(Profile) if name not in REFUSED)
    return [*profile, *SYNONYMS, *CONVERTED]


def _suggestion(name: str) -> str:
    known = _known()
    return suggest(name, known, [*known, *(f"workers.{key}" for key in key_names(Workers))])


def _settings(name: str, value: Any) -> list[Setting]:
    """Return the settings of one keyword. Raises ValueError."""
    if name == "gpus_per_job" and count(value) == 0:
        return [(("gpus",), 0)]
    if name in SYNONYMS:
        return [(SYNONYMS[name], value)]
    if name == "job_script_prologue":
        return [(("environment", "setup"), _prologue(value))]
    if name == "death_timeout":  # seconds, in dask-jobqueue
        seconds = f"{value}s" if isinstance(value, int) else value
        return [(("workers", "death_timeout"), seconds)]
    if name == "protocol":
        return _protocol_settings(str(value).removesuffix("://"))
    if name == "worker_options":
        return _worker_settings(dict(value))
    if name == "worker_extra_args":
        return _worker_settings(_extra_args(value))
    return [((name,), value)]


def _prologue(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(line) for line in sequence(value))


def _protocol_settings(scheme: str) -> list[Setting]:
    encrypted = {"tls": "tcp", "wss": "ws"}
    if scheme not in encrypted:
        return [(("network", "protocol"), scheme)]
    protocol = (("network", "protocol"), encrypted[scheme])
    return [protocol, (("network", "encryption"), True)]


def _worker_settings(options: Mapping[str, Any]) -> list[Setting]:
    """Return options of workers: those that are keys of the profile under their own names."""
    fields = set(keys_of(Workers)) - {"options"}
    own: list[Setting] = [
        (("workers", key), value) for key, value in options.items() if key in fields
    ]
    others: list[Setting] = [
        (("workers", "options", key), value) for key, value in options.items() if key not in fields
    ]
    return own + others


def _extra_args(value: Any) -> dict[str, Any]:
    """Return ``["--lifetime", "1h", "--no-x", "--y=2"]`` as options."""
    found: dict[str, Any] = {}
    last = ""
    for word in sequence(value):
        text = str(word)
        if text.startswith("--"):
            last, option_value = _option(text)
            found[last] = option_value
        elif last and found.get(last) is True:
            found[last] = text
        else:
            raise ValueError(f"{word!r} does not follow an option")
    return found


def _option(word: str) -> tuple[str, str | bool]:
    name, equals, text = word[2:].partition("=")
    name = name.replace("-", "_")
    if equals:
        return name, text
    if name.startswith("no_"):
        return name.removeprefix("no_"), False
    return name, True


def _per_job_settings(given: Mapping[str, Any], gpus_per_job: Any) -> Iterator[Setting]:
    """Yield each worker's share of dask-jobqueue's numbers of one job."""
    cpu_workers = gpus_per_job is not None and count(gpus_per_job) == 0
    workers = _workers_of_job(given, gpus_per_job, cpu_workers)
    if "processes" in given and not cpu_workers:
        yield ("gpus_per_job",), workers
    if "cores" in given:
        cores = positive(given["cores"])
        if cores < workers:
            raise ValueError(f"{cores} cores are too few for {workers} workers of a job")
        yield ("workers", "threads"), cores // workers
    if "memory" in given:
        yield ("workers", "memory"), f"{size(given['memory']) // workers}B"


def _workers_of_job(given: Mapping[str, Any], gpus_per_job: Any, cpu_workers: bool) -> int:
    expected, why = None, ""
    if cpu_workers:
        expected, why = 1, "a job of CPU workers has one"
    elif gpus_per_job is not None:
        expected = positive(gpus_per_job)
        why = f"gpus_per_job is {expected}, one worker per GPU"
    if "processes" not in given:
        return expected or 1
    processes = positive(given["processes"])
    if expected is not None and processes != expected:
        raise ValueError(f"processes is {processes}, but {why}")
    return processes
