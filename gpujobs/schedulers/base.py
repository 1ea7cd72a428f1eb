"""The contract of a batch scheduler: formats and parsers, no I/O.

One subclass per batch scheduler, in a file of its own, with a template of the same name. A subclass says how numbers
are written, which commands ask and tell, and what their answers mean; `commands.run` runs them.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class JobState(StrEnum):
    """What a job is doing, in one vocabulary for all batch schedulers."""

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
        """The batch scheduler still has the job, or may have it."""
        return self in (JobState.PENDING, JobState.RUNNING, JobState.SUSPENDED, JobState.UNKNOWN)


@dataclass(frozen=True, order=True)
class JobId:
    """One job: the id of its submission and, in an array, its index there."""

    submission: str
    index: int | None = None

    def __str__(self) -> str:
        # PBS calls a whole array 123[] and its members 123[4].
        return (
            self.submission
            if self.index is None
            else f"{self.submission.removesuffix('[]')}[{self.index}]"
        )

    @classmethod
    def parse(cls, text: str) -> JobId:
        """Return the id of ``SUBMISSION`` or ``SUBMISSION[INDEX]``, where an array's submission may be ``123[]``."""
        submission, bracket, index = text.strip().removesuffix("]").rpartition("[")
        return cls(submission, int(index)) if bracket and index.isdigit() else cls(text.strip())


@dataclass(frozen=True)
class JobStatus:
    """What the batch scheduler says of one job."""

    state: JobState
    native: str = ""
    """The batch scheduler's own word."""
    reason: str = ""
    exit_code: int | None = None
    node: str = ""
    starts: str = ""
    """When a pending job is expected to start, where the batch scheduler says so."""
    stuck: bool = False
    """It has failed, and stays in the queue until it is cancelled."""


NOT_LISTED = JobStatus(JobState.UNKNOWN, reason="the batch scheduler does not list it")
"""The batch scheduler answered, and neither its queue nor its accounting has the job: it is gone, or not there yet."""


@dataclass(frozen=True)
class CommandResult:
    """How a command ended. ``exit_code`` is None where it was not there or had to be stopped."""

    argv: tuple[str, ...]
    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    problem: str = ""
    """Why there is no exit code: not found, timed out."""

    @property
    def message(self) -> str:
        """What it said, for people."""
        said = "\n".join(part.strip() for part in (self.stderr, self.stdout) if part.strip())
        return (
            said
            or self.problem
            or f"{self.argv[0]} ended with exit code {self.exit_code} and no message"
        )


class Scheduler(ABC):
    """One batch scheduler. Instances are stateless; ``cluster`` is the site's multi-cluster name."""

    name: ClassVar[str]
    prefix: ClassVar[str]
    """What starts a directive line."""
    request: ClassVar[tuple[str, ...]]
    """Directives of one GPU job where the site names none; a line whose number the site does not know is left out."""
    cpu_request: ClassVar[tuple[str, ...]]
    account_directive: ClassVar[str] = "-A {account}"
    visible_devices: ClassVar[str | None] = None
    """Who says which GPUs are the job's; None where the site must say."""
    mpi_command: ClassVar[tuple[str, ...]]
    managed: ClassVar[frozenset[str]]
    """Options that gpujobs writes itself (see `options`)."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Options that break what gpujobs promises, and why."""
    name_rule: ClassVar[tuple[str, str]] = (
        r"[A-Za-z0-9_-]{1,64}",
        "up to 64 letters, digits, - and _",
    )
    """Pattern of a job's name, and the same in words."""
    first_index: ClassVar[int] = 0
    largest_array: ClassVar[int] = 1000
    """Where the site does not say."""
    index_variable: ClassVar[str]
    job_variable: ClassVar[str]
    """Environment variable with the job's id."""
    cancel_waiting: ClassVar[str] = ""
    """Command that cancels the waiting jobs of submissions from inside a job; their ids are appended."""
    on_this_machine: ClassVar[bool] = False

    def __init__(self, cluster: str | None = None) -> None:
        self.cluster = cluster

    # -- what a script says ---------------------------------------------------------------------------------
    def walltime(self, seconds: int) -> str:
        """Return a walltime as the batch scheduler writes it, rounded up where it must be."""
        return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    @abstractmethod
    def output(self, root: str, cluster: str, array: bool) -> str:
        """Return where the batch scheduler itself writes about a job: in ``root/cluster/logs``, quoted as it wants it.

        What the job writes goes elsewhere; this is for the words of the batch scheduler and of a shell that fails.
        """

    @abstractmethod
    def array(self, count: int) -> str:
        """Return the array directive of ``count`` jobs."""

    def options(self, line: str) -> set[str]:
        """Return the options that the directive ``line`` sets, in one spelling for all their spellings.

        ValueError where the line cannot be understood.
        """
        found = set()
        for item in shlex.split(line):
            if item.startswith("-") and not re.fullmatch(r"-\d+", item):
                found.add(item.split("=")[0])
        return found

    def joined(self, lines: Sequence[str]) -> list[str]:
        """Return the lines that the site asks for, with those made one that the batch scheduler takes only once."""
        return list(lines)

    def clash(self, line: str, taken: Iterable[str]) -> str:
        """Return the option of ``line`` that one of ``taken`` sets already, or ``""``."""
        return next((option for option in sorted(self.options(line)) if option in set(taken)), "")

    # -- submit ---------------------------------------------------------------------------------------------
    @abstractmethod
    def submit_command(self) -> list[str]:
        """Return the command that takes a script on its standard input."""

    @abstractmethod
    def parse_submit(self, stdout: str) -> str | None:
        """Return the submission's id, or None where there is none in ``stdout``; warnings may come first."""

    @abstractmethod
    def unreachable(self, result: CommandResult) -> bool:
        """Tell a batch scheduler that is away or busy from one that said no."""

    @abstractmethod
    def find_command(self, name: str, user: str) -> list[str]:
        """Return the command that lists the submissions of ``user`` called ``name``: one may have lost its reply."""

    @abstractmethod
    def parse_find(self, stdout: str, name: str) -> set[str]:
        """Return the ids of the submissions called ``name``."""

    def answered(self, result: CommandResult) -> bool:
        """Tell an answer to `find_command` or `status_command`, though it be that there is none, from a failure."""
        return result.exit_code == 0

    def limit_command(self) -> list[str] | None:
        """Return the command that says how large an array may be; None where there is none."""
        return None

    def parse_limit(self, stdout: str) -> int | None:
        """Return how many jobs an array may have, where ``stdout`` says so."""
        return None

    def estimate_command(self) -> list[str] | None:
        """Return the command that says when a script on its standard input would start, without submitting it."""
        return None

    def parse_estimate(self, result: CommandResult) -> str:
        """Return the expected start, or why it cannot start."""
        return result.message

    # -- watch ----------------------------------------------------------------------------------------------
    @abstractmethod
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        """Return ONE command that asks for all these jobs, whichever of ``ids`` and ``names`` it prefers."""

    @abstractmethod
    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
        """Return the status of those of ``ids`` that are listed. What is not listed is not finished."""

    def detail_command(self, listed: Mapping[JobId, JobStatus]) -> list[str] | None:
        """Return the command that says why ``listed`` jobs wait or how they ended; None where `status_command` does."""
        return None

    def parse_detail(
        self, result: CommandResult, listed: Mapping[JobId, JobStatus]
    ) -> dict[JobId, JobStatus]:
        """Return the better status of those of ``listed`` that it tells more about."""
        return {}

    def accounting_command(self, ids: Sequence[JobId]) -> list[str] | None:
        """Return the command that knows jobs which left the queue."""
        return None

    def accounting_commands(self, ids: Sequence[JobId]) -> list[list[str]]:
        """Return the commands that together know them: more than one where one cannot ask for several submissions."""
        argv = self.accounting_command(ids)
        return [argv] if argv else []

    def parse_accounting(
        self, result: CommandResult, ids: Sequence[JobId]
    ) -> dict[JobId, JobStatus]:
        """Return the status of those of ``ids`` that it knows."""
        return {}

    # -- cancel ---------------------------------------------------------------------------------------------
    @abstractmethod
    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        """Return ONE command that cancels all ``targets`` (see `target`)."""

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        """Return what names a whole submission, or only its members ``indexes``, in a cancel command."""
        return [f"{submission}[{index}]" for index in indexes] or [submission]

    def already_gone(self, result: CommandResult) -> bool:
        """Tell a cancel that failed because the jobs had ended from one that failed."""
        return False


def ranges(numbers: Iterable[int]) -> str:
    """Return ``{1, 2, 3, 5}`` as ``1-3,5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def members(text: str) -> list[int]:
    """Return the numbers of ``[1-3,5%2]``, ``1-9:2`` and the like; nothing where it is no such list."""
    body = text.strip("[]").split("%")[0]
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*", body):
        return []
    found: list[int] = []
    for part in body.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found
