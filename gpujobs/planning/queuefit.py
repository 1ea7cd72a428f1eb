"""The shape of jobs in one queue of the site, and the checks of the queue's limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import placeholders
from ..config.profile import Profile
from ..config.sitequeue import ANY_TYPE, Queue
from ..text import plural, size_text, walltime_text
from . import shape
from .hostmemory import MemoryRequest, cpu_share, requested_memory, worker_share
from .layouts import Layout
from .limits import Job, broken_limit
from .shape import JobShape, QueueMismatch

ONLY_NVIDIA = "GPU workers need NVIDIA GPUs; CPU workers need none"
"""As docs/limits.md says."""


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
        fit = replace(self, request=self.multi_node_request) if nodes > 1 else self
        on_node = per_job // nodes
        of_gpus = self.queue.gpus_per_node or 1
        if self.layout.scheduler.on_this_machine:  # other GPUs have no workers that need CPUs
            of_gpus = min(of_gpus, gpus)
        workers, cpus = fit._workers_on(on_node), fit._cpus(on_node, nodes, of_gpus)
        return fit._shape(gpus // per_job, nodes=nodes, gpus=per_job, workers=workers, cpus=cpus)

    def cpu_shape(self, count: int) -> JobShape:
        """Return the shape of ``count`` jobs, each with one CPU worker."""
        profile = self.profile
        cpus = shape.cpus_per_node(profile, self.queue, 1) or profile.workers.threads
        self._check_cpu_node(cpus)
        return self._shape(count, nodes=1, gpus=0, workers=1, cpus=cpus)

    def _shape(
        self, jobs: int, *, nodes: int, gpus: int, workers: int, cpus: int | None
    ) -> JobShape:
        """Return the shape of jobs of ``gpus`` GPUs, with ``workers`` and ``cpus`` on each node."""
        request = MemoryRequest(self.request, nodes, cpus and cpus * nodes, gpus)
        memory = self._memory(request)
        self._check_job(nodes=nodes, gpus=gpus)
        self._check_workers(workers, cpus=cpus, memory=memory and memory // nodes)
        return JobShape(
            jobs=jobs,
            nodes=nodes,
            gpus=gpus,
            cpus=request.cpus,
            memory=memory,
            workers=workers * nodes,
            worker_threads=shape.worker_threads(self.profile, cpus, workers),
            worker_memory=self._worker_memory(memory, workers * nodes),
        )

    def _workers_on(self, gpus: int) -> int:
        """Return the number of workers on the ``gpus`` GPUs of a job on one node."""
        size = self.profile.workers.size
        if gpus % size.gpus:
            message = f"{plural(gpus, 'GPU')} of a job on a node; a worker has {size.gpus}"
            raise QueueMismatch("workers.gpus_per_worker", message, limit="gpus_per_node")
        return size.workers(gpus)

    def _check_gpu_type(self) -> None:
        queue, wanted = self.queue, self.profile.gpu_type
        if not queue.gpus_per_node:
            raise QueueMismatch("gpus", "it has no GPUs", limit="gpus_per_node")
        if not queue.worker_gpus:
            message = f"its GPUs are of {queue.gpu_vendor.upper()}: {ONLY_NVIDIA}"
            raise QueueMismatch("gpus", message, limit="gpu_vendor", hint="gpus: 0")
        if wanted and wanted not in (ANY_TYPE, *queue.named_types):
            message = f"its GPUs are {', '.join(queue.named_types) or 'of no named type'}"
            limit = "gpu_types" if queue.gpu_types else "gpu_type"
            raise QueueMismatch("gpu_type", message, limit=limit)

    def _cpus(self, gpus: int, nodes: int, of_gpus: int) -> int | None:
        """Return the CPUs on a node for ``gpus`` of its ``of_gpus`` GPUs; None: not known."""
        own = shape.cpus_per_node(self.profile, self.queue, nodes)
        share = self._cpu_share(gpus, of_gpus)
        cpus = own or share
        asks_per_cpu = "gpus_per_cpu" in placeholders.names(" ".join(self.request))
        if not cpus or not asks_per_cpu or self.queue.gpu_fractions:
            return cpus
        whole = _most_cpus(gpus, cpus)
        if own and whole != own:
            request = f"{plural(gpus, 'GPU')} on {plural(whole, 'CPU')}"
            message = f"the site requests GPUs per CPU: {request}, not {own}"
            raise QueueMismatch("cpus_per_job", message, hint=f"cpus_per_job: {whole * nodes}")
        return whole

    def _cpu_share(self, gpus: int, of_gpus: int) -> int | None:
        """Return the CPUs of a node that belong to ``gpus`` of its ``of_gpus``; None: not known."""
        queue = self.queue
        if queue.cpus_per_node:
            return max(1, queue.cpus_per_node * gpus // of_gpus)
        return queue.cpus_per_gpu and queue.cpus_per_gpu * gpus

    def _memory(self, request: MemoryRequest) -> int | None:
        """Return the memory of a job: the part of its GPUs, or of its CPUs without GPUs."""
        queue, profile = self.queue, self.profile
        key, wanted = "memory_per_job", profile.memory_per_job
        if request.gpus:
            on_node = request.gpus // request.nodes
            share = queue.memory_per_node and (
                queue.memory_per_node * on_node // (queue.gpus_per_node or 1) * request.nodes
            )
        else:
            share = cpu_share(queue, request.cpus or 1)
            if not wanted:
                key, wanted = "workers.memory", profile.workers.memory
        return requested_memory(queue, request, key, wanted, share)

    def _worker_memory(self, memory: int | None, workers: int) -> int | None:
        """Return the memory of each of the ``workers`` workers of a job."""
        if wanted := self.profile.workers.memory:
            return worker_share(wanted, 1)
        return memory and worker_share(memory, workers)

    def _check_cpu_node(self, cpus: int) -> None:
        queue = self.queue
        if queue.exclusive and queue.worker_gpus:
            message = "its whole nodes have GPUs, which CPU workers would not use"
            raise QueueMismatch("gpus", message, limit="exclusive")
        if queue.cpus_per_node and cpus > queue.cpus_per_node:
            message = f"its nodes have {plural(queue.cpus_per_node, 'CPU')}"
            raise QueueMismatch("workers.threads", message, limit="cpus_per_node")

    def _check_job(self, *, nodes: int, gpus: int) -> None:
        queue, job = self.queue, Job(nodes, gpus, self.profile.walltime)
        limit = broken_limit(queue, job)
        of_nodes = limit is None or limit.number in ("nodes", "node_hours")
        if of_nodes and nodes > 1 and not self.layout.scheduler.spans_nodes(self.request):
            message = f"jobs of {nodes} nodes; its `request` is for one node"
            hint = self.layout.scheduler.spans_nodes_hint
            raise QueueMismatch("gpus", message, limit="request", hint=hint)
        if limit is None:
            return
        hint, longest = self.layout.hint(limit.key, queue), queue.longest_walltime(nodes)
        if limit.key == "max_node_hours" and longest:
            hint = f"walltime: {walltime_text(longest)}"
        message = limit.message(queue, job)
        raise QueueMismatch(limit.profile_key, message, limit=limit.key, hint=hint)

    def _check_workers(self, number: int, *, cpus: int | None, memory: int | None) -> None:
        """Check ``number`` workers of a node against the CPUs and the memory of the job there."""
        workers = self.profile.workers
        limited = "threads" in workers.given and not self.layout.scheduler.on_this_machine
        if limited and cpus and workers.threads * number > cpus:
            message = (
                f"{plural(number, 'worker')} of {plural(workers.threads, 'thread')}; "
                f"the job has {plural(cpus, 'CPU')} on a node"
            )
            hint = f"workers.threads: {cpus // number}"
            if cpus < number:
                hint = f"cpus_per_job: {workers.threads * number}"
            raise QueueMismatch("workers.threads", message, hint=hint)
        share = worker_share(workers.memory or 0, 1)
        if memory and workers.memory and share * number > memory:
            message = (
                f"{plural(number, 'worker')} of {size_text(workers.memory)}; "
                f"the job has {size_text(memory)} on a node"
            )
            hint = f"at most {size_text(memory // number)}"
            raise QueueMismatch("workers.memory", message, limit="memory_per_node", hint=hint)


def _most_cpus(gpus: int, cpus: int) -> int:
    """Return the most of ``cpus`` CPUs of which each has a whole number of the ``gpus`` GPUs."""
    return max(number for number in range(1, cpus + 1) if gpus % number == 0)
