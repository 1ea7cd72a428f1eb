"""The state of a cluster, as the files in its folder tell it.

The files are documented in `gpujobs.injob`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..injob import folder as files
from ..injob.events import DaskWorkers, EventReader, attempts_in, events_file
from ..injob.folder import (
    DamagedError,
    Ended,
    Folder,
    JsonObject,
    Run,
)
from ..injob.jobevents import (
    ExitRecord,
    JobFacts,
    JobReader,
    LostNode,
    event_files,
    lost_nodes,
    with_events,
)
from ..injob.names import NOTE, job_file
from ..injob.transport import Choice
from ..schedulers import JobId
from ..text import clean
from . import oldfolder
from .clusterfolder import (
    PresentFolders,
    file_names,
    is_removed,
    job_files,
    parse_claim,
    read_claim,
    version_of,
)

_FRESH = 120.0
"""Seconds after a sign of life of the dask scheduler for which its workers are the present ones."""


@dataclass(frozen=True)
class JobTrace:
    """The traces of one job in the folder."""

    facts: JobFacts = field(default_factory=JobFacts)
    claim: JobId | None = None
    """The job of the batch scheduler that does its work."""
    alive: float = 0.0
    """When it last gave a sign of life since it started (epoch seconds); 0: never."""
    note: str = ""
    """A remark of its supervisor for the user, as the head."""

    @property
    def started(self) -> bool:
        """Whether it has begun, perhaps before it was requeued."""
        return self.claim is not None or self.facts.node is not None

    @property
    def began(self) -> float | None:
        """When it last started (epoch seconds of its node); a requeued one starts again."""
        return self.facts.began

    @property
    def left(self) -> ExitRecord | None:
        """How it has ended, by its script."""
        return self.facts.left

    @property
    def node(self) -> str:
        """Where it has ended, or its supervisor has started; "" if it has not."""
        return self.left.host if self.left else self.facts.node or ""

    @property
    def reason(self) -> str:
        """Why it failed."""
        return clean(self.facts.reason)

    @property
    def setup(self) -> str:
        """The first line of `setup` that failed."""
        return clean(self.facts.setup)


@dataclass(frozen=True)
class FolderState:
    """The contents of a cluster's folder at one moment, by their authors."""

    jobs: Mapping[int, JobTrace] = field(default_factory=dict)
    """By number; those of which there is a file."""
    dask: DaskWorkers = field(default_factory=DaskWorkers)
    """The dask scheduler of the last attempt, and its workers."""
    head: int | None = None
    """Number of the head's job."""
    ended: Ended | None = None
    transport: Choice = field(default_factory=Choice)
    """The protocol between dask's processes."""
    waits_for: str = ""
    """The cluster after whose end this one starts; "" when that has ended."""
    removed: bool = False
    """Whether a user has removed the folder."""
    lost_nodes: Mapping[int, LostNode] = field(default_factory=dict)
    """Nodes of an allocation, by their numbers."""
    damaged: tuple[str, ...] = ()
    """Which files cannot be read, and why; their content is missing here."""
    refused: str = ""
    """Why the folder is not trusted, and nothing in it was read."""

    def job(self, number: int) -> JobTrace:
        """Return the traces of a job; it may have none."""
        return self.jobs.get(number, _NO_TRACE)

    @property
    def claims(self) -> dict[int, JobId]:
        """The job of the batch scheduler that does the work of each number, if it has begun."""
        return {number: job.claim for number, job in self.jobs.items() if job.claim}

    @property
    def failed_setups(self) -> set[str]:
        """The first lines of `setup` that failed in jobs."""
        return {job.setup for job in self.jobs.values() if job.setup}

    @property
    def started_jobs_have_left(self) -> bool:
        """Whether no job whose supervisor has started is still to end."""
        return all(job.left for job in self.jobs.values() if job.facts.node is not None)

    def have_left(self, numbers: Iterable[int]) -> bool:
        """Return whether all these jobs have ended, by their scripts."""
        return all(self.job(number).left for number in numbers)

    def end_time(self, otherwise: float) -> float:
        """Return when the cluster ended; ``otherwise`` if it has not."""
        return self.ended.time if self.ended else otherwise

    @property
    def scheme(self) -> str:
        """The protocol between dask's processes, as in its addresses; "" while it is unknown."""
        return self.transport.scheme or self.dask.scheme

    @property
    def encrypted(self) -> bool | None:
        """Whether the traffic is encrypted; None while it is unknown."""
        return self.scheme in ("tls", "wss") if self.scheme else None


_NO_TRACE = JobTrace()
_NO_JOBS: Mapping[int, JobTrace] = {}
_NUMBER = re.compile("[0-9]+")


def _number_of(name: str) -> int | None:
    """Return the number of the job that a file in `jobs` is of."""
    found = _NUMBER.match(name)
    return int(found[0]) if found else None


@dataclass(frozen=True)
class _Head:
    """The head of the last attempt, and the workers of its dask scheduler."""

    job: int | None
    """Number of its job; None if a Python process has the dask scheduler, or none has started."""
    sign: float
    """When it, or that process, last gave a sign of life, in seconds since 1970; 0: never."""
    dask: DaskWorkers


class FolderReader:
    """Reads a cluster's folder; files of jobs that have not changed are not read again.

    Files that the cluster replaces are always opened, because NFS checks only then whether its
    cache is out of date.
    """

    def __init__(self, path: Path, *, in_full: bool = False) -> None:
        """``in_full``: for `report`, also files without news about the present.

        These are the past events of the dask scheduler, and the files of jobs whose workers are
        connected, which may be damaged.
        """
        self._folder = Folder(str(path))
        self._in_full = in_full
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
        self._turn = threading.Lock()
        """An owner's `jobs` reads in one thread while its watch reads in another."""

    def read(
        self,
        folders: PresentFolders | None = None,
        jobs: Iterable[int] = (),
        ended: Mapping[int, JobTrace] = _NO_JOBS,
    ) -> FolderState:
        """Return the present state; an empty one if the folder is gone, or is not trusted.

        ``folders``: of several clusters at this look. ``jobs``: all that may
        have files, each on one host; none is looked up while their workers have the facts of all.
        ``ended``: traces of jobs whose files are not read any more.
        """
        with self._turn:
            return self._read(folders, jobs, ended)

    def _read(
        self,
        folders: PresentFolders | None,
        jobs: Iterable[int],
        ended: Mapping[int, JobTrace],
    ) -> FolderState:
        path = self._folder.path
        self._names, problem = (folders or PresentFolders()).contents(path)
        if problem:
            return FolderState(damaged=(problem,), refused=problem)
        self._damaged = []
        head = self._read_head()
        traces, lost_nodes = self._read_jobs(head, frozenset(jobs), ended)
        return FolderState(
            jobs=traces,
            dask=head.dask,
            head=head.job,
            ended=_ended(self._json("ended")),
            transport=self._read_transport(head.dask),
            waits_for=self._waits_for(),
            removed=not self._names and is_removed(path),
            lost_nodes=lost_nodes,
            damaged=tuple(self._damaged),
        )

    def _read_transport(self, dask: DaskWorkers) -> Choice:
        """Return the protocol; a head that has nothing else to say about it writes no file."""
        found = self._json(files.TRANSPORT)
        return Choice.parse(found) if found else Choice(dask.scheme)

    def _read_head(self) -> _Head:
        folder, dask = self._read_attempt()
        job = dask.job
        if job is None:
            job = self._json(f"{folder}/owner").get("job")
        sign = "lease" if job is None else f"{folder}/heartbeat"
        return _Head(job, _modified_at(f"{self._folder.path}/{sign}"), dask)

    def _present_runs(self, head: _Head) -> Mapping[int, Run]:
        """Return the starts of the jobs with connected workers; {} if they may be out of date."""
        if self._in_full or "ended" in self._names or time.time() - head.sign >= _FRESH:
            return {}
        runs = head.dask.runs
        return {number: run for number, run in runs.items() if number not in self.ended}

    def _sign_of_life(self, number: int, runs: Container[int], head: _Head) -> float:
        """Return when a job that has started last gave a sign of life."""
        found = head.sign if number in runs else self._last_sign(number)
        return max(found, head.sign) if number == head.job else found

    def _read_attempt(self) -> tuple[str, DaskWorkers]:
        """Return the folder of the last head, and the workers of its dask scheduler."""
        attempts = attempts_in(self._names)
        if not attempts and oldfolder.is_old(self._names):
            return oldfolder.HEAD, oldfolder.read_workers(self._json)
        attempt = max(attempts, default=1)
        if attempt != self._attempt or self._events is None:
            self._attempt = attempt
            path = self._folder.path / events_file(attempt)
            self._events = EventReader(path, keep=self._in_full)
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

    def _read_jobs(
        self, head: _Head, known: frozenset[int], ended: Mapping[int, JobTrace]
    ) -> tuple[dict[int, JobTrace], dict[int, LostNode]]:
        """Read the files of the jobs, except those of which workers have told the facts.

        ``known``, ``ended``: see `read`. Return the traces of the jobs, and the lost nodes of
        allocations, by their numbers.
        """
        runs = self._present_runs(head)
        ended = {number: job for number, job in ended.items() if number not in runs}
        names = self._names_of_jobs(head, runs, known, ended)
        names = [name for name in names if _number_of(name) not in ended]
        facts, lost_nodes = self._read_facts(names, runs)
        jobs = {**ended, **{number: JobTrace(one) for number, one in facts.items()}}
        self._add_claims_and_notes(jobs, names, runs, head)
        for number, job in jobs.items():
            if job.facts.node is not None and number not in ended:
                jobs[number] = replace(job, alive=self._sign_of_life(number, runs, head))
        return jobs, lost_nodes

    def _add_claims_and_notes(
        self, jobs: dict[int, JobTrace], names: Iterable[str], runs: Mapping[int, Run], head: _Head
    ) -> None:
        """Add the claims, and the note of the head, to the traces of the jobs."""
        for number, kind in job_files(names, "."):
            job = jobs.get(number, _NO_TRACE)
            if kind == "claim":
                jobs[number] = replace(job, claim=self._claim_of(number, runs.get(number)))
            elif kind == NOTE:  # of a cluster of 0.3.0
                note = clean(self._job_file(job_file(number, kind), self._text))
                jobs[number] = replace(job, note=note)
        if NOTE in self._names and head.job is not None:
            note = clean(self._text(NOTE))
            jobs[head.job] = replace(jobs.get(head.job, _NO_TRACE), note=note)

    def _names_of_jobs(
        self,
        head: _Head,
        runs: Mapping[int, Run],
        known: frozenset[int],
        ended: Mapping[int, JobTrace],
    ) -> list[str]:
        """Return the names of the files of jobs: of the claims, if workers have all other facts.

        A head of 0.3.0, which does not write its number, may have written a note among them.
        """
        certain = {number for number, run in runs.items() if run["id"]}
        if known and known.difference(ended) <= certain and head.dask.job is not None:
            return [f"{number}.claim" for number in runs]
        return file_names(self._folder.path / "jobs")

    def _read_facts(
        self, names: Iterable[str], runs: Mapping[int, Run]
    ) -> tuple[dict[int, JobFacts], dict[int, LostNode]]:
        """Return the facts of the jobs, and the lost nodes; ``runs``: see `_present_runs`."""
        found = {number: JobFacts.of(run) for number, run in runs.items()}
        nodes: dict[int, list[JobFacts]] = {}
        for number, node, name in event_files(names):
            if node:
                nodes.setdefault(number, []).append(self._events_of(name))
            elif number not in runs:
                found[number] = self._events_of(name)
        lost: dict[int, LostNode] = {}
        for number, facts in nodes.items():
            lost.update(lost_nodes(found.get(number, JobFacts()).run, facts))
        self._add_old_files(names, found, lost)
        return found, lost

    def _add_old_files(
        self, names: Iterable[str], found: dict[int, JobFacts], nodes: dict[int, LostNode]
    ) -> None:
        """Add the files of jobs, and of lost nodes, of an earlier gpujobs."""
        endings: dict[int, set[str]] = {}
        for number, ending in job_files(names, "."):
            if ending in oldfolder.JOB_FILES:
                endings.setdefault(number, set()).add(ending)
            elif ending == oldfolder.LOST and (lost := oldfolder.lost_node(number, self._old_json)):
                nodes[number] = lost
        for number, known in endings.items():
            events = oldfolder.job_events(number, known, self._old_json, self._old_text)
            found[number] = with_events(found.get(number, JobFacts()), events)

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
        key = version_of(status)
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
