"""Cancel clusters, and find those that their owner has left."""

from __future__ import annotations

from ..injob.folder import EndKind
from . import folder as folders
from .folderstate import read_state
from .ledger import ClusterRecord
from .monitor import client_of

OWNER_TIMEOUT = 60.0
"""Seconds without a new lease after which the owner of a cluster is gone."""
CANCEL_TIMEOUT = 90.0
"""Seconds for which a cancel waits for a batch scheduler that is away."""


def cancel(record: ClusterRecord, *, timeout: float = CANCEL_TIMEOUT) -> None:
    """End a cluster: write `ended` into its folder, and cancel its jobs.

    Raises UnavailableError or RefusedError; jobs that could not be cancelled find `ended`.
    """
    if record.path.is_dir():
        folders.end(record.path, EndKind.CANCELLED, 143, "cancelled by gpujobs")
    if record.finished or not record.submissions:
        return
    jobs = {*record.jobs.values(), *read_state(record.path).claims.values()}
    client_of(record, timeout=timeout).cancel(sorted(jobs, key=str), [record.id])


def orphaned(record: ClusterRecord) -> bool:
    """Return whether the Python process that owned a cluster is gone."""
    if record.owner != "client" or record.finished:
        return False
    return folders.silence(record.path) > OWNER_TIMEOUT
