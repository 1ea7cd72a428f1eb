"""How a cluster that this process owns gets to its target: whole jobs come and go, are watched, and are adapted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

from dask.utils import parse_bytes, parse_timedelta
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.deploy.spec import SpecCluster
from distributed.objects import SchedulerInfo

from ..errors import GpujobsError, InputError
from ..text import plural
from .adaptive import JobAdaptive
from .job import Job, Phase, counts
from .jobqueue import JobQueueCluster
from .pool import JobPool

logger = logging.getLogger("gpujobs")

RETIRE = 30.0
"""Seconds that workers which must go have to hand their data over."""
TICK = 1.0


class ElasticCluster(JobQueueCluster):  # type: ignore[misc]
    """Scaling by whole jobs, on dask's side; `Workforce` has the jobs. Made and closed by `GPUJobQueueCluster`."""

    id: str
    workers_per_job: int
    _pool: JobPool
    _target: int
    """How many jobs with workers there should be."""
    _tasks: list[asyncio.Task[None]]

    # -- the target -------------------------------------------------------------------------------------------
    def scale(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: Any = None,
        cores: int | None = None,
    ) -> Any:
        """Ask for ``n`` workers (= GPUs), or ``jobs`` jobs, or workers that have ``memory`` or ``cores`` together.

        Workers come and go by whole jobs: the number is rounded up, and that is said. Raises RefusedError in the batch
        scheduler's words; nothing is half made then. With an asynchronous cluster the result must be awaited.
        """
        if self.status not in (
            Status.closing,
            Status.closed,
        ):  # dask closes a cluster by scaling it to 0
            self._check_elastic()
        self._target = self._jobs_for(n, jobs, memory, cores)
        self._pool.error, self._pool.failed_starts = None, 0
        if self.status in (Status.closing, Status.closed):
            return None
        self._write_down_target()
        if self.asynchronous or self.called_from_running_loop:
            return self._correct_state()
        return self.sync(self._reach_target)

    scale_up = scale

    def _check_elastic(self) -> None:
        if not self._pool.plan.layout.elastic:
            hint = "make another cluster, with n_workers=…"
            raise InputError(
                f"{self.id} is one MPI allocation, which has its size for good", hint=hint
            )

    def _jobs_for(self, n: int | None, jobs: int | None, memory: Any, cores: int | None) -> int:
        for name, value in (("n", n), ("jobs", jobs), ("cores", cores)):
            if value is not None and (
                not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0
            ):
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
            what = plural(whole, "job")
            self._log(
                f"{wanted} workers are {what} of {self.workers_per_job}: {whole * self.workers_per_job} workers"
            )
        return whole

    def _write_down_target(self) -> None:
        force = self._pool
        workers = self._target * self.workers_per_job
        if workers != force.record.workers:
            gpus = self._target * force.plan.workers.shape.gpus
            force.record = force.ledger.update(self.id, workers=workers, gpus=gpus)

    async def _reach_target(self) -> None:
        await self._correct_state()

    async def _correct_state_internal(self) -> None:
        async with self._lock:
            self._correct_state_waiting = (
                None  # dask lets calls of the same moment share one task until here
            )
            counting = self._pool.counting()
            surplus = len(counting) - self._target
            if surplus > 0:
                load = await self._load() if any(job.connected for job in counting) else {}
                await self._pool.remove(self._pool.cheapest(surplus, load), self._retire)
            elif surplus < 0:
                try:
                    await self._pool.submit(-surplus)
                except Exception as error:
                    self._target, self._pool.error = len(self._pool.counting()), error
                    raise
                finally:
                    self._watch_soon()

    async def _load(self) -> dict[str, int]:
        """Return how many tasks each worker has, by name."""
        info = self.scheduler_info["workers"]
        processing = await self.scheduler_comm.processing()
        return {
            info[address]["name"]: len(tasks)
            for address, tasks in processing.items()
            if address in info
        }

    async def _retire(self, names: list[str]) -> None:
        if self.status == Status.running:
            with contextlib.suppress(
                Exception
            ):  # what does not hand over in time is cancelled all the same
                retire = self.scheduler_comm.retire_workers(
                    names=names, close_workers=True, remove=True
                )
                await asyncio.wait_for(retire, RETIRE)

    def counting_jobs(self) -> list[Job]:
        """Return the jobs that count towards the target."""
        return self._pool.counting()

    async def scale_down(self, workers: Sequence[str]) -> None:
        """Give back the jobs whose workers are all named (`Adaptive` calls this)."""
        named = set(workers)
        async with self._lock:
            chosen = [
                job
                for job in self._pool.counting()
                if named.issuperset(job.workers) and not job.head
            ]
            self._target -= len(chosen)
            self._write_down_target()
            await self._pool.remove(chosen, self._retire)

    # -- watch ------------------------------------------------------------------------------------------------
    def _watch_soon(self) -> None:
        if not any(task.get_name() == "watch" and not task.done() for task in self._tasks):
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._watch(), name="watch"))

    async def _watch(self) -> None:
        while self._pool.jobs and self.status in (Status.created, Status.starting, Status.running):
            await asyncio.sleep(TICK)
            try:
                await self._round()
            except (GpujobsError, OSError) as error:
                logger.warning("%s: %s", self.id, error)

    async def _round(self) -> None:
        force = self._pool
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
        Cluster._update_worker_status(
            self, op, msg
        )  # SpecCluster's takes a whole job away when one worker is lost
        self._pool.look_soon()

    async def _wait_for_workers(
        self, n_workers: int = 0, timeout: float | str | None = None
    ) -> None:
        force, deadline = (
            self._pool,
            time.monotonic() + parse_timedelta(timeout) if timeout else None,
        )
        while True:
            self.scheduler_info = SchedulerInfo(await self.scheduler_comm.identity())
            found = sum(
                worker["status"] == "running" for worker in self.scheduler_info["workers"].values()
            )
            if force.conflict is not None:
                raise force.conflict
            if found >= n_workers:
                return
            if force.error is not None:
                raise force.error
            planned = max(self._target, len(force.counting())) * self.workers_per_job
            if n_workers > planned and not self._adapts:
                raise InputError(
                    f"waiting for {n_workers} workers, but only {planned} were asked for",
                    hint="scale() first",
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
        return SpecCluster.adapt(self, *args, Adaptive=Adaptive or JobAdaptive, **kwargs)

    @property
    def _adapts(self) -> bool:
        return self._adaptive is not None and self._adaptive.state in ("starting", "running")

    @property
    def plan(self) -> set[str]:
        """Names of the workers that there should be."""
        return {name for job in self._pool.counting() for name in job.workers}

    @property
    def requested(self) -> set[str]:
        """Names of the workers whose jobs are submitted."""
        return {name for job in self._pool.jobs.values() for name in job.workers}
