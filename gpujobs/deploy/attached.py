"""Clusters in batch jobs that this process does not watch: of another process, on another host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import weakref
from collections.abc import Awaitable, Generator, Mapping
from pathlib import Path
from typing import Any

from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.objects import SchedulerInfo
from distributed.security import Security
from distributed.utils import format_dashboard_link
from tornado.ioloop import PeriodicCallback

from ..clusters.connect import address_of, security_in, security_of, silence_ucx
from ..clusters.folder import read_state
from ..clusters.handle import ClusterHandle
from ..clusters.monitor import with_log
from ..clusters.notebook import Card
from ..clusters.remote import RemoteCluster, Tunnel
from ..clusters.report import ClusterReport, JobReport
from ..clusters.scale import check_group_names
from ..errors import InputError
from ..injob.names import LOOPBACK
from ..schedulers import JobState, get_scheduler
from . import credentials
from .display import JobsDisplay
from .jobnumbers import Setting
from .keywords import profile_of
from .options import Configuration
from .vocabulary import JOBQUEUE, Vocabulary

logger = logging.getLogger("gpujobs")

REFRESH_INTERVAL = 1000
"""Milliseconds between two updates of the list of workers."""


class ConnectedCluster(Cluster):  # type: ignore[misc]
    """A cluster whose dask scheduler runs elsewhere; commands scale and end it."""

    status: Status
    _handle: ClusterHandle | RemoteCluster
    _address: str
    _group_sizes: Mapping[str, int]
    """Workers of a job, by group."""
    security: Security | None

    def __init__(self, *, asynchronous: bool = False, loop: Any = None, name: str) -> None:
        self.id = name
        super().__init__(asynchronous=asynchronous, loop=loop, name=name)
        self.shutdown_on_close = False
        credentials.offer(self)
        if not self.called_from_running_loop:
            self._loop_runner.start()
            self.sync(self._start)

    async def _start(self) -> None:
        if self.status == Status.running:
            return
        arguments = self.security.get_connection_args("client") if self.security else {}
        self.scheduler_comm = rpc(self._address, connection_args=arguments)
        # Cluster._start subscribes to worker events, and would take the owner's subscription.
        self.scheduler_info = SchedulerInfo(await self.scheduler_comm.identity())
        refreshing = PeriodicCallback(self._refresh, REFRESH_INTERVAL)
        self.periodic_callbacks["gpujobs-refresh"] = refreshing
        refreshing.start()
        self.status = Status.running

    async def _refresh(self) -> None:
        with contextlib.suppress(OSError):  # the dask scheduler is gone, or busy
            self.scheduler_info = SchedulerInfo(await self.scheduler_comm.identity())

    def __await__(self) -> Generator[Any, None, ConnectedCluster]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> ConnectedCluster:
        await self._start()
        return self

    def close(self, timeout: float | None = None) -> Any:
        """Detach: the cluster continues."""
        result = super().close(timeout)
        if not self.asynchronous:
            self._loop_runner.stop()
        return result

    def scale(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: object = None,
        cores: object = None,
        **groups: int,
    ) -> Awaitable[None] | None:
        """Change a cluster that `gpujobs submit` started to ``n`` workers, or ``jobs`` jobs.

        In a cluster with groups: to workers of groups, as ``scale(gpu=8)``. Jobs that are lost
        later are not replaced.
        """
        whole = [number for number in (n, jobs) if number is not None]
        if memory is not None or cores is not None or len(whole) + bool(groups) != 1:
            raise InputError("scale: an attached cluster takes a number of workers, or jobs=")
        if whole:
            check_group_names(list(self._group_sizes), [""])
            n = n if n is not None else (jobs or 0) * self._group_sizes[""]
        if self.asynchronous or self.called_from_running_loop:
            return asyncio.ensure_future(asyncio.to_thread(self._handle.scale, n, **groups))
        self._handle.scale(n, **groups)
        return None

    scale_up = scale

    def adapt(self, *args: object, **kwargs: object) -> None:
        """Raise InputError: only the owner adapts a cluster."""
        message = f"{self.id} can only be adapted by the process that owns it and watches its jobs"
        raise InputError(message, hint="use scale() instead")


class AttachedCluster(JobsDisplay, ConnectedCluster):
    """A `ClusterHandle` as a cluster of dask; `GPUJobQueueCluster.from_name` returns it.

    `close` detaches, `shutdown` ends the cluster. A cluster that `gpujobs submit` started can be
    scaled. One that another Python process owns is scaled by its owner.
    """

    _handle: ClusterHandle

    def __init__(self, name: str, *, asynchronous: bool = False, loop: Any = None) -> None:
        self._handle = ClusterHandle(name)
        record = self._handle.record
        self._reporting = threading.Lock()
        self._last_card: Card | None = None
        self._drawing: asyncio.Future[Card] | None = None
        state = read_state(record.path)
        self._address = address_of(record, state)
        silence_ucx(self._address.split("://")[0])
        self._folder = record.path
        self._group_sizes = {group.name: group.workers_per_job for group in record.groups}
        self.security = security_of(record, state)
        super().__init__(asynchronous=asynchronous, loop=loop, name=name)

    def shutdown(self) -> Any:
        """End the cluster, then detach."""
        self._handle.cancel()
        return self.close()

    @property
    def dashboard_link(self) -> str:
        """Link to the dashboard; by default it listens on the loopback interface only."""
        port = self.scheduler_info.get("services", {}).get("dashboard")
        local = self._handle.record.dashboard == "local"
        if port and (local or read_state(self.folder).head is None):
            return str(format_dashboard_link(LOOPBACK, port))
        return str(super().dashboard_link)

    @property
    def plan(self) -> set[str]:
        """Names of the workers that there should be."""
        return {name for job in self._report().jobs if job.active for name in job.workers}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are submitted."""
        return self.plan

    @property
    def folder(self) -> Path:
        """The cluster's folder."""
        return self._folder

    # -- display -----------------------------------------------------------------------------------
    def job_script(self) -> str:
        """Return the script of the worker jobs, as it was submitted."""
        folder = self.folder / "scripts"
        scripts = sorted(path for path in folder.glob("*.sh") if not path.match("head-*"))
        return scripts[-1].read_text(encoding="utf-8") if scripts else ""

    def _report(self) -> ClusterReport:
        with self._reporting:
            return self._handle.status()

    def _job_reports(self) -> list[JobReport]:
        report = self._report()
        return [
            with_log(report.record, job) if job.state is JobState.FAILED else job
            for job in report.jobs
        ]

    def _card(self) -> Card:
        report = self._report()
        status = ""
        if self.status != Status.running and not report.finished:
            status = "detached"
        link = self.dashboard_link
        return Card(report=report, title=type(self).__name__, status=status, dashboard=link)

    def _live_card(self) -> Card:
        """Return the content of a moment ago: a report may query the batch scheduler."""
        if self._drawing is None or self._drawing.done():
            self._drawing = asyncio.ensure_future(asyncio.to_thread(self._card))
            self._drawing.add_done_callback(self._keep_card)
        return self._last_card or self._card()

    def _keep_card(self, drawing: asyncio.Future[Card]) -> None:
        if not drawing.cancelled() and drawing.exception() is None:
            self._last_card = drawing.result()


# -- a cluster on a login node ---------------------------------------------------------------------
_OF_SUBMIT = ("after", "client_timeout", "idle_timeout", "requeue")
"""Keys of the profile that a cluster of a Python process does not have."""


def scheduler_settings(value: Any) -> list[Setting]:
    """Return no setting: the dask scheduler of a cluster on a login node is in a job."""
    if value != "job":
        raise ValueError(f"{value!r} is not 'job': with host=…, the dask scheduler is in a job")
    return []


HOST = Vocabulary(
    {
        **{name: word for name, word in JOBQUEUE.items() if name not in _OF_SUBMIT},
        "scheduler": scheduler_settings,
        **dict.fromkeys(
            ("scheduler_options", "log_directory", "asynchronous", "loop", "silence_logs", "quiet"),
            "leave it out: with host=…, the dask scheduler and the logs are on the host",
        ),
    }
)
"""Of a cluster on a login node, which `gpujobs submit` starts there."""


class HostCluster(ConnectedCluster):
    """A cluster that was submitted on a login node, through ssh; the classes' `host=` returns it.

    Its dask scheduler runs in a job. `close`, and the end of this process, end the cluster.
    """

    _handle: RemoteCluster

    def __init__(
        self,
        host: str,
        configuration: Configuration,
        batch_schedulers: tuple[str, ...],
        site: str | None = None,
        *,
        n_workers: int = 0,
        soonest: bool = False,
        **keywords: Any,
    ) -> None:
        """Return when the dask scheduler runs. Raises InputError, and the errors of the host."""
        name = batch_schedulers[0] if batch_schedulers else ""
        scheduler = get_scheduler(name)() if name else None
        profile, notes = profile_of(keywords, n_workers, configuration, HOST, scheduler)
        for note in notes:
            logger.warning("%s", note)
        text = json.dumps(profile.plain, indent=1, default=str)
        self._handle = RemoteCluster(
            host, text.encode(), batch_schedulers, site=site, soonest=soonest
        )
        self._end = weakref.finalize(self, self._handle.cancel)
        self._stop = threading.Event()
        try:
            found = self._handle.endpoint()
            self._tunnel = Tunnel(self._handle.host, found)
            self._keeper = threading.Thread(
                target=self._tunnel.keep, args=(self._stop,), daemon=True
            )
            self._keeper.start()
            self._address, self._group_sizes = self._tunnel.address, found["groups"]
            self.security = security_in(self.folder) if found["files"] else None
            super().__init__(name=self._handle.id)
        except BaseException:
            self._stop.set()
            self._end()
            raise

    def close(self, timeout: float | None = None) -> Any:
        """End the cluster and its jobs, and close the tunnels."""
        try:
            self._end()
        finally:
            result = super().close(timeout)
            self._stop.set()
            self._keeper.join()
        return result

    shutdown = close

    @property
    def folder(self) -> Path:
        """The folder on this computer with the key and the certificate."""
        return self._tunnel.folder

    @property
    def dashboard_link(self) -> str:
        """Link to the dashboard, through a tunnel."""
        return self._tunnel.dashboard
