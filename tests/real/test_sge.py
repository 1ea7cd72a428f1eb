"""What only Grid Engine has: limits that kill, jobs in error, accounting that does not know a job, no word of GPUs."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest

import gpujobs

from ..conftest import nothing_left
from ..support.cli import Cli
from ..support.processes import processes_with, until
from ..support.sge import SgeBackend
from .programs import SLEEP
from .test_clusters import connected, says, state
from .test_missing_jobs import ended, started

pytestmark = pytest.mark.sge


@pytest.fixture(params=["sge"])
def backend(sge_backend: SgeBackend) -> Iterator[SgeBackend]:
    yield sge_backend
    nothing_left(sge_backend)


def held(cli: Cli, **profile: object) -> tuple[str, str]:
    """Submit a cluster of one job with a hold on it; return the cluster's id and the job's."""
    cluster = cli.submit({"gpus": 1, "directives": ["-h"], **profile})
    return cluster, cli.status(cluster)["jobs"][0]["id"]


@pytest.mark.conformance("sge")
def test_what_could_never_run_is_refused(cli: Cli, backend: SgeBackend) -> None:
    site = cli.site
    site["queues"]["main"] |= {"gpus_per_node": 8}  # the nodes have four
    path, profile = str(cli.write("wrong.yaml", site)), str(cli.write("p.yaml", {"gpus": 8}))
    done = cli("submit", profile, "--site", path)
    assert done.returncode == 1
    assert "no suitable queues" in done.stderr
    estimate = cli("plan", profile, "--site", path, "--estimate")
    assert estimate.returncode == 1 and "verification: no suitable queues" in estimate.stderr
    assert "there are queues that can run it" in cli("plan", profile, "--estimate").stdout
    assert backend.queue() == []


@pytest.mark.conformance("sge")
@pytest.mark.parametrize("slots", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 12))])
def test_gpus_of_each_slot_fit_a_node(cli: Cli, backend: SgeBackend, slots: int) -> None:
    site = cli.site
    site["queues"]["main"] |= {"cpus_per_node": slots, "gpu_fractions": True}
    site["request"] = ["-pe smp {cpus_per_job}", "-l slot_gpu={gpus_per_cpu}"]
    path, profile = str(cli.write("slots.yaml", site)), str(cli.write("p.yaml", {"gpus": 4}))
    estimate = cli("plan", profile, "--site", path, "--estimate")
    assert "there are queues that can run it" in estimate.stdout, estimate


@pytest.mark.conformance("sge")
@pytest.mark.stub
def test_a_job_in_error_is_told_and_removed(cli: Cli, backend: SgeBackend) -> None:
    cluster, job = held(cli)
    assert "held" in cli.status(cluster)["jobs"][0]["reason"]
    (
        cli.home / ".gpujobs" / cluster / "logs"
    ).rmdir()  # Grid Engine opens its own log there before anything runs
    backend.sge.command("qrls", job)
    until(lambda: state(cli, cluster) == "FAILED", 30)
    assert "can't open output file" in cli.status(cluster)["reason"]
    assert cli.status(cluster)["jobs"][0]["native"] == "Eqw"
    assert [line for line in backend.queue() if cluster in line]  # where it would stay for ever
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(15, cluster)
    assert state(cli, cluster) == "CANCELLED"


@pytest.mark.slow
@pytest.mark.stub
def test_a_job_in_error_that_run_waits_for_ends_the_cluster(cli: Cli, backend: SgeBackend) -> None:
    groups = {"first": {"gpus": 1}, "second": {"gpus": 1, "directives": ["-h"]}}
    cluster = cli.submit({"groups": groups, "start_workers": 2, "run": ["true"]})
    started(cli, cluster)
    job = cli.status(cluster)["jobs"][1]["id"]
    backend.sge.command("qalter", "-o", "/nosuch/output", job)
    backend.sge.command("qrls", job)
    reason = ended(cli, cluster)["reason"]
    assert reason.startswith("run: cannot start: job 1 did not start: ")
    assert "can't open output file" in reason
    backend.wait_empty(30)


def test_a_python_cluster_replaces_a_job_in_error(
    cli: Cli, backend: SgeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**backend.env(), "HOME": str(cli.home)}.items():
        monkeypatch.setenv(name, value)
    site = str(cli.write("sge.yaml", cli.site))
    options = {"dashboard_address": ":0", **backend.scheduler_options}
    with gpujobs.GPUSGECluster(
        site, directives=["-h"], quiet=True, scheduler_options=options
    ) as cluster:
        cluster.scale(1)
        job = cluster.jobs[0]["id"]
        (cluster.folder / "logs").rmdir()
        backend.sge.command("qrls", job)

        def replaced() -> bool:
            jobs = [line.split()[0] for line in backend.queue() if cluster.id in line]
            return len(jobs) == 1 and jobs[0] != job

        until(replaced, 60)
        (past,) = [found for found in cluster.jobs if found["id"] == job]
        assert past["phase"] == "FAILED" and "can't open output file" in past["reason"]
    backend.wait_empty(30)


@pytest.mark.stub
def test_waiting_jobs_go_when_the_command_is_done(cli: Cli, backend: SgeBackend) -> None:
    everything = backend.nodes * backend.gpus_per_node
    profile = {
        "gpus": everything + 2,
        "gpus_per_job": 2,
        "run": ["python", "-c", "print('done')"],
        "directives": ["-tc 2"],
    }
    cluster = cli.submit(profile, "--wait")
    assert cli("logs", cluster).stdout == "done\n"
    backend.wait_empty(15, cluster)
    assert state(cli, cluster) == "DONE"
    assert (
        len(list((cli.home / ".gpujobs" / cluster / "jobs").glob("*.claim"))) < 5
    )  # the others never started


@pytest.mark.slow
@pytest.mark.stub
def test_a_job_deleted_while_it_waited_is_cancelled(cli: Cli, backend: SgeBackend) -> None:
    cluster, job = held(cli)
    backend.kill_job(job)
    backend.wait_empty(10)
    assert state(cli, cluster) == "PENDING"  # it might still turn up in accounting
    assert cli.status(cluster)["jobs"][0]["state"] == "UNKNOWN"
    until(lambda: state(cli, cluster) == "CANCELLED", 90, every=2)
    assert "before it started" in cli.status(cluster)["reason"]
    assert cluster not in cli("status").stdout


@pytest.mark.slow
@pytest.mark.stub
def test_the_signal_before_the_end_reaches_the_command(cli: Cli, backend: SgeBackend) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: (print('saved', flush=True), sys.exit(3))); print('here', flush=True); time.sleep(600)"
    cluster = cli.submit(
        {"gpus": 2, "gpus_per_job": 1, "start_workers": 2, "run": ["python", "-c", code]}
    )
    says(cli, cluster, "here")
    jobs = cli.status(cluster)["jobs"]
    backend.sge.command(
        "qdel", jobs[0]["id"].split(".")[0]
    )  # SIGUSR2, and SIGKILL after the queue's `notify`
    backend.wait_empty(15, cluster)
    assert cli("logs", cluster).stdout == "here\nsaved\n"
    assert {job["state"] for job in cli.status(cluster)["jobs"]} <= {"CANCELLED", "COMPLETED"}
    until(lambda: not processes_with(cluster), 10)


@pytest.mark.slow
@pytest.mark.stub
def test_a_job_leaves_before_a_short_walltime(cli: Cli, backend: SgeBackend) -> None:
    cli.write("sleep.py", SLEEP)
    profile = {
        "gpus": 2,
        "gpus_per_job": 1,
        "walltime": "40s",
        "run": ["python", "sleep.py", "600"],
    }
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 5
    assert "walltime" in done.stderr
    backend.wait_empty(15)
    number = cli.status(done.stdout.strip())["jobs"][0]["id"].split(".")[0]

    def failures() -> set[str]:
        return set(re.findall(r"^failed +(\d+)", backend.sge.command("qacct", "-j", number), re.M))

    until(failures, 30, "the job's record in the accounting")
    assert failures() == {"0"}  # Grid Engine did not have to kill a process


@pytest.mark.slow
@pytest.mark.stub
def test_an_enforced_walltime_is_a_timeout(cli: Cli, backend: SgeBackend) -> None:
    profile = {
        "gpus": 1,
        "walltime": "15s",
        "environment": {"setup": "trap '' USR2; sleep 100 & wait; wait"},
    }
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait", timeout=240)
    assert done.returncode == 5
    backend.wait_empty(15)
    cluster = done.stdout.strip()
    assert cli.status(cluster)["jobs"][0]["state"] == "TIMEOUT"
    assert "h_rt" in cli("status", cluster).stdout


@pytest.mark.slow
@pytest.mark.stub
def test_a_cluster_survives_an_outage_of_qmaster(cli: Cli, backend: SgeBackend) -> None:
    def restart_after(seconds: float) -> threading.Thread:
        def later() -> None:
            time.sleep(seconds)
            backend.sge.start_qmaster()

        thread = threading.Thread(target=later)
        backend.sge.stop_qmaster()
        thread.start()
        return thread

    back = restart_after(6)
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1})  # waits
    back.join()
    connected(cli, cluster, 2)
    assert len(backend.queue()) == 2
    back = restart_after(25)
    done = cli("status", cluster)
    assert done.returncode == 0
    assert "not available" in done.stderr
    found = cli.status(cluster)
    assert found["state"] == "RUNNING"
    assert {job["state"] for job in found["jobs"]} <= {"UNKNOWN", "RUNNING"}
    back.join()
    until(lambda: {job["state"] for job in cli.status(cluster)["jobs"]} == {"RUNNING"}, 60)
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(
        150
    )  # the nodes' daemons find the new qmaster after a while, and tell it then


@pytest.mark.slow
@pytest.mark.stub
def test_a_folder_with_a_space_has_its_logs(cli: Cli, backend: SgeBackend) -> None:
    folder = cli.home / "a b:c"
    site = cli.site | {"directory": str(folder)}
    path = str(cli.write("spaces.yaml", site))
    profile = str(cli.write("p.yaml", {"gpus": 1, "run": ["python", "-c", "print('ran')"]}))
    done = cli("submit", profile, "--site", path, "--wait")
    assert done.returncode == 0, done.stderr
    assert cli("logs", done.stdout.strip()).stdout == "ran\n"
    assert list((folder / done.stdout.strip() / "logs").glob("sge-*.log"))
    backend.wait_empty(15)
