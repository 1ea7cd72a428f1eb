"""Plain dask clusters in this process, whose workers can leave as those of gpujobs do."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dask
from distributed import Client, LocalCluster, Scheduler, Worker, get_worker
from distributed.scheduler import WorkerState

from gpujobs.injob.configuration import LIFE, life_variable
from gpujobs.injob.drain import Drain, offer_drain
from gpujobs.injob.events import Event
from gpujobs.injob.rest import Rest

from .processes import patience


class DrainableWorker(Worker):  # type: ignore[misc]
    """A worker that its dask scheduler can drain.

    ``began``: the run of its job. ``ends``: when that ends, seconds since the epoch.
    """

    def __init__(
        self,
        *args: Any,
        began: float = 1.0,
        ends: float = float("inf"),
        task_time: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        offer_drain(self, {LIFE: life_variable(began, ends, task_time)})


class Drained:
    """A dask cluster, its drain, and how often each task has started."""

    def __init__(self, cluster: LocalCluster, client: Client, folder: Path) -> None:
        self.cluster = cluster
        self.client = client
        self.folder = folder
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        """Name of the worker, event and its details."""
        self.told: list[str] = []
        self.others: list[Worker] = []
        """Workers that were started later."""
        self.drain = Drain(self.scheduler, self._note, self.told.append)
        self.rest = Rest(self.scheduler, self.drain, self.told.append)

    @property
    def scheduler(self) -> Scheduler:
        return self.cluster.scheduler

    def _note(self, event: Event) -> None:
        more = {key: value for key, value in event.items() if key not in ("worker", "event")}
        self.events.append((event["worker"], event["event"], more))

    def state(self, name: object) -> WorkerState:
        """Return a worker by its name."""
        found = {str(state.name): state for state in self.scheduler.workers.values()}
        return found[str(name)]

    async def call(self, name: str, **arguments: Any) -> Any:
        """Call the dask scheduler as a client does."""
        return await getattr(self.client.scheduler, name)(**arguments)

    def address(self, name: object) -> list[str]:
        """Return the address of a worker, for tasks that are to run there."""
        return [self.state(name).address]

    async def start_worker(self, name: str, **options: Any) -> Worker:
        """Start another worker, which ends with the cluster."""
        options = {"nthreads": 2, "name": name, **options}
        worker = await DrainableWorker(self.scheduler.address, **options)
        self.others.append(worker)
        return worker

    def starts(self) -> Counter[str]:
        """Return how often each task has started."""
        path = self.folder / "starts"
        return Counter(path.read_text().split()) if path.exists() else Counter()

    async def until(self, condition: Callable[[], object], what: str, seconds: float = 30) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + patience(seconds)
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come"
            await asyncio.sleep(0.02)

    async def left(self, *names: object) -> None:
        """Wait until workers have left."""
        wanted = {str(name) for name in names}
        await self.until(
            lambda: wanted.isdisjoint(str(s.name) for s in self.scheduler.workers.values()),
            f"the end of {wanted}",
        )


def work(name: object, folder: str, seconds: float) -> object:
    """Do a task that notes its start."""
    with Path(folder, "starts").open("a") as file:
        file.write(f"{name}\n")
    time.sleep(seconds)
    return name


def work_until_stop(name: object, folder: str) -> object:
    """Do a task that notes its start, and ends when there is a file ``stop``."""
    with Path(folder, "starts").open("a") as file:
        file.write(f"{name}\n")
    while not Path(folder, "stop").exists():
        time.sleep(0.05)
    return name


def own_name() -> str:
    """Return the name of the worker that runs this task."""
    return str(get_worker().name)


@asynccontextmanager
async def drained(
    folder: Path,
    n_workers: int = 4,
    threads: int = 2,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Drained]:
    """Start a cluster; ``options``: of its workers."""
    options = {
        "n_workers": n_workers,
        "threads_per_worker": threads,
        "processes": False,
        "dashboard_address": "127.0.0.1:0",
        "silence_logs": 50,
        "worker_class": DrainableWorker,
        **options,
    }
    with dask.config.set(config or {}):
        async with (
            LocalCluster(asynchronous=True, **options) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            found = Drained(cluster, client, folder)
            found.drain.install()
            try:
                yield found
            finally:
                for worker in found.others:
                    await worker.close()


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a story of a test, which may take a minute."""
    asyncio.run(asyncio.wait_for(story(), patience(120)))
