"""The choice of a queue: the first one of the site whose limits allow the jobs of the profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..config import placeholders
from ..config.queue import Queue
from ..errors import InputError, Problem
from ..text import plural
from .diagnostics import Diagnostics
from .directives import request_texts
from .fit import QueueFit
from .layout import Layout
from .limits import QueuedJobs, exceeded, job_limits
from .machine import Machine
from .shape import JobShape, Place, QueueMismatch


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
        if self.wanted == "auto":
            return self._automatic()
        keys = [k for k, queue in self.site.queues.items() if self.wanted in (k, queue.name)]
        if not keys:
            known = ", ".join(self.site.queues)
            message = f"site {self.spec.site.name} has no queue `{self.wanted}`; it has {known}"
            self.diagnostics.profile_error(message, "queue")
            self.diagnostics.raise_problems()
        return sorted(keys, key=lambda key: key != self.wanted)  # the entry with that key first

    def _automatic(self) -> list[str]:
        """Return the queues that `queue: auto` may choose. Raises InputError if there is none."""
        keys = [key for key, queue in self.site.queues.items() if queue.auto]
        if not keys:
            message = f"site {self.spec.site.name} has no queue that `queue: auto` may choose"
            hint = f"queue: {' or '.join(self.site.queues)}"
            self.diagnostics.profile_error(message, "queue", hint=hint)
            self.diagnostics.raise_problems()
        first = [key for key in self.spec.queue_order if key in keys]
        return [*first, *(key for key in keys if key not in first)]

    def _shape(self, key: str, gpus: int, count: int) -> JobShape:
        queue = self.site.queues[key]
        if self.machine:
            queue = self.machine.complete(queue)
        self._check_layout(queue)
        shape = self._gpu_shape(key, queue, gpus) if gpus else self._cpu_shape(key, queue, count)
        limits = job_limits(self.site, key, shape.gpus, self.others)
        if limit := exceeded(limits, shape.jobs):
            raise QueueMismatch("gpus", limit.message(shape.jobs), place=limit.key)
        self._note_single_gpus(queue, shape)
        self._note_any_type(key, queue, shape)
        self._note_more_than_there_is(queue, shape)
        self._note_not_requested(key, shape)
        return shape

    def _gpu_shape(self, key: str, queue: Queue, gpus: int) -> JobShape:
        if self.smallest:
            gpus = smallest_job(queue, self.spec.profile.workers.gpus_per_worker)
        return self._fit(key, queue, gpus=True).gpu_shape(gpus)

    def _fit(self, key: str, queue: Queue, *, gpus: bool) -> QueueFit:
        def texts(nodes: int) -> tuple[str, ...]:
            return request_texts(self.site, self.layout.scheduler, key, gpus=gpus, nodes=nodes)

        layout = replace(self.layout, profile=self.spec.in_queue(key).profile)
        return QueueFit(layout, queue, texts(1), texts(2), self.within_max_gpus)

    def _cpu_shape(self, key: str, queue: Queue, count: int) -> JobShape:
        if self.wanted == "auto" and queue.gpus_per_node and not self.machine:
            message = "it has GPUs, which CPU workers would not use"
            hint = f"`queue: {key}` runs CPU workers there anyway"
            raise QueueMismatch("gpus", message, limit="gpus_per_node", hint=hint)
        return self._fit(key, queue, gpus=False).cpu_shape(count)

    def _note_more_than_there_is(self, queue: Queue, shape: JobShape) -> None:
        """Note GPUs that the queue does not have; jobs of more nodes can never start."""
        if not queue.nodes or not queue.gpus_per_node:
            return
        if shape.nodes > queue.nodes:
            message = f"jobs of {shape.nodes} nodes; it has {queue.nodes}"
            raise QueueMismatch("gpus", message, limit="nodes")
        gpus, most = shape.jobs * shape.gpus, queue.nodes * queue.gpus_per_node
        if gpus > most:
            self.diagnostics.note(
                f"{gpus} GPUs wanted; the queue has {most}: "
                f"{plural(gpus - most, 'GPU')} will not come while this cluster runs"
            )

    def _note_single_gpus(self, queue: Queue, shape: JobShape) -> None:
        if self.smallest and shape.gpus == 1 and (queue.gpus_per_node or 1) > 1:
            self.diagnostics.note(
                "jobs of one GPU: if the batch scheduler isolates the GPUs of other jobs, workers "
                f"on one node cannot use NVLink; gpus_per_job={queue.gpus_per_node} keeps a node "
                "together"
            )

    def _check_layout(self, queue: Queue) -> None:
        allowed = queue.layouts or self.site.layouts
        if allowed and self.layout.name not in allowed:
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

    def _note_not_requested(self, key: str, shape: JobShape) -> None:
        """Note numbers of one job that no line of the site passes to the batch scheduler."""
        profile, scheduler = self.spec.profile, self.layout.scheduler
        if scheduler.on_this_machine or self.site.queues[key].exclusive:
            return
        gpus, nodes = bool(shape.gpus), shape.nodes
        texts = request_texts(self.site, scheduler, key, gpus=gpus, nodes=nodes)
        names = " ".join(placeholders.names(" ".join(texts)))
        for name, resource in (("cpus_per_job", "cpu"), ("memory_per_job", "memory")):
            if getattr(profile, name) is not None and resource not in names:
                self.diagnostics.note(
                    f"{name} is only divided among the workers: "
                    f"no line of site {self.spec.site.name} requests it"
                )

    def _no_fit(self, mismatches: Mapping[str, QueueMismatch]) -> Problem:
        (key, first), *others = mismatches.items()
        position, prefix = self.spec.position(*first.key.split(".")), self.diagnostics.prefix
        if others:
            reasons = [self._reason(key, mismatch) for key, mismatch in mismatches.items()]
            message = "\n".join([f"{prefix}no queue fits:", *reasons, *self._not_tried()])
            return Problem(message, position, hint=first.hint)
        related = None
        if first.limit or first.place:
            related = self.spec.site_position(*first.site_place(key))
        message = "\n".join([f"{prefix}queue {key}: {first}", *self._not_tried()])
        return Problem(message, position, hint=first.hint, related=related)

    def _not_tried(self) -> list[str]:
        keys = [key for key, queue in self.site.queues.items() if not queue.auto]
        if self.wanted != "auto" or not keys:
            return []
        return [f"  not tried, because `queue: auto` does not choose them: {', '.join(keys)}"]

    def _reason(self, key: str, mismatch: QueueMismatch) -> str:
        return f"  {key}: {mismatch} ({self.spec.site_position(*mismatch.site_place(key))})"


def smallest_job(queue: Queue, per_worker: int = 1) -> int:
    """Return the fewest GPUs that a job in the queue may have; ``per_worker``: of a worker."""
    if queue.exclusive:
        return queue.gpus_per_node or 1
    least = -(-(queue.min_gpus or 1) // per_worker) * per_worker
    allowed = (n for n in queue.gpus_per_job if n >= least and n % per_worker == 0)
    return min(allowed, default=least)
