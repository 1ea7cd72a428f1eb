"""Dask's side of a cluster, as far as scaling needs it: workers, their load, retiring them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import Collection
from typing import Any

import distributed
from distributed import Scheduler
from distributed.core import Status
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo

from ..injob.demand import GIVE_UP
from ..injob.folder import EndKind
from ..injob.registry import idle_message

RETIRE_TIMEOUT = 30.0
"""Seconds for workers that must go to transfer their data."""
CLOSE_WORKERS_TIMEOUT = 1.0
"""Seconds for workers to exit when the cluster is closed."""
CLOSE_SCHEDULER_TIMEOUT = 1.5
"""Seconds for a dask scheduler in a job to confirm that it closes."""
END_TIMEOUT = 5.0
"""Seconds within which a cluster whose dask scheduler has closed its connections is seen to end."""
QUERY_TIMEOUT = 5.0
"""Seconds for a dask scheduler to list its workers."""


class Client(distributed.Client):  # type: ignore[misc]
    """The client of a cluster. It closes when the cluster ends; dask's tries to connect again."""

    async def _reconnect(self) -> None:
        if await self.cluster.is_ending():
            await self._close()
        else:
            await super()._reconnect()


class DaskControl:
    """Queries and changes the workers of a dask cluster; the tests replace it by a simulation."""

    def __init__(self, cluster: SpecCluster) -> None:
        self._cluster = cluster

    @property
    def open(self) -> bool:
        """Whether the cluster has not been closed; it may have ended."""
        open_states = (Status.created, Status.starting, Status.running, Status.failed)
        return self._cluster.status in open_states

    @property
    def connected(self) -> frozenset[str] | None:
        """Names of the connected workers; None if the connection to the dask scheduler is lost."""
        comm = self._cluster._watch_worker_status_comm
        if comm is None or comm.closed():
            return None
        return frozenset(self._cluster.observed)

    def adapts(self, group: str) -> bool:
        """Return whether a group of workers scales adaptively."""
        adaptive = self._cluster.adaptives.get(group)
        return adaptive is not None and adaptive.state in ("starting", "running")

    def stop_adapting(self) -> None:
        """Stop all adaptive scaling."""
        for adaptive in self._cluster.adaptives.values():
            adaptive.stop()

    def end_of_scheduler(self) -> tuple[EndKind, str] | None:
        """Return why a dask scheduler in this process has closed; None if it runs."""
        scheduler = self._cluster.scheduler
        closed = self._cluster.status == Status.running and isinstance(scheduler, Scheduler)
        if not closed or scheduler.status not in (Status.closing, Status.closed):
            return None
        if message := idle_message(scheduler):
            return EndKind.IDLE, message
        return EndKind.SHUTDOWN, "a client shut the dask scheduler down"

    async def running_workers(self, leaving: Collection[str]) -> int:
        """Return how many workers are ready for tasks, without those that are ``leaving``."""
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # busy, or about to end
            identity = self._cluster.scheduler_comm.identity()
            info = await asyncio.wait_for(identity, QUERY_TIMEOUT)
            self._cluster.scheduler_info = SchedulerInfo(info)
        workers = self._cluster.scheduler_info["workers"].values()
        running = (worker["name"] for worker in workers if worker["status"] == "running")
        return sum(name not in leaving for name in running)

    async def load(self) -> dict[str, int]:
        """Return how many tasks each worker has, by name."""
        workers: dict[str, Any] = self._cluster.scheduler_info["workers"]
        processing = await self._cluster.scheduler_comm.processing()
        return {
            workers[address]["name"]: len(tasks)
            for address, tasks in processing.items()
            if address in workers
        }

    async def give_up(self, error: Exception | None) -> None:
        """Fail what clients wait for with ``error``; None: workers may come again."""
        call = getattr(self._cluster.scheduler_comm, GIVE_UP)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            pickled = pickle.dumps(error) if error else b""
            await asyncio.wait_for(call(error=pickled), QUERY_TIMEOUT)

    async def retire(self, names: list[str]) -> None:
        """Let workers transfer their data and close them."""
        if self._cluster.status != Status.running:
            return
        with contextlib.suppress(Exception):  # workers that take too long are cancelled
            retire = self._cluster.scheduler_comm.retire_workers(
                names=names, close_workers=True, remove=True
            )
            await asyncio.wait_for(retire, RETIRE_TIMEOUT)

    async def close_scheduler(self) -> None:
        """Close a dask scheduler in a job, which closes its workers and its clients' connections.

        Afterwards it does not respond, and dask must not connect to it any more.
        """
        cluster = self._cluster
        cluster.shutdown_scheduler = False
        if cluster.status != Status.running or self.connected is None:
            return
        cluster.status = Status.closing  # so that clients do not try to connect again
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(cluster.scheduler_comm.terminate(), CLOSE_SCHEDULER_TIMEOUT)
        cluster.status = Status.running

    async def wait_for_workers_to_exit(self) -> None:
        """Let workers exit before a local dask scheduler, which logs every broken connection.

        Their connections end some time after the dask scheduler has removed them.
        """
        deadline = time.monotonic() + CLOSE_WORKERS_TIMEOUT
        while self._worker_connections() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def _worker_connections(self) -> int:
        """Return how many connections of workers a local dask scheduler has."""
        comms = getattr(self._cluster.scheduler, "_comms", {})
        return list(comms.values()).count("register-worker")

    def disconnect(self) -> None:
        """Stop what queries the dask scheduler regularly: it is gone."""
        cluster = self._cluster
        if cluster.status == Status.running:
            cluster.status = Status.failed
        cluster.shutdown_scheduler = False
        self.stop_adapting()
        if cluster._sync_cluster_info_task is not None:
            cluster._sync_cluster_info_task.cancel()

    def log(self, message: str) -> None:
        """Show a line to the user."""
        self._cluster._log(message)
