"""Keywords of the cluster classes, as the same document that a profile file gives.

A keyword is a key of the profile, or one of dask-jobqueue's with the same meaning. Keywords that
can have no meaning here are refused with the name of their replacement. The keys of the user's dask
configuration count as keywords; a keyword of the same meaning has priority.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config.document import PYTHON, Document, Loc
from ..config.fields import positive
from ..config.hints import in_python
from ..config.model import build, key_names
from ..config.profile import Profile
from ..config.site import Site
from ..config.sitefiles import SiteFile
from ..config.spec import ClusterSpec, make_spec
from ..config.thishost import NoSiteHereError
from ..errors import InputError, Position, Problem
from ..injob.size import WorkerSize
from .conversions import Setting, job_settings
from .jobqueue import Configuration
from .options import CONFIGURABLE
from .vocabulary import JOBQUEUE, PER_JOB, Vocabulary

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
    _check_site_and_number(site, n_workers)
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


def _check_site_and_number(site: object, n_workers: object) -> None:
    if site is not None and not isinstance(site, str):
        message = f"site: {site!r} is not the name of a site"
        hint = f"n_workers={site!r}" if isinstance(site, int) else "the name of a site, as text"
        raise InputError(message, hint=hint)
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
