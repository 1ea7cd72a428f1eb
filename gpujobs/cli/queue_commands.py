"""The command about queues: queues."""

from __future__ import annotations

import json

import click

from . import messages, options


@click.command()
@click.option(
    "--site",
    metavar="SITE",
    shell_complete=options.complete_sites,
    help="Name of a site, or path of a site file.",
)
@click.option(
    "--estimate",
    "with_estimate",
    is_flag=True,
    help="Query the start of the smallest job in each queue.",
)
@options.json_option
def queues(site: str | None, with_estimate: bool, as_json: bool) -> None:
    """Show the free GPUs and CPUs of each queue now."""
    from ..clusters import freequeues
    from ..config import document, spec

    site_file = spec.make_spec(document.Document({}), site=site).site
    found = freequeues.free_queues(site_file, estimate=with_estimate)
    if as_json:
        messages.echo(json.dumps(freequeues.queues_json(site_file, found), indent=1))
    else:
        messages.echo(freequeues.queues_text(found))
