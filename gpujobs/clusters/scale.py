"""Change the number of jobs of a cluster; cancel clusters, and find those without an owner."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..batch.process import HOST, System
from ..config.document import Document
from ..config.spec import ClusterSpec, read_spec, with_settings
from ..errors import InputError, UnavailableError
from ..injob import archive
from ..injob.folder import EXIT_FAILED, EndKind
from ..injob.names import ARCHIVE
from ..planning.plan import make_plan
from ..planning.render import roles_of
from ..schedulers import JobState
from ..text import plural
from . import clusterfolder as folders
from .clusterfolder import check_folder
from .folderstate import FolderReader
from .ledger import ClusterRecord, GroupRecord, Ledger
from .monitor import RECOVERY_AGE, ClusterMonitor, client_of, recover_submission
from .owner import has_owner
from .prepare import machine_of, with_dask_files, with_modules
from .report import ClusterReport, ClusterState, JobPhase, JobReport, ended_message
from .resize import add_jobs, check_group_names, jobs_to_release, note_removed, plan_of_more
from .submit import array_limit
from .verdict import write_record

logger = logging.getLogger("gpujobs")


def scale(record: ClusterRecord, workers: Mapping[str, int], ledger: Ledger) -> None:
    """Change groups of a cluster to ``workers`` workers in whole jobs; the head's job always stays.

    A cluster without groups has one with the name "". Waiting jobs are cancelled first; running
    workers transfer their data and exit. Lost jobs are not replaced later. Raises InputError if the
    cluster cannot be scaled from here.
    """
    check_folder(record.path)
    with ledger.exclusive(record.id):
        record = recover_submission(ledger.get(record.id), ledger, at_once=True)
        if record.intent is not None:
            raise UnavailableError(
                f"{record.id}: a submission was interrupted, and its job may still be accepted",
                hint=f"try again after {RECOVERY_AGE:.0f} s",
            )
        report = ClusterMonitor([record], ledger).report()
        record = report.record
        _check_scalable(report)
        check_group_names([group.name for group in record.groups], workers)
        _cancel_left(report)
        for name, number in workers.items():
            record = _scale_group(replace(report, record=record), name, number, ledger)


def _cancel_left(report: ClusterReport) -> None:
    """Cancel waiting jobs that were to leave; the command that removed them was killed before."""
    left = [
        job.job
        for job in report.jobs
        if job.phase is JobPhase.LEAVING and job.state is JobState.PENDING
    ]
    if left:
        others = [job.job for job in report.jobs if job.active and job.job not in left]
        client_of(report.record).cancel(left, [report.record.id], others)


def _scale_group(report: ClusterReport, name: str, workers: int, ledger: Ledger) -> ClusterRecord:
    record = report.record
    counting = (job for job in report.jobs if job.active and job.phase is not JobPhase.LEAVING)
    jobs = [job for job in counting if job.workers and job.group == name]
    size = record.group(name).workers_per_job
    wanted = math.ceil(workers / size)
    if wanted * size != workers:
        logger.info("%d workers are %s of %d", workers, plural(wanted, "job"), size)
    if wanted > len(jobs):
        record = _add(report, name, wanted - len(jobs), ledger)
    elif wanted < len(jobs):
        record = _remove(report, name, jobs, len(jobs) - wanted, ledger)
    kept = max(wanted, sum(job.head for job in jobs))
    record = ledger.update(record.id, groups=record.with_target(name, kept * size))
    write_record(record)
    return record


def _check_scalable(report: ClusterReport) -> None:
    record = report.record
    if record.replaces == "owner":
        raise InputError(f"{record.id} is owned by a Python process, which scales it")
    if not record.elastic:
        raise InputError(f"{record.id} is one allocation and cannot be resized")
    if record.attempts > 1:
        message = f"{record.id} has `requeue`: the jobs of all its attempts are submitted"
        raise InputError(message, hint="cancel it, and submit it with another number of GPUs")
    if record.unseen:
        raise InputError(f"{record.id}: jobs of its scripts have not started")
    if report.finished:
        raise InputError(ended_message(record.id, report.reason))


def _add(report: ClusterReport, name: str, jobs: int, ledger: Ledger) -> ClusterRecord:
    record = report.record
    if not archive.takes_our_options(record.path / ARCHIVE):
        message = f"{record.id}: its jobs have the package of another release of gpujobs"
        raise InputError(message, hint="that release can add jobs; or submit a new cluster")
    spec, _ = with_modules(_spec_of_more(record, record.group(name), jobs))
    spec = with_dask_files(spec)
    machine = machine_of(spec, used=_used_devices(report))
    plan = make_plan(spec, python=spec.python, machine=machine, only=name)
    plan = replace(plan, root=str(record.path.parent))
    active = Counter(job.group for job in report.jobs if job.active and job.workers)
    active[name] += jobs
    client = client_of(record)
    plan = plan_of_more(plan, record, name, active, client, ledger)
    group, first = plan.group(name), 1 + max(record.jobs)
    added = add_jobs(
        plan,
        record,
        group,
        roles_of(plan, group),
        range(first, first + jobs),
        client,
        ledger,
        limit=array_limit(plan, client, jobs),
        devices=plan.devices,
        site_folder=spec.site.path.parent,
    )
    for updated in added:
        record = updated
    logger.info("added %s%s", plural(jobs, "job"), _of_group(name))
    return record


def _of_group(name: str) -> str:
    return f" of group {name}" if name else ""


def _used_devices(report: ClusterReport) -> tuple[str, ...]:
    """Return the GPUs of this machine that active jobs of the cluster have."""
    active = {job.number for job in report.jobs if job.active}
    return tuple(
        device
        for submission in report.record.submissions
        for number in active.intersection(submission.numbers)
        for device in submission.devices_of(number)
    )


def _spec_of_more(record: ClusterRecord, group: GroupRecord, jobs: int) -> ClusterSpec:
    """Return the specification of ``jobs`` more jobs of a group."""
    spec = read_spec(record.path / folders.SPEC)
    per_job = group.gpus_per_job
    settings: dict[str, object] = {"workers": {"count": jobs}, "start_workers": 1}
    if record.layout == "allocation":
        settings = {"gpus": per_job}  # of one job, which waits for as many workers
    elif per_job:
        settings = {"gpus": jobs * per_job, "gpus_per_job": per_job, "start_workers": 1}
    if group.name:
        settings = {"groups": {group.name: settings}, "start_workers": 1}
    return with_settings(spec, Document(settings, source=f"scale {record.id}"))


def _remove(
    report: ClusterReport, name: str, jobs: Sequence[JobReport], number: int, ledger: Ledger
) -> ClusterRecord:
    record = report.record
    chosen = jobs_to_release(jobs, number)
    if len(chosen) < number:
        logger.info("the head's job stays: it runs the dask scheduler")
    record = note_removed(record, chosen, ledger)
    for job in chosen:
        if not job.waits:
            folders.write_atomically(record.path / f"leave-{job.number}", "")
    waiting = [job.job for job in chosen if job.waits]
    others = [job.job for job in report.jobs if job.active and job.job not in waiting]
    if waiting:
        client_of(record).cancel(waiting, [record.id], others)
    removed_jobs = plural(len(chosen), "job") if chosen else "no job"
    logger.info("removed %s%s", removed_jobs, _of_group(name))
    return record


DRAIN_INTERVAL = 2.0
"""Seconds between two looks whether jobs have left."""


def drain(record: ClusterRecord, ledger: Ledger, system: System = HOST) -> None:
    """Let the workers of a cluster end their tasks and leave, but those of the head's job; wait.

    That takes as long as their tasks, at most until their jobs end. Raises InputError if the
    cluster cannot be scaled from here.
    """
    scale(record, {group.name: 0 for group in record.groups}, ledger)
    monitor = ClusterMonitor([ledger.get(record.id)], ledger, system=system)
    while any(job.active and job.workers and not job.head for job in monitor.report().jobs):
        system.sleep(DRAIN_INTERVAL)


# -- cancel clusters, and find those that their owner has left -------------------------------------
CANCEL_TIMEOUT = 90.0
"""Seconds for which a cancel waits for a batch scheduler that is away."""
EXIT_TIMEOUT, RUN_EXIT_TIMEOUT = 5.0, 17.0
"""Seconds for running jobs to find `ended` and exit, before they are cancelled; with `run`.

A job gives `run` 13 of them: see `end_with_cluster` in gpujobs/injob/head.py.
"""


def end(record: ClusterRecord) -> None:
    """Write `ended` into a cluster's folder, unless it exists already; its jobs begin to exit."""
    folders.end(record.path, EndKind.CANCELLED, 143, "cancelled by gpujobs")


def cancel(
    record: ClusterRecord,
    ledger: Ledger,
    *,
    timeout: float = CANCEL_TIMEOUT,
    system: System = HOST,
) -> None:
    """End a cluster: write `ended` into its folder, and cancel its jobs.

    A cluster without jobs, whose owner is gone, is recorded as finished.

    Raises UnavailableError or RefusedError; jobs that could not be cancelled find `ended`.
    """
    end(record)
    record = recover_submission(record, ledger, at_once=True, system=system)
    if record.finished:
        return
    if record.intent is not None:
        message = "its submission was interrupted; if its job was accepted, it exits when it starts"
        logger.info("%s: %s", record.id, message)
    if not record.submissions:
        if record.intent is None:
            ledger.update(record.id, finished=True)
        if record.planned:
            logger.info("%s: jobs that wait in the queue exit when they start", record.id)
        return
    reader = FolderReader(record.path)
    current = record.current_jobs(reader.read().claims)
    jobs = {*record.jobs.values(), *current.values()}

    def have_exited() -> bool:
        """Return whether all jobs have exited, as they found `ended`: none is left to cancel."""
        return reader.read().have_left(current)

    client = client_of(record, timeout=timeout, stopping=have_exited, system=system)
    if client.scheduler.slow_cancel:
        seconds = RUN_EXIT_TIMEOUT if record.run else EXIT_TIMEOUT
        _wait_for_exits(reader, seconds, system)
    try:
        client.cancel(sorted(jobs, key=str), [record.id])
    except UnavailableError:
        if not have_exited():
            raise


def cancel_held(report: ClusterReport) -> None:
    """Cancel the failed jobs that the batch scheduler holds for a cluster that has given them up.

    The cluster's failure is written into its folder first: they were its last jobs, perhaps.
    """
    record, held = report.record, [job.job for job in report.held]
    if report.state is ClusterState.FAILED:
        folders.end(record.path, EndKind.FAILED, EXIT_FAILED, report.reason)
    others = [job.job for job in report.jobs if job.in_queue and job.job not in held]
    client_of(record, timeout=EXIT_TIMEOUT).cancel(held, [record.id], others)


def _wait_for_exits(reader: FolderReader, seconds: float, system: System) -> None:
    """Wait until all jobs that have started have exited, ``seconds`` at most."""
    deadline = system.monotonic() + seconds
    while not reader.read().started_jobs_have_left:
        if system.monotonic() > deadline:
            return
        system.sleep(0.2)


def orphaned(record: ClusterRecord) -> bool:
    """Return whether the Python process that owned a cluster is gone."""
    if record.replaces == "none" or record.finished:
        return False
    return not has_owner(record.path)
