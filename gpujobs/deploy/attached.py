"""A cluster that somebody else started: look at it, use it, leave it, or end it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.objects import SchedulerInfo

from ..clusters import connect as connection
from ..clusters import folder as folders
from ..clusters import monitor as clusters
from ..clusters import scale as scaling
from ..clusters.ledger import Ledger
from ..clusters.report import ClusterReport, JobReport
from ..errors import InputError
from ..schedulers import JobState
from .cluster import GPUJobQueueCluster
from .job import JobTable, gpus_of
from .pool import off_loop

REFRESH = 1.0
"""Seconds between two looks at who is there."""


def _silent(text: str) -> None:
    """Take a line that nobody wants to see."""


class AttachedCluster(GPUJobQueueCluster):
    """What `GPUJobQueueCluster.from_name` returns. `close` detaches, `shutdown` ends the cluster.

    A cluster that `gpujobs submit` started can be scaled. One that another Python process owns cannot: its owner
    scales it, and two of them would undo each other's work.
    """

    def __init__(self, name: str, *, asynchronous: bool = False, loop: Any = None) -> None:
        self._ledger = Ledger()
        self._record = self._ledger.get(name)
        self._address = connection.address_of(self._record)
        self.id, self.workers_per_job = name, self._record.workers_per_job
        self.security = connection.security(self._record)
        Cluster.__init__(self, asynchronous=asynchronous, loop=loop, name=name)
        self.shutdown_on_close = False
        if not self.called_from_running_loop:
            self._loop_runner.start()
            self.sync(self._start)

    async def _start(self) -> None:
        if self.status == Status.running:
            return
        arguments = self.security.get_connection_args("client") if self.security else {}
        self.scheduler_comm = rpc(self._address, connection_args=arguments)
        # Not Cluster's _start: a second subscriber to what workers do takes the owner's subscription away.
        self.scheduler_info = SchedulerInfo(await self.scheduler_comm.identity())
        self._refreshing = asyncio.create_task(self._refresh())
        self.status = Status.running

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH)
            with contextlib.suppress(OSError):  # the dask scheduler is gone, or busy
                self.scheduler_info = SchedulerInfo(await self.scheduler_comm.identity())

    def __await__(self) -> Any:
        async def start() -> AttachedCluster:
            await self._start()
            return self

        return start().__await__()

    async def __aenter__(self) -> AttachedCluster:
        await self._start()
        return self

    def _update_worker_status(self, op: str, msg: Any) -> None:
        Cluster._update_worker_status(self, op, msg)

    async def _close(self) -> None:
        if refreshing := getattr(self, "_refreshing", None):
            refreshing.cancel()
        await Cluster._close(self)

    def close(self, timeout: float | None = None) -> Any:
        """Detach: the cluster goes on."""
        result = Cluster.close(self, timeout)
        if not self.asynchronous:
            self._loop_runner.stop()
        return result

    def shutdown(self) -> Any:
        """End the cluster, then detach."""
        clusters.cancel(self._record, _silent)
        return self.close()

    def scale(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: Any = None,
        cores: int | None = None,
    ) -> Any:
        """Ask once for ``n`` workers of a cluster that `gpujobs submit` started; there is nobody who refills it."""
        if memory is not None or cores is not None or (n is None) == (jobs is None):
            raise InputError("scale: an attached cluster takes a number of workers, or jobs=")
        wanted = n if n is not None else (jobs or 0) * self.workers_per_job
        if self.asynchronous or self.called_from_running_loop:
            return asyncio.ensure_future(off_loop(self._scale, wanted))
        return self._scale(wanted)

    def _scale(self, workers: int) -> None:
        self._record = scaling.scale(self._record, workers, self._ledger, self._log)

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """Not from here: two adapting clients would fight."""
        raise InputError(
            f"{self.id} can only be adapted by the process that owns it", hint="scale() it instead"
        )

    async def _wait_for_workers(
        self, n_workers: int = 0, timeout: float | str | None = None
    ) -> None:
        await Cluster._wait_for_workers(self, n_workers, timeout)

    @property
    def plan(self) -> set[str]:
        """Names of the workers that there should be."""
        return {name for job in self._view().jobs for name in job.expected if job.state.active}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are submitted."""
        return self.plan

    @property
    def jobs(self) -> JobTable:
        """The jobs, as the batch scheduler and their records have them."""
        seen = self._view()
        return JobTable(_row(job, seen) for job in seen.jobs)

    def _view(self) -> ClusterReport:
        return next(iter(clusters.look([self._ledger.get(self.id)], self._ledger, _silent)))

    @property
    def folder(self) -> Any:
        """The cluster's folder."""
        return self._record.path

    def job_script(self) -> str:
        """Return the script of the worker jobs, as it was sent."""
        scripts = sorted((self.folder / "scripts").glob("workers-*.sh"))
        return scripts[-1].read_text() if scripts else ""

    def _scaling_status(self) -> str:
        workers = f"{len(folders.read(self.folder).workers)} / {self._record.workers}"
        return f"<table><tr><td style='text-align: left;'>Workers: {workers}</td></tr></table>"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        return str(Cluster._repr_html_(self, cluster_status=cluster_status))


def _row(job: JobReport, seen: ClusterReport) -> dict[str, Any]:
    log = seen.record.path / "logs" / f"job-{job.number}.log"
    return {
        "job": job.number,
        "id": job.id,
        "phase": job.state.value,
        "state": job.state.value,
        "reason": job.reason,
        "starts": job.starts,
        "node": job.node,
        "workers": list(job.expected),
        "connected": list(job.connected),
        "gpus": list(gpus_of(job.connected, seen.facts.workers)),
        "head": job.head,
        "log": folders.tail(log, 8) if job.state is JobState.FAILED else [],
    }
