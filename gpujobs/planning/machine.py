"""This machine, which the `local` site runs jobs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config.site import Queue


@dataclass(frozen=True)
class Machine:
    """The resources of this machine; memory is in bytes."""

    gpus: tuple[str, ...]
    """Free GPUs, by index or UUID."""
    cpus: int
    memory: int
    busy: Mapping[str, str]
    """GPUs that are in use, and their processes."""

    def complete(self, queue: Queue) -> Queue:
        """Return ``queue`` with the numbers of this machine if the site file does not state them.

        It never has more GPUs per node than are free.
        """
        gpus = len(self.gpus)
        if queue.gpus_per_node is not None:
            gpus = min(gpus, queue.gpus_per_node)
        return replace(
            queue,
            gpus_per_node=gpus,
            cpus_per_node=queue.cpus_per_node or self.cpus,
            memory_per_node=queue.memory_per_node or self.memory,
        )
