"""Keywords of the cluster classes, as the same document that a profile file gives.

A keyword is a key of the profile, or one of dask-jobqueue's with the same meaning. Keywords that
can have no meaning here are refused with the name of their replacement. The keys of the user's dask
configuration count as keywords; a keyword of the same meaning has priority.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..config.document import Document, Loc
from ..config.fields import count, positive
from ..config.model import build, key_names, keys_of, suggest
from ..config.profile import Profile, Workers
from ..config.site import Site
from ..config.sitefiles import NoSiteHereError, SiteFile
from ..config.spec import ClusterSpec, make_spec
from ..errors import InputError, Position, Problem
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
from .jobqueue import Configuration
from .options import CONFIGURABLE

SYNONYMS: dict[str, Loc] = {
    "project": ("account",),
    "job_name": ("name",),
    "job_cpu": ("cpus_per_job",),
    "ncpus": ("cpus_per_job",),
    "local_directory": ("workers", "local_directory"),
    "python": ("environment", "python"),
    "interface": ("network", "interface"),
    "worker_memory": ("workers", "memory"),
    "worker_threads": ("workers", "threads"),
    "worker_class": ("workers", "worker_class"),
}
"""dask-jobqueue's names for keys of the profile."""
CONVERTED: dict[str, tuple[Loc, Callable[[Any], Any]]] = {
    "job_extra_directives": (("directives",), directives),
    "job_extra": (("directives",), directives),
    "job_script_prologue": (("environment", "setup"), prologue),
    "env_extra": (("environment", "setup"), prologue),
    "death_timeout": (("workers", "death_timeout"), seconds),
    "job_mem": (("memory_per_job",), memory),
    "mem": (("memory_per_job",), memory),
}
"""dask-jobqueue's names for keys of the profile whose values are written differently."""
SEVERAL: dict[str, Callable[[Any], Iterable[Setting]]] = {
    "protocol": lambda value: protocol_settings(str(value)),
    "worker_options": lambda value: worker_settings(dict(value)),
    "worker_extra_args": extra_args_settings,
    "extra": extra_args_settings,
}
"""Keywords that set several keys of the profile."""
PER_JOB = ("cores", "memory", "processes")
"""dask-jobqueue's numbers of one job, which are converted together."""
REFUSED = {
    "resource_spec": "leave it out: cores and memory are requested, by `request` of the site file",
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
    "gpus": "use n_workers",
    "run": "use `gpujobs submit`, which runs a command in the cluster",
    "start_workers": "use wait_for_workers",
}
"""Keywords without a meaning here, and their replacements."""
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
) -> ClusterSpec:
    """Return the specification that keywords describe: whole jobs with ``n_workers`` or more.

    Raises InputError, also if the site's batch scheduler is not one of ``batch_schedulers``.
    """
    _check_site_and_number(site, n_workers)
    document = _with_size(document_of(keywords, configuration), n_workers)
    try:
        spec = make_spec(document, site=site)
    except NoSiteHereError:
        if not batch_schedulers or "queue" not in document.value:
            raise
        spec = make_spec(document, site=_site_of(document, batch_schedulers[0]))
    found = spec.site.site.scheduler
    if batch_schedulers and found not in batch_schedulers:
        message = f"site {spec.site.name} has {found}, not {' or '.join(batch_schedulers)}"
        raise InputError(message, hint="use GPUJobQueueCluster, which takes any site")
    return spec


def _check_site_and_number(site: object, n_workers: object) -> None:
    if site is not None and not isinstance(site, str):
        message = f"site: {site!r} is not the name of a site"
        hint = f"n_workers={site!r}" if isinstance(site, int) else "the name of a site, as text"
        raise InputError(message, hint=hint)
    if not isinstance(n_workers, int) or isinstance(n_workers, bool) or n_workers < 0:
        raise InputError(f"n_workers: {n_workers!r} is not a number of workers (0, 1, 2, …)")


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
        queue["gpus_per_node"] = profile.get("gpus_per_job", 1)
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
    keywords: Mapping[str, Any], configuration: Configuration | None = None
) -> Document:
    """Return the profile that keywords and the user's dask configuration describe.

    Every position names its keyword. Raises InputError with all problems.
    """
    converter = _Converter()
    found = _given(keywords, configuration or Configuration())
    for given in found:
        converter.add(given)
    converter.add_per_job({given.name: given for given in found})
    return converter.document()


def _given(keywords: Mapping[str, Any], configuration: Configuration) -> list[Given]:
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
        if name not in names and not (name in REFUSED and name in configuration.unchanged)
    ]
    return [*configured, *own]


class _Converter:
    """Collects the settings and the problems of keywords."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.values: dict[str, Any] = {}
        self.sources: dict[Loc, Given] = {}

    def add(self, given: Given) -> None:
        """Convert one keyword; those of `PER_JOB` are converted together."""
        name = given.name
        if name in REFUSED:
            self.problems.append(given.problem("has no meaning here", REFUSED[name]))
        elif name not in _known():
            self.problems.append(given.problem("unknown keyword", _suggestion(name)))
        elif name not in PER_JOB:
            try:
                for setting in _settings(name, given.value):
                    self._put(setting, given)
            except ValueError as error:
                self.problems.append(given.problem(str(error)))

    def add_per_job(self, found: Mapping[str, Given]) -> None:
        """Convert dask-jobqueue's numbers of one job."""
        try:
            for name, setting in job_settings({name: found[name].value for name in found}):
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
        return Document(self.values, positions, dict(positions), "keywords")

    def _put(self, setting: Setting, given: Given) -> None:
        loc, value = setting
        before = self.sources.get(loc)
        if before and before.name != given.name:
            if before.keyword > given.keyword:
                return
            if before.keyword == given.keyword and before.value != given.value:
                message = f"sets `{'.'.join(map(str, loc))}`, as {before.place} does"
                self.problems.append(given.problem(message))
        mapping: dict[Any, Any] = self.values
        for step in loc[:-1]:
            mapping = mapping.setdefault(step, {})
        mapping[loc[-1]] = value
        self.sources[loc] = given


def _known() -> list[str]:
    profile = (name for name in keys_of(Profile) if name not in REFUSED)
    return [*profile, *SYNONYMS, *CONVERTED, *SEVERAL, *PER_JOB]


def _suggestion(name: str) -> str:
    known = _known()
    return suggest(name, known, [*known, *(f"workers.{key}" for key in key_names(Workers))])


def _settings(name: str, value: Any) -> Iterable[Setting]:
    """Return the settings of one keyword. Raises ValueError."""
    if name == "gpus_per_job" and count(value) == 0:
        return [(("gpus",), 0)]
    if name in SYNONYMS:
        return [(SYNONYMS[name], value)]
    if name in CONVERTED:
        loc, convert = CONVERTED[name]
        return [(loc, convert(value))]
    if name in SEVERAL:
        return SEVERAL[name](value)
    if isinstance(value, Mapping) and value:
        return [((name, key), item) for key, item in value.items()]
    return [((name,), value)]
