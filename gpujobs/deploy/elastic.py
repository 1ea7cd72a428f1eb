"""The methods with which a cluster that this process owns is resized, adapted and inspected."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dask.utils import parse_timedelta
from distributed.core import Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import ProcessInterface, SpecCluster
from distributed.utils import format_dashboard_link

from ..clusters.notebook import Card
from ..clusters.progress import LibraryProgress
from ..clusters.report import ClusterReport, JobReport
from ..clusters.resize import check_group_names
from ..errors import GpujobsError, InputError
from ..injob.demand import HANDLER
from ..injob.names import LOOPBACK, job_name
from ..text import did_you_mean, plural
from .clusteroptions import Amount
from .daskscheduler import END_TIMEOUT, Client, DaskControl
from .display import JobsDisplay, JobTable
from .group import WorkerGroup
from .pool import JobPool
from .pooljobs import PoolJob
from .scaler import Scaler, wait_for
from .vocabulary import plain

# -- adaptive scaling: a job of four GPUs is not released if one worker is idle --------------------
SHORTEST_HOLD, LONGEST_HOLD = 120.0, 1800.0
"""Bounds of the time for which idle jobs are kept, in seconds."""


class JobAdaptive(Adaptive):  # type: ignore[misc]
    """Requests whole jobs, and releases whole idle ones.

    ``hold``: time for which all workers of a job must be idle before it is released; default: as
    long as a job of this cluster has waited in the queue, within 2 and 30 minutes. ``grace``:
    seconds for which a job without connected workers is kept although nothing needs it.
    ``group``: only the workers of this group, by the tasks that they can run.
    """

    def __init__(
        self,
        *args: Any,
        group: str = "",
        grace: float = 30.0,
        hold: float | str | None = None,
        **kwargs: Any,
    ) -> None:
        self.group = group
        self.grace = grace
        self._demands: deque[tuple[float, int]] = deque()
        """Needed jobs, with the time."""
        self._hold: float | None = None if hold is None else parse_timedelta(hold)
        super().__init__(*args, **kwargs)

    @property
    def hold(self) -> float:
        """Seconds for which an idle job is kept."""
        if self._hold is not None:
            return self._hold
        return min(LONGEST_HOLD, max(SHORTEST_HOLD, self._pool.jobs.longest_wait))

    @property
    def _pool(self) -> JobPool:
        pool: JobPool = self.cluster._pool
        return pool

    async def target(self) -> int:
        """Return the number of workers that the tasks need."""
        if not self.group and not self._pool.jobs.drained:  # which dask counts like any other
            wanted: int = await super().target()
            return wanted
        call = getattr(self.scheduler, HANDLER)
        demand = self._pool.groups[self.group].demand(self._pool.id, self._pool.plan.groups)
        found: int = await call(**demand, target_duration=self.target_duration)
        return found

    async def scale_up(self, n: int) -> None:
        """Request as many of ``n`` workers as are possible."""
        await self.cluster._scaler.grow(self.group, n)

    async def scale_down(self, workers: Sequence[str]) -> None:
        """Release the jobs of these workers, which transfer their data."""
        await self.cluster._scaler.release(workers)

    async def recommendations(self, target: int) -> dict[str, Any]:
        """Return the next step to ``target`` workers: up, down, or the same."""
        now, group = self._pool.system.monotonic(), self._pool.groups[self.group]
        jobs = self._pool.jobs.counting(self.group)
        await self._note_idle_jobs(jobs, now)
        if self.state == "stopped":  # meanwhile, perhaps by `scale`, whose target stays
            return {"status": "same"}
        maximum = most_jobs(self, group)
        wanted = min(group.jobs_for(target), maximum)
        self.cluster._scaler.set_demand(self.group, wanted, maximum)
        self._demands.append((now, wanted))
        if wanted > len(jobs):
            return {"status": "up", "n": wanted * group.size}
        if released := self._releasable(jobs, wanted, now):
            names = [name for job in released for name in job.report.workers]
            return {"status": "down", "workers": names}
        return {"status": "same"}

    def _releasable(self, jobs: list[PoolJob], wanted: int, now: float) -> list[PoolJob]:
        """Return the jobs to release: first those without workers, then idle ones."""
        candidates = [job for job in jobs if not job.report.head]
        unused = [
            job for job in candidates if not job.report.connected and now - job.queued >= self.grace
        ]
        unused = unused[: max(0, len(jobs) - self._recent_demand(now))]
        idle = [
            job
            for job in candidates
            if job.idle_since is not None and now - job.idle_since >= self.hold
        ]
        return [*unused, *idle][: len(jobs) - wanted]

    def _recent_demand(self, now: float) -> int:
        """Return the most jobs that were needed within the last `grace` seconds."""
        while len(self._demands) > 1 and self._demands[1][0] <= now - self.grace:
            self._demands.popleft()
        if self._demands[0][0] > now - self.grace:  # it is not known for long enough
            return sys.maxsize
        return max(jobs for _, jobs in self._demands)

    async def _note_idle_jobs(self, jobs: list[PoolJob], now: float) -> None:
        load = await self.cluster._dask.load()
        if load is None:  # what was known is not changed
            return
        for job in jobs:
            if not job.report.connected or any(map(load.get, job.report.workers)):
                job.idle_since = None
            elif job.idle_since is None:
                job.idle_since = now


def most_jobs(adaptive: Adaptive, group: WorkerGroup) -> int:
    """Return how many whole jobs have at most `maximum` workers."""
    if math.isinf(adaptive.maximum):
        return sys.maxsize
    return int(adaptive.maximum) // group.size


def check_bounds(adaptive: Adaptive, group: WorkerGroup) -> None:
    """Stop ``adaptive`` and raise InputError if no number of whole jobs is within its bounds."""
    least, most = group.jobs_for(adaptive.minimum), most_jobs(adaptive, group)
    if least <= most and (most or not adaptive.maximum):
        return
    adaptive.stop()
    if adaptive.minimum > adaptive.maximum:
        message = f"adapt: the minimum of {adaptive.minimum} workers is above the maximum"
        raise InputError(f"{message} of {adaptive.maximum}")
    bounds = f"{adaptive.minimum} to {adaptive.maximum} workers"
    message = f"adapt: no number of jobs of {plural(group.size, 'worker')} has {bounds}"
    raise InputError(message, hint=f"workers come in whole jobs: use multiples of {group.size}")


def check_options(names: Iterable[str]) -> None:
    """Raise InputError if `adapt` has no keyword of one of these names: dask ignores them."""
    known = {"minimum_jobs", "maximum_jobs"}
    for function in (SpecCluster.adapt, Adaptive.__init__, JobAdaptive.__init__):
        parameters = inspect.signature(function).parameters.values()
        known |= {one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD}
        known |= {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    known -= {"self", "cluster"}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"adapt has {', '.join(sorted(known))}"
            raise InputError(f"adapt: unknown keyword {name}", hint=hint)


# -- a cluster of whole jobs -----------------------------------------------------------------------
class ElasticCluster(JobsDisplay, Cluster):  # type: ignore[misc]
    """A cluster of whole jobs. Its base in dask keeps single workers; that is replaced here."""

    id: str
    new_spec: dict[str, Any]
    adaptives: dict[str, Any]
    """Adaptive scaling by group of workers; "" if the cluster has no groups."""
    _pool: JobPool
    _dask: DaskControl
    _scaler: Scaler

    @property
    def dashboard_link(self) -> str:
        """Link to the dashboard; `gpujobs connect` prints the tunnel to a loopback interface."""
        server = getattr(self.scheduler, "http_server", None)  # of a dask scheduler in this process
        if server is not None and server.address == LOOPBACK:
            return str(format_dashboard_link(LOOPBACK, server.port))
        port = self.scheduler_info.get("services", {}).get("dashboard")
        if server is None and port and self._pool.record.dashboard == "local":
            return str(format_dashboard_link(LOOPBACK, port))
        return str(super().dashboard_link)

    # -- scale -------------------------------------------------------------------------------------
    def sync(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a coroutine function in the event loop; see dask's clusters.

        An error of gpujobs says what is wrong: the calls inside it that found it are left out.
        """
        try:
            return super().sync(func, *args, **kwargs)
        except GpujobsError as error:
            raise error.with_traceback(None) from None

    def scale(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: Any = None,
        cores: int | None = None,
        **groups: int,
    ) -> Any:
        """Request ``n`` workers, ``jobs`` jobs, or workers with ``memory`` or ``cores``.

        In a cluster with groups: workers of groups, as ``scale(gpu=8, prep=2)``; the others stay.
        Workers come and go in whole jobs: the number is rounded up, and that is logged. Raises
        RefusedError in the batch scheduler's words; then nothing has changed, of the refused group.
        If the batch scheduler is away, the jobs are submitted when it responds.
        With an asynchronous cluster the result must be awaited.
        """
        if self.status == Status.closing:  # dask closes by scaling to 0
            for group in self._pool.groups.values():
                group.target = 0  # not in the record: its last target is the user's
            return None
        self._check_open()
        self._scaler.check_elastic()
        amounts = {name: Amount(plain(number)) for name, number in groups.items()}
        whole = Amount(plain(n), plain(jobs), plain(memory), plain(cores))
        if whole != Amount() or not groups:
            amounts[""] = whole
        check_group_names(list(self._pool.groups), amounts)
        self._scaler.set_targets(
            {
                name: amount.in_jobs(self._pool.groups[name], self._log)
                for name, amount in amounts.items()
            }
        )
        if self.asynchronous or self.called_from_running_loop:
            return self._correct_state()
        return self.sync(self._correct_state)

    scale_up = scale

    def _check_open(self) -> None:
        """Raise JobFailedError if the cluster was closed, or has ended."""
        if self.status in (Status.closing, Status.closed) or self._pool.halt is not None:
            raise self._pool.ended_error()

    async def _correct_state_internal(self) -> None:
        self._correct_state_waiting = None  # calls of one moment share a task until here
        if self.status not in (Status.closing, Status.closed):
            await self._scaler.reach_targets_soon()

    async def _wait_for_workers(
        self, n_workers: int = 0, timeout: float | str | None = None
    ) -> None:
        await wait_for(self._scaler, n_workers, timeout, LibraryProgress(quiet=self.quiet))

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # SpecCluster's removes a whole job when one of its workers is lost.
        Cluster._update_worker_status(self, op, msg)
        self._pool.query_soon()
        if op == "add":
            self._scaler.watch_soon()  # its job had perhaps ended, and the last one, too

    def get_client(self) -> Any:
        """Return the current client of this cluster, or a new one, which closes when this ends."""
        with contextlib.suppress(ValueError):  # there is none
            current = Client.current()
            if current.cluster is self:
                return current
        return Client(self)

    async def is_ending(self) -> bool:
        """Return whether the cluster ends, after its dask scheduler has closed a connection."""
        clock = self._pool.system.monotonic
        deadline = clock() + END_TIMEOUT
        while clock() < deadline:
            running = self.status == Status.running and not self._dask.end_of_scheduler()
            if not running or (self.folder / "ended").exists():
                return True
            await asyncio.sleep(0.2)
        return False

    # -- adapt -------------------------------------------------------------------------------------
    def adapt(
        self,
        *args: Any,
        group: str = "",
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        Adaptive: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Scale between ``minimum`` and ``maximum`` workers by the load, in whole jobs.

        In a cluster with groups: the workers of one ``group``, by the tasks that they can run.
        Fewer than ``maximum`` come if a limit of the site allows no more; that is logged. Jobs
        above ``maximum`` leave now, also busy ones. ``hold``: time for which a job must be idle
        before it is released (see `JobAdaptive`).
        """
        self._check_open()
        if Adaptive is None:
            check_options(kwargs)
        self._scaler.check_elastic()
        check_group_names(list(self._pool.groups), [group])
        self._scaler.forget_failures([group])
        workers = self._pool.groups[group]
        if minimum_jobs is not None:
            kwargs["minimum"] = minimum_jobs * workers.size
        if maximum_jobs is not None:
            kwargs["maximum"] = maximum_jobs * workers.size
        if "wait_count" in kwargs:
            self._log(
                "adapt: wait_count has no effect; hold=… is the time that an idle job is kept"
            )
        if group:
            kwargs["group"] = group
            self._adaptive_options: dict[str, Any] = {}  # those of another group
        # Dask stops the adaptive scaling that this one replaces, and converts minimum_cores.
        self._adaptive = self.adaptives.get(group)
        self.new_spec = {**self.new_spec, "options": workers.worker_options}
        adaptive = SpecCluster.adapt(self, *args, Adaptive=Adaptive or JobAdaptive, **kwargs)
        check_bounds(adaptive, workers)
        self.adaptives[group] = adaptive
        return adaptive

    async def scale_down(self, workers: Sequence[str]) -> None:
        """Release the jobs whose workers are all named."""
        await self._scaler.release(workers)

    # -- inspect -----------------------------------------------------------------------------------
    @property
    def plan(self) -> set[str]:
        """Names of the workers that there should be."""
        return {name for job in self._pool.jobs.counting() for name in job.report.workers}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are submitted."""
        return {name for job in self._pool.jobs.active.values() for name in job.report.workers}

    @property
    def workers(self) -> dict[str, PoolJob]:
        """The submitted jobs by name, each with ``status`` and ``job_id``, as in dask-jobqueue."""
        return {_name(job, self.id): job for job in self._pool.jobs.active.values()}

    @workers.setter
    def workers(self, workers: object) -> None:
        """Ignore the initial value of SpecCluster."""

    @property
    def worker_spec(self) -> dict[str, dict[str, object]]:
        """The jobs that there should be, by name, as dask's clusters show them."""
        named = ((_name(job, self.id), job.report) for job in self._pool.jobs.counting())
        return {
            name: {
                "cls": ProcessInterface,
                "options": self._pool.groups[job.group].worker_options,
                "group": [worker.removeprefix(name) for worker in job.workers],
            }
            for name, job in named
        }

    @worker_spec.setter
    def worker_spec(self, spec: object) -> None:
        """Ignore the initial value of SpecCluster."""

    @property
    def jobs(self) -> JobTable:
        """The jobs, active ones first: a list of JSON objects that displays as a table.

        The batch scheduler is queried first, unless that was done within the site's `poll`.
        """
        if not self.asynchronous and not self.called_from_running_loop:
            self.sync(self._scaler.update)
        return super().jobs

    def job_script(self, group: str | None = None) -> str:
        """Return the script of the next worker job, of a group or of the first one."""
        return self._pool.next_script(group)

    def _job_reports(self) -> list[JobReport]:
        return self._pool.latest(self._dask.connected)

    # -- in a notebook -----------------------------------------------------------------------------
    def _card(self) -> Card:
        return self._card_of(self._pool.monitor.latest(self._dask.connected))

    def _live_card(self) -> Card:
        pool, report = self._pool, self._pool.report
        if report is None or report.record.submissions != pool.record.submissions:
            return self._card()
        return self._card_of(replace(report, record=pool.record))

    def _card_of(self, report: ClusterReport) -> Card:
        pool = self._pool
        status = ""
        if not self._dask.open:
            status = "closed"
        elif not report.active and not pool.cluster_ended:
            status = "no jobs"
        return Card(
            report=report,
            title=type(self).__name__,
            status=status,
            dashboard=self.dashboard_link,
            problem=str(pool.conflict or ""),
            adaptive=tuple(filter(self._dask.adapts, pool.groups)),
        )


def _name(job: PoolJob, cluster_id: str) -> str:
    return job_name(cluster_id, job.report.number, job.report.group)
