"""A job of a cluster that never starts, or vanishes: its cluster notices by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import fresh_folder, make_cli, unavailable
from ..support import mpi
from ..support import slurm as slurm_support
from ..support.backend import Backend, SlurmBackend
from ..support.cli import Cli, ask_often, text_of
from ..support.processes import patience, until
from ..support.slurm import PrivateSlurm
from ..support.slurm_faults import failed_node, failing_prolog, node_without_launch

PROFILE: dict[str, Any] = {
    "gpus": 2,
    "gpus_per_job": 1,
    "cpus_per_job": 16,
    "start_workers": 2,
    "run": ["true"],
}
"""Two jobs, each with a node of its own."""


@pytest.fixture
def cli(cli: Cli) -> Cli:
    """Its jobs ask about each other often."""
    return ask_often(cli)


on_slurm = pytest.mark.parametrize("backend", ["slurm"], indirect=True)


def ended(cli: Cli, cluster: str) -> dict[str, Any]:
    """Wait without `gpujobs` until the cluster has ended; return its status."""
    until((cli.home / ".gpujobs" / cluster / "ended").exists, 150, f"the end of {cluster}", every=1)
    status = cli.status(cluster)
    assert (status["state"], status["exit_code"]) == ("FAILED", 70)
    return status


def started(cli: Cli, cluster: str) -> Path:
    """Wait until the cluster has a head with a worker; return its folder."""
    folder = cli.home / ".gpujobs" / cluster

    def connected() -> bool:
        assert not (folder / "ended").exists(), (folder / "ended").read_text()
        return '"connected"' in _text(folder / "workers-1.jsonl")

    until(connected, 90, f"a worker of {cluster}", every=0.5)
    return folder


def verdict(folder: Path) -> dict[str, Any]:
    """Return what the head was last told about the jobs."""
    return dict(json.loads(_text(folder / "verdict.json") or '{"time": 0}'))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.conformance
@pytest.mark.stub
def test_a_job_that_never_starts_ends_the_cluster(cli: Cli, backend: Backend) -> None:
    """It is deleted from the queue while `run` waits for it."""
    groups = {"first": {"gpus": 1}, "second": {"gpus": 1, "directives": [backend.hold]}}
    cluster = cli.submit({"groups": groups, "start_workers": 2, "run": ["true"]})
    started(cli, cluster)
    job = cli.status(cluster)["jobs"][1]
    assert job["phase"] == "PENDING"
    backend.kill_job(job["id"])
    reason = ended(cli, cluster)["reason"]
    assert reason.startswith("run: cannot start: job 1 did not start: ")
    backend.wait_empty(30)


@pytest.mark.slow
@on_slurm
@pytest.mark.stub
def test_a_node_that_cannot_launch_is_named(cli: Cli, backend: SlurmBackend) -> None:
    reason = "job 1 did not start: node2: launch failed: its script did not run"
    with node_without_launch(backend.slurm, "node2"):
        cluster = cli.submit(PROFILE)
        assert ended(cli, cluster)["reason"] == f"run: cannot start: {reason}"
        backend.wait_empty(15)
    report = cli("report", cluster).stdout
    assert reason in report and "launch failed: its script did not run" in report.split("JOB ")[1]
    rows = [line.split() for line in report.splitlines()]
    pending = rows[next(n for n, row in enumerate(rows) if row[:1] == ["JOB"])].index("PENDING")
    assert next(row for row in rows if row[:1] == ["1"])[2:][pending - 2] == "-"


@pytest.fixture(params=[(False, 2), (True, 2), (True, 300)], ids=str)
def other_slurm(shared_folder: Path, request: pytest.FixtureRequest) -> Iterator[SlurmBackend]:
    """With or without accounting, and one that forgets jobs soon; a file lets its prolog fail."""
    if why := slurm_support.missing():
        unavailable("slurm", why)
    accounting, age = request.param
    folder = fresh_folder(shared_folder, "slurm")
    prolog = folder / "prolog"
    prolog.write_text(f"#!/bin/bash\n[ ! -e {folder}/fails ] || [ $SLURMD_NODENAME = node1 ]\n")
    prolog.chmod(0o755)
    extra = f"MinJobAge={age}\nPrologFlags=Alloc\nProlog={prolog}"
    slurm = PrivateSlurm(folder / "slurm", nodes=2, accounting=accounting, extra=extra)
    with slurm.running():
        yield SlurmBackend(slurm)


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jobs_that_slurm_forgets_end_the_cluster(other_slurm: SlurmBackend, home: Path) -> None:
    """A node that cannot launch, a prolog that fails, a pending job that is deleted."""
    slurm = other_slurm.slurm
    cli = ask_often(make_cli(other_slurm, home, "ordinary", stub=True))
    # Without accounting, Slurm may have forgotten the job before the first query.
    detail = "node2: launch failed: its script did not run" if slurm.accounting else ""
    with node_without_launch(slurm, "node2"):
        reason = ended(cli, cli.submit(PROFILE))["reason"]
    assert f"job 1 did not start: {detail}" in reason
    (slurm.folder.parent / "fails").touch()
    reason = ended(cli, cli.submit(PROFILE))["reason"]
    assert "job 1 did not start: " in reason and "launch failed requeued held" in reason
    other_slurm.wait_empty(30)
    slurm.command("scontrol", "update", "nodename=node2", "state=resume")
    cluster = cli.submit({**PROFILE, "gpus": 3, "start_workers": 3})
    started(cli, cluster)
    until(lambda: any("PENDING" in line for line in slurm.queue()), 30)
    slurm.command("scancel", "--state=PENDING", f"--name={cluster}")
    assert "job 2 did not start: " in ended(cli, cluster)["reason"]
    assert "Resources" not in cli.status(cluster)["reason"]
    other_slurm.wait_empty(30)


@on_slurm
@pytest.mark.slow
@pytest.mark.stub
def test_a_cluster_with_workers_enough_goes_on(cli: Cli, backend: SlurmBackend) -> None:
    """Its log, `status` and `--wait` say which job is missing."""
    reason = "job 1 did not start: node2: launch failed: its script did not run"
    run = [
        "bash",
        "-c",
        "until grep -q 'did not start' $GPUJOBS_FOLDER/logs/run.log; do sleep 1; done",
    ]
    with node_without_launch(backend.slurm, "node2"):
        profile = cli.write("p.yaml", {**PROFILE, "start_workers": 1, "run": run})
        waiting = cli("submit", str(profile), "--wait")
    assert waiting.returncode == 0, waiting.stderr
    assert f"note: {reason}\n" in waiting.stderr
    assert f"gpujobs: {reason}\n" in cli("logs", "-f", waiting.stdout.strip()).stdout


def two_nodes(backend: Backend, *directives: str) -> dict[str, Any]:
    """Return a profile of two jobs, each with a node of its own, and a third one that is held."""
    held = {"gpus": 1, "directives": [backend.hold]}
    first = {"gpus": 2, "gpus_per_job": 1, "cpus_per_job": 16, "directives": [*directives]}
    return {"groups": {"first": first, "second": held}, "start_workers": 3, "run": ["true"]}


def job_without_head(cli: Cli, cluster: str) -> dict[str, Any]:
    """Wait for the workers of both jobs of `two_nodes`; return the job that is not the head."""
    started(cli, cluster)
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 2, 60)
    return next(dict(job) for job in cli.status(cluster)["jobs"][:2] if not job["head"])


@on_slurm
@pytest.mark.slow
@pytest.mark.parametrize("noticed", [True, False], ids=["down", "silent"])
@pytest.mark.stub
def test_a_node_that_fails_while_run_waits_ends_the_cluster(
    cli: Cli, backend: SlurmBackend, noticed: bool
) -> None:
    """Slurm's NODE_FAIL of a job whose workers were connected; a silent node is down after a while."""
    with backend.slurm.setting("SlurmdTimeout", 10):
        cluster = cli.submit(two_nodes(backend, "--no-requeue"))
        other = job_without_head(cli, cluster)
        with failed_node(backend.slurm, other["node"], noticed=noticed):
            reason = ended(cli, cluster)["reason"]
            lost = f"job {other['number']} ended: {other['node']}: "
            assert reason.startswith(f"run: cannot start: {lost}")
            backend.wait_empty(30)


@on_slurm
@pytest.mark.slow
@pytest.mark.stub
def test_a_job_that_is_requeued_after_its_node_failed_is_waited_for(
    cli: Cli, backend: SlurmBackend
) -> None:
    """It may still come: `run` waits for it, on another node."""
    cluster = cli.submit(two_nodes(backend))
    other = job_without_head(cli, cluster)
    with failed_node(backend.slurm, other["node"]):
        until(lambda: f"{other['id']} PENDING {cluster}" in backend.slurm.queue(), 30)
        requeued = time.time()
        folder = cli.home / ".gpujobs" / cluster
        until(lambda: verdict(folder)["time"] > requeued, 60, "a verdict of the head", every=0.5)
        assert verdict(folder)["gone"] == {}
        backend.slurm.command("scontrol", "update", f"JobId={other['id']}", "StartTime=now")
        backend.slurm.command("scontrol", "release", cli.status(cluster)["jobs"][2]["id"])
        until(lambda: cli.status(cluster)["state"] == "DONE", 90, "the end of `run`", every=1)
        assert cli.status(cluster)["jobs"][other["number"]]["node"] != other["node"]
    backend.wait_empty(30)


@on_slurm
@pytest.mark.stub
def test_a_job_that_its_user_holds_is_waited_for(cli: Cli, backend: SlurmBackend) -> None:
    """It may still come: `run` waits for it, and `--wait` and `status` say why."""
    groups = {"first": {"gpus": 1}, "second": {"gpus": 1, "directives": [backend.hold]}}
    profile = {"groups": groups, "start_workers": 2, "run": ["true"]}
    waiting, cluster = cli.start_submit(profile)
    folder = started(cli, cluster)
    connected = time.time()
    until(lambda: verdict(folder)["time"] > connected, 90, "a verdict with a head", every=0.5)
    assert (verdict(folder)["gone"], verdict(folder)["head"]) == ({}, True)
    status = cli.status(cluster)
    words = "JobHeldUser: held by its user, until `scontrol release`"
    assert f"1 second waiting ({words})" in status["reason"]
    backend.slurm.command("scontrol", "release", status["jobs"][1]["id"])
    _, errors = waiting.communicate(timeout=patience(120))
    assert waiting.returncode == 0 and words in errors, errors


@on_slurm
@pytest.mark.slow
@pytest.mark.stub
def test_a_group_with_too_few_jobs_ends_the_cluster(cli: Cli, backend: SlurmBackend) -> None:
    """The cluster goes on as long as each group can have its `start_workers`."""
    second = {"gpus": 2, "gpus_per_job": 1, "start_workers": 1, "directives": [backend.hold]}
    profile = {"groups": {"first": {"gpus": 2}, "second": second}, "run": ["true"]}
    waiting, cluster = cli.start_submit(profile)
    folder = started(cli, cluster)
    jobs = cli.status(cluster)["jobs"]
    backend.kill_job(jobs[1]["id"])
    until(lambda: "job 1 did not start: " in _text(folder / "logs" / "run.log"), 90)
    assert not (folder / "ended").exists()
    backend.kill_job(jobs[2]["id"])
    _, errors = waiting.communicate(timeout=patience(120))
    assert waiting.returncode == 5 and "run: cannot start: job 1 did not start: " in errors, errors
    assert "job 2 did not start: " in ended(cli, cluster)["reason"]


@on_slurm
@pytest.mark.slow
def test_an_allocation_of_mpi_that_does_not_come_ends_the_cluster(
    cli: Cli, backend: SlurmBackend
) -> None:
    """With `layout: mpi` the only job is held after a failed launch, or loses a node."""
    if why := mpi.missing():
        unavailable("mpi", why)
    site = backend.site() | {"mpi": mpi.LAUNCHERS["mpirun"]}
    (cli.home / "sites" / "here.yaml").write_text(text_of(site))
    profile = {"layout": "mpi", "gpus": 8, "run": ["sleep", "600"]}
    with failing_prolog(backend.slurm):
        done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 5
    assert "FAILED (launch failed requeued held: a node could not start it)" in done.stderr
    assert backend.queue() == []
    cluster = cli.submit({**profile, "directives": ["--no-requeue"]})
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 8, 90)
    owner = cli.home / ".gpujobs" / cluster / "head-1" / "owner"
    with failed_node(backend.slurm, json.loads(owner.read_text())["node"]):
        until(lambda: cli.status(cluster)["state"] == "FAILED", 60)
        reason = cli.status(cluster)["reason"]
        assert reason.startswith("all its jobs have ended: NODE_FAIL")
        backend.wait_empty(60)
