"""Submit a planned cluster: make the folder, write the intent, submit, and undo all on failure."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .. import errors
from ..batch import process
from ..batch.client import SchedulerClient
from ..config.document import Document, Loc
from ..config.site import Site
from ..config.sitefiles import cluster_name
from ..config.spec import ClusterSpec, write_spec
from ..config.trust import check_modules
from ..injob.folder import EndKind
from ..injob.names import HEAD
from ..planning.plan import JobGroup, Machine, Plan, make_plan
from ..planning.render import AVOID_OPTION, Script, avoidance, cluster_folder, render
from ..planning.shape import occupied_nodes
from ..schedulers import JobId, get_scheduler
from ..text import did_you_mean, matches
from . import badnodes
from . import folder as folders
from .cleanup import space_problems
from .folder import disk_errors
from .ledger import ClusterRecord, GroupRecord, Ledger, Submission
from .monitor import client_of, record_submission, report_on
from .report import ClusterState
from .verdict import write_judge

# -- notes about site, `run` and image: mistakes that cost a wait in the queue ---------------------
_SHELL_WORD = re.compile(r"\d*(>>?|<<?|>&)[\w./&-]*|\|\|?|&&?|;")
_VARIABLE = re.compile(r"\$(\w|\{)")
_SHELLS = ("bash", "sh", "zsh", "dash", "ksh", "csh", "tcsh", "fish")


def run_notes(plan: Plan, folder: Path) -> Iterator[str]:
    """Yield notes about the command of ``plan``; ``folder``: that of the profile."""
    run = plan.profile.run
    if not run:
        return
    if Path(run[0]).name not in _SHELLS:
        yield from _shell_notes(run)
    workdir = Path(plan.workdir)
    script = script_of(run)
    if script and not (workdir / script).exists():
        yield _missing(script, workdir, folder)
    elif script == run[0] and plan.profile.run_on == "head":
        yield from _start_notes(script, workdir)


def image_notes(plan: Plan) -> Iterator[str]:
    """Yield a note for each image of a container that is not on this host."""
    containers = [jobs.container for jobs in plan.all_jobs if jobs.container]
    images = [one.image for one in containers if one.is_path and "$" not in one.image]
    for image in map(Path, dict.fromkeys(images)):
        if not image.expanduser().exists():
            there = image.expanduser()
            text = f"container: there is no image {there} on this host; the nodes need it"
            name = image.relative_to(plan.workdir) if image.is_relative_to(plan.workdir) else image
            yield f"{text}, or is it docker://{name}?" if ":" in image.name else text


def site_notes(site: Site) -> Iterator[str]:
    """Yield a note if the batch scheduler of this host belongs to another cluster than ``site``."""
    name = "" if site.cluster or not site.cluster_names else cluster_name(site.scheduler)
    if name and not any(matches(one, name) for one in site.cluster_names):
        yield f"this host's cluster is {name}, not {' or '.join(site.cluster_names)}"


def _start_notes(script: str, workdir: Path) -> Iterator[str]:
    """Yield a note if ``script``, which is there, cannot be started without naming `python`."""
    if not os.access(workdir / script, os.X_OK):
        yield f"warning: run: {script} is not executable; write run: [python, {script}]"
    elif "/" not in script:
        yield f"warning: run: PATH has no {script}; write run: [./{script}]"


def _shell_notes(run: tuple[str, ...]) -> Iterator[str]:
    for word in run:
        if _SHELL_WORD.fullmatch(word) or _VARIABLE.search(word):
            yield (
                f"run: no shell runs the command, so it gets `{word}` as it is; "
                "for a shell write run: [bash, -c, '…']"
            )
            return


def script_of(run: tuple[str, ...]) -> str:
    """Return the Python script of a command; "" if it has none."""
    if not run or run[0].endswith(".py"):
        return "".join(run[:1])
    if not Path(run[0]).name.startswith("python"):
        return ""
    # Of `-m module` and `-c code` the first word without a dash is not a script.
    first = next((word for word in run[1:] if not word.startswith("-")), "")
    return first if first.endswith(".py") and not {"-m", "-c"} & {*run[1:3]} else ""


def _missing(script: str, workdir: Path, beside: Path) -> str:
    note = f"warning: run: there is no file {script} in {workdir}"
    if (beside / script).exists():
        return f"{note}, but beside the profile: submit there, or set `workdir: {beside.resolve()}`"
    for above in workdir.parents:
        if (above / script).exists():
            return f"{note}, but in {above}: submit there, or set `workdir: {above}`"
    names = [path.name for path in (workdir / script).parent.glob("*.py")]
    return "; ".join(filter(None, (note, did_you_mean(Path(script).name, names))))


# -- `after` of a profile: another cluster that must have ended before -----------------------------
logger = logging.getLogger("gpujobs")


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
    if report.finished and (after.any_end or report.state is ClusterState.DONE):
        logger.info("%s has ended already", other.id)
        return None
    if report.finished:
        message = f"`after`: {other.id} is {report.state}: {report.reason}"
        raise _error(spec, message, hint=f"after: {other.id}:any starts all the same")
    if problem := _problem(record, other):
        raise _error(spec, f"`after`: {other.id} {problem}")
    return Predecessor(report.record, after.any_end)


def _problem(record: ClusterRecord, other: ClusterRecord) -> str:
    """Return why the jobs of ``record`` cannot wait for those of ``other``, or ""."""
    if other.owner != "cluster":
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


# -- from a specification to a plan and its scripts: everything before a submission ----------------
BASH = "/bin/bash"


def make_cluster_plan(
    spec: ClusterSpec, *, elastic: bool = False, devices: tuple[str, ...] | None = None
) -> Plan:
    """Return the plan of ``spec``; ``devices``: GPUs of this machine, None: the free ones."""
    texts: list[Loc] = [("environment", "setup")]
    texts += [("groups", name, "environment", "setup") for name in spec.profile.groups]
    if problems := list(bash_problems(spec.document, texts)):
        raise errors.InputError(problems)
    machine = machine_of(spec, devices)
    folder = Path(spec.document.position(("run",)).source).parent
    spec, own_modules = with_modules(spec, owned=elastic)
    plan = make_plan(spec, python=spec.python, machine=machine, elastic=elastic)
    problems_of_space = space_problems(Path(plan.root), spec.site.site.quota_command)
    space = (f"warning: {problem}" for problem in problems_of_space)
    own = (
        *site_notes(spec.site.site),
        *run_notes(plan, folder),
        *image_notes(plan),
        own_modules,
        *space,
    )
    return replace(plan, notes=(*plan.notes, *filter(None, own)))


def machine_of(
    spec: ClusterSpec, devices: tuple[str, ...] | None = None, used: tuple[str, ...] = ()
) -> Machine | None:
    """Return this machine if the site is local (see `this_machine`), else None."""
    site = spec.site.site
    if not get_scheduler(site.scheduler).on_this_machine:
        return None
    from .freequeues import this_machine

    machine = this_machine(devices, used)
    if site.one_machine:
        return machine
    queue = next(iter(site.queues.values()))  # made by `here`, of the job that this process is in
    return replace(machine, nodes=queue.nodes or 1)


def scripts_of(
    spec: ClusterSpec, plan: Plan, cluster_id: str, limit: int | None = None
) -> list[Script]:
    """Return the scripts of a cluster; ``limit`` is the largest size of an array."""
    return render(plan, cluster_id, limit=limit, site_folder=spec.site.path.parent)


def with_modules(spec: ClusterSpec, *, owned: bool = False) -> tuple[ClusterSpec, str]:
    """Return ``spec`` with the folder from which workers import, too, and a note about it.

    That is the first place in which Python looks for the modules of a program: the folder of the
    script in `run`, or if this process owns the cluster (``owned``), of its main script. Workers
    import from `workdir` in any case. A folder that all users can write is not used.
    """
    script = _main_script() if owned else script_of(spec.profile.run)
    folder = _folder_of(spec.workdir / script) if script else None
    if folder is None or not folder.is_dir() or _is_same(folder, spec.workdir):
        return replace(spec, modules=""), ""
    try:
        check_modules(folder)
    except errors.InputError as error:
        why = f"{error.problems[0].message}; `workdir` or PYTHONPATH may name it"
        return replace(spec, modules=""), f"own modules of {script}: {why}"
    note = "" if owned else f"workers also import modules from {folder}, the folder of {script}"
    return replace(spec, modules=str(folder)), note


def _is_same(folder: Path, workdir: Path) -> bool:
    return workdir.is_dir() and folder.samefile(workdir)


def _main_script() -> str:
    """Return the script that this process runs; "" in a notebook and with `python -m`."""
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if not script or main.__spec__ is not None:
        return ""
    installed = Path(script).parent == Path(sysconfig.get_path("scripts"))
    return "" if installed else str(script)


def _folder_of(script: Path) -> Path:
    """Return the folder from which Python imports: that of the target, if it is a link."""
    target = Path(os.path.realpath(script)) if script.is_symlink() else script
    return Path(os.path.abspath(target)).parent  # noqa: PTH100 - links to folders stay


def bash_problems(document: Document, places: Iterable[Loc]) -> Iterator[errors.Problem]:
    """Yield the syntax errors of the bash texts at ``places`` of a document."""
    for loc in places:
        text = document.value_at(loc)
        if isinstance(text, str) and (message := bash_error(text)):
            position = _line_inside(document.position(loc), message)
            name = ".".join(map(str, loc))
            yield errors.Problem(f"`{name}`: bash -n refuses it: {message}", position)


def bash_error(text: str) -> str:
    """Return the first error of ``bash -n`` in ``text``; "" if it is correct, or without bash."""
    # It does not execute `shopt -s extglob`, and so has the option from the beginning.
    result = process.run([BASH, "-O", "extglob", "-n"], stdin=text)
    if not result.started or (result.exit_code == 0 and not result.stderr):
        return ""
    return result.first_line.removeprefix(f"{BASH}: ")


def _line_inside(position: errors.Position, message: str) -> errors.Position:
    """Return the line of the file that bash means, if the text is a block of lines."""
    found = re.match(r"line (\d+):", message)
    if not found or not position.text.split("#")[0].rstrip().endswith("|"):
        return position
    return replace(position, line=position.line + int(found[1]), column=1, text="")


# -- submit a planned cluster ----------------------------------------------------------------------
FAILED = 70
"""EX_SOFTWARE: the cluster ended without running the user's command to its end."""
UNDO_TIMEOUT = 10.0
"""Seconds for which undoing a failed submission waits for the batch scheduler."""


def submit(spec: ClusterSpec, plan: Plan, ledger: Ledger) -> ClusterRecord:
    """Submit a whole cluster. After a failure no job, folder or record of it is left.

    Raises RefusedError in the batch scheduler's words, or UnavailableError.
    """
    cluster_id = ledger.new_id(plan.name)
    record = new_record(plan, cluster_id)
    before = find_predecessor(spec, record, ledger)
    client = client_of(record)
    plan = with_avoided(plan, client, ledger, cluster_id)
    record = replace(record, notes=plan.notes)
    limit = array_limit(plan, client, max(group.shape.jobs for group in plan.groups))
    scripts = scripts_of(spec, plan, cluster_id, limit)
    make_folder(spec, record, encrypted=record.encrypted)
    try:
        record = before.note(record) if before else record
        ledger.add(record)
    except BaseException:
        folders.remove(record.path)
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
            write_judge(record.path)
    except BaseException:
        folders.remove(record.path)
        raise


def _remove(record: ClusterRecord, ledger: Ledger) -> None:
    ledger.remove(record.id)
    folders.remove(record.path)


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
    known = [submission.id for submission in record.submissions]
    before = (sent.id for sent in record.submissions if sent.attempt == intent.attempt - 1)
    record = ledger.begin_submission(record.id, replace(intent, time=client.system.time()))
    try:
        client = replace(client, arguments=intent.arguments)
        submission_id = client.submit(text, record.id, [*known, *others], folder, [*after, *before])
    except errors.RefusedError as error:
        ledger.update(record.id, intent=None)
        raise _refusal(error, intent.group, record.contact) from None
    return record_submission(record, submission_id, ledger, client)


def _refusal(error: errors.RefusedError, group: str, contact: str | None) -> errors.RefusedError:
    """Return the error with the group whose jobs were refused, and the site's contact."""
    message, hint = str(error.args[0]), error.hint
    if group not in ("", HEAD):
        message = f"group {group}: {message}"
    if contact and not hint:
        hint = f"contact for questions: {contact}"
    return errors.RefusedError(message, hint=hint)


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
    charge = group.site.queues[group.queue_key].charge
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
        charge=charge.per_gpu_hour if charge else 0.0,
        charge_unit=charge.unit if charge else "",
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
    written = plan.scheduler.avoid(list(bad)) or AVOID_OPTION in plan.site.options
    if not bad or not written:
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
