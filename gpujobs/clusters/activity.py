"""What the workers of a running cluster do now, as the dask scheduler says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from ..errors import UnavailableError
from .connect import address_of, security_of, silence_ucx
from .report import ClusterReport

if TYPE_CHECKING:
    from distributed.security import Security

_TIMEOUT = 5.0
"""Seconds for one answer."""


@dataclass(frozen=True)
class WorkerActivity:
    """The tasks, and the use of the host, of one worker."""

    executing: int
    waiting: int
    """Tasks that were sent to the worker and do not run yet."""
    memory: int
    """Bytes of the host's memory."""
    memory_limit: int
    """Bytes; 0: no limit."""
    cpu: float
    """Percent of one core."""


class ActivityReader:
    """Queries the dask schedulers of clusters.

    It is not a client of dask: it does not keep a cluster without work from its end.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._runner.close()

    def read(self, cluster: ClusterReport) -> dict[str, WorkerActivity]:
        """Return the activity of each worker of a cluster, by its name.

        Raises GpujobsError if the dask scheduler does not run, or cannot be reached from here.
        """
        address = address_of(cluster.record, cluster.folder)
        silence_ucx(urlsplit(address).scheme)
        security = security_of(cluster.record, cluster.folder)
        identify = asyncio.wait_for(_identity(address, security), _TIMEOUT)
        try:
            identity = self._runner.run(identify)
        except (OSError, TimeoutError) as error:
            raise UnavailableError(f"no answer from the dask scheduler at {address}") from error
        workers: Mapping[str, Mapping[str, Any]] = identity["workers"]
        return {str(worker["name"]): _activity(worker) for worker in workers.values()}


async def _identity(address: str, security: Security | None) -> dict[str, Any]:
    from distributed.core import rpc

    options = security.get_connection_args("client") if security else {}
    async with rpc(address, connection_args=options) as scheduler:
        found: dict[str, Any] = await scheduler.identity()
        return found


def _activity(worker: Mapping[str, Any]) -> WorkerActivity:
    metrics = worker.get("metrics", {})
    tasks = metrics.get("task_counts", {})
    return WorkerActivity(
        executing=sum(tasks.get(state, 0) for state in ("executing", "long-running")),
        waiting=sum(tasks.get(state, 0) for state in ("ready", "constrained", "waiting", "fetch")),
        memory=int(metrics.get("memory", 0)),
        memory_limit=int(worker.get("memory_limit") or 0),
        cpu=float(metrics.get("cpu", 0.0)),
    )
