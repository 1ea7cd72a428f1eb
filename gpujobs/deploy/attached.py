"""Clusters in batch jobs that this process does not watch: of another process, on another host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, Protocol

from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster
from distributed.objects import SchedulerInfo
from distributed.security import Security
from tornado.ioloop import PeriodicCallback

from ..clusters.connect import Connection
from ..clusters.monitor import with_log
from ..clusters.notebook import Card
from ..clusters.remote import RemoteHandle
from ..clusters.report import ClusterReport, JobReport
from ..clusters.resize import check_group_names
from ..errors import InputError
from ..schedulers import JobState, get_scheduler
from . import credentials
from .clusteroptions import Configuration
from .display import JobsDisplay
from .jobnumbers import Setting
from .keywords import profile_of
from .vocabulary import JOBQUEUE, Vocabulary

logger = logging.getLogger("gpujobs")

REFRESH_INTERVAL = 1000
"""Milliseconds between two updates of the list of workers."""


class View(Protocol):
    """A cluster that this process does not watch: a `ClusterHandle`, or `RemoteHandle` by ssh."""

    id: str

    def connection(self) -> Connection:
        """Return how to connect to its dask scheduler."""

    @property
    def status(self) -> Callable[[], ClusterReport] | None:
        """Returns its state; None if that is known on another host only."""

    def scale(self, workers: int | None = None, **groups: int) -> None:
        """Change the number of workers."""

    def cancel(self) -> None:
        """End it."""


class AttachedCluster(JobsDisplay, Cluster):  # type: ignore[misc]
    """A view of a cluster as a cluster of dask: its dask scheduler runs elsewhere.

    `GPUJobQueueCluster.from_name` returns it: `close` detaches then, and `shutdown` ends the
    cluster. The classes' `host=` returns one that ends with ``close``, or with this process
    (``ends``). A cluster that `gpujobs submit` started can be scaled; one that another Python
    process owns is scaled by its owner.
    """

    status: Status
    security: Security | None

    def __init__(
        self, view: View, *, ends: bool = False, asynchronous: bool = False, loop: Any = None
    ) -> None:
        self.id = view.id
        self._view = view
        self._end = weakref.finalize(self, view.cancel)
        if not ends:
            self._end.detach()
        self._reporting = threading.Lock()
        self._last_card: Card | None = None
        self._drawing: asyncio.Future[Card] | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            self._to = view.connection()
            undo.callback(self._to.close)
            self.security = self._to.security
            super().__init__(asynchronous=asynchronous, loop=loop, name=self.id)
            self.shutdown_on_close = False
            credentials.offer(self)
            if not self.called_from_running_loop:
                self._loop_runner.start()
                self.sync(self._start)
            undo.pop_all()

    async def _start(self) -> None:
        if self.status == Status.running:
            return
        arguments = self.security.get_connection_args("client") if self.security else {}
        self.scheduler_comm = rpc(self._to.address, connection_args=arguments)
        # Cluster._start subscribes to worker events, and would take the owner's subscription.
        self.scheduler_info = SchedulerInfo(await self.scheduler_comm.identity())
        refreshing = PeriodicCallback(self._refresh, REFRESH_INTERVAL)
        self.periodic_callbacks["gpujobs-refresh"] = refreshing
        refreshing.start()
        self.status = Status.running

    async def _refresh(self) -> None:
        with contextlib.suppress(OSError):  # the dask scheduler is gone, or busy
            self.scheduler_info = SchedulerInfo(await self.scheduler_comm.identity())

    def __await__(self) -> Generator[Any, None, AttachedCluster]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> AttachedCluster:
        await self._start()
        return self

    def close(self, timeout: float | None = None) -> Any:
        """Detach: the cluster continues, unless it ``ends``."""
        try:
            self._end()  # does nothing if it was detached
        finally:
            result = super().close(timeout)
            if not self.asynchronous:
                self._loop_runner.stop()
            self._to.close()
        return result

    def shutdown(self) -> Any:
        """End the cluster, then detach."""
        if not self._end.alive:  # else `close` does it
            self._view.cancel()
        return self.close()

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
            check_group_names(list(self._to.workers_per_job), [""])
            n = n if n is not None else (jobs or 0) * self._to.workers_per_job[""]
        if self.asynchronous or self.called_from_running_loop:
            return asyncio.ensure_future(asyncio.to_thread(self._view.scale, n, **groups))
        self._view.scale(n, **groups)
        return None

    scale_up = scale

    def adapt(self, *args: object, **kwargs: object) -> None:
        """Raise InputError: only the owner adapts a cluster."""
        message = f"{self.id} can only be adapted by the process that owns it and watches its jobs"
        raise InputError(message, hint="use scale() instead")

    @property
    def dashboard_link(self) -> str:
        """Link to the dashboard; by default it listens on the loopback interface only."""
        return self._to.dashboard

    @property
    def plan(self) -> set[str]:
        """Names of the workers that there should be, as far as this process knows."""
        if self._view.status is None:
            return set(self.observed)
        return {name for job in self._report().jobs if job.active for name in job.workers}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are submitted."""
        return self.plan

    @property
    def folder(self) -> Path:
        """The cluster's folder; on another computer than its own, that with its certificate."""
        return self._to.folder

    # -- display -----------------------------------------------------------------------------------
    def job_script(self) -> str:
        """Return the script of the worker jobs, as it was submitted."""
        folder = self.folder / "scripts"
        scripts = sorted(path for path in folder.glob("*.sh") if not path.match("head-*"))
        return scripts[-1].read_text(encoding="utf-8") if scripts else ""

    def _report(self) -> ClusterReport:
        if self._view.status is None:
            message = f"the jobs of {self.id} are known on its login node only"
            raise InputError(message, hint=f"gpujobs --host HOST status {self.id}")
        with self._reporting:
            return self._view.status()

    def _job_reports(self) -> list[JobReport]:
        report = self._report()
        return [
            with_log(report.record, job) if job.state is JobState.FAILED else job
            for job in report.jobs
        ]

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        if self._view.status is None:
            return str(Cluster._repr_html_(self, cluster_status))
        return super()._repr_html_(cluster_status)

    def _card(self) -> Card:
        report = self._report()
        status = ""
        if self.status != Status.running and not report.finished:
            status = "detached"
        link = self.dashboard_link
        return Card(report=report, title=type(self).__name__, status=status, dashboard=link)

    def _live_card(self) -> Card:
        """Return the content of a moment ago: a report may query the batch scheduler."""
        if self._last_card is None:  # the first one
            self._last_card = self._card()
        elif self._drawing is None or self._drawing.done():
            self._drawing = asyncio.ensure_future(asyncio.to_thread(self._card))
            self._drawing.add_done_callback(self._keep_card)
        return self._last_card

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


def submit_on_host(
    host: str,
    configuration: Configuration,
    batch_schedulers: tuple[str, ...],
    site: str | None = None,
    *,
    n_workers: int = 0,
    soonest: bool = False,
    **keywords: Any,
) -> AttachedCluster:
    """Submit a cluster on a login node, through ssh; return it when its dask scheduler runs.

    Raises InputError, and the errors of the host.
    """
    name = batch_schedulers[0] if batch_schedulers else ""
    scheduler = get_scheduler(name)() if name else None
    profile, notes = profile_of(keywords, n_workers, configuration, HOST, scheduler)
    for note in notes:
        logger.warning("%s", note)
    text = json.dumps(profile.plain, indent=1, default=str)
    remote = RemoteHandle(host, text.encode(), batch_schedulers, site=site, soonest=soonest)
    return AttachedCluster(remote, ends=True)
