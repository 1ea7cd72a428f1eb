"""The values of a plan for the keys of its profile, and those of the site that apply to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..config.document import Document, Loc
from ..config.origins import QUEUE, SITE_KEY, Origin, split_group
from ..config.sitefiles import site_layers
from ..config.spec import ClusterSpec
from ..errors import Position
from ..text import size_text, walltime_text
from .plan import JobGroup, Plan

Value = str | int | bool | None

_OF_JOBS: Mapping[str, Callable[[Plan, JobGroup], Value]] = {
    "walltime": lambda _, jobs: jobs.walltime and walltime_text(jobs.walltime),
    "queue": lambda _, jobs: jobs.queue_key,
    "gpus": lambda _, jobs: jobs.gpus,
    "gpus_per_job": lambda _, jobs: jobs.shape.gpus,
    "gpu_type": lambda plan, jobs: (
        jobs.profile.gpu_type or plan.site.queues[jobs.queue_key].gpu_type
    ),
    "cpus_per_job": lambda _, jobs: jobs.shape.cpus,
    "memory_per_job": lambda _, jobs: jobs.shape.memory and size_text(jobs.shape.memory),
    "account": lambda _, jobs: jobs.profile.account,
    "workers.memory": lambda _, jobs: (
        jobs.shape.worker_memory and size_text(jobs.shape.worker_memory)
    ),
    "workers.threads": lambda _, jobs: jobs.shape.worker_threads,
    "workers.count": lambda _, jobs: jobs.n_workers,
    "workers.local_directory": lambda plan, jobs: (
        jobs.profile.workers.local_directory or plan.layout_of(jobs).site.scratch
    ),
    "environment.python": lambda _, jobs: jobs.python,
    "environment.container.runtime": lambda _, jobs: _runtime(jobs),
    "environment.container.image": lambda _, jobs: _image(jobs),
    "network.interface": lambda plan, jobs: plan.transport_of(jobs).interface,
}
_OF_PLAN: Mapping[str, Callable[[Plan], Value]] = {
    "name": lambda plan: plan.name,
    "site": lambda plan: plan.site_name,
    "workdir": lambda plan: plan.workdir,
    "start_workers": lambda plan: plan.start_workers,
    "idle_timeout": lambda plan: _end_after(plan, "idle"),
    "client_timeout": lambda plan: _end_after(plan, "client"),
    "network.protocol": lambda plan: ", ".join(plan.transport.protocols),
    "network.encryption": lambda plan: plan.transport.encrypted,
}
_SUPPLIED: Mapping[str, str] = {
    "gpu_type": "gpu_type",
    "idle_timeout": "max_idle_timeout",
    "network.interface": "network.interface",
    "workers.local_directory": "scratch",
    "environment.python": "environment.staging",
    "environment.container.runtime": "containers.runtime",
}
"""Key of a queue or the site whose value a profile without the key has; also `options.NAME`."""
_ADDED: Mapping[str, str] = {
    "directives": "directives",
    "environment.setup": "setup",
    "environment.container.args": "containers.args",
}
"""Key of a queue or the site whose value applies in addition to that of the profile."""
_APPLIES: Mapping[str, Callable[[ClusterSpec, JobGroup], bool]] = {
    "idle_timeout": lambda spec, _: not spec.profile.run,
    "environment.python": lambda _, jobs: jobs.software.staging is not None,
    "environment.container.args": lambda spec, jobs: (
        _runtime(jobs) is not None and _runtime(jobs) == spec.site.site.containers.runtime
    ),
}
"""Whether the value of the site applies to jobs, if that depends on them."""
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
    "network.encryption": ("network.encryption",),
    "network.dashboard": ("network.encryption",),
}
_SITE_LIMITS: Mapping[str, tuple[Loc, ...]] = {
    "gpus": (("max_queued_jobs",),),
    "account": (("account", "pattern"), ("account", "required")),
    "layout": (("layouts",),),
    "network.protocol": (("network", "protocols"),),
    "network.encryption": (("network", "encryption"),),
    "network.dashboard": (("network", "encryption"),),
    "requeue": (("max_queued_jobs",),),
}
_LIMITS_WITHOUT_RUN: Mapping[str, tuple[Loc, ...]] = {
    "idle_timeout": (("max_idle_timeout",),),
    "client_timeout": (("max_idle_timeout",),),
}
_OF_OPTIONS = ("pattern", "required")
"""Keys of an option that limit its value."""


@dataclass(frozen=True)
class Limit:
    """A value of the site file that limits a key of the profile."""

    name: str
    value: object
    position: Position


def used_values(plan: Plan, key: str) -> dict[str, Value]:
    """Return the value of ``key`` in the plan, by group; {} if the plan does not change it."""
    group, key = split_group(key)
    if not group and (of_plan := _OF_PLAN.get(key)):
        return {"": of_plan(plan)}
    of_jobs = _OF_JOBS.get(key)
    if of_jobs is None:
        return {}
    return {jobs.group: of_jobs(plan, jobs) for jobs in plan.groups if group in ("", jobs.group)}


def jobs_of(plan: Plan, key: str) -> JobGroup:
    """Return the jobs whose queue supplies values for ``key``: those of its group, or the first."""
    group, _ = split_group(key)
    return next((jobs for jobs in plan.groups if jobs.group == group), plan.groups[0])


def supplied_by_site(spec: ClusterSpec, plan: Plan | None, key: str) -> list[Origin]:
    """Return the values that keys of the site give to ``key``: of the queue, then of the site.

    They count if neither a profile nor the site's `defaults` have the key.
    """
    _, of_group = split_group(key)
    table, _, name = of_group.partition(".")
    supplier = _SUPPLIED.get(of_group)
    if table == "options" and not _extends_default(spec, plan, key):
        supplier = f"options.{name}.default"
    if supplier is None or not _applies(spec, plan, of_group):
        return []
    return [*_of_queue(spec, plan, key, supplier), *_of_site(spec, supplier)]


def added_by_site(spec: ClusterSpec, plan: Plan | None, key: str) -> list[Origin]:
    """Return the value of the queue, else of the site, that applies in addition to ``key``."""
    _, of_group = split_group(key)
    adder = _ADDED.get(of_group)
    if _extends_default(spec, plan, key):
        adder = f"{of_group}.default"
    if adder is None or not _applies(spec, plan, of_group):
        return []
    return [*_of_queue(spec, plan, key, adder), *_of_site(spec, adder)][:1]


def _extends_default(spec: ClusterSpec, plan: Plan | None, key: str) -> bool:
    """Return whether ``key`` is an option whose value is added to the site's default."""
    table, _, name = split_group(key)[1].partition(".")
    profile, site = spec.profile, spec.site.site
    if plan:
        jobs = jobs_of(plan, key)
        profile, site = jobs.profile, site.in_queue(jobs.queue_key)
    option, value = site.options.get(name), profile.options.get(name)
    return bool(table == "options" and option and value and option.extends_default(value))


def _applies(spec: ClusterSpec, plan: Plan | None, key: str) -> bool:
    condition = _APPLIES.get(key)
    if condition is None:
        return True
    return plan is not None and any(condition(spec, jobs) for jobs in plan.groups)


def _of_queue(spec: ClusterSpec, plan: Plan | None, key: str, name: str) -> Iterator[Origin]:
    if plan:
        queue = jobs_of(plan, key).queue_key
        loc: Loc = ("queues", queue, *name.split("."))
        yield from _origins(spec.site.document, loc, QUEUE)


def _of_site(spec: ClusterSpec, name: str) -> Iterator[Origin]:
    for layer in site_layers(spec.site.path):
        yield from _origins(layer, tuple(name.split(".")), SITE_KEY)


def _origins(document: Document, loc: Loc, kind: str) -> Iterator[Origin]:
    value = document.value_at(loc)
    if value is not None:
        yield Origin(value, kind, document.position(loc), ".".join(map(str, loc)))


def limits_of(spec: ClusterSpec, plan: Plan | None, key: str) -> Iterator[Limit]:
    """Yield the limits of ``key`` in the queues of the plan, or in all queues if there is none."""
    group, key = split_group(key)
    queues = list(spec.site.site.queues)
    if plan:
        groups = [jobs for jobs in plan.groups if group in ("", jobs.group)]
        queues = list(dict.fromkeys(jobs.queue_key for jobs in groups))
    names: list[Loc] = [tuple(name.split(".")) for name in _QUEUE_LIMITS.get(key, ())]
    of_site = list(_SITE_LIMITS.get(key, ()))
    if not spec.profile.run:
        of_site += _LIMITS_WITHOUT_RUN.get(key, ())
    if key.startswith("options."):
        of_option: list[Loc] = [(*key.split("."), name) for name in _OF_OPTIONS]
        names += of_option
        of_site += of_option
    places: list[Loc] = [("queues", queue, *name) for queue in queues for name in names]
    for loc in (*places, *of_site):
        value = spec.site.document.value_at(loc)
        if value is not None:
            yield Limit(".".join(map(str, loc)), value, spec.site_position(*loc))


def _image(jobs: JobGroup) -> str | None:
    if jobs.container is None:
        return None
    return jobs.container.image


def _runtime(jobs: JobGroup) -> str | None:
    if jobs.container is None:
        return None
    return jobs.container.runtime.name


def _end_after(plan: Plan, rule: str) -> Value:
    """Return after how long the cluster ends by ``rule``, or by that of clusters without work."""
    rules = plan.lifetime.end_after
    seconds = rules.get(rule) or rules.get("unused")
    return seconds and walltime_text(seconds)
