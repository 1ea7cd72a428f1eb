"""From a specification to a plan and its scripts: everything before a submission."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..config.spec import ClusterSpec
from ..planning.plan import Machine, Plan, make_plan
from ..planning.render import Script, render
from ..schedulers import get_scheduler
from .runnotes import image_notes, run_notes, site_notes


def make_cluster_plan(
    spec: ClusterSpec, *, elastic: bool = False, devices: tuple[str, ...] | None = None
) -> Plan:
    """Return the plan of ``spec`` (see `make_plan`); the local site inspects this machine.

    ``devices``: GPUs of this machine to use; None: those that are free.
    """
    machine = machine_of(spec, devices)
    folder = Path(spec.document.position(("run",)).source).parent
    plan = make_plan(spec, python=spec.python, machine=machine, elastic=elastic)
    own = (*site_notes(spec.site.site), *run_notes(plan, folder), *image_notes(plan))
    return replace(plan, notes=(*plan.notes, *own))


def machine_of(
    spec: ClusterSpec, devices: tuple[str, ...] | None = None, used: tuple[str, ...] = ()
) -> Machine | None:
    """Return this machine if the site is local (see `this_machine`), else None."""
    if not get_scheduler(spec.site.site.scheduler).on_this_machine:
        return None
    from .machine import this_machine

    return this_machine(devices, used)


def scripts_of(
    spec: ClusterSpec, plan: Plan, cluster_id: str, limit: int | None = None
) -> list[Script]:
    """Return the scripts of a cluster; ``limit`` is the largest size of an array."""
    return render(plan, cluster_id, limit=limit, site_folder=spec.site.path.parent)
