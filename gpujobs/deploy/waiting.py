"""`wait_for_workers`, and the lease of the owning process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from pathlib import Path

from dask.utils import parse_timedelta

from ..clusters.folder import renew_lease
from ..clusters.progress import Progress
from ..clusters.rows import job_counts
from ..errors import GpujobsError, InputError
from ..text import clock_text
from .pool import JobPool
from .scaler import Scaler, possible

INTERVAL = 0.1
"""Seconds between two queries of the dask scheduler."""


async def wait_for(
    scaler: Scaler, n_workers: int, timeout: float | str | None, progress: Progress
) -> None:
    """Wait until ``n_workers`` are ready. Raises why that cannot happen, or TimeoutError."""
    pool, started = scaler.pool, time.monotonic()
    deadline = started + parse_timedelta(timeout) if timeout else math.inf
    try:
        while (found := await _ready(scaler)) < n_workers:
            _check_reachable(scaler, n_workers)
            jobs = _jobs_text(pool)
            if time.monotonic() > deadline:
                jobs += pool.jobs.last_failure()
                raise TimeoutError(f"{found} of {n_workers} workers after {timeout} s: {jobs}")
            progress.show(
                f"{found}/{n_workers} workers, {jobs}", clock_text(time.monotonic() - started)
            )
            await asyncio.sleep(INTERVAL)
        await scaler.refresh()
    finally:
        progress.clear()
    if pool.conflict is not None:
        raise pool.conflict


def _jobs_text(pool: JobPool) -> str:
    jobs = (job.report for job in pool.jobs.active.values())
    return job_counts(jobs, reasons=True) or "no jobs"


async def _ready(scaler: Scaler) -> int:
    """Return how many workers are ready; 0 if the cluster has ended or was closed."""
    if scaler.pool.ended or not scaler.dask.open:
        return 0
    return await scaler.dask.running_workers(scaler.pool.jobs.leaving_workers())


def _check_reachable(scaler: Scaler, n_workers: int) -> None:
    pool = scaler.pool
    closed = None if scaler.dask.open else pool.ended_error()
    for error in (pool.conflict, pool.error, closed):
        if error is not None:
            raise error
    missing, reasons = _missing(scaler, n_workers)
    if missing <= 0:
        return
    refusals = (group.refused for group in pool.groups.values())
    if errors := [*pool.errors, *filter(None, refusals)]:
        raise errors[0]
    if reasons:
        raise InputError(f"waiting for {n_workers} workers, but {'; '.join(reasons)}")
    planned = n_workers - missing
    message = f"waiting for {n_workers} workers, but only {planned} were asked for"
    raise InputError(message, hint="scale() first")


def _missing(scaler: Scaler, n_workers: int) -> tuple[int, list[str]]:
    """Return how many of ``n_workers`` cannot come, and why groups that adapt do not bring them."""
    pool, missing, reasons = scaler.pool, n_workers, []
    for group in sorted(pool.groups.values(), key=lambda group: scaler.dask.adapts(group.name)):
        jobs = max(group.target, len(pool.jobs.counting(group.name)))
        if scaler.dask.adapts(group.name) and group.error is None:  # last: it may bring the rest
            jobs, why_not = possible(pool, group, group.jobs_for(max(0, missing)))
            reasons.append(why_not)
        missing -= jobs * group.size
    return missing, reasons


# -- the lease: signs of life of the owning process in the cluster's folder ------------------------
LEASE_INTERVAL = 10.0
"""Seconds between two signs of life."""


class Lease:
    """Renews the lease of one cluster while the process lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task: asyncio.Task[None] | None = None

    def renew(self) -> None:
        """Write a sign of life."""
        renew_lease(self._folder)

    def keep(self) -> None:
        """Start to renew the lease regularly."""
        self._task = asyncio.create_task(self._renew_forever(), name="gpujobs-lease")

    def stop(self) -> None:
        """Stop renewing."""
        if self._task is not None:
            self._task.cancel()

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(LEASE_INTERVAL)
            with contextlib.suppress(GpujobsError, OSError):  # the next one may work
                await asyncio.to_thread(self.renew)
