"""Keywords of the cluster classes, as the same document that a profile file gives.

A keyword is a key of the profile, or one of dask-jobqueue's or dask-cuda's with the same meaning.
Those that can have no meaning here are refused with the name of their replacement. The keys of the
user's dask configuration count as keywords; a keyword of the same meaning has priority.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..config import placeholders
from ..config.document import PYTHON, Document, Loc
from ..config.fields import one_or_several, positive, sequence
from ..config.model import build
from ..config.profile import Profile
from ..config.site import Site
from ..config.sitefiles import NoSiteHereError, SiteFile
from ..config.spec import ClusterSpec, choose_site, make_spec
from ..errors import InputError, Position, Problem
from ..injob.names import WorkerSize
from ..planning.plan import make_plan
from ..schedulers import Scheduler, get_scheduler
from ..schedulers.words import NotHere
from .clusteroptions import CONFIGURABLE, Configuration
from .jobnumbers import PER_JOB, JobNumbers, Setting
from .vocabulary import (
    DIRECTIVES,
    EXTRA_ARGS,
    JOBQUEUE,
    LIFETIME,
    SKIPS,
    Noted,
    Vocabulary,
    directives,
    plain,
)

# -- keywords as a profile -------------------------------------------------------------------------
_ROUNDS = 3
"""Steps at which keywords can have problems: their sizes, their values as keys, the plan."""
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
    site_file = _site_file(site)
    name = site_file.site.scheduler if site_file else next(iter(batch_schedulers), "")
    scheduler = get_scheduler(name)() if name else None
    n_workers = plain(n_workers)
    _check_number(n_workers)
    read = read_keywords(keywords, configuration, vocabulary, scheduler)

    def make(document: Document) -> ClusterSpec:
        own = site_file
        if own is None and scheduler and "queue" in document.value:
            own = _site_of(document, scheduler)
        if own is None:
            _report_no_site(scheduler)
        sized = _with_size(_with_type_of_site(document, own.site), n_workers)
        spec = make_spec(sized, site=own)
        spec.check_batch_scheduler(batch_schedulers)
        return spec

    return replace(_with_all_problems(read, make), notes=read.notes)


def _with_all_problems(read: Keywords, make: Callable[[Document], ClusterSpec]) -> ClusterSpec:
    """Return the specification of keywords. Raises InputError with the problems of all of them.

    Those without a problem so far are read, and planned, without the others.
    """
    problems, document = list(read.problems), read.document
    for _ in range(_ROUNDS):
        try:
            spec = make(document)
            if not problems:
                return spec
            if not get_scheduler(spec.site.site.scheduler).on_this_machine:
                make_plan(spec, python="python", replaces="owner")
            break
        except InputError as error:
            sources = {problem.position.source for problem in error.problems if problem.position}
            keywords = [problem for problem in error.problems if _is_of_a_keyword(problem)]
            problems += keywords if problems else error.problems
            items = document.items.items()
            kept = {key: item for key, item in items if item.place.source not in sources}
            document = document.having(kept)
    raise InputError(list(dict.fromkeys(problems)))


def _is_of_a_keyword(problem: Problem) -> bool:
    place = problem.position.source if problem.position else ""
    return place.startswith(("keyword ", "dask configuration "))


def _site_file(site: str | None) -> SiteFile | None:
    """Return the site of this name, else the one of this host; None if there is none."""
    try:
        return choose_site(Document({}), site, None)
    except NoSiteHereError:
        return None


def _report_no_site(scheduler: Scheduler | None) -> NoReturn:
    message = "no site given, and no site file matches this host"
    hint = "site='NAME' (`gpujobs sites list`)"
    if scheduler:
        hint = f"queue='NAME': the keywords then describe its nodes; or {hint}"
    raise InputError(message, hint=hint)


def profile_of(
    keywords: Mapping[str, Any],
    n_workers: int,
    configuration: Configuration | None,
    vocabulary: Vocabulary,
    scheduler: Scheduler | None = None,
) -> tuple[Document, tuple[str, ...]]:
    """Return the profile that keywords describe, with a number of GPUs, and notes.

    ``scheduler``: the batch scheduler of the directives, None: not known. Raises InputError.
    """
    _check_number(n_workers)
    read = read_keywords(keywords, configuration, vocabulary, scheduler).checked()
    return _with_size(read.document, n_workers), read.notes


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


def _with_type_of_site(document: Document, site: Site) -> Document:
    """Return the profile with the site's name of a GPU type.

    A directive has the batch scheduler's name.
    """
    wanted, place = document.value.get("gpu_type"), document.position(("gpu_type",))
    types = [pair for queue in site.queues.values() for pair in queue.named_types.items()]
    if wanted is None or wanted in dict(types):
        return document
    name = next((name for name, native in types if native == wanted), wanted)
    return Document({"gpu_type": Document(name, place)}).over(document)


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


def _site_of(document: Document, scheduler: Scheduler) -> SiteFile:
    """Return a site with one queue from the keywords: users of dask-jobqueue have no site file."""
    build(Profile, document)  # its errors name the keyword
    profile = document.value
    queue: dict[str, Any] = {
        f"{resource}_per_node": profile[f"{resource}_per_job"]
        for resource in ("cpus", "memory")
        if f"{resource}_per_job" in profile
    }
    if profile.get("gpus") != 0:
        queue["gpus_per_node"] = profile.get("gpus_per_job", _worker_size(profile).gpus)
    if "gpu_type" in profile:
        if "gpu_type" not in placeholders.names(" ".join(scheduler.request)):
            message = f"{scheduler.name}: no line requests GPUs of type {profile['gpu_type']}"
            hint = "a site file whose `request` has {gpu_type}"
            raise InputError(Problem(message, document.position(("gpu_type",)), hint=hint))
        queue["gpu_type"] = profile["gpu_type"]
    site = {
        "description": "from keywords",
        "scheduler": scheduler.name,
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
    scheduler: Scheduler | None = None,
) -> Document:
    """Return the profile that keywords describe. Raises InputError with all problems."""
    return read_keywords(keywords, configuration, vocabulary, scheduler).checked().document


class Keywords(NamedTuple):
    """The profile that keywords describe."""

    document: Document
    notes: tuple[str, ...]
    problems: Sequence[Problem]

    def checked(self) -> Keywords:
        """Return itself. Raises InputError if there are problems."""
        if self.problems:
            raise InputError(self.problems)
        return self


def read_keywords(
    keywords: Mapping[str, Any],
    configuration: Configuration | None = None,
    vocabulary: Vocabulary = JOBQUEUE,
    scheduler: Scheduler | None = None,
) -> Keywords:
    """Return the profile that keywords and the user's dask configuration describe.

    Every position names its keyword. ``scheduler``: the batch scheduler of the directives.
    """
    converter = _Converter(vocabulary, scheduler)
    found = _given(keywords, configuration or Configuration(), vocabulary)
    converter.read([given for given in found if given.name in SKIPS], converter.add_skip)
    converter.read(found, converter.add)
    converter.add_lifetime(found)
    converter.add_per_job({given.name: given for given in found if vocabulary.takes(given.name)})
    return Keywords(converter.document(), tuple(converter.notes), converter.problems)


def _given(
    keywords: Mapping[str, Any], configuration: Configuration, vocabulary: Vocabulary
) -> list[Given]:
    """Return what counts, keywords last."""
    own = [
        Given(name, plain(value), f"keyword {name}", keyword=True)
        for name, value in keywords.items()
        if value is not None
    ]
    names = {given.name for given in own} | set(CONFIGURABLE)
    configured = [
        Given(name, plain(value), configuration.place(name), keyword=False)
        for name, value in configuration.values.items()
        if name not in names
        and not (name in configuration.unchanged and not vocabulary.takes(name))
    ]
    return [*configured, *own]


class _Converter:
    """Collects the settings, the notes and the problems of keywords."""

    def __init__(self, vocabulary: Vocabulary, scheduler: Scheduler | None) -> None:
        self.vocabulary, self.scheduler = vocabulary, scheduler
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.whole = Document({}, source=PYTHON)
        self.sources: dict[Loc, Given] = {}
        self.skips: list[str] = []
        """Texts of the user's directives that are left out."""
        self.lifetime: list[Setting] = []
        self.resources: list[Document] = []
        """Directives with the parts of `resource_spec` that no key means."""

    def read(self, found: Iterable[Given], add: Callable[[Given], None]) -> None:
        """Call ``add`` for keywords, and collect their problems."""
        for given in found:
            try:
                add(given)
            except ValueError as error:
                self.problems.append(given.problem(str(error)))

    def add_skip(self, given: Given) -> None:
        """Add texts of lines that dask-jobqueue would leave out."""
        for text in map(str, sequence(given.value)):
            self.skips.append(text)
            self.notes.append(
                f"{given.name}: lines with {text!r} of your directives are left out; gpujobs and "
                "the site write their own"
            )

    def add(self, given: Given) -> None:
        """Convert one keyword; those of `PER_JOB` are converted together."""
        name, words = given.name, self.vocabulary
        word = words.get(name)
        if isinstance(word, str):
            self.problems.append(given.problem("has no meaning here", word))
        elif isinstance(word, Noted):
            self.notes.append(f"{name}: {word.text}")
        elif name not in words.known():
            self.problems.append(given.problem("unknown keyword", words.suggestion(name)))
        elif name in DIRECTIVES:
            self._put((("directives",), self._directives(given.value, given)), given)
        elif name == "groups" and isinstance(given.value, Mapping):
            for group, keys in given.value.items():
                self._add_group(("groups", group), keys, given)
        elif name == "resource_spec":
            self._add_resources(given)
        else:
            for setting in self._settings(name, given.value):
                self._put(setting, given)

    def _settings(self, name: str, value: Any) -> Iterator[Setting]:
        """Yield the settings of a keyword, without those that are only noted."""
        short = self.scheduler is not None and self.scheduler.short_clock
        if name == "walltime" and short and re.fullmatch(r"\d+:\d\d", str(value)):
            value = f"{value}:00"
        for loc, setting in self.vocabulary.settings(name, value):
            if name in EXTRA_ARGS and loc[:2] == ("workers", "options") and loc[2] in LIFETIME:
                self.lifetime.append((loc, setting))
            else:
                yield loc, setting

    def add_lifetime(self, found: Iterable[Given]) -> None:
        """Add the lifetime of workers, which only plain workers have."""
        given = next((given for given in found if given.name in EXTRA_ARGS), None)
        if not self.lifetime or given is None:
            return
        plain_workers = self.whole.value_at(("workers", "worker_class")) == "nanny"
        if plain_workers or self.whole.value.get("gpus") == 0:
            for setting in self.lifetime:
                self._put(setting, given)
        else:
            self.notes.append(
                "--lifetime is not used: GPU workers end with their job, and a job close to its "
                "walltime gets a successor"
            )

    def _add_group(self, loc: Loc, keys: Any, given: Given) -> None:
        """Add the keys of a group of workers, and those that its directives mean."""
        self._put((loc, keys), given)
        if not isinstance(keys, Mapping):  # reported later
            return
        for key in keys:
            self.sources[*loc, key] = given
        if "directives" in keys:
            lines = self._directives(keys["directives"], given, loc)
            self._put(((*loc, "directives"), lines), given)

    def _directives(self, value: Any, given: Given, loc: Loc = ()) -> list[Any]:
        """Return the user's directives without those that mean keys, which are set.

        ``loc``: the group that they are of.
        """
        kept: list[Any] = []
        for line in sequence(directives(value)):
            if not isinstance(line, str):
                kept.append(line)
            elif not any(text in line for text in self.skips):
                kept += filter(None, [self._translated(line, given, loc)])
        return kept

    def _add_resources(self, given: Given) -> None:
        """Add the resources that dask-jobqueue requests with ``-l``, instead of its own numbers."""
        if self.scheduler is None:
            raise ValueError("the batch scheduler is not known: use GPUPBSCluster or GPUSGECluster")
        if line := self._translated(f"-l {given.value}", given):
            self.resources.append(Document(line, source=given.place))

    def document(self) -> Document:
        """Return the profile."""
        if not self.resources:
            return self.whole
        before = self.whole.find(("directives",)) or Document([])
        lines = Document([*before.items.values(), *self.resources], source=PYTHON)
        return Document({"directives": lines}, source=PYTHON).over(self.whole)

    def _translated(self, line: str, given: Given, loc: Loc = ()) -> str:
        """Set the keys that a directive means, and return the rest of it."""
        if self.scheduler is None:
            return line
        try:
            found = self.scheduler.meaning(line)
        except NotHere as error:
            self.problems.append(given.problem(f"`{line}`: {error}", error.hint))
            return ""
        except ValueError:  # it is no directive, which is reported later
            return line
        for key, value in found.settings.items():
            self._put(((*loc, key), value), given, of_line=True)
        return found.rest

    def add_per_job(self, found: Mapping[str, Given]) -> None:
        """Convert dask-jobqueue's numbers of one job."""
        try:
            numbers = JobNumbers(self._numbers(found), _worker_size(self.whole.value))
            for name, setting in numbers.settings():
                self._put(setting, found[name])
            self.notes += numbers.notes()
        except ValueError as error:
            places = [found[name].place for name in PER_JOB if name in found]
            place = Position(", ".join(places) or "keyword gpus_per_job")
            self.problems.append(Problem(str(error), place))

    def _numbers(self, found: Mapping[str, Given]) -> dict[str, Any]:
        """Return the keywords with what the directives and `resource_spec` say of one job."""
        values: dict[str, Any] = {name: given.value for name, given in found.items()}
        whole = self.whole.value
        if whole.get("gpus") == 0:
            values["gpus_per_job"] = 0
        elif "gpus_per_job" in whole:
            values["gpus_per_job"] = whole["gpus_per_job"]
        if "resource_spec" in found:
            requested = {"job_cpu": "cpus_per_job", "job_mem": "memory_per_job"}
            values |= {name: whole[key] for name, key in requested.items() if key in whole}
        if "dask_cuda" in str(values.get("worker_command", "")):
            values.pop("processes", None)  # it starts one worker on each GPU
        return values

    def _put(self, setting: Setting, given: Given, *, of_line: bool = False) -> None:
        """Set a key; ``of_line``: another line of the same keyword must not set another value."""
        loc, before = setting[0], self.sources.get(setting[0])
        part = Document(setting[1], source=given.place)
        if before and (before.name != given.name or of_line):
            if before.keyword > given.keyword:
                return
            own, other = part.plain, self.whole.value_at(loc)
            if before.keyword == given.keyword and not _same(loc, own, other):
                message = f"sets `{'.'.join(map(str, loc))}`, as {before.place} does"
                self.problems.append(given.problem(f"{message}: {own} and {other}"))
        self.sources[loc] = given
        for step in reversed(loc[1:]):
            part = Document({step: part}, part.place)
        self.whole = Document({loc[0]: part}, source=PYTHON).over(self.whole)


def _same(loc: Loc, one: object, other: object) -> bool:
    """Return whether two values of a key are the same, as ``12h`` and ``12:00:00``."""
    return one == other or _read(loc, one) == _read(loc, other)


def _read(loc: Loc, value: object) -> object:
    for step in reversed(loc):
        value = {step: value}
    try:
        return build(Profile, Document(value))
    except InputError:  # reported later
        return value
