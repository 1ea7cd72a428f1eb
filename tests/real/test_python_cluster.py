"""The cluster class on a real Slurm."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpujobs
from gpujobs.deploy.group import MOST_FAILURES
from gpujobs.errors import InputError, JobFailedError, RefusedError

from ..support.backend import SlurmBackend
from ..support.cli import Cli, text_of
from ..support.events import dask_workers
from ..support.jobevents import has_left, seconds_of
from ..support.owner import backend, calls, client_process, make, site  # noqa: F401
from ..support.processes import NO_TIMEOUT, patience, pause, processes_with, until

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]


# -- it works ----------------------------------------------------------------------------------------------------
def test_scale_makes_one_submission(
    make: Callable[..., Any], backend: SlurmBackend, home: Path
) -> None:
    cluster = make(gpus_per_job=2)
    assert isinstance(cluster, __import__("dask_jobqueue").JobQueueCluster)
    cluster.scale(8)
    assert calls(home, "sbatch") == 1
    cluster.wait_for_workers(8, timeout=patience(60))
    names = {f"{cluster.id}-{job}-{gpu}" for job in range(4) for gpu in range(2)}
    assert cluster.plan == cluster.requested == cluster.observed == names
    client = cluster.get_client()
    assert client.submit(sum, [1, 2]).result() == 3
    assert client.scheduler.address.startswith("tls://")
    until(lambda: {job["phase"] for job in cluster.jobs} == {"RUNNING"}, 10)

    def gpus() -> set[str]:
        workers = dask_workers(Path(cluster.folder)).connected.values()
        return {json.dumps(worker["gpu"]) for worker in workers}

    until(lambda: len(gpus()) == 8, 10)
    with backend.slurm.setting("KillWait", 30):
        cluster.scale(2)
        until(lambda: calls(home, "scancel") == 1, 20, "one cancel for three jobs")
        folder, jobs = Path(cluster.folder), [job["number"] for job in cluster.jobs]
        until(lambda: sum(has_left(folder, job) for job in jobs) == 3, 10, "nothing to retire")
    until(lambda: len(cluster.scheduler_info["workers"]) == 2, 20)
    client.close()
    cluster.close()
    cluster.close()
    assert calls(home, "scancel") == 2


SHORT = 6
"""Seconds of a wait that must end without workers."""


def test_scale_by_anything_and_rounding_up_is_said(
    make: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = make(gpus_per_job=4, quiet=False, directives=["--hold"])
    cluster.scale(6)
    assert "6 workers are 2 jobs of 4: 8 workers" in capsys.readouterr().out
    assert len(cluster.plan) == 8
    cluster.scale(jobs=3)
    assert len(cluster.plan) == 12
    cluster.scale(memory="3GiB")  # three workers' memory is one job
    assert len(cluster.plan) == 4
    cluster.scale(cores=5)
    assert len(cluster.plan) == 8
    cluster.scale(0)
    assert cluster.plan == set()
    for bad in ({"n": -1}, {"jobs": -1}, {"n": "4"}, {"cores": float("nan")}):
        with pytest.raises(InputError, match="scale:"):
            cluster.scale(**bad)


def test_scale_while_jobs_wait_and_during_scale_is_exact(
    make: Callable[..., Any], backend: SlurmBackend, home: Path
) -> None:
    cluster = make(directives=["--hold"])
    cluster.scale(200)
    assert (calls(home, "sbatch"), len(backend.queue())) == (1, 200)
    cluster.scale(190)
    until(lambda: len(backend.queue()) == 190, 10)
    assert calls(home, "scancel") == 1
    threads = [threading.Thread(target=cluster.scale, args=(n,)) for n in (195, 180, 185)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = cluster._pool.groups[""].target
    until(lambda: len(backend.queue()) == len(cluster.plan) == wanted, 10)
    cluster.scale(0)
    backend.wait_empty(10)


def test_profile_and_keywords_give_the_same_script(site: Callable[..., str], home: Path) -> None:
    profile = {
        "gpus": 4, "gpus_per_job": 2, "walltime": "30m", "queue": "main", "env": {"A": "b c"}, "directives": ["--comment=x"],
        "environment": {"setup": "true", "python": "/opt/python"}, "workers": {"threads": 2, "memory": "2GiB", "rmm_pool_size": 0.5},
    }  # fmt: skip
    path = home / "profile.yaml"
    path.write_text(text_of(profile))
    one = gpujobs.GPUJobQueueCluster.from_profile(
        path, site=site(), quiet=True, scheduler_options={"dashboard_address": ":0"}
    )
    with one:
        assert type(one) is gpujobs.GPUSLURMCluster  # the site picks the class
        assert len(one.plan) == 4
        keywords = {**profile, "gpus": None}
        workers = keywords.pop("workers")
        with gpujobs.GPUSLURMCluster(
            site(), worker_threads=workers["threads"], worker_memory=workers["memory"],
            worker_options={"rmm_pool_size": 0.5}, name="profile", quiet=True, scheduler_options={"dashboard_address": ":0"},
            **{key: value for key, value in keywords.items() if value is not None},
        ) as two:  # fmt: skip
            two._pool._next_number = one._pool._next_number
            assert one.job_script().replace(one.id, two.id) == two.job_script()
        submitted = next((one.folder / "scripts").iterdir()).read_text()
        assert one.scheduler_address not in submitted  # read from the cluster's folder
    assert (
        gpujobs.GPUJobQueueCluster.from_yaml.__func__
        is gpujobs.GPUJobQueueCluster.from_profile.__func__
    )


def test_keywords_of_dask_jobqueue_are_in_the_script(make: Callable[..., Any], home: Path) -> None:
    cluster = make(
        queue="short", walltime="5m", interface="lo", protocol="tls://", job_extra_directives=["--comment=hi"], gpus_per_job=2,
        job_script_prologue=["echo prologue"], local_directory="/tmp", python=sys.executable, cores=4, memory="3GiB",
        processes=2, worker_memory=None, worker_extra_args=["--worker-port", "9000:9010"], death_timeout=30,
        log_directory=str(home / "logs"), n_workers=2,
    )  # fmt: skip
    script = cluster.job_script()
    for text in ("--partition=short", "--time=00:05:00", "--interface=lo", "--comment=hi", "echo prologue", "--local-directory=/tmp",
                 "--nthreads=2", "--memory-limit=1536MiB", "--worker-port=9000:9010", "--death-timeout=30"):  # fmt: skip
        assert text in script, text
    assert cluster.job_header in script
    cluster.wait_for_workers(2, timeout=patience(60))
    assert "prologue" in (home / "logs" / cluster.id / "job-0.log").read_text()


def test_a_cluster_needs_no_site_file(
    site: Callable[..., str], backend: SlurmBackend, home: Path
) -> None:
    keywords = {
        "queue": "main",
        "cores": 2,
        "memory": "1GiB",
        "walltime": "10m",
        "gpus_per_job": 2,
        "quiet": True,
    }
    options = {"dashboard_address": ":0"}
    setup = backend.site()["setup"]
    with gpujobs.GPUSLURMCluster(
        **keywords,
        environment={"setup": setup, "python": sys.executable},
        n_workers=2,
        scheduler_options=options,
    ) as cluster:
        script = cluster.job_script()
        assert (
            "--partition=main" in script
            and "--gres=gpu:2" in script
            and "--cpus-per-task=2" in script
            and "--mem=1024M" in script
        )
        cluster.wait_for_workers(2, timeout=patience(60))
        assert cluster.get_client().submit(lambda: 9).result() == 9
    with pytest.raises(InputError, match="no site given, and no site file matches this host"):
        gpujobs.GPUSLURMCluster(cores=2)
    with pytest.raises(InputError, match="no site given"):
        gpujobs.GPUJobQueueCluster(queue="main")


@pytest.mark.slow
def test_the_dask_configuration_is_in_the_script(make: Callable[..., Any]) -> None:
    import dask

    with dask.config.set(
        {
            "jobqueue.slurm.queue": "short",
            "jobqueue.slurm.job-extra-directives": ["--comment=config"],
        }
    ):
        script = make().job_script()
    assert "--partition=short" in script and "--comment=config" in script
    assert (
        "--time=00:10:00" in script
    )  # the site's: the 30 minutes that dask-jobqueue ships are nobody's wish


@pytest.mark.slow
def test_an_asynchronous_cluster_scales_and_computes(
    site: Callable[..., str], backend: SlurmBackend
) -> None:
    async def main() -> None:
        options = {"dashboard_address": ":0"}
        async with gpujobs.GPUSLURMCluster(
            site(), asynchronous=True, n_workers=1, scheduler_options=options, worker_memory="1GiB"
        ) as cluster:
            from distributed import Client

            await cluster.wait_for_workers(1, timeout=patience(60))
            async with Client(cluster, asynchronous=True) as client:
                assert await client.submit(lambda: 42) == 42
            await cluster.scale(2)
            await cluster.wait_for_workers(2, timeout=patience(60))
            with pytest.raises(InputError):
                await cluster.scale(-1)
            group = cluster._pool.groups[""]
            group.jobs = replace(group.jobs, lines=("--partition=nosuch",))
            with pytest.raises(RefusedError, match="nosuch"):
                await cluster.scale(3)

    asyncio.run(main())


@pytest.mark.slow
def test_a_cluster_in_a_thread_leaves_the_signals_alone(make: Callable[..., Any]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(make()))
    thread.start()
    thread.join()
    assert found and found[0].job_script()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    code = (
        "import signal, threading\n"
        "def work():\n    import gpujobs.deploy\n    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
        "t = threading.Thread(target=work); t.start(); t.join()"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "True\n"
    )


def test_jobs_and_gpus_are_displayed(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dask

    cluster = make(scale=1)
    cluster.wait_for_workers(1, timeout=patience(60))
    until(lambda: [job["phase"] for job in cluster.jobs] == ["RUNNING"], 10)
    until(lambda: cluster.jobs[0]["gpus"], 10)
    gpu = cluster.jobs[0]["gpus"][0]
    assert (
        gpu["worker"] == f"{cluster.id}-0" and gpu["node"] in gpu["uuid"] and gpu["memory"] > 2**30
    )
    text = repr(cluster.jobs)
    assert "JOB" in text and "RUNNING" in text and "1/1" in text and "1 Fake GPU" in text
    assert "<table>" in cluster.jobs._repr_html_()
    monkeypatch.setenv("JUPYTERHUB_SERVICE_PREFIX", "/user/ada/")
    with dask.config.set(
        {"distributed.dashboard.link": "{JUPYTERHUB_SERVICE_PREFIX}proxy/{port}/status"}
    ):
        assert "/user/ada/proxy/" in cluster._repr_html_()
    assert "1 running" in cluster._repr_html_() and "1 Fake GPU" in cluster._repr_html_()
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert cluster._widget() is None  # then a notebook displays the HTML
    logs = cluster.get_logs()
    assert "job-0" in logs and "Registered to" in logs["job-0"]
    assert cluster.id in repr(cluster)


@pytest.mark.slow
def test_an_idle_cluster_asks_rarely(make: Callable[..., Any], home: Path) -> None:
    cluster = make()
    time.sleep(4)
    assert calls(home, "squeue") == 0  # no jobs, no questions
    cluster.scale(1)
    cluster.wait_for_workers(1, timeout=patience(60))
    time.sleep(20)
    before = calls(home, "squeue")
    time.sleep(10)
    assert calls(home, "squeue") - before <= 2  # the site's poll is 1 s here; nothing moves


@pytest.mark.slow
def test_a_slow_batch_scheduler_does_not_stop_dask(
    make: Callable[..., Any], home: Path, backend: SlurmBackend
) -> None:
    cluster = make(scale=1)
    cluster.wait_for_workers(1, timeout=patience(60))
    asked, answer = home / "asked", home / "answer"
    real = backend.slurm.command("which", "squeue").strip()
    (home / "squeue").write_text(
        f'#!/bin/sh\ntouch {asked}\nwhile [ ! -e {answer} ]; do sleep 0.1; done\nexec {real} "$@"\n'
    )
    try:
        cluster.scale(2)
        until(asked.exists, 20)
        with cluster.get_client() as client:  # while squeue does not answer
            assert client.submit(sum, [1, 2]).result(timeout=patience(30)) == 3
    finally:
        answer.touch()
    cluster.wait_for_workers(2, timeout=patience(60))
    until(lambda: [job["state"] for job in cluster.jobs] == ["RUNNING"] * 2, 20)


# -- faults -------------------------------------------------------------------------------------------------------
def test_a_broken_python_is_reported_with_the_end_of_the_log(make: Callable[..., Any]) -> None:
    cluster = make(scale=4, environment={"python": "/nosuch/python"})
    started = time.monotonic()
    with pytest.raises(
        JobFailedError,
        match=r"jobs in a row ended before their workers connected[\s\S]*nosuch/python",
    ) as caught:
        cluster.wait_for_workers(4, timeout=patience(60))
    assert time.monotonic() - started < 240  # not after `start_timeout`, 300 s
    assert "  | " in str(caught.value)  # the log's tail
    assert {job["phase"] for job in cluster.jobs} == {"FAILED"}
    assert any(
        "nosuch/python" in text
        for text in cluster.get_logs(cluster=False, scheduler=False).values()
    )
    tried = len(cluster.jobs)
    assert tried <= 4 * MOST_FAILURES
    time.sleep(4)
    assert len(cluster.jobs) == tried  # and nothing is resubmitted for ever
    with pytest.raises(JobFailedError):
        cluster.wait_for_workers(1)


@pytest.mark.slow
def test_a_repaired_environment_works_after_scale(make: Callable[..., Any], home: Path) -> None:
    flag = home / "mended"
    cluster = make(
        scale=3, environment={"setup": f"[ -e {flag} ] || exit 4", "python": sys.executable}
    )
    with pytest.raises(JobFailedError, match="exit code 4"):
        cluster.wait_for_workers(3, timeout=patience(60))
    flag.touch()
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(60))


def test_a_refused_submission_raises_and_close_works(make: Callable[..., Any]) -> None:
    cluster = make(directives=["--reservation=nosuch"])
    with pytest.raises(RefusedError, match="reservation"):
        cluster.scale(4)
    with pytest.raises(RefusedError, match="reservation"):
        cluster.wait_for_workers(4)
    assert cluster.plan == cluster.requested == set()
    cluster.close()
    cluster.close()


def test_refusals_name_the_contact_of_the_site(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    """The command line and the class have the same words."""
    path = site(contact="gpu@example.org")
    refused = ["--reservation=nosuch"]
    with pytest.raises(RefusedError) as caught:
        gpujobs.GPUSLURMCluster(path, n_workers=2, directives=refused, quiet=True)
    assert str(caught.value).endswith("\n  hint: contact for questions: gpu@example.org")
    cli = Cli(home, {**backend.env(), "GPUJOBS_SITE": path}, None)
    done = cli("submit", str(cli.write("p.yaml", {"gpus": 2, "directives": refused})))
    assert done.returncode == 1 and done.stderr.strip().endswith(str(caught.value))


def test_a_refusal_in_the_constructor_leaves_nothing(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    with pytest.raises(RefusedError, match="reservation"):
        gpujobs.GPUSLURMCluster(
            site(), n_workers=2, directives=["--reservation=nosuch"], quiet=True
        )
    assert not list((home / ".gpujobs").iterdir())


@pytest.mark.slow
def test_a_job_cancelled_from_outside_is_replaced(
    make: Callable[..., Any], backend: SlurmBackend
) -> None:
    cluster = make(scale=2)
    cluster.wait_for_workers(2, timeout=patience(60))
    until(lambda: {job["phase"] for job in cluster.jobs} == {"RUNNING"}, 10)
    backend.kill_job(cluster.jobs[0]["id"])
    until(
        lambda: f"{cluster.id}-2" in cluster.observed, 30
    )  # another number: names are never used twice
    assert cluster.observed == cluster.plan
    until(lambda: any(job["phase"] == "ENDED" for job in cluster.jobs), 30)  # workers leave before
    gone = next(job for job in cluster.jobs if job["phase"] == "ENDED")
    assert gone["number"] == 0


@pytest.mark.slow
def test_a_waiting_job_cancelled_from_outside_is_replaced(
    make: Callable[..., Any], backend: SlurmBackend
) -> None:
    cluster = make(scale=2, directives=["--hold"])
    until(lambda: {job["phase"] for job in cluster.jobs} == {"PENDING"}, 10)
    backend.kill_job(cluster.jobs[0]["id"])
    states = ["CANCELLED", "PENDING", "PENDING"]  # squeue lists it no more, and there is no sacct
    until(lambda: sorted(job["state"] for job in cluster.jobs) == states, 60, every=0.5)


@pytest.mark.waits
@pytest.mark.slow
def test_a_walltime_is_followed_by_a_successor(make: Callable[..., Any]) -> None:
    # Its workers leave a sixth of it before, and its successor comes a quarter of it earlier.
    walltime = math.ceil(patience(60))
    cluster = make(scale=1, walltime=f"{walltime}s")
    cluster.wait_for_workers(1, timeout=patience(60))
    client = cluster.get_client()
    future = client.submit(lambda: os.urandom(1000), pure=False)
    first = future.result()
    until(
        lambda: f"{cluster.id}-1" in cluster.observed and f"{cluster.id}-0" not in cluster.observed,
        walltime + 60,
    )
    assert client.gather(future) == first  # handed over, not computed again
    client.close()


@pytest.mark.slow
def test_a_lost_node_is_replaced(make: Callable[..., Any], backend: SlurmBackend) -> None:
    cluster = make(scale=8, gpus_per_job=4, directives=["--no-requeue"])
    cluster.wait_for_workers(8, timeout=patience(60))
    until(lambda: {job["phase"] for job in cluster.jobs} == {"RUNNING"}, 10)
    node = cluster.jobs[0]["node"]
    backend.slurm.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        until(lambda: f"{cluster.id}-2-3" in cluster.observed, 60)
        assert next(job for job in cluster.jobs if job["number"] == 0)["state"] == "NODE_FAIL"
    finally:
        backend.slurm.command("scontrol", "update", f"NodeName={node}", "State=RESUME")


@pytest.mark.waits
@pytest.mark.slow
def test_scale_and_close_survive_an_outage_of_the_controller(
    make: Callable[..., Any], backend: SlurmBackend
) -> None:
    cluster = make()
    away = threading.Thread(target=pause, args=(backend.slurm.controller, 20))
    away.start()
    time.sleep(0.5)
    cluster.scale(2)
    away.join()
    cluster.wait_for_workers(2, timeout=patience(60))
    assert (
        len([line for line in backend.queue() if cluster.id in line]) == 2
    )  # once, although a reply was lost
    away = threading.Thread(target=pause, args=(backend.slurm.controller, 60))
    away.start()
    time.sleep(0.5)
    cluster.close()
    assert away.is_alive()  # bounded
    away.join()
    backend.wait_empty(60)  # the jobs ended by themselves


def test_a_killed_client_leaves_nothing(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    # One job has all GPUs of its node, the other one waits in the queue until it is gone.
    node = ["--nodelist=node1"]
    jobs = client_process(home, site(), n=8, wait=4, gpus_per_job=4, directives=node)
    with jobs as (process, cluster):
        assert len([line for line in backend.queue() if "PENDING" in line]) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        backend.wait_empty(60)
    log = home / ".gpujobs" / cluster / "logs" / "job-1.log"
    assert re.search(
        r"compute node node\d cannot reach the dask scheduler at \S+:\d+: it is gone",
        log.read_text(),
    )
    assert seconds_of(home / ".gpujobs" / cluster, 1) < NO_TIMEOUT
    assert (
        "injob.pyz supervise" not in log.read_text() and "workers" not in log.read_text()
    )  # Python never started
    assert not processes_with(cluster)


def test_orphans_are_cancelled(site: Callable[..., str], home: Path, backend: SlurmBackend) -> None:
    cli = Cli(home, dict(backend.env()), None)
    with client_process(home, site(), n=2, wait=0, directives=["--hold"]) as (process, cluster):
        assert cli("cancel", "--orphans").stderr == "no orphans\n"  # its owner lives
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert len(backend.queue()) == 2
    lease = home / ".gpujobs" / cluster / "lease"
    os.utime(lease, (time.time() - 61, time.time() - 61))
    assert f"{cluster} is cancelled" in cli("cancel", "--orphans").stderr
    backend.wait_empty(10)


@pytest.mark.slow
def test_ctrl_c_in_the_client_leaves_nothing(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    with client_process(home, site(), n=2, wait=2) as (process, _cluster):
        os.kill(process.pid, signal.SIGINT)
        process.wait(patience(30))
        backend.wait_empty(15)


def test_adapt_scales_by_whole_jobs_without_flapping(make: Callable[..., Any]) -> None:
    cluster = make(gpus_per_job=4)
    adaptive = cluster.adapt(minimum=0, maximum=8, interval="500ms", hold="3s", wait_count=3)
    said = cluster.get_logs(scheduler=False, workers=False)["Cluster"]
    assert "wait_count has no effect; hold=…" in said
    client = cluster.get_client()
    futures = client.map(lambda n: time.sleep(0.5), range(60), pure=False)
    client.gather(futures)
    del futures
    history = [
        (entry[1]["status"], entry[1].get("n") or len(entry[1]["workers"]))
        for entry in adaptive.log
    ]
    assert [
        status for status, _ in history if status == "down"
    ] == []  # nothing was given back while there was work
    until(lambda: not cluster.plan and not cluster.observed, 40)
    downs = [
        count
        for status, count in ((e[1]["status"], len(e[1].get("workers", ()))) for e in adaptive.log)
        if status == "down"
    ]
    assert downs and all(count % 4 == 0 for count in downs)  # whole jobs
    assert (
        client.submit(lambda: 1, pure=False).result(timeout=patience(60)) == 1
    )  # and it wakes up again
    client.close()


def test_a_wait_for_pending_jobs_says_why(make: Callable[..., Any]) -> None:
    cluster = make(scale=2, directives=["--begin=now+1hour"])
    with pytest.raises(TimeoutError, match=r"0 of 2 workers after 6 s: 2 WAITING \(BeginTime\)"):
        cluster.wait_for_workers(2, timeout=SHORT)
    assert [(job["phase"], job["reason"]) for job in cluster.jobs] == [("PENDING", "BeginTime")] * 2
    assert "BeginTime" in repr(cluster.jobs) and "BeginTime" in cluster._repr_html_()


def test_a_wait_for_more_workers_than_requested_is_refused(make: Callable[..., Any]) -> None:
    cluster = make(scale=1, directives=["--hold"])
    with pytest.raises(InputError, match="waiting for 5 workers, but only 1 were asked for"):
        cluster.wait_for_workers(5)


@pytest.mark.slow
def test_a_worker_that_cannot_reach_the_dask_scheduler_is_reported(
    make: Callable[..., Any],
) -> None:
    cluster = make()
    path = cluster.folder / "scheduler.json"
    path.write_text(
        re.sub(r'"address": "tls://[^"]+"', '"address": "tls://127.0.0.1:1"', path.read_text())
    )
    cluster.scale(1)
    said = r"compute node node\d cannot reach the dask scheduler at 127\.0\.0\.1:1: .*set interface or scheduler='job'"
    with pytest.raises(
        JobFailedError, match=rf"3 jobs in a row[\s\S]*{said}"
    ):  # not submitted again for ever
        cluster.wait_for_workers(1, timeout=patience(100))
    assert re.search(said, (cluster.folder / "logs" / "job-0.log").read_text())


@pytest.mark.slow
def test_two_workers_on_one_gpu_are_told(make: Callable[..., Any]) -> None:
    cluster = make(
        scale=2,
        environment={
            "setup": "export SLURMD_NODENAME=same CUDA_VISIBLE_DEVICES=0",
            "python": sys.executable,
        },
    )
    until(lambda: cluster._pool.conflict, 60)
    with pytest.raises(
        JobFailedError, match=rf"workers {cluster.id}-0 and {cluster.id}-1 share GPU GPU-same"
    ):
        cluster.wait_for_workers(2)


def test_a_dead_job_is_known_soon(make: Callable[..., Any]) -> None:
    cluster = make(scale=1, environment={"setup": "exit 9"})
    until(lambda: has_left(cluster.folder, 0), 30, every=0.02)
    until(lambda: "FAILED" in [job["phase"] for job in cluster.jobs], 5, every=0.05)


@pytest.mark.slow
def test_the_lease_is_renewed_while_the_heads_job_waits(
    make: Callable[..., Any], backend: SlurmBackend, home: Path
) -> None:
    """Else the head would find its owner silent, after a wait of a minute."""
    keywords = {"scheduler": "job", "scheduler_options": None, "directives": ["--hold"]}
    with ThreadPoolExecutor(1) as executor:
        opened = executor.submit(make, **keywords)
        try:
            until(backend.queue, 30, "the head's job")
            (lease,) = home.glob(".gpujobs/*/lease")
            first = lease.stat().st_mtime
            until(lambda: lease.stat().st_mtime > first, 30, "a new lease")
        finally:
            (job,) = backend.slurm.command("squeue", "-h", "-o", "%A").split()
            backend.slurm.command("scontrol", "release", job)
        assert opened.result(patience(60)).status.name == "running"


# -- the dask scheduler in a job -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_dask_scheduler_runs_in_the_first_worker_job(make: Callable[..., Any]) -> None:
    cluster = make(gpus_per_job=2, scheduler="job", scheduler_options=None)
    assert cluster.jobs[0]["head"]
    cluster.scale(4)
    cluster.wait_for_workers(4, timeout=patience(60))
    assert cluster.get_client().submit(lambda: 5).result() == 5
    cluster.scale(0)
    staying = [job for job in cluster.jobs if job["phase"] not in ("LEAVING", "ENDED")]
    assert [job["head"] for job in staying] == [True]  # the head's job always stays


@pytest.mark.slow
def test_the_dask_scheduler_runs_in_a_job_of_its_own_shape(make: Callable[..., Any]) -> None:
    cluster = make(
        scale=1, scheduler="job", scheduler_options=None, head={"queue": "cpu", "memory": "512MiB"}
    )
    cluster.wait_for_workers(1, timeout=patience(60))
    assert [len(job["workers"]) for job in cluster.jobs] == [0, 1]
    assert cluster.get_client().submit(lambda: 6).result() == 6


def test_a_dask_scheduler_in_a_job_that_fails_says_why(
    make: Callable[..., Any], home: Path
) -> None:
    with pytest.raises(JobFailedError, match="/nosuch/python"):
        make(scheduler="job", scheduler_options=None, environment={"python": "/nosuch/python"})
    assert calls(home, "sbatch") == 1


@pytest.mark.slow
def test_a_dask_scheduler_in_a_job_ends_when_its_client_was_killed(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    with client_process(home, site(), n=2, wait=2, scheduler="job") as (process, cluster):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        backend.wait_empty(100)
    assert (
        "has been silent for"
        in json.loads((home / ".gpujobs" / cluster / "ended").read_text())["reason"]
    )


# -- attach, scale from the shell ------------------------------------------------------------------------------------
def test_from_name_detaches_and_shuts_down(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    cli = Cli(home, {**backend.env(), "GPUJOBS_SITE": site()}, None)
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1, "workers": {"memory": "1GiB"}}, "--wait")
    one = gpujobs.GPUJobQueueCluster.from_name(cluster)
    two = gpujobs.GPUJobQueueCluster.from_name(cluster)
    assert one.get_client().submit(lambda: 7).result() == 7
    with pytest.raises(InputError, match="can only be adapted by the process that owns it"):
        one.adapt(maximum=4)
    gpus = [gpu for job in one.jobs for gpu in job["gpus"]]  # also of another process' cluster
    assert {gpu["worker"] for gpu in gpus} == {f"{cluster}-0", f"{cluster}-1"}
    assert all(
        gpu["model"] == "Fake GPU" and gpu["memory"] and gpu["node"] in gpu["uuid"] for gpu in gpus
    )
    assert len({gpu["uuid"] for gpu in gpus}) == 2 and "1 Fake GPU" in repr(one.jobs)
    assert "#SBATCH --job-name" in one.job_header.replace("=", " ").replace("-J", "--job-name")
    assert one.job_script().startswith(one.job_header)
    one.scale_up(3)
    two.wait_for_workers(3, timeout=patience(60))
    assert len(two.plan) == 3 and len(two.jobs) == 3
    one.get_client().close()
    one.close()
    time.sleep(3)
    assert cli.status(cluster)["state"] == "RUNNING"  # close detaches
    two.shutdown()
    backend.wait_empty(15)
    assert cli.status(cluster)["state"] == "CANCELLED"


@pytest.mark.slow
def test_an_attached_client_of_an_owned_cluster_leaves_it_alone(make: Callable[..., Any]) -> None:
    cluster = make(scale=1)
    cluster.wait_for_workers(1, timeout=patience(60))
    other = gpujobs.GPUJobQueueCluster.from_name(cluster.id)
    with pytest.raises(InputError, match="is owned by a Python process, which scales it"):
        other.scale(2)
    assert other.observed == cluster.observed
    other.close()
    assert cluster.get_client().submit(lambda: 8).result() == 8
    cluster.scale(2)  # the owner still hears who comes
    until(lambda: len(cluster.observed) == 2, 60)


@pytest.mark.slow
@pytest.mark.stub
def test_the_command_scale_adds_and_removes_jobs(
    site: Callable[..., str], home: Path, backend: SlurmBackend
) -> None:
    cli = Cli(home, {**backend.env(), "GPUJOBS_SITE": site()}, None)
    cluster = cli.submit({"gpus": 4, "gpus_per_job": 2, "workers": {"memory": "1GiB"}}, "--wait")
    assert "7 workers are 4 jobs of 2" in cli("scale", cluster, "7").stderr
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 8, 60)
    assert calls(home, "sbatch") == 2
    head = next(job["number"] for job in cli.status(cluster)["jobs"] if job["head"])
    said = cli("scale", cluster, "0").stderr
    assert "the head's job stays" in said
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 2, 60)
    found = cli.status(cluster)
    assert found["state"] == "RUNNING" and found["workers"]["wanted"] == 2
    until(
        lambda: (
            [job["number"] for job in cli.status(cluster)["jobs"] if job["state"] == "RUNNING"]
            == [head]
        ),
        30,
    )
    backend.kill_job(next(job["id"] for job in found["jobs"] if job["head"]))
    backend.wait_empty(20)
    assert cli("scale", cluster, "4").returncode == 2  # it has ended
