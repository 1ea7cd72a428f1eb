"""More or fewer jobs of a cluster that `gpujobs submit` started."""

from __future__ import annotations

import math
from dataclasses import replace

from ..config import sources
from ..errors import InputError
from ..injob.names import HEAD
from ..planning.commandlines import JobRoles
from ..planning.plan import make_plan
from ..planning.render import render_jobs
from ..schedulers import JobState
from ..text import plural
from . import folder as folders
from .ledger import ClusterRecord, Ledger
from .monitor import Tell, batch_of, look
from .report import ClusterReport, JobReport
from .submit import send


def scale(record: ClusterRecord, workers: int, ledger: Ledger, tell: Tell) -> ClusterRecord:
    """Ask for ``workers`` workers in all; whole jobs come and go, and the head's never goes.

    Waiting jobs are cancelled first; workers that run hand their data over and leave. Nobody refills the cluster
    later: `gpujobs status` says what is missing.
    """
    with ledger.busy(record.id):
        record = ledger.get(record.id)
        if record.owner != "cluster":
            raise InputError(f"{record.id} is owned by a Python process, which scales it")
        if record.layout == "mpi":
            raise InputError(f"{record.id} is one MPI allocation, which has its size for good")
        seen = next(iter(look([record], ledger, tell)))
        if seen.over:
            raise InputError(f"{record.id} has ended: {seen.reason or 'run: is done'}")
        jobs = [
            job
            for job in seen.jobs
            if job.expected and job.state.active and job.number not in record.removed
        ]
        wanted = math.ceil(workers / record.workers_per_job)
        if wanted * record.workers_per_job != workers:
            tell(f"{workers} workers are {plural(wanted, 'job')} of {record.workers_per_job}")
        if wanted > len(jobs):
            record = _more(record, wanted - len(jobs), ledger, tell)
        elif wanted < len(jobs):
            record = _fewer(record, seen, jobs, len(jobs) - wanted, ledger, tell)
        kept = max(wanted, sum(job.head for job in jobs))
        return ledger.update(
            record.id, workers=kept * record.workers_per_job, gpus=kept * record.gpus_per_job
        )


def _more(record: ClusterRecord, jobs: int, ledger: Ledger, tell: Tell) -> ClusterRecord:
    spec = sources.read_spec(record.path / "order.json")
    settings = sources.settings_document(
        (f"gpus={jobs * record.gpus_per_job}", f"gpus_per_job={record.gpus_per_job}")
    )
    if not record.gpus_per_job:
        settings = sources.settings_document((f"workers.count={jobs}",))
    spec = sources.with_settings(spec, settings)
    plan = replace(make_plan(spec, python=spec.python), start_workers=1)
    batch = batch_of(record, tell)
    first = max(submission.first + submission.count for submission in record.submissions)
    own_head = any(submission.group == HEAD for submission in record.submissions)
    roles = JobRoles(scheduler=not own_head, workers=True, run=not own_head)
    folder = spec.site.path.parent
    for script in render_jobs(
        plan, record.id, plan.workers, roles, first, jobs, site_folder=folder
    ):
        record = send(record, script, batch, ledger)
    tell(f"{plural(jobs, 'job')} more")
    return record


def _fewer(
    record: ClusterRecord,
    seen: ClusterReport,
    jobs: list[JobReport],
    number: int,
    ledger: Ledger,
    tell: Tell,
) -> ClusterRecord:
    def cost(job: JobReport) -> tuple[bool, bool, int]:
        return (job.state is not JobState.PENDING, bool(job.connected), -job.number)

    chosen = sorted((job for job in jobs if not job.head), key=cost)[:number]
    if len(chosen) < number:
        tell("the head's job stays: the dask scheduler is in it")
    targets: dict[str, list[int]] = {}
    for job in chosen:
        native = record.jobs[job.number]
        if job.state is JobState.PENDING:
            indexes = targets.setdefault(native.submission, [])
            indexes += [native.index] if native.index is not None else []
        else:
            folders.ask_to_leave(record.path, job.number)
    record = ledger.update(record.id, removed=(*record.removed, *(job.number for job in chosen)))
    batch_of(record, tell).cancel(targets)
    tell(f"{plural(len(chosen), 'job')} fewer")
    return record
