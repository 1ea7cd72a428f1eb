"""Finds the errors of a site file that make every plan in one of its queues fail.

Each queue is planned and rendered with the simplest profile that it accepts. Pure, as planning is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..config.document import Document
from ..config.queue import Account, Queue
from ..config.site import Site
from ..config.sitefiles import SiteFile
from ..config.spec import make_spec
from ..errors import InputError, Problem
from ..schedulers import get_scheduler
from .machine import Machine
from .plan import Plan, make_plan
from .render import render

SOURCE = "a profile for every queue"
"""In place of a file name, in positions of the profile that is tried."""
WALLTIME = 600
ANY_MACHINE = Machine(gpus=(), cpus=1, memory=2**30, busy={})


def site_problems(site_file: SiteFile) -> list[Problem]:
    """Return the errors that make all plans on the site, or in one of its queues, fail."""
    found: list[Problem] = []
    for key in site_file.site.queues:
        try:
            _render(_plan(site_file, key), site_file)
        except InputError as error:
            found += [_at_site(problem) for problem in error.problems]
    return list(dict.fromkeys(found))


def _plan(site_file: SiteFile, key: str) -> Plan:
    site = site_file.site
    profile = Document(_profile(site, key), source=SOURCE)
    spec = make_spec(profile, site=replace(site_file, site=_only_queue(site, key)), name="check")
    machine = ANY_MACHINE if get_scheduler(site.scheduler).on_this_machine else None
    return make_plan(spec, python="python", machine=machine)


def _render(plan: Plan, site_file: SiteFile) -> None:
    render(plan, f"{plan.name}-0000", site_folder=site_file.path.parent)


def _profile(site: Site, key: str) -> Mapping[str, object]:
    """Return the smallest profile for a queue; its keys override the site's `defaults`."""
    queue = site.queues[key]
    walltime = min(WALLTIME, queue.max_walltime or WALLTIME)
    none = dict.fromkeys(("gpus_per_job", "cpus_per_job", "memory_per_job", "gpu_type", "head"))
    return {
        **none,
        **dict(_layout(queue)),
        "queue": key,
        "walltime": f"{walltime}s",
        "account": "any",
        "run_on": "head",
    }


def _layout(queue: Queue) -> Iterator[tuple[str, object]]:
    per_node, nodes = queue.gpus_per_node or 0, queue.min_nodes or 1
    yield "gpus", per_node * nodes
    yield "layout", "mpi" if per_node and nodes > 1 else "workers"


def _only_queue(site: Site, key: str) -> Site:
    """Return the site with this queue only, which accepts any account."""
    queue = site.queues[key]
    queue = replace(queue, account=_any_account(queue.account))
    return replace(site, account=_any_account(site.account), queues={key: queue})


def _any_account(account: Account | None) -> Account | None:
    return account and replace(account, pattern=None)


def _at_site(problem: Problem) -> Problem:
    """Return the problem at its place in the site file."""
    if problem.position and problem.position.source == SOURCE:
        return replace(problem, position=problem.related, related=None)
    return problem
