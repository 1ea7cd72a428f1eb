"""One job in several queues: on the real Slurm, whose first partition is down, and on the fake of LSF."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..support.backend import Backend, SlurmBackend
from ..support.cli import Cli
from .test_clusters import connected

PROFILE: dict[str, Any] = {"gpus": 1, "queue": ["short", "main"]}
NOTE = "queues short and main are equal: each job starts where it can first"


@pytest.mark.slurm
@pytest.mark.stub
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_the_job_starts_in_the_partition_that_is_up(cli: Cli, backend: SlurmBackend) -> None:
    profile = str(cli.write("p.yaml", PROFILE))
    planned = json.loads(cli("plan", profile, "--json").stdout)
    assert planned["jobs"][0]["queue"] == "short,main" and NOTE in planned["notes"]
    backend.slurm.command("scontrol", "update", "partitionname=short", "state=down")
    try:
        cluster = cli.submit(PROFILE)
        connected(cli, cluster, 1)
        assert backend.slurm.command("squeue", "-h", "-o", "%P").split() == ["main"]
    finally:
        backend.slurm.command("scontrol", "update", "partitionname=short", "state=up")
    cli("cancel", cluster)
    backend.wait_empty(30)


@pytest.mark.stub
@pytest.mark.parametrize("backend", ["lsf"], indirect=True)
def test_lsf_chooses_a_queue(cli: Cli, backend: Backend) -> None:
    cluster = cli.submit(PROFILE)
    connected(cli, cluster, 1)
    script = cli.home / ".gpujobs" / cluster / "scripts" / "workers-0.sh"
    assert '\n#BSUB -q "short main"\n' in script.read_text()
    cli("cancel", cluster)
    backend.wait_empty(30)
