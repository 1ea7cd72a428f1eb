"""`gpujobs --host`: a real sshd in front of a real Slurm, with and without gpujobs on the login node."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..conftest import fresh_folder, make_cli, nothing_left, slow_variant, unavailable
from ..support.backend import SlurmBackend
from ..support.cli import ROOT, Cli
from ..support.processes import patience, until
from ..support.sshd import LoginNode, missing

pytestmark = [pytest.mark.slurm]
PROFILE = {"gpus": 2, "start_workers": 2}


@pytest.fixture
def node(
    slurm_backend: SlurmBackend, home: Path, shared_folder: Path, request: pytest.FixtureRequest
) -> Iterator[LoginNode]:
    if why := missing():
        unavailable("ssh", why)
    stub = request.node.get_closest_marker("stub") is not None
    there = make_cli(slurm_backend, home, "root", stub=stub)
    env = {key: value for key, value in there.env.items() if key.startswith(("GPUJOBS", "SLURM"))}
    path = there.env["PATH"].split(":")
    env["PATH"] = ":".join(part for part in path if not (Path(part) / "gpujobs").exists())
    laptop = fresh_folder(shared_folder, "laptop")
    with LoginNode(fresh_folder(shared_folder, "sshd"), home, laptop, env).running() as running:
        yield running
        running.disconnect()
        until(lambda: not running.processes(), 20, lambda: str(running.processes()))
    nothing_left(slurm_backend)


@pytest.fixture
def laptop(node: LoginNode) -> Cli:
    """The command line of a computer without a batch scheduler."""
    path = f"{node.laptop}/bin:/usr/bin:/bin"
    return Cli(node.laptop, {"PATH": path, "GPUJOBS_HOST": "login"}, None)


def extend(node: LoginNode, line: str) -> None:
    """Add a line to the start-up file of the login shell."""
    with (node.home / ".profile").open("a") as file:
        file.write(f"{line}\n")


@pytest.mark.parametrize(
    "installed", [pytest.param(False, marks=pytest.mark.stub), slow_variant(True)]
)
def test_a_program_runs_from_the_laptop(laptop: Cli, node: LoginNode, installed: bool) -> None:
    """With gpujobs on the PATH of the login shell, or with a Python alone."""
    if installed:
        extend(node, f'export PATH="{Path(laptop.command).parent}:$PATH"')
    profile = {**PROFILE, "environment": {"python": sys.executable}, "run": ["python", "own.py"]}
    laptop.write("own.py", "print('it is here')")
    words = ["submit", str(laptop.write("svd.yaml", profile)), "--wait"]
    done = laptop(*words, "--upload", "own.py")
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    assert cluster.startswith("svd-") and len(cluster.split()) == 1
    assert laptop("logs", cluster).stdout == "it is here\n"
    assert laptop.status(cluster)["state"] == "DONE"
    assert cluster in laptop("report", cluster).stdout
    found = json.loads(laptop("report", cluster, "-o", "page.html", "--json").stdout)
    assert found["id"] == cluster in (laptop.work / "page.html").read_text()
    assert laptop("cancel", cluster).returncode == 0
    assert ("sends gpujobs" in done.stderr) is not installed


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_another_python_of_the_login_node_runs_all_commands(
    laptop: Cli, node: LoginNode, version: str
) -> None:
    """It is newer than the laptop's, and has no packages."""
    found = list(Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))
    if not found:
        pytest.skip(f"there is no Python {version}")
    profile = {**PROFILE, "environment": {"python": sys.executable}, "run": ["echo", "it is there"]}
    remote = {"GPUJOBS_REMOTE": str(found[0])}
    done = laptop("submit", str(laptop.write("p.yaml", profile)), "--wait", **remote)
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    assert laptop("logs", cluster, **remote).stdout == "it is there\n"
    assert json.loads(laptop("report", cluster, "--json", **remote).stdout)["id"] == cluster
    assert laptop("status", cluster, "--json", **remote).returncode == 0


@pytest.mark.stub
def test_a_job_folder_of_the_laptop_is_submitted_once(laptop: Cli, node: LoginNode) -> None:
    """It is copied to the login node, and submitted there, once."""
    here = {"GPUJOBS_SITE": "here", "GPUJOBS_SITE_PATH": str(node.home / "sites")}
    profile = {**PROFILE, "environment": {"python": sys.executable}, "run": ["echo", "it is there"]}
    done = laptop("render", str(laptop.write("p.yaml", profile)), "-o", "jobs", **here)
    assert done.returncode == 0, done.stderr
    remote = {"GPUJOBS_REMOTE": laptop.command}
    done = laptop("submit", "jobs/", "--wait", **remote)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(node.home) and folder.stat().st_mode & 0o777 == 0o700
    assert laptop("logs", str(folder), **remote).stdout == "it is there\n"
    done = laptop("submit", "jobs", **remote)
    assert done.returncode == 2 and "was submitted already" in done.stderr, done


def test_a_login_node_without_python_is_an_error(laptop: Cli, node: LoginNode) -> None:
    (node.home / "sh").symlink_to("/bin/sh")
    extend(node, f'PATH="{node.home}"')
    done = laptop("status")
    assert done.returncode == 3 and "neither gpujobs nor Python 3.11" in done.stderr, done


def test_commands_for_a_site_run_on_its_host(laptop: Cli, node: LoginNode) -> None:
    """Where the batch scheduler is not, commands that name the site run on its host."""
    del laptop.env["GPUJOBS_HOST"]
    sites = laptop.home / "sites"
    sites.mkdir()
    site = json.loads((node.home / "sites" / "here.yaml").read_text())
    site["commands"] = {"sbatch": "sbatch-of-the-login-node"}
    (sites / "away.yaml").write_text(json.dumps({**site, "hosts": ["login"]}))
    own = {"GPUJOBS_SITE_PATH": str(sites), "GPUJOBS_REMOTE": laptop.command}
    done = laptop("plan", str(laptop.write("p.yaml", {"gpus": 1, "site": "away"})), **own)
    assert done.returncode == 0 and "banner of stderr" in done.stderr, done
    assert "banner" not in laptop("plan", "p.yaml", "--site", "local", **own).stderr
    assert "banner" in laptop("queues", "--site", "away", **own).stderr
    assert laptop("plan", "p.yaml", **own, GPUJOBS_HOST="").stdout == done.stdout


def test_a_long_home_has_its_sockets_among_the_temporary_files(
    laptop: Cli, node: LoginNode
) -> None:
    """The path of a socket has at most 107 bytes: it is in the folder of temporary files then."""
    state = node.laptop / ("x" * 60)
    laptop.env |= {"XDG_STATE_HOME": str(state), "TMPDIR": str(node.laptop)}
    assert laptop("status").returncode == 0
    (folder,) = node.laptop.glob("gpujobs-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert any(path.is_socket() for path in folder.iterdir())
    assert not any(path.is_socket() for path in state.rglob("*"))


def test_a_failed_connection_has_the_words_of_ssh(laptop: Cli, node: LoginNode) -> None:
    (node.laptop / "known").write_text("")
    done = laptop("status")
    assert done.returncode == 3, done
    assert "Host key verification failed" in done.stderr and "ssh login failed" in done.stderr
    assert laptop("--host", "-oProxyCommand=false", "status").returncode == 2


def test_a_changed_host_key_sends_nothing(
    laptop: Cli, node: LoginNode, slurm_backend: SlurmBackend
) -> None:
    """The message is that of ssh, and nothing is sent."""
    known = node.laptop / "known"
    other = (node.folder / "user.pub").read_text()
    known.write_text(f"[127.0.0.1]:{node.port} {other}")
    done = laptop("submit", str(laptop.write("p.yaml", PROFILE)))
    assert done.returncode == 3 and done.stdout == "", done
    reason = done.stderr.partition("ssh login failed: ")[2]
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED!" in reason and str(known) in reason, done
    assert "Host key verification failed." in reason
    assert slurm_backend.queue() == [] and not (node.home / ".gpujobs").exists()
    assert known.read_text().count(other) == 1


def test_a_refused_key_asks_for_no_password(laptop: Cli, node: LoginNode) -> None:
    """Without a terminal, ssh does not ask for a password."""
    (node.folder / "authorized").write_text("")
    done = laptop("status")
    assert done.returncode == 3 and "Permission denied (" in done.stderr, done


CLIENT = """
from distributed import Client
with Client() as client:
    print(client.submit(sum, [1, 2]).result())
"""


@pytest.mark.slow
@pytest.mark.waits
def test_a_lost_tunnel_is_opened_again(laptop: Cli, node: LoginNode) -> None:
    """The tunnel is opened again when the connection is lost; the cluster does not end with it."""
    profile = {"gpus": 1, "environment": {"python": sys.executable}}
    cluster = laptop.submit(profile, "--wait")
    tunnel = laptop.start("connect", cluster)
    assert tunnel.stdout and tunnel.stderr
    lines = [tunnel.stdout.readline().strip() for _ in range(9)]
    exports = dict(line.removeprefix("export ").split("=", 1) for line in lines if "=" in line)
    user = Cli(node.laptop, {"PATH": laptop.env["PATH"], **exports}, None)
    key = Path(exports["DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY"])
    assert key.is_relative_to(node.laptop) and key.stat().st_mode & 0o777 == 0o600
    try:
        done = user.python_run(CLIENT)
        assert done.stdout == "3\n", done.stderr
        node.stop()
        node.disconnect()
        messages = iter(tunnel.stderr)
        assert (
            next(line for line in messages if "Connection refused" in line).count(
                "ssh login failed: "
            )
            == 1
        )
        time.sleep(4)  # until it was tried again
        node.start()
        text = "".join(
            itertools.takewhile(lambda line: "the tunnel is open again" not in line, messages)
        )
        assert text == ""
        assert user.python_run(CLIENT).stdout == "3\n"
    finally:
        tunnel.send_signal(signal.SIGINT)
        tunnel.communicate(timeout=patience(60))
    assert laptop.status(cluster)["state"] == "RUNNING"
    assert laptop("cancel", cluster).returncode == 0


def running(laptop: Cli, **keys: object) -> str:
    """Submit a cluster, and wait until it runs; return its id."""
    cluster = laptop.submit({"gpus": 1, "environment": {"python": sys.executable}, **keys})
    until(lambda: laptop.status(cluster)["state"] == "RUNNING", 60)
    return cluster


@pytest.mark.slow
@pytest.mark.stub
def test_scale_from_the_laptop_adds_and_removes_jobs(
    laptop: Cli, node: LoginNode, slurm_backend: SlurmBackend
) -> None:
    """Jobs of the real Slurm are added and removed; a number that is refused changes none."""
    cluster = running(laptop)
    for workers in (3, 1):
        done = laptop("--host", "login", "scale", cluster, str(workers), GPUJOBS_HOST="other")
        assert done.returncode == 0, done.stderr
        until(lambda n=workers: len(slurm_backend.queue()) == n, 60, slurm_backend.queue)
    done = laptop("scale", cluster, "-1")
    assert done.returncode == 2, done
    assert len(slurm_backend.queue()) == 1 and laptop.status(cluster)["state"] == "RUNNING"
    assert laptop("cancel", cluster).returncode == 0


FOLLOWED = """
import time
from pathlib import Path

print("it begins", flush=True)
while not Path("go").exists():
    time.sleep(0.1)
print("it ends", flush=True)
"""


@pytest.mark.slow
@pytest.mark.stub
def test_logs_follow_from_the_laptop_until_the_end(laptop: Cli, node: LoginNode) -> None:
    """Lines come when they are written, and the command ends with the cluster."""
    laptop.write("own.py", FOLLOWED)
    profile = {"gpus": 1, "environment": {"python": sys.executable}, "run": ["python", "own.py"]}
    cluster = laptop.submit(profile, "--upload", "own.py")
    with laptop.start("--host", "login", "logs", "-f", cluster) as followed:
        assert followed.stdout and followed.stdout.readline() == "it begins\n"
        assert laptop.status(cluster)["state"] == "RUNNING" and followed.poll() is None
        (folder,) = node.home.rglob("uploads/p-*")
        (folder / "go").touch()
        out, messages = followed.communicate(timeout=patience(60))
    assert followed.returncode == 0 and out == "it ends\n", (out, messages)
    assert laptop.status(cluster)["state"] == "DONE"


@pytest.mark.slow
@pytest.mark.stub
def test_nothing_stays_on_the_login_node(laptop: Cli, node: LoginNode) -> None:
    """After a command only the session of sshd, and nothing after the connection; the cluster runs."""

    def names() -> set[str]:
        found = set()
        for one in node.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(one.name())
        return found

    cluster = running(laptop)
    started = [laptop.start("connect", cluster), laptop.start("status", cluster, "--watch")]
    shown = ""
    try:
        assert started[0].stdout and "export" in started[0].stdout.readline()
        until(lambda: names() > {"sshd"}, 60, lambda: str(names()))  # those of `status`
    finally:
        for one in started:
            one.send_signal(signal.SIGINT)
            shown = one.communicate(timeout=patience(60))[0]
    assert "distributed is not installed here; tasks are not known" in shown  # `status` runs there
    until(lambda: names() == {"sshd"}, 20, lambda: str(names()))
    node.disconnect()
    until(lambda: not node.processes(), 20, lambda: str(node.processes()))
    assert laptop.status(cluster)["state"] == "RUNNING"
    assert laptop("cancel", cluster).returncode == 0


HOSTILE = """#!/bin/sh
printf '\\n\\036gpujobs {"kind": "ready"}\\n'
read -r request
cat "$0.json"
"""


@pytest.mark.parametrize("name", ["id", "node", "user", "file"])
def test_names_that_the_login_node_sends_are_no_paths_or_commands(
    laptop: Cli, node: LoginNode, name: str
) -> None:
    """They are neither paths on the laptop nor parts of its commands."""
    mark = node.laptop / "mark"
    text = f"$(touch {mark})" if name in ("node", "user") else f"../../{mark.name}"
    sent = {"id": "a-0000", "node": "n1", "user": "me", "file": "key", name: text}
    files = {sent.pop("file"): "x"}
    program = laptop.write("gpujobs-there", HOSTILE)
    program.chmod(0o755)
    found = {**sent, "files": files, "address": "tls://127.0.0.1:1", "dashboard": 1, "groups": {}}
    program.with_name("gpujobs-there.json").write_text(json.dumps(found))
    done = laptop("connect", "a-0000", GPUJOBS_REMOTE=str(program))
    assert done.returncode == 3 and "login has sent" in done.stderr, done
    assert not list(node.laptop.rglob("mark")) and not list(node.laptop.rglob("a-0000"))


PYTHON = """
import gpujobs
try:
    gpujobs.GPUSLURMCluster(host="login", site="own.yaml", queue="none")
except ValueError as error:
    print("site own has no queue" in str(error) and "banner" not in str(error) or error, flush=True)
try:
    gpujobs.GPUPBSCluster(host="login", site="own.yaml")
except ValueError as error:
    print("site own uses slurm, not pbs or torque" in str(error) or error, flush=True)
BLOCK
    print(cluster.id, flush=True)
    print(client.submit(sum, [1, 2]).result())
    client.wait_for_workers(4)
    print(len(client.nthreads()), flush=True)
    input()
    client.close()
    while True:
        try:
            with cluster.get_client() as client:
                print(client.submit(sum, [3, 4]).result(), flush=True)
                break
        except OSError:
            pass
    input()
"""


@pytest.mark.slow
def test_a_cluster_of_python_opens_its_tunnel_again(
    laptop: Cli, node: LoginNode, slurm_backend: SlurmBackend
) -> None:
    """That of the documentation: `close` ends it; the tunnel is opened again."""
    page = (ROOT / "docs" / "laptop.md").read_text()
    block = page.partition("<!-- python laptop -->\n```python\n")[2].partition("```")[0]
    laptop.env["GPUJOBS_REMOTE"] = laptop.command
    (laptop.work / "own.yaml").write_bytes((node.home / "sites" / "here.yaml").read_bytes())
    with laptop.start_python(PYTHON.replace("BLOCK", block)) as process:
        assert process.stdin and process.stdout
        checked, *lines = [process.stdout.readline().strip() for _ in range(5)]
        assert checked == lines[0] == "True" and lines[2:] == ["3", "4"], process.communicate()
        node.disconnect()
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "7\n", process.communicate()
        assert laptop.status(lines[1])["state"] == "RUNNING"
        _, messages = process.communicate("\n", timeout=patience(60))
    assert process.returncode == 0 and "the tunnel is open again" in messages, messages
    assert laptop.status(lines[1])["state"] == "CANCELLED"


@pytest.mark.slow
def test_a_killed_ssh_leaves_one_whole_cluster_or_none(
    laptop: Cli, node: LoginNode, slurm_backend: SlurmBackend
) -> None:
    """During the submission, or after it: there is one whole cluster, or none, and a message."""
    profile = {"gpus": 1, "environment": {"python": sys.executable}}
    started = laptop.start("submit", str(laptop.write("p.yaml", profile)), "--wait")
    until(lambda: slurm_backend.queue(), 60)
    for child in psutil.Process(started.pid).children(recursive=True):
        child.kill()
    _, messages = started.communicate(timeout=patience(60))
    assert started.returncode == 3 and "the connection to login ended" in messages, messages
    done = laptop("status", "--json")
    found = json.loads(done.stdout)["clusters"]
    jobs = sum(len(one["jobs"]) for one in found)
    slurm_backend.wait_empty(60) if not jobs else until(lambda: len(slurm_backend.queue()) == 1, 60)
    assert len(found) <= 1
    laptop("cancel", "--all")
