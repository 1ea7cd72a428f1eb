"""Churn on a private Slurm: jobs and nodes are lost at random while the tasks of a cluster run."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .backend import FAKE_GPUS
from .cli import text_of
from .processes import patience, until
from .slurm import PrivateSlurm
from .slurm_faults import fail_node, restart_controller, restore_node

NODES, CPUS, GPUS = 8, 64, 32
"""The nodes, and what each of them has. The GPUs are emulated: a job has a worker for each of its own."""
COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "sacct")
ROUND = {"cancel": 5, "requeue": 2, "node": 2, "controller": 1}
"""How often each fault happens in a round; the order within a round is random."""
DOWNTIME = 10.0
"""Seconds after which a node that has failed is booted."""
ENVIRONMENT = {"DASK_DISTRIBUTED__WORKER__MEMORY__MONITOR_INTERVAL": "10s"}
"""Beside `QUIET_DASK`: so many workers on a host of few cores would be busy with watching themselves."""


@dataclass
class Result:
    """What happened in one run."""

    workers: int
    """All workers that there should be."""
    per_job: int = 1
    """Workers of a job."""
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    """Commands of the batch scheduler that the owner ran, until the target was met again."""
    submitted: int = 0
    """All jobs, with the replacements."""
    tasks: int = 0
    seconds: float = 0.0
    recovery: float = 0.0
    """Seconds from the last fault until all workers were seen connected."""


def counted_commands(folder: Path, slurm: PrivateSlurm) -> dict[str, str]:
    """Return the environment in which calls of Slurm's commands are noted in ``folder/calls``."""
    wrappers = folder / "bin"
    wrappers.mkdir()
    for name in COMMANDS:
        real = shutil.which(name, path=slurm.path)
        wrapper = wrappers / name
        wrapper.write_text(f'#!/bin/sh\necho {name} >> {folder}/calls\nexec {real} "$@"\n')
        wrapper.chmod(0o755)
    return {**slurm.env, "PATH": f"{wrappers}:{slurm.path}", "HOME": str(folder)}


def slurm_for_churn(folder: Path) -> PrivateSlurm:
    """Return a Slurm of some nodes, which starts a requeued job again after 10 s, not two minutes.

    Its partition `churn` starts each job on the node with the least load.
    """
    authentication = f"AuthInfo=socket={folder}/run/munge.sock,cred_expire=10"
    partition = "PartitionName=churn Nodes=ALL LLN=YES MaxTime=INFINITE State=UP"
    extra = f"{authentication}\n{partition}"
    return PrivateSlurm(folder, nodes=NODES, gpus=GPUS, cpus=CPUS, extra=extra)


@contextlib.contextmanager
def owned_cluster(folder: Path, workers: int, per_job: int = 1) -> Iterator[Any]:
    """Return a cluster that this process owns, with its target; the environment is that of Slurm.

    The workers are dask's, without CUDA; several in a job are on emulated GPUs.
    """
    import gpujobs

    site = folder / "site.yaml"
    queue: dict[str, Any] = {"cpus_per_node": CPUS, "memory_per_node": "60GiB"}
    if per_job > 1:
        queue["gpus_per_node"] = GPUS
    site.write_text(
        text_of(
            {
                "description": "churn",
                "scheduler": "slurm",
                "poll": "1s",
                "setup": f"{FAKE_GPUS} FAKE_NVML_GPUS={GPUS}",
                "queues": {"churn": queue},
                "defaults": {"walltime": "1h"},
            }
        )
    )
    with gpujobs.GPUSLURMCluster(
        str(site),
        gpus_per_job=0 if per_job == 1 else per_job,
        worker_class="nanny",
        worker_threads=1,
        worker_memory="256MiB",
        interface="lo",
        env=ENVIRONMENT,
        quiet=True,
        scheduler_options={
            "dashboard_address": ":0",
            "host": "127.0.0.1",
            "allowed_failures": LOSSES,
        },
    ) as cluster:
        cluster.scale(workers)
        yield cluster


LOSSES = 50
"""Workers that a task may lose until dask gives it up; by default 3. All tasks of a worker count."""


class Faults(threading.Thread):
    """Causes faults at random for some time; at the end all nodes are up."""

    def __init__(
        self,
        slurm: PrivateSlurm,
        steady: Callable[[], list[str]],
        seed: int,
        seconds: float,
        pause: float,
    ) -> None:
        """``steady``: returns the jobs that may be cancelled. ``pause``: mean seconds between two faults."""
        super().__init__(daemon=True)
        self.slurm, self.steady, self.random = slurm, steady, random.Random(seed)
        self.seconds, self.pause = seconds, pause
        self.count: collections.Counter[str] = collections.Counter()
        self.error: BaseException | None = None
        self.ended = 0.0
        self.down: dict[str, float] = {}
        """When each node that is down failed."""

    def run(self) -> None:
        """Cause whole rounds of faults until the time is over; an error is kept in ``error``."""
        deadline = time.monotonic() + self.seconds
        try:
            while time.monotonic() < deadline:
                self._round()
            self._restore(0)
        except BaseException as error:
            self.error = error
        self.ended = time.monotonic()

    def _round(self) -> None:
        actions = self._actions()
        kinds = list(collections.Counter(ROUND).elements())
        self.random.shuffle(kinds)
        for kind in kinds:
            time.sleep(self.random.expovariate(1 / self.pause))
            self._restore(DOWNTIME)
            until(actions[kind], 300, f"a job for the fault {kind}")
            self.count[kind] += 1

    def _actions(self) -> dict[str, Callable[[], bool]]:
        return {
            "cancel": self._cancel,
            "requeue": lambda: self._on_job(self._running(), "scontrol", "requeue"),
            "node": self._fail_node,
            "controller": self._restart_controller,
        }

    def _running(self) -> list[str]:
        rows = [line.split() for line in self.slurm.queue()]
        return [row[0] for row in rows if row[1] == "RUNNING"]

    def _cancel(self) -> bool:
        steady = self.steady()
        return self._on_job([job for job in self._running() if job in steady], "scancel")

    def _on_job(self, jobs: list[str], *command: str) -> bool:
        if not jobs:
            return False
        return self.slurm.attempt(*command, self.random.choice(jobs)).returncode == 0

    def _fail_node(self) -> bool:
        self._restore(0)
        node = f"node{self.random.randint(1, self.slurm.nodes)}"
        self.down[node] = time.monotonic()
        fail_node(self.slurm, node)
        return True

    def _restart_controller(self) -> bool:
        restart_controller(self.slurm)
        return True

    def _restore(self, downtime: float) -> None:
        for node, since in list(self.down.items()):
            if time.monotonic() - since >= downtime:
                restore_node(self.slurm, node)
                del self.down[node]


def churn(
    folder: Path,
    slurm: PrivateSlurm,
    workers: int,
    seconds: float,
    pause: float,
    seed: int = 0,
    per_job: int = 1,
) -> Result:
    """Run a cluster under faults; fails if a task has a wrong result, or a worker is missing at the end.

    The environment must be that of `counted_commands`. Afterwards no job may be in the queue.
    """
    result = Result(workers, per_job)
    with owned_cluster(folder, workers, per_job) as cluster, cluster.get_client() as client:
        cluster.wait_for_workers(result.workers, timeout=patience(300))
        started = time.monotonic()
        faults = Faults(slurm, lambda: _steady(cluster), seed, seconds, pause)
        faults.start()
        while faults.is_alive():
            _compute(client, result)
        if faults.error:
            raise faults.error
        # A job that is leaving may still be connected while its replacement starts: a number alone says nothing.
        goal = f"{result.workers} workers, all of them planned"
        until(
            lambda: cluster.plan == cluster.observed and _connected(client) == result.workers,
            300,
            goal,
        )
        result.recovery = time.monotonic() - faults.ended
        _compute(client, result)
        result.seconds = time.monotonic() - started
        result.faults = faults.count
        result.calls = collections.Counter((folder / "calls").read_text().split())
        result.submitted = 1 + max(job["number"] for job in cluster.jobs)
    slurm.wait_empty(60)
    return result


def _steady(cluster: Any) -> list[str]:
    """Return the jobs that have run for so long that their loss is never a failed start.

    Three failed starts in a row end the replacement, as they should.
    """
    now = time.monotonic()
    return [job.job_id for job in list(cluster._pool.jobs.active.values()) if job.steady(now)]


def _connected(client: Any) -> int:
    return len(client.nthreads())


def _compute(client: Any, result: Result) -> None:
    """Run two tasks for each worker; each must have its right result."""

    def square(n: int) -> int:  # local: the workers cannot import this module
        time.sleep(0.5)
        return n * n

    numbers = range(result.tasks, result.tasks + 2 * result.workers)
    futures = client.map(square, numbers, pure=False)
    assert client.gather(futures) == [n * n for n in numbers]
    result.tasks += len(numbers)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of this process for a while."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
