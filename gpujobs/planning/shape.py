"""GPUs that a profile asks for, and the shape of the jobs that have them: CPUs, memory, …"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..config import placeholders
from ..config.profile import Profile
from ..config.site import Queue, Site
from ..text import plural, size_text
from .bash import Diagnostics
from .containers import Container, Staging
from .limits import QueuedJobs


# -- this machine, which the `local` site runs jobs on ---------------------------------------------
@dataclass(frozen=True)
class Machine:
    """The resources of this machine; memory is in bytes."""

    gpus: tuple[str, ...]
    """Free GPUs, by index or UUID."""
    cpus: int
    memory: int
    busy: Mapping[str, str]
    """GPUs that are in use, and their processes."""
    nvlink: int = 0
    """Number of free GPUs that have NVLink."""
    gpu_memory: int | None = None
    """The least memory of a free GPU; None: not known."""

    def unused_nvlink(self, gpus: int, protocol: str) -> str:
        """Return what ``gpus`` workers do not use over dask's ``protocol``, and the cure; or ""."""
        linked = min(gpus, self.nvlink)
        if linked < 2 or protocol == "ucxx":
            return ""
        return (
            f"NVLink between {linked} GPUs is left unused: dask uses {protocol}; "
            "`protocol: ucxx` uses it, not encrypted"
        )

    planned: int = 0
    """GPUs of other jobs of the cluster."""
    nodes: int = 1
    """Number of machines like this one."""

    def without(self, gpus: int) -> Machine:
        """Return this machine without its first ``gpus`` free GPUs, which a group takes."""
        return replace(self, gpus=self.gpus[gpus:], planned=self.planned + gpus)

    def complete(self, queue: Queue) -> Queue:
        """Return ``queue`` with the numbers of this machine if the site file does not state them.

        It never has more GPUs per node than are free.
        """
        gpus = len(self.gpus) + self.planned  # of which each has its share of CPUs and memory
        if queue.gpus_per_node is not None:
            gpus = min(gpus, queue.gpus_per_node)
        return replace(
            queue,
            gpus_per_node=gpus,
            cpus_per_node=queue.cpus_per_node or self.cpus,
            memory_per_node=queue.memory_per_node or self.memory,
        )


# -- how many GPUs, or how many CPU workers, the profile asks for ----------------------------------
MOST_AUTO_CPU_WORKERS = 4
"""CPU workers for `gpus: auto` on a machine without free GPUs."""


def find_demand(diagnostics: Diagnostics, machine: Machine | None) -> tuple[int, int]:
    """Return the GPUs that the profile asks for; if they are 0, the CPU workers, as the second one.

    ``machine`` is this machine if the site is local.

    Raises InputError if it cannot be determined, or if this machine has too few free GPUs.
    """
    profile = diagnostics.spec.profile
    if profile.gpus == "auto":
        return _automatic(diagnostics, machine)
    gpus, count = int(profile.gpus), profile.workers.count
    if "gpus" not in profile.given:
        gpus = profile.workers.gpus_per_worker
    if gpus and count:
        message = "`workers.count` is for CPU workers; GPUs determine the number of workers"
        diagnostics.profile_error(message, "workers", "count", hint="gpus: 0")
    if not gpus:
        _check_size_of_cpu_workers(diagnostics)
    _check_whole(diagnostics, "gpus_per_job", profile.gpus_per_job or 0)
    _check_whole(diagnostics, "gpus", gpus)
    if machine:
        _check_free(diagnostics, machine, gpus)
    return gpus, count or 1


def _automatic(diagnostics: Diagnostics, machine: Machine | None) -> tuple[int, int]:
    profile = diagnostics.spec.profile
    workers = profile.workers
    if machine is None:
        message = "`gpus: auto` is for the local site; give the number of GPUs"
        diagnostics.profile_error(message, "gpus")
        diagnostics.raise_problems()
        return 0, 0  # not reached
    free = len(machine.gpus)
    if free:
        return _whole_workers(diagnostics, free), 0
    _check_size_of_cpu_workers(diagnostics)
    reason = "all GPUs are in use" if machine.busy else "no NVIDIA GPU on this machine"
    diagnostics.note(f"gpus: auto: {reason}, so CPU workers")
    cpus = profile.cpus_per_job or workers.threads
    most = max(1, min(MOST_AUTO_CPU_WORKERS, machine.cpus // cpus))
    return 0, workers.count or most


def _whole_workers(diagnostics: Diagnostics, free: int) -> int:
    """Return how many of the ``free`` GPUs of this machine have a worker."""
    size = diagnostics.spec.profile.workers.size
    gpus = free // size.gpus * size.gpus
    if not gpus:
        message = f"`gpus: auto`: {free} free on this machine; a worker has {size.gpus}"
        diagnostics.profile_error(message, "gpus", hint=f"gpus_per_worker: {free}")
        diagnostics.raise_problems()
    workers = "one worker each"
    if not size.usual:
        workers = plural(size.workers(gpus), "worker")
    diagnostics.note(f"gpus: auto: {free} free GPUs on this machine, {workers}")
    return gpus


def _check_whole(diagnostics: Diagnostics, key: str, gpus: int) -> None:
    """Report GPUs that are not whole workers."""
    per_worker = diagnostics.spec.profile.workers.gpus_per_worker
    if gpus % per_worker == 0:
        return
    fewer, more = gpus // per_worker * per_worker, -(-gpus // per_worker) * per_worker
    choices = f"{fewer} or {more}" if fewer else str(more)
    diagnostics.profile_error(
        f"`{key}` is {gpus}, not a multiple of `workers.gpus_per_worker`, which is {per_worker}",
        key,
        hint=f"{key}: {choices}",
        related=diagnostics.spec.position("workers", "gpus_per_worker"),
    )
    diagnostics.raise_problems()


def _check_size_of_cpu_workers(diagnostics: Diagnostics) -> None:
    for name in ("gpus_per_worker", "workers_per_gpu"):
        if getattr(diagnostics.spec.profile.workers, name) > 1:
            message = f"`workers.{name}` is for GPU workers; there are CPU workers"
            diagnostics.profile_error(message, "workers", name)
    diagnostics.raise_problems()


def _check_free(diagnostics: Diagnostics, machine: Machine, gpus: int) -> None:
    free = len(machine.gpus) * machine.nodes
    if gpus <= free:
        return
    busy = "".join(f"; GPU {gpu} is used by {user}" for gpu, user in machine.busy.items())
    message = f"{plural(gpus, 'GPU')} wanted, {free} free on this machine{busy}"
    hint = "" if machine.planned else "gpus: auto takes the free ones, else CPU workers"
    diagnostics.profile_error(message, "gpus", hint=hint)
    diagnostics.raise_problems()


# -- the shape of equal jobs -----------------------------------------------------------------------
FRACTION = 10**6
"""Parts of one GPU that ``{gpus_per_cpu}`` distinguishes."""

Place = tuple[str | int, ...]
"""Location of a key in a profile or site file."""
Values = Mapping[str, int | float | str | None]
"""Values of placeholders by name; None: the site does not state it."""


@dataclass(frozen=True)
class JobShape:
    """``jobs`` equal jobs. Other numbers are of one job, memory is in bytes; None: not known."""

    jobs: int
    nodes: int
    gpus: int
    cpus: int | None
    memory: int | None
    """As the directives request it: a multiple of their units."""
    workers: int = 0
    worker_threads: int = 0
    worker_memory: int | None = None
    """In whole MiB."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the job on each of its nodes."""
        return self.gpus // self.nodes

    def values(self) -> dict[str, int | float | str | None]:
        """Return the values of the placeholders, memory in bytes."""
        return {
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "gpus_per_job": self.gpus,
            "gpus_per_cpu": _ratio(self.gpus, self.cpus),
            "cpus_per_node": _share(self.cpus, self.nodes),
            "cpus_per_job": self.cpus,
            "cpus_per_gpu": _share(self.cpus, self.gpus),
            "memory_per_node": _share(self.memory, self.nodes),
            "memory_per_job": self.memory,
            "memory_per_cpu": _share(self.memory, self.cpus),
            "memory_per_gpu": _share(self.memory, self.gpus),
        }


@dataclass(frozen=True)
class JobGroup:
    """Equal jobs that are submitted as one array."""

    group: str
    """Name of the group of workers, "" if there is only one; `HEAD` for the head's own job."""
    profile: Profile
    """The profile of these jobs."""
    site: Site
    """The site, with the values of their queue."""
    shape: JobShape
    queue: str
    """The batch scheduler's name of the queue; of all in which the jobs wait, with commas."""
    queue_key: str
    """The queue's key in the site file."""
    walltime: int | None
    """In seconds."""
    lines: tuple[str, ...]
    """Directives without their prefix: resources, account, extra directives."""
    visible_devices: str
    """scheduler, exclusive, variable:NAME or file:NAME; "" without GPUs."""
    python: str
    """The interpreter; with a container that of the image."""
    container: Container | None = None
    """The container in which everything with `python` runs."""
    staging: Staging | None = None
    """The copy of the site's environment that has the interpreter."""
    launcher: tuple[str, ...] = ()
    """Words of the command that starts the job's processes, if the batch script itself does not."""
    submit_arguments: tuple[str, ...] = ()
    """Words after the command that submits the jobs."""
    account: str = ""
    """"" if the profile names none, or the site has none."""

    @cached_property
    def n_workers(self) -> int:
        """Number of workers of all jobs."""
        return self.shape.jobs * self.shape.workers

    @cached_property
    def gpus(self) -> int:
        """Number of GPUs of all jobs."""
        return self.shape.jobs * self.shape.gpus

    @property
    def queued(self) -> QueuedJobs:
        """The jobs, as they count towards limits."""
        return QueuedJobs(self.queue_key, self.shape.jobs, self.shape.gpus)


def occupied_nodes(queue: Queue, shape: JobShape, jobs: int) -> int:
    """Return the fewest nodes of the queue on which ``jobs`` jobs of this shape run together."""
    if queue.exclusive or shape.nodes > 1:
        return jobs * shape.nodes
    of_node = (queue.gpus_per_node, queue.cpus_per_node, queue.memory_per_node)
    of_job = (shape.gpus, shape.cpus, shape.memory)
    fitting = [a // b for a, b in zip(of_node, of_job, strict=True) if a and b]
    return math.ceil(jobs / max(1, min(fitting, default=1)))


class QueueMismatch(Exception):
    """The queue cannot run the jobs of the profile.

    ``key`` is the dotted key of the profile, ``limit`` the key of the queue that it breaks,
    ``place`` the location of the limit in the site file if it is not a key of the queue.
    """

    def __init__(
        self, key: str, message: str, *, limit: str = "", place: Place = (), hint: str = ""
    ) -> None:
        super().__init__(message)
        self.key, self.limit, self.place, self.hint = key, limit, place, hint

    def site_place(self, queue_key: str) -> Place:
        """Return the location in the site file for an error about the queue ``queue_key``."""
        return self.place or ("queues", queue_key, self.limit)


def _share(total: int | None, parts: int | None) -> int | None:
    if not total or not parts:
        return None
    return total // parts


def _ratio(gpus: int, cpus: int | None) -> int | float | None:
    if not cpus:
        return None
    if gpus % cpus == 0:
        return gpus // cpus
    # Rounded down: all slots together may not request more GPUs than a node has.
    return gpus * FRACTION // cpus / FRACTION


# -- the host memory of a job, as its directives request it, and of its workers --------------------
MIB = 2**20


@dataclass(frozen=True)
class MemoryRequest:
    """The memory that directives request for a job of ``nodes``, ``cpus`` and ``gpus``.

    ``texts`` are the directives with their placeholders, each of which is a whole number in its
    unit. One number of bytes that is whole in all of them is requested, printed, and given to the
    workers.
    """

    texts: tuple[str, ...]
    nodes: int
    cpus: int | None
    gpus: int

    def at_most(self, n_bytes: int) -> int:
        """Return ``n_bytes`` rounded down; unchanged if it is less than one unit."""
        step = self._step
        return n_bytes // step * step or n_bytes

    def at_least(self, n_bytes: int) -> int:
        """Return ``n_bytes`` rounded up."""
        step = self._step
        return -(-n_bytes // step) * step

    @property
    def _step(self) -> int:
        """The job's memory is rounded to a multiple of this many bytes."""
        parts = {
            "memory_per_node": self.nodes,
            "memory_per_job": 1,
            "memory_per_cpu": self.cpus,
            "memory_per_gpu": self.gpus,
        }
        units = placeholders.memory_units(" ".join(self.texts))
        return math.lcm(*[unit * (parts[name] or 1) for name, unit in units])


def worker_share(memory: int, workers: int) -> int:
    """Return the memory of each of ``workers`` workers, in whole MiB."""
    return memory // workers // MIB * MIB or MIB


def cpu_share(queue: Queue, cpus: int) -> int | None:
    """Return the bytes of memory that belong to ``cpus`` CPUs of a node; None if not known."""
    if not queue.memory_per_node or not queue.cpus_per_node:
        return None
    return queue.memory_per_node * cpus // queue.cpus_per_node


def requested_memory(
    queue: Queue, request: MemoryRequest, key: str, wanted: int | None, share: int | None
) -> int | None:
    """Return the memory of a job: at least ``wanted``, else at most ``share``; None if not known.

    Raises QueueMismatch if a node has less; ``key`` is the profile's for ``wanted``.
    """
    if not wanted:
        return share and request.at_most(share)
    if wanted < MIB:
        message = f"a job of {size_text(wanted)}; it needs at least {size_text(MIB)}"
        raise QueueMismatch(key, message)
    limit = queue.memory_per_node and queue.memory_per_node * request.nodes
    if limit and wanted > limit:
        wish = f"jobs of {size_text(wanted)}"
        if key == "memory_per_job":
            wish += f" on {plural(request.nodes, 'node')}"
        message = f"{wish}; its nodes have {size_text(limit // request.nodes)} for jobs"
        raise QueueMismatch(key, message, limit="memory_per_node")
    # Of a node whose memory is no multiple of the unit, a job has at most whole units.
    memory = request.at_least(wanted)
    return request.at_most(limit) if limit and memory > limit else memory


# -- the part of a node's other resources, such as its disk, that belongs to a job -----------------
def resource_values(site: Site, queue: Queue, shape: JobShape) -> Values:
    """Return the values of the placeholders of the `resources` of all queues, in bytes.

    They are None for resources that ``queue`` does not have.
    """
    names = {name for other in site.queues.values() for name in other.resources}
    values: dict[str, int | float | str | None] = {}
    for name in sorted(names):
        on_node = _resource_share(queue.resources.get(name), queue, shape)
        of_job = on_node and on_node * shape.nodes
        values[f"{name}_per_node"] = on_node
        values[f"{name}_per_job"] = of_job
        values[f"{name}_per_cpu"] = _share(of_job, shape.cpus)
        values[f"{name}_per_gpu"] = _share(of_job, shape.gpus)
    return values


def _resource_share(amount: int | None, queue: Queue, shape: JobShape) -> int | None:
    """Return the bytes of a node that belong to the job's GPUs there, else to its CPUs."""
    if amount is None:
        return None
    if shape.gpus:
        return amount * shape.gpus_per_node // (queue.gpus_per_node or 1)
    if not shape.cpus or not queue.cpus_per_node:
        return None
    return amount * shape.cpus // queue.cpus_per_node


# -- CPUs of one job, if the profile itself states them --------------------------------------------
def cpus_per_node(profile: Profile, queue: Queue, nodes: int) -> int | None:
    """Return the job's CPUs on each of its ``nodes``; None if the profile has no `cpus_per_job`.

    Raises QueueMismatch if a node of the queue has fewer.
    """
    wanted, limit = profile.cpus_per_job, queue.cpus_per_node
    if wanted is None:
        return None
    if wanted % nodes:
        message = f"{plural(wanted, 'CPU')} cannot be divided equally among {plural(nodes, 'node')}"
        raise QueueMismatch("cpus_per_job", message)
    if limit and wanted > limit * nodes:
        message = (
            f"jobs of {plural(wanted, 'CPU')} on {plural(nodes, 'node')}; its nodes have {limit}"
        )
        raise QueueMismatch("cpus_per_job", message, limit="cpus_per_node")
    return wanted // nodes


def worker_threads(profile: Profile, cpus: int | None, workers: int) -> int:
    """Return the threads of each of the ``workers`` of a node with ``cpus`` CPUs of the job.

    Raises QueueMismatch if `cpus_per_job` has not one CPU for each.
    """
    if profile.cpus_per_job is None or not cpus or "threads" in profile.workers.given:
        return profile.workers.threads
    if cpus < workers:
        message = f"{plural(cpus, 'CPU')} on a node are too few for its {plural(workers, 'worker')}"
        raise QueueMismatch("cpus_per_job", message)
    return cpus // workers
