"""Commands that take a profile: submit, plan, render."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import GpujobsError, InputError, JobFailedError, RefusedError, UnavailableError
from ..schedulers import JobId, get_scheduler
from ..text import plural
from . import live, shared
from .live import columns, echo, progress, show

if TYPE_CHECKING:
    from ..clusters.handle import ClusterHandle
    from ..clusters.ledger import ClusterRecord, Submission
    from ..config.document import Document
    from ..config.spec import ClusterSpec
    from ..planning.plan import Plan
    from ..schedulers import Scheduler

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end `run --here`: Ctrl-C, of the batch scheduler, and the end of the terminal."""


@click.command()
@partial(shared.profile_options, folders=True)
@shared.former_option("--dry-run", "use `gpujobs render PROFILE`", is_flag=True)
@shared.flag(
    "--wait",
    "wait_for_end",
    help="Wait until `run` has ended; without `run`, until all workers are connected.",
)
@click.option(
    "--upload",
    "uploads",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="With --host: copy this file, or the content of this folder, and run there.",
)
@shared.after_option
@shared.json_option
@click.option("--of", "batch_schedulers", multiple=True, hidden=True)
def submit(
    spec: ClusterSpec | Path,
    wait_for_end: bool,
    uploads: tuple[Path, ...],
    after: str | None,
    as_json: bool,
    batch_schedulers: tuple[str, ...],
) -> None:
    """Submit the cluster that PROFILE describes; print its id.

    PROFILE may also be a folder that `gpujobs render -o` wrote.
    """
    from ..clusters import handle, prepare

    plan = None
    if isinstance(spec, Path):
        cluster = _submit_folder(spec, after, uploads)
    else:
        spec.check_batch_scheduler(batch_schedulers)
        spec = spec if after is None else shared.with_after(spec, after)
        with _uploaded(spec, uploads) as spec:
            plan = prepare.make_cluster_plan(spec)
            _write_notes(plan)
            cluster = handle.submit_planned(spec, plan)
    problem = _print_submitted(plan, cluster.record, as_json)
    name = cluster.record.argument
    if wait_for_end:
        from . import status

        try:
            status.wait_for_cluster(cluster)
        except KeyboardInterrupt:
            progress.write(
                f"the cluster continues; to follow it: gpujobs logs -f {name}, "
                f"to end it: gpujobs cancel {name}"
            )
            raise
    else:
        for command in ("status", "logs -f", "cancel"):
            progress.write(f"  gpujobs {command} {name}")
    if problem:
        raise GpujobsError(problem)


@contextlib.contextmanager
def _uploaded(spec: ClusterSpec, uploads: tuple[Path, ...]) -> Iterator[ClusterSpec]:
    """Yield ``spec``, with uploaded files in its `workdir`; remove them after an error."""
    if not uploads:
        yield spec
        return
    from ..clusters.clusterfolder import discard
    from . import laptop

    folder = laptop.place_upload(spec)
    try:
        yield replace(spec, workdir=folder / (spec.profile.workdir or ""))
    except BaseException:
        discard(folder)
        raise


def _submit_folder(folder: Path, after: str | None, uploads: tuple[Path, ...]) -> ClusterHandle:
    from ..clusters import handle, submit

    if after is not None or uploads:
        raise InputError("--after and --upload need a profile")
    ledger = shared.open_ledger()
    return handle.ClusterHandle(submit.submit_folder(folder, ledger).id, ledger)


@click.command()
@click.argument("words", nargs=-1, metavar="[PROFILE] [-- COMMAND...]")
@shared.site_option
@shared.settings_option
@shared.flag("--here", "inside", help="In the job of this shell; submit nothing.")
@click.option("--machines", metavar="HOST,…", help="On these machines by ssh, in no job.")
def run(
    words: tuple[str, ...],
    site: str | None,
    settings: Document,
    inside: bool,
    machines: str | None,
) -> None:
    """Start a cluster in this job, run a command in it, and end it.

    On all nodes and GPUs of the job: inside salloc, qsub -I, bsub -Is or an own batch script. With
    --machines: in no job, on the free GPUs of these machines. COMMAND replaces `run` of PROFILE,
    which ends in .yaml. Exits with the code of the command.
    """
    if not inside:
        hint = "`gpujobs submit PROFILE --wait` submits jobs and waits for the command"
        raise InputError("run needs --here: it starts a cluster in this job", hint=hint)
    from ..clusters import here, prepare
    from ..clusters.machines import machine_names, spec_on_machines

    if machines is None:
        _enter_job()
    profile, base, name = _profile_of(list(words), settings)
    if machines is None:
        found, devices, note = here.cluster_here(profile, site=site, base=base, name=name)
        plan = prepare.make_cluster_plan(found, devices=devices)
        progress.write(note)
    else:
        names = machine_names(machines)
        found = spec_on_machines(profile, names, site=site, base=base, name=name)
        plan = prepare.make_cluster_plan(found)
    _write_notes(plan)
    _run_to_end(found, plan)


def _enter_job() -> None:
    """On a login node, go on in a step of the job of this shell: this process is replaced."""
    from ..batch import process
    from ..clusters import here

    job = here.find_job()
    if not job.granted.on_node:
        process.become(here.enter_words(job), [sys.executable, "-m", "gpujobs", *sys.argv[1:]])


def _profile_of(words: list[str], settings: Document) -> tuple[Document, Path | None, str]:
    """Return the profile of ``[PROFILE] [COMMAND...]``, the folder of its file, and its name."""
    from ..config import spec
    from ..config.document import Document, read

    base, name, profile = None, "here", Document({})
    if words and words[0].endswith((".yaml", ".yml")):
        path = Path(words.pop(0))
        base, name, profile = path.parent, spec.default_name(path.stem), read(path)
    if words:
        settings = settings.over(Document({"run": words}, source="the command"))
    own = spec.laid_over(settings, profile)
    if not own.value.get("run"):
        raise InputError("there is no command to run", hint="gpujobs run --here -- python train.py")
    return own, base, name


def _run_to_end(spec: ClusterSpec, plan: Plan) -> None:
    """Start a cluster, and follow it; it ends with this process. Exits with the code of `run`."""
    from ..clusters import handle
    from . import status

    def stop(number: int, frame: object) -> None:
        for other in _STOPS:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in _STOPS:
        signal.signal(number, stop)
    cluster = handle.submit_planned(spec, plan)
    try:
        status.wait_for_cluster(cluster, write=echo)
    except JobFailedError as error:
        progress.write(f"error: {error}")
        sys.exit(error.code or error.exit_code)
    except BaseException:
        cluster.cancel()
        raise


@click.command()
@shared.profile_options
@click.option("--job", "number", type=click.IntRange(0), help="Print only this script, from 0.")
@shared.flag("--here", help="Print lines for an own batch script instead.")
@shared.output_option(
    "Write a folder that sbatch, qsub, bsub or `gpujobs submit` submits.", "folder"
)
def render(spec: ClusterSpec, number: int | None, here: bool, folder: Path | None) -> None:
    """Print the batch scripts of PROFILE, all or only one. Submits nothing."""
    from ..clusters import prepare

    if (number is not None) + here + (folder is not None) > 1:
        raise InputError("--job, --here and -o exclude each other")
    if here:
        _print_own_script(spec)
        return
    plan = prepare.make_cluster_plan(spec)
    _write_notes(plan)
    if folder is None:
        _print_scripts(spec, plan, number)
    else:
        _write_folder(spec, plan, folder)


def _print_scripts(spec: ClusterSpec, plan: Plan, number: int | None) -> None:
    from ..clusters import prepare

    scripts = prepare.scripts_of(spec, plan, _example_id(plan))
    if number is not None and number >= len(scripts):
        raise InputError(
            f"--job {number}: there is {plural(len(scripts), 'script')}, numbered from 0"
        )
    command, *arguments = plan.scheduler.submit_command()
    words = [spec.site.site.commands.get(command, command), *arguments]
    folder = f"{plan.root}/{_example_id(plan)}"
    progress.write(f"submit command: {shlex.join(words)} < SCRIPT, in {folder}")
    for script in scripts:
        if number is None or script is scripts[number]:
            click.echo(script.text, nl=False)


def _write_folder(spec: ClusterSpec, plan: Plan, folder: Path) -> None:
    from ..clusters import submit
    from . import plan_text

    cluster_id = shared.open_ledger().new_id(plan.name)
    submit.write_folder(spec, plan, folder, plan_text.plan_json(plan, cluster_id), cluster_id)
    progress.write(f"{folder}/README.md says how to submit the cluster {cluster_id}")
    echo(str(folder))


def _print_own_script(spec: ClusterSpec) -> None:
    """Print the directives of one job with all GPUs, and the command, for an own batch script."""
    from ..clusters import prepare
    from ..config.document import Document
    from ..config.spec import with_settings

    if not get_scheduler(spec.site.site.scheduler).on_this_machine:
        spec = with_settings(spec, Document({"layout": "allocation"}))
        plan = prepare.make_cluster_plan(spec)
        text = prepare.scripts_of(spec, plan, _example_id(plan))[0].text
        # Names and logs are those of a cluster; a signal would end the user's shell.
        unwanted = f"{_example_id(plan)}|/logs/|--signal|-notify"
        lines = (line for line in text.splitlines() if not re.search(unwanted, line))
        echo("\n".join(line for line in lines if line.startswith(plan.scheduler.prefix)))
    profile = click.get_current_context().params["profile"]
    echo(shlex.join(["gpujobs", "run", "--here", str(profile)]))


@click.command()
@shared.profile_options
@shared.json_option
@shared.flag(
    "--estimate", "with_estimate", help="Query the batch scheduler for the start of the first job."
)
@shared.flag("--verbose", help="Also print the values of profile and site with their origins.")
def plan(spec: ClusterSpec, as_json: bool, with_estimate: bool, verbose: bool) -> None:
    """Print the jobs of PROFILE and check limits.

    Submits nothing. An error names the line of the profile and the limit of the site.
    """
    from ..clusters import prepare
    from . import plan_text

    if as_json and verbose:
        raise InputError("--json and --verbose exclude each other")
    plan = prepare.make_cluster_plan(spec)
    cluster_id = _example_id(plan)
    start: str | None = None
    failure: GpujobsError | None = None
    try:
        if with_estimate:
            from ..clusters import submit

            start = submit.estimate(spec, plan)
    except (RefusedError, UnavailableError) as error:
        failure = error  # the plan is printed first
    show(
        as_json,
        lambda: {**plan_text.plan_json(plan, cluster_id), "estimated_start": start},
        lambda: plan_text.plan_text(plan, cluster_id, columns()),
    )
    if verbose:
        echo(f"\n{plan_text.origins_text(spec, plan)}")
    if failure:
        raise failure
    if with_estimate and not as_json:
        echo(f"start: {start or f'{plan.scheduler.name} gives no estimate'}")


@click.command(hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def explain(words: tuple[str, ...]) -> None:
    """Refuse a command that does not exist any more."""
    raise click.UsageError("explain does not exist any more: use `gpujobs plan PROFILE --verbose`")


def _example_id(plan: Plan) -> str:
    """Return an id of the form that `submit` chooses, always the same for one plan."""
    return f"{plan.name}-0000"


def _print_submitted(plan: Plan | None, record: ClusterRecord, as_json: bool) -> str:
    """Print what was submitted, without a plan a job folder; return why not on stdout, or ""."""
    problem, text = "", record.argument
    if as_json:
        from ..clusters import submit
        from . import plan_text

        planned = plan_text.plan_json(plan, record.id) if plan else submit.folder_plan(record)
        text = json.dumps(plan_text.submitted_json(planned, record), indent=1)
    try:
        echo(text)  # flushed: a script that reads the id need not wait for `--wait`
    except OSError as error:
        live.discard_output()
        problem = f"{record.id} is submitted, but its id could not be printed: {error.strerror}"
        progress.write(problem)
    jobs = plural(sum(submission.count for submission in record.submissions), "job")
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)
    ids = ", ".join(_id_text(scheduler, submission) for submission in record.submissions)
    progress.write(f"{jobs} submitted to {scheduler.name} on site {record.site}: {ids}")
    return problem


def _id_text(scheduler: Scheduler, submission: Submission) -> str:
    kind = "job" if submission.count == 1 else "job array"
    return f"{kind} {scheduler.show_id(JobId(submission.id))}"


def _write_notes(plan: Plan) -> None:
    for note in plan.notes:
        progress.write(note)
