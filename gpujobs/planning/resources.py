"""The part of a node's other resources, such as its disk, that belongs to a job."""

from __future__ import annotations

from ..config.queue import Queue
from ..config.site import Site
from .shape import JobShape, Values


def resource_values(site: Site, queue: Queue, shape: JobShape) -> Values:
    """Return the values of the placeholders of the `resources` of all queues, in bytes.

    They are None for resources that ``queue`` does not have.
    """
    names = {name for other in site.queues.values() for name in other.resources}
    values: dict[str, int | float | str | None] = {}
    for name in sorted(names):
        on_node = _share(queue.resources.get(name), queue, shape)
        of_job = on_node and on_node * shape.nodes
        values[f"{name}_per_node"] = on_node
        values[f"{name}_per_job"] = of_job
        values[f"{name}_per_cpu"] = of_job // shape.cpus if of_job and shape.cpus else None
        values[f"{name}_per_gpu"] = of_job // shape.gpus if of_job and shape.gpus else None
    return values


def _share(amount: int | None, queue: Queue, shape: JobShape) -> int | None:
    """Return the bytes of a node that belong to the job's GPUs there, else to its CPUs."""
    if amount is None:
        return None
    if shape.gpus:
        return amount * shape.gpus_per_node // (queue.gpus_per_node or 1)
    if not shape.cpus or not queue.cpus_per_node:
        return None
    return amount * shape.cpus // queue.cpus_per_node
