"""A batch scheduler for this machine, as small as can be: ``python -m gpujobs.batch.localqueue submit|find|status|cancel``.

There is no daemon. A job is a bash script in a session of its own, and a submission's id is the list of its pids with
the times at which they started, so that a pid that was given to somebody else is not taken for the job.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from . import process as commands

GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL."""


def submit(script: str) -> str:
    """Start the jobs of ``script``; return the submission's id."""
    options = dict(re.findall(r"^#LOCAL --(\w+)=(.*)$", script, re.M))
    output = Path(options["output"])
    members = []
    for index in range(int(options.get("count", "1"))):
        spool = output.with_name(f"{output.name}-{index}.sh")
        spool.write_text(script)
        shell = script.splitlines()[0].removeprefix("#!").split()
        extra = {"GPUJOBS_INDEX": str(index), "GPUJOBS_JOB_NAME": options["name"]}
        pid = commands.spawn(
            [*shell, str(spool)],
            stdout=output.with_name(f"{output.name}-{index}.log"),
            extra=extra,
            cwd=Path.home(),
        )
        members.append(f"{pid}@{int(psutil.Process(pid).create_time())}")
    return f"{socket.gethostname()}:{'+'.join(members)}"


def find(name: str) -> str:
    """Return the ids of living submissions called ``name``; jobs of one array are listed as several."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.environ().get("GPUJOBS_JOB_NAME") == name
                and os.getsid(process.pid) == process.pid
            ):
                found.append(f"{socket.gethostname()}:{process.pid}@{int(process.create_time())}")
        except (psutil.Error, OSError):
            continue
    return "\n".join(found)


def status(submission: str) -> Iterator[str]:
    """Yield ``ID INDEX RUNNING|GONE|ELSEWHERE`` for each job."""
    host, _, members = submission.partition(":")
    for index, member in enumerate(members.split("+")):
        state = (
            "ELSEWHERE"
            if host != socket.gethostname()
            else "RUNNING"
            if _leader(member)
            else "GONE"
        )
        yield f"{submission} {index} {state}"


def cancel(targets: list[str]) -> None:
    """End the sessions of the jobs ``targets`` (ID or ID[INDEX]): SIGTERM, and SIGKILL after GRACE seconds."""
    leaders = []
    for target in targets:
        submission, _, index = target.rstrip("]").partition("[")
        host, _, members = submission.partition(":")
        if host != socket.gethostname():
            print(f"{submission} was started on {host}; cancel it there", file=sys.stderr)
            continue
        chosen = members.split("+")
        leaders += [
            member for n, member in enumerate(chosen) if index in ("", str(n)) and _leader(member)
        ]
    sessions = {int(member.partition("@")[0]) for member in leaders}
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + patience
        for pid in _in_sessions(sessions):
            try:
                os.kill(pid, number)
            except OSError:
                continue
        while time.monotonic() < deadline and any(True for _ in _in_sessions(sessions)):
            time.sleep(0.1)


def _leader(member: str) -> bool:
    """Tell whether the job's first process lives: same pid, same start (the clock may have been set a little)."""
    pid, _, started = member.partition("@")
    try:
        process = psutil.Process(int(pid))
        same = abs(process.create_time() - int(started)) < 3
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError):
        return False


def _in_sessions(sessions: set[int]) -> Iterator[int]:
    for pid in psutil.pids():
        try:
            if os.getsid(pid) in sessions and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                yield pid
        except (psutil.Error, OSError):
            continue


def main(argv: list[str]) -> None:
    """Run one command."""
    what, *rest = argv
    if what == "submit":
        try:
            print(submit(sys.stdin.read()))
        except OSError as error:
            sys.exit(f"cannot start a job from {Path.cwd()}: {error}")  # the cluster's folder
    elif what == "find":
        print(find(rest[0]))
    elif what == "status":
        print("\n".join(line for submission in rest for line in status(submission)))
    else:
        cancel(rest)


if __name__ == "__main__":
    main(sys.argv[1:])
