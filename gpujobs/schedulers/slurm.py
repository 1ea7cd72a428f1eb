"""Slurm: sbatch, squeue, sacct, scancel."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import ClassVar

from .base import CommandResult, JobId, JobState, JobStatus, Scheduler, members, ranges

# Options with a short spelling that a directive may use.
_SHORT = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task", "D": "chdir",
    "d": "dependency", "e": "error", "G": "gpus", "H": "hold", "i": "input", "J": "job-name", "k": "no-kill",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output",
    "O": "overcommit", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "W": "wait",
    "w": "nodelist", "x": "exclude", "F": "nodefile", "B": "extra-node-info", "S": "core-spec",
}  # fmt: skip

_STATES = {
    "PENDING": JobState.PENDING, "CONFIGURING": JobState.PENDING, "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING, "REQUEUE_FED": JobState.PENDING, "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING, "RUNNING": JobState.RUNNING, "COMPLETING": JobState.RUNNING,
    "RESIZING": JobState.RUNNING, "SIGNALING": JobState.RUNNING, "STAGE_OUT": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED, "STOPPED": JobState.SUSPENDED, "COMPLETED": JobState.COMPLETED,
    "FAILED": JobState.FAILED, "BOOT_FAIL": JobState.FAILED, "LAUNCH_FAILED": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED, "REVOKED": JobState.CANCELLED, "TIMEOUT": JobState.TIMEOUT,
    "DEADLINE": JobState.TIMEOUT, "PREEMPTED": JobState.PREEMPTED, "NODE_FAIL": JobState.NODE_FAIL,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
}  # fmt: skip

_AWAY = re.compile(
    r"unable to contact slurm controller|socket timed out|connection (refused|timed out|reset)|zero bytes were "
    r"transmitted|communication (connection|shutdown) failure|temporarily (unable|disabled)|resource temporarily "
    r"unavailable|unable to establish (controller|control machine)|in standby mode|slurm backup controller",
    re.I,
)


class Slurm(Scheduler):
    """Slurm 20.11 and newer."""

    name = "slurm"
    prefix = "#SBATCH"
    request = (
        "--partition={queue}",
        "--nodes={nodes}",
        "--ntasks-per-node=1",
        "--cpus-per-task={cpus_per_node}",
        "--gres=gpu:{gpu_type}:{gpus_per_node}",
        "--mem={memory_per_node:MB}M",
    )
    cpu_request = (
        "--partition={queue}",
        "--nodes={nodes}",
        "--ntasks-per-node=1",
        "--cpus-per-task={cpus_per_node}",
        "--mem={memory_per_node:MB}M",
    )
    account_directive = "--account={account}"
    visible_devices = "scheduler"
    mpi_command = (
        "srun", "--export=ALL", "--kill-on-bad-exit=1", "--overcommit", "--cpu-bind=none", "--ntasks={ranks}",
        "--ntasks-per-node={ranks_per_node}",
    )  # fmt: skip
    managed = frozenset(
        {
            "job-name",
            "output",
            "error",
            "time",
            "array",
            "signal",
            "open-mode",
            "chdir",
            "wait",
            "wrap",
        }
    )
    refused: ClassVar = {
        "gpus-per-task": "it binds GPUs to tasks, which cuts NVLink between workers",
        "gpu-bind": "it hides the job's GPUs from each other, which cuts NVLink between workers",
        "ntasks": "a job has one task per node, which sees all of the node's GPUs",
        "dependency": "a dependency of one job of an array holds all of them",
        "clusters": "name it as `cluster` in the site file, so that status and cancel ask the same one",
    }
    largest_array = 1000  # MaxArraySize is 1001 unless the site raised it
    index_variable = "SLURM_ARRAY_TASK_ID"
    job_variable = "SLURM_JOB_ID"
    cancel_waiting = "scancel --state=PENDING"

    def walltime(self, seconds: int) -> str:
        days, rest = divmod(seconds, 86400)
        return (f"{days}-" if days else "") + super().walltime(rest)

    def output(self, root: str, cluster: str, array: bool) -> str:
        # %x is the job's name, which is the cluster's id.
        path = root.replace("%", "%%") + "/%x/logs/slurm-" + ("%A_%a.log" if array else "%j.log")
        return path if re.fullmatch(r"[\w./%@:+,=-]+", path) else f'"{path}"'

    def array(self, count: int) -> str:
        return f"--array=0-{count - 1}"

    def options(self, line: str) -> set[str]:
        found = set()
        for item in shlex.split(line):
            if item.startswith("--"):
                found.add(item[2:].split("=")[0].lower())
            elif item.startswith("-") and len(item) > 1:
                found.add(_SHORT.get(item[1], item[1]))
        return found

    def clash(self, line: str, taken: Sequence[str] | frozenset[str] | set[str]) -> str:  # type: ignore[override]
        # sbatch takes unambiguous abbreviations: --part=x is --partition=x. Asking for memory or GPUs in a second
        # way overrides the first one as well.
        families = (
            {"mem", "mem-per-cpu", "mem-per-gpu"},
            {"gpus", "gpus-per-node", "gpus-per-socket", "gres"},
        )
        wider = set(taken).union(*(family for family in families if family & set(taken)))
        for option in sorted(self.options(line)):
            full = next(
                (
                    name
                    for name in sorted(wider)
                    if name == option or (name.startswith(option) and len(option) > 1)
                ),
                "",
            )
            if full:
                return full
        return ""

    def submit_command(self) -> list[str]:
        return ["sbatch", "--parsable", *self._clusters()]

    def parse_submit(self, stdout: str) -> str | None:
        for line in reversed(stdout.strip().splitlines()):
            if found := re.fullmatch(r"(\d+)(;.*)?", line.strip()):
                return found[1]
        return None

    def unreachable(self, result: CommandResult) -> bool:
        return result.exit_code is None or (
            result.exit_code != 0 and _AWAY.search(result.stderr) is not None
        )

    def find_command(self, name: str, user: str) -> list[str]:
        return [
            "squeue",
            *self._clusters(),
            "-h",
            "-t",
            "all",
            f"--user={user}",
            f"--name={name}",
            "-o",
            "%F|%j",
        ]

    def parse_find(self, stdout: str, name: str) -> set[str]:
        rows = [line.strip().partition("|") for line in stdout.splitlines()]
        return {number for number, _, found in rows if found == name and number.isdigit()}

    def limit_command(self) -> list[str]:
        return ["scontrol", "show", "config", *self._clusters()]

    def parse_limit(self, stdout: str) -> int | None:
        found = re.search(r"MaxArraySize\s*=\s*(\d+)", stdout)
        return max(1, int(found[1]) - 1) if found else None

    def estimate_command(self) -> list[str]:
        return ["sbatch", "--test-only", *self._clusters()]

    def parse_estimate(self, result: CommandResult) -> str:
        found = re.search(r"to start at (\S+)", result.stderr)
        return found[1] if found else result.message

    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        # By name: a departed id makes `squeue -j` fail. A pending array is one line, however many it has.
        columns = "%F|%K|%T|%N|%S|%r|%j"
        return [
            "squeue",
            *self._clusters(),
            "-h",
            "-t",
            "all",
            f"--user={user}",
            f"--name={','.join(names)}",
            "-o",
            columns,
        ]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
        wanted, found = set(ids), {}
        for line in result.stdout.splitlines():
            fields = line.strip().split("|", 6)
            if len(fields) < 7 or not fields[0].isdigit():
                continue
            number, index, native, node, starts, reason, _ = fields
            status = JobStatus(
                _state(native),
                native,
                "" if reason == "None" else reason,
                node=node,
                starts="" if starts == "N/A" or native != "PENDING" else starts,
            )
            for job in [JobId(number, i) for i in members(index)] or [JobId(number)]:
                if job in wanted:
                    found[job] = status
        return found

    def accounting_command(self, ids: Sequence[JobId]) -> list[str] | None:
        numbers = ",".join(sorted({job.submission for job in ids}))
        return [
            "sacct",
            *self._clusters(),
            "-n",
            "-P",
            "-X",
            "-j",
            numbers,
            "-o",
            "JobID,State,ExitCode,NodeList",
        ]

    def parse_accounting(
        self, result: CommandResult, ids: Sequence[JobId]
    ) -> dict[JobId, JobStatus]:
        wanted, found = set(ids), {}
        for line in result.stdout.splitlines():
            fields = line.strip().split("|")
            if len(fields) < 4 or not (number := re.fullmatch(r"(\d+)(?:_(.+))?", fields[0])):
                continue
            code, _, signal = fields[2].partition(":")
            exit_code = (
                (int(code) or 128 * bool(int(signal or 0)) + int(signal or 0))
                if code.isdigit()
                else None
            )
            native, _, reason = fields[1].partition(" ")  # "CANCELLED by 1000"
            node = "" if fields[3] == "None assigned" else fields[3]
            indexes: list[int | None] = list(members(number[2])) if number[2] else [None]
            for index in indexes:
                if (job := JobId(number[1], index)) in wanted:
                    found[job] = JobStatus(_state(native), native, reason, exit_code, node)
        return found

    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["scancel", *self._clusters(), *targets]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        return [f"{submission}_[{ranges(indexes)}]"] if indexes else [submission]

    def already_gone(self, result: CommandResult) -> bool:
        return (
            "Invalid job id" in result.stderr or "already completing or completed" in result.stderr
        )

    def _clusters(self) -> list[str]:
        return [f"--clusters={self.cluster}"] if self.cluster else []


def _state(native: str) -> JobState:
    return _STATES.get(native.split(" ")[0].rstrip("+"), JobState.UNKNOWN)
