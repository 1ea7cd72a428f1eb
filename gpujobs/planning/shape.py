"""The shape of equal jobs, and the part of a node that belongs to one: CPUs, disk, …"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..config.placeholders import Count
from ..config.profile import Profile
from ..config.site import Site
from ..config.sitequeue import Queue
from ..text import plural
from .containers import Container, Staging
from .limits import QueuedJobs

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
    run_launcher: tuple[str, ...] = ()
    """Words of the command that starts `run`, if the job's processes are not on a compute node."""
    submit_arguments: tuple[str, ...] = ()
    """Words after the command that submits the jobs."""
    account: str = ""
    """"" if the profile names none, or the site has none."""
    cuda: str = ""
    """CUDA version that the environment needs of the driver; "" if it states none."""

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


def resource_values(site: Site, queue: Queue, shape: JobShape) -> Values:
    """Return the values of the placeholders of the `resources` of all queues: bytes or `Count`.

    They are None for resources that ``queue`` does not have.
    """
    names = {name for other in site.queues.values() for name in other.resources}
    values: dict[str, int | float | str | None] = {}
    for name in sorted(names):
        amount = queue.resources.get(name)
        on_node = _resource_share(amount, queue, shape)
        of_job = on_node and on_node * shape.nodes
        shares = {
            f"{name}_per_node": on_node,
            f"{name}_per_job": of_job,
            f"{name}_per_cpu": _share(of_job, shape.cpus),
            f"{name}_per_gpu": _share(of_job, shape.gpus),
        }
        for key, share in shares.items():
            values[key] = share
            if share is not None and isinstance(amount, Count):
                values[key] = Count(share)
    return values


def _resource_share(amount: int | None, queue: Queue, shape: JobShape) -> int | None:
    """Return the amount of a node that belongs to the job's GPUs there, else to its CPUs."""
    if amount is None:
        return None
    if shape.gpus:
        return amount * shape.gpus_per_node // (queue.gpus_per_node or 1)
    if not shape.cpus or not queue.cpus_per_node:
        return None
    return amount * shape.cpus // queue.cpus_per_node


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
