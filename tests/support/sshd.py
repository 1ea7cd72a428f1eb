"""A real sshd on the loopback interface, as the login node in front of a private batch scheduler."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil

from .processes import boot, free_ports, processes_with, stop, until_answer

SSHD = "/usr/sbin/sshd"
BANNER = "Welcome to the login node"
_WITH_ACCOUNT = (
    'mount --bind "$1/passwd" /etc/passwd && if [ -e "$1/pam" ]; then mount --bind "$1/pam" /etc/pam.d/sshd; fi '
    '&& shift && exec "$@"'
)
"""Runs a program that sees the /etc/passwd and PAM of a folder, in a mount namespace of its own."""


def missing() -> str:
    """Return why there is no sshd for these tests, or ""."""
    if os.geteuid() != 0:
        return "only root can start it for another user"
    return "" if Path(SSHD).exists() else "sshd is not installed"


def _is_of_a_job(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "SLURM_JOB_ID" in process.environ()
    return False


class LoginNode:
    """A login node; ``home`` is that of the user there, ``laptop`` a folder of the other computer.

    The user's start-up files print a banner, and set ``env``.
    """

    def __init__(
        self, folder: Path, home: Path, laptop: Path, env: Mapping[str, str], user: str = "root", shell: str = "/bin/bash",
        ports: Callable[[int], list[int]] = free_ports,
    ) -> None:  # fmt: skip
        self.folder, self.home, self.laptop = folder, home, laptop
        self.user, self.shell = user, shell
        self.port, self._choose_ports = 0, ports
        self.env = dict(env)
        self.daemon: subprocess.Popen[bytes] | None = None
        self.python = ""
        """A Python with dask that the user can run."""

    @contextlib.contextmanager
    def running(self) -> Iterator[LoginNode]:
        """Boot it, and put an `ssh` before the laptop's PATH whose configuration has the host `login`."""
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        self.folder.chmod(0o755)
        (self.folder / "authorized").chmod(0o644)
        self._write_account()
        (self.laptop / "bin").mkdir()
        wrapper = self.laptop / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{self.laptop}/ssh_config" "$@"\n')
        wrapper.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        try:
            boot(self._start_at_new_port, self._undo)
            yield self
        finally:
            self.stop()

    def _undo(self) -> list[Path]:
        self.stop()
        return [self.folder / "log"]

    def _start_at_new_port(self) -> None:
        self.port = self._choose_ports(1)[0]
        config = self.folder / "sshd_config"
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPasswordAuthentication yes\n"
        )
        (self.laptop / "ssh_config").write_text(
            f"Host login\nHostName 127.0.0.1\nPort {self.port}\nUser {self.user}\nIdentityFile {self.folder}/user\n"
            f"IdentitiesOnly yes\nUserKnownHostsFile {self.laptop}/known\nStrictHostKeyChecking yes\n"
        )
        host_key = (self.folder / "host.pub").read_text()
        (self.laptop / "known").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        self.start()

    def _write_account(self) -> None:
        """Write the start-up files, and an /etc/passwd in which the user has this home and shell."""
        values = {key: shlex.quote(value) for key, value in self.env.items()}
        for name, form in ((".profile", "export {}={}\n"), (".cshrc", "setenv {} {}\n")):
            lines = "".join(form.format(*item) for item in values.items())
            (self.home / name).write_text(
                f"{lines}echo '{BANNER}'\nsh -c 'echo banner of stderr >&2'\n"
            )
        entry = pwd.getpwnam(self.user)
        own = f"{self.user}:x:{entry.pw_uid}:{entry.pw_gid}::{self.home}:{self.shell}\n"
        lines = Path("/etc/passwd").read_text().splitlines(keepends=True)
        others = (line for line in lines if not line.startswith(f"{self.user}:"))
        (self.folder / "passwd").write_text("".join([own, *others]))

    def start(self) -> None:
        """Start sshd."""
        account = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            _WITH_ACCOUNT,
            "sh",
        ]
        words = [
            *account,
            str(self.folder),
            SSHD,
            "-D",
            "-e",
            "-f",
            str(self.folder / "sshd_config"),
        ]
        with (self.folder / "log").open("ab") as log:
            before = log.tell()
            self.daemon = subprocess.Popen(words, stderr=log)

        def listens() -> bool:
            return b"listening" in (self.folder / "log").read_bytes()[before:]

        until_answer(self.daemon, listens, 20, "sshd")

    def stop(self) -> None:
        """End sshd."""
        if self.daemon is not None:
            stop(self.daemon)

    @contextlib.contextmanager
    def frozen(self, name: str = "sshd") -> Iterator[None]:
        """Processes of sshd, or ssh of the laptop, are stopped: connections stay open, nothing answers."""
        assert self.daemon
        daemon = psutil.Process(self.daemon.pid)
        found = [daemon, *daemon.children(recursive=True)]
        if name == "ssh":
            found = [psutil.Process(pid) for pid in processes_with(str(self.laptop))]
        stopped = [one for one in found if one.name().startswith(name)]
        assert stopped
        for one in stopped:
            one.suspend()
        try:
            yield
        finally:
            for one in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()

    def processes(self) -> list[psutil.Process]:
        """Return the processes that connections have started and left here, without those of jobs."""
        assert self.daemon
        found = psutil.Process(self.daemon.pid).children(recursive=True)
        # sshd writes its port into the environment, which also a process in the background keeps.
        for pid in processes_with(f" 127.0.0.1 {self.port}\0"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return [one for one in found if one.is_running() and not _is_of_a_job(one)]

    def disconnect(self) -> None:
        """End the connections that gpujobs has opened."""
        folders = [self.laptop / ".local/state/gpujobs/hosts", *self.laptop.glob("gpujobs-*")]
        for socket in (path for folder in folders for path in folder.glob("*")):
            if socket.is_socket():
                words = [str(self.laptop / "bin" / "ssh"), f"-S{socket}", "-Oexit", "login"]
                subprocess.run(words, capture_output=True, check=True)
