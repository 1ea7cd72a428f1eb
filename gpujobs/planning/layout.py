"""The contract of a layout: how workers are divided into jobs, named and started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ..config.profile import Profile
from ..config.queue import Queue
from ..config.site import Site
from ..schedulers import Scheduler
from .diagnostics import Diagnostics
from .shape import JobGroup, JobShape, QueueMismatch
from .transport import Transport


@dataclass(frozen=True)
class Layout(ABC):
    """How the workers of a cluster are divided into jobs, named and started."""

    profile: Profile
    site: Site
    scheduler: Scheduler

    name: ClassVar[str]
    elastic: ClassVar[bool]
    """Whether jobs may come and go while the cluster runs."""

    @property
    def setup(self) -> str:
        """Bash text that runs before the workers start."""
        return ""

    @abstractmethod
    def check(self, diagnostics: Diagnostics) -> None:
        """Report keys of the profile that contradict the layout."""

    @abstractmethod
    def divide(self, gpus: int, queue: Queue, most: int | None) -> tuple[int, int]:
        """Return GPUs and nodes of one job, for ``gpus`` GPUs in all.

        ``most`` limits the GPUs of a job if the profile does not state them. Raises QueueMismatch.
        """

    @abstractmethod
    def default_start_workers(self, n_workers: int) -> int:
        """Return `start_workers` of a profile that does not set it, for ``n_workers`` in all."""

    @abstractmethod
    def supervisor_options(self, shape: JobShape) -> list[str]:
        """Return the options of a job's supervisor for workers of this layout."""

    @abstractmethod
    def worker_words(self, jobs: JobGroup, transport: Transport, workdir: str) -> list[str]:
        """Return the words of the command that starts a job's workers, as bash."""

    @abstractmethod
    def head_text(self, shape: JobShape, own_head: bool) -> str:
        """Return where the dask scheduler runs, for people."""

    def hint(self, limit: str, queue: Queue) -> str:
        """Return the cure for jobs that break ``limit`` of the queue: max_gpus or min_nodes."""
        return ""

    def working_ranks(self, shape: JobShape) -> int:
        """Return the number of MPI ranks that own GPUs; 0 without MPI."""
        return 0


def report_run_on(diagnostics: Diagnostics) -> None:
    """Report `run_on: ranks` without MPI or without a script."""
    message = "`run_on: ranks` needs `layout: mpi` and a script in `run`"
    diagnostics.profile_error(message, "run_on")


def check_whole_nodes(gpus: int, queue: Queue, reason: str) -> None:
    """Raise QueueMismatch unless ``gpus`` GPUs are whole nodes; ``reason``: why they must be."""
    per_node = queue.gpus_per_node or 1
    if gpus % per_node == 0:
        return
    fewer = max(1, gpus // per_node) * per_node
    more = (gpus // per_node + 1) * per_node
    choices = " or ".join(str(number) for number in sorted({fewer, more}))
    message = f"{reason} of {per_node} GPUs"
    raise QueueMismatch("gpus", message, limit="gpus_per_node", hint=f"gpus: {choices}")
