"""The choice of a queue: the first one whose limits allow the jobs of the profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import placeholders
from ..config.profile import Profile
from ..config.site import Queue
from ..config.spec import ClusterSpec
from ..errors import InputError, Position, Problem
from ..schedulers import Scheduler
from ..text import plural, size_text, walltime_text
from . import shape
from .bash import Diagnostics
from .directives import DirectiveWriter, request_texts
from .layouts import Layout
from .limits import Job, QueuedJobs, broken_limit, exceeded, job_limits
from .shape import (
    JobShape,
    Machine,
    MemoryRequest,
    Place,
    QueueMismatch,
    cpu_share,
    requested_memory,
    worker_share,
)


# -- the shape of jobs in one queue of the site, and the checks of the queue's limits --------------
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
        if wanted and wanted not in queue.named_types:
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
        # The GPUs of each CPU must be a whole number.
        whole = max(n for n in range(1, cpus + 1) if gpus % n == 0)
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
        if queue.exclusive and queue.gpus_per_node:
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


# -- jobs on different GPUs that the batch scheduler cannot tell apart -----------------------------
HINT = "in the site file, name the type in `request`, as {gpu_type}"


@dataclass(frozen=True)
class QueuedShape:
    """Jobs of ``shape`` in a queue, on GPUs of one type, or of any."""

    queue_key: str
    gpu_type: str | None
    shape: JobShape

    def __str__(self) -> str:
        shown = f"GPUs of type {self.gpu_type}"
        if not self.gpu_type:
            shown = f"nodes of {self.shape.gpus_per_node} GPUs"
        return f"{shown} (queue {self.queue_key})"

    def directives(
        self, spec: ClusterSpec, scheduler: Scheduler, walltime: int | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the directives and the arguments of these jobs.

        A reservation is left out: some batch schedulers name it in place of the queue.
        """
        profile = replace(spec.profile, gpu_type=self.gpu_type, reservation=None)
        diagnostics = Diagnostics(replace(spec, profile=profile).in_queue(self.queue_key))
        writer = DirectiveWriter(diagnostics, scheduler, self.shape, walltime)
        return writer.unchecked_lines(), writer.submit_arguments()


def same_requests(
    spec: ClusterSpec, scheduler: Scheduler, key: str, shape: JobShape, walltime: int | None
) -> list[QueuedShape]:
    """Return the jobs on other GPUs whose directives are those of jobs of ``shape`` in a queue.

    ``spec`` is the specification of the cluster, not that of jobs in one queue.
    """
    if scheduler.on_this_machine or not shape.gpus:
        return []
    jobs = QueuedShape(key, spec.profile.gpu_type, shape)
    queues = spec.site.site.queues
    others = [*_on_other_types(jobs, queues), *_on_other_nodes(jobs, queues)]
    own = others and jobs.directives(spec, scheduler, walltime)
    return [other for other in others if other.directives(spec, scheduler, walltime) == own]


def _on_other_types(jobs: QueuedShape, queues: Mapping[str, Queue]) -> Iterator[QueuedShape]:
    own = queues[jobs.queue_key].type_name(jobs.gpu_type)
    for key, queue in queues.items():
        for name, other in queue.named_types.items():
            if own not in (None, other):  # several names of one type do not differ
                yield QueuedShape(key, name, jobs.shape)


def _on_other_nodes(jobs: QueuedShape, queues: Mapping[str, Queue]) -> Iterator[QueuedShape]:
    """Yield whole nodes with another number of GPUs: a request may leave it out."""
    own = jobs.shape
    for key, queue in queues.items():
        number = queue.gpus_per_node or own.gpus_per_node
        whole = queue.exclusive and queues[jobs.queue_key].exclusive
        if whole and number != own.gpus_per_node:
            yield QueuedShape(key, None, replace(own, gpus=number * own.nodes))


def same_requests_text(queue_key: str, others: Sequence[QueuedShape]) -> str:
    """Return that jobs in a queue cannot be told from those for ``others``."""
    listed = ", ".join(map(str, others))
    return f"queue {queue_key}: jobs for {listed} have the same directives"


def report_same_requests(
    diagnostics: Diagnostics, scheduler: Scheduler, key: str, shape: JobShape, walltime: int | None
) -> None:
    """Refuse a `gpu_type` of the profile that the directives do not request; note other cases."""
    others = same_requests(diagnostics.spec, scheduler, key, shape, walltime)
    if not others:
        return
    message = same_requests_text(key, others)
    if diagnostics.spec.profile.gpu_type and any(other.gpu_type for other in others):
        place = diagnostics.spec.site_position("queues", key)
        diagnostics.profile_error(message, "gpu_type", hint=HINT, related=place)
    else:
        diagnostics.note(f"{message}; the job may get those")


# -- the choice of a queue -------------------------------------------------------------------------
class QueueChooser:
    """Chooses the queue for the jobs with workers.

    ``others``: jobs of the cluster that exist already. ``smallest``: no number of GPUs
    was asked for, so jobs are as small as the queue allows.
    """

    def __init__(
        self,
        diagnostics: Diagnostics,
        layout: Layout,
        *,
        machine: Machine | None,
        others: Sequence[QueuedJobs],
        smallest: bool,
    ) -> None:
        self.diagnostics, self.layout, self.machine = diagnostics, layout, machine
        self.others, self.smallest = others, smallest
        self.within_max_gpus = False
        self.spec = diagnostics.spec
        self.site, self.wanted = self.spec.site.site, self.spec.profile.queue

    def choose(self, gpus: int, count: int) -> tuple[str, JobShape]:
        """Return the queue's key and the jobs' shape for ``gpus`` GPUs, or ``count`` CPU workers.

        A queue that accepts the largest jobs comes before one that only accepts smaller ones.
        Raises InputError with the mismatch of each queue if none fits.
        """
        mismatches: dict[str, QueueMismatch] = {}
        for self.within_max_gpus in (False, True):
            for key in self._candidates():
                try:
                    return key, self._shape(key, gpus, count)
                except QueueMismatch as mismatch:
                    mismatches[key] = mismatch
        raise InputError([*self.diagnostics.problems, self._no_fit(mismatches)])

    def _candidates(self) -> list[str]:
        keys = [key for wanted in self.wanted for key in self._named(wanted)]
        first = [key for key in self.spec.queue_order if key in keys]
        return list(dict.fromkeys([*first, *keys]))

    def _named(self, wanted: str) -> list[str]:
        """Return the queues with the name ``wanted``. Raises InputError if there is none."""
        if wanted == "auto":
            return self._automatic()
        keys = [k for k, queue in self.site.queues.items() if wanted in (k, queue.name)]
        if not keys:
            known = ", ".join(self.site.queues)
            message = f"site {self.spec.site.name} has no queue `{wanted}`; it has {known}"
            self.diagnostics.profile_error(message, "queue")
            self.diagnostics.raise_problems()
        return sorted(keys, key=lambda key: key != wanted)  # the entry with that key first

    def equal_queues(self, key: str, shape: JobShape, gpus: int, count: int) -> list[str]:
        """Return the queues in which jobs of ``shape`` wait together: ``key``, and equal ones.

        Only of a list in the profile, or in the order of `--soonest`. Notes why others are not.
        """
        listed = len(self.wanted) > 1
        if not self.layout.scheduler.queue_separator or not (listed or self.spec.queue_order):
            return [key]
        equal, notes = [key], list(self.diagnostics.notes)
        for other in self._candidates():
            if other != key and (reason := self._difference(key, other, shape, gpus, count)):
                notes += [f"queue {other} is not used, it differs from {key}: {reason}"] * listed
            elif other != key:
                equal.append(other)
        self.diagnostics.notes[:] = notes  # without those about other queues
        if len(equal) > 1:
            names = " and ".join(equal)
            self.diagnostics.note(f"queues {names} are equal: each job starts where it can first")
        return equal

    def _difference(self, key: str, other: str, shape: JobShape, gpus: int, count: int) -> str:
        """Return why jobs in the queue ``other`` are not those in ``key``; "" if they are."""
        try:
            found = self._shape(other, gpus, count)
        except QueueMismatch as mismatch:
            return str(mismatch)
        here, there = self._facts(key, shape), self._facts(other, found)
        differ = [name for name in here if there[name] != here[name]]
        same = ", ".join(name for name in here if name not in differ)
        return ", ".join(differ) + f" (equal: {same})" * bool(differ)

    def _facts(self, key: str, shape: JobShape) -> dict[str, object]:
        """Return by name what must be equal for jobs that wait in several queues."""
        spec, queue = self.spec.in_queue(key), self.site.queues[key]
        writer = DirectiveWriter(
            Diagnostics(spec), self.layout.scheduler, shape, spec.profile.walltime, queues=("x",)
        )
        other = replace(
            spec.site.site,
            queues={},
            # These are compared as the directives that they become.
            request=None,
            cpu_request=None,
            multi_node_request=None,
            directives=(),
            submit_arguments=(),
        )
        return {
            "shape of the jobs": shape,
            "walltime": spec.profile.walltime,
            "directives": (writer.unchecked_lines(), writer.submit_arguments()),
            "GPUs of a node": (queue.gpus_per_node, queue.exclusive, queue.gpu_memory),
            "GPU type": queue.named_types,
            "charge": queue.charge,
            "environment": (spec.profile.env, other),
        }

    def _automatic(self) -> list[str]:
        """Return the queues that `queue: auto` may choose. Raises InputError if there is none."""
        keys = [key for key, queue in self.site.queues.items() if queue.auto]
        if not keys:
            message = f"site {self.spec.site.name} has no queue that `queue: auto` may choose"
            hint = f"queue: {' or '.join(self.site.queues)}"
            self.diagnostics.profile_error(message, "queue", hint=hint)
            self.diagnostics.raise_problems()
        return keys

    def _shape(self, key: str, gpus: int, count: int) -> JobShape:
        queue = self.site.queues[key]
        if self.machine:
            queue = self.machine.complete(queue)
        self._check_layout(queue)
        spec = self.spec.in_queue(key)
        shape = self._shape_in(spec, queue, gpus, count)
        limits = job_limits(self.site, key, shape.gpus, self.others)
        if limit := exceeded(limits, shape.jobs):
            raise QueueMismatch("gpus", limit.message(shape.jobs), place=limit.key)
        self._note_single_gpus(queue, shape)
        self._note_threads(queue, shape)
        self._note_any_type(key, queue, shape)
        self._note_more_than_there_is(queue, shape)
        self._note_not_requested(spec, shape)
        return shape

    def _shape_in(self, spec: ClusterSpec, queue: Queue, gpus: int, count: int) -> JobShape:
        """Return the shape of jobs with the values of ``spec`` in its queue."""
        site, scheduler = spec.site.site, self.layout.scheduler
        fit = QueueFit(
            replace(self.layout, profile=spec.profile),
            queue,
            request_texts(site, scheduler, gpus=bool(gpus)),
            request_texts(site, scheduler, gpus=bool(gpus), nodes=2),
            self.within_max_gpus,
        )
        if gpus:
            if self.smallest:
                gpus = smallest_job(queue, spec.profile.workers.gpus_per_worker)
            return fit.gpu_shape(gpus)
        if "auto" in self.wanted and queue.gpus_per_node and not self.machine:
            message = "it has GPUs, which CPU workers would not use"
            hint = f"`queue: {spec.queue_key}` runs CPU workers there anyway"
            raise QueueMismatch("gpus", message, limit="gpus_per_node", hint=hint)
        return fit.cpu_shape(count)

    def _note_more_than_there_is(self, queue: Queue, shape: JobShape) -> None:
        """Note GPUs that the queue does not have; jobs of more nodes can never start."""
        if not queue.nodes or not queue.gpus_per_node:
            return
        if shape.nodes > queue.nodes:
            message = f"jobs of {plural(shape.nodes, 'node')}; it has {queue.nodes}"
            raise QueueMismatch("gpus", message, limit="nodes")
        gpus, most = shape.jobs * shape.gpus, queue.nodes * queue.gpus_per_node
        if gpus > most:
            self.diagnostics.note(
                f"{plural(gpus, 'GPU')} wanted; the queue has {most}: "
                f"{plural(gpus - most, 'GPU')} will not come while this cluster runs"
            )

    def _note_single_gpus(self, queue: Queue, shape: JobShape) -> None:
        if self.smallest and shape.gpus == 1 and (queue.gpus_per_node or 1) > 1:
            self.diagnostics.note(
                "jobs of one GPU: if the batch scheduler isolates the GPUs of other jobs, workers "
                f"on one node cannot use NVLink; gpus_per_job={queue.gpus_per_node} keeps a node "
                "together"
            )

    def _note_threads(self, queue: Queue, shape: JobShape) -> None:
        """Note that workers on this machine have more threads than it has CPUs."""
        threads, cpus = shape.jobs * shape.workers * shape.worker_threads, queue.cpus_per_node
        if self.machine and shape.gpus and cpus and threads > cpus:
            self.diagnostics.note(f"{threads} threads of workers on {plural(cpus, 'CPU')}")

    def _check_layout(self, queue: Queue) -> None:
        allowed = queue.layouts or self.site.layouts
        name = self.layout.name
        same_shape = {"allocation": "mpi"}.get(name, name)
        if allowed and not {name, same_shape}.intersection(allowed):
            place: Place = () if queue.layouts else ("layouts",)
            message = f"it is for layout: {' or '.join(allowed)}"
            raise QueueMismatch("layout", message, limit="layouts", place=place)

    def _note_any_type(self, key: str, queue: Queue, shape: JobShape) -> None:
        """Note that the GPUs of the jobs may differ."""
        wanted = self.spec.profile.gpu_type
        if shape.gpus and queue.type_name(wanted) is None and len(queue.gpu_types) > 1:
            self.diagnostics.note(
                f"jobs in queue {key} get GPUs of any type: {', '.join(queue.gpu_types)}; "
                "`gpu_type` chooses one"
            )

    def _note_not_requested(self, spec: ClusterSpec, shape: JobShape) -> None:
        """Note numbers of one job that no line of the site passes to the batch scheduler."""
        profile, scheduler = spec.profile, self.layout.scheduler
        if scheduler.on_this_machine or self.site.queues[spec.queue_key].exclusive:
            return
        site, gpus = spec.site.site, bool(shape.gpus)
        texts = request_texts(site, scheduler, gpus=gpus, nodes=shape.nodes)
        names = " ".join(placeholders.names(" ".join(texts)))
        for name, resource in (("cpus_per_job", "cpu"), ("memory_per_job", "memory")):
            if getattr(profile, name) is not None and resource not in names:
                self.diagnostics.note(
                    f"{name} is only divided among the workers: "
                    f"no line of site {self.spec.site.name} requests it"
                )

    def _no_fit(self, mismatches: Mapping[str, QueueMismatch]) -> Problem:
        if len(mismatches) > 1:
            return self._none_fits(mismatches)
        ((key, found),) = mismatches.items()
        limited = found.limit or found.place
        related = self.spec.site_position(*found.site_place(key)) if limited else None
        message = "\n".join([f"{self.diagnostics.prefix}queue {key}: {found}", *self._not_tried()])
        position = self.spec.position(*found.key.split("."))
        return Problem(message, position, hint=found.hint, related=related)

    def _none_fits(self, mismatches: Mapping[str, QueueMismatch]) -> Problem:
        kind = ("gpus", "gpus_per_node")  # the queue is for other workers: says nothing of a value
        keys = {found.key for found in mismatches.values() if (found.key, found.limit) != kind}
        position = self.spec.position(*min(keys, default="gpus").split("."))
        several = len(keys) > 1
        if several:  # no line of the profile is the reason
            position = Position(position.source)
        reasons = [self._reason(key, found, several) for key, found in mismatches.items()]
        message = "\n".join([f"{self.diagnostics.prefix}no queue fits:", *reasons])
        hints = {found.hint: key for key, found in mismatches.items() if found.hint}
        if not keys:  # each hint names its queue, as the only way
            hints = dict(list(hints.items())[:1])
        elif several or len(hints) > 1:
            hints = {f"for queue {key}: {hint}": key for hint, key in hints.items()}
        return Problem("\n".join([message, *self._not_tried()]), position, hint="; ".join(hints))

    def _not_tried(self) -> list[str]:
        keys = [key for key, queue in self.site.queues.items() if not queue.auto]
        if "auto" not in self.wanted or not keys:
            return []
        return [f"  not tried, because `queue: auto` does not choose them: {', '.join(keys)}"]

    def _reason(self, key: str, mismatch: QueueMismatch, with_key: bool) -> str:
        place = str(self.spec.site_position(*mismatch.site_place(key)))
        place += f"; `{mismatch.key}`" if with_key else ""
        return f"  {key}: {mismatch} ({place})"


def smallest_job(queue: Queue, per_worker: int = 1) -> int:
    """Return the fewest GPUs that a job in the queue may have; ``per_worker``: of a worker."""
    if queue.exclusive:
        return queue.gpus_per_node or 1
    least = -(-(queue.min_gpus or 1) // per_worker) * per_worker
    allowed = (n for n in queue.gpus_per_job if n >= least and n % per_worker == 0)
    return min(allowed, default=least)
