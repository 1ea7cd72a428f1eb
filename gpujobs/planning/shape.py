"""Equal jobs: their number and resources, and the error for a queue that cannot run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config.profile import Profile
from .containers import Container
from .limits import QueuedJobs
from .staging import Staging

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
    workers: int
    worker_threads: int
    worker_memory: int | None
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
class Software:
    """The Python of jobs. ``python`` is the interpreter, with a container that of the image."""

    python: str
    container: Container | None = None
    staging: Staging | None = None
    """The copy of the site's environment that has the interpreter."""


@dataclass(frozen=True)
class JobGroup:
    """Equal jobs that are submitted as one array."""

    group: str
    """Name of the group of workers, "" if there is only one; `HEAD` for the head's own job."""
    profile: Profile
    """The profile of these jobs."""
    shape: JobShape
    queue: str
    """The batch scheduler's name of the queue."""
    queue_key: str
    """The queue's key in the site file."""
    walltime: int | None
    """In seconds."""
    lines: tuple[str, ...]
    """Directives without their prefix: resources, account, extra directives."""
    visible_devices: str
    """scheduler, exclusive, variable:NAME or file:NAME; "" without GPUs."""
    software: Software
    launcher: tuple[str, ...] = ()
    """Words of the command that starts the job's processes, if the batch script itself does not."""
    submit_arguments: tuple[str, ...] = ()
    """Words after the command that submits the jobs."""
    account: str = ""
    """"" if the profile names none, or the site has none."""

    @property
    def python(self) -> str:
        """The interpreter."""
        return self.software.python

    @property
    def container(self) -> Container | None:
        """The container in which everything with `python` runs."""
        return self.software.container

    @property
    def n_workers(self) -> int:
        """Number of workers of all jobs."""
        return self.shape.jobs * self.shape.workers

    @property
    def gpus(self) -> int:
        """Number of GPUs of all jobs."""
        return self.shape.jobs * self.shape.gpus

    @property
    def queued(self) -> QueuedJobs:
        """The jobs, as they count towards limits."""
        return QueuedJobs(self.queue_key, self.shape.jobs, self.shape.gpus)


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
