"""Commands that take a profile: submit, plan, render, explain."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import GpujobsError, InputError, RefusedError, UnavailableError
from ..schedulers import JobId
from ..text import plural
from . import live, options
from .live import echo, progress

if TYPE_CHECKING:
    from ..clusters.ledger import ClusterRecord, Submission
    from ..config.spec import ClusterSpec
    from ..planning.plan import Plan


@click.command()
@options.profile_options
@options.former_option("--dry-run", "use `gpujobs render PROFILE`", is_flag=True)
@click.option(
    "--wait",
    "wait_for_end",
    is_flag=True,
    help="Wait until `run` has ended; without `run`, until all workers are connected.",
)
@options.after_option
@options.json_option
def submit(spec: ClusterSpec, wait_for_end: bool, after: str | None, as_json: bool) -> None:
    """Submit the cluster that PROFILE describes; print its id."""
    if after is not None:
        spec = options.with_after(spec, after)
    from ..clusters import handle, submit

    plan = submit.make_cluster_plan(spec)
    _write_notes(plan)
    cluster = handle.submit_planned(spec, plan)
    problem = _print_submitted(plan, cluster.record, as_json)
    if wait_for_end:
        from . import status

        status.wait_for_cluster(cluster)
    else:
        for command in ("status", "logs -f", "cancel"):
            progress.write(f"  gpujobs {command} {cluster.id}")
    if problem:
        raise GpujobsError(problem)


@click.command()
@options.profile_options
@click.option("--job", "number", type=click.IntRange(0), help="Print only this script, from 0.")
def render(spec: ClusterSpec, number: int | None) -> None:
    """Print the batch scripts of PROFILE, all or only one. Submits nothing."""
    from ..clusters import submit

    plan = submit.make_cluster_plan(spec)
    scripts = submit.scripts_of(spec, plan, _example_id(plan))
    if number is not None and number >= len(scripts):
        raise InputError(f"there are {len(scripts)} scripts, numbered from 0")
    _write_notes(plan)
    progress.write(_submit_text(spec, plan))
    for script in scripts:
        if number is None or script is scripts[number]:
            click.echo(script.text, nl=False)


@click.command()
@options.profile_options
@options.json_option
@click.option(
    "--estimate",
    "with_estimate",
    is_flag=True,
    help="Query the batch scheduler for the start of the first job.",
)
def plan(spec: ClusterSpec, as_json: bool, with_estimate: bool) -> None:
    """Print the jobs of PROFILE and check limits.

    Submits nothing. An error names the line of the profile and the limit of the site.
    """
    from ..clusters import submit
    from . import plan_text

    plan = submit.make_cluster_plan(spec)
    cluster_id = _example_id(plan)
    start: str | None = None
    failure: GpujobsError | None = None
    try:
        start = _estimate(spec, plan) if with_estimate else None
    except (RefusedError, UnavailableError) as error:
        failure = error  # the plan is printed first
    if as_json:
        document = {**plan_text.plan_json(plan, cluster_id), "estimated_start": start}
        echo(json.dumps(document, indent=1))
    else:
        echo(plan_text.plan_text(plan, cluster_id))
    if failure:
        raise failure
    if with_estimate and not as_json:
        echo(f"start: {start or f'{plan.scheduler.name} gives no estimate'}")


@click.command()
@options.profile_argument
@click.argument("key")
@options.site_option
@options.settings_option
@options.json_option
def explain(
    profile: Path, key: str, site: str | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Explain the value of KEY in PROFILE: who set it, and which limit applies.

    Prints the value, where it was set, the values that it overrides, and the limits of the site.
    """
    from ..clusters import submit
    from ..config import spec
    from ..planning import explain
    from . import plan_text

    document = spec.settings_document(settings)
    loaded = spec.load_spec(profile, site=site, settings=document)
    plan, invalid = None, None
    try:
        plan = submit.make_cluster_plan(loaded)
    except InputError as error:
        invalid = error  # the explanation is printed first
    explained = explain.explain(loaded, plan, key, profile=profile, site=site, settings=settings)
    if as_json:
        echo(json.dumps(plan_text.explanation_json(explained), indent=1))
    else:
        echo(plan_text.explanation_text(explained))
    if invalid:
        raise invalid


def _example_id(plan: Plan) -> str:
    """Return an id of the form that `submit` chooses, always the same for one plan."""
    return f"{plan.name}-0000"


def _estimate(spec: ClusterSpec, plan: Plan) -> str | None:
    from ..clusters import submit

    return submit.estimate(spec, plan)


def _submit_text(spec: ClusterSpec, plan: Plan) -> str:
    """Return the command to which each script is passed."""
    command, *arguments = plan.scheduler.submit_command()
    words = [spec.site.site.commands.get(command, command), *arguments]
    folder = f"{plan.root}/{_example_id(plan)}"
    return f"submit command: {shlex.join(words)} < SCRIPT, in {folder}"


def _print_submitted(plan: Plan, record: ClusterRecord, as_json: bool) -> str:
    """Print what was submitted; return why the id is not on stdout, or ""."""
    problem, text = "", record.id
    if as_json:
        from . import plan_text

        text = json.dumps(plan_text.submitted_json(plan, record), indent=1)
    try:
        echo(text)  # flushed: a script that reads the id need not wait for `--wait`
    except OSError as error:
        live.discard_output()
        problem = f"{record.id} is submitted, but its id could not be printed: {error.strerror}"
        progress.write(problem)
    jobs = plural(sum(submission.count for submission in record.submissions), "job")
    ids = ", ".join(_id_text(plan, submission) for submission in record.submissions)
    progress.write(f"{jobs} submitted to {plan.scheduler.name} on site {plan.site_name}: {ids}")
    return problem


def _id_text(plan: Plan, submission: Submission) -> str:
    kind = "job" if submission.count == 1 else "job array"
    return f"{kind} {plan.scheduler.show_id(JobId(submission.id))}"


def _write_notes(plan: Plan) -> None:
    for note in plan.notes:
        progress.write(note)
