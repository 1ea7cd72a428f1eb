"""How many jobs, of what shape: pure arithmetic on one queue of a site and one profile."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import placeholders
from ..config.profile import Profile
from ..config.site import Queue
from ..errors import Position, Problem
from ..text import size_text, walltime_text


@dataclass(frozen=True)
class JobShape:
    """``jobs`` equal jobs. Numbers are of one job; memory is in bytes; None where the site does not say."""

    jobs: int
    nodes: int
    gpus: int
    cpus: int | None
    memory: int | None
    workers: int
    worker_memory: int | None

    @property
    def gpus_per_node(self) -> int:
        """GPUs of the job on each of its nodes."""
        return self.gpus // self.nodes

    def values(self) -> dict[str, int | float | None]:
        """Return the numbers of the placeholders, memory in bytes."""
        gpus, cpus, memory = self.gpus, self.cpus, self.memory
        per_cpu = None if not cpus else gpus // cpus if gpus % cpus == 0 else round(gpus / cpus, 4)
        return {
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "gpus_per_job": gpus,
            "gpus_per_cpu": per_cpu,
            "cpus_per_node": cpus and cpus // self.nodes,
            "cpus_per_job": cpus,
            "cpus_per_gpu": cpus // gpus if cpus and gpus else None,
            "memory_per_node": memory and memory // self.nodes,
            "memory_per_job": memory,
            "memory_per_cpu": memory // cpus if memory and cpus else None,
            "memory_per_gpu": memory // gpus if memory and gpus else None,
        }


class QueueMismatch(Exception):
    """The profile does not fit the queue. ``key`` is the profile's key, ``limit`` the queue's."""

    def __init__(self, key: str, message: str, *, limit: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.key, self.limit, self.hint = key, limit, hint

    def problem(self, position: Position, related: Position | None) -> Problem:
        """Return the problem, at the profile's key and the site's limit."""
        return Problem(str(self), position, hint=self.hint, related=related)


def gpu_shape(profile: Profile, gpus: int, queue: Queue, request: tuple[str, ...]) -> JobShape:
    """Return the shape of the jobs that together have ``gpus`` GPUs, or raise Misfit."""
    per_node = queue.gpus_per_node
    if not per_node:
        raise QueueMismatch("gpus", "it has no GPUs", limit="gpus_per_node")
    if profile.gpu_type and profile.gpu_type != queue.gpu_type:
        raise QueueMismatch(
            "gpu_type", f"its GPUs are {queue.gpu_type or 'of no named type'}", limit="gpu_type"
        )
    per_job = (
        gpus
        if profile.layout == "mpi"
        else profile.gpus_per_job or _default_gpus_per_job(gpus, queue)
    )
    nodes = _nodes(profile, gpus, per_job, queue)
    on_node = per_job // nodes
    memory = queue.memory_per_node and queue.memory_per_node * on_node // per_node
    cpus = queue.cpus_per_gpu and queue.cpus_per_gpu * on_node
    if queue.cpus_per_node:
        cpus = max(1, queue.cpus_per_node * on_node // per_node)
    if cpus and "gpus_per_cpu" in placeholders.names(" ".join(request)) and not queue.gpu_fractions:
        cpus = max(n for n in range(1, cpus + 1) if on_node % n == 0)
    _check_limits(profile, queue, jobs=gpus // per_job, nodes=nodes, gpus=per_job)
    _check_workers(profile, workers=on_node, cpus=cpus, memory=memory)
    share = memory // on_node if memory else None
    return JobShape(
        jobs=gpus // per_job,
        nodes=nodes,
        gpus=per_job,
        cpus=cpus and cpus * nodes,
        memory=memory and memory * nodes,
        workers=per_job,
        worker_memory=profile.workers.memory or share,
    )


def cpu_shape(profile: Profile, count: int, queue: Queue) -> JobShape:
    """Return the shape of ``count`` jobs of one CPU worker each, or raise Misfit."""
    if queue.exclusive and queue.gpus_per_node:
        raise QueueMismatch(
            "gpus",
            "its whole nodes have GPUs, which would idle under CPU workers",
            limit="exclusive",
        )
    cpus, memory = profile.workers.threads, profile.workers.memory
    if queue.cpus_per_node and cpus > queue.cpus_per_node:
        raise QueueMismatch(
            "workers.threads", f"its nodes have {queue.cpus_per_node} CPUs", limit="cpus_per_node"
        )
    if queue.memory_per_node and memory and memory > queue.memory_per_node:
        most = size_text(queue.memory_per_node)
        raise QueueMismatch(
            "workers.memory", f"its nodes have {most} for jobs", limit="memory_per_node"
        )
    if not memory and queue.memory_per_node and queue.cpus_per_node:
        memory = queue.memory_per_node * cpus // queue.cpus_per_node
    _check_limits(profile, queue, jobs=count, nodes=1, gpus=0)
    return JobShape(
        jobs=count, nodes=1, gpus=0, cpus=cpus, memory=memory, workers=1, worker_memory=memory
    )


def _default_gpus_per_job(gpus: int, queue: Queue) -> int:
    per_node = queue.gpus_per_node or 1
    if queue.exclusive:
        return per_node
    return max(n for n in range(1, min(gpus, per_node) + 1) if gpus % n == 0)


def _nodes(profile: Profile, gpus: int, per_job: int, queue: Queue) -> int:
    per_node = queue.gpus_per_node or 1
    whole = queue.exclusive or (profile.layout == "mpi" and gpus > per_node)
    if whole and gpus % per_node:
        near = sorted({max(1, gpus // per_node) * per_node, -(-gpus // per_node) * per_node})
        choices = " or ".join(str(n) for n in near)
        why = (
            "it gives whole nodes"
            if queue.exclusive
            else "an MPI job of several nodes has whole nodes"
        )
        raise QueueMismatch(
            "gpus", f"{why} of {per_node} GPUs", limit="gpus_per_node", hint=f"gpus: {choices}"
        )
    if profile.layout == "mpi":
        return -(-per_job // per_node)
    if per_job > per_node:
        hint = f"gpus_per_job: {per_node}, or layout: mpi for one job of several nodes"
        raise QueueMismatch(
            "gpus_per_job", f"its nodes have {per_node} GPUs", limit="gpus_per_node", hint=hint
        )
    if queue.exclusive and per_job != per_node:
        raise QueueMismatch(
            "gpus_per_job", f"it gives whole nodes of {per_node} GPUs", limit="exclusive"
        )
    if gpus % per_job:
        hint = f"gpus: {gpus // per_job * per_job or per_job} or {-(-gpus // per_job) * per_job}"
        raise QueueMismatch(
            "gpus_per_job", f"{gpus} GPUs are not whole jobs of {per_job}", hint=hint
        )
    return 1


def _check_limits(profile: Profile, queue: Queue, *, jobs: int, nodes: int, gpus: int) -> None:
    walltime = profile.walltime
    if walltime and queue.max_walltime and walltime > queue.max_walltime:
        message = f"walltime {walltime_text(walltime)} is more than its {walltime_text(queue.max_walltime)}"
        raise QueueMismatch("walltime", message, limit="max_walltime")
    if queue.max_gpus and gpus > queue.max_gpus:
        hint = f"gpus_per_job: {queue.max_gpus}" if profile.layout == "workers" else ""
        raise QueueMismatch(
            "gpus",
            f"jobs of {gpus} GPUs; it allows {queue.max_gpus} a job",
            limit="max_gpus",
            hint=hint,
        )
    if queue.max_nodes and nodes > queue.max_nodes:
        raise QueueMismatch(
            "gpus", f"jobs of {nodes} nodes; it allows {queue.max_nodes}", limit="max_nodes"
        )
    if queue.min_nodes and nodes < queue.min_nodes:
        hint = "layout: mpi asks for all nodes in one job" if profile.layout == "workers" else ""
        raise QueueMismatch(
            "gpus",
            f"jobs of {nodes} nodes; it wants {queue.min_nodes}",
            limit="min_nodes",
            hint=hint,
        )
    if queue.max_jobs and jobs > queue.max_jobs:
        raise QueueMismatch(
            "gpus", f"{jobs} jobs; it allows {queue.max_jobs} at once", limit="max_jobs"
        )


def _check_workers(profile: Profile, *, workers: int, cpus: int | None, memory: int | None) -> None:
    """``workers``, ``cpus`` and ``memory`` are those of one node."""
    threads, wanted = profile.workers.threads, profile.workers.memory
    if cpus and threads * workers > cpus and "threads" in profile.workers.given:
        message = f"{workers} workers of {threads} threads; the job has {cpus} CPUs on a node"
        raise QueueMismatch(
            "workers.threads", message, hint=f"workers.threads: {max(1, cpus // workers)}"
        )
    if memory and wanted and wanted * workers > memory:
        message = f"{workers} workers of {size_text(wanted)}; their GPUs' share of a node is {size_text(memory)}"
        raise QueueMismatch(
            "workers.memory",
            message,
            limit="memory_per_node",
            hint=f"at most {size_text(memory // workers)}",
        )
