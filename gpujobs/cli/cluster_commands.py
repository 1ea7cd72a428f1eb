"""Commands about submitted clusters: status, report, nodes, logs, connect, scale, cancel, clean."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import GpujobsError, InputError
from ..text import age_text, plural, printable, short_size_text, table
from . import shared
from .live import columns, echo, progress, show

if TYPE_CHECKING:
    from ..clusters.cleanup import Leftover
    from ..clusters.ledger import ClusterRecord, Ledger
    from ..clusters.report import ClusterReport


@click.command()
@shared.clusters_argument
@shared.flag("--all", "everything", help="Also show clusters that have ended.")
@shared.json_option
@shared.flag("--watch", help="Refresh every few seconds.")
def status(cluster_ids: tuple[str, ...], everything: bool, as_json: bool, watch: bool) -> None:
    """Show the state of clusters.

    The named ones in full; without an ID a table of the active ones.
    """
    from . import status

    ledger = shared.open_ledger()
    named = [ledger.resolve(name) for name in cluster_ids]
    view = status.StatusView(ledger, named, everything=everything)
    if watch:
        view.watch(as_json=as_json)
    else:
        view.print_once(as_json=as_json)


@click.command()
@shared.cluster_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Write an HTML page; - is stdout.",
)
@shared.flag("--ticket", help="Print the text about failed nodes for operators.")
@shared.json_option
def report(cluster_id: str, output: Path | None, ticket: bool, as_json: bool) -> None:
    """Show where the GPU hours of a cluster went."""
    from ..clusters import badnodes, handle
    from . import usage_text

    ledger = shared.open_ledger()
    found = handle.ClusterHandle(ledger.resolve(cluster_id), ledger).usage()
    if ticket:
        echo(usage_text.ticket(badnodes.read(ledger), found))
        return
    if output is not None:
        with click.open_file(str(output), "w", encoding="utf-8") as file:  # "-" is stdout
            file.write(usage_text.page(found))
    if as_json or output is None:
        show(
            as_json,
            lambda: usage_text.usage_json(found),
            lambda: usage_text.usage_text(found, columns()),
        )


@click.command()
@shared.json_option
def nodes(as_json: bool) -> None:
    """List nodes on which jobs of yours have failed."""
    from ..clusters import badnodes, monitor
    from . import usage_text

    ledger = shared.open_ledger()
    active = [record for record in ledger.all() if not record.finished]
    monitor.ClusterMonitor(active, ledger).reports()  # which notes failures
    found = badnodes.rows(badnodes.read(ledger), time.time())
    show(
        as_json,
        lambda: {"version": 1, "nodes": found},
        lambda: usage_text.nodes_text(found, columns()),
    )
    if not found:
        progress.write("no job of yours has failed on a node in the last day")


@click.command()
@shared.cluster_argument
@click.option("--worker", metavar="NAME", help="Print the log of the job of a worker instead.")
@shared.flag("--all", "everything", help="Print all logs of the cluster.")
@shared.flag("-f", "--follow", help="Continue until the cluster has ended.")
def logs(cluster_id: str, worker: str | None, everything: bool, follow: bool) -> None:
    """Print the output of the cluster's command."""
    from ..clusters import logs
    from ..clusters.monitor import ClusterMonitor

    ledger = shared.open_ledger()
    record = ledger.get(ledger.resolve(cluster_id))
    paths = logs.choose(record, worker, everything)
    monitor = ClusterMonitor([record], ledger)
    if follow and not any(path.exists() for path in paths()) and not monitor.report().finished:
        progress.write(_no_output(monitor.report()))

    def complete() -> bool:
        return not follow or monitor.report().finished

    printed = False
    for line in logs.lines(paths, everything, complete):
        echo(line)
        printed = True
    if not printed:
        progress.write(_no_output(monitor.report()))


def _no_output(report: ClusterReport) -> str:
    if not report.finished:
        return f"there is no output yet; see gpujobs status {report.record.argument}"
    return ": ".join(filter(None, ("there was no output", report.reason)))


@click.command()
@shared.cluster_argument
@shared.flag(
    "--env", "as_environment", help='Print lines for a shell: eval "$(gpujobs connect ID --env)".'
)
@click.option("--for-host", is_flag=True, hidden=True)
@click.option("--wait", is_flag=True, hidden=True)
def connect(cluster_id: str, as_environment: bool, for_host: bool, wait: bool) -> None:
    """Show how to connect from Python."""
    from ..clusters import connect, handle

    ledger = shared.open_ledger()
    record = ledger.get(ledger.resolve(cluster_id))
    if wait:
        handle.ClusterHandle(record.argument, ledger).wait_for_address()
    if for_host:
        echo(json.dumps(connect.endpoint(record)))
    elif as_environment:
        echo(connect.environment_lines(record))
    else:
        echo(connect.instructions(record))


@click.command()
@shared.cluster_argument
@click.argument("workers", nargs=-1, required=True, metavar="WORKERS | GROUP=WORKERS...")
def scale(cluster_id: str, workers: tuple[str, ...]) -> None:
    """Change the number of workers of a cluster.

    WORKERS is the new total, of the cluster or of a group; whole jobs are added or removed.
    """
    from ..clusters import scale

    numbers = _numbers(workers)
    ledger = shared.open_ledger()
    scale.scale(ledger.get(cluster_id), numbers, ledger)


def _numbers(words: tuple[str, ...]) -> dict[str, int]:
    """Return ``8`` or ``gpu=8 prep=2`` as numbers by group."""
    numbers: dict[str, int] = {}
    for word in words:
        group, _, number = word.rpartition("=")
        if not number.isdecimal():
            raise InputError(
                f"scale: {word!r} is not a number", hint="8, or for groups gpu=8 prep=2"
            )
        if group in numbers:
            raise InputError(f"scale: {word!r} is the second number of the same workers")
        numbers[group] = int(number)
    return numbers


@click.command()
@shared.clusters_argument
@shared.flag("--all", "everything", help="End all active clusters.")
@shared.flag("--orphans", help="Only clusters whose Python process is gone.")
@shared.flag("--drain", "drained", help="Wait for the tasks that run, but in the head's job.")
def cancel(cluster_ids: tuple[str, ...], everything: bool, orphans: bool, drained: bool) -> None:
    """End clusters and cancel their jobs."""
    if drained and orphans:
        message = "--orphans and --drain exclude each other"
        raise InputError(message, hint="the jobs of orphans end by themselves")
    if not cluster_ids and not everything and not orphans:
        hint = "`gpujobs status` lists them"
        raise InputError("name the clusters to cancel, or use --all", hint=hint)
    from . import status

    ledger = shared.open_ledger()
    records = status.choose(ledger, cluster_ids)
    if orphans:
        records = _orphans(records)
    errors: list[GpujobsError] = []
    if drained:
        records = _drained(records, ledger, errors)
    _cancel_all(records, ledger, errors)


def _drained(
    records: Sequence[ClusterRecord], ledger: Ledger, errors: list[GpujobsError]
) -> list[ClusterRecord]:
    """Let the workers of clusters end their tasks, one cluster after the other.

    Returns the clusters that may be cancelled: not those whose tasks cannot be waited for.
    """
    from ..clusters import scale

    found: list[ClusterRecord] = []
    for record in records:
        try:
            if not _had_ended(record):
                progress.write(f"{record.id}: waiting for its tasks; Ctrl-C cancels nothing")
                scale.drain(record, ledger)
        except GpujobsError as error:
            errors.append(error)
            continue
        found.append(record)
    return found


def _orphans(records: Sequence[ClusterRecord]) -> list[ClusterRecord]:
    from ..clusters import scale

    found = [record for record in records if scale.orphaned(record)]
    if not found:
        progress.write("no orphans")
    return found


_CANCELS_AT_ONCE = 8


def _cancel_all(
    records: Sequence[ClusterRecord], ledger: Ledger, errors: list[GpujobsError]
) -> None:
    """Cancel clusters, several at once; raise the last of all errors after all have been tried."""
    from concurrent.futures import ThreadPoolExecutor

    from ..clusters import scale

    ended = {record.id for record in records if _had_ended(record)}
    for record in records:  # the jobs of all of them exit at the same time
        scale.end(record)
    threads = ThreadPoolExecutor(_CANCELS_AT_ONCE)
    try:
        cancels = [threads.submit(scale.cancel, record, ledger) for record in records]
        for record, cancelled in zip(records, cancels, strict=True):
            try:
                cancelled.result()
            except GpujobsError as error:
                errors.append(error)
                continue
            outcome = "had ended already" if record.id in ended else "is cancelled"
            progress.write(f"{record.id} {outcome}")
    finally:
        threads.shutdown(cancel_futures=True)  # Ctrl-C starts no more
    _raise_last(errors)


def _had_ended(record: ClusterRecord) -> bool:
    """Return whether a cluster has ended by itself; its jobs may still be about to exit."""
    from ..clusters.folderstate import FolderReader
    from ..injob.folder import EndKind

    if record.finished:
        return True
    ended = FolderReader(record.path).read().ended
    return ended is not None and ended.kind is not EndKind.CANCELLED


def _raise_last(errors: Sequence[GpujobsError]) -> None:
    for earlier in errors[:-1]:
        progress.write(f"error: {earlier}")
    if errors:
        raise errors[-1]


@click.command()
@click.option("--older-than", callback=shared.parsed("duration"), metavar="TIME", help="As in 30d.")
@click.option("--larger-than", callback=shared.parsed("size"), metavar="SIZE", help="As in 1GiB.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clean(older_than: int | None, larger_than: int | None, yes: bool) -> None:
    """List and remove the folders of clusters that have ended."""
    from ..clusters import cleanup, monitor

    ledger = shared.open_ledger()
    active = [record for record in ledger.all() if not record.finished]
    monitor.ClusterMonitor(active, ledger).reports()  # which notes those that have ended
    latest = time.time() - (older_than or 0)
    found = [
        one
        for one in cleanup.leftovers(ledger)
        if one.changed <= latest and one.size >= (larger_than or 0)
    ]
    found = _without_queued(found, ledger)
    if not found:
        progress.write("there is nothing to remove")
        return
    echo(leftover_table(found, columns()))
    question = f"Remove {plural(len(found), 'folder')} with everything in them?"
    if not yes and not sys.stdin.isatty():
        raise InputError("nothing was removed", hint="--yes removes them without a question")
    if yes or click.confirm(question, err=True):
        _remove_all(found, ledger)


def _without_queued(found: Sequence[Leftover], ledger: Ledger) -> list[Leftover]:
    """Return the folders without those of clusters whose jobs may be in the queue; name these."""
    from ..clusters import monitor

    queued = monitor.still_queued([one.record for one in found if one.record], ledger)
    for name, reason in queued.items():
        progress.write(f"{name} stays: {reason}")
    return [one for one in found if not one.record or one.record.id not in queued]


def leftover_table(found: Sequence[Leftover], columns: int | None) -> str:
    """Return a row for each folder; see `table`."""
    rows = [
        (
            one.record.id if one.record else "-",
            short_size_text(one.size),
            one.files,
            age_text(time.time() - one.changed),
            printable(str(one.path)),
        )
        for one in found
    ]
    header = ("CLUSTER", "SIZE", "FILES", "AGE", "FOLDER")
    return table(header, rows, columns, spare=("FILES", "AGE"))


def _remove_all(found: Sequence[Leftover], ledger: Ledger) -> None:
    from ..clusters import cleanup

    errors: list[GpujobsError] = []
    for one in found:
        try:
            cleanup.remove(one, ledger)
        except GpujobsError as error:
            errors.append(error)
    progress.write(f"{plural(len(found) - len(errors), 'folder')} removed")
    _raise_last(errors)
