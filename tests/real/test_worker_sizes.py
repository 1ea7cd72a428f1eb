"""Workers of several GPUs, and several workers on one GPU: on a real Slurm with 4 fake GPUs a node."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..conftest import make_cli, nothing_left, slow_variant, unavailable
from ..support import mpi
from ..support.backend import SlurmBackend
from ..support.cli import Cli, text_of
from ..support.on_slurm import backend  # noqa: F401
from ..support.owner import make, site  # noqa: F401
from ..support.processes import patience, until
from ..support.sge import SgeBackend
from .test_clusters import connected

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]

LOOK = """
import json, os
from distributed import Client

def look(dask_worker):
    return dask_worker.name, [os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("SLURMD_NODENAME", ""), dask_worker.state.available_resources, dask_worker.state.nthreads]

if __name__ == "__main__":
    with Client() as client:
        print(json.dumps(dict(client.run(look).values())), flush=True)
"""


@pytest.fixture
def cli(cli: Cli) -> Cli:
    if why := mpi.missing():
        unavailable("slurm", why)
    site = cli.site | {"mpi": mpi.LAUNCHERS["mpirun"]}
    (cli.home / "sites" / "here.yaml").write_text(text_of(site))
    return cli


def looked(cli: Cli, profile: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Run `LOOK` with all workers; return the cluster, what each worker has seen, and the plan."""
    profile = {"run": ["python", "look.py"], **profile}
    cli.write("look.py", LOOK)
    planned = json.loads(cli("plan", str(cli.write("p.yaml", profile)), "--json").stdout)
    cluster = cli.submit({**profile, "start_workers": planned["workers"]}, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    names = [name.replace("p-0000", cluster) for name in planned["worker_names"]]
    assert sorted(found) == sorted(names)
    return cluster, found, planned


@pytest.mark.parametrize(
    ("layout", "worker_class"),
    [
        ("workers", "cuda"),
        slow_variant("workers", "nanny"),
        slow_variant("mpi", "cuda"),
        slow_variant("mpi", "nanny"),
    ],
)
def test_a_worker_has_two_gpus_and_sees_no_others(cli: Cli, layout: str, worker_class: str) -> None:
    workers = {"gpus_per_worker": 2, "worker_class": worker_class}
    cluster, found, planned = looked(cli, {"layout": layout, "gpus": 8, "workers": workers})
    assert (planned["gpus"], planned["workers"], planned["gpus_per_worker"]) == (8, 4, 2)
    seen = [(devices, resources) for devices, _, resources, _ in found.values()]
    assert sorted(devices for devices, _ in seen) == ["0,1", "0,1", "2,3", "2,3"]
    assert all(resources == {"GPU": 2} for _, resources in seen)
    assert len({node for _, node, _, _ in found.values()}) == 2
    jobs = cli.status(cluster)["jobs"]
    by_worker = Counter(gpu["worker"] for job in jobs for gpu in job["gpus"])
    assert set(by_worker) == set(found) and set(by_worker.values()) == {2}
    assert len({gpu["uuid"] for job in jobs for gpu in job["gpus"]}) == 8


@pytest.mark.parametrize(
    ("layout", "worker_class"),
    [
        ("workers", "nanny"),
        ("workers", "cuda"),
        ("mpi", "cuda"),
        ("mpi", "nanny"),
    ],
)
@pytest.mark.slow
def test_two_workers_share_a_gpu(cli: Cli, layout: str, worker_class: str) -> None:
    workers = {"workers_per_gpu": 2, "worker_class": worker_class}
    cluster, found, planned = looked(cli, {"layout": layout, "gpus": 2, "workers": workers})
    assert (planned["gpus"], planned["workers"], planned["workers_per_gpu"]) == (2, 4, 2)
    firsts = Counter(devices.split(",")[0] for devices, _, _, _ in found.values())
    assert firsts == {"0": 2, "1": 2}
    jobs = cli.status(cluster)["jobs"]
    assert Counter(gpu["uuid"] for job in jobs for gpu in job["gpus"]).most_common() == [
        (uuid, 2) for uuid in dict.fromkeys(gpu["uuid"] for job in jobs for gpu in job["gpus"])
    ]


@pytest.mark.slow
def test_groups_scale_by_workers(cli: Cli) -> None:
    groups = {
        "serve": {"gpus": 2, "gpus_per_job": 2, "workers": {"gpus_per_worker": 2}},
        "small": {"gpus": 1, "gpus_per_job": 1, "workers": {"workers_per_gpu": 2}},
    }
    cluster = cli.submit({"groups": groups})

    def of_groups() -> dict[str, int]:
        found = cli.status(cluster)["workers"]["groups"]
        return {group["name"]: group["connected"] for group in found}

    until(lambda: of_groups() == {"serve": 1, "small": 2}, 60)
    done = cli("scale", cluster, "serve=2", "small=3")
    assert done.returncode == 0, done.stderr
    assert "3 workers are 2 jobs of 2" in done.stderr
    until(lambda: of_groups() == {"serve": 2, "small": 4}, 60)
    assert cli("cancel", cluster).returncode == 0


@pytest.mark.parametrize(
    ("workers", "devices", "message"),
    [
        ({"workers_per_gpu": 2}, "0", r"0-0, ID-0-1 and ID-1-[01] share GPU (GPU-same\S+) on same, which is for 2"),
        ({"gpus_per_worker": 2}, "0,1", r"0 and ID-1 share GPU (GPU-same\S+) on same"),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_one_worker_too_many_on_a_gpu_ends_the_cluster(
    cli: Cli, backend: SlurmBackend, workers: dict[str, int], devices: str, message: str
) -> None:
    """The jobs take each other's GPUs, as on a batch scheduler that does not isolate them."""
    setup = f"export SLURMD_NODENAME=same CUDA_VISIBLE_DEVICES={devices}"
    gpus = len(devices.split(","))
    profile = {"gpus": gpus, "gpus_per_job": gpus, "workers": workers}
    cluster = cli.submit({**profile, "environment": {"setup": setup, "python": cli.python}})
    allowed = workers.get("workers_per_gpu", 1)
    connected(cli, cluster, allowed)
    assert cli.status(cluster)["state"] == "RUNNING"
    assert cli("scale", cluster, str(2 * allowed)).returncode == 0
    until(lambda: cli.status(cluster)["state"] == "FAILED", 60)
    reason = cli.status(cluster)["reason"]
    found = re.fullmatch("workers ID-" + message, reason.replace(cluster, "ID"))
    assert found, reason
    backend.wait_empty(20, cluster)


@pytest.mark.slow
def test_keywords_of_workers_decide_their_gpus_and_jobs(
    backend: SlurmBackend, make: Callable[..., Any]
) -> None:
    cluster = make(gpus_per_worker=2, gpus_per_job=4, n_workers=2)
    cluster.wait_for_workers(2, timeout=patience(100))
    until(lambda: [len(job["gpus"]) for job in cluster.jobs] == [4], 30)
    with cluster.get_client() as client:
        assert client.submit(abs, -1, resources={"GPU": 2}).result() == 1
    cluster.scale(3)
    cluster.wait_for_workers(4, timeout=patience(100))
    assert [len(job["workers"]) for job in cluster.jobs] == [2, 2]


@pytest.mark.slow
def test_workers_of_both_sizes_run_on_grid_engine(sge_backend: SgeBackend, home: Path) -> None:
    cli = make_cli(sge_backend, home, "ordinary")
    for workers, number in (({"gpus_per_worker": 2}, 2), ({"workers_per_gpu": 2}, 8)):
        cluster, found, _ = looked(cli, {"gpus": 4, "workers": workers})
        assert len(found) == number
        jobs = cli.status(cluster)["jobs"]
        assert len({gpu["uuid"] for job in jobs for gpu in job["gpus"]}) == 4
    nothing_left(sge_backend)
