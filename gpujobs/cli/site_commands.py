"""Commands about sites and queues: doctor, sites, schema, queues."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import InputError, UnavailableError
from ..text import plural, table
from . import shared
from .live import columns, echo, progress, show

if TYPE_CHECKING:
    from ..config.document import Document
    from ..config.spec import ClusterSpec
    from ..doctor.checks import Check
    from ..doctor.sitereport import SiteReport


# -- sites init ------------------------------------------------------------------------------------
@click.command("init")
@click.option(
    "--scheduler", "name", metavar="NAME", help="The batch scheduler; default: the one found here."
)
@shared.output_option("A new file; default: standard output.")
def init_site(name: str | None, output: Path | None) -> None:
    """Draft a site file from what the batch scheduler reports.

    Values that it does not report are marked "to be filled in".
    """
    from ..doctor import jobcheck, sitedraft, sitereport

    if output and output.exists():
        raise InputError(f"{output} exists; it is not overwritten")
    if output and not output.parent.is_dir():
        raise InputError(f"there is no folder {output.parent} for {output.name}")
    client, survey = sitereport.find_survey(name)
    host = sitedraft.Host(socket.gethostname(), jobcheck.interfaces())
    text = sitedraft.draft(type(client.scheduler), survey, host)
    if output is None:
        click.echo(text, nl=False)
        return
    # A file that a group may write would be refused: see "Search path" in docs/sites.md.
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    report = sitereport.check_offline(str(output.absolute()))
    echo(sitereport.report_text(report))
    progress.write(sitereport.summary(report))
    open_questions = text.count(sitedraft.TO_BE_FILLED_IN)
    progress.write(f"{output}: {plural(open_questions, 'comment')} to be filled in")


# -- sites check, sites show -----------------------------------------------------------------------
EXIT_FINDINGS = 1


@click.command("check")
@click.argument("site", shell_complete=shared.complete_sites)
@shared.flag("--live", "with_live", help="Also compare with the batch scheduler of this host.")
@shared.flag(
    "--run",
    "with_job",
    help="Also submit a small job, as `doctor` does; one for each of the site's environments.",
)
@shared.settings_option
@shared.json_option
def check_site(
    site: str, with_live: bool, with_job: bool, settings: Document, as_json: bool
) -> None:
    """Check a site file: the jobs of all queues, and bash text.

    Exits with 0 if it is correct, and with 1 if there are findings; all of them are printed. --set
    changes the profiles that are tried and the job of --run, for example account=p1.
    """
    from ..doctor import sitereport

    report = sitereport.check_offline(site, settings)
    no_answer: UnavailableError | None = None
    try:
        report = _more_checks(report, settings, with_live=with_live, with_job=with_job)
    except UnavailableError as error:
        no_answer = error  # the findings so far are printed first
    show(as_json, lambda: sitereport.report_json(report), lambda: sitereport.report_text(report))
    if not as_json:
        progress.write(sitereport.summary(report))
    if no_answer:
        raise no_answer
    if not report.correct:
        sys.exit(EXIT_FINDINGS)


def _more_checks(
    report: SiteReport, settings: Document, *, with_live: bool, with_job: bool
) -> SiteReport:
    """Return the report with the checks that need the batch scheduler."""
    if with_live:
        from ..doctor import sitereport

        report, _ = sitereport.check_live(report, settings)
    if with_job:
        jobs = _job_checks(report, settings)
        report = replace(report, checks=[*report.checks, *jobs])
    return report


def _job_checks(report: SiteReport, settings: Document) -> Sequence[Check]:
    if not report.site_file or not report.correct:
        from ..doctor.checks import warning

        return [warning("job", "not run, because there are findings")]
    from ..doctor import trial

    return trial.check_jobs(report.site_file, settings, shared.open_ledger())


# -- sites environments ----------------------------------------------------------------------------
@click.command("environments")
@click.argument("site", required=False, shell_complete=shared.complete_sites)
@shared.json_option
def list_environments(site: str | None, as_json: bool) -> None:
    """List the environments of a site, which profiles name as `environment: NAME`.

    SITE is by default that of this host. `gpujobs doctor --run --set environment=NAME` tries one.
    """
    from ..config import document, spec

    loaded = spec.make_spec(document.Document({}), site=site)
    listed = environments_json(loaded)
    rows = {"version": 1, "site": loaded.site.name, "environments": listed}
    show(as_json, lambda: rows, lambda: environments_table(listed, columns()))
    if not listed:
        progress.write(f"site {loaded.site.name} names no environments")


def environments_json(spec: ClusterSpec) -> list[dict[str, object]]:
    """Return the environments of the site, and those that only queues of it have."""
    site, default = spec.site.site, spec.profile.environment.name
    found: list[dict[str, object]] = []
    for place, section in site.sections():
        for name, environment in section.environments.items():
            container = environment.container
            found.append(
                {
                    "name": name,
                    "description": environment.description,
                    "default": name == default,
                    "queue": place[1] if place else None,
                    "gpu": environment.gpu,
                    "python": environment.python,
                    "container": container and container.image,
                }
            )
    return found


def environments_table(listed: list[dict[str, object]], columns: int | None) -> str:
    """Return a row for each environment, "" if there are none; see `table`."""
    if not listed:
        return ""
    rows = []
    for found in listed:
        name = f"{found['name']} (default)" if found["default"] else found["name"]
        software = found["container"] or found["python"]
        cells = (name, found["queue"], found["gpu"], software, found["description"])
        rows.append([str(cell or "") for cell in cells])
    header = ("ENVIRONMENT", "QUEUE", "CUDA", "SOFTWARE", "DESCRIPTION")
    return table(header, rows, columns, spare=("SOFTWARE", "QUEUE"))


@click.command("show")
@click.argument("site", shell_complete=shared.complete_sites)
@shared.flag(
    "--effective", "with_origins", help="Print it after `extends`, with the origin of each value."
)
def show_site(site: str, with_origins: bool) -> None:
    """Print a site file and validate it.

    Validates it as `sites check` does.
    """
    from ..config import document, sitefiles
    from ..doctor import checks, sitereport

    loaded = sitefiles.load_site(site)
    if with_origins:
        click.echo(document.effective_text(loaded.document), nl=False)
    else:
        click.echo(loaded.path.read_text(encoding="utf-8"), nl=False)
    if findings := sitereport.check_offline(str(loaded.path.absolute())).findings:
        raise InputError([finding.problem for finding in findings])
    progress.write(f"{loaded.path}: site {loaded.name} is valid")
    found = loaded.site
    texts = (found.source, found.contact, ", ".join(found.maintainers))
    for name, text in zip(("source", "contact", "maintainers"), texts, strict=True):
        if text:
            progress.write(f"{name}: {text}")
    if record := checks.read_evidence(checks.evidence_path(loaded.path)):
        progress.write(f"verified: {record.summary}")


# -- sites verify ----------------------------------------------------------------------------------
@click.command("verify")
@click.argument("site", shell_complete=shared.complete_sites)
@shared.flag("--yes", "agreed", help="Do not ask before jobs are submitted.")
@shared.output_option("The record; default: evidence/SITE.json beside the site file.")
@shared.flag("--hosts", help="Keep the names of hosts in the record.")
@shared.flag("--issue", "as_issue", help="Print the last record as the text of an issue.")
@shared.settings_option
def verify_site(
    site: str,
    agreed: bool,
    output: Path | None,
    hosts: bool,
    as_issue: bool,
    settings: Document,
) -> None:
    """Try a site in ten minutes, and write a record of it.

    Compares the file with the batch scheduler, and runs a job, an array of two nodes, a cancel and
    a walltime. Exits with 1 if anything failed. --set changes the jobs, for example account=p1.
    """
    from ..config import sitefiles
    from ..doctor import checks, verify

    loaded = sitefiles.load_site(site)
    path = output or checks.evidence_path(loaded.path)
    if as_issue:
        if (last := checks.read_evidence(path)) is None:
            raise InputError(
                f"{path} is no record of `sites verify`", hint="run it without --issue"
            )
        echo(last.issue())
        return
    _check_writable(path)
    trials = verify.Verification(loaded, settings, shared.open_ledger())
    jobs, minutes = trials.cost()
    gpu_minutes = plural(round(minutes), "GPU minute")
    text = f"{plural(jobs, 'job')}, at most {gpu_minutes} and ten minutes of time"
    if not agreed:
        click.confirm(f"{site}: {text}. Submit them?", abort=True, err=True)
    progress.write(f"{site}: {text}")
    trials.run()
    record = trials.evidence(hosts=hosts)
    path.parent.mkdir(exist_ok=True)
    path.write_text(record.json(), encoding="utf-8")
    echo(record.text())
    progress.write(f"{path}: {record.summary}")
    if record.failed:
        sys.exit(EXIT_FINDINGS)


def _check_writable(path: Path) -> None:
    """Report before any job that the record cannot be written."""
    folder = path.parent if path.parent.is_dir() else path.parent.parent
    if not os.access(folder, os.W_OK):
        raise InputError(f"{folder} is not writable", hint="-o FILE writes the record elsewhere")


# -- queues ----------------------------------------------------------------------------------------
@click.command()
@shared.site_option
@shared.flag(
    "--estimate", "with_estimate", help="Query the start of the smallest job in each queue."
)
@shared.json_option
def queues(site: str | None, with_estimate: bool, as_json: bool) -> None:
    """Show the free GPUs and CPUs of each queue now."""
    from ..clusters import freequeues
    from ..config import document, spec

    site_file = spec.make_spec(document.Document({}), site=site).site
    found = freequeues.free_queues(site_file, estimate=with_estimate)
    show(
        as_json,
        lambda: freequeues.queues_json(site_file, found),
        lambda: freequeues.queues_text(found, columns()),
    )


# -- doctor, sites list, schema --------------------------------------------------------------------
@click.command()
@shared.site_option
@shared.flag("--run", "with_job", help="Also submit a small job and check inside it.")
@shared.settings_option
@shared.json_option
def doctor(site: str | None, with_job: bool, settings: Document, as_json: bool) -> None:
    """Check that a site works as its file says.

    Checks commands, folders, versions and network; with --run also GPUs and driver in a job.
    --set changes the profile of the job of --run, for example account=p1.
    """
    from ..config import spec
    from ..doctor import checks, host

    site_file = spec.make_spec(settings, site=site).site
    found = list(host.check_host(site_file))
    if with_job and not checks.any_failed(found):
        from ..doctor import trial

        found += trial.check_job(site_file, settings, shared.open_ledger())
    show(as_json, lambda: checks.checks_json(found), lambda: checks.checks_text(found, columns()))
    if checks.any_failed(found):
        sys.exit(1)


@click.group()
def sites() -> None:
    """List, show, check, verify and draft site files."""


@sites.command("list")
@click.argument("words", nargs=-1)
@shared.json_option
def list_sites(words: tuple[str, ...], as_json: bool) -> None:
    """List the sites and the paths of their files; with WORDS those that have all of them.

    NOT VERIFIED is the number of lines of the file that are marked as such by a comment, without
    those that the record of `sites verify` confirms; VERIFIED is its date, and what failed.
    """
    from ..config import sitefiles

    listed = [_listed_site(name, path) for name, path in sitefiles.site_paths().items()]
    listed = [site for site in listed if _has_words(site, words)]
    show(as_json, lambda: {"version": 1, "sites": listed}, lambda: sites_table(listed, columns()))
    if words and not listed:
        progress.write(f"no site has all of: {' '.join(words)}")
    for path in sitefiles.ignored_files():
        progress.write(f"{path} is ignored: the name of a site file ends in .yaml")


sites.add_command(check_site)
sites.add_command(show_site)
sites.add_command(list_environments)
sites.add_command(verify_site)
sites.add_command(init_site)


@click.command()
@click.argument("kind", type=click.Choice(["profile", "site"]))
def schema(kind: str) -> None:
    """Print the JSON Schema of profiles or sites.

    Editors complete and check YAML files with it.
    """
    from ..config import model, profile, site

    described = profile.Profile if kind == "profile" else site.Site
    echo(json.dumps(model.json_schema(described), indent=1))


def _has_words(site: dict[str, str | int | None], words: Iterable[str]) -> bool:
    text = " ".join(str(value) for value in site.values()).lower()
    return all(word.lower() in text for word in words)


def sites_table(listed: list[dict[str, str | int | None]], columns: int | None) -> str:
    """Return a row for each site, "" if there are none; see `table`."""
    if not listed:
        return ""
    keys = ("name", "scheduler", "not_verified", "verified", "path", "description")
    rows = [[str(site[key] or "") for key in keys] for site in listed]
    header = ("SITE", "SCHEDULER", "NOT VERIFIED", "VERIFIED", "FILE", "DESCRIPTION")
    return table(header, rows, columns, spare=("FILE", "NOT VERIFIED", "VERIFIED"))


def _listed_site(name: str, path: Path) -> dict[str, str | int | None]:
    """Return the keys of `sites list --json`; the description is the error of an invalid file."""
    from ..config import sitefiles
    from ..doctor import checks

    found = checks.read_evidence(checks.evidence_path(path))
    listed: dict[str, str | int | None] = {"name": name, "scheduler": "?", "path": str(path)}
    try:
        site = sitefiles.load_site(str(path)).site
    except InputError as error:
        description = f"error: {str(error).splitlines()[0]}"
        nothing = dict.fromkeys(("contact", "source", "not_verified", "verified"))
        return {**listed, "description": description, **nothing}
    return {
        **listed,
        "not_verified": checks.not_verified(path, found),
        "verified": found.summary if found else None,
        "scheduler": site.scheduler,
        "description": site.description,
        "contact": site.contact,
        "source": site.source,
    }
