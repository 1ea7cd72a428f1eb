"""Torque: PBS's commands in another dialect, so that one cannot be taken for the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from .base import Scheduler
from .formats import integer, listed_attributes, names_ids, quoted_path
from .jobs import CommandResult, JobId, JobState, JobStatus, Reply, Statuses
from .pbs import PBS, STATES, by_id, job_id, node_names, shell_exit_code, without_server
from .pbs_inventory import Attributes, TorqueInventory

_EXIT_CODES = {
    None: (JobState.CANCELLED, ""),  # it was deleted while it was pending
    0: (JobState.COMPLETED, ""),
    271: (JobState.CANCELLED, ""),
    -1: (JobState.FAILED, "its node could not start it"),
    -2: (JobState.FAILED, "its node could not start it: a prologue failed, for example"),
    -3: (JobState.FAILED, "its node could not start it"),
    -4: (JobState.NODE_FAIL, "pbs_mom of its node was started again"),
    -5: (JobState.NODE_FAIL, "pbs_mom of its node was started again"),
    -6: (JobState.NODE_FAIL, "pbs_mom of its node was started again"),
    -7: (JobState.FAILED, "it could not be started again from its checkpoint"),
    -8: (JobState.FAILED, "its shell could not be executed"),
    -9: (JobState.FAILED, "its output file could not be opened"),
    -10: (JobState.OUT_OF_MEMORY, "it exceeded its limit of memory"),
    -11: (JobState.TIMEOUT, "it exceeded its walltime"),
    -12: (JobState.TIMEOUT, "it exceeded its limit of CPU time"),
    -13: (JobState.FAILED, "its node could not create its cgroups"),
    -14: (JobState.FAILED, "a prologue failed on its node"),
}
"""States and reasons of exit codes, those of JOB_EXEC_… in Torque's pbs_job.h."""
_HOLDS = {
    "u": "held by a user (qhold; qrls releases it)",
    "o": "held by an operator",
    "s": "held by the batch scheduler, as while it depends on another job",
    "l": "held: as many jobs of its array run as the slot limit allows (max_slot_limit)",
}
"""Reasons by `Hold_Types`."""
_UNKNOWN = re.compile(r"Unknown Job Id Error (\S+)")
_EXHAUSTED = re.compile(r"too many open connections", re.I)
"""`qstat` keeps a connection for each id that it does not find, and cannot ask for a tenth one."""
_IDS_AT_ONCE = 8
_MOST_STARTS = 3
"""Starts of a job whose last one failed. Torque has no limit when a prologue exits with code 2."""

_PLAIN = r"A-Za-z0-9_./%@:+=,-"
_UNDELIVERABLE = re.compile(r"[^!-~]|[\"\\]")
"""Characters of a path to which pbs_mom copies no output, however they are quoted."""


class Torque(PBS):
    """Torque 4 and newer. It accepts `-l select=…` without an error and ignores it."""

    name = "torque"
    inventory = TorqueInventory
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
    node_launcher = ("pbsdsh", "-u")
    reservation_is_queue = False
    reservation_directive = "-W x=FLAGS:ADVRES:{reservation}"
    managed = frozenset({"-N", "-o", "-e", "-j", "-k", "-r", "-S", "-t", "-l walltime"})
    refused: ClassVar = {
        **PBS.refused,
        "-l select": "only PBS Professional has it, Torque accepts and ignores it"
        " (`-l nodes=1:ppn=8:gpus=1`)",
        "-J": "only PBS Professional has it",
    }
    with_value: ClassVar = frozenset("aAbcCdDejJkKlLmMNopPqrStTuvwW")
    limit = (" ".join(TorqueInventory.SERVER), r"max_job_array_size = (\d+)")
    index_variable = "PBS_ARRAYID"
    job_mark = "PBS_NUM_PPN"
    host_faults: ClassVar = {
        "socket_connect_unix failed|connect to trqauthd": "trqauthd does not run on this host",
        "pbs_iff": "pbs_iff cannot authorize this user",
    }

    def output(self, root: str, cluster: str, array: bool) -> str:
        path = self.log_path(root, cluster, "torque.log")  # qsub appends the index
        if _UNDELIVERABLE.search(path):
            return "/dev/null"
        escaped = re.sub(rf"[^{_PLAIN}]", r"\\\g<0>", path)  # for pbs_mom, which expands it
        return quoted_path(escaped, plain=_PLAIN)

    def array(self, count: int) -> str:
        return f"-t 0-{count - 1}"

    def after_options(self, submissions: Sequence[str]) -> list[str]:
        kinds: dict[str, list[str]] = {}
        for submission in submissions:
            kind = "afteranyarray" if "[]" in submission else "afterany"
            kinds.setdefault(kind, []).append(submission)
        texts = [":".join([kind, *ids]) for kind, ids in kinds.items()]
        return ["-W", f"depend={','.join(texts)}"] if texts else []

    def reply(self, result: CommandResult) -> Reply:
        if result.exit_code and _ran_out(result) and _UNKNOWN.search(result.stderr):
            return Reply.ANSWER  # for some of the ids: `more_status_commands` asks for the others
        return super().reply(result)

    def is_complete(self, result: CommandResult) -> bool:
        if "-f1" not in result.argv:
            return True
        # A job that is not listed is an error, if its id was given.
        if not result.stdout:
            return result.argv[-1] == "-f1"
        known = ("Job Id: ", "Queue: ", "Server: ")
        whole = result.stdout.startswith(known) and result.stdout.endswith("\n")
        return whole and names_ids(result.argv[1:], f"{result.stdout}\n{result.stderr}")

    def find_command(self, name: str, user: str) -> list[str]:
        # Members of arrays are called NAME-0. Only the array itself is called NAME, and only the
        # list of all jobs has it.
        return ["qstat", "-f1"]

    def parse_find(self, stdout: str, name: str) -> set[str]:
        jobs = listed_attributes(stdout).items()
        found = {text for text, attributes in jobs if attributes.get("Job_Name") == name}
        return {job.submission for job in map(job_id, found) if job}

    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        return ["qstat", "-t", "-f1", *sorted({job.submission for job in ids})]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        # More than ``ids`` may be listed.
        jobs = by_id(listed_attributes(result.stdout))
        found = ((id_, jobs.get(without_server(id_))) for id_ in ids)
        return {id_: _status(attributes) for id_, attributes in found if attributes}

    def more_status_commands(
        self, missing: Sequence[JobId], result: CommandResult
    ) -> list[list[str]]:
        if not _ran_out(result):
            return []
        unknown = set(_UNKNOWN.findall(result.stderr))
        left = sorted({job.submission for job in missing} - unknown)
        parts = (left[n : n + _IDS_AT_ONCE] for n in range(0, len(left), _IDS_AT_ONCE))
        return [["qstat", "-t", "-f1", *part] for part in parts]

    # -- cancel ------------------------------------------------------------------------------------
    cancel_commands = Scheduler.cancel_commands  # none of PBS's precautions

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        if not indexes:
            return [submission]
        # It knows no ranges.
        return [submission.replace("[]", f"[{index}]") for index in indexes]


def _ran_out(result: CommandResult) -> bool:
    return "-f1" in result.argv and bool(_EXHAUSTED.search(result.stderr))


def _status(attributes: Attributes) -> JobStatus:
    native = attributes.get("job_state", "")
    code = integer(attributes.get("exit_status", ""))
    end, reason = _EXIT_CODES.get(code, (JobState.FAILED, ""))
    nodes = node_names(attributes.get("exec_host", ""))
    if native == "C":
        return JobStatus(end, native, reason, shell_exit_code(code), nodes)
    # The exit code is that of an earlier start.
    state = STATES.get(native, JobState.UNKNOWN)
    starts = integer(attributes.get("start_count", "")) or 0
    runs = state is not JobState.PENDING and attributes.get("session_id") != "0"
    if reason and starts > _MOST_STARTS and not runs:
        reason = f"{reason}; it was started {starts} times"
        return JobStatus(JobState.FAILED, native, reason, code, stuck=True)
    reason = _pending_reason(native, attributes) if state is JobState.PENDING else ""
    return JobStatus(state, native, reason, node=nodes)


def _pending_reason(native: str, attributes: Attributes) -> str:
    """Return why a job is pending. A comment may be older than a hold, or than an attempt."""
    if native == "H":
        return _HOLDS.get(attributes.get("Hold_Types", ""), "held")
    comment = attributes.get("comment", "")
    return "queued" if comment.startswith("Job started on") else comment or "queued"
