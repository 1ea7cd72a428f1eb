"""On which CPUs the workers of a job run: on this machine, with fake GPUs whose NVML knows the CPUs near them."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from ..conftest import slow_variant
from ..support.cli import Cli
from .test_clusters import says
from .test_local import local, with_gpus  # noqa: F401

LOOK = """
import json, os, time
from distributed import Client

def task():
    threads = map(int, os.listdir("/proc/self/task"))
    return [sorted(os.sched_getaffinity(0)), sorted({cpu for thread in threads for cpu in os.sched_getaffinity(thread)})]

def name(dask_worker):
    return dask_worker.name[-1]

if __name__ == "__main__":
    with Client() as client:
        names = client.run(name)
        found = {names[worker]: client.submit(task, workers=[worker], pure=False).result() for worker in names}
        print("found", json.dumps(found), flush=True)
        time.sleep(600)
"""
"""Prints, by the number of each worker, the CPUs of a task, and those of all threads."""


@pytest.fixture
def cpus() -> tuple[int, int]:
    """Two CPUs of this machine."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        pytest.skip("this machine has one CPU")
    return first, others[-1]


def look(local: Cli, worker_class: str, near: str, allowed: str) -> tuple[str, dict[str, Any]]:
    """Start a cluster of two GPUs on the CPUs ``allowed``; return its id and its workers' CPUs."""
    local.write("look.py", LOOK)
    profile: dict[str, Any] = {
        **with_gpus(local, 2),
        "gpus": 2,
        "start_workers": 2,
        "run": ["python", "look.py"],
        "workers": {"worker_class": worker_class},
        "environment": {"setup": f"taskset -cp {allowed} $$", "python": sys.executable},
    }
    profile["env"] |= {"FAKE_NVML_CPUS": near}
    cluster = local.submit(profile)
    says(local, cluster, "found")
    return cluster, json.loads(local("logs", cluster).stdout.splitlines()[-1].partition(" ")[2])


@pytest.mark.parametrize("worker_class", ["cuda", slow_variant("nanny")])
def test_each_worker_runs_near_its_gpu(
    local: Cli, cpus: tuple[int, int], worker_class: str
) -> None:
    first, last = cpus
    cluster, found = look(local, worker_class, f"{last};{first}", f"{first},{last}")
    assert found == {"0": [[last], [last]], "1": [[first], [first]]}
    shown = {name[-1]: gpu["binding"] for name, gpu in local.gpus(cluster).items()}
    assert [(shown[n]["cpus"], shown[n]["cores"], shown[n]["reason"]) for n in "01"] == [
        (str(last), 1, ""),
        (str(first), 1, ""),
    ]
    assert not [note for note in local.status(cluster)["notes"] if "CPU" in note]
    assert local("cancel", cluster).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("worker_class", ["cuda", "nanny"])
def test_a_worker_keeps_to_the_cpus_of_its_job(
    local: Cli, cpus: tuple[int, int], worker_class: str
) -> None:
    """NVML calls another CPU near the first GPU, to which dask-cuda alone would bind both workers."""
    first, last = cpus
    cluster, found = look(local, worker_class, f"{last};{first}", str(first))
    assert found == {"0": [[first], [first]], "1": [[first], [first]]}
    notes = "\n".join(local.status(cluster)["notes"])
    assert "no CPU of the job is near the GPU (workers on NUMA node" in notes
    assert f"several workers share one core: CPU {first} of " in notes
    assert local("cancel", cluster).returncode == 0
