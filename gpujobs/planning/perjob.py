"""CPUs and memory of one job, if the profile itself states them."""

from __future__ import annotations

from ..config.profile import Profile
from ..config.queue import Queue
from ..text import plural, size_text
from .shape import QueueMismatch


def cpus_per_node(profile: Profile, queue: Queue, nodes: int) -> int | None:
    """Return the job's CPUs on each of its ``nodes``; None if the profile has no `cpus_per_job`.

    Raises QueueMismatch if a node of the queue has fewer.
    """
    wanted, limit = profile.cpus_per_job, queue.cpus_per_node
    if wanted is None:
        return None
    if wanted % nodes:
        message = f"{plural(wanted, 'CPU')} cannot be divided equally among {nodes} nodes"
        raise QueueMismatch("cpus_per_job", message)
    if limit and wanted > limit * nodes:
        message = (
            f"jobs of {plural(wanted, 'CPU')} on {plural(nodes, 'node')}; its nodes have {limit}"
        )
        raise QueueMismatch("cpus_per_job", message, limit="cpus_per_node")
    return wanted // nodes


def memory_per_node(profile: Profile, queue: Queue, nodes: int) -> int | None:
    """Return the job's bytes on each of its ``nodes``; None without `memory_per_job`.

    Raises QueueMismatch if a node of the queue has less.
    """
    wanted, limit = profile.memory_per_job, queue.memory_per_node
    if wanted is None:
        return None
    if limit and wanted > limit * nodes:
        size = f"{size_text(wanted)} on {plural(nodes, 'node')}"
        message = f"jobs of {size}; its nodes have {size_text(limit)} for jobs"
        raise QueueMismatch("memory_per_job", message, limit="memory_per_node")
    return wanted // nodes


def worker_threads(profile: Profile, cpus: int | None, workers: int) -> int:
    """Return the threads of each of the ``workers`` of a node with ``cpus`` CPUs of the job.

    Raises QueueMismatch if `cpus_per_job` has not one CPU for each.
    """
    if profile.cpus_per_job is None or not cpus or "threads" in profile.workers.given:
        return profile.workers.threads
    if cpus < workers:
        message = f"{plural(cpus, 'CPU')} on a node are too few for its {workers} workers"
        raise QueueMismatch("cpus_per_job", message)
    return cpus // workers
