"""Workers that share GPUs through CUDA's MPS: on a real Slurm, with a fake of its daemon."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ..support.backend import FAKE_GPUS, SlurmBackend
from ..support.cli import ROOT, Cli, text_of
from ..support.on_slurm import backend  # noqa: F401
from ..support.processes import processes_with, until
from .test_allocation import environ, supervisors, words
from .test_clusters import connected

pytestmark = pytest.mark.slurm
FAKE = ROOT / "tests" / "fakes" / "mps"
WORKERS = {"workers_per_gpu": 2, "mps": True}


@pytest.fixture
def cli(cli: Cli) -> Cli:
    setup = f"{FAKE_GPUS} PATH={FAKE}:$PATH FAKE_MPS_FOLDER={cli.work}"
    (cli.home / "sites" / "here.yaml").write_text(text_of({**cli.site, "setup": setup}))
    return cli


def daemons(cli: Cli) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(cli.work.glob("daemon-*.json"))]


def gone(facts: dict[str, Any]) -> bool:
    pids = [Path(f"/proc/{facts[name]}/status") for name in ("pid", "server")]
    running = [path for path in pids if path.exists() and "\tZ" not in path.read_text()]
    return not running and not Path(facts["CUDA_MPS_PIPE_DIRECTORY"]).exists()


@pytest.mark.stub
def test_a_job_has_one_daemon_that_ends_with_its_killed_supervisor(
    cli: Cli, backend: SlurmBackend
) -> None:
    profile = {"gpus": 2, "gpus_per_job": 2, "workers": {**WORKERS, "mps_thread_percentage": 40}}
    cluster = cli.submit(profile)
    connected(cli, cluster, 4)
    (facts,) = daemons(cli)
    folder = Path(facts["CUDA_MPS_PIPE_DIRECTORY"])
    assert folder.stat().st_mode & 0o777 == 0o700
    pids = processes_with(f"{cluster}/injob.pyz\0workers")
    workers = [environ(pid) for pid in pids if words(pid)[2] == "workers"]
    assert workers
    for own in workers:
        assert own["CUDA_MPS_PIPE_DIRECTORY"] == str(folder)
        assert own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
        assert set(own["CUDA_VISIBLE_DEVICES"].split(",")) == set(
            facts["CUDA_VISIBLE_DEVICES"].split(",")
        )
    assert facts["CUDA_VISIBLE_DEVICES"].count("GPU-") == 2
    assert "MPS      up to 2 workers on a GPU" in cli("status", cluster).stdout
    (job,) = cli.status(cluster)["jobs"]
    assert [gpu["mps"] for gpu in job["gpus"]] == [True] * 4
    (supervisor,) = supervisors(cluster, "supervise").values()
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: gone(facts), 30, "the end of the daemon")
    backend.wait_empty(30, cluster)


@pytest.mark.slow
@pytest.mark.stub
def test_each_node_of_an_allocation_has_a_daemon(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit({"layout": "allocation", "gpus": 8, "workers": WORKERS})
    connected(cli, cluster, 16)
    found = daemons(cli)
    assert len({facts["SLURMD_NODENAME"] for facts in found}) == len(found) == 2
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(60, cluster)
    until(lambda: all(map(gone, found)), 30, "the end of the daemons")


@pytest.mark.slow
@pytest.mark.stub
def test_a_daemon_that_does_not_start_ends_the_cluster_with_its_reason(
    cli: Cli, backend: SlurmBackend
) -> None:
    cluster = cli.submit({"gpus": 1, "workers": WORKERS, "env": {"FAKE_MPS_FAILS": "no permission to use it: denied"}})  # fmt: skip
    backend.wait_empty(60, cluster)
    reason = cli.status(cluster)["reason"]
    assert "cannot run nvidia-cuda-mps-control: exit code 1: no permission to use it" in reason
