"""Commands on a login node, without one."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from gpujobs.batch import receive
from gpujobs.batch.ssh import Host
from gpujobs.clusters import remote
from gpujobs.errors import UnavailableError

from ..support.screen import Screen


class Stop(threading.Event):
    """Records how long is waited, and is set by the eighth time."""

    waits: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.waits = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0)
        if len(self.waits) == 8:
            self.set()
        return self.is_set()


def test_a_host_that_cannot_be_reached_is_tried_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is tried less and less often, up to once a minute; a reason is logged once."""
    reasons = iter(["refused"] * 4 + ["timed out"] * 4)

    def fail() -> None:
        raise UnavailableError(next(reasons))

    stop = Stop()
    with caplog.at_level(logging.WARNING, "gpujobs"):
        assert remote.repeat("login", fail, stop) is None
    assert stop.waits == [3, 6, 12, 24, 48, 60, 60, 60]
    assert [text.split(" (")[0] for text in caplog.messages] == [
        "login: refused",
        "login: timed out",
    ]
    assert remote.repeat("login", lambda: 5, threading.Event()) == 5


def test_clusters_of_two_hosts_with_one_id_have_their_own_keys(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own key; a host cannot replace that of another one."""
    (home / "ssh").write_text("#!/bin/sh\nexit 0\n")
    (home / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(home), prepend=":")
    found = {"id": "svd-0001", "address": "tls://10.0.0.1:80", "user": "ann"}
    found |= {"node": "", "dashboard": 0}
    hosts = [remote.login_node(name) for name in ("one", "two")]
    one, two = (
        remote.Tunnel(host, {**found, "files": {"key.pem": host.name}}).folder for host in hosts
    )
    assert [(folder / "key.pem").read_text() for folder in (one, two)] == ["one", "two"]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in (one, one.parent))


ENDPOINT = {
    "id": "svd-7f3a", "user": "alice", "node": "", "address": "tls://10.0.0.1:8786",
    "dashboard": 8787, "files": {"cert.pem": "x"},
}  # fmt: skip


def test_an_answer_of_a_login_node_that_cannot_be_read_is_our_error(tmp_path: Path) -> None:
    host = Host("login", tmp_path, tmp_path)
    whole = json.dumps(ENDPOINT)
    assert remote.read_endpoint(host, whole.encode()) == ENDPOINT
    damaged = [whole[:-9], "", "null", "7", "[]", "{}", "\0", '{"id": {}}']
    for key in ENDPOINT:
        damaged.append(json.dumps({name: ENDPOINT[name] for name in ENDPOINT if name != key}))
        damaged.append(json.dumps({**ENDPOINT, key: {"a": [7]}}))
        damaged.append(json.dumps({**ENDPOINT, key: 1.5}))
    for address in ("tls://10.0.0.1", "tls://[", "tls://h:99999999", ""):
        damaged.append(json.dumps({**ENDPOINT, "address": address}))
    for text in [*map(str.encode, damaged), b"\xff"]:
        with pytest.raises(UnavailableError, match="login"):
            remote.read_endpoint(host, text)


def test_nonsense_of_a_login_node_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the command is sent: a message that is cut off, of no kind, or in the wrong order."""
    ssh = tmp_path / "ssh"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for words in ("", "{", "7", "{}", '{"kind": 7}', '{"kind": "pizza"}', '{"kind": "package"}'):
        ssh.write_text(f"#!/bin/bash\nprintf '%s\\n' '{receive.MARK.decode()}{words}'\n")
        ssh.chmod(0o755)
        session = remote.Session(Host("login", tmp_path, tmp_path), None)
        with pytest.raises(UnavailableError, match="login"), contextlib.closing(session):
            session.begin()


def test_ssh_asks_for_a_password_only_on_a_terminal(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from gpujobs.batch.ssh import Host; "
        "print(*Host('login', Path('.')).argv('-Ocheck'))"
    )
    words = [sys.executable, "-c", code]
    alone = subprocess.run(
        words, cwd=tmp_path, start_new_session=True, capture_output=True, text=True, check=True
    )
    assert "-obatchmode=yes" in alone.stdout and "-ocontrolpath=" in alone.stdout
    screen = Screen(*words, cwd=tmp_path)
    try:
        screen.until(r"-Ocheck -- login")
    finally:
        screen.close()
    assert "batchmode" not in screen.text


@pytest.mark.parametrize("where", ["stdout", "stderr", "before"])
def test_a_login_node_that_writes_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As its answer, as messages, or as a greeting in one line, which is not kept."""
    ready = f"printf '%s\\n' '{receive.MARK.decode()}{{\"kind\": \"ready\"}}'"
    flood = {
        "stdout": f"{ready}\nexec yes",
        "stderr": f"{ready}\nexec yes >&2",
        "before": f"head -c 200000 /dev/zero\necho\n{ready}\nread -r _; exit 0",
    }
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/bash\ncase $* in *-O*|*-G*|*-fN*) exit 0;; esac\n{flood[where]}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(remote, "MOST_OUTPUT", 2**22)
    host, request = Host("login", tmp_path, tmp_path), remote.Request(["status"])
    tracemalloc.start()
    try:
        if where == "before":
            assert remote.output_of(host, request) == b""
        else:
            with pytest.raises(UnavailableError, match="login has more than 4MiB") as failure:
                remote.output_of(host, request)
            assert len(str(failure.value)) < 2**17
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
