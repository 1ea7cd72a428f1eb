"""Busy workers leave: `scale` down and walltimes start no task a second time, on real jobs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from distributed.core import Status

import gpujobs
from gpujobs.clusters import badnodes
from gpujobs.clusters.badnodes import NodeFailure

from ..conftest import slow_variant
from ..support.backend import Backend
from ..support.cli import NVML, Cli
from ..support.processes import patience, until
from .test_python_everywhere import make  # noqa: F401

pytestmark = [pytest.mark.filterwarnings("default")]

SECONDS = 2.0
"""Duration of a task."""
RMM = NVML.parent / "rmm"


@pytest.fixture
def local(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a cluster of this machine, whose GPUs are fakes."""
    environ = {"HOME": str(home), "DASK_CUDA_TEST_SINGLE_GPU": "1", "FAKE_NVML_GPUS": "4"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (NVML, RMM)))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(home)
    for folder in (RMM, NVML):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    made: list[Any] = []

    def cluster(**keywords: Any) -> Any:
        options = {"protocol": "tls", "dashboard_address": None, "quiet": True, **keywords}
        made.append(gpujobs.GPULocalCluster(worker_memory="1GiB", **options))
        return made[-1]

    yield cluster
    for found in made:
        found.close()


def task(folder: Path, seconds: float, *, until_stopped: bool = False) -> Callable[[int], int]:
    """Return a task that notes its start. ``until_stopped``: it runs until the file `stop` exists."""
    path, stop = str(folder / "starts"), str(folder / "stop")

    def work(number: int) -> int:  # local: the workers need not import this module
        import time
        from pathlib import Path

        with Path(path).open("a") as file:
            file.write(f"{number}\n")
        time.sleep(seconds)
        while until_stopped and not Path(stop).exists():
            time.sleep(seconds)
        return number * number

    return work


def starts(folder: Path) -> Counter[str]:
    path = folder / "starts"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def scale_down_while_busy(cluster: Any, folder: Path, seconds: float = SECONDS) -> None:
    """Scale from four busy jobs to two; each task starts once, and the results are right."""
    cluster.scale(4)
    cluster.wait_for_workers(4, timeout=patience(90))
    with cluster.get_client() as client:
        futures = client.map(task(folder, seconds), range(24), pure=False)
        until(lambda: starts(folder).total() >= 4, 30, "four tasks")
        began = time.monotonic()
        cluster.scale(2)
        assert time.monotonic() - began < patience(20)  # it does not wait for tasks
        until(lambda: len(cluster.scheduler_info["workers"]) == 2, 60, "two workers to leave")
        until(lambda: len(cluster.jobs) and counting(cluster) == 2, 60, "the end of their jobs")
        assert client.gather(futures) == [n * n for n in range(24)]
    assert set(starts(folder).values()) == {1}


def counting(cluster: Any) -> int:
    return sum(job["phase"] in ("RUNNING", "LEAVING") for job in cluster.jobs)


@pytest.mark.parametrize("gpus", [0, slow_variant(1)], ids=["cpu", "cuda"])
def test_busy_workers_of_this_machine_leave_without_losing_a_task(
    local: Callable[..., Any], tmp_path: Path, gpus: int
) -> None:
    scale_down_while_busy(local(gpus_per_job=gpus), tmp_path)


def test_jobs_that_begin_to_leave_stay_if_more_are_wanted_again(
    local: Callable[..., Any], tmp_path: Path
) -> None:
    cluster = local(gpus_per_job=0)
    cluster.scale(4)
    cluster.wait_for_workers(4, timeout=patience(90))
    workers = cluster.scheduler.workers

    def running() -> int:
        return sum(state.status is Status.running for state in workers.values())

    with cluster.get_client() as client:
        work = task(tmp_path, 0.1, until_stopped=True)
        futures = client.map(work, range(24), pure=False)
        until(lambda: starts(tmp_path).total() >= 4, 30, "four tasks")
        cluster.scale(1)
        until(lambda: running() == 1, 30, "three workers that begin to leave")
        cluster.scale(3)
        until(lambda: running() == 3, 30, "two workers that stay")
        (tmp_path / "stop").touch()
        assert client.gather(futures) == [n * n for n in range(24)]
        until(lambda: len(workers) == 3, 60, "one worker to leave")
        until(lambda: counting(cluster) == 3, 60, "the end of its job")
        assert len(cluster.jobs) == 4
        record = cluster._pool.ledger.get(cluster.id)
        assert len(record.removed) == 1
    assert set(starts(tmp_path).values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "gpus"),
    [("slurm", 0), ("slurm", 1), ("sge", 0)],
    ids=["slurm-cpu", "slurm-cuda", "sge-cpu"],
    indirect=["backend"],
)
def test_busy_workers_of_jobs_leave_without_losing_a_task(
    make: Callable[..., Any], backend: Backend, tmp_path: Path, gpus: int
) -> None:
    scale_down_while_busy(make(gpus_per_job=gpus), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_a_busy_job_leaves_a_node_on_which_a_gpu_fails(
    make: Callable[..., Any], backend: Backend, tmp_path: Path
) -> None:
    """Another job has said so, which ended there; the new one is on another node."""
    cluster = make(gpus_per_job=1)
    cluster.scale(1)
    cluster.wait_for_workers(1, timeout=patience(90))
    (job,) = cluster.jobs
    with cluster.get_client() as client:
        futures = client.map(task(tmp_path, SECONDS), range(12), pure=False)
        until(lambda: starts(tmp_path).total() >= 1, 30, "a task")
        now, reason = time.time(), "worker x ended: killed; Xid 79 at 0000:09:00"
        pool, node = cluster._pool, job["node"]
        site = pool.record.site
        failure = NodeFailure(now, site, node, cluster.id, "1", now, reason, sure=True)
        path = pool.ledger.folder / badnodes.FILE
        path.write_text(f"{json.dumps(asdict(failure))}\n")
        assert client.gather(futures) == [n * n for n in range(12)]
        until(lambda: counting(cluster) == 1, 60, "the end of the first job")
        (new,) = (one for one in cluster.jobs if one["phase"] == "RUNNING")
        assert new["node"] not in ("", node)
    assert set(starts(tmp_path).values()) == {1}


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_walltimes_with_successors_lose_no_task(
    make: Callable[..., Any], backend: Backend, tmp_path: Path
) -> None:
    """Two jobs of two minutes, tasks of 8 s for five minutes."""
    cluster = make(gpus_per_job=0, walltime="2m", cpus_per_job=1)
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(60))
    with cluster.get_client() as client:
        futures = client.map(task(tmp_path, 8), range(60), pure=False)
        assert client.gather(futures) == [n * n for n in range(60)]
    assert set(starts(tmp_path).values()) == {1}
    assert len(cluster.jobs) >= 4


BUSY = """
import sys
import gpujobs

path, cluster = sys.argv[1:]

def work(number):
    import time
    with open(path, "a") as file:
        file.write(f"{number}\\n")
    time.sleep(2)
    return number * number

with gpujobs.connect(cluster) as client:
    client.wait_for_workers(3)
    futures = client.map(work, range(24), pure=False)
    assert client.gather(futures) == [n * n for n in range(24)]
print("right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_the_command_scale_lets_busy_workers_end_their_tasks(cli: Cli, backend: Backend) -> None:
    workers = {"count": 3, "threads": 1, "memory": "1GiB"}
    cluster = cli.submit({"gpus": 0, "workers": workers}, "--wait")
    with ThreadPoolExecutor(1) as pool:
        program = pool.submit(cli.python_run, BUSY, str(cli.work / "starts"), cluster)
        until(lambda: program.done() or starts(cli.work).total() >= 3, 60, "three tasks")
        assert cli("scale", cluster, "1").returncode == 0
        until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 1, 60, "one worker")
        done = program.result()
    assert done.stdout.strip() == "right", done.stderr
    assert set(starts(cli.work).values()) == {1}

    def left() -> list[int | None]:
        return [job["exit_code"] for job in cli.status(cluster)["jobs"] if not job["head"]]

    until(lambda: None not in left(), 60, "the end of two jobs", every=0.5)
    assert left() == [0, 0]
    assert cli("cancel", cluster).returncode == 0


FORGOTTEN = """
import sys
from distributed import fire_and_forget
import gpujobs

folder, cluster = sys.argv[1:]

def work(number):
    import time
    for event in ("starts", "ends"):
        with open(folder + "/" + event, "a") as file:
            file.write(f"{number}\\n")
        if event == "starts":
            time.sleep(4)

with gpujobs.connect(cluster) as client:
    client.wait_for_workers(2)
    fire_and_forget(client.map(work, range(24), pure=False))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_cancel_with_drain_waits_for_the_tasks_of_workers(cli: Cli, backend: Backend) -> None:
    """In a cluster whose dask scheduler has a job of its own, no task that has started is lost."""
    workers = {"count": 2, "threads": 1, "memory": "1GiB"}
    cluster = cli.submit({"gpus": 0, "workers": workers, "head": {"memory": "1GiB"}}, "--wait")
    sent = cli.python_run(FORGOTTEN, str(cli.work), cluster)
    assert sent.returncode == 0, sent.stderr
    until(lambda: starts(cli.work).total() >= 2, 60, "two tasks")
    done = cli("cancel", cluster, "--drain")
    assert done.returncode == 0, done.stderr
    assert "waiting for its tasks" in done.stderr
    ends = (cli.work / "ends").read_text().split()
    assert sorted(ends) == sorted(starts(cli.work).elements()) and len(ends) < 24
    assert cli.status(cluster)["state"] == "CANCELLED"
