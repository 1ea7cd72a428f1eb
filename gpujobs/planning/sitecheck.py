"""Find the errors of a site file: plan and render the jobs that each of its queues allows.

Pure, as planning is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import placeholders
from ..config.document import Document
from ..config.fields import one_or_several
from ..config.site import Site
from ..config.sitefiles import SiteFile
from ..config.sitequeue import Account, Option, Queue
from ..config.spec import ClusterSpec, make_spec
from ..errors import InputError, Position, Problem
from ..schedulers import get_scheduler
from .directives import request_texts
from .environments import is_too_old
from .limits import Job, broken_limit, exceeded, job_limits
from .plan import Plan, make_plan
from .queues import smallest_job
from .render import Script, render
from .requested import Machine
from .samerequests import HINT, same_requests, same_requests_text

# -- trial profiles: each shape of jobs that a queue allows ----------------------------------------
WALLTIME = 600
ACCOUNT = "any"
"""The account of trials, and the value of options, if no real one is given."""
SMALLEST = "smallest job"
"""The shape that each queue must accept, whatever its limits are."""
DEFAULTS = "defaults"
"""The shape of the trial that consists of the site's `defaults`."""

LEFT_OUT = ("gpus_per_job", "cpus_per_job", "memory_per_job", "gpu_type", "head", "groups")
"""Keys of the site's `defaults` that only their own trial has: they may not fit every queue."""

OF_THE_JOB = (
    "gpus", "gpus_per_job", "gpu_type", "queue", "layout", "workers", "groups", "head", "run",
    "run_on", "start_workers",
)  # fmt: skip
"""Keys that each trial has by itself: those that users set are for the job of `--run`."""


@dataclass(frozen=True)
class Trial:
    """A profile that a queue of the site should accept."""

    queue: str
    """The queue's key; "" for the site's `defaults`."""
    shape: str
    """Name of the shape of the jobs."""
    profile: Mapping[str, object]
    queues: tuple[str, ...]
    """The queues that the profile may use."""
    environment: tuple[str, ...] = ()
    """Location of the environment that is tried."""

    @property
    def place(self) -> tuple[str, ...]:
        """Location in the site file."""
        if self.environment:
            return self.environment
        return ("queues", self.queue) if self.queue else ("defaults",)

    def __str__(self) -> str:
        """Return the trial as text: ``queue gpu: mpi``."""
        return f"queue {self.queue}: {self.shape}" if self.queue else f"the site's {self.shape}"


def trials(site: Site) -> Iterator[Trial]:
    """Yield the trials of all queues of ``site``, and the one of its `defaults`."""
    for key in site.queues:
        yield from _QueueTrials(site, key).trials()
    for place, name, key in environment_queues(site):
        shape, smallest = f"environment {name}", _smallest(site, key)
        trial = _QueueTrials(site, key).trial(shape, {**smallest, **_named(name)})
        yield replace(trial, environment=place)
    yield _defaults(site)


def environment_queues(site: Site) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield the place and the name of each environment, and the first queue that may have it.

    That is the first one whose driver is new enough, as far as it is known.
    """
    for place, section in site.sections():
        for name, environment in section.environments.items():
            keys = list(place[1:]) or list(site.queues)
            fitting = (key for key in keys if not is_too_old(site.queues[key], environment))
            yield (*place, "environments", name), name, next(fitting, keys[0])


def _named(name: str) -> dict[str, object]:
    return {"environment": {"name": name}}


def _required_environment(site: Site, key: str) -> dict[str, object]:
    """Return the environment, as keys of a profile, of a site that allows only its own."""
    if not site.environments_only:
        return {}
    queue = site.queues[key]
    for name, environment in site.in_queue(key).environments.items():
        if not is_too_old(queue, environment):
            return _named(name)
    return {}


@dataclass(frozen=True)
class _QueueTrials:
    site: Site
    key: str

    @property
    def queue(self) -> Queue:
        return self.site.queues[self.key]

    @property
    def gpus(self) -> int:
        """GPUs of a node."""
        return self.queue.worker_gpus

    def trials(self) -> Iterator[Trial]:
        """Yield one trial for each shape."""
        smallest = _smallest(self.site, self.key)
        yield self.trial(SMALLEST, smallest)
        shapes = [*self._parts_of_a_node(), *self._nodes(), *self._without_gpus()]
        for shape, keys in shapes:
            yield self.trial(shape, keys)
        if self.gpus and len(self.queue.gpu_types) > 1:
            for name in self.queue.gpu_types:
                yield self.trial(f"GPU type {name}", {**smallest, "gpu_type": name})
        yield from self._options(smallest)
        if limit := self.queue.longest_walltime(self.queue.min_nodes or 1):
            yield self.trial("walltime at the limit", {**smallest, "walltime": f"{limit}s"})
        yield from self._head(smallest)

    def _options(self, smallest: Mapping[str, object]) -> Iterator[Trial]:
        """Yield a trial for each option that a profile may leave out: it has no directive then."""
        site = self.site.in_queue(self.key)
        required = [name for name, option in site.options.items() if option.required]
        for name, option in site.options.items():
            if option.default is None and not option.required:
                options = dict.fromkeys((*required, name), ACCOUNT)
                yield self.trial(f"option {name}", {**smallest, "options": options})

    def _parts_of_a_node(self) -> Iterator[tuple[str, dict[str, object]]]:
        if self.queue.exclusive or not self._has_layout("workers"):
            return
        if self.gpus > 1 and self._allows(nodes=1, gpus=1):
            yield "one GPU", {"gpus": 1}
        part = self.gpus // 2
        if part > 1 and self._allows(nodes=1, gpus=part):
            yield "part of a node", {"gpus": part, "gpus_per_job": part}

    def _nodes(self) -> Iterator[tuple[str, dict[str, object]]]:
        whole, one_node = {"gpus_per_job": self.gpus}, self._allows(nodes=1, gpus=self.gpus)
        if one_node and self._has_layout("workers"):
            yield "full node", {"gpus": self.gpus, **whole}
            if self._allows_jobs(2, self.gpus):
                yield "two nodes", {"gpus": 2 * self.gpus, **whole}
        if not self._has_layout("mpi"):
            return
        nodes = max(2, self.queue.min_nodes or 1)
        if self._allows(nodes=nodes, gpus=nodes * self.gpus) and self._spans_nodes():
            yield "mpi", {"gpus": nodes * self.gpus, "layout": "mpi"}
        elif one_node:
            yield "mpi", {"gpus": self.gpus, "layout": "mpi"}

    def _without_gpus(self) -> Iterator[tuple[str, dict[str, object]]]:
        if self.gpus and self._takes_cpu_jobs():
            yield "CPU", {"gpus": 0}

    def _head(self, smallest: Mapping[str, object]) -> Iterator[Trial]:
        without_gpus = (key for key, queue in self.site.queues.items() if not queue.worker_gpus)
        key = next(without_gpus, self.key if self._takes_cpu_jobs() else None)
        if key is None or smallest.get("layout") == "mpi" or not self._allows_jobs(2):
            return
        yield self.trial("head of its own", {**smallest, "head": {"queue": key}}, key)

    def _takes_cpu_jobs(self) -> bool:
        """Return whether jobs without GPUs may run in the queue."""
        if without_cpu_workers(self.site, self.key):
            return False
        whole_nodes = self.gpus and self.queue.exclusive
        return not whole_nodes and (self.queue.min_nodes or 1) == 1 and self._has_layout("workers")

    def _has_layout(self, name: str) -> bool:
        return name in _layouts(self.site, self.key)

    def _allows(self, *, nodes: int, gpus: int) -> bool:
        """Return whether the queue allows one job of this size."""
        job = Job(nodes, gpus, _walltime(self.queue))
        there = nodes <= (self.queue.nodes or nodes) and gpus > 0
        return there and not broken_limit(self.queue, job) and self._allows_jobs(1, gpus)

    def _allows_jobs(self, jobs: int, gpus: int = 0) -> bool:
        """Return whether one user may have ``jobs`` jobs of ``gpus`` GPUs each."""
        return exceeded(job_limits(self.site, self.key, gpus), jobs) is None

    def _spans_nodes(self) -> bool:
        scheduler = get_scheduler(self.site.scheduler)()
        site = self.site.in_queue(self.key)
        return scheduler.spans_nodes(request_texts(site, scheduler, gpus=True, nodes=2))

    def trial(self, shape: str, keys: Mapping[str, object], head_queue: str = "") -> Trial:
        """Return the trial of a profile with these ``keys`` in this queue."""
        profile: dict[str, object] = {
            "layout": "workers",
            "queue": self.key,
            "walltime": f"{_walltime(self.queue)}s",
            "account": ACCOUNT,
            "run_on": "head",
            **_required_options(self.site.in_queue(self.key)),
            **_required_environment(self.site, self.key),
            **keys,
        }
        queues = dict.fromkeys((self.key, head_queue or self.key))
        return Trial(self.key, shape, profile, tuple(queues))


def without_cpu_workers(site: Site, key: str) -> str:
    """Return why a queue with GPUs takes no CPU workers although it is correct; "" if it may.

    Their request has a part of the memory of a node, of which the number of CPUs is not known.
    """
    queue, own = site.queues[key], site.in_queue(key)
    texts = " ".join((*(own.cpu_request or ()), *own.directives))
    asks = any(name.startswith("memory_") for name in placeholders.names(texts))
    if not asks or not queue.cpus_per_gpu or not queue.memory_per_node:
        return ""
    return "no CPU workers without `memory_per_job`: it states cpus_per_gpu, not cpus_per_node"


def _required_options(site: Site) -> dict[str, object]:
    """Return values of the options that a profile must choose, as keys of a profile."""
    names = [name for name, option in site.options.items() if option.required]
    return {"options": dict.fromkeys(names, ACCOUNT)} if names else {}


def _layouts(site: Site, key: str) -> tuple[str, ...]:
    return site.in_queue(key).layouts or ("workers", "mpi")


def _smallest(site: Site, key: str) -> dict[str, object]:
    """Return the keys of the smallest profile for a queue."""
    queue = site.queues[key]
    per_node = queue.worker_gpus
    if not per_node:
        return {"gpus": 0}
    gpus = smallest_job(queue)
    nodes = max(queue.min_nodes or 1, -(-gpus // per_node))
    if nodes > 1:
        return {"gpus": per_node * nodes, "layout": "mpi"}
    if "workers" in _layouts(site, key):
        return {"gpus": gpus}
    return {"gpus": gpus, "layout": "mpi"}


def _walltime(queue: Queue) -> int:
    """Return a walltime within the limits of a queue."""
    seconds = max(WALLTIME, queue.min_walltime or 0)
    return min(seconds, queue.max_walltime or seconds)


def _defaults(site: Site) -> Trial:
    """Return the site's `defaults` as a profile, with the keys that users have to add."""
    defaults = site.defaults
    wanted = list(map(str, one_or_several(defaults.get("queue", "auto"))))
    fitting = [key for key in site.queues if _is_wanted(site, key, wanted)]
    first = next(iter(fitting or site.queues))
    walltime = f"{_walltime(site.queues[first])}s"
    added: dict[str, object] = {"walltime": walltime, "account": ACCOUNT}
    if not fitting and "auto" in wanted:
        added["queue"] = first
    if "gpus" not in defaults and "groups" not in defaults:
        added |= _smallest(site, first)
    added |= _required_options(site.in_queue(first))
    added |= _required_environment(site, first)
    if defaults.get("run_on") == "ranks":
        added["run"] = ["program.py"]
    keys = {name: value for name, value in added.items() if name not in defaults}
    return Trial("", DEFAULTS, keys, tuple(site.queues))


def _is_wanted(site: Site, key: str, wanted: Sequence[str]) -> bool:
    """Return whether the value ``wanted`` of `queue` may lead to the queue ``key``."""
    names = {key, site.queue_name(key), *(["auto"] if site.queues[key].auto else [])}
    return not names.isdisjoint(wanted)


# -- findings --------------------------------------------------------------------------------------
SOURCE = "a profile for every queue"
"""In place of a file name, in positions of the profile that is tried."""
NO_SETTINGS = Document({})
ANY_MACHINE = Machine(gpus=(), cpus=1, memory=2**30, busy={})


@dataclass(frozen=True)
class Finding:
    """An error of a site file, and the trials in which it was found."""

    problem: Problem
    trials: tuple[Trial, ...] = ()

    def __str__(self) -> str:
        shown = [str(trial) for trial in self.trials if trial.shape != SMALLEST]
        if not shown or len(shown) < len(self.trials):
            return str(self.problem)
        return f"{self.problem}\n  in {shown[0]}"


@dataclass(frozen=True)
class Tried:
    """The result of a trial: the scripts, and the problems."""

    trial: Trial
    scripts: tuple[Script, ...] = ()
    problems: tuple[Problem, ...] = ()


def site_problems(site_file: SiteFile) -> list[Problem]:
    """Return the errors that make plans on the site fail, each of them once."""
    return [finding.problem for finding in findings(try_site(site_file))]


def try_site(
    site_file: SiteFile, settings: Document = NO_SETTINGS, *, any_account: bool = True
) -> list[Tried]:
    """Return the result of each trial of the site; ``settings`` are laid over its profile.

    Not those that say which job it is: queue, GPUs and workers (`OF_THE_JOB`).

    ``any_account``: the trials have an invented account unless the settings have one.
    """
    found = []
    settings = settings.without(*OF_THE_JOB)
    for trial in trials(site_file.site):
        profile = Document(trial.profile, source=SOURCE)
        if not any_account and profile.value.get("account") == ACCOUNT:
            profile = profile.without("account", "options")
        found.append(_tried(site_file, trial, settings.over(profile)))
    return found


def findings(results: list[Tried]) -> list[Finding]:
    """Return the problems of all trials; those that differ only in their numbers are one."""
    found: dict[object, Finding] = {}
    for result in results:
        for problem in result.problems:
            key = (re.sub(r"\d+", "0", problem.message), problem.position, problem.related)
            first = found.setdefault(key, Finding(problem))
            found[key] = replace(first, trials=(*first.trials, result.trial))
    return list(found.values())


def _tried(site_file: SiteFile, trial: Trial, profile: Document) -> Tried:
    try:
        spec = _spec(site_file, trial, profile)
        local = get_scheduler(site_file.site.scheduler).on_this_machine
        plan = make_plan(spec, python="python", machine=ANY_MACHINE if local else None)
        scripts = render(plan, f"{plan.name}-0000", site_folder=site_file.path.parent)
    except InputError as error:
        return Tried(trial, problems=tuple(_at_site(site_file, trial, error)))
    return Tried(trial, tuple(scripts), tuple(_same_requests(site_file, trial, profile, plan)))


def _spec(site_file: SiteFile, trial: Trial, profile: Document) -> ClusterSpec:
    own = _site_of(site_file, trial, profile)
    return make_spec(profile, site=own, name="check", of_user=False)


def _same_requests(
    site_file: SiteFile, trial: Trial, profile: Document, plan: Plan
) -> Iterator[Problem]:
    """Yield which other GPUs the jobs may get; the trial itself has one queue."""
    if trial.shape != SMALLEST:
        return
    spec = _spec(site_file, replace(trial, queues=tuple(site_file.site.queues)), profile)
    for group in plan.groups:
        others = same_requests(spec, plan.scheduler, trial.queue, group.shape, group.walltime)
        if others:
            message = same_requests_text(trial.queue, others)
            yield Problem(message, site_file.document.key_position(trial.place), hint=HINT)


def _site_of(site_file: SiteFile, trial: Trial, profile: Document) -> SiteFile:
    """Return the site with the queues and the `defaults` of the trial.

    Where the trial's ``profile`` has no real account, or no real value of an option, each one is
    accepted.
    """
    site, document = site_file.site, site_file.document
    queues = {key: site.queues[key] for key in trial.queues}
    if profile.value.get("account") == ACCOUNT:
        site = replace(site, account=_any_account(site.account))
        queues = {
            key: replace(queue, account=_any_account(queue.account))
            for key, queue in queues.items()
        }
    values = profile.section("options").value
    invented = [name for name, value in values.items() if value == ACCOUNT]
    site = replace(site, options=_any_values(site.options, invented))
    queues = {
        key: replace(queue, options=_any_values(queue.options, invented))
        for key, queue in queues.items()
    }
    if trial.shape != DEFAULTS:
        defaults = document.section("defaults").without(*LEFT_OUT)
        document = document.having({**document.items, "defaults": defaults})
    return replace(site_file, site=replace(site, queues=queues), document=document)


def _any_values(options: Mapping[str, Option], invented: Sequence[str]) -> dict[str, Option]:
    """Return the options so that each value is accepted of the ``invented`` ones."""
    found = dict(options)
    for name in invented:
        if name in found:
            found[name] = replace(found[name], pattern=".*")
    return found


def _any_account(account: Account | None) -> Account | None:
    return account and replace(account, pattern=None)


def _at_site(site_file: SiteFile, trial: Trial, error: InputError) -> Iterator[Problem]:
    """Yield the problems at their places in the site file."""
    for problem in error.problems:
        if problem.position and problem.position.source != SOURCE:
            yield problem
            continue
        yield replace(problem, position=_place(site_file, trial, problem), related=None)


def _place(site_file: SiteFile, trial: Trial, problem: Problem) -> Position | None:
    """Return the place in the site file for a problem of the profile that was tried."""
    if problem.related or not problem.position:
        return problem.related
    return site_file.document.key_position(trial.place)
