"""Processes of a cluster that are killed at a bad moment, on the real Slurm: `kill -9`, as by an out-of-memory killer."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import psutil
import pytest

from ..conftest import slow_variant
from ..support.backend import SlurmBackend
from ..support.cli import Cli
from ..support.jobevents import has_left
from ..support.on_slurm import backend  # noqa: F401
from ..support.processes import processes_with, until
from .test_clusters import _command, _environ, connected, says, state
from .test_slurm import wrapped

pytestmark = pytest.mark.slurm

SLOW = 'REAL "$@"; exec sleep 600'
"""The job is accepted, and the answer does not come."""


def the_only_record(cli: Cli) -> str:
    """Return the id of the only cluster in the ledger, as soon as its jobs are being submitted."""
    folder = cli.home / ".local" / "state" / "gpujobs" / "clusters"
    until(lambda: [path for path in folder.glob("*.json") if '"group"' in path.read_text()], 30)
    (path,) = folder.glob("*.json")
    return path.stem


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


# -- submit ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("directives", [[], slow_variant(["--hold"])], ids=["runs", "waits"])
@pytest.mark.stub
def test_cancel_finds_the_jobs_of_a_submit_that_was_killed_after_they_were_accepted(
    cli: Cli, backend: SlurmBackend, directives: list[str]
) -> None:
    """The job is in the queue, and the ledger does not know its id: a cancel finds it by its name."""
    site = wrapped(cli, backend, "sbatch", SLOW)
    profile = {"gpus": 2, "gpus_per_job": 1, "name": "lost", "directives": directives}
    path = str(cli.write("p.yaml", profile))
    submitting = cli.start("submit", path, "--site", site, "--wait")
    until(lambda: [line for line in backend.queue() if "lost-" in line], 30)
    kill(submitting)
    cluster = the_only_record(cli)
    assert cluster in cli("status").stdout
    done = cli("cancel", cluster)
    assert done.returncode == 0 and f"{cluster} is cancelled" in done.stderr
    backend.wait_empty(20, cluster)
    assert state(cli, cluster) == "CANCELLED"


@pytest.mark.slow
@pytest.mark.stub
def test_a_job_of_a_submit_that_was_killed_before_it_was_accepted_ends(
    cli: Cli, backend: SlurmBackend
) -> None:
    """`sbatch` outlives it: the job that comes later finds that its cluster has ended."""
    begun, goes_on = cli.work / "begun", cli.work / "go"
    waits = f'touch {begun}; until [ -e {goes_on} ]; do sleep 0.2; done; exec REAL "$@"'
    site = wrapped(cli, backend, "sbatch", waits)
    path = str(cli.write("p.yaml", {"gpus": 1, "name": "late"}))
    submitting = cli.start("submit", path, "--site", site)
    cluster = the_only_record(cli)
    until(begun.exists, 30, "sbatch")
    kill(submitting)
    done = cli("cancel", cluster)
    assert done.returncode == 0 and "its submission was interrupted" in done.stderr, done.stderr
    goes_on.touch()
    folder = cli.home / ".gpujobs" / cluster
    until(lambda: has_left(folder, 0), 60, "the end of the late job")
    backend.wait_empty(20, cluster)
    assert not processes_with(f"GPUJOBS_JOB_NAME={cluster}\0")


@pytest.mark.parametrize("moment", [slow_variant("waiting"), "running"])
@pytest.mark.stub
def test_a_killed_submit_wait_leaves_its_cluster(
    cli: Cli, backend: SlurmBackend, moment: str
) -> None:
    """It only watches: the cluster goes on, and other commands know it."""
    directives = ["--hold"] if moment == "waiting" else []
    run = ["python", "-c", "import time; time.sleep(600)"]
    waiting, cluster = cli.start_submit({"gpus": 1, "run": run, "directives": directives})
    if moment == "running":
        connected(cli, cluster, 1)
    kill(waiting)
    assert state(cli, cluster) == ("RUNNING" if moment == "running" else "PENDING")
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(20, cluster)


@pytest.mark.stub
def test_a_killed_scale_leaves_no_job_twice(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit({"gpus": 1, "gpus_per_job": 1, "directives": ["--hold"]})
    wrapped(cli, backend, "sbatch", SLOW)
    record = cli.home / ".local" / "state" / "gpujobs" / "clusters" / f"{cluster}.json"
    value = json.loads(record.read_text())
    commands = {"sbatch": str(cli.work / "sbatch")}
    record.write_text(json.dumps(value | {"commands": commands}))
    scaling = cli.start("scale", cluster, "3")
    until(lambda: len(backend.queue()) == 3, 30)
    kill(scaling)
    record.write_text(json.dumps(json.loads(record.read_text()) | {"commands": {}}))
    again = cli("scale", cluster, "3")
    assert len(backend.queue()) == 3, again.stderr  # not a second time
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(20, cluster)


# -- in a job --------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.stub
def test_a_killed_command_ends_the_cluster_with_its_exit_code(
    cli: Cli, backend: SlurmBackend
) -> None:
    run = ["python", "-c", "import time; print('here', flush=True); time.sleep(601)"]
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1, "run": run})
    says(cli, cluster, "here")
    for pid in processes_with("time.sleep(601)"):
        if cluster in _environ(pid) and "supervise" not in _command(pid):
            os.kill(pid, signal.SIGKILL)
    backend.wait_empty(20, cluster)
    found = cli.status(cluster)
    assert (found["state"], found["exit_code"]) == ("FAILED", 137)
    assert "run: ended with exit code 137" in found["reason"]


@pytest.mark.slow
def test_a_killed_worker_process_is_started_again(cli: Cli, backend: SlurmBackend) -> None:
    """By its nanny: the cluster continues, as docs/elasticity.md says."""
    cluster = cli.submit({"gpus": 2})
    connected(cli, cluster, 2)
    code = (
        "import gpujobs, os, sys\n"
        "with gpujobs.connect(sys.argv[1]) as client:\n"
        "    print(*client.run(os.getpid).values())\n"
    )
    before = set(map(int, cli.python_run(code, cluster).stdout.split()))
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)

    def replaced() -> bool:
        now = set(map(int, cli.python_run(code, cluster).stdout.split()))
        return len(now) == 2 and len(now & before) == 1

    until(replaced, 60, "a new worker process")
    assert state(cli, cluster) == "RUNNING"
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(20, cluster)


def test_a_killed_nanny_leaves_no_worker(cli: Cli, backend: SlurmBackend) -> None:
    """Its worker process would go on computing on the GPU."""
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1})
    connected(cli, cluster, 2)
    other = next(job["number"] for job in cli.status(cluster)["jobs"] if not job["head"])
    found = [
        pid
        for pid in processes_with(f"--name\0{cluster}-{other}\0")
        if "dask_cuda" in _command(pid) and "supervise" not in _command(pid)
    ]
    (nanny,) = (pid for pid in found if psutil.Process(pid).ppid() not in found)  # has forked them
    os.kill(nanny, signal.SIGKILL)
    backend.wait_empty(20, cluster)
    assert f"worker {cluster}-{other} on" in cli.status(cluster)["reason"]
    assert not processes_with(f"GPUJOBS_JOB_NAME={cluster}\0")
