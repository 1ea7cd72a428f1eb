"""End to end on real batch schedulers, with the commands of the installed ``gpujobs``."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ..conftest import BACKENDS, slow_variant
from ..support.backend import Backend
from ..support.cli import ROOT, Cli
from ..support.events import dask_workers
from ..support.processes import patience, processes_with, until
from .programs import SAVE, SLEEP, WHO

ENDED = ("DONE", "FAILED", "CANCELLED")
"""States of a cluster that comes back no more."""


def connected(cli: Cli, cluster: str, count: int, seconds: float = 60) -> None:
    """Wait until ``count`` workers of a cluster are connected."""
    folder = cli.home / ".gpujobs" / cluster
    if folder.exists():  # its file costs nothing to read, `gpujobs status` does
        until(
            lambda: len(dask_workers(folder).connected) >= count or (folder / "ended").exists(),
            seconds,
            lambda: evidence(cli, cluster),
        )

    def found() -> bool:
        report = cli.status(cluster)
        if len(report["workers"]["connected"]) >= count:
            return True
        assert report["state"] not in ENDED, f"{report['reason']}\n{evidence(cli, cluster)}"
        return False

    wanted = f"{count} workers of {cluster}"
    until(found, seconds, lambda: f"{wanted}\n{evidence(cli, cluster)}", every=0.5)


def says(cli: Cli, cluster: str, text: str, seconds: float = 120) -> None:
    """Wait until `run` of a cluster has written ``text``."""
    until(
        lambda: text in cli("logs", cluster).stdout,
        seconds,
        lambda: f"{text!r} from {cluster}\n{evidence(cli, cluster)}",
        every=0.5,
    )


def evidence(cli: Cli, cluster: str) -> str:
    """Return what is known of a cluster."""
    return "\n".join(cli(*words, cluster).stdout for words in (["status"], ["logs", "--all"]))


def state(cli: Cli, cluster: str) -> str:
    return str(cli.status(cluster)["state"])


# -- it works ----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
@pytest.mark.parametrize("cli", ["root"], indirect=True)
@pytest.mark.parametrize("backend", BACKENDS[:1], indirect=True)
def test_the_svd_of_the_examples_runs_as_root(cli: Cli, backend: Backend) -> None:
    test_the_svd_of_the_examples_runs_on_eight_gpus(cli, backend)


@pytest.mark.slow
def test_the_svd_of_the_examples_runs_on_eight_gpus(cli: Cli, backend: Backend) -> None:
    profile = cli.write("quickstart.yaml", (ROOT / "examples" / "quickstart.yaml").read_text())
    (cli.work / "examples").mkdir()
    (cli.work / "examples" / "svd.py").write_text((ROOT / "examples" / "svd.py").read_text())
    settings = [
        "gpus=8",
        "walltime=5m",
        "start_workers=8",
        "run=[python, examples/svd.py, --workers, '8']",
    ]
    done = cli(
        "submit",
        str(profile),
        "--site",
        "here",
        "--wait",
        *[word for s in settings for word in ("--set", s)],
    )
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    assert re.fullmatch(r"quickstart-[0-9a-f]{4}", cluster)  # stdout is data: the id alone
    output = cli("logs", cluster).stdout
    assert "8 workers: 8 CUDA workers, 0 CPU workers" in output
    assert "they agree with the eigenvalues of the Gram matrix" in output
    assert len(cli.status(cluster)["jobs"]) == 2  # several jobs: a head alone would prove nothing
    backend.wait_empty(10, cluster)


@pytest.mark.parametrize("worker_class", ["cuda", slow_variant("nanny")])
@pytest.mark.conformance
def test_workers_are_those_that_plan_promised(
    cli: Cli, backend: Backend, worker_class: str
) -> None:
    profile = {
        "gpus": 4, "gpus_per_job": 2, "start_workers": 4, "run": ["python", "who.py"], "workers": {"worker_class": worker_class},
        "env": {"WANTED": "4", "OWN": "it's; $(here) `too` \"\\ *"},
    }  # fmt: skip
    cli.write("who.py", WHO)
    promised = json.loads(cli("plan", str(cli.write("p.yaml", profile)), "--json").stdout)
    assert promised["gpus"] == promised["workers"] == 4
    cluster = cli.submit(profile, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert found["address"].startswith("tls://")
    assert sorted(found["workers"]) == sorted(
        name.replace("p-0000", cluster) for name in promised["worker_names"]
    )
    by_job: dict[str, list[list[str]]] = {}
    for name, (devices, node, own) in sorted(found["workers"].items()):
        assert own == "it's; $(here) `too` \"\\ *"
        by_job.setdefault(name.rsplit("-", 1)[0], []).append([node, *devices.split(",")])
    assert len(by_job) == 2
    for (node, first, second), (other_node, *others) in by_job.values():
        assert (
            node == other_node
        )  # each worker's own GPU is first, and it sees the other one of its job
        assert others == [second, first]
    gpus = [(node, devices[0]) for job in by_job.values() for node, *devices in job]
    assert len(set(gpus)) == 4  # one worker per GPU
    identities = cli.gpus(cluster)
    assert len({gpu["uuid"] for gpu in identities.values()}) == 4
    assert not backend.fake_gpus or all(
        gpu["model"] == "Fake GPU" and gpu["node"] in gpu["uuid"] for gpu in identities.values()
    )


@pytest.mark.slow
def test_without_run_wait_returns_when_all_are_connected(cli: Cli, backend: Backend) -> None:
    site = str(cli.write("s.yaml", cli.site | {"defaults": {"walltime": "10m"}}))
    profile = cli.write("p.yaml", {"gpus": 2, "gpus_per_job": 1})
    done = cli("submit", str(profile), "--site", site, "--wait")
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    assert "all 2 workers are connected" in done.stderr
    assert re.search(r"^0/2 workers, .*\d\d:\d\d$", done.stderr, re.M)
    assert state(cli, cluster) == "RUNNING"
    code = f"import gpujobs; c = gpujobs.connect('{cluster}'); print(c.submit(lambda x: x + 1, 41).result())"
    found = cli.python_run(code)
    assert found.stdout.strip() == "42", found.stderr
    gpu = cli.gpus(cluster)[f"{cluster}-1"]
    row = rf"^{cluster}-1 +{gpu['node']} +{gpu['model']} +{gpu['uuid']} +\d+ ?[GM]iB( +\d+ % +\S+)?( +\d[\d,-]*…? +\S+)?$"
    assert re.search(row, cli("status", cluster).stdout, re.M)
    lines = cli("connect", cluster).stdout
    assert f'gpujobs.connect("{cluster}")' in lines and "ssh -N -L" in lines and "/status" in lines
    exports = cli("connect", cluster, "--env").stdout
    script = f"{exports}\n{cli.python} -c 'from distributed import Client; print(Client().submit(sum, [1, 2]).result())'"
    assert (
        cli.python_run(
            "import subprocess, sys; sys.exit(subprocess.call(['bash', '-c', sys.argv[1]]))", script
        ).stdout
        == "3\n"
    )
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(10, cluster)
    assert state(cli, cluster) == "CANCELLED"


@pytest.mark.stub
def test_jobs_inherit_nothing_of_the_shell(cli: Cli, backend: Backend) -> None:
    cli.env["SECRET_OF_THE_SHELL"] = "seen"
    cli.env["SBATCH_PARTITION"] = "nosuch"
    cluster = cli.submit({"gpus": 1, "run": ["env"]}, "--wait")
    seen = cli("logs", cluster).stdout
    assert "SECRET_OF_THE_SHELL" not in seen
    assert f"GPUJOBS_CLUSTER={cluster}" in seen


@pytest.mark.slow
def test_a_head_of_its_own_has_no_workers(cli: Cli, backend: Backend) -> None:
    profile = {
        "gpus": 2, "gpus_per_job": 1, "start_workers": 2, "run": ["python", "who.py"], "env": {"WANTED": "2"},
        "head": {"queue": "cpu", "cpus": 1, "memory": "512MiB"},
    }  # fmt: skip
    cli.write("who.py", WHO)
    cluster = cli.submit(profile, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert sorted(found["workers"]) == [f"{cluster}-0", f"{cluster}-1"]
    jobs = cli.status(cluster)["jobs"]
    assert [job["head"] for job in jobs] == [True, False, False]
    assert jobs[0]["workers"] == []


@pytest.mark.slow
def test_cpu_workers_have_no_gpu(cli: Cli, backend: Backend) -> None:
    profile = {
        "gpus": 0,
        "workers": {"count": 2, "threads": 2, "memory": "1GiB"},
        "start_workers": 2,
        "run": ["python", "who.py"],
        "env": {"WANTED": "2"},
    }
    cli.write("who.py", WHO)
    cluster = cli.submit(profile, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert {name: value[0] for name, value in found["workers"].items()} == {
        f"{cluster}-0": "",
        f"{cluster}-1": "",
    }


# -- what is told ------------------------------------------------------------------------------------------------
@pytest.mark.conformance
@pytest.mark.stub
def test_status_follows_a_cluster_from_pending_to_done(cli: Cli, backend: Backend) -> None:
    cli.write("sleep.py", SLEEP)
    everything = backend.nodes * backend.gpus_per_node
    first = cli.submit(
        {"gpus": everything, "run": ["python", "sleep.py", "600"], "start_workers": 1},
        name="first.yaml",
    )
    until(lambda: any(job["state"] == "RUNNING" for job in cli.status(first)["jobs"]), 30)
    second = cli.submit({"gpus": 4, "run": ["python", "sleep.py", "0"]}, name="second.yaml")
    of_a_site = not backend.same_host  # it need not report a reason

    def waits(job: dict[str, Any]) -> bool:
        return job["state"] == "PENDING" and bool(job["reason"] or of_a_site)

    until(lambda: all(map(waits, cli.status(second)["jobs"])), 30)
    assert state(cli, second) == "PENDING"
    listed = cli("status").stdout
    assert re.search(rf"{first} +here +(STARTING|RUNNING)", listed) and re.search(
        rf"{second} +here +PENDING", listed
    )
    says(cli, first, "here")
    assert cli("cancel", first).returncode == 0
    until(lambda: state(cli, second) == "DONE", 90)
    assert cli.status(second)["exit_code"] == 0
    assert cli("logs", second).stdout == "here\n"
    backend.wait_empty(15)
    assert second not in cli("status").stdout
    assert second in cli("status", "--all").stdout
    assert {job["state"] for job in cli.status(second)["jobs"]} == {"COMPLETED"}


@pytest.mark.conformance
@pytest.mark.stub
def test_the_exit_code_of_the_command_is_reported(cli: Cli, backend: Backend) -> None:
    code = "import sys; print('it is bad', file=sys.stderr); sys.exit(7)"
    done = cli(
        "submit", str(cli.write("p.yaml", {"gpus": 1, "run": ["python", "-c", code]})), "--wait"
    )
    assert done.returncode == 5
    assert "run: ended with exit code 7: it is bad" in done.stderr
    cluster = done.stdout.strip()
    assert cli.status(cluster)["exit_code"] == 7
    assert state(cli, cluster) == "FAILED"


@pytest.mark.stub
def test_ctrl_c_leaves_the_cluster_alone(cli: Cli, backend: Backend) -> None:
    cli.write("sleep.py", SLEEP)
    waiting, cluster = cli.start_submit({"gpus": 1, "run": ["python", "sleep.py", "600"]})
    connected(cli, cluster, 1)
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=patience(20))
    assert waiting.returncode == 130
    assert f"gpujobs cancel {cluster}" in said
    assert state(cli, cluster) == "RUNNING"
    cli("cancel", cluster)
    backend.wait_empty(10, cluster)


# -- what fails is told soon -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"python": "/nosuch/python"}, r"could not start, or was killed \(exit code 127\)"),
        slow_variant({"setup": "exit 3"}, r"could not start, or was killed \(exit code 3\)"),
        slow_variant({"setup": "export PYTHONPATH=/nosuch PYTHONHOME=/nosuch"}, "could not start"),
    ],
    ids=["no-python", "setup-exits", "python-broken"],
)
@pytest.mark.stub
def test_a_broken_environment_ends_the_cluster(
    cli: Cli, backend: Backend, environment: dict[str, str], said: str
) -> None:
    profile = cli.write("p.yaml", {"gpus": 8, "gpus_per_job": 1, "environment": environment})
    done = cli("submit", str(profile), "--wait")
    assert done.returncode == 5
    assert re.search(said, done.stderr)
    backend.wait_empty(15, done.stdout.strip())
    assert re.search(said, cli("status", done.stdout.strip()).stdout)


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"env": {"FAKE_NVML_GPUS": "0"}}, "worker .* ended .exit code 1."),
        slow_variant({"gpus": 2, "env": {"FAKE_NVML_GPUS": "1"}}, "worker .* ended .exit code 1."),
        slow_variant({"workers": {"options": {"pid_file": "/nosuch/w.pid"}}}, "nosuch/w.pid"),
        slow_variant({"env": {"PYTHONPATH": "broken"}}, "broken on purpose"),
    ],
    ids=["no-gpu", "one-gpu-of-two", "wrong-option", "broken-dask-cuda"],
)
def test_workers_that_cannot_start_end_the_cluster(
    cli: Cli, backend: Backend, profile: dict[str, object], said: str
) -> None:
    broken = cli.work / "broken" / "dask_cuda"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('broken on purpose')\n")
    started = time.monotonic()
    done = cli("submit", str(cli.write("p.yaml", {"gpus": 8, **profile})), "--wait")
    assert done.returncode == 5, done.stderr
    assert re.search(said, done.stderr), done.stderr
    backend.wait_empty(15, done.stdout.strip())
    assert time.monotonic() - started < 240  # not after `start_timeout`, 300 s


@pytest.mark.conformance
@pytest.mark.stub(others=True)
def test_a_dead_dask_scheduler_ends_the_cluster(cli: Cli, backend: Backend) -> None:
    cluster = cli.submit({"gpus": 4, "gpus_per_job": 2})
    connected(cli, cluster, 4)
    killed = [
        pid
        for pid in processes_with(f"{cluster}/scheduler.json")
        if "dask_scheduler" in _command(pid) and "supervise" not in _command(pid)
    ]
    if not killed and not backend.same_host:
        pytest.skip("its jobs run on other hosts")
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    backend.wait_empty(15, cluster)
    found = cli.status(cluster)
    assert found["state"] == "FAILED"
    assert re.match(r"the dask scheduler on \S+ ended \(exit code 137\)", found["reason"])


@pytest.mark.slow
@pytest.mark.stub(others=True)
def test_killed_nannies_end_the_cluster(cli: Cli, backend: Backend) -> None:
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1})
    connected(cli, cluster, 2)
    other = next(job["number"] for job in cli.status(cluster)["jobs"] if not job["head"])
    nannies = [
        pid
        for pid in processes_with(f"--name\0{cluster}-{other}\0")
        if "dask_cuda" in _command(pid)
    ]
    for pid in nannies:
        os.kill(pid, signal.SIGKILL)
    backend.wait_empty(15, cluster)
    assert f"worker {cluster}-{other} on" in cli.status(cluster)["reason"]


@pytest.mark.slow
@pytest.mark.stub(others=True)
def test_a_killed_supervisor_ends_the_cluster(cli: Cli, backend: Backend) -> None:
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1})
    connected(cli, cluster, 2)
    head = next(job["number"] for job in cli.status(cluster)["jobs"] if job["head"])
    for pid in processes_with(f"GPUJOBS_JOB={head}\0"):
        if f"{cluster}/injob.pyz\0supervise" in _command(pid):
            os.kill(pid, signal.SIGKILL)
    backend.wait_empty(20, cluster)
    assert "exit code 137" in cli.status(cluster)["reason"]


@pytest.mark.parametrize("role", ["head", slow_variant("workers")])
@pytest.mark.stub(others=True)
def test_a_killed_batch_script_leaves_no_process(cli: Cli, backend: Backend, role: str) -> None:
    """A batch scheduler without cgroups kills only the script, and gives its GPUs to others."""
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1})
    connected(cli, cluster, 2)
    jobs = cli.status(cluster)["jobs"]
    killed = next(job["number"] for job in jobs if job["head"] is (role == "head"))
    supervisors = [
        pid
        for pid in processes_with(f"GPUJOBS_JOB={killed}\0")
        if f"{cluster}/injob.pyz\0supervise" in _command(pid)
    ]
    assert len(supervisors) == 1
    os.kill(_parent(supervisors[0]), signal.SIGKILL)
    mark = f"GPUJOBS_JOB={killed}\0" if role == "workers" else cluster
    until(lambda: not [pid for pid in processes_with(mark) if cluster in _environ(pid)], 15)
    if role == "head":
        assert state(cli, cluster) == "FAILED"
        if backend.name == "slurm":  # the others kill the supervisor before it can report that
            assert "its batch script was killed" in cli.status(cluster)["reason"]
    else:
        assert state(cli, cluster) == "RUNNING"  # one worker less is no reason to end the others
        cli("cancel", cluster)
    backend.wait_empty(60, cluster)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _environ(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


# -- cancel ------------------------------------------------------------------------------------------------------
@pytest.mark.conformance
@pytest.mark.stub
def test_a_cancel_of_pending_jobs_empties_the_queue(cli: Cli, backend: Backend) -> None:
    everything = backend.nodes * backend.gpus_per_node
    first = cli.submit({"gpus": everything}, name="first.yaml")
    until(lambda: any(job["state"] == "RUNNING" for job in cli.status(first)["jobs"]), 30)
    second = cli.submit({"gpus": 8}, name="second.yaml")
    assert cli("cancel", second).returncode == 0
    backend.wait_empty(10, second)
    assert state(cli, second) == "CANCELLED"
    assert {job["state"] for job in cli.status(second)["jobs"]} == {"CANCELLED"}
    assert cli("cancel", second).returncode == 0  # again: fine
    assert cli("cancel", first).returncode == 0
    backend.wait_empty(15)


@pytest.mark.conformance("sge")
@pytest.mark.stub(others=True)
def test_cancel_while_running_ends_every_process(cli: Cli, backend: Backend) -> None:
    """`run` gets SIGTERM once, and has the time to save its state."""
    cli.write("save.py", SAVE)
    seconds = "3" if backend.name == "slurm" else "6"  # the tests' Slurm kills after 5 s
    run = ["python", "save.py", seconds]
    cluster = cli.submit({"gpus": 4, "gpus_per_job": 2, "run": run})
    says(cli, cluster, "here")
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(15, cluster)
    until(lambda: not processes_with(cluster), 10)
    assert state(cli, cluster) == "CANCELLED"
    assert cli("logs", cluster).stdout == "here\nSIGTERM\nsaved\n"


@pytest.mark.conformance
@pytest.mark.stub
def test_a_job_that_is_cancelled_behind_our_back_is_missing(cli: Cli, backend: Backend) -> None:
    cluster = cli.submit({"gpus": 3, "gpus_per_job": 1})
    connected(cli, cluster, 3)
    other = next(job for job in cli.status(cluster)["jobs"] if not job["head"])
    backend.kill_job(other["id"])
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 2, 30)
    found = cli.status(cluster)
    assert found["state"] == "RUNNING"  # one worker less is no reason to end the others
    until(lambda: cli.status(cluster)["jobs"][other["number"]]["state"] == "CANCELLED", 30)
    assert f"missing: {cluster}-{other['number']}" in cli("status", cluster).stdout
    head = next(job for job in found["jobs"] if job["head"])
    backend.kill_job(head["id"])
    backend.wait_empty(30, cluster)
    found = cli.status(cluster)
    assert (found["state"], found["kind"]) == ("CANCELLED", "cancelled")
    assert found["reason"].startswith("the head's job was stopped: it received ")


# -- limits of time ------------------------------------------------------------------------------------------------
@pytest.mark.slow  # it takes a minute, or two; `-m conformance --site` includes it
@pytest.mark.waits
@pytest.mark.conformance
@pytest.mark.stub
def test_the_command_is_warned_before_the_walltime(cli: Cli, backend: Backend) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: (print('saved', flush=True), sys.exit(3))); time.sleep(600)"
    walltime = "1m" if backend.same_host else "2m"  # nodes of others start more slowly
    profile = {"gpus": 1, "walltime": walltime, "run": ["python", "-c", code]}
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait", timeout=240)
    assert done.returncode == 5
    reason = "the head's job was stopped: the walltime is nearly over; run: ended with exit code 3"
    assert reason in done.stderr
    cluster = done.stdout.strip()
    assert cli("logs", cluster).stdout == "saved\n"  # the command was warned
    found = cli.status(cluster)
    assert (found["kind"], found["reason"], found["state"]) == ("walltime", reason, "FAILED")
    backend.wait_empty(30)


@pytest.mark.slow
@pytest.mark.stub
def test_a_setup_that_fails_is_said_at_once(cli: Cli, backend: Backend) -> None:
    setup = "source venv/bin/activate\nexport OMP_NUM_THREADS=1"
    environment = {"setup": setup, "python": cli.python}
    profile = {"gpus": 1, "environment": environment, "run": "echo here"}
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if "activate" in line]
    assert notes == [
        f"setup: there is no {cli.work}/venv/bin/activate on this host; the nodes need it",
        "note: setup: source venv/bin/activate failed (exit code 1)",
    ]
    cluster = done.stdout.strip()
    assert "setup: source venv/bin/activate failed (exit code 1)" in cli.status(cluster)["notes"]
    backend.wait_empty(20, cluster)


@pytest.mark.slow
@pytest.mark.stub
def test_a_program_that_waits_for_another_dask_scheduler_is_noted(
    cli: Cli, backend: Backend
) -> None:
    setup = "export GPUJOBS_NO_CLIENT_SECONDS=3\ntrap 'touch left' EXIT"
    environment = {"setup": setup, "python": cli.python}
    cluster = cli.submit({"gpus": 1, "environment": environment, "run": ["sleep", "600"]})
    note = "run: has had no client for 0.05 min"
    until(lambda: any(note in one for one in cli.status(cluster)["notes"]), 60, "the note")
    assert f"gpujobs: {note}" in cli("logs", cluster).stdout
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(30, cluster)
    assert cli.status(cluster)["reason"] == "cancelled by gpujobs"
    assert (cli.work / "left").exists()


# -- the batch scheduler says no, or nothing -------------------------------------------------------------------------
@pytest.mark.conformance("sge", "pbs")
@pytest.mark.stub
def test_a_refused_submission_leaves_nothing(cli: Cli, backend: Backend) -> None:
    site = cli.site
    site["queues"] = {"nosuch": {**site["queues"]["main"], "name": "nosuch"}}
    done = cli(
        "submit",
        str(cli.write("p.yaml", {"gpus": 8})),
        "--site",
        str(cli.write("broken.yaml", site)),
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "refused the job" in done.stderr and re.search(
        "nosuch|queue", done.stderr
    )  # PBS does not say which
    assert backend.queue() == []
    assert not list((cli.home / ".gpujobs").iterdir())
    assert cli("status", "--all").stdout == ""


@pytest.mark.slow
@pytest.mark.stub
def test_a_cluster_survives_an_outage_of_the_batch_scheduler(cli: Cli, backend: Backend) -> None:
    import threading

    away = threading.Thread(target=backend.pause, args=(20,))
    away.start()
    time.sleep(0.5)
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1})
    away.join()
    connected(cli, cluster, 2)
    assert (
        len([line for line in backend.queue() if cluster in line]) == 2
    )  # submitted once, although a reply was lost
    away = threading.Thread(target=backend.pause, args=(20,))
    away.start()
    time.sleep(0.5)
    found = cli.status(
        cluster
    )  # waits, or says that nobody answers; it does not say that the jobs are over
    assert found["state"] == "RUNNING"
    assert {job["state"] for job in found["jobs"]} <= {"RUNNING", "UNKNOWN"}
    assert cli("cancel", cluster).returncode == 0
    away.join()
    backend.wait_empty(15, cluster)
