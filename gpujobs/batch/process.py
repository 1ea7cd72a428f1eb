"""Start processes, the only module outside jobs that does: argv lists, a time limit, no shell."""

from __future__ import annotations

import contextlib
import os
import random
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, cast

from ..errors import UnavailableError
from ..injob.names import without_request
from ..schedulers import CommandResult

COMMAND_TIMEOUT = 60.0
"""Seconds. If its controller is down, sbatch retries for 9 s by itself; LSF's commands wait
forever."""

MOST_OUTPUT = 256 * 2**20
"""Bytes. Torque's list of all jobs may have some 100 MB."""
_AFTER_EXIT = 0.5
"""Seconds for which the output of a process is read after its end."""
_LOOK = 0.1
"""Seconds between two looks at whether a process has ended."""

_COMMON = (
    "HOME", "USER", "LOGNAME", "PATH", "SHELL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "KRB5CCNAME",
    "XDG_RUNTIME_DIR",
)  # fmt: skip
"""Variables that are passed to commands. The others are not: SBATCH_* variables would change the
meaning of a script, and a job inherits the environment of its submit command."""

PYTHON = (
    "PYTHONHOME", "PYTHONPATH", "PYTHONPLATLIBDIR", "PYTHONNOUSERSITE", "PYTHONUSERBASE",
)  # fmt: skip
"""Variables that decide where an interpreter finds its packages."""

_ENGLISH = {"LC_MESSAGES": "C", "LC_NUMERIC": "C", "LC_TIME": "C", "LANGUAGE": "C"}
"""Not LC_ALL=C, which a job would inherit: it would print question marks for other letters."""


def environment(
    names: Iterable[str] = (), values: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return an allow-list of variables, with ``names`` and ``values``; messages in English."""
    passed = {name: os.environ[name] for name in (*_COMMON, *names) if name in os.environ}
    languages = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    language = next(filter(None, languages), "C.UTF-8")
    return {**passed, "LANG": language, **_ENGLISH, **(values or {})}


def python_environment() -> dict[str, str]:
    """Return the variables with which this interpreter, started again, finds the same packages."""
    passed = {name: os.environ[name] for name in PYTHON if name in os.environ}
    given = passed.get("PYTHONPATH", "").split(os.pathsep)
    own = tuple(f"{prefix}{os.sep}" for prefix in (sys.prefix, sys.base_prefix))
    added = [folder for folder in sys.path if folder in given or not folder.startswith(own)]
    if added:
        passed["PYTHONPATH"] = os.pathsep.join(str(Path(folder).absolute()) for folder in added)
    return passed


def run(
    argv: Sequence[str],
    *,
    stdin: str = "",
    timeout: float = COMMAND_TIMEOUT,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    most: int | None = None,
) -> CommandResult:
    """Run a command to its end, for at most ``timeout`` seconds; ``env`` is of `environment`.

    ``most``: bytes that it may write; `MOST_OUTPUT` by default.

    This interpreter also gets `python_environment`; commands of the batch scheduler do not. The
    result has no exit code if the command was not found, could not start or timed out.
    """
    words = tuple(argv)
    variables = dict(env or environment())
    if words[0] == sys.executable:
        variables |= python_environment()
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            cwd=cwd,
            start_new_session=True,  # Ctrl-C is for gpujobs, which may have to finish a submission
        )
    except FileNotFoundError:
        problem = f"the command {words[0]} was not found"
        return CommandResult(words, None, problem=problem, started=False)
    except OSError as error:
        problem = f"the command {words[0]} could not be started: {error.strerror}"
        return CommandResult(words, None, problem=problem, started=False)
    return _finish(process, words, stdin, timeout, MOST_OUTPUT if most is None else most)


def is_available(command: str) -> bool:
    """Return whether ``command``, a name or a path, can be run."""
    return shutil.which(command) is not None


def become(launcher: Sequence[str], argv: Sequence[str]) -> NoReturn:
    """Replace this process by a step of its job, in which ``argv`` has all variables of this one.

    The ``launcher`` does not get the request of the job (see `JOB_REQUEST`). Raises OSError.
    """
    environ = without_request(os.environ)
    hidden = [f"{name}={value}" for name, value in os.environ.items() if name not in environ]
    os.execvpe(launcher[0], (*launcher, "env", *hidden, *argv), environ)  # noqa: S606 - no shell


def spawn(
    argv: Sequence[str], *, stdout: Path, cwd: Path, env: Mapping[str, str] | None = None
) -> int:
    """Start a process that outlives this one, in a session of its own; return its pid."""
    with stdout.open("ab") as output:
        process = subprocess.Popen(
            tuple(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env or environment(),
            cwd=cwd,
            start_new_session=True,
        )
    process.returncode = 0  # this process does not wait for it
    return process.pid


class Talk(NamedTuple):
    """A process, and the unbuffered pipes to its stdin and from its stdout."""

    process: subprocess.Popen[bytes]
    stdin: IO[bytes]
    stdout: IO[bytes]


def start(argv: Sequence[str], stderr: IO[bytes] | None = None) -> Talk:
    """Start a program that talks through pipes, such as ssh. Raises UnavailableError.

    ``stderr``: a file for its messages; else those of this terminal.
    """
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(tuple(argv), stdin=pipe, stdout=pipe, stderr=stderr, bufsize=0)
    except OSError as error:
        raise UnavailableError(f"{argv[0]} cannot be started: {error.strerror}") from None
    return Talk(process, cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout))


def _finish(
    process: subprocess.Popen[bytes],
    words: tuple[str, ...],
    stdin: str,
    timeout: float,
    most: int,
) -> CommandResult:
    pipes = _Pipes(process, stdin.encode(), most)
    problem = ""
    try:
        pipes.exchange(timeout)
    except subprocess.TimeoutExpired:
        problem = f"{words[0]} did not respond within {timeout:.0f} s"
    except _TooLong:
        problem = f"{words[0]} wrote more than {most // 2**20} MiB"
    finally:
        if process.poll() is None:  # also if this process was interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        pipes.close()
    code = None if problem else process.returncode
    return CommandResult(words, code, _text(pipes.stdout), _text(pipes.stderr), problem)


class _TooLong(Exception):
    """A command has written more than it may."""


class _Pipes:
    """The pipes of a process, until it has ended.

    Not `Popen.communicate`, which waits until all copies of the pipes are closed: a background
    process of a site's wrapper may hold them for hours.
    """

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, most: int) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self._process = process
        self._most = most
        self._rest = memoryview(stdin)
        self._open = selectors.DefaultSelector()
        for pipe, output in ((process.stdout, self.stdout), (process.stderr, self.stderr)):
            self._open.register(cast("IO[bytes]", pipe), selectors.EVENT_READ, output)
        os.set_blocking(cast("IO[bytes]", process.stdin).fileno(), False)
        self._open.register(cast("IO[bytes]", process.stdin), selectors.EVENT_WRITE)

    def exchange(self, timeout: float) -> None:
        """Write and read until the process ends. Raises TimeoutExpired or _TooLong."""
        deadline = time.monotonic() + timeout
        while self._open.get_map() and self._process.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                self._drain()  # it may have written why
                raise subprocess.TimeoutExpired(self._process.args, timeout)
            self._transfer(min(left, _LOOK))
        self._process.wait(max(0, deadline - time.monotonic()))
        self._drain()

    def close(self) -> None:
        """Close the pipes on this side."""
        self._open.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(BrokenPipeError):
                cast("IO[bytes]", pipe).close()

    def _drain(self) -> None:
        """Read what is there, for a moment."""
        deadline = time.monotonic() + _AFTER_EXIT
        while self._open.get_map() and time.monotonic() < deadline:
            self._transfer(_LOOK)

    def _transfer(self, seconds: float) -> None:
        """Write and read once; wait for at most ``seconds``."""
        for key, _ in self._open.select(seconds):
            is_input = key.data is None
            done = self._write(key.fd) if is_input else self._read(key.fd, key.data)
            if done:
                self._open.unregister(key.fileobj)
                cast("IO[bytes]", key.fileobj).close()

    def _write(self, pipe: int) -> bool:
        """Write a part of the input; return whether that was the last one."""
        try:
            self._rest = self._rest[os.write(pipe, self._rest[: select.PIPE_BUF]) :]
        except BrokenPipeError:  # the process does not read it
            return True
        return not self._rest

    def _read(self, pipe: int, output: bytearray) -> bool:
        """Read a part of the output; return whether it has ended."""
        part = os.read(pipe, 2**16)
        output += part
        if len(output) > self._most:
            raise _TooLong
        return not part


def _text(raw: bytearray) -> str:
    """Return output as text. A carriage return alone does not end a line: a job may have one."""
    return raw.decode(errors="replace").replace("\r\n", "\n")


# -- the host: its clock and its commands, which a simulation replaces -----------------------------
class System:
    """This host. A simulation replaces it as a whole."""

    def monotonic(self) -> float:
        """Return the time in seconds; it does not change when the clock of the host is set."""
        return time.monotonic()

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait, in a thread."""
        time.sleep(seconds)

    def spread(self, seconds: float) -> float:
        """Return about as many seconds, so that not all processes retry at the same moment."""
        return seconds * random.uniform(0.8, 1.2)  # noqa: S311 - no secret

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str,
        timeout: float,
        cwd: Path | None,
        env: Mapping[str, str],
    ) -> CommandResult:
        """Run a command of the batch scheduler to its end (see `process.run`)."""
        return run(argv, stdin=stdin, timeout=timeout, cwd=cwd, env=env)


HOST = System()
