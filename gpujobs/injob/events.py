"""The events of the dask scheduler of one attempt, in a file, and the workers they amount to.

Its plugin alone writes the file, on one host. A line is an object with `event`, `at` (seconds since
the epoch, for people and intervals, never for order) and the keys of `Event`:

| event | means |
|---|---|
| opened | the dask scheduler listens; `version` of these words, `job` of the head |
| connected, disconnected | of a worker; `row`: its address, GPUs, CPUs and memory |
| over memory | a worker was restarted, or is paused, because of its memory; or neither any more |
| draining, undrained | a worker begins to leave, and `why`; it stays after all |
| left | a worker has left: `why`, after how many `seconds`, and the tasks that it `lost` |
| client | the number of clients has changed |
| idle | when the cluster ends if it stays without work; or why it ends now |
| closed | the dask scheduler ends; missing if it was killed |

Each append begins with a line feed: half a line before it, of a full disk, spoils only itself.
Lines that could not be written are written again, so that events may come twice: that changes
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, ClassVar, Generic, Protocol, TypedDict, TypeVar

from .folder import (
    MOST_BYTES_OF_LINES,
    DamagedError,
    OverMemory,
    RegisteredWorker,
    Run,
    bounded,
    parse_json,
)

VERSION = 1
"""Of the words; a reader refuses a later one, whose events it may not know."""
_MOST_LINES = 50_000
"""Lines that are written at once: a worker may restart again and again."""
_MINUTE = 60.0
_OF_ATTEMPT = re.compile(r"(?:head-|workers-)([1-9][0-9]{0,3})(?:\.jsonl)?")


def events_file(attempt: int) -> str:
    """Return the name of the file of an attempt."""
    return f"workers-{attempt}.jsonl"


def attempts_in(names: Iterable[str]) -> list[int]:
    """Return the attempts with a head, or with a file of events, among ``names``, in order."""
    return sorted({int(found[1]) for found in map(_OF_ATTEMPT.fullmatch, names) if found})


class Event(TypedDict, total=False):
    """A line of the file."""

    event: str
    at: float
    version: int
    address: str
    dashboard: int
    """Port."""
    job: int
    """Number of the head's job; missing if a Python process has the dask scheduler."""
    worker: str
    row: RegisteredWorker
    restarts: int
    limit: int
    """Of memory, in bytes."""
    paused: int
    """Bytes that a worker used when it was paused; missing while it runs."""
    why: str
    seconds: float
    lost: dict[str, float]
    """For how many seconds the tasks had run that a worker was computing, by prefix."""
    clients: int
    ends_at: float
    """Missing while the cluster has work."""
    by: str
    """The rule by which it ends (see `demand`)."""
    reason: str


# -- the workers -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class LostTasks:
    """The tasks of a prefix that the end of their jobs has cut off."""

    number: int = 0
    seconds: float = 0.0
    """For which the longest had run."""


def scheme_of(address: str | None) -> str:
    """Return the protocol of an address, as ``tls`` of ``tls://n1:40123``; "" without one."""
    return str(address or "").partition("://")[0]


@dataclass
class DaskWorkers:
    """The workers of a dask scheduler, its clients and its end."""

    line: ClassVar[Any] = Event
    most_bytes: ClassVar[int] = MOST_BYTES_OF_LINES
    address: str | None = None
    dashboard: int | None = None
    """Port of the dashboard."""
    connected: dict[str, RegisteredWorker] = field(default_factory=dict)
    gone: dict[str, float] = field(default_factory=dict)
    """When workers disconnected that have not connected again, by name."""
    over_memory: dict[str, OverMemory] = field(default_factory=dict)
    lost: dict[tuple[str, float], dict[str, float]] = field(default_factory=dict)
    """Tasks that a worker has lost when it left, by its name and the time; see `Event`."""
    clients: int | None = None
    """Clients that are connected; None if that is not known."""
    had_client: bool = False
    ends_at: float | None = None
    """When the cluster ends if it stays without work; None if it has work."""
    ends_by: str = ""
    idle_reason: str = ""
    """Why the cluster ends without work; "" while it does not."""
    job: int | None = None
    """Number of the head's job, if the dask scheduler has written it."""
    scheme: str = ""
    """The protocol of its address, also after its end."""
    past: list[Event] | None = field(default=None, compare=False)
    """All events, oldest first; None if they are not kept."""

    @property
    def seen(self) -> frozenset[str]:
        """The names of all workers that were ever connected."""
        return frozenset((*self.connected, *self.gone))

    @property
    def lost_tasks(self) -> dict[str, LostTasks]:
        """The tasks that were lost, by prefix."""
        found: dict[str, LostTasks] = {}
        for tasks in self.lost.values():
            for prefix, seconds in tasks.items():
                known = found.get(prefix, LostTasks())
                found[prefix] = LostTasks(known.number + 1, max(known.seconds, seconds))
        return found

    @property
    def runs(self) -> dict[int, Run]:
        """The starts of the jobs that have connected workers, by the number of the job."""
        found = (row.get("run") for row in self.connected.values())
        return {run["job"]: run for run in found if run}

    def feed(self, event: Event) -> None:
        """Take over an event; one that is not known changes nothing."""
        kind, worker = event.get("event"), event.get("worker", "")
        if self.past is not None:
            self.past.append(event)
        if kind == "opened":
            address, dashboard = event.get("address"), event.get("dashboard")
            new = DaskWorkers(address, dashboard, clients=0, job=event.get("job"))
            new.scheme, new.past = scheme_of(address), self.past
            vars(self).update(vars(new))
        elif kind == "closed":
            self.address = self.dashboard = None
        elif kind == "connected":
            self.connected[worker] = event.get("row", {})
            self.gone.pop(worker, None)
        elif kind == "disconnected":
            if self.connected.pop(worker, None) is not None:
                self.gone[worker] = event.get("at", 0.0)
        elif kind == "over memory":
            self._feed_memory(worker, event)
        elif kind == "left" and event.get("lost"):
            self.lost[worker, event.get("at", 0.0)] = event["lost"]
        elif kind == "client":
            self.clients = event.get("clients", 0)
            self.had_client = self.had_client or self.clients > 0
        elif kind == "idle" and "reason" in event:
            self.idle_reason = event["reason"]
        elif kind == "idle":
            self.ends_at, self.ends_by = event.get("ends_at"), event.get("by", "")

    def _feed_memory(self, worker: str, event: Event) -> None:
        found: OverMemory = {"restarts": event.get("restarts", 0), "limit": event.get("limit", 0)}
        if "paused" in event:
            found["paused"] = event["paused"]
        if found["restarts"] or "paused" in found:
            self.over_memory[worker] = found
        else:
            self.over_memory.pop(worker, None)

    def copy(self) -> DaskWorkers:
        """Return a copy, which later events do not change."""
        return replace(
            self,
            connected=dict(self.connected),
            gone=dict(self.gone),
            over_memory=dict(self.over_memory),
            lost=dict(self.lost),
            past=None if self.past is None else [*self.past],
        )


# -- the reader ------------------------------------------------------------------------------------
class State(Protocol):
    """What the events in a file amount to."""

    line: ClassVar[Any]
    """Shape of a line."""
    most_bytes: ClassVar[int]
    """Of the file."""

    def feed(self, event: Any) -> None:
        """Take over an event; one that is not known changes nothing."""

    def copy(self) -> Any:
        """Return a copy, which later events do not change."""


AnyState = TypeVar("AnyState", bound=State)


class LineReader(Generic[AnyState]):
    """Reads one file of events, each time only its new lines.

    The file is opened for each look, since NFS checks only then whether its cache is out of date.
    One that is shorter than before, by a stale cache, says nothing new.
    """

    def __init__(self, path: Path, state: AnyState) -> None:
        self._path = path
        self._offset = self._damaged = 0
        self.state = state
        """After the last look: the same object until there are new lines, never to be changed."""
        self.problem = ""
        """Why the file, or some of its lines, cannot be read."""

    def read(self) -> AnyState:
        """Look for new lines, and return the state."""
        try:
            with bounded(self._path, self.state.most_bytes) as file:
                events = list(self._new_events(file))
        except FileNotFoundError:
            return self.state
        except DamagedError as error:
            self.problem = str(error.of(self._path))
            return self.state
        self.problem = ""
        if self._damaged:
            self.problem = f"{self._path} is damaged: lines that are left out: {self._damaged}"
        if events:
            state: AnyState = self.state.copy()
            for event in events:
                state.feed(event)
            self.state = state
        return self.state

    def _new_events(self, file: IO[bytes]) -> Iterator[Any]:
        """Yield the events in new whole lines. Raises DamagedError if their words are newer."""
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            event = self._parse(line)
            self._offset += len(line)
            if event:
                yield event

    def _parse(self, line: bytes) -> dict[str, Any]:
        """Return the event of a line; {} if that is empty or damaged, which is counted."""
        if not line.strip():
            return {}
        try:
            event: dict[str, Any] = parse_json(line.decode(errors="replace"), self.state.line)
        except DamagedError:
            self._damaged += 1
            return {}
        if event.get("version", 0) > VERSION:
            raise DamagedError(f"{self._path} is of a newer gpujobs: update this one")
        return event


class EventReader(LineReader[DaskWorkers]):
    """Reads the events of the dask scheduler of one attempt."""

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        """``keep``: all events."""
        super().__init__(path, DaskWorkers(past=[] if keep else None))


# -- the writer ------------------------------------------------------------------------------------
class EventQueue:
    """The events that are not written yet.

    Once many were written, those about one worker wait until its last one is a minute old, and only
    the last of them is written: the file stays small, and its end is the present state.
    """

    def __init__(self, most: int = _MOST_LINES) -> None:
        self._most = most
        self._count = 0
        self._waiting: list[Event] = []
        self._written: dict[tuple[str, str], float] = {}
        """When the last event about a thing was written."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, event: Event) -> None:
        """Add an event, which `take` will return."""
        self._waiting.append(event)

    def take(self, now: float, *, everything: bool = False) -> list[Event]:
        """Return the events to write at ``now``; ``everything``: also those that would wait."""
        waiting, self._waiting = self._waiting, []
        if self._count >= self._most:
            waiting = list({_subject(event): event for event in waiting}.values())
        due: list[Event] = []
        for event in waiting:
            since = now - self._written.get(_subject(event), -_MINUTE)
            urgent = everything or "reason" in event or bool(event.get("lost"))
            if urgent or self._count < self._most or since >= _MINUTE:
                due.append(event)
                self._written[_subject(event)] = now
            else:
                self._waiting.append(event)
        self._count += len(due)
        return due


def _subject(event: Event) -> tuple[str, str]:
    """Return the subject of an event: a later one about the same makes it obsolete."""
    kind = event["event"]
    if kind in ("connected", "disconnected"):
        kind = "connection"
    elif kind in ("draining", "undrained", "left"):
        kind = "drain"
    return kind, event.get("worker", "")
