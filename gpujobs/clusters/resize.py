"""Add jobs to a cluster, and take some away: for `gpujobs scale` and for a Python owner alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..batch.client import SchedulerClient
from ..errors import InputError
from ..planning.limits import JobLimit, QueuedJobs, exceeded, job_limits
from ..planning.plan import JobGroup, Plan
from ..planning.render import JobRoles, render_jobs
from .ledger import ClusterRecord, Ledger
from .report import JobReport
from .submit import send, with_avoided
from .verdict import write_record


def check_group_names(known: Sequence[str], names: Iterable[str]) -> None:
    """Raise InputError if ``names``, for which workers are wanted, are not all ``known`` groups."""
    for name in names:
        if name in known:
            continue
        example = " ".join(f"{group}=…" for group in known)
        if not name:
            raise InputError("the cluster has groups; name those to scale", hint=example)
        if known == [""]:
            raise InputError(f"the cluster has no groups, so no {name!r}")
        raise InputError(f"the cluster has no group {name!r}; it has {', '.join(known)}")


def jobs_to_release(
    jobs: Iterable[JobReport], count: int, load: Mapping[str, int] | None = None
) -> list[JobReport]:
    """Return the ``count`` jobs that cost least to lose, never the head's.

    Waiting jobs go first, then those whose workers have not connected, then those with the fewest
    tasks (``load``, by worker name); of equal jobs the newest.
    """
    tasks = load or {}

    def cost(job: JobReport) -> tuple[bool, bool, int, int]:
        load_of_job = sum(tasks.get(name, 0) for name in job.connected)
        return not job.waits, bool(job.connected), load_of_job, -job.number

    return sorted((job for job in jobs if not job.head), key=cost)[:count]


def limits_of(
    plan: Plan, record: ClusterRecord, name: str, jobs: Mapping[str, int]
) -> list[JobLimit]:
    """Return the limits of the number of jobs of the group ``name``.

    ``jobs``: how many jobs each group has; those of the others count in addition.
    """
    others = [QueuedJobs(plan.head.queue_key, 1)] if plan.head else []
    for group in record.groups:
        if group.name != name:
            others.append(QueuedJobs(group.queue, jobs.get(group.name, 0), group.gpus_per_job))
    planned = plan.group(name)
    return job_limits(plan.site, planned.queue_key, planned.shape.gpus, others)


def check_job_limits(plan: Plan, record: ClusterRecord, name: str, jobs: Mapping[str, int]) -> None:
    """Raise InputError if ``jobs``, by group, exceed a limit that applies to the group ``name``."""
    limit = exceeded(limits_of(plan, record, name, jobs), jobs[name])
    if limit is not None:
        group = f"group {name}: " if name else ""
        raise InputError(f"{group}{limit.message(jobs[name])}")


def plan_of_more(
    plan: Plan,
    record: ClusterRecord,
    name: str,
    jobs: Mapping[str, int],
    client: SchedulerClient,
    ledger: Ledger,
) -> Plan:
    """Return ``plan`` for more jobs of the group ``name``, which avoid bad nodes.

    ``jobs``: how many each group will have. Raises InputError if they exceed a limit.
    """
    check_job_limits(plan, record, name, jobs)
    return with_avoided(plan, client, ledger, record.id, jobs)


def add_jobs(
    plan: Plan,
    record: ClusterRecord,
    group: JobGroup,
    roles: JobRoles,
    numbers: range,
    client: SchedulerClient,
    ledger: Ledger,
    *,
    limit: int | None,
    devices: tuple[str, ...] = (),
    site_folder: Path,
) -> Iterator[ClusterRecord]:
    """Submit jobs of a group with these numbers, in arrays of at most ``limit`` jobs.

    Yields the record after each array. ``devices``: GPUs of this machine for the jobs. Raises
    RefusedError, or UnavailableError: then the last array may be accepted all the same.
    """
    scripts = render_jobs(
        plan,
        record.id,
        group,
        roles,
        numbers.start,
        len(numbers),
        limit=limit,
        devices=devices,
        site_folder=site_folder,
    )
    for script in scripts:
        record = send(record, script, client, ledger)
        yield record


def note_removed(record: ClusterRecord, jobs: Iterable[JobReport], ledger: Ledger) -> ClusterRecord:
    """Record that jobs are asked to leave, before they do: nothing misses or replaces them."""
    removed = (*record.removed, *(job.number for job in jobs))
    record = ledger.update(record.id, removed=removed)
    if record.replaces == "none":
        write_record(record)
    return record


def note_returned(
    record: ClusterRecord, jobs: Iterable[JobReport], ledger: Ledger
) -> ClusterRecord:
    """Record that jobs of an owner stay after all, although they were asked to leave."""
    numbers = {job.number for job in jobs}
    removed = tuple(number for number in record.removed if number not in numbers)
    return ledger.update(record.id, removed=removed)
