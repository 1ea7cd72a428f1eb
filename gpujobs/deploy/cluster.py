"""GPUJobQueueCluster: a dask cluster in batch jobs, elastic, watched, and owned by this Python process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from distributed import Scheduler
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface, SpecCluster
from distributed.utils import Log

from ..clusters import connect as connection
from ..clusters import folder as folders
from ..clusters.ledger import Ledger, write_atomically
from ..clusters.prepare import make_cluster_plan
from ..config import sources
from ..errors import GpujobsError, InputError
from ..injob.preload import WorkerRegistry
from .elastic import ElasticCluster
from .head import HeadJob
from .job import JobTable, counts
from .jobqueue import configured
from .keywords import spec_of
from .pool import JobPool, off_loop
from .transport import without_unusable_ucxx

LEASE = 10.0
"""Seconds between two signs of life of this process in the cluster's folder."""
GOODBYE = 1.0
"""Seconds that workers have to leave when the cluster is closed."""


class GPUJobQueueCluster(ElasticCluster):
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
    default_site: ClassVar[str | None] = None

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
        spec = spec_of(given, site or self.default_site, n_workers, self.batch_schedulers)
        self._begin(
            spec,
            n_workers,
            logs,
            scheduler,
            scheduler_options,
            asynchronous,
            loop,
            silence_logs,
            quiet,
        )

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
        spec = sources.load_spec(Path(path), site=site)
        self = cls.__new__(class_for(spec.site.site.scheduler, cls))
        self._begin(
            spec,
            None,
            log_directory,
            scheduler,
            scheduler_options,
            asynchronous,
            loop,
            silence_logs,
            quiet,
        )
        return self

    from_yaml = from_profile

    @classmethod
    def from_name(cls, name: str, **options: Any) -> GPUJobQueueCluster:
        """Attach to the cluster with this id: `close` detaches, `shutdown` ends it."""
        from .attached import AttachedCluster

        return AttachedCluster(name, **options)

    def _begin(
        self, spec: sources.ClusterSpec, n_workers: int | None, log_directory: str | None, scheduler: str,
        scheduler_options: dict[str, Any] | None, asynchronous: bool, loop: Any, silence_logs: Any, quiet: bool,
    ) -> None:  # fmt: skip
        if scheduler not in ("local", "job"):
            raise InputError(f"scheduler: {scheduler!r} is neither 'local' nor 'job'")
        plan, reason = without_unusable_ucxx(make_cluster_plan(spec, elastic=True))
        if not plan.transport.schemes:
            raise InputError(reason, hint="network={'protocol': 'auto'}")
        if scheduler == "local":  # here is where the choice is made
            plan = replace(
                plan, transport=replace(plan.transport, schemes=plan.transport.schemes[:1])
            )
        self._pool = force = JobPool(spec, plan, Ledger())
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
                head = self._scheduler_spec(scheduler_options or {}, security)
            else:
                head = {"cls": HeadJob, "options": {"workforce": force, "security": security}}
            SpecCluster.__init__(  # not JobQueueCluster's, which builds a Job of its own
                self, scheduler=head, worker=worker, asynchronous=asynchronous, loop=loop,
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
            if isinstance(
                error.__cause__, GpujobsError
            ):  # dask says "Cluster failed to start" in front of it
                raise error.__cause__ from None
            raise

    def _scheduler_spec(self, options: dict[str, Any], security: Any) -> dict[str, Any]:
        plan = self._pool.plan
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
        force = self._pool
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

    # -- life -------------------------------------------------------------------------------------------------
    async def _start(self) -> None:
        new = self.status == Status.created
        await super()._start()
        if new:
            if self._pool.jobs:  # the head's job
                self._watch_soon()
            else:
                self.scheduler.add_plugin(
                    WorkerRegistry(self.scheduler, str(self.folder)), name="gpujobs"
                )
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
        ending = asyncio.ensure_future(off_loop(self._pool.end_all))
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
        return JobTable(
            job.row() for job in (*self._pool.jobs.values(), *reversed(self._pool.past))
        )

    @property
    def folder(self) -> Path:
        """The cluster's folder, with logs, scripts and certificate."""
        return self._pool.record.path

    def job_script(self) -> str:
        """Return the script of the next worker job."""
        return self._pool.next_script()

    @property
    def job_header(self) -> str:
        """The directives of the next worker job."""
        prefix = self._pool.plan.scheduler.prefix
        return "\n".join(
            line for line in self.job_script().splitlines() if line.startswith((prefix, "#!"))
        )

    @property
    def job_name(self) -> str:
        """The name of all jobs: the cluster's id."""
        return self.id

    async def _get_logs(
        self, cluster: bool = True, scheduler: bool = True, workers: Any = True
    ) -> Any:
        logs = await super()._get_logs(cluster=cluster, scheduler=scheduler, workers=workers)
        if workers is True:  # also of jobs whose workers never connected
            for path in sorted((self.folder / "logs").glob("job-*.log")):
                logs[path.stem] = Log("\n".join(folders.tail(path, 500)))
        return logs

    def _scaling_status(self) -> str:
        mode = "Adaptive" if self._adapts else "Manual"
        workers = f"{len(self.scheduler_info['workers'])} / {len(self.requested)}"
        rows = (
            f"Scaling mode: {mode}",
            f"Workers: {workers}",
            f"Jobs: {counts(self._force.jobs.values()) or 'none'}",
        )
        return (
            "<table>"
            + "".join(f"<tr><td style='text-align: left;'>{row}</td></tr>" for row in rows)
            + "</table>"
        )

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        jobs = f"<strong>Jobs:</strong> {counts(self._force.jobs.values()) or 'none'}"
        jobs = f"<tr><td style='text-align: left;'>{jobs}</td></tr>"
        return str(super()._repr_html_(cluster_status=(cluster_status or "") + jobs))


def class_for(batch_scheduler: str, base: type[GPUJobQueueCluster]) -> type[GPUJobQueueCluster]:
    """Return the class for a site's batch scheduler, if it is one of ``base``; else ``base`` itself."""
    from . import CLASSES

    found = CLASSES.get(batch_scheduler, GPUJobQueueCluster)
    return found if issubclass(found, base) else base
