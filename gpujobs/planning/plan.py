"""Site + profile → Plan: everything that will happen, as plain data. Pure: no process, no clock, no network.

Every limit of the site is checked here; what breaks one is an InputError that names the profile's line and the site's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import placeholders
from ..config.profile import Profile
from ..config.site import Queue, Site
from ..config.sources import ClusterSpec
from ..errors import InputError, Problem
from ..injob.names import EXTRA_RANKS, HEAD, job_worker_names
from ..schedulers import Scheduler, get_scheduler
from . import workeroptions
from .diagnostics import Diagnostics
from .directives import DirectiveWriter, own_request
from .shape import JobShape, QueueMismatch, cpu_shape, gpu_shape


@dataclass(frozen=True)
class Machine:
    """This machine as the `local` site sees it: ``gpus`` are the free ones (index or UUID), memory is in bytes."""

    gpus: tuple[str, ...]
    cpus: int
    memory: int
    busy: Mapping[str, str]
    """GPUs that are in use, and by what."""


@dataclass(frozen=True)
class JobGroup:
    """Equal jobs, sent to the batch scheduler as one array."""

    group: str
    """"" for the workers, "head" for the dask scheduler's own job."""
    shape: JobShape
    queue: str
    """What the batch scheduler calls the queue."""
    queue_key: str
    """What the site file calls it."""
    walltime: int | None
    lines: tuple[str, ...]
    """Directives: resources, account, further lines. Without prefix."""
    visible_devices: str
    """scheduler, exclusive, variable:NAME, file:NAME, or "" without GPUs."""


@dataclass(frozen=True)
class Transport:
    """What dask's processes talk over. ``schemes``: dask's names of the candidates (tls, tcp, wss, ws, ucxx), best
    first; the first one that works in the job is taken, for all of them."""

    schemes: tuple[str, ...]
    interface: str | None

    @property
    def certificate(self) -> bool:
        """The cluster needs a certificate."""
        return bool({"tls", "wss"} & set(self.schemes))


@dataclass(frozen=True)
class Ranks:
    """How an MPI allocation is started. ``working``: ranks with GPUs; ``started``: all that the launcher starts."""

    command: tuple[str, ...]
    setup: str
    working: int
    started: int
    per_node: int
    gpus: int
    """GPUs of each working rank."""


@dataclass(frozen=True)
class Plan:
    """A site and a profile, resolved. ``name`` is the cluster's name without its random part."""

    name: str
    site_name: str
    site: Site
    profile: Profile
    scheduler: Scheduler
    workers: JobGroup
    head: JobGroup | None
    transport: Transport
    ranks: Ranks | None
    """None in the layout `workers`."""
    python: str
    workdir: str
    start_workers: int
    devices: tuple[str, ...] = ()
    """The local site's GPUs, in the order in which jobs take them."""
    notes: tuple[str, ...] = ()
    """What the user should know: what was ignored, what was chosen."""

    @property
    def n_workers(self) -> int:
        """How many workers there will be."""
        return self.workers.shape.jobs * self.workers.shape.workers

    @property
    def gpus(self) -> int:
        """How many GPUs are asked for."""
        return self.workers.shape.jobs * self.workers.shape.gpus

    @property
    def all_jobs(self) -> tuple[JobGroup, ...]:
        """The head's own job first, where it has one."""
        return (self.head, self.workers) if self.head else (self.workers,)

    def worker_names(self, cluster: str) -> list[str]:
        """Return the names that the workers of the cluster with the id ``cluster`` will have."""
        return [
            name
            for n in range(self.workers.shape.jobs)
            for name in self.job_worker_names(cluster, n)
        ]

    def job_worker_names(self, cluster: str, number: int) -> list[str]:
        """Return the names of the workers of job ``number``."""
        ranks = self.ranks.working if self.ranks else 0
        return job_worker_names(cluster, number, self.workers.shape.workers, ranks)


def make_plan(
    spec: ClusterSpec, *, python: str, machine: Machine | None = None, elastic: bool = False
) -> Plan:
    """Return the plan of ``order``. ``python`` is the interpreter that runs gpujobs, ``machine`` the local machine.

    ``elastic``: the number of workers will change, and may not be known yet.
    """
    return _Planner(spec, python, machine, elastic).plan()


class _Planner:
    def __init__(
        self, spec: ClusterSpec, python: str, machine: Machine | None, elastic: bool
    ) -> None:
        self.spec, self.profile, self.site = spec, spec.profile, spec.site.site
        self.scheduler = get_scheduler(self.site.scheduler)(self.site.cluster)
        self.machine = machine if self.scheduler.on_this_machine else None
        self.this_python = python
        self.elastic = (
            elastic and spec.profile.layout != "mpi"
        )  # one allocation has its size for good
        # Of an elastic cluster nobody may have said how many GPUs: then jobs are as small as they can be.
        self.smallest = (
            self.elastic and not {"gpus", "gpus_per_job"} & spec.profile.model_fields_set
        )
        self.diagnostics = Diagnostics(spec)

    def plan(self) -> Plan:
        profile = self.profile
        self._check_name()
        self._not_yet()
        self._check_layout()
        gpus, count = self._wanted()
        workers = self._jobs("", *self._choose(gpus, count), profile.walltime)
        n_workers = workers.shape.jobs * workers.shape.workers
        start = profile.start_workers or (n_workers if profile.layout == "mpi" else 1)
        if start > n_workers:
            self.diagnostics.profile(
                f"start_workers is {start}, but there will be {n_workers} workers", "start_workers"
            )
        if not profile.walltime and not self.scheduler.on_this_machine:
            self.diagnostics.profile(
                "`walltime` is needed: the site has no default", "walltime", hint="walltime: 1h"
            )
        workeroptions.check(self.diagnostics, bool(workers.shape.gpus))
        head, transport = self._head(), self._transport()
        self.diagnostics.check()
        return Plan(
            name=self.spec.name,
            site_name=self.spec.site.name,
            site=self.site,
            profile=profile,
            scheduler=self.scheduler,
            workers=workers,
            head=head,
            transport=transport,
            ranks=self._ranks(workers.shape) if profile.layout == "mpi" else None,
            python=profile.environment.python
            or ("python" if profile.environment.setup else self.this_python),
            workdir=str(self.spec.workdir),
            start_workers=start,
            devices=self.machine.gpus[: None if self.elastic else gpus] if self.machine else (),
            notes=tuple(self.diagnostics.notes),
        )

    def _wanted(self) -> tuple[int, int]:
        """Return how many GPUs, and how many CPU workers where there are none."""
        profile, machine = self.profile, self.machine
        count = profile.workers.count
        if profile.gpus == "auto":
            if machine is None:
                self.diagnostics.profile(
                    "`gpus: auto` is for the local site; say how many GPUs", "gpus"
                )
                self.diagnostics.check()
            elif machine.gpus:
                self.diagnostics.note(
                    f"gpus: auto: {len(machine.gpus)} free GPUs on this machine, one worker each"
                )
                return len(machine.gpus), 0
            else:
                why = "all GPUs are in use" if machine.busy else "no NVIDIA GPU on this machine"
                self.diagnostics.note(f"gpus: auto: {why}, so CPU workers")
                return 0, count or max(1, min(4, machine.cpus // profile.workers.threads))
        if profile.gpus and count:
            message = "`workers.count` is for CPU workers; there is one worker per GPU"
            self.diagnostics.profile(message, "workers", "count", hint="gpus: 0")
        if machine and int(profile.gpus) > len(machine.gpus):
            busy = "".join(f"; GPU {gpu} is used by {what}" for gpu, what in machine.busy.items())
            message = f"{profile.gpus} GPUs wanted, {len(machine.gpus)} free on this machine{busy}"
            self.diagnostics.profile(
                message, "gpus", hint="gpus: auto takes the free ones, else CPU workers"
            )
            self.diagnostics.check()
        return int(profile.gpus), count or 1

    def _choose(self, gpus: int, count: int) -> tuple[str, JobShape]:
        """Return the first queue that fits and the shape of the jobs there."""
        wanted, site = self.profile.queue, self.spec.site.name
        candidates = [
            key for key, queue in self.site.queues.items() if wanted in ("auto", key, queue.name)
        ]
        candidates.sort(key=lambda key: key != wanted)  # the entry of that very name first
        if not candidates:
            self.diagnostics.profile(
                f"site {site} has no queue `{wanted}`; it has {', '.join(self.site.queues)}",
                "queue",
            )
            self.diagnostics.check()
        misfits: dict[str, QueueMismatch] = {}
        for key in candidates:
            queue = self._shaped(self.site.queues[key])
            try:
                if gpus:
                    wanted_gpus = (
                        (queue.gpus_per_node or 1) if self.smallest and queue.exclusive else gpus
                    )
                    shape = gpu_shape(
                        self.profile,
                        wanted_gpus,
                        queue,
                        own_request(self.diagnostics, key, True) or (),
                    )
                    self._note_single_gpus(queue, shape)
                    return key, shape
                if wanted == "auto" and queue.gpus_per_node and not self.machine:
                    hint = "name it with `queue:` to run CPU workers there all the same"
                    raise QueueMismatch(
                        "gpus", "it has GPUs, which would idle", limit="gpus_per_node", hint=hint
                    )
                return key, cpu_shape(self.profile, count, queue)
            except QueueMismatch as misfit:
                misfits[key] = misfit
        raise InputError([*self.diagnostics.problems, self._no_fit(misfits)])

    def _no_fit(self, misfits: Mapping[str, QueueMismatch]) -> Problem:
        (key, first), *others = misfits.items()
        position = self.spec.position(*first.key.split("."))
        if not others:
            limit = self.spec.site_position("queues", key, first.limit) if first.limit else None
            return Problem(f"queue {key}: {first}", position, hint=first.hint, related=limit)
        reasons = [
            f"  {key}: {misfit} ({self.spec.site_position('queues', key, misfit.limit)})"
            for key, misfit in misfits.items()
        ]
        return Problem("\n".join(["no queue fits:", *reasons]), position, hint=first.hint)

    def _note_single_gpus(self, queue: Queue, shape: JobShape) -> None:
        if self.smallest and shape.gpus == 1 and (queue.gpus_per_node or 1) > 1:
            self.diagnostics.note(
                "jobs of one GPU: where the batch scheduler fences the others off, workers on one node do not talk "
                f"over NVLink; gpus_per_job={queue.gpus_per_node} keeps a node together"
            )

    def _shaped(self, queue: Queue) -> Queue:
        """Fill in what the local site reads from the machine."""
        if self.machine is None:
            return queue
        gpus = len(self.machine.gpus)
        found = {
            "gpus_per_node": gpus
            if queue.gpus_per_node is None
            else min(gpus, queue.gpus_per_node),
            "cpus_per_node": queue.cpus_per_node or self.machine.cpus,
            "memory_per_node": queue.memory_per_node or self.machine.memory,
        }
        return queue.model_copy(update=found)

    def _jobs(self, group: str, key: str, shape: JobShape, walltime: int | None) -> JobGroup:
        writer = DirectiveWriter(self.diagnostics, self.scheduler, key, shape)
        visible = writer.visible_devices() if shape.gpus else ""
        return JobGroup(
            group, shape, self.site.queue_name(key), key, walltime, writer.lines(), visible
        )

    def _head(self) -> JobGroup | None:
        head = self.profile.head
        if head is None:
            return None
        keys = (
            [head.queue]
            if head.queue
            else [key for key, queue in self.site.queues.items() if not queue.gpus_per_node]
        )
        if not keys or keys[0] not in self.site.queues:
            hint = f"head: {{queue: …}}, one of {', '.join(self.site.queues)}"
            self.diagnostics.profile(
                "the head needs a queue without GPUs", "head", "queue", hint=hint
            )
            return None
        queue, memory = self.site.queues[keys[0]], head.memory
        if memory is None and queue.memory_per_node and queue.cpus_per_node:
            memory = queue.memory_per_node * head.cpus // queue.cpus_per_node
        return self._jobs(
            HEAD,
            keys[0],
            JobShape(1, 1, 0, head.cpus, memory, 0, None),
            head.walltime or self.profile.walltime,
        )

    def _transport(self) -> Transport:
        """Return what to talk over. Listing ucxx is the site's consent to what is not encrypted inside the job."""
        asked, allowed = self.profile.network, self.site.network.protocols
        if asked.protocol != "auto":
            protocols: tuple[str, ...] = (asked.protocol,)
            if asked.protocol == "ucxx" and "ucxx" not in allowed:
                message = (
                    "ucxx is not encrypted, and the site does not list it in `network.protocols`"
                )
                self.diagnostics.profile(
                    message, "network", "protocol", related=self.spec.site_position("network")
                )
            if asked.protocol == "ucxx" and asked.encryption:
                self.diagnostics.profile(
                    "ucxx cannot be encrypted", "network", "encryption", hint="protocol: tcp"
                )
        else:  # ucxx moves data between GPUs, and has no encryption
            without = asked.encryption or not self.profile.gpus
            protocols = tuple(name for name in allowed if name != "ucxx" or not without) or ("tcp",)
        if asked.encryption is not False:
            protocols = tuple({"tcp": "tls", "ws": "wss"}.get(name, name) for name in protocols)
        if open_ones := [name for name in protocols if name not in ("tls", "wss")]:
            self.diagnostics.note(
                f"not encrypted: traffic between dask's processes over {' or '.join(open_ones)}"
            )
        return Transport(protocols, asked.interface or self.site.network.interface)

    def _check_name(self) -> None:
        pattern, words = self.scheduler.name_rule
        name = f"{self.spec.name}-0000"
        if not re.fullmatch(pattern, name):
            message = f"jobs called like {name!r} cannot be on {self.scheduler.name}: {words}"
            self.diagnostics.profile(message, "name", hint="name: …")

    def _not_yet(self) -> None:
        profile = self.profile
        for key, used in (
            ("groups", profile.groups),
            ("environment.container", profile.environment.container),
        ):
            if used:
                self.diagnostics.profile(f"`{key}` is not supported yet", *key.split("."))
        self.diagnostics.check()

    def _check_layout(self) -> None:
        profile = self.profile
        if profile.run_on == "ranks" and (profile.layout != "mpi" or not profile.run):
            self.diagnostics.profile(
                "`run_on: ranks` needs `layout: mpi` and a script in `run`", "run_on"
            )
        if profile.layout != "mpi":
            return
        for key, given in (("head", profile.head), ("gpus_per_job", profile.gpus_per_job)):
            if given:
                self.diagnostics.profile(
                    f"`{key}` has no meaning in `layout: mpi`: one job has all GPUs", key
                )
        if profile.gpus in (0, "auto"):
            self.diagnostics.profile("`layout: mpi` needs a number of GPUs", "gpus")
        if profile.run_on == "ranks" and Path(profile.run[0]).name.startswith("python"):
            hint = f"run: [{', '.join(profile.run[1:])}]"
            self.diagnostics.profile(
                "`run_on: ranks` takes a Python script, without `python`", "run", hint=hint
            )
        self.diagnostics.check()

    def _ranks(self, shape: JobShape) -> Ranks:
        profile, mpi = self.profile, self.site.mpi
        # dask-cuda's workers of a node have one rank; plain ones, which are pinned to a GPU each, have one each.
        of_node = 1 if profile.workers.worker_class == "cuda" else shape.gpus_per_node
        per_node = of_node + (EXTRA_RANKS if profile.run_on == "ranks" else 0)
        values: dict[str, int | float | str | None] = {
            "ranks": per_node * shape.nodes,
            "nodes": shape.nodes,
            "ranks_per_node": per_node,
        }
        command = tuple(
            placeholders.expand(word, values) for word in mpi.command or self.scheduler.mpi_command
        )
        return Ranks(
            command=command,
            setup=mpi.setup,
            working=of_node * shape.nodes,
            started=per_node * shape.nodes,
            per_node=per_node,
            gpus=shape.gpus_per_node // of_node,
        )
