"""This machine as a batch scheduler: `python -m gpujobs.batch.localqueue` plays its commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..injob.names import MACHINE
from .base import Scheduler
from .jobs import CommandResult, JobId, JobState, JobStatus, Statuses

_COMMAND = [sys.executable, "-m", "gpujobs.batch.localqueue"]

INHERIT = "--inherit"
"""Argument of `submit`: jobs have the environment of the process that submits, and end with it."""

SSH = (
    "ssh", "-T", "-a", "-x", "-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=15",
    "-oServerAliveCountMax=3", "-oControlPath=none", "-oClearAllForwardings=yes", "--",
)  # fmt: skip
"""Starts a program on another machine, whose name follows, over a connection of its own.

A password is never asked for. A machine that does not answer any more ends it after 60 s.
"""
AGENT = "SSH_AUTH_SOCK"
"""The variable of the user's ssh agent."""
MACHINE_LAUNCHER = (*SSH, "{node}", "env", f"{MACHINE}={{node}}")
"""Starts a process on one of the `machines` of a site, and tells it which one that is."""

_STATUSES = {
    "RUNNING": JobStatus(JobState.RUNNING, "RUNNING"),
    "GONE": JobStatus(JobState.FAILED, "GONE", "its processes have ended"),
    "ELSEWHERE": JobStatus(JobState.UNKNOWN, "ELSEWHERE", "it was started on another machine"),
}


class Local(Scheduler):
    """Jobs are sessions on this machine; a submission's id has their pids and their start times."""

    name = "local"
    prefix = "#LOCAL"
    request = ()
    visible_devices = "scheduler"  # the script sets CUDA_VISIBLE_DEVICES from the plan's devices
    mpi_command = ("mpirun", "-np", "{ranks}", "--bind-to", "none")
    managed = frozenset()
    id_line = r"(\S+)"
    index_variable = "GPUJOBS_INDEX"
    job_variable = "$"
    on_this_machine = True
    environment = (AGENT,)

    def output(self, root: str, cluster: str, array: bool) -> str:
        return f"{root}/{cluster}/logs/local"

    def array(self, count: int) -> str:
        return f"--count={count}"

    def options(self, line: str) -> set[str]:
        if line != INHERIT:
            raise ValueError("the local site has no directives")
        return {line}

    def spans_nodes(self, request: Sequence[str]) -> bool:
        return True  # nothing is requested

    def submit_command(self) -> list[str]:
        return [*_COMMAND, "submit"]

    def is_complete(self, result: CommandResult) -> bool:
        return "status" not in result.argv or bool(result.stdout.strip())

    def find_command(self, name: str, user: str) -> list[str]:
        return [*_COMMAND, "find", name]

    def parse_find(self, stdout: str, name: str) -> set[str]:
        return set(stdout.split())

    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        return [*_COMMAND, "status", *sorted({job.submission for job in ids})]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        found = {}
        for line in result.stdout.splitlines():
            submission, index, word = line.split()
            status = _STATUSES.get(word, JobStatus(JobState.UNKNOWN, word))
            found[JobId(submission, int(index))] = status
            found[JobId(submission)] = status
        return {job: found[job] for job in ids if job in found}

    def show_id(self, job: JobId) -> str:
        """Return the pid of the job's first process, which leads its session."""
        members = job.submission.partition(":")[2].split("+")
        return members[job.index or 0].partition("@")[0]

    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return [*_COMMAND, "cancel", *targets]
