"""Commands that check site files: sites check, sites show."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from ..errors import InputError, UnavailableError
from . import messages, options

if TYPE_CHECKING:
    from ..doctor.checks import Check
    from ..doctor.sitereport import SiteReport

EXIT_FINDINGS = 1


@click.command("check")
@click.argument("site", shell_complete=options.complete_sites)
@click.option(
    "--live", "with_live", is_flag=True, help="Also compare with the batch scheduler of this host."
)
@click.option("--run", "with_job", is_flag=True, help="Also submit a small job, as `doctor` does.")
@options.settings_option
@options.json_option
def check_site(
    site: str, with_live: bool, with_job: bool, settings: tuple[str, ...], as_json: bool
) -> None:
    """Check a site file: the jobs of all queues, and bash text.

    Exits with 0 if it is correct, and with 1 if there are findings; all of them are printed. --set
    changes the profiles that are tried and the job of --run, for example account=p1.
    """
    from ..config import spec
    from ..doctor import sitereport

    report = sitereport.check_offline(site, spec.settings_document(settings))
    no_answer: UnavailableError | None = None
    try:
        report = _more_checks(report, site, settings, with_live=with_live, with_job=with_job)
    except UnavailableError as error:
        no_answer = error  # the findings so far are printed first
    if as_json:
        messages.echo(json.dumps(sitereport.report_json(report), indent=1))
    else:
        messages.echo(sitereport.report_text(report))
        messages.progress.write(sitereport.summary(report))
    if no_answer:
        raise no_answer
    if not report.correct:
        sys.exit(EXIT_FINDINGS)


def _more_checks(
    report: SiteReport, site: str, settings: tuple[str, ...], *, with_live: bool, with_job: bool
) -> SiteReport:
    """Return the report with the checks that need the batch scheduler."""
    if with_live and report.site_file:
        from ..config import spec
        from ..doctor import live

        found, checks = live.live_findings(report.site_file, spec.settings_document(settings))
        report = replace(
            report, findings=[*report.findings, *found], checks=[*report.checks, *checks]
        )
    if with_job:
        jobs = _job_checks(report, site, settings)
        report = replace(report, checks=[*report.checks, *jobs])
    return report


def _job_checks(report: SiteReport, site: str, settings: tuple[str, ...]) -> list[Check]:
    if not report.correct:
        from ..doctor.checks import warning

        return [warning("job", "not run, because there are findings")]
    from ..doctor import job

    return job.check_job(site, settings, options.open_ledger())


@click.command("show")
@click.argument("site", shell_complete=options.complete_sites)
@click.option(
    "--effective",
    "with_origins",
    is_flag=True,
    help="Print it after `extends`, with the origin of each value.",
)
def show_site(site: str, with_origins: bool) -> None:
    """Print a site file and validate it.

    Validates it as `sites check` does.
    """
    from ..config import effective, sitefiles
    from ..doctor import sitereport

    loaded = sitefiles.load_site(site)
    if with_origins:
        click.echo(effective.effective_text(loaded.document), nl=False)
    else:
        click.echo(loaded.path.read_text(encoding="utf-8"), nl=False)
    if problems := sitereport.problems_of(sitereport.check_offline(str(loaded.path.absolute()))):
        raise InputError(problems)
    messages.progress.write(f"{loaded.path}: site {loaded.name} is valid")
    for name, text in (("source", loaded.site.source), ("contact", loaded.site.contact)):
        if text:
            messages.progress.write(f"{name}: {text}")
