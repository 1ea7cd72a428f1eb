"""The last word of a cluster's folder: its contents when all jobs had ended, kept in the record.

The folder says nothing new after that: `status --all` opens only the records of such clusters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TypedDict

from ..injob.events import DaskWorkers
from ..injob.folder import Ended, OverMemory, RegisteredWorker
from ..injob.jobevents import ExitRecord, JobFacts, LostNode
from ..injob.transport import Choice
from ..schedulers import JobId, JobState, JobStatus
from ..text import clean
from .folderstate import FolderState, JobTrace
from .targets import Count

MOST_BYTES = 2**15
"""Of the JSON of a last word: the folder of a larger cluster is read again."""


class _Number(TypedDict):
    number: Count


class LastJob(_Number, total=False):
    """The files of a job, in short."""

    claim: str
    """Id of the batch scheduler."""
    script: float
    node: str
    began: float
    setup: str
    reason: str
    note: str
    alive: float
    host: str
    """Where it has ended; missing if its script has not said so."""
    exit_code: int
    ended: float


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended while its cluster goes on: nothing asks for it, or reads its files."""

    state: JobState
    files: LastJob
    native: str = ""
    """The batch scheduler's own word for the state."""
    reason: str = ""
    exit_code: int | None = None

    @property
    def status(self) -> JobStatus:
        """The last answer about it."""
        return JobStatus(self.state, self.native, self.reason, self.exit_code)

    @property
    def trace(self) -> JobTrace:
        """The traces that a reader of its files would find."""
        return _trace(self.files)


def ended_job(number: int, status: JobStatus, trace: JobTrace) -> EndedJob:
    """Return a job that has ended, as its status and its files say."""
    files = _last_job(number, trace)
    return EndedJob(status.state, files, status.native, status.reason, status.exit_code)


@dataclass(frozen=True)
class LastNode(LostNode):
    """A lost node of an allocation."""

    number: Count = 0


class LostTasksOf(TypedDict):
    """The tasks that a worker has lost when it left."""

    worker: str
    at: float
    tasks: dict[str, float]


@dataclass(frozen=True)
class LastWord:
    """The contents of the folder of a cluster whose jobs have all ended."""

    kind: str
    """Of the end of the cluster, as in `ended`."""
    exit_code: int
    time: float
    reason: str = ""
    job: int | None = None
    """Number of the job that ended the cluster."""
    head: int | None = None
    jobs: tuple[LastJob, ...] = ()
    address: str | None = None
    dashboard: int | None = None
    connected: dict[str, RegisteredWorker] = field(default_factory=dict)
    """Workers of which no end is known: their dask scheduler was killed."""
    gone: dict[str, float] = field(default_factory=dict)
    over_memory: dict[str, OverMemory] = field(default_factory=dict)
    lost_tasks: tuple[LostTasksOf, ...] = ()
    lost_nodes: tuple[LastNode, ...] = ()
    transport: Choice = field(default_factory=Choice)
    size: int = 0
    """Of the folder, in bytes."""
    files: int = 0
    """Number of the files in the folder."""

    def state(self) -> FolderState:
        """Return the state that a reader of the folder would."""
        end = {"kind": self.kind, "exit_code": self.exit_code, "time": self.time}
        return FolderState(
            jobs={job["number"]: _trace(job) for job in self.jobs},
            dask=self._dask(),
            head=self.head,
            ended=Ended.parse({**end, "reason": clean(self.reason), "job": self.job}),
            transport=self.transport,
            lost_nodes={one.number: one for one in self.lost_nodes},
        )

    def _dask(self) -> DaskWorkers:
        return DaskWorkers(
            address=self.address,
            dashboard=self.dashboard,
            connected=self.connected,
            gone=self.gone,
            over_memory=self.over_memory,
            lost={(one["worker"], one["at"]): one["tasks"] for one in self.lost_tasks},
        )

    @property
    def problem(self) -> str:
        """Why it cannot be true, or ""."""
        return wrong_claim(self.jobs)


def wrong_claim(jobs: Iterable[LastJob]) -> str:
    """Return why the claim of a job cannot be true, or ""."""
    for job in jobs:
        if "claim" in job and not JobId.parse(job["claim"]).plausible:
            return f"{job['claim']!r} is not the id of a job"
    return ""


def last_word(state: FolderState) -> LastWord | None:
    """Return the last word of a folder; None if it may say more, or has said too much to keep.

    Its size is to be added.
    """
    ended, dask = state.ended, state.dask
    if ended is None or not _has_said_all(state):
        return None
    word = LastWord(
        kind=ended.kind.value,
        exit_code=ended.exit_code,
        time=ended.time,
        reason=ended.reason,
        job=ended.job,
        head=state.head,
        jobs=tuple(_last_job(number, job) for number, job in state.jobs.items()),
        address=dask.address,
        dashboard=dask.dashboard,
        connected=dask.connected,
        gone=dask.gone,
        over_memory=dask.over_memory,
        lost_tasks=tuple(_lost_tasks(dask)),
        lost_nodes=tuple(
            LastNode(node.reason, node.exit_code, number)
            for number, node in state.lost_nodes.items()
        ),
        transport=state.transport,
    )
    return word if len(json.dumps(asdict(word))) <= MOST_BYTES else None


def _has_said_all(state: FolderState) -> bool:
    if state.damaged or not state.started_jobs_have_left:
        return False
    return all(map(math.isfinite, state.dask.gone.values()))  # not so in old folders


def _lost_tasks(dask: DaskWorkers) -> Iterator[LostTasksOf]:
    for (worker, at), tasks in dask.lost.items():
        yield LostTasksOf(worker=worker, at=at, tasks=tasks)


def _last_job(number: int, job: JobTrace) -> LastJob:
    """Return the facts of a job that are known."""
    facts, left = job.facts, job.left
    found = LastJob(number=number)
    values = {
        "claim": str(job.claim) if job.claim else None,
        "script": facts.script,
        "node": facts.node,
        "began": facts.began,
        "setup": facts.setup or None,
        "reason": facts.reason or None,
        "note": job.note or None,
        "alive": job.alive or None,
        "host": left.host if left else None,
        "exit_code": left.exit_code if left else None,
        "ended": left.at if left else None,
    }
    known = {name: value for name, value in values.items() if value is not None}
    found.update(known)  # type: ignore[typeddict-item]
    return found


def _trace(job: LastJob) -> JobTrace:
    left = None
    if "host" in job:
        left = ExitRecord(job.get("exit_code"), job["host"], job.get("ended"))
    facts = JobFacts(
        script=job.get("script"),
        node=job.get("node"),
        began=job.get("began"),
        setup=job.get("setup", ""),
        reason=job.get("reason", ""),
        left=left,
    )
    claim = JobId.parse(job["claim"]) if "claim" in job else None
    return JobTrace(facts, claim, job.get("alive", 0.0), clean(job.get("note", "")))
