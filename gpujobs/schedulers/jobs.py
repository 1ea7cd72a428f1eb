"""Jobs as the batch scheduler reports them: ids, states, and the results of its commands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ..text import StrEnum

_NOT_CONFIGURED = re.compile(
    r"Could not establish a configuration source|pbs conf variables not found|"
    r"Unable to open file lsf\.conf|SGE_ROOT directory|unable to read qmaster name"
)
"""Messages of Slurm, PBS, LSF and Grid Engine on a host that does not know their cluster."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:@+_-]{0,9999}(\[\](\.[A-Za-z0-9._-]{1,255})?)?")
_MEMBER = re.compile(r"(.+)\[([0-9]{1,9})\]")
_ALL_JOBS = ("0", "all")
"""For `bkill` and `qdel`: all jobs of the user."""


class JobState(StrEnum):
    """The state of a job, in one vocabulary for all batch schedulers."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    UNKNOWN = "UNKNOWN"

    @property
    def active(self) -> bool:
        """Whether the job is still in the queue or running, or may be."""
        return self in (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.UNKNOWN)


@dataclass(frozen=True, order=True)
class JobId:
    """One job: the id of its submission and, in an array, its index there."""

    submission: str
    index: int | None = None

    def __str__(self) -> str:
        return self.submission if self.index is None else f"{self.submission}[{self.index}]"

    @classmethod
    def parse(cls, text: str) -> JobId:
        """Return the id in ``SUBMISSION`` or ``SUBMISSION[INDEX]``.

        SUBMISSION may be ``123[].server``, as PBS writes it.
        """
        if member := _MEMBER.fullmatch(text.strip()):
            return cls(member[1], int(member[2]))
        return cls(text.strip())

    @property
    def plausible(self) -> bool:
        """Whether a batch scheduler may have written it: one word, which no command misreads.

        Ids are read from files and become arguments: none may be an option, a pattern or all jobs.
        """
        return self.submission not in _ALL_JOBS and bool(_WORD.fullmatch(self.submission))


@dataclass(frozen=True)
class Granted:
    """What a job has, as far as its environment says; 0 is unknown."""

    nodes: int = 0
    gpus_per_node: int = 0
    memory_per_node: int = 0
    """In MiB."""
    end: float = 0
    """When its walltime ends, in seconds since the epoch."""
    on_node: bool = True
    """The process with this environment runs on a node of the job."""


@dataclass(frozen=True)
class JobStatus:
    """The status of one job, as the batch scheduler reports it."""

    state: JobState
    native: str = ""
    """The batch scheduler's own word for the state."""
    reason: str = ""
    exit_code: int | None = None
    node: str = ""
    """Names of the job's nodes, separated by commas."""
    starts: str = ""
    """Expected start of a pending job, if the batch scheduler reports one."""
    stuck: bool = False
    """The job failed and stays in the queue until it is cancelled."""
    requeued: bool = False
    """The job waits again: it had started before this was asked."""
    cancelled_by: int | None = None
    """User id of who cancelled the job, if accounting has it."""

    @property
    def waits(self) -> bool:
        """Whether the job is in the queue and does not run."""
        return self.stuck or self.state is JobState.PENDING

    @property
    def in_queue(self) -> bool:
        """Whether the job is in the queue or runs, or may be."""
        return self.stuck or self.state.active


Statuses = dict[JobId, JobStatus]


def of_ids(listed: Mapping[JobId, JobStatus], ids: Iterable[JobId]) -> Statuses:
    """Return the status of those of ``ids`` that are listed.

    A member of an array that is listed as a lone job, or the reverse, has an index that could not
    be read: its state is not known. Slurm lists an array whose members were all cancelled before
    their start as one lone job that has ended.
    """
    arrays = {job.submission for job in listed if job.index is not None}
    found = {}
    for job in ids:
        is_other_kind = job.submission in arrays
        if job.index is not None:
            lone = listed.get(JobId(job.submission))
            is_other_kind = lone is not None and lone.in_queue
        if job in listed:
            found[job] = listed[job]
        elif is_other_kind:
            found[job] = JobStatus(JobState.UNKNOWN, reason="its index cannot be read")
    return found


NOT_LISTED = JobStatus(JobState.UNKNOWN, reason="the batch scheduler does not list it")
"""Neither the queue nor accounting has the job: it has left the queue, or is not in it yet."""


class Reply(Enum):
    """What the result of a command is worth; see `Scheduler.reply`."""

    ANSWER = "answer"
    """The command succeeded, or there are no such jobs: its output may be read."""
    NONE = "none"
    """It did not reach the batch scheduler, or its output is incomplete: nothing is known."""
    REFUSAL = "refusal"
    """It failed for another reason, which its message has."""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command. ``exit_code`` is None if it did not start or was stopped."""

    argv: tuple[str, ...]
    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    problem: str = ""
    """Why there is no exit code: not found, timed out."""
    started: bool = True
    """False if the command could not be started: not found, not executable."""

    @property
    def usable(self) -> bool:
        """Whether this host has the command, and the configuration that it needs."""
        return self.started and not _NOT_CONFIGURED.search(self.stderr)

    @property
    def message(self) -> str:
        """The output of the command, errors first, or the reason why there is none."""
        output = f"{self.stderr.strip()}\n{self.stdout.strip()}".strip()
        if output and self.problem:  # it has written that before it was stopped
            return f"{self.problem}: {output}"
        exited = f"{self.argv[0]} exited with code {self.exit_code} and without a message"
        return output or self.problem or exited

    @property
    def first_line(self) -> str:
        """The first line of `message`, at most 200 characters."""
        return self.message.splitlines()[0][:200]
