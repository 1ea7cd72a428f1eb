"""This machine, which the `local` site runs jobs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config.queue import Queue


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
