"""The output of LSF's bjobs and bhist: rows, long records, and the status that follows."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .jobs import JobId, JobState, JobStatus

_STATES = {
    "PEND": JobState.PENDING, "PSUSP": JobState.PENDING, "WAIT": JobState.PENDING,
    "FWD_PEND": JobState.PENDING,
    "RUN": JobState.RUNNING, "PROV": JobState.RUNNING,
    "USUSP": JobState.SUSPENDED, "SSUSP": JobState.SUSPENDED,
    "DONE": JobState.COMPLETED, "EXIT": JobState.FAILED, "ZOMBI": JobState.NODE_FAIL,
}  # fmt: skip

_SUSPENDED_WHILE_PENDING = "suspended while pending (bstop, or too many failed starts; bresume)"
"""The reason of PSUSP, if the job's record has none."""

_TERMINATION_STATES = {
    "RUNLIMIT": JobState.TIMEOUT, "CPULIMIT": JobState.TIMEOUT, "DEADLINE": JobState.TIMEOUT,
    "WINDOW": JobState.TIMEOUT,
    "MEMLIMIT": JobState.OUT_OF_MEMORY, "SWAP": JobState.OUT_OF_MEMORY,
    "SWAPLIMIT": JobState.OUT_OF_MEMORY,
    "OWNER": JobState.CANCELLED, "FORCE_OWNER": JobState.CANCELLED, "ADMIN": JobState.CANCELLED,
    "FORCE_ADMIN": JobState.CANCELLED, "BUCKET_KILL": JobState.CANCELLED,
    "PREEMPT": JobState.PREEMPTED, "REQUEUE_OWNER": JobState.PREEMPTED,
    "REQUEUE_ADMIN": JobState.PREEMPTED, "RC": JobState.PREEMPTED, "RC_RECLAIM": JobState.PREEMPTED,
    "REMOVE_HUNG_JOB": JobState.NODE_FAIL, "ZOMBIE": JobState.NODE_FAIL,
}  # fmt: skip
"""States of jobs that LSF ended itself, by its TERM_… word; other words are failures."""

_SIGNAL_STATES = {
    128 + signal.SIGUSR2: JobState.TIMEOUT,
    128 + signal.SIGINT: JobState.CANCELLED,
    128 + signal.SIGTERM: JobState.CANCELLED,
}
"""States by exit code, for versions without a TERM_… word: the run limit sends SIGUSR2, bkill
SIGINT and SIGTERM."""

_EVENT = re.compile(r"\w{3} \w{3} +\d+ \d\d:\d\d:\d\d(?: \d{4})?: (.*)")
_FEWEST_COLUMNS = 7
_MOST_REASONS = 3
"""The reasons after these hold for fewer hosts."""


@dataclass(frozen=True)
class Row:
    """One line of ``bjobs -w``."""

    job: JobId
    native: str
    columns: tuple[str, ...]
    """From FROM_HOST on. The job's name is one of them."""

    @property
    def hosts(self) -> list[str]:
        """The execution hosts, each once; empty if the job has not started."""
        if self.columns[1] == "-":
            return []
        hosts = (host.rpartition("*")[2] for host in self.columns[1].split(":"))
        return list(dict.fromkeys(hosts))

    @property
    def status(self) -> JobStatus:
        """The status as far as the line has it."""
        state = _STATES.get(self.native, JobState.UNKNOWN)
        if self.native == "EXIT" and not self.hosts:
            state = JobState.CANCELLED  # it never started
        reason = _SUSPENDED_WHILE_PENDING if self.native == "PSUSP" else ""
        return JobStatus(state, self.native, reason, node=",".join(self.hosts))

    def has_name(self, name: str) -> bool:
        """Return whether the job, or its array, has this name."""
        return name in {column.split("[")[0] for column in self.columns}


def is_listing(stdout: str) -> bool:
    """Return whether ``bjobs -w`` has written a whole list: a header, and rows of jobs."""
    header, *lines = stdout.splitlines() or [""]
    rows_are_whole = all(len(line.split()) >= _FEWEST_COLUMNS for line in lines if line.strip())
    titled = header.split()[:3] == ["JOBID", "USER", "STAT"]
    return titled and stdout.endswith("\n") and rows_are_whole


def rows(stdout: str) -> Iterator[Row]:
    """Yield the rows of ``bjobs -w``. The index in an array is part of the job's name."""
    for line in stdout.splitlines():
        words = line.split()
        if len(words) < _FEWEST_COLUMNS or not words[0].isdigit():
            continue
        columns = tuple(words[4:])
        yield Row(JobId(words[0], _index(columns)), words[2], columns)


def records(stdout: str) -> Iterator[tuple[JobId, list[str]]]:
    """Yield each job of the long formats of bjobs and bhist, with its lines after the first."""
    text = re.sub(r"\n {21}", "", stdout)  # joins lines that were too long
    for block in re.split(r"^(?=Job <\d+(?:\[\d+\])?>, )", text, flags=re.M)[1:]:
        first, *lines = block.splitlines()  # the first has the text of the script
        yield JobId.parse(first.removeprefix("Job <").partition(">")[0]), lines


def pending_reason(lines: Sequence[str]) -> str:
    """Return why a job is pending, from the lines of its record."""
    stripped = [line.strip() for line in lines]
    if "PENDING REASONS:" not in stripped:
        return ""
    reasons = stripped[stripped.index("PENDING REASONS:") + 1 :]
    if "" in reasons:
        reasons = reasons[: reasons.index("")]
    return "; ".join(reason.rstrip(";") for reason in reasons[:_MOST_REASONS])


def end_status(lines: Sequence[str]) -> JobStatus | None:
    """Return how a job ended, from the events of its record; None if it has not."""
    events = [found[1] for line in lines if (found := _EVENT.match(line))]
    if any("Done successfully" in event for event in events):
        return JobStatus(JobState.COMPLETED, "DONE", exit_code=0)
    exits = [event for event in events if re.search(r"\b(exited|completed <exit>)", event, re.I)]
    if not exits:
        return None
    text = " ".join(exits)
    code = _exit_code(text)
    if word := re.search(r"TERM_(\w+)(?:: ([^.;]*))?", text):
        state = _TERMINATION_STATES.get(word[1], JobState.FAILED)
        return JobStatus(state, "EXIT", word[2] or word[0], code)
    if code is None:  # it never started
        return JobStatus(JobState.CANCELLED, "EXIT")
    state = _SIGNAL_STATES.get(code, JobState.FAILED)
    reason = "the run limit was reached" if state is JobState.TIMEOUT else ""
    return JobStatus(state, "EXIT", reason, code)


def _index(columns: Sequence[str]) -> int | None:
    for column in columns:
        if found := re.fullmatch(r".+\[(\d+)\]", column):
            return int(found[1])
    return None


def _exit_code(text: str) -> int | None:
    if found := re.search(r"exit code (\d+)", text, re.I):
        return int(found[1])
    if found := re.search(r"by (?:LSF )?signal <?(?:SIG)?(\w+)", text, re.I):
        return 128 + _signal_number(found[1])
    return None


def _signal_number(name: str) -> int:
    if name.isdigit():
        return int(name)
    return int(getattr(signal, f"SIG{name}", 0))
