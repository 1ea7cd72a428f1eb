"""Processes that tests start: found by a mark in their environment, and ended with the test run."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pwd
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil

REAPER = """
import os, signal, sys, time
marks = [mark.encode() for mark in sys.argv[1:]]
sys.stdin.buffer.read()  # until the test run is gone
for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
    found = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as environ, open(f"/proc/{pid}/cmdline", "rb") as cmdline:
                text = environ.read() + cmdline.read()
            if any(mark in text for mark in marks):
                os.kill(int(pid), number)
                found = True
        except OSError:
            pass
    if not found:
        break
    time.sleep(1)
"""


USUAL = 0.8
"""Seconds that `import distributed` takes on a machine that is not busy."""


NO_TIMEOUT = 25.0
"""Seconds that no step takes, even on a busy machine, unless it waits for a connection to a process
that is gone, which dask tries for 30 s."""


def measure_slowness() -> float:
    """Return how many times slower this machine is now than one that is not busy; at least 1."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import distributed"], check=True)
    return max(1.0, (time.monotonic() - started) / USUAL)


USUAL_SUM = 0.02
"""Seconds of CPU time that a loop takes on the machine of `USUAL`."""


@functools.cache
def slowness() -> float:
    """Return how many times slower this machine was since the start of this process; at least 1.

    The collection of the tests keeps a CPU busy: the time that it took tells how many others wanted it.
    """
    elapsed = time.time() - psutil.Process().create_time()
    used = time.process_time()
    sum(number * number for number in range(500_000))
    speed = (time.process_time() - used) / USUAL_SUM
    busy = min(20.0, elapsed / time.process_time())  # a process that slept before is no measure
    return max(1.0, speed) * max(1.0, busy)


def patience(seconds: float) -> float:
    """Return how long to wait for something that takes ``seconds`` at most if nothing else runs.

    Only for waiting: nothing that a test asserts depends on how busy the machine is. A test that
    asserts a duration compares it with a fixed number, or with what else it measures itself.
    """
    return seconds * slowness()


@contextlib.contextmanager
def reaper(*marks: str) -> Iterator[None]:
    """While this is open, a process waits for our death; then it ends all processes that carry one of ``marks``."""
    process = subprocess.Popen(
        [sys.executable, "-c", REAPER, *marks], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        assert process.stdin
        process.stdin.close()
        process.wait(patience(20))


PORTS = Path("/tmp/gpujobs-tests-ports")
"""Where the test processes of this host lock the ports that they have chosen."""

_held: list[int] = []
"""The locked files of this process; the locks end with it."""


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, and that no other test process of this host gets.

    They are below those that Linux gives to outgoing connections, so that none of these takes a port before its daemon
    listens there.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_768), 1000):
        with socket.socket() as item, contextlib.suppress(OSError):
            item.bind(("", port))
            hold_port(port)
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {count} ports are free")


def hold_port(port: int) -> None:
    """Keep a port for this process; an OSError if another one has it, or this one."""
    PORTS.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user made it
        PORTS.chmod(0o1777)
    file = os.open(PORTS / str(port), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    _held.append(file)


ATTEMPTS = 3
"""How often a boot is tried: a port can be taken between its choice and its use."""


class BootError(Exception):
    """A daemon has ended, or does not answer in time."""


def boot(start: Callable[[], None], undo: Callable[[], Iterable[Path]]) -> None:
    """Start daemons, up to three times; ``undo`` ends them after a failure, and returns their logs."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            start()
            return
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            ends = [f"{path}:\n{_end_of(path)}" for path in undo()]
            print(f"boot {attempt} of {ATTEMPTS}: {error}", *ends, sep="\n")
            failure = error
    raise BootError(f"{ATTEMPTS} boots failed, the last one: {failure}") from failure


def _end_of(log: Path, lines: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def put_aside(folder: Path) -> Path:
    """Rename the folder of a boot that failed; return where it is now."""
    names = (folder.with_name(f"{folder.name}.failed{n}") for n in range(1, ATTEMPTS + 1))
    return folder.rename(next(name for name in names if not name.exists()))


def until_answer(
    daemon: subprocess.Popen[bytes], answers: Callable[[], object], seconds: float, name: str
) -> None:
    """Wait until a daemon answers; an error at once if it ends."""

    def found() -> bool:
        status = daemon.poll()
        assert status is None, f"{name} has ended with {status}"
        return bool(answers())

    until(found, seconds, name, every=0.1)


def until(
    condition: Callable[[], object],
    seconds: float,
    goal: str | Callable[[], str] = "",
    every: float = 0.2,
) -> float:
    """Wait until ``condition()`` is true; return how long that took.

    ``goal`` is for the message; a function is called only if the time is over.

    Fails after ``seconds`` times the `slowness` of the machine: that of the session's start, or
    the present one if it has become busier.
    """
    asked = started = time.monotonic()
    limit = patience(seconds)
    while not (value := condition()):
        took, waited = time.monotonic() - asked, time.monotonic() - started
        if waited > limit and waited > (limit := max(limit, seconds * measure_slowness())):
            what = (goal if isinstance(goal, str) else goal()) or repr(condition)
            raise AssertionError(f"not within {limit:.0f} s: {what} (last: {value!r})")
        # A look takes as much CPU time as a part of a worker's start: the cluster comes first.
        time.sleep(max(every, 5 * took))
        asked = time.monotonic()
    return time.monotonic() - started


def stop(process: subprocess.Popen[bytes], seconds: float = 10) -> None:
    """End a process that we started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience(seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run(
    argv: list[str],
    *,
    env: Mapping[str, str],
    user: str | None = None,
    timeout: float = 120,
    cwd: Path | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as another user if one is given; its output is text."""
    return subprocess.run(
        argv,
        env=dict(env),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=patience(timeout),
        cwd=cwd,
        check=False,
        **as_user(user),
    )


def as_user(user: str | None) -> dict[str, object]:
    """Return the arguments of subprocess that run a command as ``user``."""
    ids = ids_of(user)
    return {"user": ids[0], "group": ids[1], "extra_groups": []} if ids else {}


def ids_of(user: str | None) -> tuple[int, int] | None:
    """Return the ids of another user and its group; None for the user who runs the tests."""
    if user is None or os.geteuid() != 0:
        return None
    entry = pwd.getpwnam(user)
    return entry.pw_uid, entry.pw_gid


def processes_with(mark: str) -> list[int]:
    """Return the pids of running processes whose command line or environment contains ``mark``."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            if mark.encode() in text and b"\nState:\tZ" not in (path / "status").read_bytes():
                found.append(int(path.name))
    return found


def pause(pid: int, seconds: float) -> None:
    """Stop a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
