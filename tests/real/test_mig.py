"""MIG: on a real Slurm whose node has a whole GPU, and three slices of two others, with the fake NVML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import fresh_folder, make_cli, unavailable
from ..support import slurm as slurm_support
from ..support.backend import FAKE_GPUS, Backend, SlurmBackend
from ..support.cli import Cli, text_of
from ..support.processes import until
from .test_clusters import connected, says

pytestmark = pytest.mark.slurm

SLICE = "a100_3g.20gb"
SHAPE = {"name": "main", "cpus_per_node": 16, "memory_per_node": "16GiB"}
QUEUES = {
    "whole": {**SHAPE, "gpus_per_node": 1, "gpu_type": "a100"},
    "slices": {**SHAPE, "gpus_per_node": 3, "gpu_type": SLICE},
}
SETUP = f"{FAKE_GPUS} FAKE_NVML_GPUS=3 FAKE_NVML_MIG=-,2,1"
SLICES = sorted(f"MIG-node1-0000-0000-{n:04d}-{gpu:012d}" for gpu, n in ((1, 0), (1, 1), (2, 0)))
GPU = f"GPU-node1-0000-0000-0000-{0:012d}"

LOOK = """
import json, os
from distributed import Client

if __name__ == "__main__":
    with Client() as client:
        print(json.dumps(sorted(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values())), flush=True)
"""


@pytest.fixture(scope="module")
def mig(shared_folder: Path) -> Iterator[SlurmBackend]:
    """A Slurm that, as with `MultipleFiles` in gres.conf, names the slices by index: 1, 2 and 3."""
    if why := slurm_support.missing():
        unavailable("slurm", why)
    folder = fresh_folder(shared_folder, "mig")
    types = ["a100", *[SLICE] * 3]
    with slurm_support.PrivateSlurm(folder / "s", nodes=1, types=types).running() as running:
        yield SlurmBackend(running)


@pytest.fixture
def cli(mig: SlurmBackend, home: Path) -> Cli:
    cli = make_cli(mig, home, "ordinary")
    site = {**cli.site, "setup": SETUP, "queues": QUEUES}
    (cli.home / "sites" / "here.yaml").write_text(text_of(site))
    return cli


def looked(cli: Cli, **profile: Any) -> tuple[str, list[str]]:
    """Return a cluster that has ended, and CUDA_VISIBLE_DEVICES of its workers."""
    cli.write("look.py", LOOK)
    profile = {"run": ["python", "look.py"], "start_workers": profile["gpus"], **profile}
    cluster = cli.submit(profile, "--wait")
    return cluster, json.loads(cli("logs", cluster).stdout.splitlines()[-1])


def test_each_worker_has_a_slice(cli: Cli, mig: SlurmBackend) -> None:
    cli.write("look.py", LOOK.replace("flush=True)", "flush=True)\n    input()"))
    run = ["bash", "-c", "sleep 600 | python look.py"]
    cluster = cli.submit({"gpus": 2, "gpu_type": SLICE, "run": run, "start_workers": 2})
    says(cli, cluster, "MIG-")
    assert json.loads(cli("logs", cluster).stdout.splitlines()[-1]) == SLICES[::2]
    (job,) = cli.status(cluster)["jobs"]
    assert sorted(gpu["uuid"] for gpu in job["gpus"]) == SLICES[::2]
    found = {(gpu["memory"], gpu["model"]) for gpu in job["gpus"]}
    assert found == {(2 * 2**30, "Fake GPU MIG 1g.2gb")}
    queues = json.loads(cli("queues", "--json").stdout)["queues"]
    free = {queue["gpu_type"]: (queue["free_gpus"], queue["gpus"]) for queue in queues}
    assert free == {"a100": (1, 1), SLICE: (1, 3)}
    until(lambda: cli("status", cluster).stdout.count("not available for MIG") == 2, 30)
    assert cli("cancel", cluster).returncode == 0
    assert "busy share not available for MIG" in cli("report", cluster).stdout


def test_the_draft_of_a_site_has_the_types_of_slices(cli: Cli, mig: SlurmBackend) -> None:
    done = cli("sites", "init", "-o", "drafted.yaml")
    assert done.returncode == 0, done.stderr
    text = (cli.work / "drafted.yaml").read_text()
    assert f"main-{SLICE}x3: {{name: main, " in text and f"gpu_type: {SLICE}" in text, text
    plan = cli(
        "plan",
        str(cli.write("p.yaml", {"gpus": 3, "gpu_type": SLICE})),
        "--site",
        "./drafted.yaml",
        "--json",
    )
    assert plan.returncode == 0, plan.stderr
    assert f"--gres=gpu:{SLICE}:3" in cli("render", "p.yaml", "--site", "./drafted.yaml").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "devices"),
    [
        ({"gpus": 1, "gpu_type": "a100"}, [GPU]),
        ({"gpus": 3, "gpu_type": SLICE, "workers": {"worker_class": "nanny"}}, SLICES),
        ({"gpus": 1, "gpu_type": SLICE, "workers": {"workers_per_gpu": 2}, "start_workers": 2}, [SLICES[0]] * 2),
    ],
)  # fmt: skip
def test_workers_of_a_mixed_node_get_the_devices_of_their_type(
    cli: Cli, mig: SlurmBackend, profile: dict[str, Any], devices: list[str]
) -> None:
    assert looked(cli, **profile)[1] == devices


@pytest.mark.slow
def test_doctor_finds_the_slices(cli: Cli, mig: SlurmBackend) -> None:
    done = cli("doctor", "--run", "--set", "gpus=3", "--set", f"gpu_type={SLICE}")
    assert all(name in done.stdout for name in SLICES), done.stdout + done.stderr


@pytest.mark.slow
def test_a_worker_of_two_slices_is_refused(cli: Cli, mig: SlurmBackend) -> None:
    workers = {"gpus_per_worker": 2}
    profile = {"gpus": 2, "gpu_type": SLICE, "workers": workers}
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 5
    assert "is a MIG slice: gpus_per_worker must be 1" in done.stderr


@pytest.mark.slow
@pytest.mark.stub
@pytest.mark.parametrize("backend", ["slurm", "sge", "torque", "lsf"], indirect=True)
def test_indices_of_other_batch_schedulers_become_slices(backend: Backend, home: Path) -> None:
    """Two GPUs of two slices, which a batch scheduler counts from 0 to 3. OpenPBS lists names."""
    cli = make_cli(backend, home, "ordinary", stub=True)
    site = {**cli.site, "setup": f"{cli.site['setup']}\nexport FAKE_NVML_GPUS=2 FAKE_NVML_MIG=2,2"}
    (cli.home / "sites" / "here.yaml").write_text(text_of(site))
    cluster = cli.submit({"gpus": 4, "gpus_per_job": 2})
    connected(cli, cluster, 4)
    gpus = [gpu for job in cli.status(cluster)["jobs"] for gpu in job["gpus"]]
    assert all(gpu["uuid"].startswith("MIG-") and gpu["memory"] == 2 * 2**30 for gpu in gpus)
    assert len({(gpu["node"], gpu["uuid"]) for gpu in gpus}) == 4
    assert cli("cancel", cluster).returncode == 0
