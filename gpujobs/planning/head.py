"""The head with a job of its own: the dask scheduler and `run`, without GPUs."""

from __future__ import annotations

from ..config.profile import Head
from ..config.queue import Queue
from ..config.site import Site
from .diagnostics import Diagnostics
from .memory import MemoryRequest, cpu_share, requested_memory
from .shape import JobShape


def head_queue(diagnostics: Diagnostics) -> str | None:
    """Return the key of the queue of the head's own job; None if it has none or no queue fits."""
    head, site = diagnostics.spec.profile.head, diagnostics.spec.site.site
    if head is None or head.group:
        return None
    key = head.queue or _queue_without_gpus(site)
    if key in site.queues:
        return key
    hint = f"head: {{queue: …}}, one of {', '.join(site.queues)}"
    message = "the head needs a queue without GPUs"
    diagnostics.profile_error(message, "head", "queue", hint=hint)
    return None


def head_shape(head: Head, queue: Queue, texts: tuple[str, ...]) -> JobShape:
    """Return the shape of the head's own job in ``queue``, whose directives are ``texts``.

    Raises QueueMismatch if the nodes of the queue have too little memory.
    """
    request = MemoryRequest(texts, nodes=1, cpus=head.cpus, gpus=0)
    share = cpu_share(queue, head.cpus)
    return JobShape(
        jobs=1,
        nodes=1,
        gpus=0,
        cpus=head.cpus,
        memory=requested_memory(queue, request, "head.memory", head.memory, share),
        workers=0,
        worker_threads=0,
        worker_memory=None,
    )


def _queue_without_gpus(site: Site) -> str | None:
    return next(
        (key for key, queue in site.queues.items() if not queue.gpus_per_node and queue.auto), None
    )
