"""Machines without a batch scheduler: a real sshd in each of several network namespaces of this host.

They share its disk, as machines with a common home do, and its table of processes. Each has fake GPUs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from .cli import NVML
from .processes import reaper, stop, until
from .sge import missing as no_namespaces
from .sshd import SSHD
from .sshd import missing as no_sshd

SLOTS = 16
_INSIDE = 'mount --bind "$1" /etc/passwd && hostname "$2" && shift 2 && exec "$@"'


def missing() -> str:
    """Return why there are no such machines here, or ""."""
    reason = no_sshd()
    if not reason and "namespaces" in no_namespaces():
        reason = no_namespaces()
    return reason or ("" if shutil.which("ip") else "ip is not installed")


class Machines:
    """The machines ``ws1``, ``ws2``, …: root's home there is ``home``, as it is here.

    ``env``: the variables of each machine, by its name.
    """

    def __init__(self, folder: Path, home: Path, env: Mapping[str, Mapping[str, str]]) -> None:
        self.folder, self.home, self.env = folder, home, env
        self.names = list(env)
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.slot = -1

    @contextlib.contextmanager
    def running(self) -> Iterator[Machines]:
        """Boot them, and put an `ssh` into the folder `bin` of the home that knows their names and keys."""
        with self._own_slot(), reaper(str(self.folder)):
            self._write_keys()
            self._make_network()
            try:
                for name in self.names:
                    self.start(name)
                yield self
            finally:
                for name in self.names:
                    self.stop(name)

    def start(self, name: str) -> None:
        """Start the sshd of a machine."""
        log = self.folder / f"{name}.log"
        log.write_bytes(b"")
        words = ["nsenter", f"--net=/run/netns/{self._space(name)}", "unshare", "--mount", "--uts", "sh", "-c"]  # fmt: skip
        words += [_INSIDE, "sh", str(self.folder / "passwd"), name, SSHD, "-D", "-e"]
        with log.open("ab") as output:
            argv = [*words, "-f", str(self.folder / f"{name}.conf")]
            self.daemons[name] = subprocess.Popen(argv, stderr=output)
        until(lambda: b"listening" in log.read_bytes(), 20, "sshd")

    def stop(self, name: str) -> None:
        """End the sshd of a machine, not its connections."""
        if name in self.daemons:
            stop(self.daemons.pop(name))

    def disconnect(self, name: str) -> None:
        """Take a machine from the network: nothing is answered any more."""
        _ip("link", "set", self._port(name), "down")

    # -- network and configuration ------------------------------------------------------------------
    def _address(self, n: int) -> str:
        return f"10.214.{self.slot}.{10 + n}"

    def _space(self, name: str) -> str:
        return f"gpujobs-ssh{self.slot}-{name}"

    def _port(self, name: str) -> str:
        return f"gjssh{self.slot}p{self.names.index(name)}"

    @contextlib.contextmanager
    def _own_slot(self) -> Iterator[None]:
        for self.slot in range(SLOTS):
            with Path(f"/tmp/gpujobs-tests-ssh{self.slot}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                self._remove_network()  # of a test run that was killed
                try:
                    yield
                finally:
                    self._remove_network()
                return
        raise AssertionError("too many groups of machines at once")

    def _make_network(self) -> None:
        bridge = f"gpujobs-ssh{self.slot}"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{self._address(0)}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for n, name in enumerate(self.names, 1):
            space, port = self._space(name), self._port(name)
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", port, "master", bridge, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self._address(n)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "route", "add", "default", "via", self._address(0))

    def _remove_network(self) -> None:
        for name in self.names:
            space = self._space(name)
            if Path(f"/run/netns/{space}").exists():
                for pid in _ip("netns", "pids", space).split():  # sshd of a connection that is lost
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", space)
            with contextlib.suppress(subprocess.CalledProcessError):  # it goes with the namespace
                _ip("link", "del", self._port(name))
        if Path(f"/sys/class/net/gpujobs-ssh{self.slot}").exists():
            _ip("link", "del", f"gpujobs-ssh{self.slot}")

    def _write_keys(self) -> None:
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        key = (self.folder / "host.pub").read_text()
        config, known = "", ""
        for n, name in enumerate(self.names, 1):
            config += f"Host {name}\nHostName {self._address(n)}\n"
            known += f"{self._address(n)} {key}"
            variables = {"PYTHONPATH": str(NVML), **self.env[name]}
            own = " ".join(f'"{key}={value}"' for key, value in variables.items())
            (self.folder / f"{name}.conf").write_text(
                f"ListenAddress {self._address(n)}\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
                f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nSetEnv {own}\n"
            )
        config += (
            f"Host *\nUser root\nIdentityFile {self.folder}/user\nIdentitiesOnly yes\n"
            f"UserKnownHostsFile {self.folder}/known\nStrictHostKeyChecking yes\n"
        )
        (self.folder / "config").write_text(config)
        (self.folder / "known").write_text(known)
        (self.home / "bin").mkdir()
        wrapper = self.home / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{self.folder}/config" "$@"\n')
        wrapper.chmod(0o755)
        entry = pwd.getpwnam("root")
        own = f"root:x:0:0:{entry.pw_gecos}:{self.home}:/bin/bash\n"
        lines = Path("/etc/passwd").read_text().splitlines(keepends=True)
        others = (line for line in lines if not line.startswith("root:"))
        (self.folder / "passwd").write_text("".join([own, *others]))
        Path("/run/sshd").mkdir(exist_ok=True)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
