"""Submit a planned cluster: make the folder, write the intent, submit, and undo all on failure."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..batch.client import SchedulerClient
from ..config.spec import ClusterSpec, write_spec
from ..errors import GpujobsError, RefusedError, UnavailableError, UnusableError
from ..injob.folder import EndKind
from ..injob.names import HEAD
from ..planning.plan import JobGroup, Plan
from ..planning.render import Script, cluster_folder
from ..schedulers import JobId
from . import folder as folders
from .dependency import find_predecessor
from .files import disk_errors
from .ledger import ClusterRecord, GroupRecord, Intent, Ledger
from .monitor import client_of, record_submission
from .prepare import scripts_of
from .verdict import write_judge

FAILED = 70
"""EX_SOFTWARE: the cluster ended without running the user's command to its end."""
UNDO_TIMEOUT = 10.0
"""Seconds for which undoing a failed submission waits for the batch scheduler."""

logger = logging.getLogger("gpujobs")


def submit(spec: ClusterSpec, plan: Plan, ledger: Ledger) -> ClusterRecord:
    """Submit a whole cluster. After a failure no job, folder or record of it is left.

    Raises RefusedError in the batch scheduler's words, or UnavailableError.
    """
    cluster_id = ledger.new_id(plan.name)
    record = new_record(plan, cluster_id)
    before = find_predecessor(spec, record, ledger)
    client = client_of(record)
    limit = array_limit(plan, client, max(group.shape.jobs for group in plan.groups))
    scripts = scripts_of(spec, plan, cluster_id, limit)
    folders.make(record.path, encrypted=plan.transport.certificate)
    try:
        with disk_errors(record.path):
            write_spec(spec, record.path / folders.SPEC)
            write_judge(record.path)
            if before:
                record = before.note(record)
        ledger.add(record)
        for script in scripts:
            after = before.submissions if before and script.attempt == 1 else ()
            record = send(record, script, client, ledger, after)
    except UnavailableError as error:
        if isinstance(error, UnusableError) and not record.submissions:
            _remove(record, ledger)
            raise
        # The batch scheduler may have accepted a job without a reply; that job will find `ended`.
        reason = "the batch scheduler did not respond at submit"
        folders.end(record.path, EndKind.FAILED, FAILED, reason)
        _cancel_submitted(ledger.get(cluster_id), client)
        raise
    except BaseException:
        folders.end(record.path, EndKind.FAILED, FAILED, "the submission was aborted")
        _cancel_submitted(record, client)
        _remove(record, ledger)
        raise
    return record


def _remove(record: ClusterRecord, ledger: Ledger) -> None:
    ledger.remove(record.id)
    folders.remove(record.path)


def send(
    record: ClusterRecord,
    script: Script,
    client: SchedulerClient,
    ledger: Ledger,
    after: Sequence[str] = (),
) -> ClusterRecord:
    """Submit one script after writing its intent; return the record with the new submission.

    Its jobs start after those of the attempt before, and of the submissions ``after``.
    Raises RefusedError with the site's contact, or UnavailableError.
    """
    group = script.jobs.group
    path = record.path / "scripts" / f"{group or 'workers'}-{script.first}.sh"
    with disk_errors(record.path):
        path.write_text(script.text, encoding="utf-8")
        path.chmod(0o700)
    now = client.system.time()
    intent = Intent(
        script.first,
        script.count,
        group,
        script.array,
        time=now,
        attempt=script.attempt,
        devices=script.devices,
    )
    before = (sent.id for sent in record.submissions if sent.attempt == script.attempt - 1)
    record = ledger.begin_submission(record.id, intent)
    known = [submission.id for submission in record.submissions]
    try:
        client = replace(client, arguments=script.jobs.submit_arguments)
        submission_id = client.submit(script.text, record.id, known, record.path, [*after, *before])
    except RefusedError as error:
        ledger.update(record.id, intent=None)
        raise _refusal(error, group, record.contact) from None
    return record_submission(record, submission_id, ledger, client)


def _refusal(error: RefusedError, group: str, contact: str | None) -> RefusedError:
    """Return the error with the group whose jobs were refused, and the site's contact."""
    message, hint = str(error.args[0]), error.hint
    if group not in ("", HEAD):
        message = f"group {group}: {message}"
    if contact and not hint:
        hint = f"contact for questions: {contact}"
    return RefusedError(message, hint=hint)


def new_record(plan: Plan, cluster_id: str, owner: str = "cluster") -> ClusterRecord:
    """Return the record of a cluster that is about to be submitted."""
    return ClusterRecord(
        id=cluster_id,
        site=plan.site_name,
        scheduler=plan.scheduler.name,
        folder=str(cluster_folder(plan, cluster_id)),
        created=time.time(),
        groups=tuple(_group_record(group) for group in plan.groups),
        ranks=plan.working_ranks,
        run=plan.profile.run if owner == "cluster" else (),
        encrypted=plan.transport.certificate,
        poll=plan.site.poll,
        multi_cluster=plan.site.cluster,
        commands=dict(plan.site.commands),
        layout=plan.layout.name,
        attempts=plan.lifetime.attempts,
        head=HEAD if plan.head else (plan.profile.head and plan.profile.head.group) or "",
        start_timeout=plan.profile.start_timeout,
        owner=owner,
        notes=plan.notes,
        contact=plan.site.contact,
        dashboard=plan.profile.network.dashboard,
    )


def _group_record(group: JobGroup) -> GroupRecord:
    return GroupRecord(
        name=group.group,
        workers=group.n_workers,
        workers_per_job=group.shape.workers,
        gpus_per_job=group.shape.gpus,
        queue=group.queue_key,
        walltime=group.walltime or 0,
    )


def estimate(spec: ClusterSpec, plan: Plan) -> str | None:
    """Return when the first job would start, or None if the batch scheduler gives no estimate."""
    cluster_id = f"{plan.name}-0000"
    script = scripts_of(spec, plan, cluster_id)[0]
    client = client_of(new_record(plan, cluster_id))
    client = replace(client, arguments=script.jobs.submit_arguments)
    return client.estimate(script.text, Path.cwd())


def array_limit(plan: Plan, client: SchedulerClient, jobs: int) -> int | None:
    """Return the most jobs of one array: the site's number, or the batch scheduler's, or None.

    The batch scheduler is queried only for several ``jobs``.
    """
    if plan.site.max_array_size or jobs == 1:
        return plan.site.max_array_size
    return client.array_limit()


def _cancel_submitted(record: ClusterRecord, client: SchedulerClient) -> None:
    client = replace(client, timeout=UNDO_TIMEOUT)
    try:
        submissions = {submission.id for submission in record.submissions}
        submissions |= client.find(record.id)
        client.cancel([JobId(submission) for submission in submissions], [record.id])
    except GpujobsError as error:
        logger.warning("could not cancel the submitted jobs (%s); they exit when they start", error)
