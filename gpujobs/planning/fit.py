"""The shape of jobs in one queue of the site, and the checks of the queue's limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import placeholders
from ..config.profile import Profile
from ..config.queue import Queue
from ..text import number_text, plural, size_text, walltime_text
from . import perjob
from .layout import Layout
from .memory import MemoryRequest, cpu_share, requested_memory, worker_share
from .shape import JobShape, QueueMismatch


@dataclass(frozen=True)
class QueueFit:
    """Fits the jobs of a profile into one queue; methods raise QueueMismatch if they do not fit."""

    layout: Layout
    queue: Queue
    request: tuple[str, ...]
    """The directives of jobs of one node, with their placeholders."""
    multi_node_request: tuple[str, ...]
    """Those of jobs of several nodes."""
    within_max_gpus: bool = False
    """Jobs are so small that the queue's `max_gpus` allows them, if the profile permits that."""

    @property
    def profile(self) -> Profile:
        """The profile."""
        return self.layout.profile

    def gpu_shape(self, gpus: int) -> JobShape:
        """Return the shape of jobs with ``gpus`` GPUs in all, and workers on each."""
        self._check_gpu_type()
        most = self.queue.max_gpus if self.within_max_gpus else None
        per_job, nodes = self.layout.divide(gpus, self.queue, most)
        if nodes > 1:
            fit = replace(self, request=self.multi_node_request)
            return fit.shape_of(gpus, per_job, nodes)
        return self.shape_of(gpus, per_job, nodes)

    def shape_of(self, gpus: int, per_job: int, nodes: int) -> JobShape:
        """Return the shape of jobs with ``per_job`` of all ``gpus`` GPUs on ``nodes`` nodes."""
        on_node = per_job // nodes
        workers = self._workers_on(on_node)
        cpus = self._cpus(on_node, nodes)
        request = MemoryRequest(self.request, nodes, cpus and cpus * nodes, per_job)
        memory = self._gpu_memory(request, on_node)
        self._check_walltime()
        self._check_job_size(nodes=nodes, gpus=per_job)
        self._check_workers(workers, cpus=cpus, memory=memory and memory // nodes)
        return JobShape(
            jobs=gpus // per_job,
            nodes=nodes,
            gpus=per_job,
            cpus=cpus and cpus * nodes,
            memory=memory,
            workers=workers * nodes,
            worker_threads=perjob.worker_threads(self.profile, cpus, workers),
            worker_memory=self._worker_memory(memory, workers * nodes),
        )

    def cpu_shape(self, count: int) -> JobShape:
        """Return the shape of ``count`` jobs, each with one CPU worker."""
        profile, queue = self.profile, self.queue
        cpus = perjob.cpus_per_node(profile, queue, 1) or profile.workers.threads
        self._check_cpu_node(cpus)
        self._check_walltime()
        self._check_job_size(nodes=1, gpus=0)
        memory = self._cpu_memory(MemoryRequest(self.request, 1, cpus, gpus=0))
        self._check_workers(1, cpus=cpus, memory=memory)
        return JobShape(
            jobs=count,
            nodes=1,
            gpus=0,
            cpus=cpus,
            memory=memory,
            workers=1,
            worker_threads=perjob.worker_threads(profile, cpus, 1),
            worker_memory=self._worker_memory(memory, 1),
        )

    def _workers_on(self, gpus: int) -> int:
        """Return the number of workers on the ``gpus`` GPUs of a job on one node."""
        size = self.profile.workers.size
        if gpus % size.gpus:
            message = f"{gpus} GPUs of a job on a node; a worker has {size.gpus}"
            raise QueueMismatch("workers.gpus_per_worker", message, limit="gpus_per_node")
        return size.workers(gpus)

    def _check_gpu_type(self) -> None:
        queue, wanted = self.queue, self.profile.gpu_type
        if not queue.gpus_per_node:
            raise QueueMismatch("gpus", "it has no GPUs", limit="gpus_per_node")
        if wanted and wanted not in queue.named_types:
            message = f"its GPUs are {', '.join(queue.named_types) or 'of no named type'}"
            limit = "gpu_types" if queue.gpu_types else "gpu_type"
            raise QueueMismatch("gpu_type", message, limit=limit)

    def _cpus(self, gpus: int, nodes: int) -> int | None:
        """Return the CPUs on a node for ``gpus`` of its GPUs; None if they are not known."""
        own, share = perjob.cpus_per_node(self.profile, self.queue, nodes), self._cpu_share(gpus)
        cpus = own or share
        asks_per_cpu = "gpus_per_cpu" in placeholders.names(" ".join(self.request))
        if not cpus or not asks_per_cpu or self.queue.gpu_fractions:
            return cpus
        # The GPUs of each CPU must be a whole number.
        whole = max(n for n in range(1, cpus + 1) if gpus % n == 0)
        if own and whole != own:
            request = f"{plural(gpus, 'GPU')} on {plural(whole, 'CPU')}"
            message = f"the site requests GPUs per CPU: {request}, not {own}"
            raise QueueMismatch("cpus_per_job", message, hint=f"cpus_per_job: {whole * nodes}")
        return whole

    def _cpu_share(self, gpus: int) -> int | None:
        """Return the CPUs of a node that belong to ``gpus`` of its GPUs; None: not known."""
        queue = self.queue
        if queue.cpus_per_node:
            return max(1, queue.cpus_per_node * gpus // (queue.gpus_per_node or 1))
        return queue.cpus_per_gpu and queue.cpus_per_gpu * gpus

    def _gpu_memory(self, request: MemoryRequest, gpus: int) -> int | None:
        """Return the memory of a job with ``gpus`` GPUs on each node."""
        queue, share = self.queue, None
        if queue.memory_per_node:
            share = queue.memory_per_node * gpus // (queue.gpus_per_node or 1) * request.nodes
        own = perjob.memory_per_node(self.profile, queue, request.nodes)
        return requested_memory(
            queue, request, "memory_per_job", own and own * request.nodes, share
        )

    def _cpu_memory(self, request: MemoryRequest) -> int | None:
        """Return the memory of a job with one CPU worker."""
        profile, share = self.profile, cpu_share(self.queue, request.cpus or 1)
        if own := perjob.memory_per_node(profile, self.queue, 1):
            return requested_memory(self.queue, request, "memory_per_job", own, share)
        wanted = profile.workers.memory
        return requested_memory(self.queue, request, "workers.memory", wanted, share)

    def _worker_memory(self, memory: int | None, workers: int) -> int | None:
        """Return the memory of each of the ``workers`` workers of a job."""
        if wanted := self.profile.workers.memory:
            return worker_share(wanted, 1)
        return memory and worker_share(memory, workers)

    def _check_cpu_node(self, cpus: int) -> None:
        queue = self.queue
        if queue.exclusive and queue.gpus_per_node:
            message = "its whole nodes have GPUs, which CPU workers would not use"
            raise QueueMismatch("gpus", message, limit="exclusive")
        if queue.cpus_per_node and cpus > queue.cpus_per_node:
            message = f"its nodes have {plural(queue.cpus_per_node, 'CPU')}"
            raise QueueMismatch("workers.threads", message, limit="cpus_per_node")

    def _check_walltime(self) -> None:
        walltime, limit = self.profile.walltime, self.queue.max_walltime
        if walltime and limit and walltime > limit:
            message = f"walltime {walltime_text(walltime)} is more than its {walltime_text(limit)}"
            raise QueueMismatch("walltime", message, limit="max_walltime")
        least = self.queue.min_walltime
        if walltime and least and walltime < least:
            message = f"walltime {walltime_text(walltime)} is less than its {walltime_text(least)}"
            raise QueueMismatch("walltime", message, limit="min_walltime")

    def _check_job_size(self, *, nodes: int, gpus: int) -> None:
        queue = self.queue
        if queue.max_gpus and gpus > queue.max_gpus:
            message = f"jobs of {gpus} GPUs; it allows {queue.max_gpus} a job"
            hint = self.layout.hint("max_gpus", queue)
            raise QueueMismatch("gpus", message, limit="max_gpus", hint=hint)
        self._check_least_gpus(gpus)
        if nodes > 1 and not self.layout.scheduler.spans_nodes(self.request):
            message = f"jobs of {nodes} nodes; its `request` is for one node"
            hint = self.layout.scheduler.spans_nodes_hint
            raise QueueMismatch("gpus", message, limit="request", hint=hint)
        if queue.max_nodes and nodes > queue.max_nodes:
            message = f"jobs of {nodes} nodes; it allows {queue.max_nodes}"
            raise QueueMismatch("gpus", message, limit="max_nodes")
        if queue.min_nodes and nodes < queue.min_nodes:
            message = f"jobs of {nodes} nodes; it requires {queue.min_nodes}"
            hint = self.layout.hint("min_nodes", queue)
            raise QueueMismatch("gpus", message, limit="min_nodes", hint=hint)
        self._check_node_hours(nodes)

    def _check_node_hours(self, nodes: int) -> None:
        walltime, limit = self.profile.walltime, self.queue.max_node_hours
        if walltime and limit and not self.queue.allows_node_hours(nodes, walltime):
            wanted = f"{plural(nodes, 'node')} for {walltime_text(walltime)}"
            message = f"jobs of {wanted}; it allows {number_text(limit)} node-hours"
            longest = self.queue.longest_walltime(nodes)
            hint = f"walltime: {walltime_text(longest)}" if longest else ""
            raise QueueMismatch("walltime", message, limit="max_node_hours", hint=hint)

    def _check_least_gpus(self, gpus: int) -> None:
        queue, allowed = self.queue, self.queue.gpus_per_job
        if queue.min_gpus and 0 < gpus < queue.min_gpus:
            message = f"jobs of {plural(gpus, 'GPU')}; it requires {queue.min_gpus} a job"
            raise QueueMismatch("gpus", message, limit="min_gpus")
        if gpus and allowed and gpus not in allowed:
            listed = ", ".join(map(str, allowed))
            message = f"jobs of {plural(gpus, 'GPU')}; it allows jobs of {listed}"
            raise QueueMismatch("gpus", message, limit="gpus_per_job")

    def _check_workers(self, number: int, *, cpus: int | None, memory: int | None) -> None:
        """Check ``number`` workers of a node against the CPUs and the memory of the job there."""
        workers = self.profile.workers
        if cpus and workers.threads * number > cpus and "threads" in workers.given:
            message = (
                f"{plural(number, 'worker')} of {plural(workers.threads, 'thread')}; "
                f"the job has {plural(cpus, 'CPU')} on a node"
            )
            hint = f"workers.threads: {max(1, cpus // number)}"
            raise QueueMismatch("workers.threads", message, hint=hint)
        if memory and workers.memory and workers.memory * number > memory:
            message = (
                f"{number} workers of {size_text(workers.memory)}; "
                f"the job has {size_text(memory)} on a node"
            )
            hint = f"at most {size_text(memory // number)}"
            raise QueueMismatch("workers.memory", message, limit="memory_per_node", hint=hint)
