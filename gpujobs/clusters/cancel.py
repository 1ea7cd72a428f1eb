"""Cancel clusters, and find those that their owner has left."""

from __future__ import annotations

import logging

from ..batch.system import HOST, System
from ..injob.folder import EndKind
from . import folder as folders
from .folderstate import read_state
from .ledger import ClusterRecord, Ledger
from .monitor import client_of, recover_submission

logger = logging.getLogger("gpujobs")

OWNER_TIMEOUT = 60.0
"""Seconds without a new lease after which the owner of a cluster is gone."""
CANCEL_TIMEOUT = 90.0
"""Seconds for which a cancel waits for a batch scheduler that is away."""


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
    if record.path.is_dir():
        folders.end(record.path, EndKind.CANCELLED, 143, "cancelled by gpujobs")
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
    client = client_of(record, timeout=timeout, system=system)
    client.cancel(sorted(jobs, key=str), [record.id])


def orphaned(record: ClusterRecord) -> bool:
    """Return whether the Python process that owned a cluster is gone."""
    if record.owner != "client" or record.finished:
        return False
    return folders.silence(record.path) > OWNER_TIMEOUT
