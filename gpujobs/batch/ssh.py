"""A login node, reached through the user's own OpenSSH: one connection for all commands."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shlex
import time
from functools import cached_property
from pathlib import Path

from ..errors import InputError, UnavailableError
from ..text import printable
from . import process, receive

logger = logging.getLogger("gpujobs")

_KEEP = {"controlpersist": "10m", "serveraliveinterval": "15", "connecttimeout": "30"}
"""Options of a connection, where the user's configuration has none. ssh waits for 45 s."""
LONGEST_FOLDER = 73
"""Bytes of the folder of a socket, whose path has 107: a digest, and first a suffix of ssh."""
_UNSET = (None, "no", "none", "0")

NOTHING = 69
"""The exit code of a command if there is neither gpujobs nor Python for it."""
_PYTHONS = "python3 python3.14 python3.13 python3.12 python3.11"
_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 11))"
_LOADER = (
    f"import sys; sys.stdout.buffer.write({receive.message('python')!r}); sys.stdout.flush(); "
    "exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
)
"""Runs the program that comes on stdin, of a number of bytes that stands before it."""


def remote_command(remote: str) -> str:
    """Return what the login shell executes: gpujobs, or a Python that waits for a program.

    ``remote``: the path of one of them; "": gpujobs of the login shell, else its Python. The words
    of the user are not in it: other users of the login node see the list of processes.
    """
    loader = f"-P -c {shlex.quote(_LOADER)}"  # -P: without the modules in the home
    if Path(remote).name.startswith("python"):
        find = f"exec {shlex.quote(remote)} {loader}"
    elif remote:
        find = f"exec {shlex.quote(remote)} at-login"
    else:
        find = (
            "command -v gpujobs >/dev/null 2>&1 && exec gpujobs at-login; "
            f'for p in {_PYTHONS}; do "$p" -P -c {shlex.quote(_NEW_ENOUGH)} 2>/dev/null '
            f'&& exec "$p" {loader}; done; exit {NOTHING}'
        )
    # csh has no `-l` with a command, but reads its start-up file without it.
    shell = 'case ${SHELL:=/bin/sh} in *csh) f=-c;; *) f=-lc;; esac; exec "$SHELL" $f '
    return _in_sh(shell + shlex.quote(_in_sh(find)))


def _in_sh(script: str) -> str:
    """Return the command that runs a script in `sh`, for any other shell."""
    return f"exec sh -c {shlex.quote(script)}"


class Host:
    """A login node by its name for ssh.

    Private are ``folder``, and ``sockets`` for that of the connection; default: the same folder.
    """

    def __init__(self, name: str, folder: Path, sockets: Path | None = None) -> None:
        """Raises InputError if ssh would take the name for an option."""
        if name.startswith("-") or not name or name != printable(name) or len(name.split()) != 1:
            raise InputError(f"{name!r} is not a host")
        self.name, self.folder = name, folder
        digest = hashlib.sha256(f"{folder}/{name}".encode()).hexdigest()[:16]
        self.keys = folder / f"{digest}.keys"
        """The folder for keys of clusters of this host: another one may have their ids, too."""
        self._socket = (sockets or folder) / digest
        self._log = self._socket.with_suffix(".log")

    @cached_property
    def _options(self) -> list[str]:
        """The options that the user's configuration for this host does not have."""
        shown = process.run(["ssh", "-G", "--", self.name]).stdout
        own = dict(re.findall(r"^(\S+) (.*)$", shown, re.M))
        socket = str(self._socket).replace("%", "%%")
        wanted = {"controlpath": f'"{socket}"', **_KEEP}
        options = {key: value for key, value in wanted.items() if own.get(key) in _UNSET}
        options["controlmaster"] = "auto"
        if not _has_terminal():
            options["batchmode"] = "yes"
        return [f"-o{key}={value}" for key, value in options.items()]

    def argv(self, *words: str, command: str = "") -> list[str]:
        """Return a command of ssh: ``words`` are its options, ``command`` is of the other side."""
        return ["ssh", *self._options, *words, "--", self.name, *filter(None, [command])]

    def is_open(self) -> bool:
        """Return whether there is a connection."""
        return process.run(self.argv("-Ocheck")).exit_code == 0

    def words(self) -> str:
        """Return the messages of ssh about the connection, which is a process in the background."""
        with contextlib.suppress(FileNotFoundError):
            return self._log.read_bytes().decode(errors="replace")
        return ""

    def connect(self) -> int:
        """Connect, unless there is a connection; at a terminal, ssh may ask for a password.

        Return how much of `words` is not new. Raises UnavailableError with the rest.
        """
        with self._log.open("ab") as log:
            fcntl.flock(log, fcntl.LOCK_EX)  # of two commands, one asks
            known = len(self.words())
            if self.is_open():
                return known
            log.truncate(0)
            opening = process.start(self.argv("-fN", f"-E{self._log}"))
            shown = self._show_words(opening)
        if opening.process.returncode:
            text = self.words()[shown:].strip() or "see its message"
            raise UnavailableError(f"ssh {self.name} failed: {text}")
        return shown

    def _show_words(self, opening: process.Talk) -> int:
        """Wait for ssh; at a terminal, show its messages, such as a menu; return their length."""
        shown = 0
        while opening.process.poll() is None:
            time.sleep(0.02)
            if _has_terminal() and (text := self.words()[shown:]).endswith("\n"):
                logger.warning("%s", text.rstrip())
                shown += len(text)
        return shown

    def forward(self, port: int, address: str, *, cancel: bool = False) -> str:
        """Forward a local port to ``address``, HOST:PORT, or end that; return the error, or ""."""
        action = "cancel" if cancel else "forward"
        done = process.run(self.argv(f"-O{action}", f"-L127.0.0.1:{port}:{address}"))
        return "" if done.exit_code == 0 else done.first_line


def _has_terminal() -> bool:
    """Return whether ssh can ask for a password."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True
