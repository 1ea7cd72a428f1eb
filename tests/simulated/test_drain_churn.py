"""Random drains, returns and walltimes in clusters of plain dask: no task starts twice."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("distributed")

from gpujobs.injob.configuration import MARGIN

from ..support.draining import Drained, drained, run, work

pytestmark = pytest.mark.filterwarnings("default")
"""On a busy machine dask warns that its files are slow."""

FAST = 2
"""How many seeds are in `make test`; each takes some seconds."""
MANY_SEEDS = int(os.environ.get("GPUJOBS_SEEDS", "50"))
"""How many are in `make slow`; `make seeds` runs 1,000."""
PART = 10
"""Seeds of one of its tests."""
TASKS, SUMS = 120, 60
WORKERS, DRAINS = 4, 12


class DrainChurn:
    """One seed: workers leave, stay after all, and reach their walltimes, while tasks run."""

    def __init__(self, it: Drained, random: Random) -> None:
        self.it = it
        self.random = random
        self.started = 0

    async def keep_workers(self) -> None:
        """Start a worker for each that leaves, some of them with a walltime.

        If all left at the same time, no worker would take their data.
        """
        leaving = len(self.it.drain.leaving())
        while len(self.it.scheduler.workers) - leaving < WORKERS:
            walltime = self.random.uniform(0.5, 3.0) if self.random.random() < 0.4 else 10**6
            name = f"job-{self.started}"
            self.started += 1
            await self.it.start_worker(name, ends=time.time() + MARGIN + walltime)

    async def drain(self) -> None:
        """Let a worker leave; most stay after all, when they are asked at once or a bit later."""
        states = list(self.it.scheduler.workers.values())
        state = self.random.choice(states)
        self.it.drain.drain(state, "churn")
        if self.random.random() < 0.8:
            await asyncio.sleep(self.random.uniform(0, 0.06))
            self.it.drain.undrain(state)

    async def run(self, folder: str) -> None:
        """Compute sums of tasks in the churn, and check them and the starts."""
        client, random = self.it.client, self.random
        await self.keep_workers()
        tasks = [
            client.submit(work, n, folder, min(0.3, random.expovariate(50)), pure=False)
            for n in range(TASKS)
        ]
        pairs = [random.sample(tasks, 2) for _ in range(SUMS)]
        sums = [client.submit(total, n, folder, *pair) for n, pair in enumerate(pairs)]
        for _ in range(DRAINS):
            await self.drain()
            await self.keep_workers()
            await asyncio.sleep(random.uniform(0, 0.1))
        gathering = asyncio.ensure_future(client.gather([*tasks, *sums]))
        while not gathering.done():
            await self.keep_workers()
            await asyncio.sleep(0.05)
        numbers = {task.key: n for n, task in enumerate(tasks)}
        wanted = [sum(numbers[task.key] for task in pair) for pair in pairs]
        assert gathering.result() == [*range(TASKS), *wanted]
        starts = self.it.starts()
        assert len(starts) == TASKS + SUMS
        twice = {name for name, number in starts.items() if number > 1}
        assert not twice, twice


def total(number: int, folder: str, first: int, second: int) -> int:
    """Add two results of tasks."""
    work(f"sum-{number}", folder, 0)
    return first + second


def churn(folder: Path, seed: int) -> None:
    """Run one seed."""
    random = Random(seed)
    config = {
        "distributed.scheduler.worker-saturation": random.choice([1.1, 2.0, float("inf")]),
        "distributed.scheduler.work-stealing": random.random() < 0.8,
        "distributed.scheduler.work-stealing-interval": "10ms",
        "distributed.scheduler.validate": True,
        "distributed.worker.validate": True,
    }

    async def story() -> None:
        async with drained(folder, 0, config=config) as it:
            it.rest.install()
            await DrainChurn(it, random).run(str(folder))

    run(story)


@pytest.mark.parametrize("seed", range(FAST))
def test_no_task_starts_twice_in_the_churn(tmp_path: Path, seed: int) -> None:
    churn(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, MANY_SEEDS, PART))
def test_no_task_starts_twice_with_many_seeds(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + PART):
        folder = tmp_path / str(seed)
        folder.mkdir()
        churn(folder, seed)
