"""From a plan to jobs in the queue: make the folder, write down the intent, submit, and undo all if that fails."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ..batch.client import SchedulerClient
from ..config.sources import ClusterSpec, write_spec
from ..errors import GpujobsError, InputError, Problem, UnavailableError
from ..planning.plan import Plan
from ..planning.render import Script, cluster_folder
from . import folder as folders
from .ledger import ClusterRecord, Ledger, disk_errors
from .monitor import Tell, accepted, batch_of
from .prepare import scripts_of


def submit(spec: ClusterSpec, plan: Plan, ledger: Ledger, tell: Tell) -> ClusterRecord:
    """Submit the whole cluster. On failure nothing of it is left: no job, no folder, no record."""
    cluster = ledger.new_id(plan.name)
    record = new_record(plan, cluster)
    batch = batch_of(record)
    scripts = scripts_of(spec, plan, cluster, _array_limit(plan, batch))
    queued = sum(script.count for script in scripts)
    if plan.site.max_queued_jobs and queued > plan.site.max_queued_jobs:
        message = f"{queued} jobs; the site allows {plan.site.max_queued_jobs} of one user"
        related = spec.site_position("max_queued_jobs")
        raise InputError(Problem(message, spec.position("gpus"), related=related))
    folders.make(record.path, encrypted=plan.transport.certificate)
    try:
        with disk_errors(record.path):
            write_spec(spec, record.path / "order.json")
        ledger.add(record)
        for script in scripts:
            record = send(record, script, batch, ledger)
    except UnavailableError:
        # The job may have been taken without our hearing of it; it will find that the cluster has ended.
        folders.end(record.path, 70, "the batch scheduler did not answer at submit")
        _cancel_what_was_sent(ledger.get(cluster), batch, tell)
        raise
    except BaseException:
        folders.end(record.path, 70, "submit was given up")
        _cancel_what_was_sent(record, batch, tell)
        ledger.remove(cluster)
        folders.remove(record.path)
        raise
    return record


def send(
    record: ClusterRecord, script: Script, batch: SchedulerClient, ledger: Ledger
) -> ClusterRecord:
    """Send one script, with the intent written down first; return the record that has its id."""
    name = f"{script.jobs.group or 'workers'}-{script.first}.sh"
    with disk_errors(record.path):
        (record.path / "scripts" / name).write_text(script.text)
        (record.path / "scripts" / name).chmod(0o700)
    intent = {
        "first": script.first,
        "count": script.count,
        "group": script.jobs.group,
        "array": script.array,
    }
    record = ledger.update(record.id, intent=intent)
    known = [submission.id for submission in record.submissions]
    number = batch.submit(script.text, record.id, known, record.path)
    return accepted(record, number, ledger, batch)


def new_record(plan: Plan, cluster: str, owner: str = "cluster") -> ClusterRecord:
    """Return the record of a cluster that is about to be submitted."""
    return ClusterRecord(
        id=cluster,
        site=plan.site_name,
        scheduler=plan.scheduler.name,
        folder=str(cluster_folder(plan, cluster)),
        created=time.time(),
        workers=plan.n_workers,
        workers_per_job=plan.workers.shape.workers,
        ranks=plan.ranks.working if plan.ranks else 0,
        gpus=plan.gpus,
        gpus_per_job=plan.workers.shape.gpus,
        walltime=plan.workers.walltime,
        run=plan.profile.run,
        encrypted=plan.transport.certificate,
        poll=plan.site.poll,
        cluster=plan.site.cluster,
        commands=dict(plan.site.commands),
        layout=plan.profile.layout,
        owner=owner,
        notes=plan.notes,
    )


def _array_limit(plan: Plan, batch: SchedulerClient) -> int | None:
    if plan.site.max_array_size or plan.workers.shape.jobs <= plan.scheduler.largest_array:
        return plan.site.max_array_size
    return batch.array_limit()


def _cancel_what_was_sent(record: ClusterRecord, batch: SchedulerClient, tell: Tell) -> None:
    batch = replace(batch, timeout=10.0)
    try:
        batch.cancel(
            {
                number: ()
                for number in {sent.id for sent in record.submissions} | batch.find(record.id)
            }
        )
    except GpujobsError as error:
        tell(
            f"could not cancel what was submitted ({error}); such jobs end by themselves when they start"
        )


def estimate(spec: ClusterSpec, plan: Plan, tell: Tell) -> str | None:
    """Return when the first job would start, as the batch scheduler says; None where it cannot say."""
    cluster = f"{plan.name}-0000"
    batch = batch_of(new_record(plan, cluster))
    return batch.estimate(scripts_of(spec, plan, cluster)[0].text, Path.cwd())
