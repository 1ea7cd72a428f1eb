"""Finds the errors of a site file: plans and renders the jobs that each of its queues allows.

Pure, as planning is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..config.document import Document
from ..config.queue import Account, Option, Queue
from ..config.sitefiles import SiteFile
from ..config.spec import ClusterSpec, make_spec
from ..errors import InputError, Position, Problem
from ..schedulers import get_scheduler
from .machine import Machine
from .plan import Plan, make_plan
from .render import Script, render
from .samerequests import HINT, SameRequests, same_requests_text
from .trials import ACCOUNT, DEFAULTS, LEFT_OUT, OF_THE_JOB, SMALLEST, Trial, trials

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
        whole = replace(settings.over(profile), source=SOURCE)
        found.append(_tried(site_file, trial, whole))
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
    own = _site_of(site_file, trial, any_account=profile.value.get("account") == ACCOUNT)
    return make_spec(profile, site=own, name="check")


def _same_requests(
    site_file: SiteFile, trial: Trial, profile: Document, plan: Plan
) -> Iterator[Problem]:
    """Yield which other GPUs the jobs may get; the trial itself has one queue."""
    if trial.shape != SMALLEST:
        return
    spec = _spec(site_file, replace(trial, queues=tuple(site_file.site.queues)), profile)
    for group in plan.groups:
        same = SameRequests(spec, plan.scheduler, trial.queue, group.shape, group.walltime)
        if others := same.others():
            message = same_requests_text(trial.queue, others)
            yield Problem(message, site_file.document.key_position(trial.place), hint=HINT)


def _site_of(site_file: SiteFile, trial: Trial, *, any_account: bool) -> SiteFile:
    """Return the site with the queues and the `defaults` of the trial.

    ``any_account``: the trial has no real one, so that each account is accepted.
    """
    site, document = site_file.site, site_file.document
    queues = {key: site.queues[key] for key in trial.queues}
    if any_account:
        site = replace(site, account=_any_account(site.account), options=_any_values(site.options))
        queues = {key: _any_queue(queue) for key, queue in queues.items()}
    if trial.shape != DEFAULTS:
        defaults = document.section("defaults").without(*LEFT_OUT).value
        document = replace(document, value={**document.value, "defaults": defaults})
    return replace(site_file, site=replace(site, queues=queues), document=document)


def _any_queue(queue: Queue) -> Queue:
    return replace(queue, account=_any_account(queue.account), options=_any_values(queue.options))


def _any_values(options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options so that each value is accepted of those that the trials choose."""
    return {
        name: option if option.default else replace(option, pattern=".*")
        for name, option in options.items()
    }


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
