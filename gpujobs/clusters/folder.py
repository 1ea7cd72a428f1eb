"""A cluster's folder as this side of the batch scheduler makes, writes and reads it.

The files in it are documented in `gpujobs.injob`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..batch import receive
from ..errors import GpujobsError, InputError
from ..injob import archive
from ..injob import folder as files
from ..injob.certificate import make_certificate
from ..injob.events import DaskWorkers, EventReader, LostTasks, attempts_in, events_file
from ..injob.folder import (
    DamagedError,
    Ended,
    EndKind,
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
from ..injob.names import ARCHIVE, JUDGE, NOTE, job_file
from ..injob.transport import Choice
from ..schedulers import JobId
from ..text import clean, plural
from . import oldfolder

logger = logging.getLogger("gpujobs")

SPEC = "spec.json"
TAIL_BYTES = 65536
_FRESH = 120.0
"""Seconds after a sign of life of the dask scheduler for which its workers are the present ones."""


# -- files and folders that are private to the user ------------------------------------------------
def write_new(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a new file, mode 0600; ``durable``: onto the disk. Raises FileExistsError."""
    data = content.encode() if isinstance(content, str) else content
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def write_atomically(path: Path, content: str, *, durable: bool = False) -> None:
    """Replace a file in one step; the new one has mode 0600. See `write_new` for ``durable``."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with disk_errors(path.parent):
        try:
            write_new(temporary, content, durable=durable)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of files and of folders, whose names end in "/"; no links."""
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_dir() or path.is_file()):
            yield path.relative_to(folder).as_posix() + "/" * path.is_dir(), path


def file_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder, in order; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not Paths
    except OSError:
        return []


def job_files(names: Iterable[str], separator: str) -> Iterator[tuple[int, str]]:
    """Yield number and rest of those of the ``names`` that begin with ``N.``."""
    for name in names:
        number, found, rest = name.partition(separator)
        if found and number.isascii() and number.isdecimal():
            yield int(number), rest


def is_removed(folder: Path) -> bool:
    """Return whether ``folder`` was removed; not if its parent is gone, as of an unmounted disk."""
    try:
        folder.stat()
    except FileNotFoundError:
        return folder.parent.is_dir()
    except OSError:
        return False
    return False


OF_SITE = "see `directory` of the site"
OF_STATE = "XDG_STATE_HOME=FOLDER keeps the records of clusters in a folder that you can write"
"""Hints about the folders of clusters, and about the state folder."""


def private_folder(path: Path, hint: str = OF_SITE) -> None:
    """Make the folder ``path`` with mode 0700, or check that only this user can write to it.

    Raises InputError if it cannot be made, or is a symbolic link, belongs to another user or is
    writable by others; ``hint`` says how to use another folder.
    """
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.is_symlink() and not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be used: {error.strerror}", hint=hint) from None
    _check(path, hint)


def check_folder(path: Path) -> None:
    """Raise InputError if others could change the folder of a cluster, in which there are keys."""
    for folder in (path.parent, path):
        _check(folder)


def folder_problem(path: Path) -> str:
    """Return why others could change the folder of a cluster; "" if they cannot, or it is missing.

    Who can write the folder above could put another one in its place.
    """
    try:
        check_folder(path)
    except InputError as error:
        return error.problems[0].message.partition(";")[0]
    return ""


def _check(path: Path, hint: str = OF_SITE) -> None:
    try:
        status = path.lstat()
    except OSError:
        return
    hint = f"use another folder: {hint}"
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif status.st_uid != os.getuid():
        problem = "belongs to another user"
    elif status.st_mode & 0o022:
        problem, hint = "is writable by other users", f"chmod 700 {path}, or {hint}"
    else:
        return
    raise InputError(f"{path} {problem}; gpujobs stores keys below it", hint=hint)


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Log a GpujobsError of a write that a reader can do without, as on a full disk."""
    try:
        yield
    except GpujobsError as error:
        logger.warning("%s", error)


@contextlib.contextmanager
def disk_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Turn every OSError but FileExistsError into a GpujobsError that names ``path``."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise GpujobsError(f"cannot write in {path}: {error.strerror}", hint=hint) from error


# -- make a cluster's folder -----------------------------------------------------------------------
def make(folder: Path, *, encrypted: bool, logs: Path | None = None) -> None:
    """Make the folder of a new cluster, mode 0700, with its certificate and `injob`.

    ``logs``: a folder elsewhere; the logs are then in a folder of the cluster's name inside it.
    """
    private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
        receive.mark(folder)
        for name in ("jobs", "scripts"):
            (folder / name).mkdir(mode=0o700)
        _make_logs(folder, logs)
        write_new(folder / ARCHIVE, archive.build())
        # No file system compresses random bytes away.
        write_new(folder / files.RESERVE, os.urandom(files.RESERVE_BYTES))
        if encrypted:
            make_certificate(folder)
    except FileExistsError:
        raise InputError(f"{folder} exists already") from None
    except OSError as error:
        discard(folder)
        message = f"{folder} cannot be used: {error.strerror}"
        raise GpujobsError(message, hint="nothing was submitted") from None


def _make_logs(folder: Path, logs: Path | None) -> None:
    if logs is None:
        (folder / "logs").mkdir(mode=0o700)
        return
    elsewhere = logs.absolute() / folder.name
    elsewhere.mkdir(mode=0o700, parents=True)
    (folder / "logs").symlink_to(elsewhere)


def remove_packages(folder: Path) -> None:
    """Remove what only jobs need, once the last one has ended: nearly all of the folder's size.

    A job that is requeued all the same finds `ended` before it looks for these files.
    """
    with disk_errors(folder):
        for name in (ARCHIVE, JUDGE, files.RESERVE):
            (folder / name).unlink(missing_ok=True)


# -- remove a folder -------------------------------------------------------------------------------
def is_ours(folder: Path) -> bool:
    """Return whether gpujobs has made ``folder``; not a link to it, nor a copy of another name."""
    if folder.is_symlink():
        return False
    try:
        text = files.read_file(folder / receive.MARKER, 1024)
        # Killed before the name was written: there is nothing else in the folder.
        return text == f"{folder.name}\n" or (not text and len(list(folder.iterdir())) == 1)
    except (OSError, DamagedError):
        return False


def remove(folder: Path) -> None:
    """Remove a folder that gpujobs has made. Raises GpujobsError if it has not, or OSError.

    Every other removal of a folder below `directory` ends here.
    """
    if not is_ours(folder):
        raise GpujobsError(f"{folder} stays: gpujobs has not made it")
    receive.remove(folder)


def discard(folder: Path) -> None:
    """Remove a folder that gpujobs has just made for something that failed, if that is possible."""
    with contextlib.suppress(OSError, GpujobsError):
        remove(folder)


# -- write into it ---------------------------------------------------------------------------------
def end(folder: Path, kind: EndKind, exit_code: int, reason: str) -> None:
    """Write `ended`, unless it exists already. Every job that finds it exits."""
    if not folder.is_dir():
        return
    if problem := folder_problem(folder):
        logger.warning("%s; its jobs are not asked to exit", problem)
        return
    try:
        Folder(str(folder)).try_to_end(Ended(kind, exit_code, reason))
    except OSError:  # the folder is gone
        return


def write_transport(folder: Path, transport: Choice) -> None:
    """Write the protocol that this side has chosen."""
    write_atomically(folder / files.TRANSPORT, json.dumps(transport.json()))


def write_after(folder: Path, cluster: str, other: Path, *, any_end: bool) -> None:
    """Write that this cluster starts after the end of ``cluster``, whose folder is ``other``."""
    value = {"cluster": cluster, "folder": str(other), "any_end": any_end}
    write_atomically(folder / files.AFTER, json.dumps(value))


# -- read single files -----------------------------------------------------------------------------
def read_claim(folder: Folder, name: str) -> JobId | None:
    """Return the job in a claim; None if there is none, or none yet. Raises DamagedError."""
    text = folder.load_text(name)
    return parse_claim(text, f"{folder.path / name}") if text else None


def parse_claim(text: str, place: str) -> JobId:
    """Return the job in the text of a claim. Raises DamagedError."""
    job = JobId.parse(text)
    if not job.plausible:
        raise DamagedError(f"{place} is damaged: it is not the id of a job")
    return job


def tail(folder: Path, log: str, lines: int = 10) -> list[str]:
    """Return the last lines of a log of a cluster, without control characters.

    At most 64 KiB are read, and nothing of a folder that others can change.
    """
    path = folder / "logs" / log
    if folder_problem(folder):
        return []
    try:
        with files.open_file(path) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except (OSError, DamagedError):
        return []
    return [clean(line) for line in text.splitlines()[-lines:]]


# -- read the state of the cluster into typed rows -------------------------------------------------
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
        return head.dask.runs

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


def read_transport(folder: Path) -> Choice:
    """Return the protocol of a cluster, from its folder."""
    return Choice.parse(Folder(str(folder)).read(files.TRANSPORT))


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
