"""A real sshd on the loopback interface, as the login node in front of a private batch scheduler."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from .processes import free_ports, stop, until

SSHD = "/usr/sbin/sshd"


def missing() -> str:
    """Return why there is no sshd for these tests, or ""."""
    if os.geteuid() != 0:
        return "only root can start it for another user"
    return "" if Path(SSHD).exists() else "sshd is not installed"


class LoginNode:
    """A login node; ``home`` is that of the user there, ``laptop`` a folder of the other computer."""

    def __init__(self, folder: Path, home: Path, laptop: Path, env: Mapping[str, str]) -> None:
        self.folder, self.home, self.laptop = folder, home, laptop
        self.port = free_ports(1)[0]
        self.env = dict(env)
        self.daemon: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[LoginNode]:
        """Boot it, and put an `ssh` before the laptop's PATH whose configuration has the host `login`."""
        for name in ("host", "user"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(words, check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        self.folder.chmod(0o755)
        (self.folder / "authorized").chmod(0o644)
        shell = self.folder / "shell"  # the login shell: sshd gives the session the home of passwd
        exports = "".join(f'export {key}="{value}"\n' for key, value in self.env.items())
        shell.write_text(f'#!/bin/bash\n{exports}export HOME="{self.home}" SHELL={shell}\ncd\n'
                         'echo "Welcome to the login node"\necho "banner of stderr" >&2\nexec /bin/bash "$@"\n')  # fmt: skip
        shell.chmod(0o755)
        config = self.folder / "sshd_config"
        config.write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPasswordAuthentication yes\n"
            f'ForceCommand {shell} -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        (self.laptop / "bin").mkdir()
        (self.laptop / "ssh_config").write_text(
            f"Host login\nHostName 127.0.0.1\nPort {self.port}\nUser root\nIdentityFile {self.folder}/user\n"
            f"IdentitiesOnly yes\nUserKnownHostsFile {self.laptop}/known\nStrictHostKeyChecking yes\n"
        )
        host_key = (self.folder / "host.pub").read_text()
        (self.laptop / "known").write_text(f"[127.0.0.1]:{self.port} {host_key}")
        wrapper = self.laptop / "bin" / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{self.laptop}/ssh_config" "$@"\n')
        wrapper.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        try:
            self.start()
            yield self
        finally:
            self.stop()

    def start(self) -> None:
        """Start sshd."""
        words = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "log").open("ab") as log:
            self.daemon = subprocess.Popen(words, stderr=log)
        until(lambda: b"listening" in (self.folder / "log").read_bytes(), 20, "sshd")

    def stop(self) -> None:
        """End sshd."""
        if self.daemon is not None:
            stop(self.daemon)

    def disconnect(self) -> None:
        """End the connections that gpujobs has opened."""
        for socket in (self.laptop / ".local/state/gpujobs/hosts").glob("*"):
            if socket.is_socket():
                words = [str(self.laptop / "bin" / "ssh"), f"-S{socket}", "-Oexit", "login"]
                subprocess.run(words, capture_output=True, check=True)
