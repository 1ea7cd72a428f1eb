"""What only Slurm has: requeue, accounting, arrays larger than its limit, its own states."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpujobs.schedulers import CommandResult, Reply
from gpujobs.schedulers.slurm import Slurm

from ..conftest import fresh_folder, make_cli, nothing_left, slow_variant, unavailable
from ..support import slurm as slurm_support
from ..support.backend import SlurmBackend
from ..support.cli import ORDINARY_USER, Cli
from ..support.events import dask_workers
from ..support.jobevents import events_of, facts_of, has_left
from ..support.on_slurm import backend  # noqa: F401
from ..support.processes import as_user, patience, processes_with, until
from ..support.slurm_faults import failing_prolog
from .programs import SLEEP
from .test_clusters import connected

pytestmark = pytest.mark.slurm


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.stub
def test_a_requeued_worker_comes_back(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1})
    connected(cli, cluster, 2)
    other = next(job for job in cli.status(cluster)["jobs"] if not job["head"])
    backend.slurm.command("scontrol", "requeue", other["id"])
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 1, 30)
    # A requeued job waits for two minutes by default; nothing else happens meanwhile.
    assert cli.status(cluster)["state"] == "RUNNING"
    until(lambda: cli.status(cluster)["jobs"][other["number"]]["state"] == "PENDING", 30)
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 2, 200, every=2)
    cli("cancel", cluster)
    backend.wait_empty(15)


@pytest.mark.stub
def test_a_requeued_head_ends_the_cluster(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1})
    connected(cli, cluster, 2)
    head = next(job for job in cli.status(cluster)["jobs"] if job["head"])
    backend.slurm.command("scontrol", "requeue", head["id"])
    until(lambda: cli.status(cluster)["state"] == "CANCELLED", 30)
    assert "the head's job was stopped" in cli.status(cluster)["reason"]
    backend.wait_empty(200)  # when it starts again it finds that the cluster has ended


@pytest.mark.slow
def test_worker_job_that_cannot_reach_the_head_names_both_hosts(
    cli: Cli, backend: SlurmBackend
) -> None:
    if subprocess.run(["unshare", "-rn", "true"], check=False, **as_user(cli.user)).returncode:
        pytest.skip("no network namespaces here")
    # Job 1 runs in a network namespace of its own, where there is nothing but itself.
    wrapper = cli.work / "python"
    wrapper.write_text(
        f'#!/bin/bash\n[ "$GPUJOBS_JOB" = 0 ] || alone="unshare -rn"\nexec $alone {cli.python} "$@"\n'
    )
    wrapper.chmod(0o755)
    # The first job to start is the head: the other one waits for it.
    setup = '[ "$GPUJOBS_JOB" = 0 ] || until [ -e "$GPUJOBS_FOLDER/scheduler.json" ]; do sleep 0.2; done'
    environment = {"setup": setup, "python": str(wrapper)}
    profile = {
        "gpus": 8,
        "gpus_per_job": 4,
        "start_workers": 8,
        "run": ["true"],
        "environment": environment,
    }
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 5
    cluster = done.stdout.strip()
    line = rf"{cluster}-1: compute node (node\d) cannot reach the dask scheduler at tls://\S+ on (node\d); set `network.interface`"
    found = re.search(line, done.stderr)
    assert found and found[1] != found[2], done.stderr
    folder = cli.home / ".gpujobs" / cluster
    (began,) = [event["at"] for event in events_of(folder, 1) if event["event"] == "started"]
    left = facts_of(folder, 1).left
    assert left and left.at  # in whole seconds
    assert left.at + 1 - began >= 30 and left.at - began < 60
    backend.wait_empty(15)


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_named(cli: Cli, backend: SlurmBackend) -> None:
    done = cli(
        "submit", str(cli.write("p.yaml", {"gpus": 1, "network": {"interface": "ib7"}})), "--wait"
    )
    assert done.returncode == 5
    assert re.search(
        r"node\d has no interface ib7; it has .*lo.* \(`network.interface`\)", done.stderr
    )
    backend.wait_empty(15)


RANDOM = """
import os, sys, time, gpujobs
from pathlib import Path

def draw(n, path):
    with open(path, "a") as file:
        file.write("x")
    return os.urandom(100)

if __name__ == "__main__":
    cluster, path = sys.argv[1:]
    with gpujobs.connect(cluster) as client:
        futures = client.map(draw, range(40), path=path)
        before = client.gather(futures)
        assert len({tuple(where) for where in client.who_has().values()}) == 2  # both workers have some
        print("ready", flush=True)
        input()
        while len(client.nthreads()) > 1:
            time.sleep(0.2)
        assert client.gather(futures) == before, "the values are other ones"
        print("the same,", Path(path).stat().st_size, "calls")
"""


def data_is_kept(cli: Cli, cluster: str, stop: Callable[[], object]) -> None:
    """Stop the job of one of two workers with ``stop``; its data is on the other one then."""
    script = cli.write("draw.py", RANDOM)
    client = subprocess.Popen(
        [cli.python, script, cluster, str(cli.work / "calls")], env=cli.env, cwd=cli.work, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **as_user(cli.user),
    )  # fmt: skip
    assert client.stdout and client.stdout.readline() == "ready\n"
    stop()
    out, err = client.communicate("go on\n", timeout=patience(60))
    assert out == "the same, 40 calls\n", err


@pytest.fixture
def usual_kill_wait(backend: SlurmBackend) -> Iterator[None]:
    with backend.slurm.setting("KillWait", 30):
        yield


@pytest.mark.parametrize(
    "options",
    [["--batch", "--signal=TERM"], slow_variant([])],
    ids=["preempted softly", "cancelled by hand"],
)
def test_worker_job_that_is_stopped_hands_its_data_over(
    cli: Cli, backend: SlurmBackend, usual_kill_wait: None, options: list[str]
) -> None:
    """Slurm sends SIGTERM to the batch script, or to all processes of the job.

    The job leaves before the SIGKILL, and long before the time is over that its workers have to
    transfer their data.
    """
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 1}, "--wait")
    other = next(job for job in cli.status(cluster)["jobs"] if not job["head"])
    data_is_kept(cli, cluster, lambda: backend.slurm.command("scancel", *options, other["id"]))
    until(lambda: cli.status(cluster)["jobs"][other["number"]]["state"] == "CANCELLED", 30)
    found = cli.status(cluster)
    assert found["state"] == "RUNNING" and len(found["workers"]["connected"]) == 1
    folder = Path(found["folder"])
    until(lambda: has_left(folder, other["number"]), 10)
    left = facts_of(folder, other["number"]).left
    assert left and left.exit_code == 143
    log = folder / "logs" / f"job-{other['number']}.log"
    assert f"stopping (SIGTERM): {cluster}-{other['number']}" in log.read_text()
    cli("cancel", cluster)
    backend.wait_empty(15)


PREEMPTION = """
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
KillWait=30
PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=10 PreemptMode=CANCEL State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["", "SlurmctldParameters=preempt_send_user_signal"])
def test_worker_job_that_is_preempted_hands_its_data_over(
    shared_folder: Path, home: Path, parameters: str
) -> None:
    """At the beginning of its grace time, or at the end of it if Slurm sends no signal before."""
    if why := slurm_support.missing():
        unavailable("slurm", why)
    folder = fresh_folder(shared_folder, "slurm-preempts")
    extra = f"{PREEMPTION}{parameters}\n"
    with slurm_support.PrivateSlurm(folder / "s", nodes=2, gpus=1, extra=extra).running() as slurm:
        backend = SlurmBackend(slurm)
        cli = make_cli(backend, home, "ordinary")
        queue = {"gpus_per_node": 1, "cpus_per_node": 16, "memory_per_node": "16GiB"}
        cli.write("low.yaml", backend.site() | {"queues": {"low": queue}})
        checked = cli("sites", "check", "./low.yaml", "--live")
        assert ("in low, jobs get SIGTERM only when" in checked.stdout) is not bool(parameters)
        profile = {"gpus": 2, "gpus_per_job": 1, "walltime": "5m"}
        cluster = cli.submit(profile, "--site", "./low.yaml", "--wait")
        other = next(job for job in cli.status(cluster)["jobs"] if not job["head"])
        high = ["sbatch", "-p", "high", "-w", other["node"], "--exclusive", "-o", "/dev/null"]
        data_is_kept(cli, cluster, lambda: slurm.command(*high, "--wrap", "sleep 1"))
        cli("cancel", cluster)
        nothing_left(backend)


@pytest.mark.stub
def test_the_option_export_none_runs_a_job(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit(
        {"gpus": 1, "directives": ["--export=NONE"], "run": ["python", "-c", "print('ran')"]},
        "--wait",
    )
    assert cli("logs", cluster).stdout == "ran\n"


@pytest.mark.stub
def test_an_array_over_the_limit_is_several_arrays(cli: Cli, backend: SlurmBackend) -> None:
    site = cli.site | {"max_array_size": 2}
    path = str(cli.write("chunks.yaml", site))
    profile = str(cli.write("p.yaml", {"gpus": 5, "gpus_per_job": 1}))
    done = cli("submit", profile, "--site", path, "--wait")
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    found = cli.status(cluster)
    assert found["workers"]["connected"] == [f"{cluster}-{n}" for n in range(5)]
    assert len({job["id"].split("_")[0] for job in found["jobs"]}) == 3
    cli("cancel", cluster)
    backend.wait_empty(15)


@pytest.mark.stub
def test_a_refused_second_array_leaves_nothing(cli: Cli, backend: SlurmBackend) -> None:
    # sbatch is a script here that lets one submission through and refuses the next as a site's limit does.
    real = backend.slurm.command("which", "sbatch").strip()
    wrapper = cli.work / "sbatch"
    wrapper.write_text(
        f'#!/bin/bash\n[ -e {cli.work}/used ] && {{ echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1; }}\n'
        f'touch {cli.work}/used\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    site = cli.site | {"max_array_size": 3, "commands": {"sbatch": str(wrapper)}}
    done = cli(
        "submit",
        str(cli.write("p.yaml", {"gpus": 8, "gpus_per_job": 1})),
        "--site",
        str(cli.write("s.yaml", site)),
    )
    assert done.returncode == 1
    assert "QOSMaxSubmitJobPerUserLimit" in done.stderr
    backend.wait_empty(15)
    assert not list((cli.home / ".gpujobs").iterdir())


@pytest.mark.stub
def test_a_cluster_survives_a_failed_node_of_its_workers(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit(
        {"gpus": 8, "gpus_per_job": 4, "directives": ["--no-requeue"]}
    )  # two whole nodes
    connected(cli, cluster, 8)
    jobs = cli.status(cluster)["jobs"]
    other = next(job for job in jobs if not job["head"])
    head = next(job for job in jobs if job["head"])
    assert other["node"] != head["node"]
    backend.slurm.command(
        "scontrol", "update", f"NodeName={other['node']}", "State=DOWN", "Reason=test"
    )
    try:
        until(lambda: cli.status(cluster)["jobs"][other["number"]]["state"] == "NODE_FAIL", 40)
        assert cli.status(cluster)["state"] == "RUNNING"
        cli("cancel", cluster)
        backend.wait_empty(30)
    finally:
        backend.slurm.command("scontrol", "update", f"NodeName={other['node']}", "State=RESUME")


def test_an_estimate_has_a_start_or_the_reason(cli: Cli, backend: SlurmBackend) -> None:
    profile = str(cli.write("p.yaml", {"gpus": 4}))
    assert re.search(r"^start: \d{4}-\d\d-\d\dT", cli("plan", profile, "--estimate").stdout, re.M)
    words = ("plan", profile, "--estimate", "--json", "--set", "directives=[--nodelist=node99]")
    impossible = cli(*words)
    assert impossible.returncode == 1 and "nvalid node" in impossible.stderr
    assert json.loads(impossible.stdout)["estimated_start"] is None


def test_missing_command_names_the_site_key(cli: Cli, backend: SlurmBackend) -> None:
    site = cli.site | {"commands": {"sbatch": "/nosuch/sbatch"}}
    done = cli(
        "submit", str(cli.write("p.yaml", {"gpus": 1})), "--site", str(cli.write("s.yaml", site))
    )
    assert done.returncode == 3
    assert "commands: {sbatch: /path/to/sbatch}" in done.stderr
    assert cli("status", "--all", "--json").stdout.count('"id"') == 0


@pytest.mark.parametrize(
    "message",
    [
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: fatal: Could not establish a configuration source",
        slow_variant("pbsconf error: pbs conf variables not found: PBS_HOME PBS_EXEC PBS_SERVER"),
        slow_variant("lsb_init: Failed in an LSF library call: Unable to open file lsf.conf"),
        slow_variant('error: SGE_ROOT directory "/opt/sge" doesn\'t exist'),
    ],
)
def test_a_host_without_configuration_is_no_login_node(
    cli: Cli, backend: SlurmBackend, message: str
) -> None:
    """The messages are those of the real commands without a configuration."""
    wrapper = cli.work / "sbatch"
    wrapper.write_text(f"#!/bin/bash\ncat >&2 <<'END'\n{message}\nEND\nexit 1\n")
    wrapper.chmod(0o755)
    site = cli.site | {"commands": {"sbatch": str(wrapper)}}
    profile = str(cli.write("p.yaml", {"gpus": 1}))
    done = cli("submit", profile, "--site", str(cli.write("s.yaml", site)))
    assert done.returncode == 3
    assert f"sbatch is not configured on this host:\n{message}" in done.stderr
    assert "is this a login node?" in done.stderr and "cancel" not in done.stderr
    assert cli("status", "--all", "--json").stdout.count('"id"') == 0


@pytest.mark.slow
@pytest.mark.stub
def test_closing_the_terminal_changes_nothing(cli: Cli, backend: SlurmBackend) -> None:
    cli.write("sleep.py", SLEEP)
    waiting, cluster = cli.start_submit({"gpus": 1, "run": ["python", "sleep.py", "5"]})
    waiting.send_signal(signal.SIGHUP)
    waiting.communicate(timeout=patience(20))
    until(lambda: cli.status(cluster)["state"] == "DONE", 60)
    backend.wait_empty(15)


OWNER = """
import sys, time, gpujobs
if __name__ == "__main__":
    cluster = gpujobs.GPUSLURMCluster(
        "here", n_workers=1, quiet=True, worker_memory="1GiB", python=sys.argv[1],
        scheduler_options={"dashboard_address": ":0"})
    print(cluster.id, flush=True)
    time.sleep(600)
"""


@pytest.mark.waits
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["starting", "restarted"])
def test_workers_whose_owner_died_say_that_it_is_gone(
    cli: Cli, backend: SlurmBackend, workers: str
) -> None:
    slow = cli.work / "python"
    sleep = "case $2 in workers) exec sleep 600;; esac\n" if workers == "starting" else ""
    slow.write_text(f'#!/bin/bash\n{sleep}exec {cli.python} "$@"\n')
    slow.chmod(0o755)
    owner = subprocess.Popen(
        [cli.python, cli.write("owner.py", OWNER), slow], env=cli.env, cwd=cli.work, text=True,
        stdout=subprocess.PIPE, **as_user(cli.user),
    )  # fmt: skip
    assert owner.stdout
    cluster = owner.stdout.readline().strip()
    mark = f"GPUJOBS_CLUSTER={cluster}\0"
    if workers == "starting":
        until(lambda: any("sleep\x00600" in command(pid) for pid in processes_with(mark)), 60)
    else:
        folder = cli.home / ".gpujobs" / cluster
        until(lambda: dask_workers(folder).connected, 60)
        for pid in forked_workers(mark):  # the nanny starts another one
            os.kill(pid, signal.SIGKILL)
    owner.kill()
    owner.communicate()
    backend.wait_empty(160)
    until(lambda: not processes_with(mark), 10)
    log = (cli.home / ".gpujobs" / cluster / "logs" / "job-0.log").read_text()
    assert re.search(r"gpujobs: .* the dask scheduler at \S+ is gone", log)


def forked_workers(mark: str) -> list[int]:
    """Return the workers of a job: children of the server that the process of its nannies forked."""
    parents = {
        pid: psutil.Process(pid).ppid()
        for pid in processes_with(mark)
        if "injob.pyz\0workers" in command(pid)
    }
    found = [pid for pid, parent in parents.items() if parents.get(parent) in parents]
    assert found
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


# -- accounting ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="session")
def with_accounting(shared_folder: Path) -> Iterator[SlurmBackend]:
    if why := slurm_support.missing():
        unavailable("slurm", why)
    for program in ("mariadbd", "slurmdbd"):
        if not shutil.which(program, path=f"/usr/bin:{slurm_support.SBIN}"):
            unavailable("slurm", f"{program} is not installed")
    extra = "MinJobAge=2\nAccountingStorageEnforce=limits\nAccountingStorageTRES=gres/gpu"
    with slurm_support.PrivateSlurm(
        shared_folder / "slurm-acct", nodes=1, extra=extra, accounting=True
    ).running() as running:
        running.command("sacctmgr", "-i", "add", "account", "physics")
        for user in {"root", ORDINARY_USER}:
            running.command("sacctmgr", "-i", "add", "user", user, "account=physics")
        yield SlurmBackend(running)


@pytest.mark.slow
def test_accounting_knows_jobs_that_left_the_queue(
    with_accounting: SlurmBackend, home: Path
) -> None:
    cli = make_cli(with_accounting, home, "ordinary")
    slurm = with_accounting.slurm
    cluster = cli.submit({"gpus": 2, "gpus_per_job": 2})
    connected(cli, cluster, 2)
    job, folder = cli.status(cluster)["jobs"][0]["id"], Path(cli.status(cluster)["folder"])
    with_accounting.kill_job(job)
    with_accounting.wait_empty(30)
    for path in (folder / "ended", *(folder / "jobs").iterdir()):
        path.unlink()  # as if the node had died: nothing but accounting knows how it ended
    until(lambda: not slurm.command("squeue", "-h", "-t", "all").strip(), 120, every=1)
    until(
        lambda: "CANCELLED" in slurm.command("sacct", "-n", "-X", "-j", job, "-o", "State%20"), 30
    )
    found = cli.status(cluster)
    assert [(job["state"], job["native"]) for job in found["jobs"]] == [("CANCELLED", "CANCELLED")]
    assert found["state"] == "CANCELLED"


@pytest.mark.slow
def test_the_draft_of_a_site_has_accounts_and_limits(
    with_accounting: SlurmBackend, home: Path
) -> None:
    slurm = with_accounting.slurm
    slurm.command("sacctmgr", "-i", "add", "qos", "three", "MaxTRESPerUser=gres/gpu=3")
    slurm.command("scontrol", "update", "PartitionName=short", "QoS=three")
    cli = make_cli(with_accounting, home, "ordinary")
    assert cli("sites", "init", "-o", "drafted.yaml").returncode == 0
    text = (cli.work / "drafted.yaml").read_text()
    assert "account: {required: true}   # of this user: physics\n" in text
    assert re.findall(r"^  (\w+): .*max_gpus_per_user: (\d)", text, re.M) == [("short", "3")]
    done = cli("sites", "check", "./drafted.yaml", "--live", "--set", "account=physics")
    assert done.returncode == 0, done.stdout + done.stderr
    profile = str(cli.write("p.yaml", {"gpus": 4, "queue": "short", "account": "physics"}))
    done = cli("plan", profile, "--site", "./drafted.yaml", "--set", "walltime=5m")
    assert done.returncode == 2 and "4 GPUs; the queue allows 3 GPUs of one user" in done.stderr


@pytest.mark.stub
def test_without_accounting_an_unlisted_job_is_unknown(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit({"gpus": 1})
    connected(cli, cluster, 1)
    number = cli.status(cluster)["jobs"][0]["id"]
    ledger = cli.home / ".local" / "state" / "gpujobs" / "clusters" / f"{cluster}.json"
    folder = cli.home / ".gpujobs" / cluster
    events = folder / "workers-1.jsonl"  # its workers have told the id of their job

    def rename(old: str, new: str) -> None:
        for file in (ledger, events):
            file.write_text(file.read_text().replace(f'"id": "{old}"', f'"id": "{new}"'))
        (folder / "jobs" / "0.claim").write_text(f"{new}\n")

    rename(number, "999999")
    found = cli.status(cluster)
    assert found["jobs"][0]["state"] == "UNKNOWN"  # not listed is not finished
    rename("999999", number)
    cli("cancel", cluster)
    backend.wait_empty(15)


@pytest.mark.stub
def test_a_job_that_is_held_after_a_failed_launch_has_failed(
    cli: Cli, backend: SlurmBackend
) -> None:
    profile = {"gpus": 1, "run": ["true"]}
    with failing_prolog(backend.slurm):
        cluster = cli.submit(profile)
        until(lambda: cli.status(cluster)["state"] == "FAILED", 30)
        assert backend.queue()
        listed = cli("status").stdout
        assert f"1 job held in the queue: gpujobs cancel {cluster}" in listed
        done = cli("cancel", cluster)
        assert (done.returncode, done.stderr) == (0, f"{cluster} is cancelled\n")
        assert cli("status").stdout == ""
        done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 5
    assert "FAILED (launch failed requeued held: a node could not start it)" in done.stderr
    assert backend.queue() == []
    assert cli.status(done.stdout.strip())["state"] == "FAILED"


# -- faults between the batch scheduler and us ----------------------------------------------------------------------
def wrapped(cli: Cli, backend: SlurmBackend, command: str, body: str) -> str:
    """Return a site in which ``command`` is a script; in ``body``, REAL is the real one and ONCE is true once."""
    real = backend.slurm.command("which", command).strip()
    wrapper = cli.work / command
    once = f"mkdir {cli.work}/{command}.once 2> /dev/null"
    wrapper.write_text("#!/bin/bash\n" + body.replace("REAL", real).replace("ONCE", once) + "\n")
    wrapper.chmod(0o755)
    return str(cli.write("s.yaml", cli.site | {"commands": {command: str(wrapper)}}))


@pytest.mark.parametrize(
    "body",
    [
        'if ONCE; then REAL "$@" > /dev/null; echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1; fi; exec REAL "$@"',
        slow_variant('if ONCE; then REAL "$@" > /dev/null; exit 0; fi; exec REAL "$@"'),
        slow_variant(
            'if ONCE; then REAL "$@" > /dev/null; echo garbage; exit 0; fi; exec REAL "$@"'
        ),
        slow_variant(
            'if ONCE; then echo "sbatch: error: Unable to contact slurm controller (connect failure)" >&2; exit 1; fi; exec REAL "$@"'
        ),
        slow_variant('echo "sbatch: warning: there will be maintenance"; echo; REAL "$@"'),
        slow_variant('REAL "$@" | sed "s/$/;cluster/"'),
    ],
    ids=[
        "reply-lost",
        "empty-answer",
        "garbled-answer",
        "away",
        "warnings-first",
        "id-and-cluster",
    ],
)
@pytest.mark.stub
def test_jobs_are_submitted_once_whatever_the_answer(
    cli: Cli, backend: SlurmBackend, body: str
) -> None:
    site = wrapped(cli, backend, "sbatch", body)
    cluster = cli.submit(
        {"gpus": 2, "gpus_per_job": 1, "run": ["true"], "start_workers": 2},
        "--site",
        site,
        "--wait",
    )
    names = backend.slurm.command(
        "squeue", "-h", "-r", "-t", "all", f"--name={cluster}", "-o", "%F"
    ).split()
    assert len(names) == 2 and len(set(names)) == 1  # one array
    assert cli.status(cluster)["state"] == "DONE"


@pytest.mark.stub
@pytest.mark.waits
def test_superfluous_jobs_leave_at_once(cli: Cli, backend: SlurmBackend) -> None:
    # The reply is lost, and so is our question, while no job can start: the array is sent twice, with
    # the same numbers.
    site = wrapped(
        cli,
        backend,
        "sbatch",
        'cat > s; if ONCE; then REAL --begin=now+100 "$@" < s > /dev/null; echo "Socket timed out" >&2; exit 1; fi; exec REAL "$@" < s',
    )
    changed = json.loads(Path(site).read_text())
    listing = cli.work / "squeue"
    listing.write_text(
        f'#!/bin/sh\nreal={backend.slurm.command("which", "squeue").strip()}\ncase $* in *%F\\|%j*) echo "ARRAY_JOB_ID|NAME"; exit 0;; esac; exec $real "$@"\n'
    )
    listing.chmod(0o755)
    changed["commands"]["squeue"] = str(listing)
    Path(site).write_text(json.dumps(changed))
    cluster = cli.submit(
        {"gpus": 2, "gpus_per_job": 1, "run": ["sleep", "30"], "start_workers": 2},
        "--site",
        site,
        "--wait",
    )
    names = backend.slurm.command(
        "squeue", "-h", "-r", "-t", "all", f"--name={cluster}", "-o", "%F"
    ).split()
    assert len(set(names)) == 2
    logs = "".join(
        path.read_text() for path in (cli.home / ".gpujobs" / cluster / "logs").glob("job-*.log")
    )
    assert logs.count("is superfluous: job") == 2
    assert cli.status(cluster)["state"] == "DONE"


@pytest.mark.stub
@pytest.mark.waits
def test_an_answer_without_an_id_is_an_error(cli: Cli, backend: SlurmBackend) -> None:
    site = wrapped(cli, backend, "sbatch", "cat > /dev/null; exit 0")
    done = cli("submit", str(cli.write("p.yaml", {"gpus": 1})), "--site", site)
    assert done.returncode == 3
    assert "returned no job id" in done.stderr
    assert backend.queue() == []


@pytest.mark.stub
def test_garbled_status_is_unknown(cli: Cli, backend: SlurmBackend) -> None:
    profile = {"gpus": 1, "name": "x"}
    site = wrapped(cli, backend, "squeue", 'echo "slurm|is|broken"; echo "12|0"; printf "\\xff\\n"')
    cluster = cli.submit(profile, "--site", site)
    found = cli.status(cluster)
    assert [job["state"] for job in found["jobs"]] == ["UNKNOWN"]
    assert found["state"] in ("PENDING", "STARTING")  # not finished: nobody said so
    cancelled = cli("cancel", cluster)
    assert cancelled.returncode == 0, cancelled.stderr  # its job has exited
    backend.wait_empty(15)


@pytest.mark.stub
def test_jobs_are_found_under_a_wrong_name_of_the_user(cli: Cli, backend: SlurmBackend) -> None:
    """squeue would find no jobs of $LOGNAME, and exit with 0."""
    path, own = str(cli.write("p.yaml", {"gpus": 1})), {"LOGNAME": "nosuch", "USER": "nosuch"}
    cluster = cli("submit", path, **own).stdout.strip()

    def state() -> str:
        found = json.loads(cli("status", cluster, "--json", **own).stdout)
        return str(found["clusters"][0]["jobs"][0]["native"])

    until(lambda: state() == "RUNNING", 30)
    cli("cancel", cluster)
    backend.wait_empty(15)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes a user without a name")
def test_jobs_of_a_user_without_a_name_are_found(backend: SlurmBackend) -> None:
    unnamed = ("setpriv", "--reuid=471147", "--regid=471147", "--clear-groups")
    job = ["sbatch", "--parsable", "--hold", "--mem=64", "--job-name=unnamed", "--wrap=true"]
    number = backend.slurm.command(*unnamed, *job, "--chdir=/tmp").strip()
    argv = Slurm().find_command("unnamed", "471147")
    listed = backend.slurm.attempt(*unnamed, *argv)
    result = CommandResult(tuple(argv), listed.returncode, listed.stdout, listed.stderr)
    assert Slurm().reply(result) is Reply.ANSWER
    assert Slurm().parse_find(listed.stdout, "unnamed") == {number} != {""}
    listed = backend.slurm.attempt(*unnamed, argv[0], "--me", *argv[1:])  # as other users
    result = CommandResult(tuple(argv), listed.returncode, listed.stdout, listed.stderr)
    assert listed.returncode == 0 and "Invalid user" in listed.stderr
    assert Slurm().reply(result) is Reply.NONE
    backend.slurm.command("scancel", number)


@pytest.mark.stub
def test_a_submission_that_was_interrupted_before_its_answer_is_adopted(
    cli: Cli, backend: SlurmBackend
) -> None:
    cluster = cli.submit({"gpus": 1})
    path = cli.home / ".local" / "state" / "gpujobs" / "clusters" / f"{cluster}.json"
    record = json.loads(path.read_text())
    submission = record["submissions"][0]
    record["intent"] = {key: submission[key] for key in ("first", "count", "group", "array")}
    record["submissions"], record["created"] = [], record["created"] - 1000
    path.write_text(json.dumps(record))
    assert [job["id"] for job in cli.status(cluster)["jobs"]] == [submission["id"]]
    cli("cancel", cluster)
    backend.wait_empty(15)


def test_ctrl_c_during_submit_leaves_nothing(cli: Cli, backend: SlurmBackend) -> None:
    site = wrapped(
        cli, backend, "sbatch", 'REAL "$@"; sleep 30'
    )  # accepted, and the answer is slow
    submitting = cli.start(
        "submit", str(cli.write("p.yaml", {"gpus": 1, "name": "slow"})), "--site", site
    )
    until(lambda: [line for line in backend.queue() if "slow-" in line], 20)
    submitting.send_signal(signal.SIGINT)
    out, _ = submitting.communicate(timeout=patience(60))
    assert submitting.returncode == 130
    assert out == ""
    backend.wait_empty(20)
    assert not list((cli.home / ".gpujobs").iterdir())


@pytest.mark.stub
def test_status_asks_once_for_all_clusters(cli: Cli, backend: SlurmBackend) -> None:
    asked = cli.work / "asked"
    site = wrapped(cli, backend, "squeue", f'echo "$*" >> {asked}; exec REAL "$@"')
    clusters = [
        cli.submit({"gpus": 4, "gpus_per_job": 1, "directives": ["--hold"]}, "--site", site)
        for _ in range(3)
    ]
    asked.unlink(missing_ok=True)
    listed = cli("status").stdout
    assert all(cluster in listed for cluster in clusters) and listed.count("4 WAITING") == 3
    assert len(asked.read_text().splitlines()) == 1
    assert cli("cancel", *clusters).returncode == 0
    backend.wait_empty(15)


@pytest.mark.slow
@pytest.mark.stub
def test_a_name_at_its_greatest_length_is_found(cli: Cli, backend: SlurmBackend) -> None:
    # Adopted by this name, too: the first reply is lost.
    name = "n" * 40
    site = wrapped(
        cli, backend, "sbatch", 'if ONCE; then REAL "$@" > /dev/null; exit 0; fi; exec REAL "$@"'
    )
    profile = {"gpus": 2, "gpus_per_job": 1, "name": name, "run": ["true"], "start_workers": 2}
    cluster = cli.submit(profile, "--site", site, "--wait")
    assert cluster.startswith(f"{name}-")
    names = backend.slurm.command(
        "squeue", "-h", "-r", "-t", "all", f"--name={cluster}", "-o", "%F"
    ).split()
    assert len(names) == 2 and len(set(names)) == 1
    found = cli.status(cluster)
    assert found["state"] == "DONE" and {job["state"] for job in found["jobs"]} == {"COMPLETED"}


@pytest.mark.stub
def test_submit_prints_its_jobs_as_json(cli: Cli, backend: SlurmBackend) -> None:
    profile = str(cli.write("p.yaml", {"gpus": 4, "gpus_per_job": 2}))
    value = json.loads(cli("submit", profile, "--json").stdout)
    cluster = value["cluster"]
    assert value["version"] == 1 and value["gpus"] == 4 and len(value["worker_names"]) == 4
    assert [(item["first"], item["count"]) for item in value["submissions"]] == [(0, 2)]
    assert value["submissions"][0]["id"] in {line.split("_")[0] for line in backend.queue()}
    connected(cli, cluster, 4)
    assert cli.status(cluster)["workers"]["connected"] == value["worker_names"]
    worker = cli("logs", cluster, "--worker", f"{cluster}-1-0").stdout
    assert "job 1 on" in worker and "job 0 on" not in worker
    cli("cancel", cluster)
    backend.wait_empty(15)
