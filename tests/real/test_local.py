"""The local site: real processes on this machine, with and without (fake) GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from gpujobs.injob import archive

from ..conftest import local_cli
from ..support.cli import NVML, ROOT, Cli
from ..support.processes import patience, processes_with, until
from .programs import SLEEP, WHO
from .test_clusters import says


@pytest.fixture
def local(home: Path, request: pytest.FixtureRequest) -> Cli:
    return local_cli(home, request)


def with_gpus(local: Cli, count: int, busy: str = "") -> dict[str, object]:
    """Let this machine have fake GPUs; return what a profile needs for its jobs to see them."""
    variables = {
        "PYTHONPATH": str(NVML),
        "DASK_CUDA_TEST_SINGLE_GPU": "1",
        "FAKE_NVML_GPUS": str(count),
        "FAKE_NVML_BUSY": busy,
    }
    local.env.update(variables)
    return {"env": variables, "run": ["python", "who.py"]}


def test_the_quickstart_runs_without_a_gpu(local: Cli) -> None:
    (local.work / "examples").symlink_to(ROOT / "examples")
    done = local("submit", "examples/quickstart.yaml", "--wait")
    assert done.returncode == 0, done.stderr
    assert "no NVIDIA GPU on this machine, so CPU workers" in done.stderr
    assert "NumPy (no CuPy or no GPU in the workers)" in done.stderr
    assert "they agree with the eigenvalues" in done.stderr
    until(lambda: not processes_with(done.stdout.strip()), 10)


def test_a_cluster_of_another_release_gets_no_jobs_and_goes_on(local: Cli) -> None:
    """Their scripts would have options that its package does not know, and would end it."""
    cluster = local.submit({"gpus": 0, "workers": {"count": 1}, "run": ["sleep", "600"]})
    path = Path(local.status(cluster)["folder"]) / "injob.pyz"
    with zipfile.ZipFile(path) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    options = "gpujobs_injob/vocabulary"
    other = files[options].replace(b"job", b"jab", 1)  # of the same size: processes read the file
    path.with_name("new").write_bytes(archive.pack({**files, options: other}))
    path.with_name("new").replace(path)
    refused = local("scale", cluster, "2")
    assert refused.returncode == 2
    assert "its jobs have the package of another release of gpujobs" in refused.stderr
    assert len(local.status(cluster)["jobs"]) == 1
    assert local("cancel", cluster).returncode == 0
    until(lambda: not processes_with(cluster), 30)


def test_a_script_as_python_starts_all_processes_in_its_image(local: Cli) -> None:
    """As docs/containers.md has it, with a runtime that only notes its calls."""
    page = (ROOT / "docs" / "containers.md").read_text()
    script = page.partition("```text\n")[2].partition("```")[0]
    assert "exec my-runtime exec /project/p12345/image.sif" in script
    runtime = local.work / "my-runtime"
    python = Path(sys.executable).parent
    runtime.write_text(f'#!/bin/sh\necho call >> {runtime}.calls\nshift 2\nexec "$@"\n')
    script = script.replace("my-runtime", str(runtime)).replace("python3 ", f"{python}/python3 ")
    wrapper = local.work / "python-in-image"
    wrapper.write_text(script)
    for path in (runtime, wrapper):
        path.chmod(0o755)
    local.write("who.py", WHO.replace('"OWN"', '"IN_IMAGE"'))
    profile = {"gpus": 0, "environment": {"python": str(wrapper)}}
    done = local(
        "submit", str(local.write("p.yaml", {**profile, "run": [str(wrapper), "who.py"]})), "--wait"
    )
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.split()[0]
    found = json.loads(local("logs", cluster).stdout.splitlines()[-1])["workers"]
    assert [place[2] for place in found.values()] == ["1"]
    assert Path(f"{runtime}.calls").read_text() == "call\n"
    until(lambda: not processes_with(cluster), 10)


@pytest.mark.stub
def test_a_setup_that_fails_is_said_at_once(local: Cli) -> None:
    setup = "source venv/bin/activate\nexport OMP_NUM_THREADS=1"
    profile = {"gpus": 0, "environment": {"setup": setup, "python": sys.executable}, "run": "echo"}
    done = local("submit", str(local.write("p.yaml", profile)), "--wait")
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if "setup" in line]
    assert notes == [
        f"setup: there is no {local.work}/venv/bin/activate on this host; the nodes need it",
        "note: setup: source venv/bin/activate failed (exit code 1)",
    ]


def test_a_submission_does_not_change_the_script_of_a_running_job(tmp_path: Path) -> None:
    """Bash reads a script while it runs; the jobs of two groups have one folder."""

    def submit(name: str) -> None:
        head = f"#!/bin/bash\n#LOCAL --name={name}\n#LOCAL --output={tmp_path}/local\n"
        wait = f"touch {tmp_path}/begins\nuntil [ -e {tmp_path}/go ]; do sleep 0.1; done\n"
        rest = f"{wait}{'# padding' * 2000}\ntouch {tmp_path}/{name}\n"
        argv = [sys.executable, "-m", "gpujobs.batch.localqueue", "submit"]
        subprocess.run(argv, input=f"{head}{rest}", text=True, check=True)

    submit("first")
    until((tmp_path / "begins").exists, 20)
    submit("another-name")
    (tmp_path / "go").touch()
    for name in ("another-name", "first"):
        until((tmp_path / name).exists, 20)


@pytest.mark.slow
@pytest.mark.stub
def test_a_locale_that_is_not_utf_8_keeps_the_text(local: Cli) -> None:
    local.env |= {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = local.write("p.yaml", "gpus: 0\nrun: [echo, 日本]\n")
    done = local("submit", str(path), "--wait")
    assert done.returncode == 0, done.stderr
    log = Path(local.status(done.stdout.strip())["folder"]) / "logs" / "run.log"
    assert log.read_text(encoding="utf-8") == "日本\n"
    assert local("logs", done.stdout.strip()).stdout == "日本\n"


@pytest.mark.stub
def test_a_removed_folder_leaves_the_list(local: Cli) -> None:
    profile = {"gpus": 0, "run": "echo here"}
    first, second = local.submit(profile, "--wait"), local.submit(profile, "--wait")
    # Only the folder has the exit codes of the jobs of this machine, which the first query records.
    until(lambda: [job["state"] for job in local.status(second)["jobs"]] == ["COMPLETED"], 20)
    shutil.rmtree(local.status(second)["folder"])
    found = local.status(second)
    assert (found["state"], found["reason"]) == ("DONE", "its folder was removed")
    listed = json.loads(local("status", "--all", "--json").stdout)["clusters"]
    assert [cluster["id"] for cluster in listed] == [first]
    assert local("status", second).returncode == 4


@pytest.mark.slow
def test_only_processes_of_dask_import_from_the_archive(local: Cli) -> None:
    local.write(
        "where.py",
        "import json\nfrom importlib.util import find_spec\nfrom distributed import Client\n"
        "def found(): return find_spec('gpujobs_injob') is not None\n"
        "with Client() as client:\n"
        "    places = client.run_on_scheduler(found), *client.run(found).values(), found()\n"
        "    print(json.dumps(places))\n",
    )
    profile = {"gpus": 0, "workers": {"count": 1}, "run": ["python", "where.py"]}
    cluster = local.submit(profile, "--wait")
    assert json.loads(local("logs", cluster).stdout) == [True, True, False]


@pytest.mark.slow
def test_auto_takes_the_free_gpus(local: Cli) -> None:
    local.write("who.py", WHO)
    profile = with_gpus(local, 4, busy="1") | {"gpus": "auto", "start_workers": 3}
    profile["env"]["WANTED"] = "3"  # type: ignore[index]
    done = local("submit", str(local.write("p.yaml", profile)), "--wait")
    assert done.returncode == 0, done.stderr
    assert "3 free GPUs" in done.stderr
    cluster = done.stdout.strip()
    found = json.loads(local("logs", cluster).stdout.splitlines()[-1])["workers"]
    assert {name: value[0] for name, value in found.items()} == {
        f"{cluster}-0-0": "0,2,3", f"{cluster}-0-1": "2,3,0", f"{cluster}-0-2": "3,0,2",
    }  # fmt: skip


@pytest.mark.slow
def test_jobs_of_one_gpu_get_different_ones(local: Cli) -> None:
    local.write("who.py", WHO)
    profile = with_gpus(local, 4) | {"gpus": 2, "gpus_per_job": 1, "start_workers": 2}
    profile["env"]["WANTED"] = "2"  # type: ignore[index]
    local.env["CUDA_VISIBLE_DEVICES"] = "3,1"
    cluster = local.submit(profile, "--wait")
    found = json.loads(local("logs", cluster).stdout.splitlines()[-1])["workers"]
    assert {name: value[0] for name, value in found.items()} == {
        f"{cluster}-0": "3",
        f"{cluster}-1": "1",
    }


def test_a_second_cluster_takes_other_gpus_though_the_first_does_not_use_its_own_yet(
    local: Cli,
) -> None:
    setup = {"setup": "sleep 60", "python": sys.executable}
    profile = with_gpus(local, 3) | {"gpus": 2, "gpus_per_job": 1, "environment": setup}
    first = local.submit(profile)
    path = str(local.write("p.yaml", profile | {"gpus": 1}))
    second = local("submit", path).stdout.strip()
    ledger = local.home / ".local" / "state" / "gpujobs" / "clusters"
    records = [json.loads((ledger / f"{one}.json").read_text()) for one in (first, second)]
    assert [record["submissions"][0]["devices"] for record in records] == [["0", "1"], ["2"]]
    local.env["FAKE_NVML_BUSY"] = "0"  # by its worker
    refused = local("submit", path)
    assert f"GPU 0 is used by cluster {first}; GPU 1 is" in refused.stderr
    assert local("cancel", first, second).returncode == 0
    plan = local("plan", path)
    assert plan.returncode == 0, plan.stderr


def test_too_few_free_gpus_are_refused(local: Cli) -> None:
    profile = with_gpus(local, 2, busy="0") | {"gpus": 2}
    done = local("submit", str(local.write("p.yaml", profile)))
    assert done.returncode == 2
    assert "2 GPUs wanted, 1 free on this machine; GPU 0 is used by process 4242" in done.stderr


@pytest.mark.stub
def test_cancel_ends_the_whole_session(local: Cli) -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)']); print('here', flush=True); time.sleep(999)"
    cluster = local.submit({"gpus": 0, "run": ["python", "-c", code]})
    says(local, cluster, "here")
    assert len(processes_with(cluster)) > 4
    assert local("cancel", cluster).returncode == 0
    until(lambda: not processes_with(cluster), 15)
    assert local.status(cluster)["state"] == "CANCELLED"


@pytest.mark.stub
def test_killed_job_is_known(local: Cli) -> None:
    local.write("sleep.py", SLEEP)
    cluster = local.submit({"gpus": 0, "run": ["python", "sleep.py", "600"]})
    says(local, cluster, "here")
    leader = int(local.status(cluster)["jobs"][0]["id"])
    os.kill(leader, signal.SIGKILL)
    until(lambda: local.status(cluster)["jobs"][0]["state"] == "FAILED", 15)
    local("cancel", cluster)
    for pid in processes_with(cluster):
        with contextlib.suppress(ProcessLookupError):  # it ended with the one before
            os.kill(pid, signal.SIGKILL)


@pytest.mark.stub
def test_another_process_with_the_pid_is_not_the_job(local: Cli) -> None:
    cluster = local.submit({"gpus": 0, "run": ["true"]}, "--wait")
    path = local.home / ".local" / "state" / "gpujobs" / "clusters" / f"{cluster}.json"
    record = json.loads(path.read_text())
    host, _, member = record["submissions"][0]["id"].partition(":")
    record["submissions"][0]["id"] = (
        f"{host}:{os.getpid()}@{member.split('@')[1]}"  # our own pid, started at another time
    )
    record["finished"], record["outcomes"] = False, {}
    path.write_text(json.dumps(record))
    (Path(record["folder"]) / "ended").unlink()
    assert local("cancel", cluster).returncode == 0  # and we are still here
    assert local.status(cluster)["jobs"][0]["state"] != "RUNNING"


@pytest.mark.stub
def test_a_job_leaves_before_its_walltime(local: Cli) -> None:
    started = time.monotonic()
    done = local(
        "submit",
        str(local.write("p.yaml", {"gpus": 0, "walltime": "25s", "run": ["sleep", "600"]})),
        "--wait",
    )
    assert done.returncode == 5
    assert "walltime is nearly over" in done.stderr
    assert time.monotonic() - started < 300  # not the time of `run`, 600 s


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["tcp", "ws"])
@pytest.mark.parametrize("encryption", [True, False])
def test_each_protocol_connects_all_workers(local: Cli, protocol: str, encryption: bool) -> None:
    site = {
        "description": "x",
        "scheduler": "local",
        "queues": {"local": {}},
        "network": {"protocols": ["tcp", "ws"]},
    }
    local.write("who.py", WHO)
    profile = {
        "gpus": 0,
        "run": ["python", "who.py"],
        "network": {"protocol": protocol, "encryption": encryption},
    }
    done = local(
        "submit",
        str(local.write("p.yaml", profile)),
        "--site",
        str(local.write("s.yaml", site)),
        "--wait",
    )
    assert done.returncode == 0, done.stderr
    assert ("not encrypted" in done.stderr) is not encryption
    address = json.loads(local("logs", done.stdout.strip()).stdout.splitlines()[-1])["address"]
    assert address.split("://")[0] == {("tcp", True): "tls", ("ws", True): "wss"}.get(
        (protocol, encryption), protocol
    )


def test_secrets_are_nowhere(local: Cli) -> None:
    local.write("sleep.py", SLEEP)
    os.umask(0o000)
    try:
        cluster = local.submit({"gpus": 0, "run": ["python", "sleep.py", "600"]})
    finally:
        os.umask(0o022)
    says(local, cluster, "here")
    folder = Path(local.status(cluster)["folder"])
    key = (folder / "tls-key.pem").read_text()
    secret = "".join(key.splitlines()[1:-1])
    for pid in processes_with(cluster):
        text = Path(f"/proc/{pid}/cmdline").read_text(errors="replace") + Path(
            f"/proc/{pid}/environ"
        ).read_text(errors="replace")
        assert secret[:40] not in text
    for path in [*folder.rglob("*"), *(local.home / ".local" / "state").rglob("*")]:
        if path.is_file() and path.name != "tls-key.pem":
            assert secret[:40] not in path.read_text(errors="replace"), path
    for path in (folder, folder.parent, local.home / ".local" / "state" / "gpujobs" / "clusters"):
        assert path.stat().st_mode & 0o777 == 0o700, path  # whatever the umask
    assert (folder / "tls-key.pem").stat().st_mode & 0o777 == 0o600
    local("cancel", cluster)


@pytest.mark.slow
def test_another_certificate_is_refused(local: Cli) -> None:
    setup = {"setup": "sleep 600", "python": sys.executable}  # only its certificate is used
    one = local.submit({"gpus": 0, "environment": setup}, name="one.yaml")
    clusters = [one, local.submit({"gpus": 0}, "--wait", name="two.yaml")]
    code = (
        "import sys; from gpujobs.clusters.ledger import Ledger; from gpujobs.clusters.folderstate import read_state\n"
        "from gpujobs.clusters.connect import security_of\n"
        "from distributed import Client\n"
        "one, two = (Ledger().get(name) for name in sys.argv[1:])\n"
        f"try: Client(read_state(one.path).dask.address, security=security_of(two, read_state(two.path)), timeout={patience(5)})\n"
        "except Exception as error: print('refused:', type(error).__name__)"
    )
    assert "refused" in local.python_run(code, *clusters).stdout
    assert local("cancel", "--all").returncode == 0
    until(lambda: not any(processes_with(cluster) for cluster in clusters), 15)


@pytest.mark.slow
def test_logs_have_no_control_characters(local: Cli) -> None:
    cluster = local.submit(
        {
            "gpus": 0,
            "workers": {"count": 2},
            "start_workers": 2,
            "run": ["printf", r"a\033[31mb\n\0c\n"],
        },
        "--wait",
    )
    assert local("logs", cluster).stdout == "a[31mb\nc\n"  # nothing that moves a cursor
    assert "Registered to" in local("logs", cluster, "--worker", f"{cluster}-1").stdout
    everything = local("logs", cluster, "--all").stdout
    assert all(
        f"==> {name} <==" in everything
        for name in ("job-0.log", "job-1.log", "run.log", "scheduler.log")
    )
    assert local("logs", cluster, "-f").stdout == "a[31mb\nc\n"
    assert local("logs", cluster, "--worker", "nosuch").returncode == 2
    assert local("logs", "nosuch-0000").returncode == 4


def test_unreadable_home_submits_nothing(local: Cli) -> None:
    folder = local.home / "theirs"
    folder.mkdir()
    folder.chmod(0o777)
    site = {
        "description": "x",
        "scheduler": "local",
        "queues": {"local": {}},
        "directory": str(folder),
    }
    for why in ("is writable by other users", "is a symbolic link"):
        done = local(
            "submit",
            str(local.write("p.yaml", {"gpus": 0})),
            "--site",
            str(local.write("s.yaml", site)),
        )
        assert done.returncode == 2 and why in done.stderr
        (local.home / "real").mkdir(exist_ok=True)
        folder.rmdir() if folder.is_dir() and not folder.is_symlink() else folder.unlink()
        folder.symlink_to(local.home / "real")
    assert local("status", "--all").stdout == ""


HUNGRY = """
import os, time
from pathlib import Path
from distributed import Client, KilledWorker

def eat():
    found = []
    while True:
        found.append(bytearray(2**24))
        time.sleep(0.02)

if __name__ == "__main__":
    with Client() as client:
        try:
            client.submit(eat).result()
        except KilledWorker:
            print("KilledWorker")
            events = Path(os.environ["GPUJOBS_FOLDER"], "workers-1.jsonl")
            while '"restarts": 4' not in events.read_text():
                time.sleep(0.1)  # the event of the last restart arrives after the error
            raise
"""


@pytest.mark.slow
def test_worker_that_exceeds_its_memory_is_reported(local: Cli) -> None:
    local.look_at_memory_often()
    local.write("eat.py", HUNGRY)
    profile = {"gpus": 0, "workers": {"memory": "400MiB"}, "run": ["python", "eat.py"]}
    done = local("submit", str(local.write("p.yaml", profile)), "--wait")
    cluster = done.stdout.strip()
    said = f"worker {cluster}-0 restarted {{}}: over its memory limit of 0.391 GiB: memory_per_job"
    reason = f"run: ended with exit code 1: KilledWorker: {said.format('4 times')}"
    assert done.returncode == 5 and reason in done.stderr, done.stderr
    output = local("logs", cluster).stdout
    assert "KilledWorker" in output
    assert f"gpujobs: {said.split('{')[0]}" in output  # how often depends on the head's interval
    assert said.format("4 times") in local("status", cluster).stdout  # dask's own limit


PAUSED = """
import ctypes, os, time
import psutil
from distributed import Client

LIMIT = 400 * 2**20

def fill():
    kept = bytearray(int(0.88 * LIMIT) - psutil.Process().memory_info().rss)
    for page in range(0, len(kept), 4096):
        kept[page] = 1
    time.sleep(60)

if __name__ == "__main__":
    client = Client()
    future = client.submit(fill)
    while not os.path.exists("go"):
        time.sleep(0.1)
    print("ends", flush=True)
    os._exit(3)
"""


@pytest.mark.slow
def test_a_worker_that_is_paused_is_named_while_its_program_waits_and_in_the_reason(
    local: Cli,
) -> None:
    local.look_at_memory_often()
    local.write("paused.py", PAUSED)
    profile = {"gpus": 0, "workers": {"memory": "400MiB"}, "run": ["python", "paused.py"]}
    process = local.start("submit", str(local.write("p.yaml", profile)), "--wait")
    before, said = "", None
    assert process.stderr
    for line in process.stderr:  # until both places have said it
        before += line
        said = re.search(r"worker (\S+)-0 is paused: 3\d\d of 400 MiB", before)
        if said and f"note: {said[0]}" in before and f"gpujobs: {said[0]}" in before:
            break
    assert said and process.poll() is None, before
    (local.work / "go").touch()
    process.communicate(timeout=patience(120))
    reason = local.status(said[1])["reason"]
    assert "ended with exit code 3" in reason and reason.endswith(f" ({said[0]})")


# -- sockets -----------------------------------------------------------------------------------------------------------
def listening(pids: Iterable[int]) -> dict[int, str]:
    """Return the addresses at which processes listen, by port, as the kernel has them."""
    found = {}
    for pid in pids:
        for connection in psutil.Process(pid).net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found[connection.laddr.port] = connection.laddr.ip
    return found


def test_all_processes_listen_on_loopback(local: Cli) -> None:
    profile = {"gpus": 0, "workers": {"count": 2}, "run": ["sleep", "600"], "start_workers": 2}
    cluster = local.submit(profile)
    until(lambda: local.status(cluster)["state"] == "RUNNING", 60)
    until(lambda: len(local.status(cluster)["workers"]["connected"]) == 2, 60)
    tree = [psutil.Process(pid) for pid in processes_with(cluster)]
    pids = {child.pid for process in tree for child in (process, *process.children(recursive=True))}
    sockets = listening(pids)
    # the dask scheduler and its dashboard; of each worker its server, its HTTP server, its nanny
    assert len(sockets) >= 8 and set(sockets.values()) == {"127.0.0.1"}
    dashboard = re.findall(r"http://127\.0\.0\.1:(\d+)/status", local("connect", cluster).stdout)
    assert dashboard and int(dashboard[0]) in sockets
    assert local("cancel", cluster).returncode == 0


OWNER = """
import gpujobs, json, os, psutil, urllib.request
if __name__ == "__main__":
    with gpujobs.GPUJobQueueCluster("local", quiet=True) as cluster:
        link = cluster.dashboard_link
        with urllib.request.urlopen(link) as answer:
            status = answer.status
        other = gpujobs.GPUJobQueueCluster.from_name(cluster.id)
        sockets = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
        lines = os.popen(f"{sys.executable} -m gpujobs connect {cluster.id}").read()
        print(json.dumps([link, status, other.dashboard_link, sockets, lines]))
        other.close()
"""


@pytest.mark.slow
def test_the_dashboard_of_an_owner_listens_on_loopback(local: Cli) -> None:
    with_gpus(local, 1)
    done = local.python_run(OWNER.replace("import gpujobs", "import sys, gpujobs", 1))
    assert done.returncode == 0, done.stderr
    link, status, other, sockets, lines = json.loads(done.stdout.splitlines()[-1])
    assert link == other and link.startswith("http://127.0.0.1:") and status == 200
    assert link in lines
    assert sockets and set(sockets) == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.stub
def test_jobs_have_no_warning_of_ucx(local: Cli) -> None:
    """UCX prints a warning in every process about a variable that ucxx sets."""
    run = {"gpus": 0, "run": ["printenv", "UCX_WARN_UNUSED_ENV_VARS"]}
    assert local("logs", local.submit(run, "--wait")).stdout == "n\n"
    own = {**run, "env": {"UCX_WARN_UNUSED_ENV_VARS": "y"}}
    assert local("logs", local.submit(own, "--wait")).stdout == "y\n"


@pytest.mark.slow
def test_a_program_without_a_client_or_with_its_own_workers_is_reported(local: Cli) -> None:
    note = "run: connected no client, so its workers had no task; Client() connects to them"
    done = local("submit", str(local.write("p.yaml", {"gpus": 0, "run": "echo here"})), "--wait")
    assert f"note: {note}" in done.stderr
    assert local.status(done.stdout.strip())["reason"] == note
    code = "from distributed import Client; Client(n_workers=2)"
    profile = {"gpus": 0, "run": ["python", "-c", code]}
    done = local("submit", str(local.write("p.yaml", profile)), "--wait")
    assert "['n_workers']: in a job, Client() connects to the job's cluster" in done.stderr
    shown = local("status", *re.findall(r"^error: (p-\w+)", done.stderr, re.M)).stdout
    assert "last lines of run:" in shown and "| ValueError: Unexpected keyword" in shown
    assert "0 of 1" not in shown and "distributed.nanny" not in shown


@pytest.mark.slow
def test_all_lines_of_setup_that_fail_are_said(local: Cli) -> None:
    setup = "module load nosuch\nsource venv/bin/activate\ntrue"
    profile = {"gpus": 0, "environment": {"setup": setup, "python": sys.executable}, "run": "echo"}
    done = local("submit", str(local.write("p.yaml", profile)), "--wait")
    # On a busy machine, a look between the two lines has a note of its own.
    *_, note = [line for line in done.stderr.splitlines() if line.startswith("note: setup")]
    first, second = note.removeprefix("note: setup: ").split("; ")
    assert first.startswith("module load nosuch failed (exit code")
    assert second == "source venv/bin/activate failed (exit code 1)"
    owner = (
        "import gpujobs, sys\n"
        f"setup = {setup!r}\n"
        "environment = {'setup': setup, 'python': sys.executable}\n"
        "with gpujobs.GPUJobQueueCluster('local', n_workers=1, gpus_per_job=0, environment=environment) as c:\n"
        "    c.wait_for_workers(1)\n"
    )
    assert f"setup: {first}; {second}" in local.python_run(owner).stdout
