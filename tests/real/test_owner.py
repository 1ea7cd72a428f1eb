"""The life of an owner of a cluster, and of its jobs, on the real Slurm: ends, stops, requeues, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client

import gpujobs
from gpujobs.errors import InputError, JobFailedError, RefusedError

from ..conftest import slow_variant
from ..support.backend import SlurmBackend
from ..support.cli import Cli
from ..support.events import dask_workers
from ..support.jobevents import facts_of, supervisor_of
from ..support.owner import backend, calls, client_process, make, site  # noqa: F401
from ..support.processes import NO_TIMEOUT, patience, pause, until
from ..support.screen import Screen

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]

HELD = "JobHeldUser: held by its user, until `scontrol release`"
SHORT = 2
"""Seconds of a wait that must end without workers."""
QUIET = 8
"""Seconds in which a cluster that submits without end would have submitted again."""


def active(cluster: Any) -> list[dict[str, Any]]:
    return [job for job in cluster.jobs if job["phase"] not in ("FAILED", "ENDED", "LEAVING")]


def phases(cluster: Any) -> list[str]:
    return [job["phase"] for job in cluster.jobs]


def wait_for_end(cluster: Any, pattern: str, seconds: float = 90) -> float:
    """Wait until waiting for workers raises why the cluster has ended; return how long that took."""
    started = time.monotonic()
    until(lambda: cluster._pool.errors, seconds, "the end of the cluster")
    with pytest.raises(JobFailedError, match=pattern):
        cluster.wait_for_workers(1)
    return time.monotonic() - started


def wrap(home: Path, name: str, script: str, backend: SlurmBackend) -> None:
    """Replace the command ``name`` of the site by ``script``, in which REAL is the real one."""
    real = backend.slurm.command("which", name).strip()
    text = script.replace("REAL", real).replace("CALLS", str(home / "calls"))
    (home / name).write_text(text)


# -- the end of a cluster --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "how", ["killed", *map(slow_variant, ("shutdown", "cancelled", "idle", "node"))]
)  # fmt: skip
def test_nothing_is_submitted_into_a_cluster_that_has_ended(
    make: Callable[..., Any], home: Path, backend: SlurmBackend, how: str, capfd: Any, caplog: Any,
    request: Any,
) -> None:  # fmt: skip
    keywords = {"directives": ["--no-requeue"]} if how == "node" else {}
    idle = f"{patience(6):.0f} s"  # from when it listens: this process must connect before
    timeout = {"env": {"DASK_DISTRIBUTED__SCHEDULER__IDLE_TIMEOUT": idle}} if how == "idle" else {}
    cluster = make(scheduler="job", scheduler_options=None, quiet=False, **keywords, **timeout)
    cluster.scale(2)
    if how != "idle":
        cluster.wait_for_workers(2, timeout=patience(90))
    head = next(job["id"] for job in cluster.jobs if job["head"]).replace("[", "_").rstrip("]")
    if how == "cancelled":
        backend.kill_job(head)
    elif how == "killed":  # with no time to write why
        supervisor = supervisor_of(cluster.folder, 0)
        for pid in (psutil.Process(supervisor).ppid(), supervisor):
            os.kill(pid, signal.SIGKILL)
    elif how == "node":
        node = f"NodeName={cluster.jobs[0]['node']}"
        backend.slurm.command("scontrol", "update", node, "State=DOWN", "Reason=test")
        request.addfinalizer(
            lambda: backend.slurm.command("scontrol", "update", node, "State=RESUME")
        )
    elif how == "shutdown":
        own = cluster.get_client()
        with Client(cluster.scheduler_address, security=cluster.security) as client:
            client.shutdown()
    reason = {
        "cancelled": "received SIGTERM",
        "killed": "ended|killed",
        "node": "",
        "shutdown": "a client shut the dask scheduler down",
        "idle": f"was idle for {idle}",
    }
    seconds = wait_for_end(cluster, f"{cluster.id} has ended: .*({reason[how]})")
    print(f"end of the cluster, {how}: known after {seconds:.1f} s")
    if how == "shutdown":
        reports_its_end(cluster, own, reason[how], caplog)
    before = calls(home, "sbatch")
    time.sleep(QUIET)
    assert calls(home, "sbatch") == before
    with pytest.raises(JobFailedError, match="has ended"):
        cluster.scale(3)
    ended = json.loads((cluster.folder / "ended").read_text())
    kinds = {"killed": "failed", "node": ended["kind"]}
    assert ended["kind"] == kinds.get(how, how)
    backend.wait_empty(30)
    out, err = capfd.readouterr()
    counts = [text.count("has ended") for text in (out, err, caplog.text)]
    assert max(counts) == 1, counts  # reported once, on stderr or to a handler or to both


@pytest.mark.parametrize("how", [slow_variant("shutdown"), "idle"])
def test_a_dask_scheduler_in_this_process_that_ends_says_why(
    make: Callable[..., Any], home: Path, backend: SlurmBackend, how: str, caplog: Any
) -> None:
    options = {"dashboard_address": ":0"} | ({"idle_timeout": "1h"} if how == "idle" else {})
    cluster = make(scale=1, scheduler_options=options)
    own = cluster.get_client()
    assert cluster.get_client() is own
    cluster.wait_for_workers(1, timeout=patience(60))
    if how == "shutdown":
        with Client(cluster.scheduler_address, security=cluster.security) as client:
            client.shutdown()
    else:  # with three seconds from the start on, it might end before the job is submitted
        cluster.scheduler.idle_timeout = 3
    wait_for_end(cluster, "a client shut the dask" if how == "shutdown" else "was idle for 3 s")
    reports_its_end(cluster, own, "shut the dask scheduler down|was idle", caplog)
    assert json.loads((cluster.folder / "ended").read_text())["kind"] == how
    backend.wait_empty(30)
    started = time.monotonic()
    cluster.close()
    assert time.monotonic() - started < NO_TIMEOUT
    assert calls(home, "sbatch") == 1


def reports_its_end(cluster: Any, client: Any, reason: str, caplog: Any) -> None:
    """A cluster that has ended says so in every way; its client does not try to connect again."""
    until(lambda: client.status == "closed", 20, "the client of get_client() closes")
    assert cluster.status.name == "failed"
    for call in (lambda: cluster.scale(2), lambda: cluster.wait_for_workers(1)):
        with pytest.raises(JobFailedError, match=f"has ended: .*({reason})"):
            call()
    assert "reconnect" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local", "job"])
def test_the_limit_of_the_site_ends_a_cluster_without_tasks(
    make: Callable[..., Any], site: Callable[..., str], backend: SlurmBackend, mode: str
) -> None:
    """A notebook that was left open: its client does not keep the GPUs, a task does."""
    seconds = math.ceil(patience(6))
    options = {"local": {"dashboard_address": ":0"}, "job": None}[mode]
    limit = {"max_idle_timeout": f"{seconds}s"}
    cluster = make(changes=limit, scheduler=mode, scheduler_options=options)
    if mode == "local":
        time.sleep(1.5 * seconds)
        assert not (cluster.folder / "ended").exists()  # it has no workers
    cluster.scale(1)
    cluster.wait_for_workers(1, timeout=patience(90))
    with cluster.get_client() as client:
        client.submit(time.sleep, 1.5 * seconds).result()
        reason = f"the cluster was without tasks for {seconds} s"
        wait_for_end(cluster, f"{cluster.id} has ended: {reason}")
    ended = json.loads((cluster.folder / "ended").read_text())
    assert (ended["kind"], ended["reason"]) == ("idle", reason)
    backend.wait_empty(30)


# -- bounded submission ----------------------------------------------------------------------------
@pytest.mark.slow
def test_jobs_that_exit_before_their_workers_connect_are_given_up_after_three(
    make: Callable[..., Any], home: Path
) -> None:
    # The first job works, and all others end at once, as if nothing were wrong.
    environment = {"setup": '[ "$GPUJOBS_JOB" = 0 ] || exit 0', "python": sys.executable}
    cluster = make(scale=2, environment=environment)
    until(lambda: cluster._pool.errors, 90)
    submitted = calls(home, "sbatch")
    assert submitted == 3  # three attempts for the missing job
    with pytest.raises(JobFailedError, match="3 jobs in a row ended before their workers"):
        cluster.wait_for_workers(2)
    time.sleep(QUIET)
    assert calls(home, "sbatch") == submitted
    assert [job["number"] for job in active(cluster)] == [0]


@pytest.mark.slow
def test_workers_that_connect_and_die_are_given_up_after_three(
    make: Callable[..., Any], home: Path
) -> None:
    cluster = make(scale=1)
    for number in range(3):
        until(lambda n=number: f"{cluster.id}-{n}" in cluster.observed, 90)  # type: ignore[misc]
        # After SIGTERM workers leave, and their successor is submitted before their job has ended.
        os.kill(supervisor_of(cluster.folder, number), signal.SIGKILL)
    until(lambda: cluster._pool.errors, 60)
    with pytest.raises(JobFailedError, match="3 jobs in a row ended soon after their workers"):
        cluster.wait_for_workers(1)
    assert calls(home, "sbatch") == 3
    cluster.scale(1)  # the user decides that it goes on
    cluster.wait_for_workers(1, timeout=patience(60))


REFUSES = """#!/bin/sh
echo "sbatch $*" >> CALLS
if [ -e CALLS.refuse ]; then
    echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" >&2
    exit 1
fi
exec REAL "$@"
"""


@pytest.mark.slow
def test_a_refused_replacement_is_tried_again_a_few_times(
    make: Callable[..., Any], home: Path, backend: SlurmBackend
) -> None:
    cluster = make()
    wrap(home, "sbatch", REFUSES, backend)
    cluster.scale(1)
    cluster.wait_for_workers(1, timeout=patience(60))
    (home / "calls.refuse").touch()
    backend.kill_job(cluster.jobs[0]["id"])
    until(lambda: cluster._pool.errors, 90)
    with pytest.raises(RefusedError, match="violates accounting"):
        cluster.wait_for_workers(1)
    before = calls(home, "sbatch")
    assert before <= 4
    time.sleep(QUIET)
    assert calls(home, "sbatch") == before
    (home / "calls.refuse").unlink()
    cluster.scale(1)
    cluster.wait_for_workers(1, timeout=patience(60))


HIDES = """#!/bin/sh
echo "squeue $*" >> CALLS
REAL "$@" | grep -v '^[0-9]*|0|'
exit 0
"""


@pytest.mark.slow
def test_a_job_with_connected_workers_is_never_given_up(
    make: Callable[..., Any], home: Path, backend: SlurmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch scheduler that lists only some of the jobs that it is asked for.
    cluster = make()
    wrap(home, "squeue", HIDES, backend)
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(60))
    monkeypatch.setattr("gpujobs.clusters.judge.UNLISTED_TIMEOUT", 2.0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        assert [job["phase"] for job in cluster.jobs] == ["RUNNING"] * 2
        time.sleep(1)
    assert calls(home, "sbatch") == 1 and calls(home, "scancel") == 0


# -- limits ----------------------------------------------------------------------------------------
def with_limits(backend: SlurmBackend, limit: int) -> dict[str, Any]:
    """Return queues with limits of one user: of jobs in `main`, of GPUs in `short`."""
    queues = backend.site()["queues"]
    short = {**queues["short"], "max_gpus_per_user": limit}
    return {"queues": {**queues, "main": {**queues["main"], "max_jobs": limit}, "short": short}}


@pytest.mark.slow
def test_adapt_submits_what_the_site_allows(
    site: Callable[..., str], backend: SlurmBackend, home: Path, capsys: Any
) -> None:
    path = site(**with_limits(backend, 3))
    options = {"dashboard_address": ":0"}
    with gpujobs.GPUSLURMCluster(
        path, worker_memory="1GiB", scheduler_options=options, directives=["--hold"]
    ) as cluster:
        with pytest.raises(InputError, match=r"the queue allows 3 of one user \(`max_jobs`\)"):
            cluster.scale(4)
        assert gpujobs.ClusterHandle(cluster.id).status().target == 0  # nothing has changed
        cluster.adapt(minimum=1, maximum=100, interval="200ms", target_duration="1s")
        with cluster.get_client() as client:
            futures = client.map(time.sleep, [1] * 400, pure=False)
            until(lambda: len(cluster.plan) == 3, 20)
            time.sleep(2)
            with pytest.raises(InputError, match="waiting for 50 workers, but 3 jobs of 50: "):
                cluster.wait_for_workers(50)
            del futures
        assert len(backend.queue()) == 3
    out = capsys.readouterr().out
    assert out.count("the queue allows 3 of one user (`max_jobs`)") == 1
    # The command line has the same limit.
    cli = Cli(home, {**backend.env(), "GPUJOBS_SITE": path}, None)
    for queue, rule in (("main", "3 of one user"), ("short", "3 GPUs of one user")):
        profile = {"gpus": 2, "gpus_per_job": 1, "queue": queue, "walltime": "5m"}
        cluster_id = cli.submit({**profile, "directives": ["--hold"]})
        done = cli("scale", cluster_id, "4")
        assert done.returncode == 2 and f"the queue allows {rule}" in done.stderr
        assert cli("scale", cluster_id, "3").returncode == 0
        assert len(backend.queue()) == 3
        assert cli("cancel", cluster_id).returncode == 0
        backend.wait_empty(15)


LIMITED = """#!/bin/sh
# At most 5 jobs of one user, as a QOS with MaxSubmitJobsPerUser=5: an array is refused as a whole.
echo "sbatch $*" >> CALLS
script=$(cat)
last=$(printf '%s\\n' "$script" | sed -n 's/^#SBATCH --array=0-//p')
queued=$(squeue -h -r -o %i | wc -l)
if [ $((queued + ${last:-0} + 1)) -gt 5 ]; then
    echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2
    echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy" >&2
    exit 1
fi
printf '%s\\n' "$script" | REAL "$@"
"""


@pytest.mark.slow
def test_adapt_submits_what_the_batch_scheduler_accepts(
    make: Callable[..., Any], home: Path, backend: SlurmBackend
) -> None:
    cluster = make(directives=["--hold"])
    wrap(home, "sbatch", LIMITED, backend)
    cluster.adapt(minimum=1, maximum=100, interval="200ms", target_duration="1s")
    with cluster.get_client() as client:
        futures = client.map(time.sleep, [1] * 400, pure=False)
        until(lambda: len(backend.queue()) == 5, 30)
        time.sleep(QUIET)
        before = calls(home, "sbatch")
        assert before <= 16  # it does not ask every interval
        time.sleep(QUIET)
        assert calls(home, "sbatch") == before and len(cluster.plan) == 5
        del futures


# -- jobs that the batch scheduler holds, suspends, requeues ---------------------------------------
@pytest.mark.slow
def test_held_suspended_and_requeued_jobs_keep_their_place(
    make: Callable[..., Any], home: Path, backend: SlurmBackend
) -> None:
    control = backend.slurm.command
    cluster = make(scale=1, directives=["--hold"])
    until(lambda: [job["reason"] for job in cluster.jobs] == [HELD], 20)
    number = cluster.jobs[0]["id"]
    control("scontrol", "release", number)
    cluster.wait_for_workers(1, timeout=patience(60))
    assert (cluster.jobs[0]["phase"], cluster.jobs[0]["state"]) == ("RUNNING", "RUNNING")

    control("scontrol", "suspend", number)
    seconds = until(lambda: cluster.jobs[0]["phase"] == "SUSPENDED", 20)
    cli = Cli(home, dict(backend.env()), None)
    assert cli.status(cluster.id)["state"] == "SUSPENDED"
    assert [job.status.name for job in cluster.workers.values()] == ["paused"]
    control("scontrol", "resume", number)
    until(lambda: cluster.jobs[0]["phase"] == "RUNNING", 20)
    print(f"suspended: known after {seconds:.1f} s")

    # SIGTERM makes workers leave, and their successor is submitted if the owner looks meanwhile.
    supervisor = supervisor_of(cluster.folder, 0)
    script = psutil.Process(supervisor).ppid()  # first: it would write how its job has ended
    control("scontrol", "requeue", number)
    for pid in (script, supervisor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    seconds = until(lambda: cluster.jobs[0]["phase"] == "PENDING", 40)
    print(f"requeued: known after {seconds:.1f} s")
    assert cluster.jobs[0]["reason"].startswith("requeued")
    time.sleep(3)
    assert [job["phase"] for job in cluster.jobs] == ["PENDING"]
    control("scontrol", "update", f"JobId={number}", "StartTime=now")
    cluster.wait_for_workers(1, timeout=patience(90))
    assert [(job["number"], job["id"]) for job in active(cluster)] == [(0, number)]
    assert calls(home, "sbatch") == 1 and calls(home, "scancel") == 0  # its place was kept


@pytest.mark.slow
def test_leaving_jobs_do_not_count(
    make: Callable[..., Any], home: Path, backend: SlurmBackend
) -> None:
    cluster = make(scale=2)
    cluster.wait_for_workers(2, timeout=patience(60))
    assert (
        set(cluster.workers) == set(cluster.worker_spec) == {f"{cluster.id}-0", f"{cluster.id}-1"}
    )
    assert all(job.status.name == "running" and job.job_id for job in cluster.workers.values())
    client = cluster.get_client()
    data = client.scatter({"a": bytes(10**6)}, broadcast=True)
    cluster.scale(1)
    assert "LEAVING" in phases(cluster) or "ENDED" in phases(cluster)
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(60))
    assert [job["phase"] for job in active(cluster)] == ["RUNNING"] * 2
    assert client.gather(data)["a"] == bytes(10**6)
    client.close()


@pytest.mark.slow
def test_a_cluster_without_jobs_has_not_ended(
    make: Callable[..., Any], site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    cli = Cli(home, {**backend.env(), "GPUJOBS_SITE": site()}, None)
    cluster = make(scale=0)
    for _ in range(2):
        found = cli.status(cluster.id)
        assert (found["state"], found["reason"], found["jobs"][1:]) == ("RUNNING", "no jobs", [])
        assert cluster.id in cli("status").stdout
        cluster.scale(1)
        cluster.wait_for_workers(1, timeout=patience(60))
        cluster.scale(0)
        backend.wait_empty(30)


@pytest.mark.stub
def test_jobs_cancelled_by_hand_and_by_scale_are_missed_by_nobody(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    cli = Cli(home, {**backend.env(), "GPUJOBS_SITE": site()}, None)
    cluster = cli.submit({"gpus": 3, "gpus_per_job": 1, "workers": {"memory": "1GiB"}}, "--wait")
    assert cli("scale", cluster, "1").returncode == 0
    found = cli.status(cluster)
    leaving = [job for job in found["jobs"] if job["phase"] == "LEAVING"]
    assert len(leaving) + sum(job["phase"] == "ENDED" for job in found["jobs"]) == 2
    assert len(found["workers"]["connected"]) == 1
    text = cli("status", cluster).stdout
    assert "1 of 1 connected" in text and "missing" not in text
    until(lambda: len(backend.queue()) == 1, 40)
    backend.slurm.command("scancel", *{line.split("_")[0].split()[0] for line in backend.queue()})
    until(lambda: cli.status(cluster)["state"] == "CANCELLED", 30)
    backend.wait_empty(30)
    found = cli.status(cluster)
    assert {job["state"] for job in found["jobs"]} <= {"CANCELLED", "COMPLETED"}
    assert "still ending" not in cli("status", cluster).stdout


# -- the owner -------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_child_process_does_not_end_the_clusters_of_its_parent(
    make: Callable[..., Any], home: Path
) -> None:
    first = make(scale=1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(make(scale=1)))
    thread.start()
    thread.join()
    second = found[0]
    for cluster in (first, second):
        cluster.wait_for_workers(1, timeout=patience(60))
    with Client(first, set_as_default=False) as one, Client(second, set_as_default=False) as two:
        assert one.submit(sum, [1, 2]).result() == two.submit(sum, [1, 2]).result() == 3
        child = os.fork()
        if child == 0:  # it ends as a program does, and must not end its parent's clusters
            with contextlib.suppress(BaseException):
                first.close()
                del first
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert one.submit(sum, [3, 4]).result() == 7
        path = home / "helper_of_test.py"
        path.write_text("VALUE = 9\n")
        one.upload_file(str(path))
        assert one.submit(lambda: __import__("helper_of_test").VALUE, pure=False).result() == 9
        one.restart(timeout=patience(60))
        first.wait_for_workers(1, timeout=patience(60))
        assert one.submit(sum, [1, 2], pure=False).result(timeout=patience(60)) == 3
    assert calls(home, "sbatch") == 2
    client = Client(second)
    client.shutdown()
    assert second.status.name == "closed"
    for call in (lambda: second.scale(2), lambda: second.wait_for_workers(1)):
        with pytest.raises(JobFailedError, match="has ended: closed by its owner"):
            call()


ONE_LINE = """
import gpujobs
with gpujobs.GPUSLURMCluster({site!r}, n_workers=1, quiet=True, worker_memory="1GiB", scheduler_options={{"dashboard_address": ":0"}}) as cluster:
    cluster.wait_for_workers(1)
    print(cluster.get_client().submit(sum, [1, 2]).result())
"""


NOT_CLOSED = """
import gpujobs
cluster = gpujobs.GPUSLURMCluster({site!r}, n_workers=1, quiet=True, worker_memory="1GiB", scheduler_options={{"dashboard_address": ":0"}})
client = cluster.get_client()
cluster.wait_for_workers(1)
print(client.submit(sum, [1, 2]).result())
"""


@pytest.mark.slow
def test_python_c_and_a_terminal_leave_no_job(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    path = site()
    for program in (ONE_LINE, NOT_CLOSED):
        done = subprocess.run(
            [sys.executable, "-c", program.format(site=path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=patience(120),
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
        backend.wait_empty(20)
    screen = Screen(sys.executable, "-q", cwd=home)
    try:
        screen.until(">>> ")
        screen.type("import gpujobs")
        options = "worker_memory='1GiB', directives=['--hold'], scheduler_options={'dashboard_address': ':0'}"
        screen.type(f"cluster = gpujobs.GPUSLURMCluster({path!r}, {options})")
        screen.type("cluster.scale(1); cluster.wait_for_workers(1)")
        screen.until(r"0/1 workers, 1 WAITING \(JobHeldUser: held by .*…, \d\d:\d\d")
        os.write(screen.master, b"\x03")  # Ctrl-C ends the wait, and not the cluster
        screen.until("KeyboardInterrupt")
        screen.type("print([job['phase'] for job in cluster.jobs])")
        screen.until(r"\['PENDING'\]")
        length = len(screen.read())
        screen.type("cluster.quiet = True")
        screen.type(f"cluster.wait_for_workers(1, timeout={SHORT})")
        screen.until("TimeoutError")
        assert "0/1 workers" not in screen.text[length:]
        screen.type("exit()")
        until(lambda: screen.read() is not None and screen.process.poll() is not None, 30)
    finally:
        screen.close()
    backend.wait_empty(20)


@pytest.mark.slow
def test_each_event_loop_has_a_cluster_of_its_own(site: Callable[..., str], home: Path) -> None:
    path = site()

    async def one() -> None:
        options = {"dashboard_address": ":0"}
        cluster = await gpujobs.GPUSLURMCluster(
            path, asynchronous=True, scheduler_options=options, worker_memory="1GiB", quiet=True
        )
        await cluster.scale(1)
        await cluster.wait_for_workers(1, timeout=patience(60))
        assert [job["phase"] for job in cluster.jobs] == ["RUNNING"]
        await cluster.close()

    for _ in range(2):
        asyncio.run(one())


@pytest.mark.slow
@pytest.mark.parametrize("state", ["pending", "starting"])
def test_the_jobs_of_an_owner_killed_before_its_workers_register_end(
    site: Callable[..., str], home: Path, backend: SlurmBackend, state: str
) -> None:
    directives = {"directives": ["--begin=now+15"]} if state == "pending" else {}
    with client_process(home, site(), n=1, wait=0, **directives) as (process, cluster):
        if state == "starting":
            folder = home / ".gpujobs" / cluster
            until(lambda: facts_of(folder, 0).node is not None, 60)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        print(f"owner killed, job {state}: ended after {backend.wait_empty(180):.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["local", "job"])
def test_a_killed_owner_is_the_reason_at_once(
    site: Callable[..., str], home: Path, backend: SlurmBackend, mode: str
) -> None:
    keywords = {"scheduler": "job"} if mode == "job" else {}
    with client_process(home, site(), n=2, wait=2, **keywords) as (process, name):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        (found,) = status(name)
        gone = "the Python process that owned it is gone: process "
        assert found["state"] == "FAILED" and found["reason"].startswith(f"{gone}{process.pid} on ")
        print(f"{mode}: queue empty after {backend.wait_empty(180):.1f} s")
        (found,) = status(name)
        if mode == "local":
            assert found["reason"].startswith(f"{gone}{process.pid} on ")
            reasons = [job["reason"] for job in found["jobs"]]
            assert any(f"process {process.pid} on " in reason for reason in reasons), reasons
        else:
            assert "has been silent for" in found["reason"]
        assert found["state"] == "FAILED"
        (found,) = status(name)  # as it is remembered
        assert found["state"] == "FAILED" and found["reason"]
        assert not printed("nodes")[
            "nodes"
        ]  # two jobs failed there within two minutes: with their owner


def printed(*words: str) -> Any:
    """Return what a command of gpujobs prints as JSON."""
    argv = [sys.executable, "-m", "gpujobs", *words, "--json"]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=False).stdout)


def status(name: str) -> list[dict[str, Any]]:
    clusters: list[dict[str, Any]] = printed("status", name)["clusters"]
    return clusters


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["local", "job"])
def test_an_owner_that_was_stopped_for_minutes_keeps_its_jobs_or_is_replaced(
    site: Callable[..., str], home: Path, backend: SlurmBackend, mode: str
) -> None:
    keywords = {"scheduler": "job"} if mode == "job" else {}
    with client_process(home, site(), n=2, wait=2, **keywords) as (process, cluster):
        jobs = sorted(line.split()[0] for line in backend.queue())
        os.kill(process.pid, signal.SIGSTOP)
        if mode == "local":
            time.sleep(240)
        else:
            until(lambda: not backend.queue(), 240, "the end of a cluster without owner", every=2)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(30)
        if mode == "local":  # it holds the state of the dask scheduler: nothing is lost
            assert sorted(line.split()[0] for line in backend.queue()) == jobs
            workers = dask_workers(home / ".gpujobs" / cluster)
            assert set(workers.connected) == {f"{cluster}-0", f"{cluster}-1"}
        else:  # it could as well have been killed
            assert not backend.queue()
            ended = json.loads((home / ".gpujobs" / cluster / "ended").read_text())
            assert "has been silent for" in ended["reason"]
        assert calls(home, "sbatch") == (1 if mode == "local" else 2)
        os.kill(process.pid, signal.SIGINT)
        process.wait(patience(30))
    backend.wait_empty(30)


@pytest.mark.waits
@pytest.mark.slow
def test_fifty_random_scales_in_a_minute_cost_few_commands(
    make: Callable[..., Any], home: Path, backend: SlurmBackend
) -> None:
    cluster = make()
    started = time.monotonic()
    chance = random.Random(4)
    for _ in range(50):
        cluster.scale(chance.randint(0, 8))
        time.sleep(chance.uniform(0, 1.2))
    cluster.scale(5)
    cluster.wait_for_workers(5, timeout=patience(90))
    until(lambda: len(backend.queue()) == len(cluster.observed) == 5, 60)
    assert len(active(cluster)) == 5 and {job["phase"] for job in active(cluster)} == {"RUNNING"}
    counts = {name: calls(home, name) for name in ("sbatch", "squeue", "scancel")}
    print(f"50 scales: {counts}")
    minutes = max(1.0, (time.monotonic() - started) / 60)  # longer on a busy machine
    assert counts["sbatch"] + counts["scancel"] <= 51 and counts["squeue"] <= 150 * minutes


@pytest.mark.waits
@pytest.mark.slow
def test_a_scale_does_not_wait_for_a_controller_that_is_away(
    make: Callable[..., Any], backend: SlurmBackend
) -> None:
    cluster = make(scale=1)
    cluster.wait_for_workers(1, timeout=patience(60))
    away = threading.Thread(target=pause, args=(backend.slurm.controller, 60))
    away.start()
    time.sleep(0.5)
    cluster.scale(3)
    assert away.is_alive()  # it does not wait for the end of that minute
    assert len(cluster.plan) == 1
    away.join()
    until(lambda: len(cluster.plan) == 3, 120, "the jobs that could not be submitted at once")
    cluster.wait_for_workers(3, timeout=patience(120))
    assert len(backend.queue()) == 3
    assert cluster.get_client().submit(sum, [1, 2]).result() == 3
