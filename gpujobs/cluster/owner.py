"""GPUJobQueueCluster: a dask cluster in batch jobs, elastic, watched, and owned by this Python process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from dask.utils import parse_bytes, parse_timedelta
from distributed import Scheduler
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import ProcessInterface, SpecCluster
from distributed.objects import SchedulerInfo
from distributed.utils import Log

from .. import connection, injob
from .. import folder as folders
from ..config import sources
from ..errors import GpujobsError, InputError
from ..ledger import Ledger, write_atomically
from ..prepare import plan_order
from ..units import count
from .adaptive import WholeJobs
from .base import JobQueueCluster, configured
from .headjob import HeadJob
from .jobs import Job, JobTable, Phase, counts
from .keywords import order_of
from .transport import for_client
from .workforce import Workforce, off_loop

logger = logging.getLogger("gpujobs")

LEASE = 10.0
"""Seconds between two signs of life of this process in the cluster's folder."""
RETIRE = 30.0
"""Seconds that workers which must go have to hand their data over."""
GOODBYE = 1.0
"""Seconds that workers have to leave when the cluster is closed."""
TICK = 1.0


class GPUJobQueueCluster(JobQueueCluster):  # type: ignore[misc]
    """A dask cluster whose workers are GPUs in jobs of a batch scheduler.

    Parameters
    ----------
    site
        Name of a site or path of a site file; default: ``$GPUJOBS_SITE``, else the site that knows this host.
    n_workers
        GPUs (= workers) to start with.
    scheduler
        ``"local"``: the dask scheduler runs in this process. ``"job"``: in a job of its own shape (``head={…}``), else
        in the first worker job; this process only connects.
    scheduler_options
        Options of a local dask scheduler, as ``{"dashboard_address": ":8787"}``.
    asynchronous, loop, silence_logs, quiet
        As dask's clusters have them.
    log_directory
        Where the jobs' logs go; default: the cluster's folder.
    **keywords
        The keys of a profile: ``gpus_per_job, gpu_type, queue, account, walltime, environment, network, env,
        directives, head, name, start_timeout, workers``; ``worker_memory, worker_threads, worker_class,
        worker_options``; and dask-jobqueue's ``cores, memory, processes`` (of one job), ``interface, protocol,
        local_directory, python, death_timeout, job_extra_directives, job_script_prologue, worker_extra_args``.

    Raises
    ------
    InputError
        A ValueError that names the keyword, before anything is submitted.
    RefusedError
        The batch scheduler said no, in its own words; `scale` raises it, too.

    Examples
    --------
    >>> cluster = GPUJobQueueCluster(site="delta", account="m1234", walltime="2h", gpus_per_job=4)  # doctest: +SKIP
    >>> cluster.scale(8)  # doctest: +SKIP
    >>> client = cluster.get_client()  # doctest: +SKIP
    """

    batch_schedulers: ClassVar[tuple[str, ...]] = ()
    """The site's batch scheduler must be one of these; none: any."""

    def __init__(
        self,
        site: str | None = None,
        *,
        n_workers: int = 0,
        log_directory: str | None = None,
        scheduler: str = "local",
        scheduler_options: dict[str, Any] | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        silence_logs: Any = "error",
        quiet: bool = False,
        **keywords: Any,
    ) -> None:
        given = configured(self.batch_schedulers[0]) if self.batch_schedulers else {}
        given.update({key: value for key, value in keywords.items() if value is not None})
        logs = log_directory or given.pop("log_directory", None)
        order = order_of(given, site, n_workers, self.batch_schedulers)
        self._begin(order, n_workers, logs, scheduler, scheduler_options, asynchronous, loop, silence_logs, quiet)

    @classmethod
    def from_profile(
        cls,
        path: str | Path,
        *,
        site: str | None = None,
        log_directory: str | None = None,
        scheduler: str = "local",
        scheduler_options: dict[str, Any] | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        silence_logs: Any = "error",
        quiet: bool = False,
    ) -> GPUJobQueueCluster:
        """Return the cluster that a profile file describes, with its `gpus` as workers to start with.

        The site picks the class. The profile's `run:` is not run.
        """
        order = sources.load_order(Path(path), site=site)
        self = cls.__new__(class_for(order.site.site.scheduler, cls))
        self._begin(order, None, log_directory, scheduler, scheduler_options, asynchronous, loop, silence_logs, quiet)
        return self

    from_yaml = from_profile

    @classmethod
    def from_name(cls, name: str, **options: Any) -> GPUJobQueueCluster:
        """Attach to the cluster with this id: `close` detaches, `shutdown` ends it."""
        from .attached import AttachedCluster

        return AttachedCluster(name, **options)

    def _begin(
        self, order: sources.Order, n_workers: int | None, log_directory: str | None, scheduler: str,
        scheduler_options: dict[str, Any] | None, asynchronous: bool, loop: Any, silence_logs: Any, quiet: bool,
    ) -> None:  # fmt: skip
        if scheduler not in ("local", "job"):
            raise InputError(f"scheduler: {scheduler!r} is neither 'local' nor 'job'")
        plan, reason = for_client(plan_order(order, elastic=True))
        if not plan.transport.schemes:
            raise InputError(reason, hint="network={'protocol': 'auto'}")
        if scheduler == "local":  # here is where the choice is made
            plan = replace(plan, transport=replace(plan.transport, schemes=plan.transport.schemes[:1]))
        self._force = force = Workforce(order, plan, Ledger())
        self.id, self.workers_per_job = force.id, force.workers_per_job
        self._target = 0
        self._tasks: list[asyncio.Task[None]] = []
        logs = Path(log_directory).expanduser() if log_directory else None
        folders.make(self.folder, encrypted=force.record.encrypted, logs=logs)
        try:
            self._touch_lease()
            if scheduler == "local":
                chosen = {"scheme": plan.transport.schemes[0], "reason": reason}
                write_atomically(self.folder / "transport.json", json.dumps(chosen))
            force.ledger.add(force.record)
            shape, threads = plan.workers.shape, plan.profile.workers.threads
            worker = {
                "cls": ProcessInterface,
                "options": {"nthreads": threads, "memory_limit": shape.worker_memory or 0},
            }
            security = connection.security(force.record)
            if scheduler == "local":
                spec = self._scheduler_spec(scheduler_options or {}, security)
            else:
                spec = {"cls": HeadJob, "options": {"workforce": force, "security": security}}
            SpecCluster.__init__(  # not JobQueueCluster's, which builds a Job of its own
                self, scheduler=spec, worker=worker, asynchronous=asynchronous, loop=loop,
                security=security, silence_logs=silence_logs, name=self.id,
            )  # fmt: skip
            self.quiet = quiet
            for note in (*plan.notes, *([reason] if reason else [])):
                self._log(note)
            wanted = plan.n_workers if n_workers is None else n_workers
            self._target = math.ceil(wanted / self.workers_per_job)
            self._write_down_target()
            if self._target and not self.asynchronous:
                self.sync(self._reach_target)
        except BaseException as error:
            self._give_up()
            if isinstance(error.__cause__, GpujobsError):  # dask says "Cluster failed to start" in front of it
                raise error.__cause__ from None
            raise

    def _scheduler_spec(self, options: dict[str, Any], security: Any) -> dict[str, Any]:
        plan = self._force.plan
        own: dict[str, Any] = {
            "protocol": f"{plan.transport.schemes[0]}://",
            "security": security,
            "dashboard_address": ":8787",
            "scheduler_file": str(self.folder / "scheduler.json"),
        }
        if "host" not in options and "interface" not in options:
            if plan.transport.interface:
                own["interface"] = plan.transport.interface
            elif plan.scheduler.on_this_machine:
                own["host"] = "127.0.0.1"
        return {"cls": Scheduler, "options": {**own, **options}}

    def _give_up(self) -> None:
        """Leave nothing of a cluster that did not come up."""
        force = self._force
        sent = bool(force.record.submissions or force.record.intent)
        with contextlib.suppress(Exception):
            force.end_all()
        if hasattr(self, "_loop_runner"):
            with contextlib.suppress(Exception):
                self.close(timeout=10)
        self.status = Status.closed
        if not sent:
            force.ledger.remove(self.id)
            folders.remove(self.folder)

    # -- the target -------------------------------------------------------------------------------------------
    def scale(self, n: int | None = None, jobs: int | None = None, memory: Any = None, cores: int | None = None) -> Any:
        """Ask for ``n`` workers (= GPUs), or ``jobs`` jobs, or workers that have ``memory`` or ``cores`` together.

        Workers come and go by whole jobs: the number is rounded up, and that is said. Raises RefusedError in the batch
        scheduler's words; nothing is half made then. With an asynchronous cluster the result must be awaited.
        """
        self._check_elastic()
        self._target = self._jobs_for(n, jobs, memory, cores)
        self._force.error, self._force.failed_starts = None, 0
        if self.status in (Status.closing, Status.closed):
            return None
        self._write_down_target()
        if self.asynchronous or self.called_from_running_loop:
            return self._correct_state()
        return self.sync(self._reach_target)

    scale_up = scale

    def _check_elastic(self) -> None:
        if self._force.plan.ranks:
            hint = "make another cluster, with n_workers=…"
            raise InputError(f"{self.id} is one MPI allocation, which has its size for good", hint=hint)

    def _jobs_for(self, n: int | None, jobs: int | None, memory: Any, cores: int | None) -> int:
        for name, value in (("n", n), ("jobs", jobs), ("cores", cores)):
            if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0):
                raise InputError(f"scale: {name}={value!r} is not a number of at least 0")
        if jobs is not None:
            return math.ceil(jobs)
        wanted = n or 0
        if memory is not None:
            wanted = max(wanted, math.ceil(parse_bytes(memory) / self._memory_per_worker()))
        if cores is not None:
            wanted = max(wanted, math.ceil(cores / self._threads_per_worker()))
        whole = math.ceil(wanted / self.workers_per_job)
        if whole * self.workers_per_job != wanted:
            what = count(whole, "job")
            self._log(f"{wanted} workers are {what} of {self.workers_per_job}: {whole * self.workers_per_job} workers")
        return whole

    def _write_down_target(self) -> None:
        force = self._force
        workers = self._target * self.workers_per_job
        if workers != force.record.workers:
            gpus = self._target * force.plan.workers.shape.gpus
            force.record = force.ledger.update(self.id, workers=workers, gpus=gpus)

    async def _reach_target(self) -> None:
        await self._correct_state()

    async def _correct_state_internal(self) -> None:
        async with self._lock:
            self._correct_state_waiting = None  # dask lets calls of the same moment share one task until here
            counting = self._force.counting()
            surplus = len(counting) - self._target
            if surplus > 0:
                load = await self._load() if any(job.connected for job in counting) else {}
                await self._force.remove(self._force.cheapest(surplus, load), self._retire)
            elif surplus < 0:
                try:
                    await self._force.submit(-surplus)
                except Exception as error:
                    self._target, self._force.error = len(self._force.counting()), error
                    raise
                finally:
                    self._watch_soon()

    async def _load(self) -> dict[str, int]:
        """Return how many tasks each worker has, by name."""
        info = self.scheduler_info["workers"]
        processing = await self.scheduler_comm.processing()
        return {info[address]["name"]: len(tasks) for address, tasks in processing.items() if address in info}

    async def _retire(self, names: list[str]) -> None:
        if self.status == Status.running:
            with contextlib.suppress(Exception):  # what does not hand over in time is cancelled all the same
                retire = self.scheduler_comm.retire_workers(names=names, close_workers=True, remove=True)
                await asyncio.wait_for(retire, RETIRE)

    def counting_jobs(self) -> list[Job]:
        """Return the jobs that count towards the target."""
        return self._force.counting()

    async def scale_down(self, workers: Sequence[str]) -> None:
        """Give back the jobs whose workers are all named (`Adaptive` calls this)."""
        named = set(workers)
        async with self._lock:
            chosen = [job for job in self._force.counting() if named.issuperset(job.workers) and not job.head]
            self._target -= len(chosen)
            self._write_down_target()
            await self._force.remove(chosen, self._retire)

    # -- watch ------------------------------------------------------------------------------------------------
    def _watch_soon(self) -> None:
        if not any(task.get_name() == "watch" and not task.done() for task in self._tasks):
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._watch(), name="watch"))

    async def _watch(self) -> None:
        while self._force.jobs and self.status in (Status.created, Status.starting, Status.running):
            await asyncio.sleep(TICK)
            try:
                await self._round()
            except (GpujobsError, OSError) as error:
                logger.warning("%s: %s", self.id, error)

    async def _round(self) -> None:
        force = self._force
        told = force.conflict
        for job in await force.look(frozenset(self.observed), self._lock):
            how = " before its workers connected" if job.phase is Phase.FAILED else ""
            self._log(f"job {job.job_id} of {self.id} ended{how}: {job.reason or 'released'}")
        if force.conflict is not None and told is None:
            logger.error("%s: %s", self.id, force.conflict)
        if force.error is not None:
            self._target = min(self._target, len(force.counting()))
        elif len(force.counting()) < self._target and self.status == Status.running:
            with contextlib.suppress(GpujobsError):  # kept in `error`, for wait_for_workers
                await self._correct_state()

    def _update_worker_status(self, op: str, msg: Any) -> None:
        Cluster._update_worker_status(self, op, msg)  # SpecCluster's takes a whole job away when one worker is lost
        self._force.look_soon()

    async def _wait_for_workers(self, n_workers: int = 0, timeout: float | str | None = None) -> None:
        force, deadline = self._force, time.monotonic() + parse_timedelta(timeout) if timeout else None
        while True:
            self.scheduler_info = SchedulerInfo(await self.scheduler_comm.identity())
            found = sum(worker["status"] == "running" for worker in self.scheduler_info["workers"].values())
            if force.conflict is not None:
                raise force.conflict
            if found >= n_workers:
                return
            if force.error is not None:
                raise force.error
            planned = max(self._target, len(force.counting())) * self.workers_per_job
            if n_workers > planned and not self._adapts:
                raise InputError(
                    f"waiting for {n_workers} workers, but only {planned} were asked for", hint="scale() first"
                )
            if deadline and time.monotonic() > deadline:
                jobs = counts(force.jobs.values()) or "no jobs"
                raise TimeoutError(f"{found} of {n_workers} workers after {timeout} s: {jobs}")
            await asyncio.sleep(0.1)

    # -- adapt ------------------------------------------------------------------------------------------------
    def adapt(
        self,
        *args: Any,
        minimum_jobs: int | None = None,
        maximum_jobs: int | None = None,
        Adaptive: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Scale between ``minimum`` and ``maximum`` workers by what there is to do, in whole jobs."""
        self._check_elastic()
        if minimum_jobs is not None:
            kwargs["minimum"] = minimum_jobs * self.workers_per_job
        if maximum_jobs is not None:
            kwargs["maximum"] = maximum_jobs * self.workers_per_job
        return SpecCluster.adapt(self, *args, Adaptive=Adaptive or WholeJobs, **kwargs)

    @property
    def _adapts(self) -> bool:
        return self._adaptive is not None and self._adaptive.state in ("starting", "running")

    @property
    def plan(self) -> set[str]:
        """Names of the workers that there should be."""
        return {name for job in self._force.counting() for name in job.workers}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are submitted."""
        return {name for job in self._force.jobs.values() for name in job.workers}

    # -- life -------------------------------------------------------------------------------------------------
    async def _start(self) -> None:
        new = self.status == Status.created
        await super()._start()
        if new:
            if self._force.jobs:  # the head's job
                self._watch_soon()
            else:
                self.scheduler.add_plugin(injob.roster(self.scheduler, str(self.folder)), name="gpujobs")
            self._tasks.append(asyncio.create_task(self._keep_lease(), name="lease"))

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(LEASE)
            with contextlib.suppress(GpujobsError, OSError):
                await off_loop(self._touch_lease)

    def _touch_lease(self) -> None:
        write_atomically(self.folder / "lease", f"{time.time()}\n")

    async def _close(self) -> None:
        if self.status in (Status.closing, Status.closed):
            await super()._close()
            return
        self._target = 0
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        ending = asyncio.ensure_future(off_loop(self._force.end_all))
        await self._goodbye()
        await super()._close()
        await ending

    async def _goodbye(self) -> None:
        """Let workers go before their dask scheduler does: else it complains about each broken connection."""
        if self.status != Status.running or not self.scheduler_info["workers"]:
            return
        deadline = time.monotonic() + GOODBYE
        while self.scheduler_info["workers"] and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # from the last word to the end of the connection

    def shutdown(self) -> Any:
        """End the cluster: for its owner the same as `close`."""
        return self.close()

    # -- what people see --------------------------------------------------------------------------------------
    @property
    def jobs(self) -> JobTable:
        """The jobs, living ones first: a list of dicts that shows itself as a table, in a notebook as HTML."""
        return JobTable(job.row() for job in (*self._force.jobs.values(), *reversed(self._force.past)))

    @property
    def folder(self) -> Path:
        """The cluster's folder, with logs, scripts and certificate."""
        return self._force.record.path

    def job_script(self) -> str:
        """Return the script of the next worker job."""
        return self._force.next_script()

    @property
    def job_header(self) -> str:
        """The directives of the next worker job."""
        prefix = self._force.plan.scheduler.prefix
        return "\n".join(line for line in self.job_script().splitlines() if line.startswith((prefix, "#!")))

    @property
    def job_name(self) -> str:
        """The name of all jobs: the cluster's id."""
        return self.id

    async def _get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:
        logs = await super()._get_logs(cluster=cluster, scheduler=scheduler, workers=workers)
        if workers is True:  # also of jobs whose workers never connected
            for path in sorted((self.folder / "logs").glob("job-*.log")):
                logs[path.stem] = Log("\n".join(folders.tail(path, 500)))
        return logs

    def _scaling_status(self) -> str:
        mode = "Adaptive" if self._adapts else "Manual"
        workers = f"{len(self.scheduler_info['workers'])} / {len(self.requested)}"
        rows = (f"Scaling mode: {mode}", f"Workers: {workers}", f"Jobs: {counts(self._force.jobs.values()) or 'none'}")
        return "<table>" + "".join(f"<tr><td style='text-align: left;'>{row}</td></tr>" for row in rows) + "</table>"

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        jobs = f"<strong>Jobs:</strong> {counts(self._force.jobs.values()) or 'none'}"
        jobs = f"<tr><td style='text-align: left;'>{jobs}</td></tr>"
        return str(super()._repr_html_(cluster_status=(cluster_status or "") + jobs))


def class_for(batch_scheduler: str, base: type[GPUJobQueueCluster]) -> type[GPUJobQueueCluster]:
    """Return the class for a site's batch scheduler, if it is one of ``base``; else ``base`` itself."""
    from . import CLASSES

    found = CLASSES.get(batch_scheduler, GPUJobQueueCluster)
    return found if issubclass(found, base) else base
