"""The values of a plan for the keys of its profile, and the limits that apply to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..config.document import Loc
from ..config.spec import ClusterSpec
from ..errors import Position
from ..text import size_text, walltime_text
from .plan import JobGroup, Plan

Value = str | int | bool | None

_OF_JOBS: Mapping[str, Callable[[JobGroup], Value]] = {
    "walltime": lambda jobs: jobs.walltime and walltime_text(jobs.walltime),
    "queue": lambda jobs: jobs.queue_key,
    "gpus": lambda jobs: jobs.gpus,
    "gpus_per_job": lambda jobs: jobs.shape.gpus,
    "cpus_per_job": lambda jobs: jobs.shape.cpus,
    "memory_per_job": lambda jobs: jobs.shape.memory and size_text(jobs.shape.memory),
    "account": lambda jobs: jobs.profile.account,
    "workers.memory": lambda jobs: jobs.shape.worker_memory and size_text(jobs.shape.worker_memory),
    "workers.threads": lambda jobs: jobs.shape.worker_threads,
    "workers.count": lambda jobs: jobs.n_workers,
    "environment.python": lambda jobs: jobs.python,
}
_OF_PLAN: Mapping[str, Callable[[Plan], Value]] = {
    "name": lambda plan: plan.name,
    "site": lambda plan: plan.site_name,
    "workdir": lambda plan: plan.workdir,
    "start_workers": lambda plan: plan.start_workers,
    "network.protocol": lambda plan: ", ".join(plan.transport.protocols),
    "network.encryption": lambda plan: plan.transport.encrypted,
    "network.interface": lambda plan: plan.transport.interface,
}
_QUEUE_LIMITS: Mapping[str, tuple[str, ...]] = {
    "walltime": ("max_walltime", "min_walltime", "max_node_hours"),
    "gpus": ("max_jobs", "max_gpus_per_user", "nodes"),
    "gpus_per_job": (
        "gpus_per_node",
        "gpus_per_job",
        "max_gpus",
        "min_gpus",
        "max_nodes",
        "min_nodes",
        "exclusive",
    ),
    "cpus_per_job": ("cpus_per_node", "cpus_per_gpu"),
    "memory_per_job": ("memory_per_node",),
    "workers.memory": ("memory_per_node",),
    "workers.threads": ("cpus_per_node", "cpus_per_gpu"),
    "gpu_type": ("gpu_type", "gpu_types"),
    "layout": ("layouts",),
    "account": ("account",),
    "network.protocol": ("network.protocols",),
}
_SITE_LIMITS: Mapping[str, tuple[Loc, ...]] = {
    "gpus": (("max_queued_jobs",),),
    "account": (("account", "pattern"), ("account", "required")),
    "layout": (("layouts",),),
    "network.protocol": (("network", "protocols"),),
}


@dataclass(frozen=True)
class Limit:
    """A value of the site file that limits a key of the profile."""

    name: str
    value: object
    position: Position


def used_values(plan: Plan, key: str) -> dict[str, Value]:
    """Return the value of ``key`` in the plan, by group; {} if the plan does not change it."""
    if of_plan := _OF_PLAN.get(key):
        return {"": of_plan(plan)}
    of_jobs = _OF_JOBS.get(key)
    if of_jobs is None:
        return {}
    return {group.group: of_jobs(group) for group in plan.groups}


def limits_of(spec: ClusterSpec, plan: Plan | None, key: str) -> Iterator[Limit]:
    """Yield the limits of ``key`` in the queues of the plan, or in all queues if there is none."""
    queues = list(spec.site.site.queues)
    if plan:
        queues = list(dict.fromkeys(group.queue_key for group in plan.groups))
    names = [tuple(name.split(".")) for name in _QUEUE_LIMITS.get(key, ())]
    places: list[Loc] = [("queues", queue, *name) for queue in queues for name in names]
    for loc in (*places, *_SITE_LIMITS.get(key, ())):
        value = spec.site.document.value_at(loc)
        if value is not None:
            yield Limit(".".join(map(str, loc)), value, spec.site_position(*loc))
