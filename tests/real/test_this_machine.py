"""The local site: ucxx without a site file, listeners on the loopback interface only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.comm.registry import backends

import gpujobs

from ..conftest import slow_variant
from ..support import mpi
from ..support.cli import NVML, Cli
from ..support.listeners import Listener, all_listeners, listeners_of
from ..support.processes import patience, processes_with, until

UCXX, RMM = NVML.parent / "ucxx", NVML.parent / "rmm"
"""Stand-ins for distributed-ucxx, which needs a GPU in workers, and for RMM."""


@pytest.fixture
def gpus() -> dict[str, str]:
    """Return the environment in which this machine has GPUs and ucxx."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (NVML, UCXX, RMM))),
        "DASK_CUDA_TEST_SINGLE_GPU": "1",
        "FAKE_NVML_GPUS": "2",
        "FAKE_NVML_NVLINK": "1",
    }


@pytest.fixture
def local(home: Path, gpus: dict[str, str]) -> Cli:
    return Cli(home, {"GPUJOBS_SITE": "local", **gpus}, None)


LOCAL_MPI = {
    "description": "this machine, with MPI",
    "scheduler": "local",
    "queues": {"local": {}},
    "mpi": {
        "setup": f"{mpi.LAUNCHERS['mpirun']['setup']}\nexport PATH={mpi.PREFIX}/bin:$PATH OMPI_MCA_btl=self,sm",
    },
}
"""A site whose ranks of MPI have no listeners of their own; those of the launcher are its own.

Its built-in command may start more ranks than the machine has cores.
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "workers": {"layout": "workers"},
    "mpi": {"layout": "mpi", "site": "./here.yaml"},
    "ranks": {"layout": "mpi", "site": "./here.yaml", "run_on": "ranks", "run": ["ranks.py"]},
}
IN_RANKS = """
import time
from dask_mpi import initialize

if __name__ == "__main__":
    initialize()
    time.sleep(300)
"""
LAUNCHER = ("mpirun", "prterun", "prted")


def listeners(cluster: str) -> dict[int, list[Listener]]:
    """Return the listeners of the processes of a cluster, by process."""
    return listeners_of(processes_with(cluster))


def check_loopback(cluster: str) -> None:
    """Check every listener of a cluster with two GPU workers."""
    found = listeners(cluster)
    every = [listener for own in found.values() for listener in own]
    # dask scheduler and dashboard; two nannies in one process; two workers with HTTP servers
    assert len(every) >= 2 + 2 + 2 * 2
    exposed = {
        Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]: open_to_all
        for pid, own in found.items()
        if (open_to_all := [listener for listener in own if not listener.loopback_only])
        and Path(f"/proc/{pid}/comm").read_text().strip() not in LAUNCHER
    }
    assert exposed == {}


@pytest.mark.slow  # `make test` has the listeners of CPU workers, in test_local.py
@pytest.mark.parametrize("layout", ["workers", "mpi", "ranks"])
@pytest.mark.parametrize("protocol", ["auto", "ucxx", "ws"])
def test_listeners_are_on_the_loopback_interface(
    local: Cli, gpus: dict[str, str], protocol: str, layout: str
) -> None:
    profile = {"gpus": 2, "env": gpus, "network": {"protocol": protocol}, **LAYOUTS[layout]}
    if layout != "workers":
        if why := mpi.missing():
            pytest.skip(why)
        local.write("here.yaml", LOCAL_MPI)
        local.write("ranks.py", IN_RANKS)
    cluster = local.submit(profile)
    try:
        until(lambda: len(local.gpus(cluster)) == 2, 90)
        scheme = {"auto": "tls", "ucxx": "ucxx", "ws": "wss"}[protocol]
        assert local.status(cluster)["address"].startswith(f"{scheme}://127.0.0.1:")
        check_loopback(cluster)
        unused = "NVLink between 2 GPUs seen and left unused: dask uses tls"
        notes = " ".join(local.status(cluster)["notes"])
        assert (unused in notes) == (protocol == "auto")
    finally:
        local("cancel", cluster)
    until(lambda: not processes_with(cluster), 30)


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
def test_scale_up_takes_other_free_gpus(local: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command, a handle and an attached cluster; three of the four GPUs are free at first."""
    for name, value in {"FAKE_NVML_GPUS": "4", "FAKE_NVML_BUSY": "1"}.items():
        local.env[name] = value
        monkeypatch.setenv(name, value)
    cluster = local.submit({"gpus": 1, "env": {"FAKE_NVML_GPUS": "4"}})
    try:
        done = local("scale", cluster, "2")
        assert done.returncode == 0, done.stderr
        handle = gpujobs.ClusterHandle(cluster)
        refused = local("scale", cluster, "4")
        assert refused.returncode == 2
        assert f"scale {cluster}: 2 GPUs wanted, 1 free on this machine" in refused.stderr
        until(lambda: handle.status().connected == 2, 90)
        with gpujobs.GPUJobQueueCluster.from_name(cluster) as attached:
            attached.scale_up(3)
        until(lambda: handle.status().connected == 3, 90)
        devices = {gpu["uuid"][-1] for gpu in local.gpus(cluster).values()}
        assert devices == {"0", "2", "3"}
        handle.scale(2)
        until(lambda: sum(job.active for job in handle.status().jobs) == 2, 90)
        handle.scale(3)  # takes the GPU of the job that has ended
        until(lambda: handle.status().connected == 3, 90)
    finally:
        local("cancel", cluster)
    until(lambda: not processes_with(cluster), 30)


@pytest.fixture
def machine(home: Path, gpus: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process, too, see the GPUs and ucxx."""
    for name, value in {**gpus, "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # so that its change by the cluster is undone
    monkeypatch.chdir(home)
    for folder in (RMM, UCXX, NVML):
        monkeypatch.syspath_prepend(folder)
    kept = {name: sys.modules.pop(name, None) for name in ("pynvml", "distributed_ucxx")}
    yield
    for name, module in kept.items():
        sys.modules.pop(name, None)
        if module:
            sys.modules[name] = module
    backends.pop("ucxx", None)


def options(**others: Any) -> dict[str, Any]:
    """Return keywords of a cluster for tests."""
    return {"quiet": True, "memory_limit": "1GiB", "dashboard_address": "127.0.0.1:0", **others}


@pytest.mark.slow
@pytest.mark.usefixtures("machine")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("scheduler", "protocol"),
    [
        ("local", "ucxx"),
        ("job", "ucxx"),
        ("local", "ws"),
        ("job", "wss"),
    ],
)
def test_a_python_cluster_is_on_the_loopback_interface(scheduler: str, protocol: str) -> None:
    others = sorted({listener.inode for listener in all_listeners()})
    keywords = options(dashboard_address="127.0.0.1:0" if scheduler == "local" else "")
    keywords["network"] = {"protocol": protocol.replace("wss", "ws")}
    if protocol == "ws":
        keywords["network"]["encryption"] = False
    with gpujobs.GPULocalCluster(scheduler=scheduler, **keywords) as cluster:
        cluster.wait_for_workers(2, timeout=patience(90))  # one for each GPU
        assert cluster.scheduler_address.startswith(f"{protocol}://127.0.0.1:")
        with cluster.get_client() as client:
            assert client.submit(sum, [1, 2]).result() == 3
        own = [
            item for item in listeners_of([os.getpid()])[os.getpid()] if item.inode not in others
        ]
        assert [listener for listener in own if not listener.loopback_only] == []
        assert bool(own) == (scheduler == "local")
        found = [item for every in listeners(cluster.id).values() for item in every]
        assert found and [listener for listener in found if not listener.loopback_only] == []


def visible_devices() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.usefixtures("machine")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("busy", "keywords", "devices"),
    [("0:self,1,3", {}, ["0,2", "2,0"]), slow_variant("1", {"gpus_per_worker": 2}, ["0,2"])],
)
def test_n_workers_auto_is_a_worker_on_each_free_gpu(
    monkeypatch: pytest.MonkeyPatch, busy: str, keywords: dict[str, int], devices: list[str]
) -> None:
    """Of 4 GPUs; those of ``busy`` have a process, which may be this one. The first device of each worker is its own."""
    monkeypatch.setenv("FAKE_NVML_GPUS", "4")
    monkeypatch.setenv("FAKE_NVML_BUSY", busy)
    protocol = {"protocol": "tcp"}
    with gpujobs.GPULocalCluster(n_workers="auto", **protocol, **options(**keywords)) as cluster:
        assert sum(len(job["workers"]) for job in cluster.jobs) == len(devices)
        cluster.wait_for_workers(len(devices), timeout=patience(90))
        with cluster.get_client() as client:
            assert sorted(client.run(visible_devices).values()) == devices
