"""Jobs on different GPUs that the batch scheduler cannot tell apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..config.sitequeue import ANY_TYPE, Queue
from ..config.spec import ClusterSpec
from ..schedulers import Scheduler
from .bash import Diagnostics
from .directives import DirectiveWriter
from .shape import JobShape

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
    wanted = diagnostics.spec.profile.gpu_type
    if wanted not in (None, ANY_TYPE) and any(other.gpu_type for other in others):
        place = diagnostics.spec.site_position("queues", key)
        diagnostics.profile_error(message, "gpu_type", hint=HINT, related=place)
    else:
        diagnostics.note(f"{message}; the job may get those")
