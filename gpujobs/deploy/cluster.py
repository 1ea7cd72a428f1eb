"""The cluster classes: in batch jobs, and on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from distributed.core import Status
from distributed.deploy.spec import ProcessInterface, SpecCluster
from tornado.ioloop import PeriodicCallback

from ..clusters import clusterfolder as folders
from ..clusters import rates
from ..clusters.connect import security_of, silence_ucx
from ..clusters.freequeues import this_machine, with_order
from ..clusters.handle import ClusterHandle
from ..clusters.here import cluster_here
from ..clusters.ledger import Ledger
from ..clusters.machines import machine_names, with_machines
from ..clusters.owner import renew_lease, write_owner
from ..clusters.prepare import make_cluster_plan
from ..config.sitefiles import load_site
from ..config.spec import ClusterSpec, load_spec
from ..errors import GpujobsError, InputError
from ..injob.folder import EndKind
from ..injob.names import WorkerSize
from ..injob.registry import WorkerRegistry
from ..injob.transport import Choice
from . import credentials
from .attached import AttachedCluster, submit_on_host
from .clusteroptions import (
    ClusterOptions,
    JobQueueCluster,
    configured,
    device_list,
    first_jobs,
    options_of_scheduler,
    with_keywords,
)
from .daskscheduler import DaskControl, HeadJob, local_scheduler, with_usable_protocols
from .elastic import ElasticCluster
from .keywords import document_of, read_keywords, spec_of
from .pool import JobPool
from .scaler import Scaler
from .vocabulary import JOBQUEUE, LOCAL, PARAMETERS, Vocabulary, plain

# -- GPUJobQueueCluster ----------------------------------------------------------------------------
LEASE_INTERVAL = 10_000
"""Milliseconds between two signs of life of the owning process in the cluster's folder."""


class GPUJobQueueCluster(ElasticCluster, JobQueueCluster):
    """A dask cluster whose workers are GPUs in jobs of a batch scheduler.

    Parameters
    ----------
    site
        Name of a site or path of a site file; default: ``$GPUJOBS_SITE``, else the site whose
        host names match this host.
    n_workers
        Workers to start with, in whole jobs.
    scheduler
        ``"local"``: the dask scheduler runs in this process. ``"job"``: in a job of its own shape
        (``head={…}``), else in the first worker job; this process only connects.
    scheduler_options
        Options of a local dask scheduler, as ``{"dashboard_address": ":8787"}``.
    soonest
        ``queue="auto"`` first tries the queues that have enough free GPUs now; default: the queues
        in the order of the site.
    asynchronous, loop, silence_logs, quiet
        As in dask's clusters.
    host
        A login node, on which the cluster is submitted through ssh: see docs/laptop.md.
    log_directory
        Folder for the jobs' logs; default: the cluster's folder.
    **keywords
        The keys of a profile: ``gpus_per_job, gpu_type, queue, account, walltime, environment,
        network, env, directives, head, groups, name, start_timeout, workers``; ``worker_memory,
        worker_threads, worker_class, worker_options``; and those of dask-jobqueue, of which
        docs/migrating.md has tables. ``config_name`` is a section of ``jobqueue`` in dask's
        configuration.

    Raises
    ------
    InputError
        A ValueError that names the keyword, before anything is submitted.
    RefusedError
        The batch scheduler refused a job, in its own words; `scale` raises it, too.

    Examples
    --------
    >>> cluster = GPUJobQueueCluster(site="delta", walltime="2h", gpus_per_job=4)  # doctest: +SKIP
    >>> cluster.scale(8)  # doctest: +SKIP
    >>> client = cluster.get_client()  # doctest: +SKIP
    """

    batch_schedulers: ClassVar[tuple[str, ...]] = ()
    """The site's batch scheduler must be one of these; none: any."""
    default_site: ClassVar[str | None] = None
    config_name: ClassVar[str | None] = None
    """The section of `jobqueue` in dask's configuration; None: that of the batch scheduler."""
    vocabulary: ClassVar[Vocabulary] = JOBQUEUE
    """The keywords of the class."""
    _devices: tuple[str, ...] | None = None
    """On this machine: the GPUs to use; None: the free ones."""

    def __new__(cls, *arguments: Any, host: str | None = None, **keywords: Any) -> Any:
        """Return the cluster; with ``host`` that on a login node."""
        if host is None or cls.vocabulary is not JOBQUEUE:
            return super().__new__(cls)
        section = keywords.pop("config_name", cls.config_name)
        configuration = configured(next(iter(cls.batch_schedulers), ""), section)
        return submit_on_host(host, configuration, cls.batch_schedulers, *arguments, **keywords)

    def __init__(
        self,
        site: str | None = None,
        *,
        n_workers: int = 0,
        log_directory: str | None = None,
        scheduler: str = "local",
        scheduler_options: dict[str, Any] | None = None,
        soonest: bool = False,
        asynchronous: bool = False,
        loop: Any = None,
        silence_logs: Any = "error",
        quiet: bool = False,
        host: None = None,
        **keywords: Any,
    ) -> None:
        batch_scheduler = next(iter(self.batch_schedulers), "")
        section = keywords.pop("config_name", self.config_name)
        configuration = configured(batch_scheduler, section)
        chosen = site or self.default_site
        # Raised here, an error has no traceback but this line and the user's own.
        try:
            spec = spec_of(
                keywords, chosen, n_workers, self.batch_schedulers, configuration, self.vocabulary
            )
        except InputError as error:
            raise with_keywords(error) from None
        options = ClusterOptions.of(
            {
                "scheduler": scheduler,
                "scheduler_options": scheduler_options,
                "log_directory": log_directory,
                "asynchronous": asynchronous,
                "loop": loop,
                "silence_logs": silence_logs,
                "quiet": quiet,
            },
            configuration,
        )
        try:
            self._open(with_order(spec, soonest=soonest), options, n_workers)
        except InputError as error:
            raise with_keywords(error) from None

    @classmethod
    def from_profile(
        cls, path: str | Path, *, site: str | None = None, soonest: bool = False, **options: Any
    ) -> GPUJobQueueCluster:
        """Return the cluster that a profile file describes, with its `gpus` as first workers.

        The site selects the class. The profile's `run:` is not run. ``options`` are those of the
        class that are not keys of a profile.
        """
        spec = with_order(load_spec(Path(path), site=site), soonest=soonest)
        self: GPUJobQueueCluster = cls.__new__(class_for(spec.site.site.scheduler, cls))
        self._open(spec, ClusterOptions.of(options), None)
        return self

    from_yaml = from_profile

    @staticmethod
    def here(*, site: str | None = None, **keywords: Any) -> GPUJobQueueCluster:
        """Return a cluster on all nodes and GPUs of the job that this process is in.

        Nothing is submitted, and its size is fixed. ``keywords`` are those of `GPULocalCluster`.
        Raises InputError outside of a job of a batch scheduler.
        """
        names = keywords.keys() & {field.name for field in fields(ClusterOptions)}
        options = ClusterOptions.of({name: keywords.pop(name) for name in names})
        try:
            read = read_keywords(keywords, vocabulary=LOCAL).checked()
            spec, devices, note = cluster_here(read.document, site=site)
            self: GPULocalCluster = GPULocalCluster.__new__(GPULocalCluster)
            self._devices = devices
            self._open(spec, options, None, [*read.notes, note])
        except InputError as error:
            raise with_keywords(error) from None
        return self

    @classmethod
    def from_name(cls, name: str, **options: Any) -> AttachedCluster:
        """Attach to the cluster with this id: `close` detaches, `shutdown` ends it."""
        return AttachedCluster(ClusterHandle(name), **options)

    def _open(
        self,
        spec: ClusterSpec,
        options: ClusterOptions,
        n_workers: int | None,
        notes: Iterable[str] = (),
    ) -> None:
        spec.site.check_named()
        plan = make_cluster_plan(spec, replaces="owner", devices=self._devices)
        plan, reason = with_usable_protocols(plan, only_one=options.local_scheduler)
        self._owner = os.getpid()
        self._pool = JobPool(spec, plan, Ledger())
        self._dask = DaskControl(self)
        self._scaler = Scaler(self._pool, self._dask)
        # It starts with the event loop.
        self._lease = PeriodicCallback(self._renew_lease, LEASE_INTERVAL)
        # Of its own: behind the blocking calls of an asynchronous program the lease would run out.
        self._lease_thread = ThreadPoolExecutor(1, "gpujobs-lease")
        self._close_task: asyncio.Future[None] | None = None
        self.id = self._pool.id
        self.adaptives = {}
        encrypted = self._pool.record.encrypted
        folders.make(self.folder, encrypted=encrypted, logs=options.log_directory)
        try:
            all_notes = [*notes, *self._register(options, reason), *plan.notes]
            if reason:
                all_notes.append(reason)
            self._start_dask(options)
            for note in (*all_notes, *_notes_of_others(self)):
                self._log(note)
            self._submit_first_jobs(first_jobs(plan, n_workers))
        except BaseException as error:
            self._abort()
            if isinstance(error.__cause__, GpujobsError):  # in dask's "Cluster failed to start"
                raise error.__cause__.with_traceback(None) from None
            raise

    def _register(self, options: ClusterOptions, reason: str) -> list[str]:
        """Write the first facts into the folder, and the record; return notes on them.

        ``reason``: why the protocol of a dask scheduler in this process is not the first one.
        """
        pool, notes = self._pool, []
        write_owner(self.folder)
        renew_lease(self.folder)
        protocols = pool.plan.transport.protocols
        if options.local_scheduler:
            folders.write_transport(self.folder, Choice(protocols[0], reason))
        elif "ucxx" in protocols:
            notes = list(rates.copy(pool.ledger, self.folder))
        pool.ledger.add(pool.record)
        return notes

    def _submit_first_jobs(self, jobs: Mapping[str, int]) -> None:
        """Submit jobs of each group; later, with the event loop, if the cluster is asynchronous."""
        self._scaler.set_targets(jobs)
        if any(jobs.values()) and not self.asynchronous:
            self.sync(self._scaler.reach_targets)

    def _start_dask(self, options: ClusterOptions) -> None:
        security = security_of(self._pool.record, self._pool.folder_state)
        silence_ucx(*self._pool.plan.transport.protocols)
        if options.local_scheduler:
            scheduler = local_scheduler(
                self._pool, security, options.scheduler_options, options.scheduler_options_place
            )
        else:
            scheduler = {"cls": HeadJob, "options": {"pool": self._pool, "security": security}}
        worker_options = next(iter(self._pool.groups.values())).worker_options
        SpecCluster.__init__(  # JobQueueCluster's would build a job of its own
            self,
            scheduler=scheduler,
            worker={"cls": ProcessInterface, "options": worker_options},
            asynchronous=options.asynchronous,
            loop=options.loop,
            security=security,
            silence_logs=options.silence_logs,
            name=self.id,
        )
        self.quiet = options.quiet
        credentials.offer(self)

    def _abort(self) -> None:
        """Remove everything of a cluster that failed to start; what a job may still need stays."""
        pool = self._pool
        with contextlib.suppress(Exception):
            pool.end_all()
        if hasattr(self, "_loop_runner"):
            with contextlib.suppress(Exception):
                self.close(timeout=10)
        self.status = Status.closed
        if not pool.may_have_jobs:
            pool.ledger.remove(self.id)
            folders.discard(self.folder)

    # -- start and close ---------------------------------------------------------------------------
    async def _start(self) -> None:
        new = self.status == Status.created
        if new:
            self._lease.start()  # the head's job may wait for hours
        await super()._start()
        if not new:
            return
        if self._pool.jobs.active:  # the head's job
            self._scaler.watch_soon()
        else:
            end_after = self._pool.plan.lifetime.end_after
            folder = str(self.folder)
            WorkerRegistry(self.scheduler, folder, end_after, in_owner=True).install()

    async def _renew_lease(self) -> None:
        loop = asyncio.get_running_loop()
        # The next one may work. RuntimeError: Python is exiting, and starts no threads any more.
        with contextlib.suppress(GpujobsError, OSError, RuntimeError):
            await loop.run_in_executor(self._lease_thread, renew_lease, self.folder)

    def __await__(self) -> Generator[Any, Any, GPUJobQueueCluster]:
        new = self.status == Status.created
        try:
            yield from super().__await__()
        except asyncio.CancelledError:
            if new:  # dask closes a cluster after errors, but not after a time limit
                if self.status == Status.starting:
                    self.status = Status.failed
                yield from self._close().__await__()
            raise
        return self

    async def _close(self) -> None:
        # A close goes on when who waits for it is cancelled: a half of it could not be repeated.
        if self._close_task is None or self._close_task.done():
            if self.status == Status.closing:
                self.status = Status.failed  # a close has failed: dask would wait for its end
            self._close_task = asyncio.ensure_future(self._close_all())
        await asyncio.shield(self._close_task)

    async def _close_all(self) -> None:
        if self.status == Status.closed:
            await super()._close()
            return
        self._scaler.stop()
        self._dask.stop_adapting()
        self._lease.stop()
        self._lease_thread.shutdown(wait=False)
        self._pool.end(EndKind.CLOSED, "closed by its owner")
        try:
            await self._dask.close_clients()
            if isinstance(self.scheduler, HeadJob):
                await self._dask.close_scheduler()
            elif self._dask.end_of_scheduler():
                self._dask.disconnect()
        finally:  # also if the event loop ends
            ending = self._pool.end_jobs()
        await self._dask.remove_workers()
        await self._dask.wait_for_workers_to_exit()
        await super()._close()
        await ending
        await self._dask.finish_clients()

    def close(self, timeout: float | None = None) -> Any:
        """End the cluster and its jobs. In a forked process this does nothing: it owns none."""
        if os.getpid() == self._owner:
            return super().close(timeout)
        self.status = Status.closed
        return None

    def shutdown(self) -> Any:
        """End the cluster: for its owner the same as `close`."""
        return self.close()

    @property
    def folder(self) -> Path:
        """The cluster's folder, with logs, scripts and certificate."""
        return self._pool.record.path


def _notes_of_others(new: GPUJobQueueCluster) -> list[str]:
    """Return a note for each other cluster of this process, as of a cell that ran again."""
    return [
        f"this process has the cluster {cluster.id}, too: its jobs go on until its close()"
        for cluster in list(SpecCluster._instances)
        if isinstance(cluster, GPUJobQueueCluster)
        and cluster is not new
        and cluster.status == Status.running
        and cluster._pool.jobs.active
    ]


def class_for(batch_scheduler: str, base: type[GPUJobQueueCluster]) -> type[GPUJobQueueCluster]:
    """Return the subclass of ``base`` for a batch scheduler, or ``base`` if there is none."""
    if batch_scheduler in base.batch_schedulers:
        return base
    for subclass in base.__subclasses__():
        found = class_for(batch_scheduler, subclass)
        if batch_scheduler in found.batch_schedulers:
            return found
    return base


# -- GPULocalCluster: the cluster class for this machine, as dask_cuda.LocalCUDACluster ------------
_POOL_OF_ASYNC = (
    "'rmm_pool_size' is not needed when 'rmm_async' is enabled and will raise an exception in "
    "the future. Remove the 'rmm_pool_size' argument when creating this cluster to silence this "
    "warning."
)
"""Dask-cuda's warning, in its words."""


class GPULocalCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on this machine, without a batch scheduler.

    It starts one worker on every free GPU, and takes the keywords of
    ``dask_cuda.LocalCUDACluster``; docs/migrating.md lists them. As that class, it waits for
    its first workers: those that do not come within ``start_timeout`` are an error.

    Parameters
    ----------
    n_workers
        Workers to start with; default, and ``"auto"``: on all GPUs that are free. CPU workers with
        ``gpus_per_job=0``; default then: none.
    CUDA_VISIBLE_DEVICES
        The GPUs to use, even if other processes use them, as ``"0,1"`` or ``[0, 1]``.
    machines
        Machines that ssh reaches, as ``["ws1", "ws2"]`` or ``"ws1,ws2"``: one job on the free GPUs
        of all, of fixed size.
    host, scheduler_port, dashboard_address, scheduler_kwargs
        Options of a dask scheduler in this process. Without ``host``, all processes accept
        connections from this machine only. ``dashboard_address=None``: no dashboard.

    Examples
    --------
    >>> cluster = GPULocalCluster(protocol="ucxx", rmm_pool_size=0.8)  # doctest: +SKIP
    """

    batch_schedulers = ("local",)
    default_site = "local"
    vocabulary = LOCAL
    _machines: tuple[str, ...] = ()
    """Machines for ssh, in the place of this one."""
    _first_workers = 0
    """Workers that it waits for when it starts."""

    def __init__(
        self,
        site: str | None = None,
        *,
        n_workers: int | Literal["auto"] | None = None,
        CUDA_VISIBLE_DEVICES: Any = None,
        machines: str | Iterable[str] = (),
        host: str | None = None,
        scheduler_port: int | None = None,
        dashboard_address: str | int | None = "",
        scheduler_options: Mapping[str, Any] | None = None,
        scheduler_kwargs: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        if keywords.get("rmm_async") and keywords.get("rmm_pool_size") is not None:
            warnings.warn(_POOL_OF_ASYNC, FutureWarning, stacklevel=2)
        self._devices = device_list(CUDA_VISIBLE_DEVICES)
        self._machines = machine_names(machines)
        if isinstance(site, str) and not self._machines:
            self._machines = load_site(site).site.machines
        if n_workers is None or n_workers == "auto":
            n_workers = 0 if self._machines else _workers_on_free_gpus(self._devices, keywords)
        super().__init__(
            site,
            n_workers=n_workers,
            scheduler_options=options_of_scheduler(
                scheduler_options,
                scheduler_kwargs,
                host=host,
                port=scheduler_port,
                dashboard=False if dashboard_address is None else None,
                dashboard_address=dashboard_address or None,
            ),
            **keywords,
        )
        self._first_workers = plain(n_workers)
        if self._machines:
            self._first_workers = self._pool.plan.n_workers
        if self._first_workers and not self.asynchronous:
            try:
                self.sync(self._wait_for_first_workers)
            except BaseException:
                self._abort()
                raise

    def _open(
        self,
        spec: ClusterSpec,
        options: ClusterOptions,
        n_workers: int | None,
        notes: Iterable[str] = (),
    ) -> None:
        if self._machines:
            spec = replace(spec, site=with_machines(spec.site, self._machines))
            n_workers = None  # one job on all of them
        super()._open(spec, options, n_workers, notes)

    def __await__(self) -> Generator[Any, Any, GPULocalCluster]:
        new = self.status == Status.created
        yield from super().__await__()
        if new and self._first_workers:
            yield from self._start_first_workers().__await__()
        return self

    async def _start_first_workers(self) -> None:
        try:
            await self._wait_for_first_workers()
        except BaseException:
            await self._close()
            raise

    async def _wait_for_first_workers(self) -> None:
        await self._wait_for_workers(self._first_workers, self._pool.plan.profile.start_timeout)


def _workers_on_free_gpus(devices: tuple[str, ...] | None, keywords: Mapping[str, Any]) -> int:
    """Return how many workers fit on the free GPUs, in whole jobs. Raises InputError."""
    per_worker = keywords.get("gpus_per_worker", keywords.get("worker_gpu", 1))
    per_job, per_gpu = keywords.get("gpus_per_job", per_worker), keywords.get("workers_per_gpu", 1)
    numbers = per_worker, per_job, per_gpu
    if not all(isinstance(n, int) and n > 0 for n in numbers):  # CPU workers; or refused later
        return 0
    machine = this_machine(devices)
    if not machine.gpus:
        own = {name: value for name, value in keywords.items() if name not in PARAMETERS}
        document_of(own, vocabulary=LOCAL)  # a misspelled keyword is reported first
        busy = ": all are in use" if machine.busy else ""
        message = f"this machine has no free GPU{busy}"
        raise InputError(message, hint="gpus_per_job=0 with n_workers=… starts CPU workers")
    return WorkerSize(per_worker, per_gpu).workers(len(machine.gpus) // per_job * per_job)
