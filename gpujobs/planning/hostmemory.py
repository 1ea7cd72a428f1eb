"""The host memory of a job, as its directives request it, and of its workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import placeholders
from ..config.sitequeue import Queue
from ..text import plural, size_text
from .shape import QueueMismatch

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
