"""`gpujobs explain`: the values that a key of a profile has and was given, and its limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.document import Document, Loc, read
from ..config.hints import misspelled
from ..config.model import Key, Table, key_names, keys_of
from ..config.profile import Group, Profile
from ..config.site import Site
from ..config.sitefiles import SiteFile, site_layers
from ..config.spec import OF_THE_CLUSTER, ClusterSpec, settings_document
from ..errors import InputError, Position
from ..text import size_text, walltime_text
from .limits import LIMITS
from .plan import JobGroup, Plan

Value = str | int | bool | None
COMMAND_LINE, PROFILE, QUEUE = "command line", "profile", "queue of the site"
SITE, SITE_KEY, BUILT_IN = "site default", "site", "built-in"

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
        jobs.profile.workers.local_directory or jobs.site.scratch
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
_LIMITS: Mapping[str, tuple[str, ...]] = {
    "walltime": tuple(limit.key for limit in LIMITS if limit.profile_key == "walltime"),
    "gpus": ("max_jobs", "max_gpus_per_user", "nodes", "max_queued_jobs"),
    "gpus_per_job": (
        "gpus_per_node",
        *(limit.key for limit in LIMITS if limit.profile_key == "gpus"),
        "exclusive",
    ),
    "cpus_per_job": ("cpus_per_node", "cpus_per_gpu"),
    "memory_per_job": ("memory_per_node",),
    "workers.memory": ("memory_per_node",),
    "workers.threads": ("cpus_per_node", "cpus_per_gpu"),
    "gpu_type": ("gpu_type", "gpu_types"),
    "layout": ("layouts",),
    "account": ("account.pattern", "account.required"),
    "network.protocol": ("network.protocols",),
    "network.encryption": ("network.encryption",),
    "network.dashboard": ("network.encryption",),
    "requeue": ("max_queued_jobs",),
}
"""Keys of a queue or the site that limit the key of a profile; also `options.NAME`."""
_LIMITS_WITHOUT_RUN = {"idle_timeout": "max_idle_timeout", "client_timeout": "max_idle_timeout"}


@dataclass(frozen=True)
class Origin:
    """One value of a key and its place; ``kind`` is one of the words above."""

    value: object
    kind: str
    position: Position
    site_key: str = ""
    """The key of the site file that supplies the value, if it is another one than the profile's."""


@dataclass(frozen=True)
class LimitOfSite:
    """A value of the site file that limits a key of the profile."""

    name: str
    value: object
    position: Position


@dataclass(frozen=True)
class Explanation:
    """A key of a profile: its values, the one of the plan, and its limits."""

    key: str
    description: str
    origins: Sequence[Origin]
    """The values that the key was given, the one that counts first; the built-in one is last."""
    used: Mapping[str, Value]
    """By group of workers, "" without groups; {} if the plan does not change it."""
    limits: Sequence[LimitOfSite]
    added: Sequence[Origin]
    """Values of the site that apply in addition."""


def explain(
    spec: ClusterSpec,
    plan: Plan | None,
    key: str,
    *,
    profile: Path,
    site: str | None,
    settings: Sequence[str],
) -> Explanation:
    """Return the explanation of the profile's ``key``, such as ``workers.memory``.

    ``plan`` is None if there is an error. ``profile``, ``site`` and ``settings`` are those of the
    command line. InputError if there is no such key.
    """
    group, of_group = split_group(key)
    _check_group(key, spec.profile)
    model: type[Profile | Group] = Profile
    if group:
        model = Group
    declared, description = _declared(of_group, model), ""
    locs: list[Loc] = [tuple(key.split("."))]
    if group and locs[0][2] not in OF_THE_CLUSTER:
        locs.append(locs[0][2:])
    queue, used = None, {}
    if plan:
        queue, used = jobs_of(plan, key).queue_key, _used(plan, key)
    layers = list(_layers(profile, spec.site, settings, queue))
    origins: list[Origin] = []
    if key == "site":
        origins += _site_origins(site)
    origins += [
        origin for loc in locs for kind, layer in layers for origin in _origins(layer, loc, kind)
    ]
    origins += _supplied(spec, plan, key)
    if declared:
        description = declared.description
    if declared and not declared.required:
        origins.append(Origin(declared.default, BUILT_IN, Position(BUILT_IN)))
    return Explanation(
        key=key,
        description=description,
        origins=origins,
        used=used,
        limits=list(_limits(spec, plan, key)),
        added=_added(spec, plan, key),
    )


def _check_group(key: str, profile: Profile) -> None:
    table, _, of_table = key.partition(".")
    group, groups = of_table.partition(".")[0], profile.groups
    if table == "groups" and of_table and group not in groups:
        hint = f"its groups are {', '.join(sorted(groups))}" if groups else "it has no groups"
        raise InputError(f"the profile has no group `{group}`", hint=hint)


def split_group(key: str) -> tuple[str, str]:
    """Return the group and its key in ``groups.GROUP.KEY``; ("", ``key``) for another key."""
    first, _, rest = key.partition(".")
    group, _, of_group = rest.partition(".")
    return (group, of_group) if first == "groups" and of_group else ("", key)


def _layers(
    profile: Path, site_file: SiteFile, settings: Sequence[str], queue_key: str | None
) -> Iterator[tuple[str, Document]]:
    """Yield the kinds and documents that have keys of a profile; the first one counts."""
    for setting in reversed(settings):
        yield COMMAND_LINE, settings_document((setting,))
    yield PROFILE, read(profile)
    for queue in _queue_layers(site_file, queue_key):
        yield QUEUE, queue
    for layer in site_layers(site_file.path):
        yield SITE, layer.section("defaults")


def _queue_layers(site_file: SiteFile, key: str | None) -> Iterator[Document]:
    """Yield the keys of a profile that the queue ``key`` has: `walltime` and `env`."""
    if key:
        queue = site_file.document.section("queues").section(key)
        value = {name: queue.value[name] for name in ("walltime", "env") if name in queue.value}
        yield replace(queue, value=value)


def _site_origins(site: str | None) -> Iterator[Origin]:
    """Yield how the site was selected, if the profile has not selected it."""
    if site:
        yield Origin(site, COMMAND_LINE, Position(f"--site {site}"))
    elif name := os.environ.get("GPUJOBS_SITE"):
        yield Origin(name, COMMAND_LINE, Position("$GPUJOBS_SITE"))


def _declared(key: str, model: type[Profile | Group]) -> Key | None:
    """Return the declaration of ``key`` in ``model``; None for a name of the user's choice."""
    names = list(key_names(model))
    found = [name for name in names if name.startswith(f"{key}.")]
    if found:
        raise InputError(f"`{key}` is a section", hint=f"name one of its keys, such as {found[0]}")
    if key not in names:
        if any(key.startswith(f"{table}.") for table in _tables(model, names)):
            return None
        owner = "profile" if model is Profile else "group"
        raise InputError(f"a {owner} has no key `{key}`", hint=_hint(key, names))
    return _key_in(keys_of(model), key)


def _tables(model: type[Profile | Group], names: Sequence[str]) -> Iterator[str]:
    """Yield the keys whose values are mappings with names of the user's choice."""
    keys = keys_of(model)
    for name in names:
        if (key := _key_in(keys, name)) and isinstance(key.kind, Table):
            yield name


def _hint(key: str, names: Sequence[str]) -> str:
    """Return a hint for a key that profiles do not have."""
    if key.partition(".")[0] in keys_of(Site).keys() - keys_of(Profile).keys():
        return "it is a key of a site: `gpujobs sites show NAME --effective` has its origin"
    return misspelled(key.rpartition(".")[2], names, names)


def _key_in(keys: Mapping[str, Key], name: str) -> Key | None:
    first, _, rest = name.partition(".")
    key = keys.get(first)
    model = getattr(key.kind, "model", None) if key else None
    return _key_in(keys_of(model), rest) if rest and model else key


# -- the values of the plan, and those of the site that apply --------------------------------------
def _used(plan: Plan, key: str) -> dict[str, Value]:
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


def _supplied(spec: ClusterSpec, plan: Plan | None, key: str) -> list[Origin]:
    """Return the values that keys of the site give to ``key``: of the queue, then of the site.

    They count if neither a profile nor the site's `defaults` have the key.
    """
    _, of_group = split_group(key)
    table, _, name = of_group.partition(".")
    supplier = _SUPPLIED.get(of_group)
    if table == "options" and not _extends_default(spec, plan, key):
        supplier = f"options.{name}.default"
    return list(_of_site(spec, plan, key, supplier))


def _added(spec: ClusterSpec, plan: Plan | None, key: str) -> list[Origin]:
    """Return the value of the queue, else of the site, that applies in addition to ``key``."""
    _, of_group = split_group(key)
    adder = _ADDED.get(of_group)
    if _extends_default(spec, plan, key):
        adder = f"{of_group}.default"
    return list(_of_site(spec, plan, key, adder))[:1]


def _extends_default(spec: ClusterSpec, plan: Plan | None, key: str) -> bool:
    """Return whether ``key`` is an option whose value is added to the site's default."""
    table, _, name = split_group(key)[1].partition(".")
    profile, site = spec.profile, spec.site.site
    if plan:
        jobs = jobs_of(plan, key)
        profile, site = jobs.profile, jobs.site
    option, value = site.options.get(name), profile.options.get(name)
    return bool(table == "options" and option and value and option.extends_default(value))


def _of_site(spec: ClusterSpec, plan: Plan | None, key: str, name: str | None) -> Iterator[Origin]:
    """Yield the values of the site's key ``name``: of the queue, then of each layer of the site."""
    condition = _APPLIES.get(split_group(key)[1])
    if name is None or (condition and not any(condition(spec, jobs) for jobs in _groups(plan))):
        return
    loc: Loc = tuple(name.split("."))
    layers = [(loc, SITE_KEY, layer) for layer in site_layers(spec.site.path)]
    if plan:
        of_queue: Loc = ("queues", jobs_of(plan, key).queue_key, *loc)
        layers.insert(0, (of_queue, QUEUE, spec.site.document))
    for place, kind, layer in layers:
        for origin in _origins(layer, place, kind):
            if origin.value is not None:
                yield replace(origin, site_key=".".join(map(str, place)))


def _groups(plan: Plan | None) -> Sequence[JobGroup]:
    if plan is None:
        return ()
    return plan.groups


def _origins(layer: Document, loc: Loc, kind: str) -> Iterator[Origin]:
    value: object = layer.value
    for step in loc:
        if not isinstance(value, Mapping) or step not in value:
            return
        value = value[step]
    yield Origin(value, kind, layer.position(loc))


def _limits(spec: ClusterSpec, plan: Plan | None, key: str) -> Iterator[LimitOfSite]:
    """Yield the limits of ``key`` in the queues of the plan, or in all queues if there is none."""
    group, key = split_group(key)
    queues = [jobs.queue_key for jobs in _groups(plan) if group in ("", jobs.group)]
    names = list(_LIMITS.get(key, ()))
    if key in _LIMITS_WITHOUT_RUN and not spec.profile.run:
        names.append(_LIMITS_WITHOUT_RUN[key])
    if key.startswith("options."):
        names += [f"{key}.pattern", f"{key}.required"]
    places: list[Loc] = [
        (*place, *name.split("."))
        for place in (*(("queues", queue) for queue in queues or spec.site.site.queues), ())
        for name in names
    ]
    for loc in dict.fromkeys(places):
        value = spec.site.document.value_at(loc)
        if value is not None:
            yield LimitOfSite(".".join(map(str, loc)), value, spec.site_position(*loc))


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
