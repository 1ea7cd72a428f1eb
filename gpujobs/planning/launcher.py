"""The command that starts the processes of a job where its script runs on another node."""

from __future__ import annotations

from ..config import placeholders
from .diagnostics import Diagnostics
from .layout import Layout
from .shape import JobShape, Software


def workers_launcher(
    diagnostics: Diagnostics, layout: Layout, shape: JobShape, software: Software, queue: str
) -> tuple[str, ...]:
    """Return the words of the site's `workers_launcher` for jobs in a queue; () if there is none.

    ``diagnostics`` are those of jobs in ``queue``. In `layout: mpi`, the launcher of MPI starts the
    processes on the nodes.
    """
    site = diagnostics.spec.site.site
    if not site.workers_launcher or layout.name != "workers":
        return ()
    container = software.container
    if container and container.runtime.launcher:
        message = (
            f"{container.runtime.name} starts containers through {container.runtime.launcher}, "
            f"but processes of this site start through {site.workers_launcher[0]}"
        )
        diagnostics.profile_error(message, "environment", "container")
    values = {name: shape.values()[name] for name in placeholders.WORKERS_LAUNCH}
    try:
        return tuple(placeholders.expand(word, values) for word in site.workers_launcher)
    except LookupError as error:
        place = diagnostics.spec.queue_place(queue, "workers_launcher")
        diagnostics.site_error(f"{{{error.args[0]}}} is not known in queue {queue}", *place)
        return ()
