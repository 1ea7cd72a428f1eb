"""The choice of a queue: the first one whose limits allow the jobs of the profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config import placeholders
from ..config.sitequeue import ANY_TYPE, Queue
from ..config.spec import ClusterSpec
from ..errors import InputError, Position, Problem
from ..text import plural
from .bash import Diagnostics
from .directives import DirectiveWriter, request_texts
from .environments import check_in_queue
from .layouts import Layout
from .limits import QueuedJobs, exceeded, job_limits
from .queuefit import QueueFit
from .requested import Machine
from .shape import JobShape, Place, QueueMismatch


@dataclass(frozen=True)
class Candidate:
    """A queue that allows the jobs of the profile: their shape there, and notes for the user."""

    key: str
    shape: JobShape
    notes: tuple[str, ...]
    within_max_gpus: bool
    """The jobs are smaller than the largest ones, so that the queue's `max_gpus` allows them."""


@dataclass(frozen=True)
class QueueChooser:
    """Chooses the queue for the jobs with workers of ``gpus`` GPUs, or of ``count`` CPU workers.

    ``others``: jobs of the cluster that exist already. ``smallest``: no number of GPUs
    was asked for, so jobs are as small as the queue allows. It reports no notes: each candidate has
    its own.
    """

    diagnostics: Diagnostics
    layout: Layout
    machine: Machine | None
    others: Sequence[QueuedJobs]
    smallest: bool
    gpus: int
    count: int

    @property
    def spec(self) -> ClusterSpec:
        """The specification of the cluster."""
        return self.diagnostics.spec

    def choose(self) -> Candidate:
        """Return the first queue that allows the jobs.

        A queue that accepts the largest jobs comes before one that only accepts smaller ones.
        Raises InputError with the mismatch of each queue if none fits.
        """
        mismatches: dict[str, QueueMismatch] = {}
        for within_max_gpus in (False, True):
            for key in self._keys():
                try:
                    return self._candidate(key, within_max_gpus)
                except QueueMismatch as mismatch:
                    mismatches[key] = mismatch
        raise InputError([*self.diagnostics.problems, _no_fit(self.diagnostics, mismatches)])

    def equal_queues(self, chosen: Candidate) -> tuple[list[str], list[str]]:
        """Return the queues in which jobs wait together, ``chosen`` and equal ones, and notes.

        Only of a list in the profile, or in the order of `--soonest`. The notes say why others
        are not.
        """
        listed = len(self.spec.profile.queue) > 1
        if not self.layout.scheduler.queue_separator or not (listed or self.spec.queue_order):
            return [chosen.key], []
        equal, notes = [chosen.key], []
        for key in self._keys():
            if key == chosen.key:
                continue
            reason = self._difference(chosen, key)
            if not reason:
                equal.append(key)
            elif listed:
                notes.append(f"queue {key} is not used, it differs from {chosen.key}: {reason}")
        if len(equal) > 1:
            names = " and ".join(equal)
            notes.append(f"queues {names} are equal: each job starts where it can first")
        return equal, notes

    def _keys(self) -> list[str]:
        keys: list[str] = []
        for wanted in self.spec.profile.queue:
            keys += self._named(wanted)
        first = [key for key in self.spec.queue_order if key in keys]
        return list(dict.fromkeys([*first, *keys]))

    def _named(self, wanted: str) -> list[str]:
        """Return the queues with the name ``wanted``. Raises InputError if there is none."""
        if wanted == "auto":
            return self._automatic()
        keys = [k for k, queue in self.spec.site.site.queues.items() if wanted in (k, queue.name)]
        if not keys:
            known = ", ".join(self.spec.site.site.queues)
            message = f"site {self.spec.site.name} has no queue `{wanted}`; it has {known}"
            self.diagnostics.profile_error(message, "queue")
            self.diagnostics.raise_problems()
        return sorted(keys, key=lambda key: key != wanted)  # the entry with that key first

    def _automatic(self) -> list[str]:
        """Return the queues that `queue: auto` may choose. Raises InputError if there is none."""
        keys = [key for key, queue in self.spec.site.site.queues.items() if queue.auto]
        if not keys:
            message = f"site {self.spec.site.name} has no queue that `queue: auto` may choose"
            hint = f"queue: {' or '.join(self.spec.site.site.queues)}"
            self.diagnostics.profile_error(message, "queue", hint=hint)
            self.diagnostics.raise_problems()
        return keys

    def _candidate(self, key: str, within_max_gpus: bool) -> Candidate:
        """Return the jobs in a queue. Raises QueueMismatch if it cannot run them."""
        spec = self.spec.in_queue(key)
        site = spec.site.site
        queue = site.queues[key]
        if self.machine:
            queue = self.machine.complete(queue)
        self._check_layout(spec)
        check_in_queue(spec, queue, self.gpus)
        shape = self._shape(spec, queue, within_max_gpus)
        limits = job_limits(site, key, shape.gpus, self.others)
        if limit := exceeded(limits, shape.jobs):
            raise QueueMismatch("gpus", limit.message(shape.jobs), place=limit.key)
        _check_nodes(queue, shape)
        notes = (
            *self._single_gpu_notes(queue, shape),
            *self._thread_notes(queue, shape),
            *_type_notes(spec, queue, shape),
            *_missing_gpu_notes(queue, shape),
            *self._not_requested_notes(spec, shape),
        )
        return Candidate(key, shape, notes, within_max_gpus)

    def _check_layout(self, spec: ClusterSpec) -> None:
        site = spec.site.site
        names = {self.layout.name}
        if self.layout.name == "allocation":
            names.add("mpi")
        if site.layouts and not names.intersection(site.layouts):
            own = "layouts" in site.queues[spec.queue_key].given
            place: Place = () if own else ("layouts",)
            message = f"it is for layout: {' or '.join(site.layouts)}"
            raise QueueMismatch("layout", message, limit="layouts", place=place)

    def _shape(self, spec: ClusterSpec, queue: Queue, within_max_gpus: bool) -> JobShape:
        """Return the shape of jobs with the values of ``spec`` in its queue."""
        site, scheduler, gpus = spec.site.site, self.layout.scheduler, self.gpus
        fit = QueueFit(
            replace(self.layout, profile=spec.profile),
            queue,
            request_texts(site, scheduler, gpus=bool(gpus)),
            request_texts(site, scheduler, gpus=bool(gpus), nodes=2),
            within_max_gpus,
        )
        if gpus:
            if self.smallest:
                gpus = smallest_job(queue, spec.profile.workers.gpus_per_worker)
            return fit.gpu_shape(gpus)
        if "auto" in spec.profile.queue and queue.worker_gpus and not self.machine:
            message = "it has GPUs, which CPU workers would not use"
            hint = f"`queue: {spec.queue_key}` runs CPU workers there anyway"
            raise QueueMismatch("gpus", message, limit="gpus_per_node", hint=hint)
        return fit.cpu_shape(self.count)

    def _single_gpu_notes(self, queue: Queue, shape: JobShape) -> Iterator[str]:
        if self.smallest and shape.gpus == 1 and (queue.gpus_per_node or 1) > 1:
            yield (
                "jobs of one GPU: if the batch scheduler isolates the GPUs of other jobs, workers "
                f"on one node cannot use NVLink; gpus_per_job={queue.gpus_per_node} keeps a node "
                "together"
            )

    def _thread_notes(self, queue: Queue, shape: JobShape) -> Iterator[str]:
        """Note that workers on this machine have more threads than it has CPUs."""
        threads, cpus = shape.jobs * shape.workers * shape.worker_threads, queue.cpus_per_node
        if self.machine and shape.gpus and cpus and threads > cpus:
            yield f"{threads} threads of workers on {plural(cpus, 'CPU')}"

    def _not_requested_notes(self, spec: ClusterSpec, shape: JobShape) -> Iterator[str]:
        """Note numbers of one job that no line of the site passes to the batch scheduler."""
        site, scheduler, profile = spec.site.site, self.layout.scheduler, spec.profile
        if scheduler.on_this_machine or site.queues[spec.queue_key].exclusive:
            return
        texts = request_texts(site, scheduler, gpus=bool(shape.gpus), nodes=shape.nodes)
        names = " ".join(placeholders.names(" ".join(texts)))
        numbers = (
            ("cpus_per_job", "cpu", profile.cpus_per_job),
            ("memory_per_job", "memory", profile.memory_per_job),
        )
        for name, resource, number in numbers:
            if number is not None and resource not in names:
                yield (
                    f"{name} is only divided among the workers: "
                    f"no line of site {spec.site.name} requests it"
                )

    def _difference(self, chosen: Candidate, key: str) -> str:
        """Return why jobs in the queue ``key`` are not the chosen ones; "" if they are."""
        try:
            found = self._candidate(key, chosen.within_max_gpus)
        except QueueMismatch as mismatch:
            return str(mismatch)
        return _differences(self._facts(chosen), self._facts(found))

    def _facts(self, candidate: Candidate) -> dict[str, object]:
        """Return by name what must be equal for jobs that wait in several queues."""
        spec, shape = self.spec.in_queue(candidate.key), candidate.shape
        queue = spec.site.site.queues[candidate.key]
        writer = DirectiveWriter(
            Diagnostics(spec), self.layout.scheduler, shape, spec.profile.walltime, queues=("x",)
        )
        other = replace(
            spec.site.site,
            queues={},
            environments={},
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
            "environment": (spec.profile.environment, spec.profile.env, other),
        }


def _differences(here: Mapping[str, object], there: Mapping[str, object]) -> str:
    """Return the names of the facts that differ, and of those that do not; "" if none differs."""
    differ = [name for name in here if there[name] != here[name]]
    if not differ:
        return ""
    same = ", ".join(name for name in here if name not in differ)
    return f"{', '.join(differ)} (equal: {same})"


def _check_nodes(queue: Queue, shape: JobShape) -> None:
    """Refuse jobs of more nodes than the queue has, which can never start."""
    if queue.nodes and queue.gpus_per_node and shape.nodes > queue.nodes:
        message = f"jobs of {plural(shape.nodes, 'node')}; it has {queue.nodes}"
        raise QueueMismatch("gpus", message, limit="nodes")


def _missing_gpu_notes(queue: Queue, shape: JobShape) -> Iterator[str]:
    """Note GPUs that the queue does not have."""
    if not queue.nodes or not queue.gpus_per_node:
        return
    gpus, most = shape.jobs * shape.gpus, queue.nodes * queue.gpus_per_node
    if gpus > most:
        yield (
            f"{plural(gpus, 'GPU')} wanted; the queue has {most}: "
            f"{plural(gpus - most, 'GPU')} will not come while this cluster runs"
        )


def _type_notes(spec: ClusterSpec, queue: Queue, shape: JobShape) -> Iterator[str]:
    """Note that the GPUs of the jobs may differ."""
    any_type = queue.type_name(spec.profile.gpu_type) is None
    chosen = spec.profile.gpu_type == ANY_TYPE
    if shape.gpus and any_type and not chosen and len(queue.gpu_types) > 1:
        yield (
            f"jobs in queue {spec.queue_key} get GPUs of any type: {', '.join(queue.gpu_types)}; "
            "`gpu_type` chooses one"
        )


def _no_fit(diagnostics: Diagnostics, mismatches: Mapping[str, QueueMismatch]) -> Problem:
    """Return the error that no queue allows the jobs."""
    if len(mismatches) > 1:
        return _none_fits(diagnostics, mismatches)
    spec = diagnostics.spec
    ((key, found),) = mismatches.items()
    limited = found.limit or found.place
    related = spec.site_position(*found.site_place(key)) if limited else None
    message = "\n".join([f"{diagnostics.prefix}queue {key}: {found}", *_not_tried(spec)])
    position = spec.position(*found.key.split("."))
    return Problem(message, position, hint=found.hint, related=related)


def _none_fits(diagnostics: Diagnostics, mismatches: Mapping[str, QueueMismatch]) -> Problem:
    spec = diagnostics.spec
    kind = ("gpus", "gpus_per_node")  # the queue is for other workers: says nothing of a value
    keys = {found.key for found in mismatches.values() if (found.key, found.limit) != kind}
    position = spec.position(*min(keys, default="gpus").split("."))
    several = len(keys) > 1
    if several:  # no line of the profile is the reason
        position = Position(position.source)
    reasons = [_reason(spec, key, found, several) for key, found in mismatches.items()]
    message = "\n".join([f"{diagnostics.prefix}no queue fits:", *reasons])
    hints = {found.hint: key for key, found in mismatches.items() if found.hint}
    if not keys:  # each hint names its queue, as the only way
        hints = dict(list(hints.items())[:1])
    elif several or len(hints) > 1:
        hints = {f"for queue {key}: {hint}": key for hint, key in hints.items()}
    return Problem("\n".join([message, *_not_tried(spec)]), position, hint="; ".join(hints))


def _not_tried(spec: ClusterSpec) -> list[str]:
    keys = [key for key, queue in spec.site.site.queues.items() if not queue.auto]
    if "auto" not in spec.profile.queue or not keys:
        return []
    return [f"  not tried, because `queue: auto` does not choose them: {', '.join(keys)}"]


def _reason(spec: ClusterSpec, key: str, mismatch: QueueMismatch, with_key: bool) -> str:
    place = str(spec.site_position(*mismatch.site_place(key)))
    if with_key:
        place += f"; `{mismatch.key}`"
    return f"  {key}: {mismatch} ({place})"


def smallest_job(queue: Queue, per_worker: int = 1) -> int:
    """Return the fewest GPUs that a job in the queue may have; ``per_worker``: of a worker."""
    if queue.exclusive:
        return queue.gpus_per_node or 1
    least = -(-(queue.min_gpus or 1) // per_worker) * per_worker
    allowed = (n for n in queue.gpus_per_job if n >= least and n % per_worker == 0)
    return min(allowed, default=least)
