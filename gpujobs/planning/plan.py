"""From a profile and a site to a plan: plain data that determines every job.

Pure: no process, no clock, no network. Every limit of the site is checked here; a profile that
exceeds one is an InputError with the positions of both.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ..config.profile import Profile
from ..config.site import Site
from ..config.spec import ClusterSpec
from ..errors import InputError
from ..injob.names import HEAD
from ..schedulers import Scheduler, get_scheduler
from ..schedulers.commandnames import all_commands
from . import workeroptions
from .demand import find_demand
from .diagnostics import Diagnostics
from .directives import DirectiveWriter, request_texts
from .directory import expand_directory
from .head import head_queue, head_shape
from .layout import Layout
from .layouts import LAYOUTS
from .machine import Machine
from .queues import QueueChooser
from .shape import JobGroup, JobShape, QueueMismatch
from .transport import Transport, choose_transport

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
    workers: JobGroup
    """The jobs with workers."""
    head: JobGroup | None
    """The dask scheduler's own job, if the profile asks for one."""
    transport: Transport
    root: str
    """Folder of the clusters' folders, expanded on this host."""
    python: str
    workdir: str
    start_workers: int
    devices: tuple[str, ...] = ()
    """GPUs of this machine for the local site, in the order in which jobs take them."""
    notes: tuple[str, ...] = ()
    """Information for the user, such as keys that are ignored."""

    @property
    def n_workers(self) -> int:
        """Number of workers of all jobs."""
        return self.workers.shape.jobs * self.workers.shape.workers

    @property
    def gpus(self) -> int:
        """Number of GPUs of all jobs."""
        return self.workers.shape.jobs * self.workers.shape.gpus

    @property
    def working_ranks(self) -> int:
        """Number of MPI ranks that own GPUs; 0 without MPI."""
        return self.layout.working_ranks(self.workers.shape)

    @property
    def all_jobs(self) -> tuple[JobGroup, ...]:
        """All groups of jobs, the head's own first."""
        if self.head:
            return (self.head, self.workers)
        return (self.workers,)

    def worker_names(self, cluster_id: str) -> list[str]:
        """Return the expected names of all workers of the cluster ``cluster_id``."""
        return [
            name
            for number in range(self.workers.shape.jobs)
            for name in self.job_worker_names(cluster_id, number)
        ]

    def job_worker_names(self, cluster_id: str, number: int) -> list[str]:
        """Return the expected names of the workers of job ``number``."""
        return self.layout.job_worker_names(cluster_id, number, self.workers.shape)


def make_plan(
    spec: ClusterSpec, *, python: str, machine: Machine | None = None, elastic: bool = False
) -> Plan:
    """Return the plan of ``spec``. Raises InputError with all problems.

    ``python`` is the interpreter that runs gpujobs, ``machine`` this machine if the site is local.
    ``elastic``: the number of workers will change, and may not be known yet.
    """
    return _Planner(spec, python=python, machine=machine, elastic=elastic).plan()


class _Planner:
    def __init__(
        self, spec: ClusterSpec, *, python: str, machine: Machine | None, elastic: bool
    ) -> None:
        self.spec, self.profile, self.site = spec, spec.profile, spec.site.site
        self.scheduler = get_scheduler(self.site.scheduler)(self.site.cluster)
        self.layout = LAYOUTS[self.profile.layout](self.profile, self.site, self.scheduler)
        self.machine = machine if self.scheduler.on_this_machine else None
        self.this_python = python
        self.elastic = elastic and self.layout.elastic
        self.diagnostics = Diagnostics(spec)

    def plan(self) -> Plan:
        """Return the plan, or raise InputError."""
        self._check_profile()
        root, python = self._root(), self._python()
        demand = find_demand(self.diagnostics, self.machine)
        head_key = head_queue(self.diagnostics)
        key, shape = self._chooser(head_key).choose(demand.gpus, demand.cpu_workers)
        workeroptions.check(self.diagnostics, bool(shape.gpus))
        workers = self._job_group("", key, shape, self.profile.walltime)
        head = self._head(head_key)
        start_workers = self._start_workers(shape.jobs * shape.workers)
        transport = choose_transport(self.diagnostics)
        self.diagnostics.raise_problems()
        return Plan(
            name=self.spec.name,
            site_name=self.spec.site.name,
            site=self.site,
            profile=self.profile,
            scheduler=self.scheduler,
            layout=self.layout,
            workers=workers,
            head=head,
            transport=transport,
            root=root,
            python=python,
            workdir=str(self.spec.workdir),
            start_workers=start_workers,
            devices=self._devices(demand.gpus),
            notes=tuple(self.diagnostics.notes),
        )

    def _check_profile(self) -> None:
        pattern, rule = self.scheduler.name_rule
        name = f"{self.spec.name}-0000"
        if not re.fullmatch(pattern, name):
            message = f"{self.scheduler.name} does not allow a job name like {name!r}: {rule}"
            self.diagnostics.profile_error(message, "name", hint="name: …")
        if self.profile.groups:
            self.diagnostics.profile_error("`groups` is not supported yet", "groups")
        if self.profile.environment.container:
            message = "`environment.container` is not supported yet"
            self.diagnostics.profile_error(message, "environment", "container")
        if not self.profile.walltime and not self.scheduler.on_this_machine:
            message = "`walltime` is needed: the site has no default"
            self.diagnostics.profile_error(message, "walltime", hint="walltime: 1h")
        self._check_commands()
        self.layout.check(self.diagnostics)

    def _check_commands(self) -> None:
        if self.scheduler.on_this_machine:
            return
        known = all_commands(self.scheduler)
        for name in self.site.commands:
            if name not in known:
                listed = ", ".join(sorted(known))
                message = f"{self.scheduler.name} has no command {name}; it has {listed}"
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else ""
                self.diagnostics.site_error(message, "commands", name, hint=hint)

    def _chooser(self, head_key: str | None) -> QueueChooser:
        asked = {"gpus", "gpus_per_job"} & self.profile.given
        return QueueChooser(
            self.diagnostics,
            self.layout,
            machine=self.machine,
            head_queue=head_key,
            smallest=self.elastic and not asked,
        )

    def _job_group(self, group: str, key: str, shape: JobShape, walltime: int | None) -> JobGroup:
        writer = DirectiveWriter(self.diagnostics, self.scheduler, key, shape)
        lines, visible_devices = writer.lines(), ""
        if shape.gpus:
            visible_devices = writer.visible_devices()
        return JobGroup(
            group=group,
            shape=shape,
            queue=self.site.queue_name(key),
            queue_key=key,
            walltime=walltime,
            lines=lines,
            visible_devices=visible_devices,
        )

    def _head(self, key: str | None) -> JobGroup | None:
        head = self.profile.head
        if head is None or key is None:
            return None
        texts = request_texts(self.site, self.scheduler, key, gpus=False)
        try:
            shape = head_shape(head, self.site.queues[key], texts)
        except QueueMismatch as mismatch:
            place = self.spec.site_position(*mismatch.site_place(key))
            loc = mismatch.key.split(".")
            self.diagnostics.profile_error(f"queue {key}: {mismatch}", *loc, related=place)
            return None
        return self._job_group(HEAD, key, shape, head.walltime or self.profile.walltime)

    def _start_workers(self, n_workers: int) -> int:
        start = self.profile.start_workers or self.layout.default_start_workers(n_workers)
        if start > n_workers:
            message = f"start_workers is {start}, but there will be {n_workers} workers"
            self.diagnostics.profile_error(message, "start_workers")
        return start

    def _root(self) -> str:
        try:
            return expand_directory(self.site.directory)
        except InputError as error:
            self.diagnostics.site_error(error.problems[0].message, "directory")
            return ""

    def _python(self) -> str:
        """Return the jobs' interpreter: after a setup, the one that it puts on PATH."""
        environment = self.profile.environment
        if environment.setup and not environment.python:
            self.diagnostics.note(
                "the profile's `setup` selects the Python of the jobs: `python` on its PATH, not "
                f"{self.this_python}; `environment.python` names another one"
            )
            return "python"
        return environment.python or self.this_python

    def _devices(self, gpus: int) -> tuple[str, ...]:
        if self.machine is None:
            return ()
        if self.elastic:
            return self.machine.gpus
        return self.machine.gpus[:gpus]
