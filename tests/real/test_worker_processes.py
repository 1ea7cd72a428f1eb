"""The processes of a job's workers on a real Slurm: one import of dask for all, no GPU used before a fork."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..support.cli import text_of
from ..support.owner import backend, make, site  # noqa: F401
from ..support.processes import patience, processes_with, until

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]


def look(dask_worker: Any) -> dict[str, Any]:
    """Return what a test wants to know of a worker's process; runs there."""
    import os
    import pathlib
    import random
    import sys

    import numpy

    return {
        "name": dask_worker.name,
        "address": dask_worker.address,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "grandparent": int(
            pathlib.Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        ),
        "parent_libraries": pathlib.Path(f"/proc/{os.getppid()}/maps").read_text(),
        "parent_threads": len(list(pathlib.Path(f"/proc/{os.getppid()}/task").iterdir())),
        "environ": dict(os.environ),
        "hash": hash("gpujobs"),
        "random": (random.random(), float(numpy.random.random())),
        "modules": "pandas" in sys.modules,
        "path": sys.path,
    }


def workers_of(cluster: Any, number: int) -> list[dict[str, Any]]:
    cluster.wait_for_workers(number, timeout=patience(100))
    with cluster.get_client() as client:
        found = client.run(look)
    return sorted(found.values(), key=lambda worker: str(worker["name"]))


def dask_config(home: Path, distributed: dict[str, Any]) -> str:
    """Write a configuration file of dask, and return its path."""
    path = home / "dask.yaml"
    path.write_text(text_of({"distributed": distributed}))
    return str(path)


def log_of(cluster: Any, number: int = 0) -> str:
    return str((cluster.folder / "logs" / f"job-{number}.log").read_text())


def test_cuda_workers_are_forks_of_a_process_that_has_not_used_a_gpu(
    make: Callable[..., Any], home: Path
) -> None:
    calls = home / "nvml-calls"
    cluster = make(4, gpus_per_job=4, env={"FAKE_NVML_CALLS": str(calls)})
    workers = workers_of(cluster, 4)
    assert len({worker["pid"] for worker in workers}) == 4
    (server,) = {worker["parent"] for worker in workers}
    for worker in workers:
        libraries = worker["parent_libraries"]
        assert "libpython" in libraries or "python3" in libraries  # the list is not empty
        assert "/numpy/" in libraries  # it has imported dask
        assert "libcuda.so" not in libraries
        assert "libnvidia-ml" not in libraries
        assert worker["parent_threads"] == 1
        assert worker["environ"]["RAPIDS_NO_INITIALIZE"] == "True"
    used_nvml = {int(pid) for pid in calls.read_text().split()}
    assert {worker["pid"] for worker in workers} <= used_nvml  # the fake counts
    assert server not in used_nvml
    visible = [worker["environ"]["CUDA_VISIBLE_DEVICES"] for worker in workers]
    assert visible == ["0,1,2,3", "1,2,3,0", "2,3,0,1", "3,0,1,2"]
    assert "not forked" not in log_of(cluster)


@pytest.mark.slow
def test_all_plain_workers_of_a_job_have_one_process_of_nannies(make: Callable[..., Any]) -> None:
    cluster = make(8, gpus_per_job=4, worker_class="nanny")
    workers = workers_of(cluster, 8)
    assert [worker["name"] for worker in workers] == [
        f"{cluster.id}-{job}-{gpu}" for job in range(2) for gpu in range(4)
    ]
    for job in (workers[:4], workers[4:]):
        assert len({worker["parent"] for worker in job}) == 1
        assert len({worker["grandparent"] for worker in job}) == 1
        visible = [worker["environ"]["CUDA_VISIBLE_DEVICES"] for worker in job]
        assert visible == ["0,1,2,3", "1,2,3,0", "2,3,0,1", "3,0,1,2"]
    assert len({worker["hash"] for worker in workers}) == 1  # dask's shuffles depend on it
    assert len({worker["random"][0] for worker in workers}) == 8
    assert len({worker["random"][1] for worker in workers}) == 8


def test_variables_that_libraries_read_when_they_are_loaded_are_set_before(
    make: Callable[..., Any], home: Path
) -> None:
    nanny = {"environ": {"EXTRA": "yes"}, "pre-spawn-environ": {"MKL_NUM_THREADS": 2}}
    config = dask_config(home, {"nanny": nanny})
    env = {"OMP_NUM_THREADS": "3", "DASK_CONFIG": config}
    cluster = make(1, gpus_per_job=0, scheduler="job", scheduler_options=None, env=env)
    (worker,) = workers_of(cluster, 1)
    assert "not forked" not in log_of(cluster)
    wanted = {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "2",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "PYTHONHASHSEED": "6640",
        "EXTRA": "yes",
    }
    assert {name: worker["environ"].get(name) for name in wanted} == wanted
    assert "GPUJOBS_PRESET" not in worker["environ"]
    server = dict(
        line.split("=", 1)
        for line in Path(f"/proc/{worker['grandparent']}/environ").read_text().split("\0")
        if "=" in line
    )
    for name in ("MALLOC_TRIM_THRESHOLD_", "PYTHONHASHSEED"):  # read when a process starts
        assert server[name] == wanted[name]
    assert not worker["modules"]  # pandas
    with cluster.get_client() as client:
        scheduler = client.run_on_scheduler(lambda: dict(os.environ))
    assert scheduler["OMP_NUM_THREADS"] == "3"
    assert scheduler["OPENBLAS_NUM_THREADS"] == "1"  # it needs no thread of numpy for each core


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configured", "message"),
    [
        ({"worker": {"multiprocessing-method": "spawn"}}, ""),
        ({"nanny": {"pre-spawn-environ": {"MALLOC_ARENA_MAX": 2}}}, "MALLOC_ARENA_MAX"),
    ],
)
def test_a_users_choice_of_how_workers_start_is_kept(
    make: Callable[..., Any], home: Path, configured: dict[str, Any], message: str
) -> None:
    env = {"DASK_CONFIG": dask_config(home, configured)}
    cluster = make(2, gpus_per_job=2, worker_class="nanny", env=env)
    workers = workers_of(cluster, 2)
    assert len({worker["parent"] for worker in workers}) == 1
    lines = [line for line in log_of(cluster).splitlines() if "not forked" in line]
    assert all(message in line for line in lines)
    assert bool(lines) == bool(message)
    commands = [Path(f"/proc/{worker['pid']}/cmdline").read_text() for worker in workers]
    assert all("multiprocessing.spawn" in command for command in commands)
    visible = [worker["environ"]["CUDA_VISIBLE_DEVICES"] for worker in workers]
    assert visible == ["0,1", "1,0"]


@pytest.mark.slow
def test_workers_are_not_forked_once_the_library_of_cuda_is_loaded(
    make: Callable[..., Any], home: Path
) -> None:
    early = home / "early"
    early.mkdir()
    library = early / "libcuda.so.1"
    shutil.copy("/lib/x86_64-linux-gnu/libm.so.6", library)
    (early / "sitecustomize.py").write_text(f"import ctypes; ctypes.CDLL({str(library)!r})")
    setup = f"export PYTHONPATH={early}:$PYTHONPATH"
    cluster = make(2, gpus_per_job=2, environment={"setup": setup, "python": sys.executable})
    workers = workers_of(cluster, 2)
    assert "each worker is started, not forked: libcuda.so.1 is loaded" in log_of(cluster)
    for worker in workers:
        command = Path(f"/proc/{worker['pid']}/cmdline").read_text()
        assert "multiprocessing.spawn" in command


def test_a_worker_is_restarted_and_nothing_stays(make: Callable[..., Any]) -> None:
    cluster = make(2, gpus_per_job=2)
    before = workers_of(cluster, 2)
    first = before[0]["address"]
    os.kill(before[0]["pid"], signal.SIGKILL)

    def restarted() -> bool:
        workers = cluster.scheduler.workers
        return len(workers) == 2 and first not in workers

    until(restarted, 60, "a restarted worker")
    after = workers_of(cluster, 2)
    assert {worker["parent"] for worker in after} == {before[0]["parent"]}
    visible = [worker["environ"]["CUDA_VISIBLE_DEVICES"] for worker in after]
    assert visible == ["0,1", "1,0"]
    os.kill(before[0]["grandparent"], signal.SIGKILL)
    pids = [before[0]["parent"], *(worker["pid"] for worker in after)]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30, "no process")
    cluster.close()
    until(lambda: not processes_with(cluster.id), 30, "no process of the cluster")


def start_processes(method: str) -> list[object]:
    """Start processes in all ways of `multiprocessing`, and return what they have computed; a task."""
    import concurrent.futures
    import multiprocessing
    import os
    import signal
    import sys

    context = multiprocessing.get_context(method)
    process = context.Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    waiting = context.Process(target=signal.pause)
    waiting.start()
    waiting.terminate()
    waiting.join()
    with context.Pool(2) as pool:
        squares = pool.map(abs, [-1, -2, -3])
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
        pids = set(executor.map(os.getpgid, [0]))
    return [process.exitcode, waiting.exitcode, squares, pids == {os.getpgid(0)}]


@pytest.mark.slow
@pytest.mark.parametrize("worker_class", ["cuda", "nanny"])
def test_tasks_start_processes_in_each_way_once_workers_are_not_daemons(
    make: Callable[..., Any], home: Path, worker_class: str
) -> None:
    config = dask_config(home, {"worker": {"daemon": False}})
    cluster = make(1, worker_class=worker_class, env={"DASK_CONFIG": config})
    workers_of(cluster, 1)
    assert "not forked" not in log_of(cluster)
    with cluster.get_client() as client:
        for method in ("spawn", "forkserver", "fork"):
            found = client.submit(start_processes, method).result(patience(60))
            assert found == [3, -signal.SIGTERM, [1, 2, 3], True], method


def settings(dask_worker: Any) -> dict[str, Any]:
    """Return what a worker has from the user's configuration; runs there."""
    import os

    resources = dask_worker.state.total_resources
    own = {"preloaded": os.environ.get("PRELOADED"), "lifetime": dask_worker.lifetime}
    return {**own, "resources": resources, "directory": dask_worker.local_directory}


def preloaded() -> str | None:
    import os

    return os.environ.get("PRELOADED")


@pytest.mark.slow
@pytest.mark.parametrize("worker_class", ["cuda", "nanny"])
def test_the_users_configuration_of_dask_counts_in_jobs(
    make: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch, worker_class: str
) -> None:
    (home / "mine.py").write_text("import os\nos.environ['PRELOADED'] = 'yes'\n")
    own = {"preload": [str(home / "mine.py")], "resources": {"MEMORY": 3}}
    path = home / "dask.yaml"
    values = {
        "temporary-directory": str(home / "spill"),
        "distributed": {
            "worker": {**own, "lifetime": {"duration": "1h"}},
            "scheduler": {"preload": own["preload"]},
        },
    }
    path.write_text(text_of(values))
    monkeypatch.setenv("DASK_CONFIG", str(path))
    options = {"scheduler": "job", "scheduler_options": None} if worker_class == "cuda" else {}
    cluster = make(1, worker_class=worker_class, **options)
    cluster.wait_for_workers(1, timeout=patience(100))
    with cluster.get_client() as client:
        (found,) = client.run(settings).values()
        if options:
            assert client.run_on_scheduler(preloaded) == "yes"
    assert found["directory"].startswith(f"{home}/spill/")
    found = {**found, "directory": ""}
    resources = {"GPU": 1, "MEMORY": 3}
    assert found == {"preloaded": "yes", "lifetime": 3600, "resources": resources, "directory": ""}
