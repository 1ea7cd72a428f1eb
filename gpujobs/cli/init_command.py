"""The command `sites init`: a draft of a site file from the batch scheduler of this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import click

from ..errors import InputError
from . import messages


@click.command("init")
@click.option(
    "--scheduler", "name", metavar="NAME", help="The batch scheduler; default: the one found here."
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="A new file; default: standard output."
)
def init_site(name: str | None, output: Path | None) -> None:
    """Draft a site file from what the batch scheduler reports.

    Values that it does not report are marked "to be filled in".
    """
    from ..doctor import jobcheck, live, sitedraft, sitereport

    if output and output.exists():
        raise InputError(f"{output} exists; it is not overwritten")
    if output and not output.parent.is_dir():
        raise InputError(f"there is no folder {output.parent} for {output.name}")
    client, survey = live.find_survey(name)
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
    messages.echo(sitereport.report_text(report))
    messages.progress.write(sitereport.summary(report))
    open_questions = text.count(sitedraft.TO_BE_FILLED_IN)
    messages.progress.write(f"{output}: {open_questions} comments are to be filled in")
