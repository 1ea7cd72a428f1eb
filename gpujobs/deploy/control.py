"""Dask's side of a cluster, as far as scaling needs it: workers, their load, retiring them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from distributed.core import Status
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo

RETIRE_TIMEOUT = 30.0
"""Seconds for workers that must go to transfer their data."""
CLOSE_WORKERS_TIMEOUT = 1.0
"""Seconds for workers to exit when the cluster is closed."""
CLOSE_SCHEDULER_TIMEOUT = 2.0
"""Seconds for a dask scheduler in a job to confirm that it closes."""


class DaskControl:
    """Queries and changes the workers of a dask cluster."""

    def __init__(self, cluster: SpecCluster) -> None:
        self._cluster = cluster

    @property
    def open(self) -> bool:
        """Whether the cluster has not been closed."""
        return self._cluster.status in (Status.created, Status.starting, Status.running)

    @property
    def adapts(self) -> bool:
        """Whether the cluster scales adaptively."""
        adaptive = self._cluster._adaptive
        return adaptive is not None and adaptive.state in ("starting", "running")

    @property
    def connected(self) -> frozenset[str]:
        """Names of the connected workers."""
        return frozenset(self._cluster.observed)

    async def running_workers(self) -> int:
        """Return how many workers are ready for tasks."""
        identity = await self._cluster.scheduler_comm.identity()
        self._cluster.scheduler_info = SchedulerInfo(identity)
        workers = self._cluster.scheduler_info["workers"].values()
        return sum(worker["status"] == "running" for worker in workers)

    async def load(self) -> dict[str, int]:
        """Return how many tasks each worker has, by name."""
        workers: dict[str, Any] = self._cluster.scheduler_info["workers"]
        processing = await self._cluster.scheduler_comm.processing()
        return {
            workers[address]["name"]: len(tasks)
            for address, tasks in processing.items()
            if address in workers
        }

    async def retire(self, names: list[str]) -> None:
        """Let workers transfer their data and close them."""
        if self._cluster.status != Status.running:
            return
        with contextlib.suppress(Exception):  # workers that take too long are cancelled
            retire = self._cluster.scheduler_comm.retire_workers(
                names=names, close_workers=True, remove=True
            )
            await asyncio.wait_for(retire, RETIRE_TIMEOUT)

    async def wait_for_workers_to_exit(self) -> None:
        """Let workers exit before their dask scheduler, which logs every broken connection."""
        cluster = self._cluster
        if cluster.status != Status.running or not cluster.scheduler_info["workers"]:
            return
        deadline = time.monotonic() + CLOSE_WORKERS_TIMEOUT
        while cluster.scheduler_info["workers"] and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # from a worker's last message to the end of its connection

    async def close_scheduler(self) -> None:
        """Close a dask scheduler in a job, which closes its workers and its clients' connections.

        Afterwards it does not respond, and dask must not connect to it any more.
        """
        cluster = self._cluster
        if cluster.status == Status.running:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(cluster.scheduler_comm.terminate(), CLOSE_SCHEDULER_TIMEOUT)
        cluster.shutdown_scheduler = False

    def log(self, message: str) -> None:
        """Show a line to the user."""
        self._cluster._log(message)
