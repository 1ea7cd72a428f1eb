"""Cancels jobs of a pool until the batch scheduler no longer has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection

from ..batch.client import SchedulerClient
from ..batch.system import System
from ..clusters import cancel as cancelling
from ..clusters.ledger import ClusterRecord, Ledger
from ..errors import GpujobsError
from .job import PoolJob
from .jobs import PoolJobs

FIRST_PAUSE, LONGEST_PAUSE = 60.0, 600.0
"""Seconds after which a job that is still there is cancelled again: doubled each time."""
CLOSE_TIMEOUT = 12.0
"""Seconds for which closing waits for a batch scheduler that is away; the jobs then exit alone."""

logger = logging.getLogger("gpujobs")


class Canceller:
    """Cancels jobs of the cluster ``name``. Those in `PoolJobs.released` are cancelled again."""

    def __init__(self, client: SchedulerClient, name: str, jobs: PoolJobs) -> None:
        self._client = client
        self._name = name
        self._jobs = jobs
        self._background: set[asyncio.Task[None]] = set()

    async def cancel(self, jobs: Collection[PoolJob]) -> None:
        """Cancel jobs. Raises RefusedError or UnavailableError."""
        now = self._client.system.monotonic()
        for job in jobs:
            pause = FIRST_PAUSE * 2**job.cancels
            job.cancel_again = now + min(LONGEST_PAUSE, pause)
            job.cancels += 1
        ids = [job.report.job for job in jobs]
        others = [job for job in self._jobs.present_ids() if job not in ids]
        await asyncio.to_thread(self._client.cancel, ids, [self._name], others)

    def cancel_soon(self, jobs: Collection[PoolJob]) -> None:
        """Do `cancel` in the background; an error is logged."""
        if jobs:
            self._in_background(self.cancel(jobs))

    def repeat(self, now: float) -> None:
        """Cancel again the released jobs that the batch scheduler still has."""
        self.cancel_soon([job for job in self._jobs.released.values() if now >= job.cancel_again])

    def _in_background(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except GpujobsError as error:
                logger.warning("%s: %s", self._name, error)

        task = asyncio.ensure_future(run())
        self._background.add(task)  # a task without a reference may be collected
        task.add_done_callback(self._background.discard)


def cancel_cluster(record: ClusterRecord, ledger: Ledger, system: System) -> None:
    """Cancel all jobs of a cluster that is closed; an error is logged."""
    if not record.submissions:
        ledger.update(record.id, finished=True)
        return
    try:
        cancelling.cancel(record, ledger, timeout=CLOSE_TIMEOUT, system=system)
    except GpujobsError as error:
        logger.warning("%s was closed, but %s; its jobs exit by themselves", record.id, error)
