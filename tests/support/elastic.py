"""A cluster of the real classes of `gpujobs.deploy` on a simulated host."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from gpujobs.clusters import clusterfolder as folders
from gpujobs.clusters.ledger import Ledger
from gpujobs.clusters.prepare import make_cluster_plan
from gpujobs.config.spec import load_spec
from gpujobs.deploy.elastic import ElasticCluster, JobAdaptive
from gpujobs.deploy.pool import JobPool
from gpujobs.deploy.pooljobs import PoolJob
from gpujobs.deploy.scaler import Scaler

from .cli import text_of
from .simulated import SimulatedDask, SimulatedLoop, SimulatedSlurm

SITE: dict[str, Any] = {
    "description": "simulated",
    "scheduler": "slurm",
    "queues": {"gpu": {"gpus_per_node": 4, "cpus_per_node": 8, "max_walltime": "1d"}},
    "defaults": {"walltime": "1h"},
}
PROFILE: dict[str, Any] = {"gpus": 2, "gpus_per_job": 2, "network": {"encryption": False}}


class SimulatedCluster(ElasticCluster):
    """`ElasticCluster` without a dask cluster: its dask side is simulated, the rest is real.

    ``adapting``: options of `JobAdaptive`; none: the number of jobs is set by `scale_to`.
    """

    def __init__(
        self,
        folder: Path,
        slurm: SimulatedSlurm,
        *,
        site: dict[str, Any] | None = None,
        profile: dict[str, Any] | None = None,
        interval: float = 1.0,
    ) -> None:
        (folder / "s.yaml").write_text(text_of({**SITE, "directory": str(folder), **(site or {})}))
        (folder / "p.yaml").write_text(text_of(profile or PROFILE))
        spec = load_spec(folder / "p.yaml", site=str(folder / "s.yaml"))
        plan = make_cluster_plan(spec, replaces="owner")
        self.slurm = slurm
        self.interval = interval
        self.ledger = Ledger(folder / "ledger")
        self._pool = JobPool(spec, plan, self.ledger, slurm)
        self.dask = SimulatedDask(slurm, hold_of=lambda group: self.adaptives[group].hold)
        self._dask = self.scheduler_comm = self.dask  # type: ignore[assignment]
        self._scaler = Scaler(self._pool, self._dask, interval)
        self.id = self._pool.id
        self.adaptives: dict[str, Any] = {}
        slurm.folder = self._pool.record.path
        slurm.workers_per_job = {name: group.size for name, group in self._pool.groups.items()}
        folders.make(slurm.folder, encrypted=False)
        self.ledger.add(self._pool.record)
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        slurm.on_connect = lambda: loop.call_soon(
            self._update_worker_status, "add", {"workers": {}}
        )

    @property
    def scheduler_info(self) -> dict[str, Any]:  # type: ignore[override]
        """As dask's: the connected workers by address."""
        return {"workers": {f"tcp://{name}": {"name": name} for name in self._dask.connected}}

    def adapt(self, group: str = "", **options: Any) -> JobAdaptive:  # type: ignore[override]
        """Adapt a group from now on."""
        adaptive = JobAdaptive(self, interval=0, group=group, **options)
        self._dask.adapting.add(group)  # type: ignore[attr-defined]
        self._scaler.forget_failures([group])
        self.adaptives[group] = adaptive

        async def repeat() -> None:
            while True:
                try:
                    await adaptive.adapt()
                except Exception as error:  # as dask's, which logs it
                    self._dask.log(f"adapt: {error!r}")
                await asyncio.sleep(self.interval)

        self._tasks.add(asyncio.ensure_future(repeat()))
        return adaptive

    async def scale_to(self, jobs: int, group: str = "") -> None:
        """Do as `scale`."""
        self._scaler.set_targets({group: jobs})
        await self._scaler.reach_targets()
        self._scaler.watch_soon()

    def stop(self) -> None:
        """Stop what runs regularly."""
        self._scaler.stop()
        for task in self._tasks:
            task.cancel()

    @property
    def folder(self) -> Path:
        return self._pool.record.path

    @property
    def pool(self) -> JobPool:
        return self._pool

    def counting(self, group: str = "") -> list[PoolJob]:
        """Return the jobs that count towards the target."""
        return self._pool.jobs.counting(group)

    @property
    def orphans(self) -> set[str]:
        """The ids of the jobs that Slurm has and the pool does not know.

        Without those whose script has ended, while Slurm cleans up.
        """
        known = {str(self._pool.plan.scheduler.show_id(id)) for id in self._pool.jobs.present_ids()}
        alive = [job for job in self.slurm.alive if job.listed and job.occupies]
        if not self._pool.jobs.active:  # nobody looks, until the workers of a job connect
            alive = [
                job for job in alive if not job.restored or job.workers[0] in self.slurm.connected
            ]
        return {job.id for job in alive} - known

    @property
    def released(self) -> set[str]:
        """The ids of the jobs that the pool has removed or given up, and cancels."""
        jobs = self._pool.jobs.released.values()
        return {str(self._pool.plan.scheduler.show_id(job.report.job)) for job in jobs}


def simulate(slurm: SimulatedSlurm, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in the simulated time."""
    loop = SimulatedLoop(slurm)
    try:
        loop.run_until_complete(story())
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    finally:
        loop.close()


def slurm_of(folder: Path, seed: int = 0, **options: Any) -> SimulatedSlurm:
    """Return a simulated Slurm; its folder is set by the cluster."""
    return SimulatedSlurm(folder, random.Random(seed), **options)
