"""A cluster with `requeue` that loses its head on the real Slurm: the next attempt ends the work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..support.backend import SlurmBackend
from ..support.cli import Cli
from ..support.jobevents import supervisor_of
from ..support.on_slurm import backend  # noqa: F401
from ..support.processes import until
from ..support.slurm_faults import failed_node
from .test_clusters import state

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

SQUARES = """
import os, time
from pathlib import Path
from distributed import Client, wait

def square(n):
    if n == 0:
        while not Path("go").exists():
            time.sleep(0.2)
    return n * n

if __name__ == "__main__":
    with Client() as client:
        squares = client.map(square, range(20), pure=False)
        print("attempt", os.environ["GPUJOBS_ATTEMPT"], flush=True)
        print("the sum is", sum(client.gather(squares)))
"""
"""The first task waits for the file `go`."""

PROFILE: dict[str, Any] = {
    "gpus": 2,
    "gpus_per_job": 1,
    "start_workers": 2,
    "requeue": 2,
    "run": ["python", "squares.py"],
    "cpus_per_job": 16,
}
"""Two jobs, on two nodes."""


def submitted(cli: Cli) -> str:
    """Submit the cluster; return its id when `run` of the first attempt waits for its tasks."""
    cli.write("squares.py", SQUARES)
    cluster = cli.submit(PROFILE)
    runs(cli, cluster, 1)
    return cluster


def runs(cli: Cli, cluster: str, attempt: int) -> None:
    line = f"attempt {attempt}"

    def found() -> bool:
        status = cli.status(cluster)
        assert status["kind"] is None, status["reason"]
        return line in cli("logs", cluster).stdout

    until(found, 120, f"{line} of {cluster}", every=0.5)


def job_of(cli: Cli, cluster: str, *, head: bool) -> dict[str, Any]:
    """Return the job of the head, or the other one, of the first attempt."""
    jobs = [job for job in cli.status(cluster)["jobs"] if job["attempt"] == 1]
    (found,) = (job for job in jobs if job["head"] is head)
    return dict(found)


def ends_well(cli: Cli, backend: SlurmBackend, cluster: str, attempt: int) -> None:
    """Let the cluster go on; it must end in ``attempt`` with the right result, and leave no job."""
    runs(cli, cluster, attempt)
    cli.write("go", "")
    until(lambda: state(cli, cluster) not in ("RUNNING", "STARTING"), 60, cluster, every=0.5)
    found = cli.status(cluster)
    assert (found["state"], found["attempt"]) == ("DONE", attempt), found["reason"]
    assert cli("logs", cluster).stdout.splitlines()[-1] == "the sum is 2470"
    backend.wait_empty(60, cluster)


def test_a_failed_node_of_the_head_begins_the_next_attempt(cli: Cli, backend: SlurmBackend) -> None:
    cluster = submitted(cli)
    head = job_of(cli, cluster, head=True)
    with failed_node(backend.slurm, head["node"]):
        ends_well(cli, backend, cluster, attempt=2)
        lost = cli.status(cluster)["jobs"][head["number"]]
        assert lost["state"] == "NODE_FAIL"


def test_a_failed_node_of_other_workers_leaves_the_attempt(cli: Cli, backend: SlurmBackend) -> None:
    """The attempt goes on: dask repeats the lost tasks on the other workers."""
    cluster = submitted(cli)
    with failed_node(backend.slurm, job_of(cli, cluster, head=False)["node"]):
        ends_well(cli, backend, cluster, attempt=1)


def kill_supervisor(folder: Path, head: dict[str, Any], backend: SlurmBackend) -> None:
    os.kill(supervisor_of(folder, head["number"]), signal.SIGKILL)


def kill_script(folder: Path, head: dict[str, Any], backend: SlurmBackend) -> None:
    psutil.Process(supervisor_of(folder, head["number"])).parent().kill()


def kill_job(folder: Path, head: dict[str, Any], backend: SlurmBackend) -> None:
    backend.slurm.command("scancel", "--full", "--signal=KILL", head["id"])


@pytest.mark.parametrize("kill", [kill_supervisor, kill_script, kill_job])
def test_a_killed_head_begins_the_next_attempt(
    cli: Cli, backend: SlurmBackend, kill: Callable[[Path, dict[str, Any], SlurmBackend], None]
) -> None:
    cluster = submitted(cli)
    kill(Path(cli.status(cluster)["folder"]), job_of(cli, cluster, head=True), backend)
    ends_well(cli, backend, cluster, attempt=2)
