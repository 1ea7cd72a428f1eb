"""Commands about sites: doctor, sites, schema. `check_commands` has those that check a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ..errors import InputError
from ..text import table
from . import check_commands, init_command, messages, options

NOT_VERIFIED = "# not verified"
"""A comment in a site file: the source does not give the values of this line."""


@click.command()
@click.option(
    "--site",
    metavar="SITE",
    shell_complete=options.complete_sites,
    help="Name of a site, or path of a site file.",
)
@click.option(
    "--run", "with_job", is_flag=True, help="Also submit a small job and check inside it."
)
@options.settings_option
@options.json_option
def doctor(site: str | None, with_job: bool, settings: tuple[str, ...], as_json: bool) -> None:
    """Check that a site works as its file says.

    Checks commands, folders, versions and network; with --run also GPUs and driver in a job.
    --set changes the profile of the job of --run, for example account=p1.
    """
    from ..config import spec
    from ..doctor import checks, host, job

    document = spec.settings_document(settings)
    found = list(host.check_host(spec.make_spec(document, site=site).site))
    if with_job and not checks.any_failed(found):
        found += job.check_job(site, settings, options.open_ledger())
    if as_json:
        messages.echo(json.dumps(checks.checks_json(found), indent=1))
    else:
        messages.echo(checks.checks_text(found))
    if checks.any_failed(found):
        sys.exit(1)


@click.group()
def sites() -> None:
    """List, show, check and draft site files."""


@sites.command("list")
@options.json_option
def list_sites(as_json: bool) -> None:
    """List the sites and the paths of their files.

    NOT VERIFIED is the number of lines of the file that are marked as such by a comment.
    """
    from ..config import sitefiles

    listed = [_listed_site(name, path) for name, path in sitefiles.site_paths().items()]
    if as_json:
        messages.echo(json.dumps({"version": 1, "sites": listed}, indent=1))
    else:
        keys = ("name", "scheduler", "not_verified", "path", "description")
        rows = [[str(site[key] or "") for key in keys] for site in listed]
        messages.echo(table(("SITE", "SCHEDULER", "NOT VERIFIED", "FILE", "DESCRIPTION"), rows))
    for path in sitefiles.ignored_files():
        messages.progress.write(f"{path} is ignored: the name of a site file ends in .yaml")


sites.add_command(check_commands.check_site)
sites.add_command(check_commands.show_site)
sites.add_command(init_command.init_site)


@click.command()
@click.argument("kind", type=click.Choice(["profile", "site"]))
def schema(kind: str) -> None:
    """Print the JSON Schema of profiles or sites.

    Editors complete and check YAML files with it.
    """
    from ..config import model, profile, site

    described = profile.Profile if kind == "profile" else site.Site
    messages.echo(json.dumps(model.json_schema(described), indent=1))


def _listed_site(name: str, path: Path) -> dict[str, str | int | None]:
    """Return the keys of `sites list --json`; the description is the error of an invalid file."""
    from ..config import sitefiles

    listed: dict[str, str | int | None] = {"name": name, "scheduler": "?", "path": str(path)}
    try:
        site = sitefiles.load_site(str(path)).site
    except InputError as error:
        description = f"error: {str(error).splitlines()[0]}"
        nothing = dict.fromkeys(("contact", "source", "not_verified"))
        return {**listed, "description": description, **nothing}
    return {
        **listed,
        "not_verified": sum(
            NOT_VERIFIED in line for line in path.read_text(encoding="utf-8").splitlines()
        ),
        "scheduler": site.scheduler,
        "description": site.description,
        "contact": site.contact,
        "source": site.source,
    }
