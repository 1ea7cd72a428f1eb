"""Nodes on which jobs fail: on the real Slurm, whose node1 has a GPU that has fallen off the bus."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpujobs

from ..conftest import make_cli, slow_variant
from ..support.backend import SlurmBackend
from ..support.cli import Cli, text_of
from ..support.on_slurm import backend  # noqa: F401
from ..support.owner import make, site  # noqa: F401
from ..support.processes import patience, until
from ..support.sge import SgeBackend
from .test_clusters import connected

pytestmark = pytest.mark.slurm

BROKEN = '[ "$SLURMD_NODENAME" != node1 ] || export FAKE_NVML_LOST=0'
LOST = "GPU is lost"


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
    assert note.startswith("node node1 is bad for six hours: ") and LOST in note
    (node,) = json.loads(cli("nodes", "--json").stdout)["nodes"]
    assert (node["node"], node["site"], len(node["jobs"])) == ("node1", "here", 1)
    assert node["bad"] is True and LOST in node["reason"]
    assert "node1  here  " in cli("nodes").stdout
    assert note in cli("report", cluster).stdout
    ticket = cli("report", cluster, "--ticket").stdout
    assert ticket.startswith("node node1: a GPU job failed\n  job      ") and LOST in ticket
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


DMESG = """#!/bin/sh
read -r now _ < /proc/uptime
echo "[$now] NVRM: Xid (PCI:0000:01:00): 48, pid=7, name=secret, An uncorrectable double bit error (DBE) has been detected"
echo "[$now] NVRM: Xid (PCI:0000:09:00): 79, GPU has fallen off the bus."
"""


@pytest.mark.parametrize(
    ("broken", "facts"),
    [
        (
            "export FAKE_NVML_ECC=0,2,0,0 FAKE_NVML_REMAPPED=0/0/0/0,0/1/1/0,0/3/0/0,0/0/0/0",
            "uncorrected ECC errors at 0000:01:00 (2); remapped rows at 0000:01:00 (1, pending); Xid 48 at 0000:01:00",
        ),
        slow_variant(
            "export FAKE_NVML_LOST=2,3",
            "2 of 4 GPUs visible (GPU is lost); Xid 48 at 0000:01:00; Xid 79 at 0000:09:00",
        ),
    ],
    ids=["memory", "lost"],
)
def test_the_reason_has_what_speaks_against_the_gpus(
    cli: Cli, backend: SlurmBackend, broken: str, facts: str
) -> None:
    """The worker's own error is about a file: what NVML and the kernel know blames the node."""
    (cli.work / "bin").mkdir()
    dmesg = cli.write("bin/dmesg", DMESG)
    dmesg.chmod(0o755)
    setup = f"{broken}\nexport PATH={dmesg.parent}:$PATH"
    profile = {
        "gpus": 4,
        "environment": {"setup": setup, "python": cli.python},
        "workers": {"options": {"pid_file": "/nosuch/w.pid"}},
        "directives": ["--nodelist=node1"],
    }
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 5 and facts in done.stderr, done.stderr
    cluster = done.stdout.strip()
    status = cli.status(cluster)
    assert facts in status["reason"]
    assert any(
        note.startswith("node node1 is bad for six hours: ") and facts in note
        for note in status["notes"]
    )
    (node,) = json.loads(cli("nodes", "--json").stdout)["nodes"]
    assert node["bad"] and facts in node["reason"]
    assert facts in cli("report", cluster).stdout
    ticket = cli("report", cluster, "--ticket").stdout
    assert facts in ticket and "secret" not in ticket


@pytest.mark.slow
def test_replacements_avoid_the_node(make: Callable[..., Any], backend: SlurmBackend) -> None:
    cluster = make(12, gpus_per_job=4, environment={"setup": BROKEN, "python": sys.executable})
    cluster.wait_for_workers(12, timeout=patience(120))
    nodes = {job["node"] for job in cluster.jobs if job["state"] == "RUNNING"}
    assert nodes == {"node2", "node3", "node4"}


@pytest.mark.sge
@pytest.mark.stub
@pytest.mark.slow
def test_replacements_on_grid_engine_avoid_the_node(
    sge_backend: SgeBackend, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the other node is disabled, the replacement waits, although the bad node is free."""
    cli = make_cli(sge_backend, home, "ordinary", stub=True)
    for name, value in {**sge_backend.env(), "HOME": str(cli.home)}.items():
        monkeypatch.setenv(name, value)
    queues = {key: {**queue, "nodes": 2} for key, queue in cli.site["queues"].items()}
    site = str(cli.write("sge.yaml", {**cli.site, "queues": queues}))
    options = {"dashboard_address": ":0", **sge_backend.scheduler_options}
    broken = '[ "$(hostname)" != node1 ] || export FAKE_NVML_LOST=0'
    sge_backend.sge.command("qmod", "-d", "*@node2")
    try:
        with gpujobs.GPUSGECluster(
            site, gpus_per_job=4, environment={"setup": broken, "python": cli.python},
            quiet=True, scheduler_options=options,
        ) as cluster:  # fmt: skip
            cluster.scale(4)

            def states() -> list[tuple[str, str]]:
                return [(job["state"], job["node"]) for job in cluster.jobs]

            until(lambda: ("FAILED", "node1") in states(), 60)
            until(lambda: ("PENDING", "") in states(), 60)
            time.sleep(10)  # several intervals of the batch scheduler
            assert sorted(states()) == [("FAILED", "node1"), ("PENDING", "")]
            sge_backend.sge.command("qmod", "-e", "*@node2")
            until(lambda: ("RUNNING", "node2") in states(), 60)
            scripts = [path.read_text() for path in cluster.folder.glob("scripts/*")]
            assert any("\n#$ -l h='!(node1)'\n" in text for text in scripts)
    finally:
        sge_backend.sge.command("qmod", "-e", "*@node2")
    sge_backend.wait_empty(30)
