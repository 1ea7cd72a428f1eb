"""The command ``gpujobs``. Data goes to stdout, messages to stderr.

Modules that take long to import are imported inside the commands that use them: ``--version`` and
``render`` must not import dask.
"""

from __future__ import annotations

import os
import sys

import click

from ..errors import GpujobsError
from ..version import __version__
from . import cluster_commands, messages, profile_commands, site_commands

<<<<<<< HEAD
# pydantic would search all installed packages for plugins: a tenth of the start-up time.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
=======
if TYPE_CHECKING:
    from ..clusters.ledger import Ledger
    from ..clusters.report import ClusterReport
    from ..config.spec import ClusterSpec

F = Callable[..., Any]
>>>>>>> core


class ErrorHandlingGroup(click.Group):
    """Turns exceptions of commands into one message and an exit code."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; exit with the code of the error if it fails."""
        messages.install_handler()
        try:
            return super().invoke(ctx)
        except GpujobsError as error:
            messages.progress.write(f"error: {error}")
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:  # for example `gpujobs status | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_BROKEN_PIPE)
        except OSError as error:  # for example a folder that was removed, or is not readable
            messages.progress.write(f"error: {error}")
            sys.exit(1)


@click.group(cls=ErrorHandlingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpujobs")
def main() -> None:
    """Dask on the GPUs of a batch cluster.

    \b
    gpujobs submit profile.yaml     start a cluster and its command
    gpujobs status                  show the state of my clusters
    gpujobs logs ID                 print the output of the command
    gpujobs connect ID              show how to connect from Python
    gpujobs cancel ID               end a cluster
    """


<<<<<<< HEAD
=======
def _profile_options(command: F) -> F:
    for decorate in (
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change a key, as in workers.memory=40GiB.",
        ),
        click.option(
            "--site",
            shell_complete=_complete_sites,
            help="Name of a site, or a site file; wins over the profile's.",
        ),
        click.argument("profile", type=click.Path(path_type=Path)),
    ):
        command = decorate(command)
    return command


def _cluster_argument(command: F) -> F:
    return click.argument("cluster", metavar="ID", shell_complete=_complete_clusters)(command)


def _complete_sites(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from ..config.sitefiles import site_paths

    return [name for name in site_paths() if name.startswith(incomplete)]


def _complete_clusters(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [record.id for record in _ledger().all() if record.id.startswith(incomplete)]


@main.command()
@_profile_options
@click.option(
    "--dry-run", is_flag=True, help="Print the scripts that would be submitted, and submit nothing."
)
@click.option(
    "--wait",
    is_flag=True,
    help="Stay until the cluster's command has ended (without one: until all workers are there).",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was submitted as JSON.")
def submit(
    profile: Path,
    site: str | None,
    settings: tuple[str, ...],
    dry_run: bool,
    wait: bool,
    as_json: bool,
) -> None:
    """Submit the cluster that PROFILE describes; print its id."""
    from .. import text as text
    from ..clusters import submit as submission
    from ..clusters.prepare import make_cluster_plan
    from . import plan_text as planview

    spec = _make_spec(profile, site, settings)
    if dry_run:
        _print_scripts(spec, None)
        return
    plan = make_cluster_plan(spec)
    for note in plan.notes:
        _tell(note)
    ledger = _ledger()
    record = submission.submit(spec, plan, ledger, _tell)
    if as_json:
        submissions = [
            {"id": item.id, "first": item.first, "count": item.count} for item in record.submissions
        ]
        value = {
            "version": 1,
            **planview.plan_json(plan, record.id),
            "folder": record.folder,
            "submissions": submissions,
        }
        click.echo(json.dumps(value, indent=1))
    else:
        click.echo(record.id)
        sys.stdout.flush()
    numbers = ", ".join(item.id for item in record.submissions)
    jobs = text.plural(sum(item.count for item in record.submissions), "job")
    _tell(f"{jobs} submitted to {plan.scheduler.name} on site {plan.site_name} ({numbers})")
    if wait:
        from .wait import wait as stay

        stay(record, ledger)
    else:
        _tell(
            f"gpujobs status {record.id}   |   gpujobs logs -f {record.id}   |   gpujobs cancel {record.id}"
        )


@main.command()
@_profile_options
@click.option("--job", type=click.IntRange(0), help="Only the N-th script.")
def render(profile: Path, site: str | None, settings: tuple[str, ...], job: int | None) -> None:
    """Print the batch scripts of PROFILE."""
    _print_scripts(_make_spec(profile, site, settings), job)


@main.command()
@_profile_options
@click.option("--json", "as_json", is_flag=True, help="For programs: worker_names, jobs, gpus, …")
@click.option(
    "--estimate", is_flag=True, help="Ask the batch scheduler when the first job would start."
)
def plan(
    profile: Path, site: str | None, settings: tuple[str, ...], as_json: bool, estimate: bool
) -> None:
    """Print what PROFILE asks for and whether the site's limits allow it; submit nothing."""
    from ..clusters.prepare import make_cluster_plan
    from . import plan_text as planview

    spec = _make_spec(profile, site, settings)
    made = make_cluster_plan(spec)
    cluster = f"{made.name}-0000"
    starts = None
    if estimate:
        from ..clusters.submit import estimate as ask

        starts = ask(spec, made, _tell)
    if as_json:
        click.echo(
            json.dumps({**planview.plan_json(made, cluster), "estimated_start": starts}, indent=1)
        )
        return
    click.echo(planview.plan_text(made, cluster))
    if estimate:
        click.echo(f"start: {starts or f'{made.scheduler.name} gives no estimate'}")


@main.command()
@click.argument("clusters", nargs=-1, metavar="[ID]...", shell_complete=_complete_clusters)
@click.option("--all", "everything", is_flag=True, help="Also clusters that have ended.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--watch", is_flag=True, help="Show it again every few seconds.")
def status(clusters: tuple[str, ...], everything: bool, as_json: bool, watch: bool) -> None:
    """Say what clusters are doing: those named, or my living ones."""
    from ..clusters.monitor import look

    ledger = _ledger()
    while True:
        records = [ledger.get(name) for name in clusters] or [
            r for r in ledger.all(_tell) if everything or not r.finished
        ]
        views = list(look(records, ledger, _tell))
        if not clusters and not everything:
            views = [view for view in views if view.active or not view.over]
        if watch and sys.stdout.isatty() and not as_json:
            click.clear()
        _print_status(views, bool(clusters), as_json)
        if not watch or (clusters and all(view.over and not view.active for view in views)):
            return
        time.sleep(max([record.poll for record in records] or [5]))


@main.command()
@_cluster_argument
@click.option(
    "--worker", metavar="NAME", help="The log of a worker's job instead of the command's output."
)
@click.option("--all", "everything", is_flag=True, help="All logs of the cluster.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the cluster has ended.")
def logs(cluster: str, worker: str | None, everything: bool, follow: bool) -> None:
    """Print the output of the cluster's command."""
    from ..clusters import logs as reader
    from ..clusters.monitor import ClusterWatcher

    ledger = _ledger()
    record = ledger.get(cluster)
    paths = reader.choose(record, worker, everything, _tell)
    if not any(path.exists() for path in paths()):
        _tell(f"there is no output yet; gpujobs status {cluster} says why")
    watch = ClusterWatcher(record, ledger, _tell)
    for line in reader.lines(
        paths, everything, lambda: not follow or record.finished or watch.look().over
    ):
        click.echo(line)


@main.command()
@click.argument("clusters", nargs=-1, metavar="[ID]...", shell_complete=_complete_clusters)
@click.option("--all", "everything", is_flag=True, help="All my living clusters.")
@click.option("--orphans", is_flag=True, help="Clusters whose Python process is gone.")
def cancel(clusters: tuple[str, ...], everything: bool, orphans: bool) -> None:
    """End clusters: their jobs are removed from the queue."""
    from ..clusters.monitor import cancel as end
    from ..clusters.monitor import orphaned

    ledger = _ledger()
    if not clusters and not everything and not orphans:
        raise InputError(
            "name the clusters to cancel, or --all", hint="`gpujobs status` lists them"
        )
    records = [ledger.get(name) for name in clusters] or [
        record for record in ledger.all(_tell) if not record.finished
    ]
    if orphans:
        records = [record for record in records if orphaned(record)]
        if not records:
            _tell("no orphans")
    failed: GpujobsError | None = None
    for record in records:
        try:
            end(record, _tell)
        except GpujobsError as error:  # the others are to be ended all the same
            if failed is not None:
                _tell(f"error: {failed}")
            failed = error
            continue
        _tell(
            f"{record.id} is cancelled" if not record.finished else f"{record.id} had ended already"
        )
    if failed is not None:
        raise failed


@main.command()
@_cluster_argument
@click.argument("workers", type=click.IntRange(0))
def scale(cluster: str, workers: int) -> None:
    """Ask for WORKERS workers of a running cluster, more or fewer than it has."""
    from ..clusters import scale as scaling

    ledger = _ledger()
    scaling.scale(ledger.get(cluster), workers, ledger, _tell)


@main.command()
@_cluster_argument
@click.option(
    "--env",
    "as_env",
    is_flag=True,
    help='Print lines for a shell: eval "$(gpujobs connect ID --env)".',
)
def connect(cluster: str, as_env: bool) -> None:
    """Print how to connect to a running cluster."""
    from ..clusters import connect as connection

    record = _ledger().get(cluster)
    click.echo(connection.environment_lines(record) if as_env else connection.text(record))


@main.command()
@click.option("--site", help="Name of a site, or a site file.")
@click.option("--run", is_flag=True, help="Also submit a small job, and look from inside it.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A key of that job, as in account=p1.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(site: str | None, run: bool, settings: tuple[str, ...], as_json: bool) -> None:
    """Check that a site does what its file says: commands, folders, versions, GPUs, network."""
    from ..config.spec import make_spec, settings_document
    from ..doctor import checks as checks

    document = settings_document(settings)
    diagnostics = list(checks.here(make_spec(document, site=site).site))
    if run and not any(finding.state == checks.FAILED for finding in diagnostics):
        diagnostics += checks.in_a_job(site, settings, _ledger(), _tell)
    click.echo(
        json.dumps(checks.as_json(diagnostics), indent=1) if as_json else checks.text(diagnostics)
    )
    if any(finding.state == checks.FAILED for finding in diagnostics):
        sys.exit(1)


@main.group()
def sites() -> None:
    """Look at the sites that gpujobs knows."""


@sites.command("list")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def sites_list(as_json: bool) -> None:
    """List the sites and where their files are."""
    from ..config.sitefiles import load_site, site_paths
    from ..text import table

    found: list[tuple[str, str, str, str]] = []
    for name, path in site_paths().items():
        try:
            site = load_site(str(path)).site
            found.append((name, site.scheduler, str(path), site.description))
        except InputError as error:
            found.append((name, "?", str(path), f"error: {str(error).splitlines()[0]}"))
    if as_json:
        keys = ("name", "scheduler", "path", "description")
        click.echo(
            json.dumps(
                {"version": 1, "sites": [dict(zip(keys, row, strict=True)) for row in found]},
                indent=1,
            )
        )
    else:
        click.echo(table(("SITE", "SCHEDULER", "FILE", "DESCRIPTION"), found))


@sites.command("show")
@click.argument("site", shell_complete=_complete_sites)
def sites_show(site: str) -> None:
    """Print a site's file, and whether it is right."""
    from ..config.sitefiles import load_site

    loaded = load_site(site)
    click.echo(loaded.path.read_text(), nl=False)
    _tell(f"{loaded.path}: site {loaded.name} is right")


@main.command()
@click.argument("what", type=click.Choice(["profile", "site"]))
def schema(what: str) -> None:
    """Print the JSON Schema of profiles or of site files, for editors."""
    from ..config.model import json_schema
    from ..config.profile import Profile
    from ..config.site import Site

    model = Profile if what == "profile" else Site
    click.echo(json.dumps(json_schema(model), indent=1))


>>>>>>> core
@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    Append it to the start-up file of SHELL, for example ~/.bashrc.
    """
    from click import shell_completion

    if completion_class := shell_completion.get_completion_class(shell):
        click.echo(completion_class(main, {}, "gpujobs", "_GPUJOBS_COMPLETE").source())


<<<<<<< HEAD
for command in (
    profile_commands.submit,
    profile_commands.plan,
    profile_commands.render,
    cluster_commands.status,
    cluster_commands.logs,
    cluster_commands.connect,
    cluster_commands.scale,
    cluster_commands.cancel,
    site_commands.doctor,
    site_commands.sites,
    site_commands.schema,
):
    main.add_command(command)
=======
# -- what the commands share ---------------------------------------------------------------------------------
def _tell(text: str) -> None:
    click.echo(text, err=True)


def _ledger() -> Ledger:
    from ..clusters.ledger import Ledger

    return Ledger()


def _make_spec(profile: Path, site: str | None, settings: tuple[str, ...]) -> ClusterSpec:
    from ..config.spec import load_spec

    return load_spec(profile, site=site, settings=settings)


def _print_scripts(spec: ClusterSpec, number: int | None) -> None:
    from ..clusters.prepare import make_cluster_plan, scripts_of

    made = make_cluster_plan(spec)
    scripts = scripts_of(spec, made, f"{made.name}-0000")
    if number is not None and number >= len(scripts):
        raise InputError(f"there are {len(scripts)} scripts, numbered from 0")
    for note in made.notes:
        _tell(note)
    for script in scripts if number is None else [scripts[number]]:
        click.echo(script.text, nl=False)


def _print_status(views: list[ClusterReport], in_full: bool, as_json: bool) -> None:
    from ..clusters import folder
    from . import display

    if as_json:
        click.echo(
            json.dumps(
                {"version": 1, "clusters": [display.status_json(view) for view in views]}, indent=1
            )
        )
    elif in_full:
        for view in views:
            failed = [job for job in view.jobs if job.state.value in ("FAILED", "OUT_OF_MEMORY")][
                :2
            ]
            tails = {
                job.number: folder.tail(view.record.path / "logs" / f"job-{job.number}.log")
                for job in failed
            }
            click.echo(display.status_text(view, tails))
    elif views:
        click.echo(display.status_table(views))
    else:
        _tell("no living clusters; `gpujobs status --all` lists those that have ended")
>>>>>>> core
