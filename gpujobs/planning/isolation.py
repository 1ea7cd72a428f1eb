"""Jobs on one node that may be unable to open the GPUs of each other: only they can find out."""

from __future__ import annotations

from .plan import Plan
from .shape import JobGroup

_NOTE = (
    "over ucxx, the rate between two jobs on a node depends on whether the site isolates the GPUs "
    "of jobs from each other; it is measured in the job, and `gpujobs status` shows it"
)


def notes(plan: Plan) -> list[str]:
    """Return the notes of the plan, and one if rates between its jobs depend on the isolation."""
    several = plan.jobs_with_workers > 1 and any(_shares_nodes(plan, jobs) for jobs in plan.groups)
    if several and "ucxx" in plan.transport.protocols:
        return [*plan.notes, _NOTE]
    return list(plan.notes)


def _shares_nodes(plan: Plan, jobs: JobGroup) -> bool:
    """Return whether other jobs may have GPUs of the same nodes."""
    queue = plan.site.queues[jobs.queue_key]
    if plan.scheduler.on_this_machine or queue.exclusive or not jobs.shape.gpus:
        return False
    return jobs.shape.gpus_per_node < (queue.gpus_per_node or 0)


def single_job(plan: Plan) -> bool:
    """Return whether the cluster has one job and cannot be scaled."""
    fixed = not plan.layout.elastic or plan.lifetime.attempts > 1
    return fixed and sum(jobs.shape.jobs for jobs in plan.all_jobs) == 1
