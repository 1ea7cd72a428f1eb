"""The output of PBS's qstat: job ids, job attributes, and the status that follows from them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from .formats import integer, members
from .jobs import JobId, JobState, JobStatus

_STATES = {
    "Q": JobState.PENDING, "H": JobState.PENDING, "W": JobState.PENDING, "T": JobState.PENDING,
    "R": JobState.RUNNING, "E": JobState.RUNNING, "B": JobState.RUNNING,
    "S": JobState.SUSPENDED, "U": JobState.SUSPENDED,
}  # fmt: skip
_PENDING_REASONS = {"Q": "queued", "H": "held", "W": "waiting for its time", "T": "in transit"}
_HELD_BY_A_PERSON = {
    "u": "held by its user (qhold; qrls releases it)",
    "o": "held by an operator",
    "p": "held: the password of its user is not valid",
}
"""Reasons by `Hold_Types`. "s", the system's, is also that of a job that waits for another one."""
_ENDED = ("F", "X")
_STATES_OF_EXIT_CODES = {
    -29: JobState.TIMEOUT, -28: JobState.TIMEOUT,
    -27: JobState.OUT_OF_MEMORY, -26: JobState.OUT_OF_MEMORY,
    -4: JobState.NODE_FAIL, -5: JobState.NODE_FAIL, -6: JobState.NODE_FAIL,
    -14: JobState.NODE_FAIL, -20: JobState.NODE_FAIL, -30: JobState.NODE_FAIL,
}  # fmt: skip
_DELETED, _FINISHED = 91, 92
"""Values of `substate`."""
_ARRAY_BEGAN = "Job Array Began at"
"""A comment of arrays that does not say why the others of its jobs are pending."""

_LAUNCH_FAILED = "job held, too many failed attempts to run"
"""The comment of a job that is held because it could not be started, 20 times."""

_ID = re.compile(r"(\d+)(?:\[(\d*)\])?(\..*)?")
_JOB_LINE = re.compile(r'\s*"(\d+(?:\[\d*\])?\.[^"]+)":\s*\{')
_ATTRIBUTE_LINE = re.compile(
    r'\s*"(job_state|substate|Exit_status|comment|exec_host|array_indices_remaining|Hold_Types)":'
    r"\s*(.+?),?\s*$"
)


@dataclass(frozen=True)
class PBSJob:
    """The attributes of one job that decide its status."""

    state: str = ""
    """The letter of `job_state`."""
    substate: int | None = None
    exit_status: int | None = None
    comment: str = ""
    hosts: str = ""
    """`exec_host`."""
    starts: str = ""
    """The estimated start."""
    remaining: str = ""
    """Indexes of an array that have not started."""
    holds: str = ""
    """Letters of `Hold_Types`."""

    @property
    def nodes(self) -> str:
        """Names of the job's nodes, separated by commas."""
        return node_names(self.hosts)

    @property
    def exit_code(self) -> int | None:
        """The exit code, with 128 added to a signal; PBS adds 256."""
        return shell_exit_code(self.exit_status)


def job_id(text: str) -> JobId | None:
    """Return the id in ``123.server``, ``123[].server`` or ``123[4].server``, else None."""
    found = _ID.fullmatch(text)
    if not found:
        return None
    number, index, server = found.groups(default=None)
    if index is None:
        return JobId(f"{number}{server or ''}")
    return JobId(f"{number}[]{server or ''}", int(index) if index else None)


def without_server(id_: JobId) -> JobId:
    """Return the id without the server's name, which a job and a login node may spell unlike."""
    return JobId(id_.submission.partition(".")[0], id_.index)


def node_names(exec_host: str) -> str:
    """Return the nodes in ``node1/0*4+node2/0`` as ``node1,node2``."""
    return ",".join(dict.fromkeys(re.findall(r"([\w.-]+)/", exec_host)))


def shell_exit_code(status: int | None) -> int | None:
    """Return ``256 + signal`` as ``128 + signal``, other values as they are."""
    if status is not None and status > 256:
        return status - 128
    return status


def listed_attributes(stdout: str) -> dict[str, dict[str, str]]:
    """Return the attributes of the jobs, queues or servers that ``qstat -f1`` lists, by name."""
    found: dict[str, dict[str, str]] = {}
    attributes: dict[str, str] = {}
    for line in stdout.splitlines():
        if title := re.match(r"(?:Job Id|Queue|Server): (\S+)", line):
            attributes = found[title[1]] = {}
        elif row := re.match(r"    (\S+) = (.*)", line):
            attributes[row[1]] = row[2]
    return found


def _rows(stdout: str) -> Mapping[str, object]:
    try:
        output = json.loads(stdout, strict=False)
    except ValueError:  # some releases print a job's variables as invalid JSON
        return _line_by_line(stdout)
    if isinstance(output, dict) and isinstance(jobs := output.get("Jobs"), dict):
        return jobs
    return {}


def listed_jobs(stdout: str) -> dict[JobId, PBSJob]:
    """Return the jobs that ``qstat -f -F json`` lists, by ids without the server's name.

    There are none if it is no such output.
    """
    found = {}
    for text, attributes in _rows(stdout).items():
        id_ = job_id(text)
        if id_ and isinstance(attributes, dict):
            found[without_server(id_)] = _job(attributes)
    return found


def job_status(id_: JobId, jobs: Mapping[JobId, PBSJob]) -> JobStatus | None:
    """Return the status of a job, None if neither it nor its array is listed in ``jobs``."""
    id_, array = without_server(id_), PBSJob()
    if id_.index is not None:
        array = jobs.get(JobId(id_.submission), array)
    job = jobs.get(id_) or _unlisted_member(id_, array)
    if job is None:
        return None
    if job.state not in _ENDED and _is_deleted(array):
        job = replace(job, state="F", substate=_DELETED)  # it was pending
    comment = "" if array.comment.startswith(_ARRAY_BEGAN) else array.comment
    return _status(replace(job, comment=job.comment or comment))


def _unlisted_member(id_: JobId, array: PBSJob) -> PBSJob | None:
    """Return a member as far as its array tells: PBS lists no member that has not started."""
    if _is_deleted(array):
        return array
    if array.state == "F":
        return None
    if array.state in _PENDING_REASONS:
        return PBSJob(array.state, holds=array.holds)
    if id_.index in _indexes(array.remaining):
        return PBSJob("Q")
    return None


def _is_deleted(array: PBSJob) -> bool:
    return array.state == "F" and array.substate == _DELETED


@lru_cache(maxsize=16)
def _indexes(text: str) -> frozenset[int]:
    return frozenset(members(text))


def _status(job: PBSJob) -> JobStatus:
    if job.state in _ENDED:
        return _ended_status(job)
    state = _STATES.get(job.state, JobState.UNKNOWN)
    if state is JobState.RUNNING:
        return JobStatus(state, job.state, node=job.nodes)
    if state is not JobState.PENDING:
        return JobStatus(state, job.state, job.comment, job.exit_code, job.nodes)
    if job.state == "H" and job.comment.startswith(_LAUNCH_FAILED):
        return JobStatus(JobState.FAILED, job.state, job.comment, job.exit_code, stuck=True)
    person = next(filter(None, map(_HELD_BY_A_PERSON.get, job.holds)), "")
    reason = person or job.comment or _PENDING_REASONS[job.state]
    return JobStatus(state, job.state, reason, job.exit_code, job.nodes, job.starts)


def _ended_status(job: PBSJob) -> JobStatus:
    if job.state == "X" and job.exit_status is None:  # it never ran
        job = replace(job, substate=_DELETED)
    state, reason = _end(job)
    return JobStatus(state, job.state, reason, job.exit_code, job.nodes)


def _end(job: PBSJob) -> tuple[JobState, str]:
    """Return the final state of a job, and the reason."""
    code, comment = job.exit_status, job.comment
    if job.substate == _DELETED:
        return JobState.CANCELLED, comment
    if code is None and job.substate == _FINISHED:
        dependency = "the batch scheduler removed it: a job that it depended on failed"
        return JobState.FAILED, comment or dependency
    if code is None:  # moved to another server, or an incomplete record
        return JobState.UNKNOWN, comment
    if "exceeded resource walltime" in comment:
        return JobState.TIMEOUT, comment
    if code == 0:
        return JobState.COMPLETED, ""
    return _STATES_OF_EXIT_CODES.get(code, JobState.FAILED), comment


def _job(attributes: Mapping[str, object]) -> PBSJob:
    """Return a job from its attributes. PBS writes texts that look like numbers as numbers."""

    def text(name: str) -> str:
        return str(attributes.get(name) or "")

    def number(name: str) -> int | None:
        value = attributes.get(name)
        return value if isinstance(value, int) else None

    estimated = attributes.get("estimated")
    return PBSJob(
        state=text("job_state"),
        substate=number("substate"),
        exit_status=number("Exit_status"),
        comment=text("comment"),
        hosts=text("exec_host"),
        starts=str(estimated.get("start_time", "")) if isinstance(estimated, dict) else "",
        remaining=str(attributes.get("array_indices_remaining", "")),
        holds=text("Hold_Types"),
    )


def _line_by_line(text: str) -> dict[str, dict[str, str | int]]:
    """Return the attributes in output that is invalid JSON."""
    jobs: dict[str, dict[str, str | int]] = {}
    attributes: dict[str, str | int] = {}
    for line in text.splitlines():
        if found := _JOB_LINE.match(line):
            attributes = jobs[found[1]] = {}
        elif found := _ATTRIBUTE_LINE.match(line):
            value = found[2].strip('"')
            number = integer(value)
            attributes[found[1]] = value if number is None else number
    return jobs
