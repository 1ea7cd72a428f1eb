"""Submit a planned cluster: make the folder, write the intent, submit, and undo all on failure."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .. import errors
from ..batch.client import SchedulerClient
from ..config.spec import ClusterSpec, write_spec
from ..injob.certificate import make_certificate
from ..injob.folder import DamagedError, EndKind, Folder, JsonObject, read_file
from ..injob.names import CERTIFICATE, HEAD, KEY
from ..planning.lifetime import Replaces
from ..planning.plan import JobGroup, Plan
from ..planning.render import Script, avoidance, can_avoid, cluster_folder, portable
from ..planning.shape import occupied_nodes
from ..schedulers import JobId, get_scheduler
from ..text import plural
from ..version import __version__
from . import badnodes, rates
from . import clusterfolder as folders
from .clusterfolder import disk_errors
from .ledger import ClusterRecord, GroupRecord, Ledger, Submission
from .monitor import client_of, record_submission, report_on
from .prepare import scripts_of
from .report import ClusterState
from .verdict import write_judge

logger = logging.getLogger("gpujobs")

# -- submit a planned cluster ----------------------------------------------------------------------
FAILED = 70
"""EX_SOFTWARE: the cluster ended without running the user's command to its end."""
UNDO_TIMEOUT = 10.0
"""Seconds for which undoing a failed submission waits for the batch scheduler."""


def submit(spec: ClusterSpec, plan: Plan, ledger: Ledger) -> ClusterRecord:
    """Submit a whole cluster. After a failure no job, folder or record of it is left.

    Raises RefusedError in the batch scheduler's words, or UnavailableError.
    """
    spec.site.check_named()
    cluster_id = ledger.new_id(plan.name)
    record = new_record(plan, cluster_id)
    before = find_predecessor(spec, record, ledger)
    client = client_of(record)
    plan = with_avoided(plan, client, ledger, cluster_id)
    limit = array_limit(plan, client, max(group.shape.jobs for group in plan.groups))
    scripts = scripts_of(spec, plan, cluster_id, limit)
    make_folder(spec, record, encrypted=record.encrypted)
    try:
        notes = plan.notes
        if "ucxx" in plan.transport.protocols:
            notes = (*notes, *rates.copy(ledger, record.path))
        record = replace(record, notes=notes)
        record = before.note(record) if before else record
        ledger.add(record)
    except BaseException:
        folders.discard(record.path)
        raise
    with undoing(record, client, ledger, partial(_remove, record, ledger)):
        for script in scripts:
            after = before.submissions if before and script.attempt == 1 else ()
            record = send(record, script, client, ledger, after)
    return record


def make_folder(spec: ClusterSpec, record: ClusterRecord, *, encrypted: bool) -> None:
    """Make the folder of a cluster with all that its jobs need; ``encrypted``: a certificate."""
    folders.make(record.path, encrypted=encrypted)
    try:
        with disk_errors(record.path):
            write_spec(spec, record.path / folders.SPEC)
            write_judge(record.path, record.scheduler)
    except BaseException:
        folders.discard(record.path)
        raise


def _remove(record: ClusterRecord, ledger: Ledger) -> None:
    ledger.remove(record.id)
    folders.discard(record.path)


@contextlib.contextmanager
def undoing(
    record: ClusterRecord, client: SchedulerClient, ledger: Ledger, undo: Callable[[], None]
) -> Iterator[None]:
    """If the submissions of the block fail, cancel those before, and ``undo`` the rest."""
    try:
        yield
    except errors.UnavailableError as error:
        record = ledger.get(record.id)
        if isinstance(error, errors.UnusableError) and not record.submissions:
            undo()
            raise
        # The batch scheduler may have accepted a job without a reply; that job will find `ended`.
        reason = "the batch scheduler did not respond at submit"
        folders.end(record.path, EndKind.FAILED, FAILED, reason)
        _cancel_submitted(record, client)
        raise
    except BaseException as error:
        record = ledger.get(record.id)
        if record.submissions or not (record.planned and isinstance(error, errors.RefusedError)):
            folders.end(record.path, EndKind.FAILED, FAILED, "the submission was aborted")
            _cancel_submitted(record, client)
        undo()
        raise


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
    intent = intent_of(script, f"{script.jobs.group or 'workers'}-{script.first}.sh")
    path = record.path / "scripts" / intent.script
    with disk_errors(record.path):
        path.write_text(script.text, encoding="utf-8")
        path.chmod(0o700)
    return send_text(record, intent, script.text, client, ledger, after)


def intent_of(script: Script, name: str) -> Submission:
    """Return the intent to submit ``script``, which is the file ``name``."""
    return Submission(
        "",
        script.first,
        script.count,
        script.jobs.group,
        script.array,
        attempt=script.attempt,
        devices=script.devices,
        script=name,
        arguments=tuple(script.jobs.submit_arguments),
    )


def send_text(
    record: ClusterRecord,
    intent: Submission,
    text: str,
    client: SchedulerClient,
    ledger: Ledger,
    after: Sequence[str] = (),
    others: Collection[str] = (),
) -> ClusterRecord:
    """Submit the text of a script; see `send`. ``others``: submissions of the same name."""
    folder = Path(record.argument) if record.planned else record.path
    record = ledger.begin_submission(record.id, replace(intent, time=client.system.time()))
    # Of the record as it is now: a monitor may have found a submission since it was read.
    known = [submission.id for submission in record.submissions]
    before = (sent.id for sent in record.submissions if sent.attempt == intent.attempt - 1)
    try:
        client = replace(client, arguments=intent.arguments, claimed=partial(_claimed_id, record))
        submission_id = client.submit(text, record.id, [*known, *others], folder, [*after, *before])
    except errors.RefusedError as error:
        ledger.update(record.id, intent=None)
        raise _refusal(error, intent.group, record.contact) from None
    return record_submission(record, submission_id, ledger, client)


def _claimed_id(record: ClusterRecord) -> str | None:
    """Return the id of the submission of the record's intent, if one of its jobs has started."""
    claimed = record.claimed_intent()
    return claimed.id if claimed else None


def _refusal(error: errors.RefusedError, group: str, contact: str | None) -> errors.RefusedError:
    """Return the error with the group whose jobs were refused, and the site's contact."""
    message, hint = str(error.args[0]), error.hint
    if group not in ("", HEAD):
        message = f"group {group}: {message}"
    if contact and not hint:
        hint = f"contact for questions: {contact}"
    return errors.RefusedError(message, hint=hint)


def new_record(plan: Plan, cluster_id: str, replaces: Replaces = "none") -> ClusterRecord:
    """Return the record of a cluster that is about to be submitted."""
    return ClusterRecord(
        id=cluster_id,
        site=plan.site_name,
        scheduler=plan.scheduler.name,
        folder=str(cluster_folder(plan, cluster_id)),
        created=time.time(),
        groups=tuple(_group_record(group) for group in plan.groups),
        ranks=plan.working_ranks,
        run=plan.profile.run if replaces == "none" else (),
        encrypted=plan.transport.certificate,
        poll=plan.site.poll,
        multi_cluster=plan.site.cluster,
        commands=dict(plan.site.commands),
        layout=plan.layout.name,
        attempts=plan.lifetime.attempts,
        head=HEAD if plan.head else (plan.profile.head and plan.profile.head.group) or "",
        start_timeout=plan.profile.start_timeout,
        owner="client" if replaces == "owner" else "cluster",
        notes=plan.notes,
        contact=plan.site.contact,
        dashboard=plan.profile.network.dashboard,
    )


def _group_record(group: JobGroup) -> GroupRecord:
    charge = group.site.queues[group.queue_key].charge
    hourly = charge.per_gpu_hour if charge is not None else None
    of_energy = charge.per_kwh if charge is not None else None
    return GroupRecord(
        name=group.group,
        workers=group.n_workers,
        workers_per_job=group.shape.workers,
        gpus_per_job=group.shape.gpus,
        queue=group.queue_key,
        walltime=group.walltime or 0,
        nodes_per_job=group.shape.nodes,
        cpus_per_job=group.shape.cpus or 0,
        memory_per_job=group.shape.memory or 0,
        gpu_pool=group.profile.workers.has_pool,
        charge=hourly if hourly is not None else 0.0,
        charge_unit=charge.unit if charge is not None else "",
        energy_charge=of_energy if of_energy is not None else 0.0,
    )


def estimate(spec: ClusterSpec, plan: Plan) -> str | None:
    """Return when the first job would start, or None if the batch scheduler gives no estimate."""
    cluster_id = f"{plan.name}-0000"
    script = scripts_of(spec, plan, cluster_id)[0]
    client = client_of(new_record(plan, cluster_id))
    client = replace(client, arguments=script.jobs.submit_arguments)
    return client.estimate(script.text, Path.cwd())


def with_avoided(
    plan: Plan,
    client: SchedulerClient,
    ledger: Ledger,
    cluster_id: str,
    jobs: Mapping[str, int] | None = None,
) -> Plan:
    """Return ``plan`` for jobs that avoid nodes on which jobs have failed, with notes.

    Those of other clusters are a tenth of the queue's nodes at most, and all jobs of this cluster
    can run at the same time. ``jobs``: how many each group will have, by default as planned.
    """
    found = badnodes.read(ledger)
    bad = badnodes.bad_nodes(found, plan.site_name, client.system.time())
    if not bad or not can_avoid(plan):
        return plan
    from .freequeues import usable_nodes

    failed_here = {one.node for one in found if one.cluster == cluster_id}
    own = [node for node in bad if node in failed_here]
    others = [node for node in bad if node not in failed_here]
    occupied, avoid = _occupied_nodes(plan, jobs or {}), {}
    for group, number in zip(plan.all_jobs, usable_nodes(client, plan), strict=True):
        spare = max(0, number - occupied[group.queue_key])
        avoid[group.group] = [*own, *others[: number // 10]][:spare]
    plan = replace(plan, avoid=avoid)
    nodes = dict.fromkeys(node for group in plan.all_jobs for node in avoidance(plan, group)[0])
    notes = (f"avoids node {node}: {bad[node].reason}" for node in nodes)
    return replace(plan, notes=(*plan.notes, *notes))


def _occupied_nodes(plan: Plan, jobs: Mapping[str, int]) -> Counter[str]:
    """Return how many nodes of each queue the cluster needs; ``jobs`` as in `with_avoided`."""
    nodes = Counter[str]()
    for group in plan.all_jobs:
        queue, number = plan.site.queues[group.queue_key], jobs.get(group.group, group.shape.jobs)
        nodes[group.queue_key] += occupied_nodes(queue, group.shape, number)
    return nodes


def array_limit(plan: Plan, client: SchedulerClient, jobs: int) -> int | None:
    """Return the most jobs of one array; the batch scheduler is asked if ``jobs`` are several."""
    if plan.site.max_array_size or jobs == 1:
        return plan.site.max_array_size
    return client.array_limit()


def _cancel_submitted(record: ClusterRecord, client: SchedulerClient) -> None:
    client = replace(client, timeout=UNDO_TIMEOUT)
    try:
        submissions = {submission.id for submission in record.submissions}
        if not record.planned:  # of a copy of a job folder, jobs have the same name
            submissions |= client.find(record.id)
        client.cancel([JobId(submission) for submission in submissions], [record.id])
    except errors.GpujobsError as error:
        logger.warning("could not cancel the submitted jobs (%s); they exit when they start", error)


# -- `after` of a profile: another cluster that must have ended before -----------------------------
@dataclass(frozen=True)
class Predecessor:
    """A cluster that has not ended yet."""

    record: ClusterRecord
    any_end: bool
    """Whether it may fail."""

    @property
    def submissions(self) -> list[str]:
        """The ids of its submissions, those of its last attempt."""
        sent = self.record.submissions
        last = max(submission.attempt for submission in sent)
        return [submission.id for submission in sent if submission.attempt == last]

    def note(self, record: ClusterRecord) -> ClusterRecord:
        """Write into the folder of ``record`` that it waits for this cluster."""
        other = self.record
        folders.write_after(record.path, other.id, other.path, any_end=self.any_end)
        return replace(record, after=other.id)


def find_predecessor(
    spec: ClusterSpec, record: ClusterRecord, ledger: Ledger
) -> Predecessor | None:
    """Return the cluster for which the new cluster ``record`` waits; None if it has ended.

    Raises NoSuchClusterError, or InputError if it has failed or cannot be waited for.
    """
    after = spec.profile.after
    if after is None:
        return None
    other = ledger.get(after.cluster)
    report = report_on(other, ledger)
    if report.finished:
        if after.any_end or report.state is ClusterState.DONE:
            logger.info("%s has ended already", other.id)
            return None
        message = f"`after`: {other.id} is {report.state}: {report.reason}"
        raise _error(spec, message, hint=f"after: {other.id}:any starts all the same")
    if problem := _problem(record, other):
        raise _error(spec, f"`after`: {other.id} {problem}")
    return Predecessor(report.record, after.any_end)


def _problem(record: ClusterRecord, other: ClusterRecord) -> str:
    """Return why the jobs of ``record`` cannot wait for those of ``other``, or ""."""
    if other.replaces == "owner":
        return "is owned by a Python process, whose jobs change"
    if (other.scheduler, other.multi_cluster) != (record.scheduler, record.multi_cluster):
        return f"is on site {other.site}, which has another batch scheduler"
    if not other.submissions:
        return "is being submitted; try again"
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)
    if not scheduler.after_options(["1"]):
        return f"has not ended, and {scheduler.name} has no dependencies of jobs"
    return ""


def _error(spec: ClusterSpec, message: str, hint: str = "") -> errors.InputError:
    return errors.InputError(errors.Problem(message, spec.position("after"), hint=hint))


# -- job folders -----------------------------------------------------------------------------------
# All files of a cluster, which anyone may submit, also without gpujobs. ``FOLDER`` has the
# scripts, a README and the plan; ``FOLDER/ID`` is the cluster's folder, with its record. The
# scripts find it from where they are submitted, so that it may be copied before.
_PLAN = "plan.json"
_README = """\
# {id}

{jobs} on the site {site}, rendered by gpujobs {version}. To submit them, in this folder:

{submit}

Copy or move the folder before that; then leave it until they have ended. Submit it once.
The output will be in {id}/logs/run.log. To cancel: {cancel}
With gpujobs: gpujobs submit FOLDER, gpujobs status FOLDER, gpujobs cancel FOLDER.
"""


def write_folder(
    spec: ClusterSpec, plan: Plan, folder: Path, plan_json: Mapping[str, object], cluster_id: str
) -> None:
    """Write the job folder of a new cluster, mode 0700. It has no key; the first job makes that.

    Raises InputError if the profile needs gpujobs at its submission, or the folder is not empty.
    """
    _check_folder(spec, plan, folder)
    scripts = scripts_of(spec, portable(plan), cluster_id)
    names = [f"{plan.name}-{one.jobs.group or 'workers'}-{one.first}.sh" for one in scripts]
    if len(names) == 1:
        names = [f"{plan.name}.sh"]
    planned = tuple(intent_of(script, name) for script, name in zip(scripts, names, strict=True))
    record = new_record(replace(plan, root=str(folder.absolute())), cluster_id)
    record = replace(record, planned=planned)
    make_folder(spec, record, encrypted=False)
    with disk_errors(folder):
        folder.chmod(0o700)
        for script, name in zip(scripts, names, strict=True):
            folders.write_new(folder / name, script.text)
            (folder / name).chmod(0o700)
        folders.write_new(folder / _PLAN, json.dumps(plan_json, indent=1) + "\n")
        folders.write_new(folder / "README.md", _readme(record))
    Ledger.create(record)


def _check_folder(spec: ClusterSpec, plan: Plan, folder: Path) -> None:
    hint = "gpujobs submit PROFILE"
    if not plan.scheduler.submit_folder:
        message = f"jobs of {plan.scheduler.name} cannot find their job folder"
        raise errors.InputError(message, hint=hint)
    if key := _key_with_ids(spec, plan):
        message = f"`{key}` needs the ids of other jobs, which a job folder does not have"
        raise errors.InputError(errors.Problem(message, spec.position(key), hint=hint))
    folders.private_folder(folder, "-o names a folder that you can write")
    with disk_errors(folder):
        if any(folder.iterdir()):
            raise errors.InputError(f"{folder} is not empty", hint="-o names a new folder")


def _key_with_ids(spec: ClusterSpec, plan: Plan) -> str:
    """Return the key of the profile that lets jobs wait for others, or ""."""
    if spec.profile.after:
        return "after"
    return "requeue" if plan.lifetime.attempts > 1 else ""


def _readme(record: ClusterRecord) -> str:
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)

    def command(words: Sequence[str]) -> str:
        return shlex.join([record.commands.get(words[0], words[0]), *words[1:]])

    submit = [
        f"    {command([*scheduler.submit_command(), *one.arguments])}"
        f" {scheduler.reads_script}{shlex.quote(one.script)}"
        for one in record.planned
    ]
    return _README.format(
        id=record.id,
        jobs=plural(sum(planned.count for planned in record.planned), "job"),
        site=record.site,
        version=__version__,
        submit="\n".join(submit),
        cancel=command(scheduler.cancel_command(["JOB"])),
    )


def submit_folder(folder: Path, ledger: Ledger) -> ClusterRecord:
    """Submit the scripts of a job folder as they are now. After a refusal it can be tried again.

    Of two commands at once, one submits. Raises NoSuchClusterError, InputError, RefusedError or
    UnavailableError.
    """
    with ledger.exclusive(ledger.get(f"{folder}/").id):
        return _submit_folder(folder, ledger)


def _submit_folder(folder: Path, ledger: Ledger) -> ClusterRecord:
    record = ledger.get(f"{folder}/")
    if record.submissions or record.intent or (record.path / "ended").exists():
        hint = "gpujobs render PROFILE -o FOLDER makes another one"
        raise errors.InputError(f"{folder} was submitted already", hint=hint)
    texts = [_script_text(record, planned) for planned in record.planned]
    client = client_of(record)
    others = client.find(record.id)  # those of a copy of the folder
    _make_key(record)
    for note in rates.copy(ledger, record.path):
        logger.warning("%s", note)
    with undoing(record, client, ledger, partial(_remove_key, record, ledger)):
        for planned, text in zip(record.planned, texts, strict=True):
            record = send_text(record, planned, text, client, ledger, others=others)
    return record


def files_of_folder(folder: Path) -> dict[str, Path]:
    """Return the files of a job folder by their names in it: those that `write_folder` has made.

    Raises NoSuchClusterError if it is another folder, and InputError if others can write it.
    """
    record = Ledger().get(f"{folder}/")
    own = {name: folder / name for name in (_PLAN, "README.md")}
    own |= {planned.script: _script_path(record, planned) for planned in record.planned}
    found = {name: path for name, path in own.items() if path.exists() and not path.is_symlink()}
    for name, path in folders.files_below(record.path):
        found[f"{record.id}/{name}"] = path
    return found


def folder_plan(record: ClusterRecord) -> JsonObject:
    """Return the output of `gpujobs plan --json` in a job folder; {} if it was removed."""
    return Folder(record.argument).read(_PLAN)


def _script_path(record: ClusterRecord, planned: Submission) -> Path:
    path = record.path.parent / planned.script
    if path.name != planned.script:
        raise errors.InputError(f"the script {planned.script} is not a file of the job folder")
    return path


def _script_text(record: ClusterRecord, planned: Submission) -> str:
    path = _script_path(record, planned)
    try:
        return read_file(path)
    except FileNotFoundError:
        raise errors.InputError(f"there is no {path}") from None
    except DamagedError as error:
        raise errors.InputError(str(error)) from None


def _make_key(record: ClusterRecord) -> None:
    if record.encrypted and not (record.path / CERTIFICATE).exists():
        with disk_errors(record.path):
            (record.path / KEY).unlink(missing_ok=True)  # of a command that was killed after it
            make_certificate(record.path)


def _remove_key(record: ClusterRecord, ledger: Ledger) -> None:
    """Make the folder as it was before, unless a job may have been accepted."""
    for name in (KEY, CERTIFICATE):
        (record.path / name).unlink(missing_ok=True)
    if not (record.path / "ended").exists():
        ledger.update(record.id, intent=None)
