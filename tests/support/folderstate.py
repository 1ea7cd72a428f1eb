"""The state of a cluster's folder, from the few facts that a test is about."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from gpujobs.clusters.folderstate import FolderState, JobTrace
from gpujobs.injob.events import DaskWorkers
from gpujobs.injob.folder import RegisteredWorker
from gpujobs.injob.jobevents import ExitRecord, JobFacts
from gpujobs.schedulers import JobId


def job_trace(
    node: str | None = None,
    *,
    began: float | None = None,
    left: ExitRecord | None = None,
    reason: str = "",
    claim: JobId | None = None,
    alive: float = 0.0,
) -> JobTrace:
    """Return what a job has left; ``node``: where its supervisor has started."""
    facts = JobFacts(node=node, began=began, left=left, reason=reason)
    return JobTrace(facts, claim, alive)


def dask_workers(
    connected: Mapping[str, RegisteredWorker] | None = None,
    *,
    seen: Collection[str] = (),
    gone: Mapping[str, float] | None = None,
    address: str | None = None,
    dashboard: int | None = None,
) -> DaskWorkers:
    """Return the workers; those that were ``seen`` and are not connected left at a time that is not known."""
    present, left = dict(connected or {}), dict(gone or {})
    for name in seen:
        if name not in present:
            left.setdefault(name, math.inf)
    return DaskWorkers(address, dashboard, present, left)


def folder_state(
    *,
    jobs: Mapping[int, JobTrace] | None = None,
    workers: Mapping[str, Any] | None = None,
    seen: Collection[str] = (),
    gone: Mapping[str, float] | None = None,
    address: str | None = None,
    dashboard: int | None = None,
    **others: Any,
) -> FolderState:
    """Return the state of a folder; ``others``: its fields."""
    dask = dask_workers(workers, seen=seen, gone=gone, address=address, dashboard=dashboard)
    return FolderState(jobs=dict(jobs or {}), dask=dask, **others)
