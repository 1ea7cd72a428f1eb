"""From an order to a plan and its scripts: all that happens before anything is submitted."""

from __future__ import annotations

from ..config.spec import ClusterSpec
from ..planning.plan import Machine, Plan, make_plan
from ..planning.render import Script, render
from ..schedulers import get_scheduler


def make_cluster_plan(spec: ClusterSpec, *, elastic: bool = False) -> Plan:
    """Return the plan of ``order`` (see `make_plan`); the local site looks at this machine for it."""
    machine: Machine | None = None
    if get_scheduler(spec.site.site.scheduler).on_this_machine:
        from .machine import this_machine

        machine = this_machine()
    return make_plan(spec, python=spec.python, machine=machine, elastic=elastic)


def scripts_of(
    spec: ClusterSpec, plan: Plan, cluster: str, limit: int | None = None
) -> list[Script]:
    """Return what is sent for the cluster with the id ``cluster``."""
    return render(plan, cluster, limit=limit, site_folder=spec.site.path.parent)
