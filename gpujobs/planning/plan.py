"""From a profile and a site to a plan: plain data that determines every job.

Pure: no process, no clock, no network. Every limit of the site is checked here; a profile that
exceeds one is an InputError with the positions of both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..config.model import MOST
from ..config.profile import Profile
from ..config.site import Site
from ..config.spec import ClusterSpec, group_specs
from ..errors import InputError
from ..injob.names import job_worker_names
from ..schedulers import Scheduler, get_scheduler
from ..schedulers.base import all_commands
from ..text import did_you_mean, plural
from .bash import Diagnostics, expand_directory
from .directives import request_texts
from .jobgroups import GroupPlanner, head_queue, head_shape, head_spec
from .layouts import Layout, layout_of
from .lifetime import Lifetime, Replaces, plan_lifetime
from .limits import QueuedJobs
from .protocols import SLOW_MEMORY, Transport, check_ports, choose_transport
from .requested import Machine
from .shape import JobGroup, QueueMismatch

__all__ = ["JobGroup", "Machine", "Plan", "Transport", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """A profile on a site, resolved. ``name`` is the cluster's name without its random part."""

    name: str
    site_name: str
    site: Site
    profile: Profile
    scheduler: Scheduler
    layout: Layout
    groups: tuple[JobGroup, ...]
    """The jobs with workers; one group without a name if the profile has no `groups`."""
    head: JobGroup | None
    """The dask scheduler's own job, if the profile asks for one."""
    transport: Transport
    root: str
    """Folder of the clusters' folders, expanded on this host."""
    workdir: str
    modules: str
    """Folder of the program, from which workers import, too; "" if that is `workdir`."""
    dask_files: Mapping[str, str]
    """Variables that name files of dask's configuration."""
    start_workers: int
    lifetime: Lifetime
    devices: tuple[str, ...] = ()
    """GPUs for the local site, in the order in which jobs take them; of `machines` MACHINE:GPU."""
    notes: tuple[str, ...] = ()
    """Information for the user, such as keys that are ignored."""
    avoid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Nodes on which the jobs of a group are not to run, by its name."""

    @property
    def n_workers(self) -> int:
        """Number of workers of all jobs."""
        return sum(group.n_workers for group in self.groups)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all jobs."""
        return sum(group.gpus for group in self.groups)

    @property
    def charges(self) -> dict[str, float]:
        """The most that all jobs cost, by unit: for their walltime, at each attempt."""
        found: dict[str, float] = {}
        for jobs in self.all_jobs:
            charge, hours = self.site.queues[jobs.queue_key].charge, (jobs.walltime or 0) / 3600
            if charge and charge.per_gpu_hour is not None:  # the energy is known afterwards
                cost = charge.per_gpu_hour * self.lifetime.attempts * jobs.gpus * hours
                found[charge.unit] = found.get(charge.unit, 0.0) + cost
        return found

    @property
    def working_ranks(self) -> int:
        """Number of nodes or MPI ranks that launchers start for workers; 0 without launchers."""
        return sum(self.layout_of(group).working_ranks(group.shape) for group in self.groups)

    @property
    def jobs_with_workers(self) -> int:
        """Number of all jobs with workers."""
        return sum(group.shape.jobs for group in self.groups)

    @property
    def start_groups(self) -> dict[str, int]:
        """`start_workers` of the groups that have their own."""
        named = (group for group in self.groups if group.group)
        return {g.group: g.profile.start_workers for g in named if g.profile.start_workers}

    @cached_property
    def all_jobs(self) -> tuple[JobGroup, ...]:
        """All groups of jobs, the head's own first."""
        if self.head:
            return (self.head, *self.groups)
        return self.groups

    def group(self, name: str) -> JobGroup:
        """Return the group of workers ``name``. Raises LookupError."""
        return next(group for group in self.groups if group.group == name)

    def layout_of(self, jobs: JobGroup) -> Layout:
        """Return the layout for the profile of ``jobs``."""
        return replace(self.layout, profile=jobs.profile, site=jobs.site)

    def transport_of(self, jobs: JobGroup) -> Transport:
        """Return the transport with the interface of the queue of ``jobs``."""
        interface = self.profile.network.interface or jobs.site.network.interface
        return replace(self.transport, interface=interface or self.transport.interface)

    def may_be_head(self, jobs: JobGroup) -> bool:
        """Return whether one of ``jobs`` may run the dask scheduler: the first one that starts."""
        if self.head:
            return jobs is self.head
        return self.profile.head is None or self.profile.head.group in (None, jobs.group)

    def worker_names(self, cluster_id: str, only: JobGroup | None = None) -> list[str]:
        """Return the expected names of all workers of the cluster ``cluster_id``, or of a group."""
        groups = [group for group in self.groups for _ in range(group.shape.jobs)]
        return [
            name
            for number, group in enumerate(groups)
            if only in (None, group)
            for name in self.job_worker_names(cluster_id, number, group)
        ]

    def job_worker_names(self, cluster_id: str, number: int, jobs: JobGroup) -> list[str]:
        """Return the expected names of the workers of job ``number``, one of ``jobs``."""
        return job_worker_names(
            cluster_id,
            number,
            jobs.shape.workers,
            self.layout_of(jobs).working_ranks(jobs.shape),
            jobs.group,
        )


def make_plan(
    spec: ClusterSpec,
    *,
    python: str,
    machine: Machine | None = None,
    replaces: Replaces = "none",
    only: str | None = None,
) -> Plan:
    """Return the plan of ``spec``. Raises InputError with all problems.

    ``python`` is the interpreter that runs gpujobs, ``machine`` this machine if the site is local.
    ``replaces``: an owner changes the number of workers, which may not be known yet. ``only``: plan
    only this group of workers.
    """
    return _Planner(spec, python=python, machine=machine, replaces=replaces).plan(only)


class _Planner:
    def __init__(
        self, spec: ClusterSpec, *, python: str, machine: Machine | None, replaces: Replaces
    ) -> None:
        self.spec, self.profile, self.site = spec, spec.profile, spec.site.site
        self.scheduler = get_scheduler(self.site.scheduler)(self.site.cluster)
        self.layout = layout_of(self.profile, self.site, self.scheduler)
        self.machine = machine if self.scheduler.on_this_machine else None
        self.this_python = python
        self.replaces = replaces
        self.elastic = replaces == "owner" and self.layout.elastic
        self.diagnostics = Diagnostics(spec)

    def plan(self, only: str | None) -> Plan:
        """Return the plan, or raise InputError."""
        check_profile(self.diagnostics, self.scheduler)
        self.layout.check(self.diagnostics)
        root = self._root()
        head_key = head_queue(self.diagnostics)
        groups = self._groups(head_key, only, root)
        head = self._head(head_key, root)
        start_workers = self._start_workers(groups)
        transport = choose_transport(self.diagnostics, groups, head)
        check_ports(self.diagnostics, groups)
        planned = [*filter(None, (head, *groups))]
        lifetime = plan_lifetime(self.diagnostics, self.scheduler, planned, self.replaces)
        self._note_differences(groups)
        self._note_unused(transport, groups)
        self.diagnostics.raise_problems()
        self.diagnostics.note(*self.site.notes)
        return Plan(
            name=self.spec.name,
            site_name=self.spec.site.name,
            site=self.site,
            profile=self.profile,
            scheduler=self.scheduler,
            layout=self.layout,
            groups=groups,
            head=head,
            transport=transport,
            root=root,
            workdir=str(self.spec.workdir),
            modules=self.spec.modules,
            dask_files=self.spec.dask_files,
            start_workers=start_workers,
            lifetime=lifetime,
            devices=self._devices(sum(group.gpus for group in groups)),
            notes=(*self.spec.notes, *self.diagnostics.notes),
        )

    def _planner(self, name: str, spec: ClusterSpec, root: str) -> GroupPlanner:
        diagnostics = self.diagnostics.of_group(name, spec)
        return GroupPlanner(
            diagnostics, replace(self.layout, profile=spec.profile), self.this_python, root
        )

    def _groups(self, head_key: str | None, only: str | None, root: str) -> tuple[JobGroup, ...]:
        """Plan one group after the other: limits and free GPUs are common to all."""
        others = [QueuedJobs(head_key, 1)] if head_key else []
        machine, groups = self.machine, []
        for name, spec in group_specs(self.spec).items():
            if only not in (None, name):
                continue
            planner = self._planner(name, spec, root)
            group = planner.plan(name, machine, others, elastic=self.elastic)
            others.append(group.queued)
            machine = machine and machine.without(group.gpus)
            groups.append(group)
        return tuple(groups)

    def _head(self, key: str | None, root: str) -> JobGroup | None:
        head = self.profile.head
        if head is None or key is None:
            return None
        texts = request_texts(self.site.in_queue(key), self.scheduler, gpus=False)
        try:
            shape = head_shape(head, self.site.queues[key], texts)
        except QueueMismatch as mismatch:
            place = self.spec.site_position(*mismatch.site_place(key))
            loc = mismatch.key.split(".")
            self.diagnostics.profile_error(f"queue {key}: {mismatch}", *loc, related=place)
            return None
        return self._planner("", head_spec(self.spec, head), root).plan_head(key, shape)

    def _start_workers(self, groups: tuple[JobGroup, ...]) -> int:
        n_workers = self._number_of_workers(groups)
        start = self.profile.start_workers or self.layout.default_start_workers(n_workers)
        self._check_start(start, n_workers, "start_workers")
        for group in groups:
            if group.group and group.profile.start_workers:
                loc = ("groups", group.group, "start_workers")
                self._check_start(group.profile.start_workers, group.n_workers, *loc)
        return start

    def _number_of_workers(self, groups: tuple[JobGroup, ...]) -> int:
        number = sum(group.n_workers for group in groups)
        if number > MOST:
            message = f"{number} workers; a cluster has at most {MOST}"
            self.diagnostics.profile_error(message, "gpus")
        return number

    def _check_start(self, start: int, n_workers: int, *loc: str) -> None:
        if start > n_workers:
            message = f"{'.'.join(loc)} is {start}, but there will be {plural(n_workers, 'worker')}"
            self.diagnostics.profile_error(message, *loc)

    def _note_differences(self, groups: tuple[JobGroup, ...]) -> None:
        """Add a note if the groups that may get the head differ."""
        if self.profile.head or self.replaces == "owner" or len(groups) < 2:
            return
        differ = [
            name
            for name, values in (
                ("walltime", {group.walltime for group in groups}),
                ("environment", {_environment(group) for group in groups}),
            )
            if len(values) > 1
        ]
        if differ:
            names = " or ".join(group.group for group in groups)
            self.diagnostics.note(
                f"the job that starts first, of group {names}, runs the dask scheduler and `run`; "
                f"they differ in {' and '.join(differ)}: `head: {{group: …}}` chooses the group"
            )

    def _root(self) -> str:
        try:
            return expand_directory(self.site.directory)
        except InputError as error:
            self.diagnostics.site_error(error.problems[0].message, "directory")
            return ""

    def _note_unused(self, transport: Transport, groups: tuple[JobGroup, ...]) -> None:
        """Say what `auto` does not use on this machine, unless the profile excludes ucxx."""
        network = self.profile.network
        slow = any(group.profile.workers.gpu_memory in SLOW_MEMORY for group in groups)
        if self.machine is None or network.protocol != "auto" or slow:
            return
        asked = sum(group.gpus for group in groups)
        gpus = len(self.machine.gpus) if self.elastic and asked else asked
        if asked and (note := self.machine.unused_nvlink(gpus, transport.protocols[0])):
            self.diagnostics.note(note)

    def _devices(self, gpus: int) -> tuple[str, ...]:
        if self.machine is None:
            return ()
        if self.machine.places:
            return self.machine.places
        if self.elastic:
            return self.machine.gpus
        return self.machine.gpus[:gpus]


def _environment(group: JobGroup) -> tuple[object, ...]:
    """Return what determines how `run` starts in a job of the group."""
    environment, env = group.profile.environment, group.profile.env
    return group.python, environment.setup, environment.container, tuple(env.items())


def check_profile(diagnostics: Diagnostics, scheduler: Scheduler) -> None:
    """Report problems of the profile, and commands of the site that do not exist."""
    pattern, rule = scheduler.name_rule
    name = f"{diagnostics.spec.name}-0000"
    if not re.fullmatch(pattern, name):
        message = f"{scheduler.name} does not allow a job name like {name!r}: {rule}"
        diagnostics.profile_error(message, "name", hint="name: …")
    _check_groups(diagnostics)
    if diagnostics.spec.site.site.commands and not scheduler.on_this_machine:
        _check_commands(diagnostics, scheduler)


def _check_commands(diagnostics: Diagnostics, scheduler: Scheduler) -> None:
    known = all_commands(scheduler)
    for name in diagnostics.spec.site.site.commands:
        if name not in known:
            listed = ", ".join(sorted(known))
            message = f"{scheduler.name} has no command {name}; it has {listed}"
            diagnostics.site_error(message, "commands", name, hint=did_you_mean(name, known))


def _check_groups(diagnostics: Diagnostics) -> None:
    """Report keys of the profile that contradict `groups`."""
    profile = diagnostics.spec.profile
    wanted = profile.head and profile.head.group
    if wanted and wanted not in profile.groups:
        known = ", ".join(profile.groups) or "the profile has no `groups`"
        message = f"there is no group `{wanted}`"
        diagnostics.profile_error(message, "head", "group", hint=f"head: {{group: …}}: {known}")
    if not profile.groups:
        return
    if "gpus" in profile.given:
        message = "`gpus` is a key of each group; with `groups`, the profile itself has none"
        diagnostics.profile_error(message, "gpus")
    if profile.layout != "workers":
        message = f"`layout: {profile.layout}` is one job with all workers, which has no `groups`"
        diagnostics.profile_error(message, "groups", hint="layout: workers")
        diagnostics.raise_problems()
