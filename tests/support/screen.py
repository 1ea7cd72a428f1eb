"""A program on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import termios
from pathlib import Path

from .processes import until


class Screen:
    """A process on a terminal; ``text`` is all that it wrote."""

    def __init__(self, *argv: str, cwd: Path) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def read(self) -> str:
        with contextlib.suppress(OSError):  # its end
            while select.select([self.master], [], [], 0)[0]:
                self.text += os.read(self.master, 65536).decode()
        return self.text

    def until(self, pattern: str, seconds: float = 90) -> re.Match[str]:
        until(
            lambda: re.search(pattern, self.read()), seconds, lambda: f"{pattern} on {self.text!r}"
        )
        found = re.search(pattern, self.text)
        assert found
        return found

    def type(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.master)
