"""A minimal batch scheduler for this machine.

``python -m gpujobs.batch.localqueue submit|find|status|cancel``. There is no daemon. A job is a
bash script in a session of its own. A submission's id lists its pids with their start times, so
that a pid that now belongs to another process is not taken for the job.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import psutil

from ..schedulers.local import AGENT, INHERIT
from .process import PYTHON, environment, spawn

KILL_DELAY = 10.0
"""Seconds between SIGTERM and SIGKILL."""
KILL_TIMEOUT = 2.0
"""Seconds to wait for processes after SIGKILL."""
CLOCK_TOLERANCE = 3
"""Seconds by which a start time may differ: the clock may have been set."""


def submit(script: str, *, inherit: bool = False) -> str:
    """Start the jobs of ``script``; return the submission's id.

    ``inherit``: they have all variables of this process, and its parent owns them.
    """
    options = dict(re.findall(r"^#LOCAL --(\w+)=(.*)$", script, re.M))
    output = Path(options["output"])
    shell = script.splitlines()[0].removeprefix("#!").split()
    passed: Iterable[str] = (*PYTHON, AGENT)
    own: dict[str, str] = {}
    if inherit:
        passed = os.environ
        own = {"GPUJOBS_OWNER": f"{os.getppid()}@{Path('/proc/self/ns/pid').readlink()}"}
    members = []
    for index in range(int(options.get("count", "1"))):
        spool = output.with_name(f"{output.name}-{index}.sh")
        spool.unlink(missing_ok=True)  # a job of an earlier submission may still read its script
        spool.write_text(script, encoding="utf-8")
        own |= {"GPUJOBS_INDEX": str(index), "GPUJOBS_JOB_NAME": options["name"]}
        pid = spawn(
            [*shell, str(spool)],
            stdout=output.with_name(f"{output.name}-{index}.log"),
            cwd=Path.home(),
            env=environment(passed, own),
        )
        members.append(_member(psutil.Process(pid)))
    return f"{socket.gethostname()}:{'+'.join(members)}"


def find(name: str) -> str:
    """Return the ids of active submissions called ``name``; each job of an array is one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            same_name = process.environ().get("GPUJOBS_JOB_NAME") == name
            if same_name and os.getsid(process.pid) == process.pid:
                found.append(f"{socket.gethostname()}:{_member(process)}")
    return "\n".join(found)


def status(submission: str) -> Iterator[str]:
    """Yield ``ID INDEX RUNNING|GONE|ELSEWHERE`` for each job."""
    host, members = _parse(submission)
    for index, member in enumerate(members):
        yield f"{submission} {index} {_state(host, member)}"


def cancel(targets: Sequence[str]) -> None:
    """End the sessions of the jobs ``targets``, each ``ID`` or ``ID[INDEX]``.

    They get SIGTERM, and SIGKILL after `KILL_DELAY` seconds.
    """
    sessions: set[int] = set()
    for target in targets:
        submission, _, index = target.rstrip("]").partition("[")
        host, members = _parse(submission)
        if host != socket.gethostname():
            print(f"{submission} was started on {host}; cancel it there", file=sys.stderr)
            continue
        if index:
            members = [members[int(index)]]
        sessions |= {_pid(member) for member in members if _is_active(member)}
    _end_sessions(sessions, signal.SIGTERM, KILL_DELAY)
    _end_sessions(sessions, signal.SIGKILL, KILL_TIMEOUT)


def _parse(submission: str) -> tuple[str, list[str]]:
    """Return the host of a submission, and its members."""
    host, _, members = submission.partition(":")
    return host, members.split("+")


def _member(process: psutil.Process) -> str:
    return f"{process.pid}@{int(process.create_time())}"


def _pid(member: str) -> int:
    return int(member.partition("@")[0])


def _state(host: str, member: str) -> str:
    if host != socket.gethostname():
        return "ELSEWHERE"
    return "RUNNING" if _is_active(member) else "GONE"


def _is_active(member: str) -> bool:
    """Return whether the job's first process runs: same pid, same start time."""
    try:
        process = psutil.Process(_pid(member))
        difference = abs(process.create_time() - int(member.partition("@")[2]))
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False
    return bool(difference < CLOCK_TOLERANCE and not is_zombie)


def _end_sessions(sessions: set[int], number: int, seconds: float) -> None:
    """Send a signal to all processes of ``sessions``, and wait for their end."""
    for pid in _processes_of(sessions):
        with contextlib.suppress(OSError):
            os.kill(pid, number)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_processes_of(sessions)):
        time.sleep(0.1)


def _processes_of(sessions: set[int]) -> Iterator[int]:
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):
            in_session = os.getsid(pid) in sessions
            if in_session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                yield pid


def main(arguments: Sequence[str]) -> None:
    """Run one command."""
    command, *rest = arguments
    if command == "submit":
        script = sys.stdin.buffer.read().decode()  # in UTF-8, whatever the locale is
        try:
            print(submit(script, inherit=INHERIT in rest))
        except OSError as error:
            sys.exit(f"cannot start a job from {Path.cwd()}: {error}")  # the cluster's folder
    elif command == "find":
        print(find(rest[0]))
    elif command == "status":
        print(*chain.from_iterable(map(status, rest)), sep="\n")
    else:
        cancel(rest)


if __name__ == "__main__":
    main(sys.argv[1:])
