"""How many GPUs, or how many CPU workers, a profile asks for, on this machine or on others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config.profile import Profile
from ..config.sitequeue import Queue
from ..errors import InputError
from ..text import plural
from .bash import Diagnostics

MOST_AUTO_CPU_WORKERS = 4
"""CPU workers for `gpus: auto` on a machine without free GPUs."""


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
    planned: int = 0
    """GPUs of other jobs of the cluster."""
    nodes: int = 1
    """Number of machines like this one."""
    places: tuple[str, ...] = ()
    """MACHINE:GPU of a job on `machines` of the site; empty: its GPUs are of this machine."""

    def unused_nvlink(self, gpus: int, protocol: str) -> str:
        """Return what ``gpus`` workers do not use over dask's ``protocol``, and the cure; or ""."""
        linked = min(gpus, self.nvlink)
        if linked < 2 or protocol == "ucxx":
            return ""
        return (
            f"NVLink between {linked} GPUs is left unused: dask uses {protocol}; "
            "`protocol: ucxx` uses it, not encrypted"
        )

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
            gpu_memory=queue.gpu_memory or self.gpu_memory,
        )


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
        raise InputError(diagnostics.problems)
    free = len(machine.gpus)
    if free:
        return _whole_workers(diagnostics, free), 0
    _check_size_of_cpu_workers(diagnostics)
    reason = "all GPUs are in use" if machine.busy else "no NVIDIA GPU on this machine"
    diagnostics.note(f"gpus: auto: {reason}, so CPU workers")
    return 0, workers.count or _most_cpu_workers(profile, machine)


def _most_cpu_workers(profile: Profile, machine: Machine) -> int:
    cpus = profile.cpus_per_job or profile.workers.threads
    return max(1, min(MOST_AUTO_CPU_WORKERS, machine.cpus // cpus))


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
