"""Change the number of jobs of a cluster."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..config.spec import ClusterSpec, read_spec, settings_document, with_settings
from ..errors import InputError
from ..injob.names import HEAD
from ..planning.commandlines import JobRoles
from ..planning.limits import JobLimit, exceeded, job_limits
from ..planning.plan import Plan, make_plan
from ..planning.render import render_jobs
from ..text import plural
from . import folder as folders
from .ledger import ClusterRecord, Ledger
from .monitor import ClusterMonitor, client_of
from .report import ClusterReport, JobPhase, JobReport, ended_message
from .submit import array_limit, send

logger = logging.getLogger("gpujobs")


def jobs_to_release(
    jobs: Iterable[JobReport], count: int, load: Mapping[str, int] | None = None
) -> list[JobReport]:
    """Return the ``count`` jobs that cost least to lose, never the head's.

    Waiting jobs go first, then those whose workers have not connected, then those with the fewest
    tasks (``load``, by worker name); of equal jobs the newest.
    """
    tasks = load or {}

    def cost(job: JobReport) -> tuple[int, int, int]:
        progress = 0 if job.phase.waits else 2 if job.connected else 1
        return progress, sum(tasks.get(name, 0) for name in job.connected), -job.number

    return sorted((job for job in jobs if not job.head), key=cost)[:count]


def counting_jobs(report: ClusterReport) -> list[JobReport]:
    """Return the jobs that count towards the target: active ones with workers that do not leave."""
    return [
        job
        for job in report.jobs
        if job.workers and job.active and job.phase is not JobPhase.LEAVING
    ]


def limits_of(plan: Plan) -> tuple[JobLimit, ...]:
    """Return the limits of the number of jobs with workers of a cluster."""
    head_queue = plan.head.queue_key if plan.head else None
    return job_limits(plan.site, plan.workers.queue_key, head_queue=head_queue)


def check_job_limits(plan: Plan, jobs: int) -> None:
    """Raise InputError if ``jobs`` jobs with workers exceed a limit of their site or queue."""
    limit = exceeded(limits_of(plan), jobs)
    if limit is not None:
        raise InputError(limit.message(jobs))


def scale(record: ClusterRecord, workers: int, ledger: Ledger) -> ClusterRecord:
    """Change a cluster to ``workers`` workers in whole jobs; the head's job always stays.

    Waiting jobs are cancelled first; running workers transfer their data and exit. Lost jobs are
    not replaced later. Raises InputError if the cluster cannot be scaled from here.
    """
    with ledger.exclusive(record.id):
        report = ClusterMonitor([ledger.get(record.id)], ledger).report()
        record = report.record
        _check_scalable(report)
        jobs = counting_jobs(report)
        wanted = math.ceil(workers / record.workers_per_job)
        if wanted * record.workers_per_job != workers:
            logger.info(
                "%d workers are %s of %d", workers, plural(wanted, "job"), record.workers_per_job
            )
        if wanted > len(jobs):
            record = _add(report, wanted - len(jobs), ledger)
        elif wanted < len(jobs):
            record = _remove(report, jobs, len(jobs) - wanted, ledger)
        kept = max(wanted, sum(job.head for job in jobs))
        return ledger.update(
            record.id, workers=kept * record.workers_per_job, gpus=kept * record.gpus_per_job
        )


def _check_scalable(report: ClusterReport) -> None:
    record = report.record
    if record.owner != "cluster":
        raise InputError(f"{record.id} is owned by a Python process, which scales it")
    if record.layout == "mpi":
        raise InputError(f"{record.id} is one MPI allocation and cannot be resized")
    if report.finished:
        raise InputError(ended_message(record.id, report.reason))


def _add(report: ClusterReport, jobs: int, ledger: Ledger) -> ClusterRecord:
    record = report.record
    spec = _spec_of_more(record, jobs)
    plan = replace(make_plan(spec, python=spec.python), start_workers=1)
    active = sum(job.active and bool(job.workers) for job in report.jobs)
    check_job_limits(plan, active + jobs)
    client = client_of(record)
    first = max(submission.first + submission.count for submission in record.submissions)
    own_head = any(submission.group == HEAD for submission in record.submissions)
    roles = JobRoles(scheduler=not own_head, workers=True, run=not own_head)
    scripts = render_jobs(
        plan,
        record.id,
        plan.workers,
        roles,
        first,
        jobs,
        limit=array_limit(plan, client, jobs),
        site_folder=spec.site.path.parent,
    )
    for script in scripts:
        record = send(record, script, client, ledger)
    logger.info("%s more", plural(jobs, "job"))
    return record


def _spec_of_more(record: ClusterRecord, jobs: int) -> ClusterSpec:
    """Return the specification of ``jobs`` more jobs of the cluster."""
    spec = read_spec(folders.spec_path(record.path))
    settings: tuple[str, ...] = (f"workers.count={jobs}",)
    if record.gpus_per_job:
        gpus = jobs * record.gpus_per_job
        settings = (f"gpus={gpus}", f"gpus_per_job={record.gpus_per_job}")
    return with_settings(spec, settings_document(settings))


def _remove(
    report: ClusterReport, jobs: Sequence[JobReport], number: int, ledger: Ledger
) -> ClusterRecord:
    record = report.record
    chosen = jobs_to_release(jobs, number)
    if len(chosen) < number:
        logger.info("the head's job stays: it runs the dask scheduler")
    removed = (*record.removed, *(job.number for job in chosen))
    record = ledger.update(record.id, removed=removed)
    for job in chosen:
        if not job.phase.waits:
            folders.ask_to_leave(record.path, job.number)
    waiting = [job.job for job in chosen if job.phase.waits]
    others = [job.job for job in report.jobs if job.active and job.job not in waiting]
    if waiting:
        client_of(record).cancel(waiting, [record.id], others)
    logger.info("%s fewer", plural(len(chosen), "job"))
    return record
