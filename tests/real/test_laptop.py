"""`gpujobs --host`: a real sshd in front of a real Slurm, with and without gpujobs on the login node."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..conftest import fresh_folder, make_cli, nothing_left, unavailable
from ..support.backend import SlurmBackend
from ..support.cli import Cli
from ..support.processes import patience, until
from ..support.sshd import LoginNode, missing

pytestmark = [pytest.mark.slurm]
PROFILE = {"gpus": 2, "start_workers": 2}


@pytest.fixture
def node(slurm_backend: SlurmBackend, home: Path, shared_folder: Path) -> Iterator[LoginNode]:
    if why := missing():
        unavailable("ssh", why)
    there = make_cli(slurm_backend, home, "root")
    env = {key: value for key, value in there.env.items() if key.startswith(("GPUJOBS", "SLURM"))}
    path = there.env["PATH"].split(":")
    env["PATH"] = ":".join(part for part in path if not (Path(part) / "gpujobs").exists())
    laptop = fresh_folder(shared_folder, "laptop")
    with LoginNode(fresh_folder(shared_folder, "sshd"), home, laptop, env).running() as running:
        yield running
        running.disconnect()
    nothing_left(slurm_backend)


@pytest.fixture
def laptop(node: LoginNode) -> Cli:
    """The command line of a computer without a batch scheduler."""
    path = f"{node.laptop}/bin:/usr/bin:/bin"
    return Cli(node.laptop, {"PATH": path, "GPUJOBS_HOST": "login"}, None)


@pytest.mark.parametrize("installed", [False, True])
def test_quickstart(laptop: Cli, node: LoginNode, installed: bool) -> None:
    profile = {**PROFILE, "environment": {"python": sys.executable}, "run": ["python", "own.py"]}
    laptop.write("own.py", "print('it is here')")
    remote = {"GPUJOBS_REMOTE": laptop.command} if installed else {}
    done = laptop(
        "submit", str(laptop.write("svd.yaml", profile)), "--wait", "--upload", "own.py", **remote
    )
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    assert cluster.startswith("svd-") and len(cluster.split()) == 1
    assert laptop("logs", cluster, **remote).stdout == "it is here\n"
    assert laptop.status(cluster)["state"] == "DONE"
    assert cluster in laptop("report", cluster, **remote).stdout
    assert laptop("cancel", cluster, **remote).returncode == 0
    assert ("sends gpujobs" in done.stderr) is not installed


def test_no_connection(laptop: Cli, node: LoginNode) -> None:
    (node.laptop / "known").write_text("")
    done = laptop("status")
    assert done.returncode == 3, done
    assert "Host key verification failed" in done.stderr and "ssh login failed" in done.stderr
    assert laptop("--host", "-oProxyCommand=false", "status").returncode == 2


def test_a_key_that_the_login_node_refuses(laptop: Cli, node: LoginNode) -> None:
    """Without a terminal, ssh does not ask for a password."""
    (node.folder / "authorized").write_text("")
    done = laptop("status")
    assert done.returncode == 3 and "Permission denied (" in done.stderr, done


CLIENT = """
from distributed import Client
with Client() as client:
    print(client.submit(sum, [1, 2]).result())
"""


def test_connect(laptop: Cli, node: LoginNode) -> None:
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
        node.disconnect()
        for line in tunnel.stderr:
            if "the tunnel is open again" in line:
                break
        assert user.python_run(CLIENT).stdout == "3\n"
    finally:
        tunnel.send_signal(signal.SIGINT)
        tunnel.communicate(timeout=patience(60))
    assert laptop.status(cluster)["state"] == "RUNNING"
    assert laptop("cancel", cluster).returncode == 0


def test_ssh_is_killed(laptop: Cli, node: LoginNode, slurm_backend: SlurmBackend) -> None:
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
