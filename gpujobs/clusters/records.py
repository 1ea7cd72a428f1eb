"""What the ledger knows of a submitted cluster: its groups of workers and its submissions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Optional

from ..injob.folder import DamagedError, typed
from ..injob.names import HEAD
from ..schedulers import JobId

VERSION = 2
_MOST_TARGETS = 10_000
_MOST_WORKERS = 10**6
"""Of all jobs that a cluster ever had; a record with more of them is damaged."""
_Count = Annotated[int, range(_MOST_WORKERS + 1)]
_Positive = Annotated[int, range(1, _MOST_WORKERS + 1)]


@dataclass(frozen=True)
class Submission:
    """One array, or lone job, that the batch scheduler accepted.

    It has ``count`` jobs, numbered from ``first``.
    """

    id: str
    first: _Count
    count: _Count
    group: str = ""
    array: bool = False
    first_index: int = 0
    attempt: int = 1
    time: float = 0.0
    """Seconds since the epoch; 0 in a record of an older gpujobs."""
    devices: tuple[str, ...] = ()
    """GPUs of this machine that its jobs have, in their order; empty with a batch scheduler."""

    def job(self, number: int) -> JobId:
        """Return the batch scheduler's id of the cluster's job ``number``."""
        index = number - self.first + self.first_index
        return JobId(self.id, index if self.array else None)

    @property
    def jobs(self) -> dict[int, JobId]:
        """The batch scheduler's ids by job number."""
        return {number: self.job(number) for number in range(self.first, self.first + self.count)}

    def devices_of(self, number: int) -> tuple[str, ...]:
        """Return the GPUs of this machine that the cluster's job ``number`` has."""
        each = len(self.devices) // self.count
        start = (number - self.first) * each
        return self.devices[start : start + each]


@dataclass(frozen=True)
class Intent:
    """A submission that is being made: the fields of `Submission` that are known before it."""

    first: _Count
    count: _Count
    group: str = ""
    array: bool = False
    time: float = 0.0
    """Seconds since the epoch."""
    attempt: int = 1
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupRecord:
    """The workers of one kind. ``name`` is "" if the profile has no groups."""

    name: str
    workers: _Count
    """Target number of workers."""
    workers_per_job: _Positive
    gpus_per_job: _Count
    queue: str = ""
    """Key of the queue in the site file."""
    walltime: int = 0
    """Seconds of each job; 0: none, or a record of an older gpujobs."""
    error: str = ""
    """Why its owner submits no more jobs of it."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of the workers."""
        return self.workers // self.workers_per_job * self.gpus_per_job


@dataclass(frozen=True)
class Target:
    """The target number of workers of a group from a time on, in seconds since the epoch."""

    time: float
    workers: int
    group: str = ""


@dataclass(frozen=True)
class ClusterRecord:
    """One cluster as it was submitted."""

    id: str
    site: str
    scheduler: str
    folder: str
    created: float
    groups: tuple[GroupRecord, ...]
    run: tuple[str, ...]
    encrypted: bool
    poll: Annotated[int, range(86400)] = 5
    """Least seconds between two queries."""
    multi_cluster: Optional[str] = None
    """The site's `cluster`: the batch scheduler's multi-cluster name."""
    commands: dict[str, str] = field(default_factory=dict)
    layout: str = "workers"
    ranks: _Count = 0
    """MPI ranks with workers; 0 without MPI."""
    owner: str = "cluster"
    """Who handles a failed job: the "cluster" itself, or a "client" in a Python process."""
    after: str = ""
    """The cluster after whose end this one starts."""
    attempts: int = 1
    """How often the cluster starts at most; the jobs of all attempts are submitted at once."""
    submissions: tuple[Submission, ...] = ()
    intent: Optional[Intent] = None
    removed: tuple[int, ...] = ()
    """Jobs that were asked to leave."""
    finished: bool = False
    """All jobs are known to have ended; the batch scheduler is not queried any more."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Of a finished cluster: the state of each job by number. The batch scheduler forgets it."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Of a finished cluster: the reason of each job that has one."""
    notes: tuple[str, ...] = ()
    contact: Optional[str] = None
    """The site's contact, who can explain a refused job."""
    targets: tuple[Target, ...] = ()
    """All changes of the target, oldest first, with the first target; empty without a change."""
    dashboard: str = "on"
    """`network.dashboard` of the profile."""
    head: str = ""
    """The group whose jobs may be the head; `HEAD`: a job of its own; "": any job."""
    start_timeout: int = 300
    """Seconds in which the workers of a job that has started connect."""
    unlisted: dict[str, float] = field(default_factory=dict)
    """Jobs that the batch scheduler does not list, by number: since when (epoch seconds)."""
    version: int = VERSION

    @property
    def jobs(self) -> dict[int, JobId]:
        """The batch scheduler's ids of all jobs by number."""
        return {
            number: job
            for submission in self.submissions
            for number, job in submission.jobs.items()
        }

    def current_jobs(self, claims: Mapping[int, JobId]) -> dict[int, JobId]:
        """Return the job that does the work of each number.

        ``claims`` are those of the cluster's folder. They differ from `jobs` only if a number was
        submitted twice.
        """
        return {**self.jobs, **claims}

    @property
    def workers(self) -> int:
        """Target number of workers of all groups."""
        return sum(group.workers for group in self.groups)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all groups."""
        return sum(group.gpus for group in self.groups)

    def group(self, name: str) -> GroupRecord:
        """Return the group ``name``. Raises LookupError."""
        return next(group for group in self.groups if group.name == name)

    def with_target(self, name: str, workers: int) -> tuple[GroupRecord, ...]:
        """Return the groups after a change of the target of one."""
        return tuple(
            replace(group, workers=workers) if group.name == name else group
            for group in self.groups
        )

    def remember_targets(self, before: ClusterRecord, time: float) -> ClusterRecord:
        """Return this record with its changes of the target since ``before``."""
        changed = set(self.groups) - set(before.groups)
        if not changed:
            return self
        known = before.targets or before.first_targets
        new = (Target(time, group.workers, group.name) for group in self.groups if group in changed)
        targets = (*known, *new)
        if len(targets) > _MOST_TARGETS:  # `adapt` changes them for days
            targets = (*targets[: len(self.groups)], *targets[-_MOST_TARGETS // 2 :])
        return replace(self, targets=targets)

    @property
    def first_targets(self) -> tuple[Target, ...]:
        """The targets at the submission, if they have not changed since."""
        return tuple(Target(self.created, group.workers, group.name) for group in self.groups)

    @property
    def path(self) -> Path:
        """The cluster's folder."""
        return Path(self.folder)


def parse(value: dict[str, Any]) -> ClusterRecord:
    """Return a record from its JSON. Raises DamagedError."""
    if value.get("version") != VERSION:
        raise DamagedError("it was written by another version of gpujobs")
    record: ClusterRecord = typed(value, ClusterRecord)
    if problem := _contradiction(record):
        raise DamagedError(problem)
    return record


def _contradiction(record: ClusterRecord) -> str:
    """Return why the numbers and names of a record do not go together, or ""."""
    names = {group.name for group in record.groups}
    if not names:
        return "`groups` is empty"
    if unknown := {sent.group for sent in record.submissions} - names - {HEAD}:
        return f"`groups` has no {min(unknown)!r}"
    workers = max(group.workers_per_job for group in record.groups) * max(1, record.ranks)
    if sum(sent.count for sent in record.submissions) * workers > _MOST_WORKERS:
        return f"it has more than {_MOST_WORKERS} workers"
    if not record.path.is_absolute():
        return "`folder` is not an absolute path"
    return ""
