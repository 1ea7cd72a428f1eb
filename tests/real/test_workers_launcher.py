"""A site's `workers_launcher` on a real Slurm: `srun`, and a program that does what `jsrun` does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..conftest import nothing_left, slow_variant
from ..support.backend import SlurmBackend
from ..support.cli import Cli
from ..support.processes import patience, processes_with, until

pytestmark = pytest.mark.slurm

STUB = """#!/bin/bash
# Start a command in a session of its own, and pass on SIGTERM only, and only to this command.
while [[ $1 == -* ]]; do printf '%s ' "$1" >> "$HOME/options"; shift; done
setsid "$@" &
trap 'echo TERM >> "$HOME/signals"; kill -TERM $!' TERM
while kill -0 $! 2> /dev/null; do wait $!; done
wait $!
"""
RUN = """
import signal, sys, time
from distributed import Client

def stop(*_):
    print("saved", flush=True)
    sys.exit(3)

signal.signal(signal.SIGTERM, stop)

def seen():
    import os
    # Slurm 26.05 gives the batch script itself the step -5.
    is_step = int(os.environ.get("SLURM_STEP_ID", "-1")) >= 0
    return [os.environ.get("OF_PROFILE"), os.environ.get("OF_SITE"), is_step]

with Client() as client:
    client.wait_for_workers(2)
    print("run", seen(), flush=True)
    for found in client.run(seen).values():
        print("worker", found, flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""
LAUNCHERS = {
    "srun": ["srun", "--ntasks=1", "--cpus-per-task={cpus_per_node}"],
    "stub": ["$HOME/jsrun", "-n1", "-c{cpus_per_node}", "-g{gpus_per_node}"],
}


@pytest.fixture
def backend(slurm_backend: SlurmBackend) -> Iterator[SlurmBackend]:
    yield slurm_backend
    nothing_left(slurm_backend)


@pytest.fixture(params=["srun", slow_variant("stub")])
def launcher(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def submit(cli: Cli, backend: SlurmBackend, launcher: str, argument: str) -> str:
    """Submit a cluster of two workers whose processes the launcher starts."""
    stub = cli.home / "jsrun"
    stub.write_text(STUB)
    stub.chmod(0o755)
    site: dict[str, Any] = backend.site()
    site["workers_launcher"] = LAUNCHERS[launcher]
    site["setup"] += "\nexport OF_SITE='c d'\n"
    cli.write("run.py", RUN)
    profile = {
        "gpus": 2,
        "gpus_per_job": 2,
        "start_workers": 2,
        "env": {"OF_PROFILE": "a b"},
        "run": ["python", "run.py", argument],
    }
    return cli.submit(profile, "--site", str(cli.write("s.yaml", site)))


def lines(cli: Cli, cluster: str) -> list[str]:
    return [line for line in cli("logs", cluster).stdout.splitlines() if line]


def test_the_environment_arrives_in_processes_of_the_launcher(
    cli: Cli, backend: SlurmBackend, launcher: str
) -> None:
    cluster = submit(cli, backend, launcher, "5")
    backend.wait_empty(90, cluster)
    values = f"['a b', 'c d', {launcher == 'srun'}]"
    assert lines(cli, cluster) == [f"run {values}", *[f"worker {values}"] * 2]
    found = cli.status(cluster)
    assert (found["state"], found["exit_code"]) == ("FAILED", 5)
    if launcher == "stub":
        assert (cli.home / "options").read_text() == "-n1 -c8 -g2 "


@pytest.mark.slow
def test_the_warning_before_the_walltime_arrives(
    cli: Cli, backend: SlurmBackend, launcher: str
) -> None:
    """As `--signal=B:TERM@60` sends it: to the batch script only."""
    cluster = submit(cli, backend, launcher, "wait")
    until(lambda: len(lines(cli, cluster)) == 3, 90, "workers", every=0.5)
    (job,) = cli.status(cluster)["jobs"]
    backend.slurm.command("scancel", "--batch", "--signal=TERM", job["id"])
    backend.wait_empty(90, cluster)
    saved = {"stub": ["saved"], "srun": []}[launcher]  # srun kills its tasks at once
    assert lines(cli, cluster)[3:] == saved
    assert cli.status(cluster)["state"] in ("CANCELLED", "FAILED")
    if launcher == "stub":
        assert "TERM" in (cli.home / "signals").read_text()
    until(lambda: not processes_with(f"GPUJOBS_CLUSTER={cluster}"), patience(20), "processes")


@pytest.mark.slow
def test_a_cancel_ends_the_processes(cli: Cli, backend: SlurmBackend) -> None:
    cluster = submit(cli, backend, "stub", "wait")
    until(lambda: len(lines(cli, cluster)) == 3, 90, "workers", every=0.5)
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(90, cluster)
    assert cli.status(cluster)["state"] == "CANCELLED"
    until(lambda: not processes_with(f"GPUJOBS_CLUSTER={cluster}"), patience(20), "processes")
