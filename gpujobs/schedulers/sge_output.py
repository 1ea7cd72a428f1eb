"""The output of Grid Engine's qstat and qacct, and the status that follows from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

from .formats import integer, members
from .jobs import JobId, JobState, JobStatus

_FAILURES = {
    "18": JobState.NODE_FAIL,
    "19": JobState.NODE_FAIL,
    "21": JobState.NODE_FAIL,
    "24": JobState.PREEMPTED,
    "25": JobState.PREEMPTED,
}
"""States by qacct's `failed`; other values but 0 and 37 are FAILED. See sge_status(5)."""
_LIMIT_EXCEEDED = "37"
_KILLED = "100"

_BLOCKS = re.compile(r"^=+$", re.M)
_ERROR = re.compile(
    r"^error reason\s+(\d+):\s+(?:\S+ \S+ \[\d+:\d+\]: )?(?:error: )?(.+)", re.M
)  # task and text


@dataclass
class Details:
    """The output of ``qstat -j``: why jobs wait, and the errors of jobs and of members."""

    waits: dict[JobId, str] = field(default_factory=dict)
    errors: dict[JobId, str] = field(default_factory=dict)


def parse_xml(text: str) -> ElementTree.Element | None:
    """Return the root element, None if ``text`` is not complete."""
    try:
        return ElementTree.fromstring(text)  # noqa: S314 - of the site's own qstat
    except ElementTree.ParseError:
        return None


def listed_jobs(text: str) -> Iterator[tuple[JobId, dict[str, str]]]:
    """Yield the jobs of ``qstat -xml`` with their fields.

    The pending members of an array are one element with a range of tasks.
    """
    root = parse_xml(text)
    if root is None:
        return
    for item in root.iter("job_list"):
        fields = {child.tag: (child.text or "").strip() for child in item}
        number = fields.get("JB_job_number", "")
        tasks = members(fields.get("tasks", ""))
        for job in [JobId(number, task) for task in tasks] or [JobId(number)]:
            yield job, fields


def listed_status(fields: Mapping[str, str]) -> JobStatus:
    """Return the status of a job of ``qstat -xml``."""
    native = fields.get("state", "")
    state = _state(native)
    node = fields.get("queue_name", "").partition("@")[2]
    return JobStatus(state, native, _reason(native), node=node, stuck=state is JobState.FAILED)


def _state(native: str) -> JobState:
    """Return the state of letters such as qw, hRwq, dr, Rt, ts, Eqw: the gravest one decides."""
    letters = set(native)
    if "E" in letters:
        return JobState.FAILED
    if letters & set("sST"):
        return JobState.SUSPENDED
    if letters & set("rt"):
        return JobState.RUNNING
    if letters & set("qw"):
        return JobState.PENDING
    return JobState.UNKNOWN


def _reason(native: str) -> str:
    letters = set(native)
    if "E" in letters:
        return ""  # `qstat -j` has it
    if {"h", "q"} <= letters:
        return "held, or waiting for another job"
    if "q" in letters:
        return "waiting"
    if "d" in letters:
        return "being deleted"
    return ""


def parse_details(text: str) -> Details:
    """Return the details in the output of ``qstat -j``."""
    details = Details()
    for block in _BLOCKS.split(text):
        number = re.search(r"^job_number:\s+(\d+)", block, re.M)
        if number is None:
            continue
        if info := re.search(r"^scheduling info:((?:\s+.+\n?)+)", block, re.M):
            details.waits[JobId(number[1])] = _scheduling_reason(info[1].splitlines())
        is_array = re.search(r"^job-array tasks:", block, re.M) is not None
        for task, reason in _ERROR.findall(block):
            job = JobId(number[1], int(task) if is_array else None)
            details.errors[job] = reason.strip()
    return details


def _scheduling_reason(lines: Sequence[str]) -> str:
    """Return the line about the job itself, rather than one about queues that do not fit."""
    stripped = [line.strip() for line in lines]
    ignored = re.compile("no messages available|turned off")
    reasons = [line for line in stripped if line and not ignored.search(line)]
    own = [line for line in reasons if not line.startswith("queue instance")]
    return [*own, *reasons, ""][0]


def accounted_jobs(text: str) -> Iterator[tuple[JobId, JobStatus]]:
    """Yield the jobs of ``qacct -j``; of one that was rescheduled, the last record counts."""
    for block in _BLOCKS.split(text)[1:]:
        pairs = (line.split(None, 1) for line in block.splitlines())
        fields = {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}
        task = integer(fields.get("taskid", ""))  # "undefined" for a lone job
        yield JobId(fields.get("jobnumber", ""), task), _accounted_status(fields)


def _accounted_status(fields: Mapping[str, str]) -> JobStatus:
    code, _, reason = (part.strip() for part in fields.get("failed", "").partition(":"))
    text, _, signal = fields.get("exit_status", "").partition(" ")
    exit_code = integer(text)
    node = fields.get("hostname", "")
    if code == "0":
        state = JobState.COMPLETED if exit_code == 0 else JobState.FAILED
        return JobStatus(state, "done", "", exit_code, node)
    if code == _KILLED:  # "assumedly after job": Grid Engine does not report by whom
        reason = f"ended by a signal {signal.strip()}".strip()
    if code == _LIMIT_EXCEEDED:
        state = _exceeded_limit(fields)
    else:
        state = _FAILURES.get(code, JobState.FAILED)
    return JobStatus(state, f"failed {code}", reason, exit_code, node)


def _exceeded_limit(fields: Mapping[str, str]) -> JobState:
    """Return which limit was enforced: `failed` is 37 for h_rt, h_cpu and h_vmem alike."""
    request = fields.get("category", "")
    walltime = re.search(r"\bh_rt=([\d:]+)", request)
    elapsed = re.match(r"[\d.]+", fields.get("ru_wallclock", ""))
    if not walltime or not elapsed or "h_vmem=" not in request:
        return JobState.TIMEOUT
    if float(elapsed[0]) < _seconds(walltime[1]):
        return JobState.OUT_OF_MEMORY
    return JobState.TIMEOUT


def _seconds(text: str) -> int:
    """Return ``1:00:00`` as 3600."""
    total = 0
    for part in text.split(":"):
        total = 60 * total + int(part or 0)
    return total
