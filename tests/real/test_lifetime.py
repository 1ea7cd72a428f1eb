"""How long clusters live: their end without work."""

from __future__ import annotations

import math
import re
import time

import pytest

from ..support.backend import Backend, SlurmBackend
from ..support.cli import ROOT, Cli
from ..support.processes import patience, until
from .test_clusters import says, state
from .test_slurm import wrapped

WAITING_TASK = """
import sys, time
from pathlib import Path
import distributed, gpujobs  # before the cluster runs: its timeout is short
gpujobs.ClusterHandle(sys.argv[1]).wait_for_address()

cluster, folder, hold = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
client = gpujobs.connect(cluster)
task = client.submit(abs, -1, resources={"NONE": 1})
time.sleep(hold)
assert not (folder / "ended").exists()
task.release()
while not (folder / "ended").exists():
    time.sleep(0.5)
print("ended")
"""


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.filterwarnings("default")
def test_a_cluster_without_tasks_ends(cli: Cli, backend: Backend) -> None:
    """A task that waits for a worker keeps the cluster; a client that only looks on does not."""
    seconds = math.ceil(patience(6))
    cluster = cli.submit({"gpus": 1, "idle_timeout": f"{seconds}s", "client_timeout": "1h"})
    folder = cli.status(cluster)["folder"]
    done = cli.python_run(WAITING_TASK, cluster, folder, str(1.3 * seconds))
    assert done.stdout.strip().endswith("ended"), done.stderr
    found = cli.status(cluster)
    assert (found["kind"], found["state"], found["exit_code"]) == ("idle", "DONE", 0)
    assert found["reason"] == f"the cluster was without tasks for {seconds} s"
    warning = re.compile(r"the cluster ends in \d+ s, if it stays without tasks")
    assert warning.search(done.stderr), done.stderr  # of the client
    assert warning.search(cli("logs", cluster, "--all").stdout)
    assert found["ends_at"] is None
    backend.wait_empty(20, cluster)


STAYS = """
import sys, time
from pathlib import Path
import gpujobs
from distributed import fire_and_forget  # before the cluster runs: its timeout is short
gpujobs.ClusterHandle(sys.argv[1]).wait_for_address()

cluster, folder, hold, task = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
client = gpujobs.connect(cluster)
time.sleep(hold)
assert not (folder / "ended").exists()
fire_and_forget(client.submit(time.sleep, task))
client.close()
time.sleep(min(hold, task))
print("ended" if (folder / "ended").exists() else "lives")
while not (folder / "ended").exists():
    time.sleep(0.5)
"""
"""A client without tasks for ``hold`` seconds, then a task of ``task`` seconds without clients."""


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.filterwarnings("default")
def test_a_cluster_without_clients_ends(cli: Cli, backend: Backend) -> None:
    """A client without tasks keeps the cluster; a task without clients does not."""
    seconds = math.ceil(patience(10))
    cluster = cli.submit({"gpus": 1, "idle_timeout": "1h", "client_timeout": f"{seconds}s"})
    folder = cli.status(cluster)["folder"]
    done = cli.python_run(STAYS, cluster, folder, str(1.3 * seconds), "600")
    assert done.returncode == 0, done.stderr
    found = cli.status(cluster)
    assert (found["kind"], found["state"]) == ("idle", "DONE")
    assert found["reason"] == f"the cluster was without clients for {seconds} s"
    backend.wait_empty(20, cluster)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
@pytest.mark.filterwarnings("default")
def test_a_cluster_without_tasks_and_clients_ends(cli: Cli, backend: SlurmBackend) -> None:
    """The default, of seconds instead of minutes: a client keeps the cluster, and so does a task."""
    seconds = math.ceil(patience(10))
    rule = f"s/--end-after=unused=1800/--end-after=unused={seconds}/"
    site = wrapped(cli, backend, "sbatch", f'sed {rule} | REAL "$@"')
    done = cli("submit", str(cli.write("p.yaml", {"gpus": 1, "walltime": "1h"})), "--site", site)
    assert "the cluster ends after 30 minutes without tasks and clients; " in done.stderr
    cluster = done.stdout.strip()
    folder = cli.status(cluster)["folder"]
    hold = str(1.3 * seconds)
    done = cli.python_run(STAYS, cluster, folder, hold, hold)
    assert done.stdout == "lives\n", done.stderr
    found = cli.status(cluster)
    assert (found["kind"], found["state"]) == ("idle", "DONE")
    assert found["reason"] == f"the cluster was without tasks and clients for {seconds} s"
    backend.wait_empty(20, cluster)


TASK = """
import sys, time
import gpujobs

handle = gpujobs.ClusterHandle(sys.argv[1])
with gpujobs.connect(sys.argv[1]) as client:
    task = client.submit(time.sleep, 600)
    while handle.status().ends_at is not None:
        time.sleep(0.5)
    client.restart()  # which ends the task
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_status_has_the_time_at_which_a_cluster_would_end(cli: Cli, backend: Backend) -> None:
    path = str(cli.write("p.yaml", {"gpus": 1, "idle_timeout": "30m"}))
    done = cli("submit", path)
    assert "the cluster ends after 30 minutes without tasks\n" in done.stderr
    cluster = done.stdout.strip()
    until(lambda: cli.status(cluster)["ends_at"], 60, "the time of the end", every=0.5)
    assert time.time() < cli.status(cluster)["ends_at"] <= time.time() + 1800
    text = cli("status", cluster).stdout
    assert re.search(r"^  ends     at [\d:]{8}, if it stays without tasks$", text, re.M), text
    done = cli.python_run(TASK, cluster)
    assert done.returncode == 0, done.stderr
    until(lambda: cli.status(cluster)["ends_at"], 60, "the time of the end", every=0.5)
    assert cli("cancel", cluster).returncode == 0
    assert cli.status(cluster)["ends_at"] is None
    backend.wait_empty(20, cluster)


# -- attempts ------------------------------------------------------------------------------------------
ATTEMPT = """
import os, sys, time
print("attempt", os.environ["GPUJOBS_ATTEMPT"], flush=True)
if os.environ["GPUJOBS_ATTEMPT"] == "1":
    time.sleep(600)
"""


def attempt_runs(cli: Cli, cluster: str, attempt: int) -> None:
    """Wait until `run` of an attempt has begun."""
    says(cli, cluster, f"attempt {attempt}", 90)


@pytest.mark.filterwarnings("default")
@pytest.mark.stub
def test_a_preempted_head_starts_again(cli: Cli, backend: Backend) -> None:
    cli.write("attempt.py", ATTEMPT)
    profile = {"gpus": 2, "gpus_per_job": 1, "requeue": 2, "run": "python attempt.py"}
    cluster = cli.submit(profile)
    attempt_runs(cli, cluster, 1)
    jobs = cli.status(cluster)["jobs"]
    assert [job["attempt"] for job in jobs] == [1, 1, 2, 2, 3, 3]
    assert {job["state"] for job in jobs[2:]} == {"PENDING"}
    backend.kill_job(next(job["id"] for job in jobs if job["head"]))
    attempt_runs(cli, cluster, 2)
    backend.wait_empty(60, cluster)  # the third attempt was cancelled
    found = cli.status(cluster)
    assert (found["state"], found["attempt"], found["attempts"]) == ("DONE", 2, 3)
    assert "attempt  2 of 3" in cli("status", cluster).stdout


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.stub
def test_a_cancel_ends_all_attempts(cli: Cli, backend: Backend) -> None:
    cli.write("attempt.py", ATTEMPT)
    cluster = cli.submit({"gpus": 1, "requeue": 2, "run": "python attempt.py"})
    attempt_runs(cli, cluster, 1)
    refused = cli("scale", cluster, "2")
    assert refused.returncode == 2 and "the jobs of all its attempts" in refused.stderr
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(60, cluster)
    found = cli.status(cluster)
    assert (found["state"], found["attempt"]) == ("CANCELLED", 1)
    assert "attempt 2" not in cli("logs", cluster).stdout


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["slurm", "sge"], indirect=True)
@pytest.mark.filterwarnings("default")
def test_a_computation_continues_over_several_walltimes(cli: Cli, backend: Backend) -> None:
    """About four minutes of steps in jobs of two minutes, of which `run` has 5 s for its last step."""
    for name in ("profile.yaml", "checkpoints.py"):
        cli.write(name, (ROOT / "examples" / "checkpoints" / name).read_text())
    words = ["--set", "walltime=2m", "--wait"]
    own = "--file, c.json, --steps, '240', --tasks, '2', --pause, '0.9'"
    run = f"run=[python, checkpoints.py, {own}]"
    done = cli("submit", "profile.yaml", "--site", "here", *words, "--set", run, timeout=1200)
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    found = cli.status(cluster)
    everything = cli("logs", cluster, "--all").stdout
    assert found["state"] == "DONE" and 3 <= found["attempt"] <= found["attempts"] == 6
    lines = cli("logs", cluster).stdout.splitlines()
    steps = [0]
    for attempt in range(1, found["attempt"] + 1):
        assert f"attempt {attempt} begins with step {steps[-1]}" in lines, everything
        stops = [line for line in lines if line.startswith(f"attempt {attempt} stops after step")]
        # An attempt that does its last step while the signal comes is followed by another one.
        steps.append(int(stops[0].rsplit(" ", 1)[1]) if stops else 240)
    assert steps[-1] == 240 and steps[1] < steps[2] and steps == sorted(steps), everything
    assert lines[-1] == "pi is about 3.14160"
    assert "KilledWorker" not in everything
    backend.wait_empty(30, cluster)


# -- after another cluster -----------------------------------------------------------------------------
@pytest.mark.filterwarnings("default")
@pytest.mark.stub
def test_a_cluster_after_another_one_waits_for_its_end(cli: Cli, backend: Backend) -> None:
    first = cli.submit(
        {"gpus": 1, "run": ["bash", "-c", "until [ -e go ]; do sleep 0.2; done; exit 3"]}
    )
    good, bad = (
        cli.submit({"gpus": 1, "run": "echo here"}, "--after", f"{first}{how}")
        for how in (":any", "")
    )
    until(lambda: state(cli, first) == "RUNNING", 60, first, every=0.5)
    found = cli.status(good)
    assert (found["state"], found["reason"]) == ("PENDING", f"waits for {first}")
    assert found["after"] == first
    cli.write("go", "")
    backend.wait_empty(90)
    assert (state(cli, good), state(cli, bad)) == ("DONE", "FAILED")
    assert f"{first}, which must succeed before, has failed" in cli.status(bad)["reason"]
    refused = cli("submit", str(cli.write("p.yaml", {"gpus": 1})), "--after", first)
    assert refused.returncode == 2 and f"{first} is FAILED" in refused.stderr
