"""One poll of a Python process that owns many jobs: time and memory, with simulated commands.

``python benchmarks/polling.py [JOBS...]``: for each number of jobs, of which half run with one
worker each and half are pending.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.elastic import SimulatedCluster, simulate, slurm_of
from tests.support.simulated import SimulatedSlurm

ROUNDS = 9
PROFILE = {"gpus": 1, "gpus_per_job": 1, "network": {"encryption": False}}


class Commands:
    """The time that the simulated commands themselves take, which is not gpujobs'."""

    def __init__(self, slurm: SimulatedSlurm) -> None:
        self.seconds, self._run = 0.0, slurm.run
        slurm.run = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.process_time()
        try:
            return self._run(*args, **kwargs)
        finally:
            self.seconds += time.process_time() - started


@dataclass(frozen=True)
class Poll:
    """CPU seconds of one poll, without its commands; bytes that it holds at most in addition."""

    seconds: float
    peak: int = 0


async def measured(cluster: SimulatedCluster, commands: Commands, query: bool) -> Poll:
    """Return the median of some polls; ``query``: with a query of the batch scheduler."""
    polls = []
    for _ in range(ROUNDS):
        if query:
            cluster.pool.query_soon(0)
        before, started = commands.seconds, time.process_time()
        await cluster._scaler.refresh()
        polls.append(time.process_time() - started - (commands.seconds - before))
    tracemalloc.start()
    if query:
        cluster.pool.query_soon(0)
    held = tracemalloc.get_traced_memory()[0]
    await cluster._scaler.refresh()
    peak = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    return Poll(statistics.median(polls), peak)


async def benchmark(folder: Path, slurm: SimulatedSlurm, jobs: int) -> None:
    """Print the figures of one number of jobs."""
    cluster = SimulatedCluster(folder, slurm, profile=PROFILE, interval=1e9)
    commands = Commands(slurm)
    await cluster.scale_to(jobs)
    slurm.advance(120)
    await cluster._scaler.refresh()
    slurm.advance(120)  # so that no query is due
    for query in (True, False):
        poll = await measured(cluster, commands, query)
        kind = "with a query" if query else "the folder only"
        row = f"{poll.seconds * 1000:8.0f} ms CPU  {poll.peak / 2**20:6.1f} MiB"
        print(f"{jobs:6} jobs  {len(slurm.connected):5} workers  {kind:15} {row}")
    cluster.stop()


def main(numbers: Sequence[str]) -> None:
    for jobs in map(int, numbers or ("100", "1000", "10000")):
        with tempfile.TemporaryDirectory() as folder:
            slurm = slurm_of(Path(folder), capacity=jobs // 2)
            simulate(slurm, lambda slurm=slurm, jobs=jobs: benchmark(slurm.folder, slurm, jobs))  # type: ignore[misc]


if __name__ == "__main__":
    main(sys.argv[1:])
