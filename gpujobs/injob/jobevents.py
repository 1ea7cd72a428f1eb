"""The events of a job in `jobs/N.jsonl`, and the facts that they amount to.

The batch script of job N and its supervisor append to that file, on one host. Each other host of
the job that has to say something has a file of its own, `jobs/N-NODE.jsonl`: appends of two hosts
to one file of NFS may overwrite each other. A line is an object with `event`, `run`, `node` (which
writes it), `at` (seconds since the epoch, never for order) and other keys of `JobEvent`:

| event | written by | means |
|---|---|---|
| script | bash | the job starts, perhaps again; `version` of these words |
| setup failed | bash | `text`: the lines of `setup` that have failed so far |
| started | supervisor | it has started; when the job `began`, its `pid` |
| signalled | bash | the batch scheduler has sent a signal |
| failed | supervisor, or bash if that died | why the job ends: `reason` |
| left | bash | it has ended; exit `code` |
| node lost | supervisor, or node | node `number` of an allocation; `reason`, `code` |

`run` names the start of the job: a job that the batch scheduler starts again may still have
processes of the start before, whose lines are void.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from .events import LineReader
from .folder import MOST_BYTES, Folder, Run
from .log import log
from .names import RUN_NAME, job_file
from .network import node_name

ENDING = "jsonl"
"""Of the names of the files."""
_FILE = re.compile(rf"([0-9]{{1,9}})(?:-(.+))?\.{ENDING}")


class JobEvent(TypedDict, total=False):
    """A line of the file."""

    event: str
    run: str
    node: str
    at: float
    version: int
    began: float
    text: str
    reason: str
    code: int
    number: int


@dataclass(frozen=True)
class ExitRecord:
    """How a job has ended, by its script."""

    exit_code: int | None
    host: str
    at: float | None = field(default=None, compare=False)
    """Seconds since the epoch, rounded down."""


@dataclass(frozen=True)
class LostNode:
    """Why a node of an allocation is lost."""

    reason: str
    exit_code: int


@dataclass
class JobFacts:
    """The state of a job, or of one of its nodes, since its last start, as it says itself."""

    line: ClassVar[Any] = JobEvent
    most_bytes: ClassVar[int] = MOST_BYTES
    run: str = ""
    """Name of the last start."""
    past: set[str] = field(default_factory=set)
    """Names of the starts before."""
    script: float | None = None
    """When the script last started."""
    node: str | None = None
    """Where the supervisor last started; None if it has not."""
    began: float | None = None
    """When that start of the job began."""
    setup: str = ""
    """Which lines of `setup` failed."""
    reason: str = ""
    """Why the job ends."""
    signalled: bool = False
    left: ExitRecord | None = None
    lost: dict[int, LostNode] = field(default_factory=dict)
    """Nodes of an allocation that are lost, by their numbers through all jobs."""

    @classmethod
    def of(cls, run: Run) -> JobFacts:
        """Return the facts that the workers of a running job tell."""
        return cls(
            run=run["name"],
            script=run["started"],
            node=run["node"],
            began=run["started"],
            setup=run.get("setup", ""),
        )

    def feed(self, event: JobEvent) -> None:
        """Take over an event, unless it is of an earlier start."""
        kind, run = event.get("event"), event.get("run", "")
        if run in self.past:
            return
        if run != self.run:  # also if a full disk has refused the line of its script
            self._begin(run)
        if kind == "script":
            self.script = event.get("at")
        elif kind == "setup failed":
            self.setup = event.get("text", "")
        elif kind == "started":
            self.node, self.began = event.get("node", ""), event.get("began")
        elif kind == "signalled":
            self.signalled = True
        elif kind == "failed":
            self.reason = event.get("reason", "")
        elif kind == "left":
            self.left = ExitRecord(event.get("code"), event.get("node", ""), event.get("at"))
        elif kind == "node lost":
            lost = LostNode(event.get("reason", ""), event.get("code", 0))
            self.lost.setdefault(event.get("number", 0), lost)

    def _begin(self, run: str) -> None:
        """Forget the start before; its node is known until the supervisor starts again."""
        self.past.add(self.run)
        self.run = run
        self.setup = self.reason = ""
        self.signalled, self.left, self.lost = False, None, {}

    def copy(self) -> JobFacts:
        """Return a copy, which later events do not change."""
        return replace(self, past=set(self.past), lost=dict(self.lost))


class JobReader(LineReader[JobFacts]):
    """Reads the events of a job, or of one of its nodes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, JobFacts())


# -- the files, and who appends to them ------------------------------------------------------------
def job_events(job: int) -> str:
    """Return the name of the file of a job."""
    return job_file(job, ENDING)


def node_events(job: int, node: str) -> str:
    """Return the name of the file of a node of a job."""
    return job_file(f"{job}-{node}", ENDING)


def event_files(names: Iterable[str]) -> Iterator[tuple[int, str, str]]:
    """Yield job, node and name of the files of events among ``names``; no node: of the job."""
    for name in sorted(names):
        if found := _FILE.fullmatch(name):
            yield int(found[1]), found[2] or "", name


def job_facts(folder: Folder, job: int) -> JobFacts:
    """Return the facts of a job from its file."""
    return JobReader(folder.path / job_events(job)).read()


def run_name() -> str:
    """Return the name of the present start of this process's job."""
    return os.environ.get(RUN_NAME, "")


def append_event(folder: Folder, name: str, event: str, **values: object) -> None:
    """Append an event of this process's job to a file, if the disk allows it.

    The first keys are in the order of the lines of bash, which looks for one of them.
    """
    line = {"event": event, "run": run_name(), "node": node_name(), "at": time.time(), **values}
    try:
        folder.append(name, [json.dumps(line)])
    except OSError as error:
        log(f"cannot write to {folder.path}: {error}")


def with_events(facts: JobFacts, events: Iterable[JobEvent]) -> JobFacts:
    """Return ``facts`` after events of the same start, which do not tell its name."""
    found = facts.copy()
    for event in events:
        found.feed({**event, "run": found.run})
    return found


def lost_nodes(run: str, facts: Iterable[JobFacts]) -> dict[int, LostNode]:
    """Return the lost nodes of this start of a job; ``facts``: of its nodes."""
    found: dict[int, LostNode] = {}
    for one in facts:
        if one.run != run:
            continue
        for number, lost in one.lost.items():
            found.setdefault(number, lost)
    return found
