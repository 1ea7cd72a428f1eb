"""The state of a cluster, as the files in its folder tell it.

The files are documented in `gpujobs.injob`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..injob import folder as files
from ..injob.events import DaskWorkers, EventReader, LostTasks, attempts_in, events_file
from ..injob.folder import (
    DamagedError,
    Ended,
    Folder,
    JsonObject,
    OverMemory,
    RegisteredWorker,
    Run,
)
from ..injob.gpus import binding_messages
from ..injob.jobevents import (
    ExitRecord,
    JobFacts,
    JobReader,
    LostNode,
    event_files,
    lost_nodes,
    with_events,
)
from ..injob.memory import memory_messages
from ..injob.names import NOTE, job_file
from ..injob.transport import Choice
from ..schedulers import JobId
from ..text import clean, plural
from . import oldfolder
from .clusterfolder import (
    file_names,
    folder_problem,
    is_removed,
    job_files,
    parse_claim,
    read_claim,
)

_FRESH = 120.0
"""Seconds after a sign of life of the dask scheduler for which its workers are the present ones."""


@dataclass(frozen=True)
class FolderState:
    """The contents of a cluster's folder at one moment. Mappings are by job number or worker."""

    ended: Ended | None = None
    workers: Mapping[str, RegisteredWorker] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    """Names of all workers that were ever registered."""
    gone: Mapping[str, float] = field(default_factory=dict)
    """When workers disconnected that have not connected again (epoch seconds of the head)."""
    exits: Mapping[int, ExitRecord] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why jobs failed."""
    claims: Mapping[int, JobId] = field(default_factory=dict)
    """The job of the batch scheduler that does the work of each number."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The nodes of the jobs whose supervisor has started."""
    began: Mapping[int, float] = field(default_factory=dict)
    """When the jobs last started (epoch seconds of their nodes); a requeued one starts again."""
    alive: Mapping[int, float] = field(default_factory=dict)
    """When the jobs that have started last gave a sign of life (epoch seconds)."""
    head: int | None = None
    """Number of the head's job."""
    address: str | None = None
    """Address of the dask scheduler."""
    dashboard: int | None = None
    """Port of the dashboard."""
    transport: Choice = field(default_factory=Choice)
    """The protocol between dask's processes."""
    over_memory: Mapping[str, OverMemory] = field(default_factory=dict)
    """Workers that were restarted, or are paused, because of their memory."""
    ends_at: float | None = None
    """When the cluster ends if it stays without work (epoch seconds); None if it has work."""
    ends_by: str = ""
    """The rule by which it ends then (see `injob.demand`)."""
    waits_for: str = ""
    """The cluster after whose end this one starts; "" when that has ended."""
    removed: bool = False
    """Whether a user has removed the folder."""
    setups: Mapping[int, str] = field(default_factory=dict)
    """The first line of `setup` that failed."""
    head_note: str = ""
    """A remark of the head's job for the user."""
    lost: tuple[str, ...] = ()
    """Why nodes of an allocation are lost."""
    lost_tasks: tuple[str, ...] = ()
    """Which tasks the end of their job has cut off."""
    damaged: tuple[str, ...] = ()
    """Which files cannot be read, and why; their content is missing here."""
    refused: str = ""
    """Why the folder is not trusted, and nothing in it was read."""

    def has_started(self, number: int) -> bool:
        """Return whether job ``number`` has begun, perhaps before it was requeued."""
        return number in self.claims or number in self.nodes

    def end_time(self, otherwise: float) -> float:
        """Return when the cluster ended; ``otherwise`` if it has not."""
        return self.ended.time if self.ended else otherwise

    @property
    def scheme(self) -> str:
        """The protocol between dask's processes, as in its addresses; "" while it is unknown."""
        return self.transport.scheme or str(self.address or "").partition("://")[0]

    @property
    def encrypted(self) -> bool | None:
        """Whether the traffic is encrypted; None while it is unknown."""
        return self.scheme in ("tls", "wss") if self.scheme else None

    @property
    def unused_networks(self) -> list[str]:
        """Fast networks that the chosen protocol does not use, as ``NVLink between 2 GPUs``."""
        if not self.scheme or self.scheme == "ucxx":
            return []
        found: dict[str, set[str | None]] = {}
        for worker in self.workers.values():
            uuids = [gpu["uuid"] for gpu in files.all_gpus(worker.get("gpu"))]
            for name in (worker.get("gpu") or {}).get("fast", ()):
                found.setdefault(name, set()).update(uuids)
        return [
            f"{name} between {len(gpus)} GPUs" if len(gpus) > 1 else name
            for name, gpus in sorted(found.items())
        ]

    @property
    def notes(self) -> list[str]:
        """Remarks for the user: findings, and missing encryption."""
        if self.encrypted is False:
            return [*self.findings, f"not encrypted: dask uses {self.scheme}"]
        return self.findings

    @property
    def findings(self) -> list[str]:
        """What only the jobs could find out: nodes, setup, memory, CPUs, transport."""
        found = [*self.damaged, *self.lost, *self.lost_tasks]
        found += [f"setup: {text}" for text in sorted(set(self.setups.values()))]
        found += memory_messages(self.over_memory)
        found += filter(None, (self.head_note,))
        found += binding_messages(self.workers)
        found += filter(None, (self.transport.reason, self.transport.remark))
        if unused := self.unused_networks:
            names = " and ".join(unused)
            message = f"{names} seen and left unused: dask uses {self.scheme}, not ucxx"
            found.append(f"{message}; `protocol: ucxx` uses it, not encrypted")
        return found


def _lost_tasks(found: Mapping[str, LostTasks]) -> Iterator[str]:
    """Yield which tasks were cut off; their names are the user's."""
    for prefix, tasks in found.items():
        what = f"{plural(tasks.number, 'task')} {clean(prefix)}"
        yield (
            f"{what} started again: the job ended when it had run for {tasks.seconds:.0f} s; "
            "`task_time` says how long a task takes"
        )


@dataclass(frozen=True)
class _Head:
    """The head of the last attempt, and the workers of its dask scheduler."""

    job: int | None
    """Number of its job; None if a Python process has the dask scheduler, or none has started."""
    sign: float
    """When it, or that process, last gave a sign of life, in seconds since 1970; 0: never."""
    dask: DaskWorkers


@dataclass
class _Jobs:
    """The files of the jobs, by their numbers."""

    facts: dict[int, JobFacts]
    claims: dict[int, JobId | None] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    lost: dict[int, LostNode] = field(default_factory=dict)
    """By the number of the node."""


class FolderReader:
    """Reads a cluster's folder; files of jobs that have not changed are not read again.

    Files that the cluster replaces are always opened, because NFS checks only then whether its
    cache is out of date.
    """

    def __init__(self, path: Path) -> None:
        self._folder = Folder(str(path))
        self._job_files: dict[str, tuple[tuple[int, int, int], Any]] = {}
        """Key of the version and content of the files of jobs, by name."""
        self._readers: dict[str, JobReader] = {}
        """Of the events of jobs and their nodes, by the name of the file."""
        self._damaged: list[str] = []
        self._names: frozenset[str] = frozenset()
        """Of the files that the folder has at this look."""
        self.ended: set[int] = set()
        """Numbers of jobs that have ended, as the batch scheduler says: their workers are gone."""
        self._attempt = 0
        self._events: EventReader | None = None
        """Of the dask scheduler of this attempt."""

    def read(self) -> FolderState:
        """Return the present state; an empty one if the folder is gone, or is not trusted."""
        path = self._folder.path
        if problem := folder_problem(path):
            return FolderState(damaged=(problem,), refused=problem)
        self._damaged, self._names = [], frozenset(self._folder.names())
        head = self._read_head()
        runs = self._present_runs(head)
        jobs = self._read_jobs(runs)
        dask, facts = head.dask, jobs.facts
        started = {number: one for number, one in facts.items() if one.node is not None}
        return FolderState(
            ended=_ended(self._json("ended")),
            removed=not self._names and is_removed(path),
            workers=dask.connected,
            over_memory=dask.over_memory,
            waits_for=self._waits_for(),
            ends_at=dask.ends_at,
            ends_by=dask.ends_by,
            seen=dask.seen,
            gone=dask.gone,
            exits={n: one.left for n, one in facts.items() if one.left},
            reasons={n: clean(one.reason) for n, one in facts.items() if one.reason},
            lost=tuple(clean(lost.reason) for lost in jobs.lost.values()),
            lost_tasks=tuple(_lost_tasks(dask.lost_tasks)),
            head_note=clean(jobs.notes.get(-1 if head.job is None else head.job, "")),
            setups={n: clean(one.setup) for n, one in facts.items() if one.setup},
            claims={n: job for n, job in jobs.claims.items() if job},
            nodes={n: one.node or "" for n, one in started.items()},
            began={n: one.began for n, one in started.items() if one.began is not None},
            alive=self._signs_of_life(started, runs, head),
            head=head.job,
            address=dask.address,
            dashboard=dask.dashboard,
            transport=Choice.parse(self._json(files.TRANSPORT)),
            damaged=tuple(self._damaged),
        )

    def job_facts(self) -> dict[int, JobFacts]:
        """Return the facts of all jobs from their own files."""
        self._names = frozenset(self._folder.names())
        return self._read_jobs({}).facts

    def _read_head(self) -> _Head:
        folder, dask = self._read_attempt()
        job = self._json(f"{folder}/owner").get("job")
        sign = "lease" if job is None else f"{folder}/heartbeat"
        return _Head(job, _modified_at(f"{self._folder.path}/{sign}"), dask)

    def _present_runs(self, head: _Head) -> Mapping[int, Run]:
        """Return the starts of the jobs with connected workers; {} if they may be out of date."""
        if "ended" in self._names or time.time() - head.sign >= _FRESH:
            return {}
        runs = head.dask.runs
        return {number: run for number, run in runs.items() if number not in self.ended}

    def _signs_of_life(
        self, started: Iterable[int], runs: Mapping[int, Run], head: _Head
    ) -> dict[int, float]:
        """Return when each of the jobs that have started last gave a sign of life."""
        found: dict[int, float] = {}
        for number in started:
            found[number] = head.sign if number in runs else self._last_sign(number)
            if number == head.job:
                found[number] = max(found[number], head.sign)
        return found

    def _read_attempt(self) -> tuple[str, DaskWorkers]:
        """Return the folder of the last head, and the workers of its dask scheduler."""
        attempts = attempts_in(self._names)
        if not attempts and oldfolder.is_old(self._names):
            return oldfolder.HEAD, oldfolder.read_workers(self._json)
        attempt = max(attempts, default=1)
        if attempt != self._attempt or self._events is None:
            self._attempt = attempt
            self._events = EventReader(self._folder.path / events_file(attempt))
        if events_file(attempt) not in self._names:
            return files.head_folder(attempt), DaskWorkers()
        dask = self._events.read()
        self._damaged += filter(None, (self._events.problem,))
        return files.head_folder(attempt), dask

    def _last_sign(self, number: int) -> float:
        """Return when a job last wrote its log, or its file for the clock; 0 if neither."""
        names = (f"logs/job-{number}.log", job_file(number, "now"))
        return max(_modified_at(f"{self._folder.path}/{name}") for name in names)

    def _waits_for(self) -> str:
        after = self._json(files.AFTER)
        if not after or (Path(after["folder"]) / "ended").exists():
            return ""
        return str(after["cluster"])

    def _read_jobs(self, runs: Mapping[int, Run]) -> _Jobs:
        """Read the files of the jobs, except those of ``runs``, which workers have told."""
        names = file_names(self._folder.path / "jobs")
        jobs = _Jobs({number: JobFacts.of(run) for number, run in runs.items()})
        nodes: dict[int, list[JobFacts]] = {}
        for number, node, name in event_files(names):
            if node:
                nodes.setdefault(number, []).append(self._events_of(name))
            elif number not in runs:
                jobs.facts[number] = self._events_of(name)
        for number, kind in job_files(names, "."):
            if kind == "claim":
                jobs.claims[number] = self._claim_of(number, runs.get(number))
            elif kind == NOTE:
                jobs.notes[number] = self._job_file(job_file(number, kind), self._text)
        for number, facts in nodes.items():
            jobs.lost.update(lost_nodes(jobs.facts.get(number, JobFacts()).run, facts))
        self._add_old_files(jobs, names)
        return jobs

    def _add_old_files(self, jobs: _Jobs, names: Iterable[str]) -> None:
        """Add the files of jobs of an earlier gpujobs."""
        endings: dict[int, set[str]] = {}
        for number, ending in job_files(names, "."):
            if ending in oldfolder.JOB_FILES:
                endings.setdefault(number, set()).add(ending)
            elif ending == oldfolder.LOST and (lost := oldfolder.lost_node(number, self._old_json)):
                jobs.lost[number] = lost
        for number, known in endings.items():
            events = oldfolder.job_events(number, known, self._old_json, self._old_text)
            jobs.facts[number] = with_events(jobs.facts.get(number, JobFacts()), events)

    def _old_json(self, name: str, shape: Any) -> JsonObject:
        found: JsonObject = self._job_file(name, partial(self._json, shape=shape))
        return found

    def _old_text(self, name: str) -> str:
        return str(self._job_file(name, self._text))

    def _claim_of(self, number: int, run: Run | None) -> JobId | None:
        """Return the job in a claim, which its workers may have told."""
        name = job_file(number, "claim")
        if run is None or not run["id"]:
            job: JobId | None = self._job_file(name, self._claim)
            return job
        parse = partial(parse_claim, run["id"])
        job = self._undamaged(parse, f"{self._folder.path / name}")
        return job

    def _events_of(self, name: str) -> JobFacts:
        """Return the facts of a job, or of a node; its file is opened if it has changed."""
        path = self._folder.path / "jobs" / name
        reader = self._readers.setdefault(name, JobReader(path))

        def look(_: str) -> JobFacts:
            facts = reader.read()
            self._damaged += filter(None, (reader.problem,))
            return facts

        facts: JobFacts = self._job_file(f"jobs/{name}", look)
        return facts

    def _job_file(self, name: str, read: Callable[[str], Any]) -> Any:
        try:
            status = os.lstat(f"{self._folder.path}/{name}")  # a Path takes as long as the call
        except OSError:  # a restarted job has just removed it
            return read(name)
        key = (status.st_mtime_ns, status.st_size, status.st_ino)
        if name not in self._job_files or self._job_files[name][0] != key:
            before = len(self._damaged)
            value = read(name)
            if len(self._damaged) > before:
                return value
            self._job_files[name] = (key, value)
        return self._job_files[name][1]

    def _json(self, name: str, shape: Any = None) -> JsonObject:
        if name.partition("/")[0] not in self._names:
            return {}
        return self._undamaged(partial(self._folder.load, shape=shape), name) or {}

    def _text(self, name: str) -> str:
        return self._undamaged(self._folder.load_text, name) or ""

    def _claim(self, name: str) -> JobId | None:
        job: JobId | None = self._undamaged(partial(read_claim, self._folder), name)
        return job

    def _undamaged(self, load: Callable[[str], Any], name: str) -> Any:
        try:
            return load(name)
        except DamagedError as error:
            self._damaged.append(str(error))
            return None


def read_state(folder: Path) -> FolderState:
    """Return the present state of a cluster's folder; an empty one if the folder is gone."""
    return FolderReader(folder).read()


def _modified_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime  # noqa: PTH116 - see _job_file
    except OSError:
        return 0.0


def _ended(value: JsonObject) -> Ended | None:
    if not value:
        return None
    ended = Ended.parse(value)
    # The reason may quote the last line of a command, with characters that move the cursor.
    return replace(ended, reason=clean(ended.reason))
