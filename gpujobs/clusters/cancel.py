"""Cancel clusters, and find those that their owner has left."""

from __future__ import annotations

import logging

from ..batch.system import HOST, System
from ..errors import UnavailableError
from ..injob.folder import EXIT_FAILED, EndKind
from . import folder as folders
from .folderstate import FolderReader, read_state
from .ledger import ClusterRecord, Ledger
from .monitor import client_of, recover_submission
from .report import ClusterReport, ClusterState

logger = logging.getLogger("gpujobs")

CANCEL_TIMEOUT = 90.0
"""Seconds for which a cancel waits for a batch scheduler that is away."""
EXIT_TIMEOUT, RUN_EXIT_TIMEOUT = 5.0, 15.0
"""Seconds for running jobs to find `ended` and exit, before they are cancelled; with `run`."""


def end(record: ClusterRecord) -> None:
    """Write `ended` into a cluster's folder, unless it exists already; its jobs begin to exit."""
    if record.path.is_dir():
        folders.end(record.path, EndKind.CANCELLED, 143, "cancelled by gpujobs")


def cancel(
    record: ClusterRecord,
    ledger: Ledger,
    *,
    timeout: float = CANCEL_TIMEOUT,
    system: System = HOST,
) -> None:
    """End a cluster: write `ended` into its folder, and cancel its jobs.

    A cluster without jobs, whose owner is gone, is recorded as finished.

    Raises UnavailableError or RefusedError; jobs that could not be cancelled find `ended`.
    """
    end(record)
    record = recover_submission(record, ledger, at_once=True, system=system)
    if record.finished:
        return
    if record.intent is not None:
        message = "%s: its submission was interrupted; a job of it that comes later exits at once"
        logger.info(message, record.id)
    if not record.submissions:
        if record.intent is None:
            ledger.update(record.id, finished=True)
        return
    current = record.current_jobs(read_state(record.path).claims)
    jobs = {*record.jobs.values(), *current.values()}
    reader = FolderReader(record.path)

    def have_exited() -> bool:
        """Return whether all jobs have exited, as they found `ended`: none is left to cancel."""
        return reader.read().exits.keys() >= current.keys()

    client = client_of(record, timeout=timeout, stopping=have_exited, system=system)
    if client.scheduler.slow_cancel:
        seconds = RUN_EXIT_TIMEOUT if record.run else EXIT_TIMEOUT
        _wait_for_exits(reader, seconds, system)
    try:
        client.cancel(sorted(jobs, key=str), [record.id])
    except UnavailableError:
        if not have_exited():
            raise


def cancel_held(report: ClusterReport) -> None:
    """Cancel the failed jobs that the batch scheduler holds for a cluster that has given them up.

    The cluster's failure is written into its folder first: they were its last jobs, perhaps.
    """
    record, held = report.record, [job.job for job in report.held]
    if report.state is ClusterState.FAILED and record.path.is_dir():
        folders.end(record.path, EndKind.FAILED, EXIT_FAILED, report.reason)
    others = [job.job for job in report.jobs if job.in_queue and job.job not in held]
    client_of(record, timeout=EXIT_TIMEOUT).cancel(held, [record.id], others)


def _wait_for_exits(reader: FolderReader, seconds: float, system: System) -> None:
    """Wait until all jobs that have started have exited, ``seconds`` at most."""
    deadline = system.monotonic() + seconds
    while not (state := reader.read()).exits.keys() >= state.nodes.keys():
        if system.monotonic() > deadline:
            return
        system.sleep(0.2)


def orphaned(record: ClusterRecord) -> bool:
    """Return whether the Python process that owned a cluster is gone."""
    owned = record.owner == "client" and not record.finished
    return owned and not folders.has_owner(record.path)
