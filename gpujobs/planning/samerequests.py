"""Finds other GPUs that a job may get: those whose jobs have the same directives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..config.spec import ClusterSpec
from ..schedulers import Scheduler
from .diagnostics import Diagnostics
from .directives import DirectiveWriter
from .shape import JobShape

HINT = "in the site file, name the type in `request`, as {gpu_type}"


@dataclass(frozen=True)
class OtherGPUs:
    """GPUs of one type, or nodes with ``gpus_per_node`` GPUs, in a queue of the site."""

    queue_key: str
    gpu_type: str = ""
    gpus_per_node: int = 0

    def __str__(self) -> str:
        shown = f"GPUs of type {self.gpu_type}"
        if not self.gpu_type:
            shown = f"nodes of {self.gpus_per_node} GPUs"
        return f"{shown} (queue {self.queue_key})"


@dataclass(frozen=True)
class SameRequests:
    """Compares jobs of ``shape`` in one queue with those of all queues.

    ``spec`` is the specification of the cluster, not that of jobs in one queue.
    """

    spec: ClusterSpec
    scheduler: Scheduler
    queue_key: str
    shape: JobShape
    walltime: int | None

    def others(self) -> list[OtherGPUs]:
        """Return the GPUs for which the directives are the same."""
        if self.scheduler.on_this_machine or not self.shape.gpus:
            return []
        own = self._request(self.queue_key, self.spec.profile.gpu_type, self.shape)
        return [
            other
            for other, shape in (*self._other_types(), *self._other_nodes())
            if self._request(other.queue_key, other.gpu_type or None, shape) == own
        ]

    def _other_types(self) -> Iterator[tuple[OtherGPUs, JobShape]]:
        queues = self.spec.site.site.queues
        own = queues[self.queue_key].type_name(self.spec.profile.gpu_type)
        for key, queue in queues.items():
            for name, other in queue.named_types.items():
                if own not in (None, other):  # several names of one type are no difference
                    yield OtherGPUs(key, gpu_type=name), self.shape

    def _other_nodes(self) -> Iterator[tuple[OtherGPUs, JobShape]]:
        """Yield whole nodes with another number of GPUs: a request may leave it out."""
        queues = self.spec.site.site.queues
        for key, queue in queues.items():
            number = queue.gpus_per_node or self.shape.gpus_per_node
            whole = queue.exclusive and queues[self.queue_key].exclusive
            if whole and number != self.shape.gpus_per_node:
                shape = replace(self.shape, gpus=number * self.shape.nodes)
                yield OtherGPUs(key, gpus_per_node=number), shape

    def _request(
        self, key: str, gpu_type: str | None, shape: JobShape
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the directives and the arguments of such jobs in the queue ``key``.

        A reservation is left out: some batch schedulers name it in place of the queue.
        """
        profile = replace(self.spec.profile, gpu_type=gpu_type, reservation=None)
        spec = replace(self.spec, profile=profile)
        diagnostics = Diagnostics(spec.in_queue(key))
        writer = DirectiveWriter(diagnostics, self.scheduler, key, shape, self.walltime)
        return writer.lines(), writer.submit_arguments()


def same_requests_text(queue_key: str, others: Sequence[OtherGPUs]) -> str:
    """Return that jobs in a queue cannot be told from those for ``others``."""
    listed = ", ".join(map(str, others))
    return f"queue {queue_key}: jobs for {listed} have the same directives"


def report_same_requests(diagnostics: Diagnostics, same: SameRequests) -> None:
    """Refuse a `gpu_type` of the profile that the directives do not request; note other cases."""
    others = same.others()
    if not others:
        return
    message = same_requests_text(same.queue_key, others)
    if diagnostics.spec.profile.gpu_type and any(other.gpu_type for other in others):
        place = diagnostics.spec.site_position("queues", same.queue_key)
        diagnostics.profile_error(message, "gpu_type", hint=HINT, related=place)
    else:
        diagnostics.note(f"{message}; the job may get those")
