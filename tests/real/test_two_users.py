"""What another user of the machine can do to a cluster, and a stranger's files to a user: nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ..support.cli import ORDINARY_USER, Cli, text_of
from ..support.processes import processes_with

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
OTHER = "daemon"

CONNECT = """
import http.client, json, socket, ssl, sys, urllib.error, urllib.request
from pathlib import Path

folder, ports = Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]
found = {"folder": [], "dask": [], "http": [], "refused": 0}
for path in (folder, folder / "tls-key.pem", folder / "scheduler.json", folder / "planted"):
    for action in (path.read_bytes, path.iterdir, lambda: path.write_text("x")):
        try:
            list(action())
            found["folder"].append(str(path))
        except PermissionError:
            pass
for port in ports:
    url = f"http://127.0.0.1:{port}/api/v1/retire_workers"
    try:
        with urllib.request.urlopen(url, b"{}") as answer:
            found["http"].append(answer.read().decode())
    except urllib.error.HTTPError:
        continue  # a dashboard
    except (OSError, http.client.HTTPException):
        pass
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("127.0.0.1", port)) as plain:
            with context.wrap_socket(plain) as secure:
                secure.recv(1)  # TLS 1.3 reports a missing certificate here
                found["dask"].append(port)
    except (ssl.SSLError, ConnectionError):
        found["refused"] += 1
print(json.dumps(found))
"""


def listening_ports(mark: str) -> set[int]:
    """Return the ports at which the processes with ``mark`` listen."""
    ports = set()
    for pid in processes_with(mark):
        for connection in psutil.Process(pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                ports.add(connection.laddr.port)
    return ports


def abstract_sockets(mark: str) -> list[str]:
    """Return the abstract UNIX sockets of the processes with ``mark``: they have no permissions."""
    found = []
    for pid in processes_with(mark):
        for connection in psutil.Process(pid).net_connections("unix"):
            if str(connection.laddr).startswith(("@", "\0")):
                found.append(str(connection.laddr))
    return found


@pytest.fixture
def owner(home: Path) -> Iterator[Cli]:
    made = Cli(home, {"GPUJOBS_SITE": "local"}, ORDINARY_USER)
    yield made
    made("cancel", "--all")


def test_another_user_of_the_machine_reads_and_reaches_nothing(owner: Cli, home: Path) -> None:
    profile = {"gpus": 0, "workers": {"count": 2}, "start_workers": 2}
    cluster = owner.submit(profile, "--wait")
    found = owner.status(cluster)
    ports = listening_ports(cluster)
    assert len(ports) >= 5  # a dask scheduler, two nannies, two workers, and HTTP
    assert abstract_sockets(cluster) == []
    other = Cli(home.with_name(f"{home.name}-other"), {"GPUJOBS_SITE": "local"}, OTHER)
    words = [str(found["folder"]), *map(str, sorted(ports))]
    done = other.python_run(CONNECT, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"folder": [], "dask": [], "http": [], "refused": 5}
    assert other("cancel", cluster).returncode == 4  # not known to this user
    assert owner.status(cluster)["state"] == "RUNNING"


def test_a_hostile_profile_does_nothing_before_it_is_submitted(owner: Cli, home: Path) -> None:
    mark = home / "work" / "mark"
    touch = f"touch {mark}"
    hostile: dict[str, Any] = {
        "gpus": 0,
        "run": ["sh", "-c", touch],
        "name": "x",
        "environment": {"setup": touch, "python": f"{home}/work/python.sh"},
        "env": {"A": f"$({touch})", "B": f"`{touch}`"},
        "workdir": f"/tmp/$({touch})",
    }
    script = owner.write("python.sh", f"#!/bin/sh\n{touch}\n")
    script.chmod(0o755)
    path = str(owner.write("p.yaml", hostile))
    for command in ("plan", "render"):
        owner(command, path)
        owner(command, path, "--set", f"name=$({touch})")
    path = str(owner.write("q.yaml", f"gpus: !!python/object/apply:os.system ['{touch}']\n"))
    assert owner("plan", path).returncode == 2
    assert not mark.exists()


GOOD = {"description": "x", "scheduler": "local", "queues": {"local": {}}}
PLANT = """
import json, os, sys
from pathlib import Path

folder, mark, attack = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sites = folder / "sites"
hostile = {"description": "x", "scheduler": "local", "queues": {"local": {}}, "setup": f"touch {mark}"}
text = json.dumps(hostile)
if attack == "file":
    (sites / "here.yaml").write_text(text)
elif attack == "link":
    evil = folder / "evil"
    evil.mkdir()
    (evil / "here.yaml").write_text(text)
    (sites / "here.yaml").symlink_to(evil / "here.yaml")
elif attack == "replace":
    sites.rename(folder / "old")
    sites.mkdir(mode=0o755)
    (sites / "here.yaml").write_text(text)
elif attack == "group":
    (sites / "here.yaml").unlink()
    (sites / "here.yaml").write_text(text)
elif attack == "templates":
    (sites / "templates").mkdir()
    lines = '{% extends "gpujobs/local.sh.j2" %}{% block epilogue %}touch MARK{% endblock %}'
    (sites / "templates" / "local.sh.j2").write_text(lines.replace("MARK", mark))
"""


@pytest.mark.parametrize(
    ("attack", "owner_of_sites", "mode", "has_file"),
    [
        ("file", "root", 0o1777, False),
        ("link", "root", 0o1777, False),
        ("replace", ORDINARY_USER, 0o755, True),
        ("group", ORDINARY_USER, 0o775, True),
        ("templates", "root", 0o1777, True),
    ],
)
def test_a_hostile_site_is_not_used(
    owner: Cli, home: Path, attack: str, owner_of_sites: str, mode: int, has_file: bool
) -> None:
    """A user has a folder in the search path in which, or above which, another user can write."""
    open_folder = home.with_name(f"{home.name}-open")
    sites, mark = open_folder / "sites", home / "work" / "mark"
    sites.mkdir(parents=True)
    if has_file:
        (sites / "here.yaml").write_text(text_of(GOOD))
    shutil.chown(sites, owner_of_sites, OTHER)
    sites.chmod(mode)
    environ = {"GPUJOBS_SITE": "here", "GPUJOBS_SITE_PATH": str(sites)}
    profile = str(owner.write("p.yaml", {"gpus": 0, "workers": {"count": 1}}))
    if has_file and mode != 0o775:
        done = owner("plan", profile, **environ)
        assert done.returncode == 0, done.stderr
    open_folder.chmod(0o777)
    other = Cli(home.with_name(f"{home.name}-other"), {}, OTHER)
    planted = other.python_run(PLANT, str(open_folder), str(mark), attack)
    assert planted.returncode == 0, planted.stderr
    if attack != "replace":
        open_folder.chmod(0o755)
    for command in ("render", "submit"):  # `plan` reads no templates
        done = owner(command, profile, **environ)
        assert done.returncode == 2 and " is not used: " in done.stderr, done
        assert f"user {OTHER}" in done.stderr or "is writable by" in done.stderr
    if attack == "templates":  # the user's own site file in a folder such as /tmp
        shutil.chown(sites / "here.yaml", ORDINARY_USER)
        by_path = {"GPUJOBS_SITE": str(sites / "here.yaml"), "GPUJOBS_SITE_PATH": ""}
        done = owner("submit", profile, **by_path)
        assert done.returncode == 2 and f"belongs to user {OTHER}" in done.stderr, done
    assert not mark.exists()
    shutil.rmtree(open_folder)
