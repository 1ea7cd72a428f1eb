"""Nodes on which jobs fail: on the real Slurm, whose node1 has no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ..support.backend import SlurmBackend
from ..support.cli import Cli, text_of
from ..support.on_slurm import backend  # noqa: F401
from ..support.owner import make, site  # noqa: F401
from ..support.processes import patience, until
from .test_clusters import connected

pytestmark = pytest.mark.slurm

BROKEN = '[ "$SLURMD_NODENAME" != node1 ] || export FAKE_NVML_GPUS=0'


@pytest.mark.stub
def test_another_cluster_avoids_the_node(cli: Cli, backend: SlurmBackend) -> None:
    profile = {
        "gpus": 16,
        "gpus_per_job": 4,
        "environment": {"setup": BROKEN, "python": cli.python},
    }
    cluster = cli.submit(profile)
    until(lambda: cli.status(cluster)["state"] == "FAILED", 90)

    def notes() -> list[str]:
        return [note for note in cli.status(cluster)["notes"] if "node1" in note]

    until(notes, 30, "the end of the job on node1")  # the cluster has ended before it
    (note,) = notes()
    assert note.startswith("node node1 is bad for six hours: ") and "NVML" in note
    (node,) = json.loads(cli("nodes", "--json").stdout)["nodes"]
    assert (node["node"], node["site"], len(node["jobs"])) == ("node1", "here", 1)
    assert node["bad"] is True and "NVML" in node["reason"]
    assert "node1  here  " in cli("nodes").stdout
    assert note in cli("report", cluster).stdout
    ticket = cli("report", cluster, "--ticket").stdout
    assert ticket.startswith("node node1: a GPU job failed\n  job      ") and "NVML" in ticket
    assert node["jobs"][0] in ticket and str(cli.home) not in ticket
    other = cli.submit({**profile, "gpus": 4})
    assert "--exclude" not in script(cli, other)  # a tenth of four nodes is none
    cli("cancel", other)
    queues = {key: {**queue, "nodes": 40} for key, queue in cli.site["queues"].items()}
    (cli.home / "sites" / "here.yaml").write_text(text_of({**cli.site, "queues": queues}))
    other = cli.submit({**profile, "gpus": 12})
    connected(cli, other, 12)
    assert any("avoids node node1: " in note for note in cli.status(other)["notes"])
    assert "\n#SBATCH --exclude=node1\n" in script(cli, other)
    cli("cancel", other)


def script(cli: Cli, cluster: str) -> str:
    return (cli.home / ".gpujobs" / cluster / "scripts" / "workers-0.sh").read_text()


@pytest.mark.slow
def test_replacements_avoid_the_node(make: Callable[..., Any], backend: SlurmBackend) -> None:
    cluster = make(12, gpus_per_job=4, environment={"setup": BROKEN, "python": sys.executable})
    cluster.wait_for_workers(12, timeout=patience(120))
    nodes = {job["node"] for job in cluster.jobs if job["state"] == "RUNNING"}
    assert nodes == {"node2", "node3", "node4"}
