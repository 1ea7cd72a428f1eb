"""Torque: PBS's commands in another dialect, so that one cannot be taken for the other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .base import JobId, JobState, JobStatus
from .pbs import PBS, job_id

_STATES = {
    "Q": JobState.PENDING, "H": JobState.PENDING, "W": JobState.PENDING, "T": JobState.PENDING,
    "R": JobState.RUNNING, "E": JobState.RUNNING, "S": JobState.SUSPENDED,
}  # fmt: skip
_CODES = {
    0: JobState.COMPLETED, 271: JobState.CANCELLED, -11: JobState.TIMEOUT, -10: JobState.OUT_OF_MEMORY,
    -4: JobState.NODE_FAIL, -5: JobState.NODE_FAIL, -6: JobState.NODE_FAIL,
}  # fmt: skip


class Torque(PBS):
    """Torque 4 and newer. It takes `-l select=…` without a word and ignores it."""

    name = "torque"
    request = (
        "-q {queue}",
        "-l nodes={nodes}:ppn={cpus_per_node}:gpus={gpus_per_node}",
        "-l mem={memory_per_job:MB}mb",
    )
    cpu_request = (
        "-q {queue}",
        "-l nodes={nodes}:ppn={cpus_per_node}",
        "-l mem={memory_per_job:MB}mb",
    )
    visible_devices = "scheduler"
    managed = frozenset({"-N", "-o", "-e", "-j", "-k", "-m", "-r", "-S", "-t", "-l walltime"})
    refused: ClassVar = {
        **PBS.refused,
        "-l select": "it is PBS Professional's: Torque takes it and ignores it (`-l nodes=1:ppn=8:gpus=1`)",
        "-J": "it is PBS Professional's",
    }
    with_value: ClassVar = frozenset("aAbcCdDejJkKlLmMNopPqrStTuvwW")
    index_variable = "PBS_ARRAYID"

    def output(self, root: str, cluster: str, array: bool) -> str:
        return super().output(root, cluster, array=False)  # qsub appends the index

    def array(self, count: int) -> str:
        return f"-t 0-{count - 1}"

    def find_command(self, name: str, user: str) -> list[str]:
        # Members of arrays are called NAME-0, and only the array itself NAME. It is in the list of all jobs.
        return ["qstat", "-f1", *([f"@{self.cluster}"] if self.cluster else [])]

    def parse_find(self, stdout: str, name: str) -> set[str]:
        return {
            job.submission
            for job, record in self.records(stdout).items()
            if record.get("Job_Name") == name
        }

    def limit_command(self) -> list[str] | None:
        return None

    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        return ["qstat", "-t", "-f1", *self._submissions(ids)]

    def accounting_command(self, ids: Sequence[JobId]) -> list[str] | None:
        return None

    def records(self, stdout: str) -> dict[JobId, Mapping[str, Any]]:
        # More jobs than were asked for may be listed.
        jobs: dict[JobId, Mapping[str, Any]] = {}
        record: dict[str, Any] = {}
        for line in stdout.splitlines():
            if line.startswith("Job Id: "):
                record = {}
                if job := job_id(line[8:].strip()):
                    jobs[job] = record
            elif found := re.match(r"    (\S+) = (.*)", line):
                record[found[1]] = found[2]
        return jobs

    def status(self, record: Mapping[str, Any], parent: Mapping[str, Any]) -> JobStatus:
        native, said = str(record.get("job_state", "")), str(record.get("comment", ""))
        hosts = dict.fromkeys(re.findall(r"([\w.-]+)/", str(record.get("exec_host", ""))))
        text = str(record.get("exit_status", ""))
        code = int(text) if re.fullmatch(r"-?\d+", text) else None
        state = _STATES.get(native, JobState.UNKNOWN)
        if native == "C":  # without a code it was deleted while it waited
            state = JobState.CANCELLED if code is None else _CODES.get(code, JobState.FAILED)
        waits = state is JobState.PENDING
        reason = said or ("held" if native == "H" else "queued") if waits else ""
        exit_code = code - 128 if code is not None and code > 256 else code
        return JobStatus(state, native, reason, exit_code, ",".join(hosts))
