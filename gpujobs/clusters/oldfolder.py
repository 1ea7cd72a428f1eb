"""Read the files of jobs and dask scheduler in clusters that an earlier gpujobs has made.

Their jobs go on with the package that is in the folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypedDict

from ..injob.events import DaskWorkers, Event, scheme_of
from ..injob.folder import Gpu, JsonObject, OverMemory, RegisteredWorker
from ..injob.jobevents import JobEvent, LostNode
from ..injob.names import job_file

HEAD = "head"
EVENTS = "events.jsonl"
_WORKERS = "workers.json"


class _Registry(TypedDict, total=False):
    workers: dict[str, RegisteredWorker]
    seen: list[str]
    gone: dict[str, float]
    over_memory: dict[str, OverMemory]
    ends_at: float
    ends_by: str


class OldEvent(TypedDict, total=False):
    """A line of `EVENTS`."""

    time: float
    event: str
    worker: str
    gpus: list[str]


class _Services(TypedDict, total=False):
    dashboard: int


class _Scheduler(TypedDict, total=False):
    address: str
    services: _Services


def is_old(names: Collection[str]) -> bool:
    """Return whether a folder with files of these ``names`` has no head or workers but old ones."""
    return HEAD in names or _WORKERS in names


def read_workers(load: Callable[[str, Any], JsonObject]) -> DaskWorkers:
    """Return the workers; ``load`` returns a file of the folder in a shape."""
    registry, scheduler = load(_WORKERS, _Registry), load("scheduler.json", _Scheduler)
    connected, known = registry.get("workers", {}), registry.get("gone", {})
    seen = {*registry.get("seen", ()), *known}.difference(connected)
    return DaskWorkers(
        address=scheduler.get("address"),
        dashboard=scheduler.get("services", {}).get("dashboard"),
        connected=connected,
        gone={name: known.get(name, math.inf) for name in seen},
        over_memory=registry.get("over_memory", {}),
        ends_at=registry.get("ends_at"),
        ends_by=registry.get("ends_by", ""),
        scheme=scheme_of(scheduler.get("address")),
    )


def as_event(line: OldEvent) -> Event:
    """Return a line of `EVENTS` as an event of today."""
    event = Event(
        event=line.get("event", ""), at=line.get("time", 0.0), worker=line.get("worker", "")
    )
    if gpus := [Gpu(uuid=uuid) for uuid in line.get("gpus", ())]:
        event["row"] = {"gpu": {**gpus[0], "others": gpus[1:]}}
    return event


# -- the files of jobs -----------------------------------------------------------------------------
LOST = "lost"
"""Ending of the file of a node of an allocation, by the number of the node."""
_EXIT, _REASON, _SETUP, _STARTED = "json", "reason", "setup", "started"
JOB_FILES = frozenset((_EXIT, _REASON, _SETUP, _STARTED))
"""Endings of the files of a job."""


class _Start(TypedDict, total=False):
    node: str
    started: float


class _Exit(TypedDict, total=False):
    exit_code: int
    host: str
    started: float
    ended: float


class _LostNode(TypedDict):
    reason: str
    exit_code: int


def job_events(
    job: int,
    endings: Collection[str],
    load: Callable[[str, Any], JsonObject],
    text: Callable[[str], str],
) -> Iterator[JobEvent]:
    """Yield the events since the last start of a job from its files with these ``endings``."""
    left = load(job_file(job, _EXIT), _Exit) if _EXIT in endings else {}
    start = load(job_file(job, _STARTED), _Start) if _STARTED in endings else {}
    for found in (left, start):
        if "started" in found:
            yield JobEvent(event="script", at=found["started"])
    if _STARTED in endings:
        yield _event("started", node=start.get("node"), began=start.get("started"))
    if _SETUP in endings:
        yield JobEvent(event="setup failed", text=text(job_file(job, _SETUP)))
    if _REASON in endings:
        yield JobEvent(event="failed", reason=text(job_file(job, _REASON)))
    if left:
        code, host, ended = (left.get(key) for key in ("exit_code", "host", "ended"))
        yield _event("left", code=code, node=host, at=ended)


def _event(event: str, **values: Any) -> JobEvent:
    """Return an event with those ``values`` that are known."""
    known = {name: value for name, value in values.items() if value is not None}
    found: JobEvent = JobEvent(event=event, **known)  # type: ignore[typeddict-item]
    return found


def lost_node(job: int, load: Callable[[str, Any], JsonObject]) -> LostNode | None:
    """Return why a node is lost, by its number; None if its file is damaged."""
    found = load(job_file(job, LOST), _LostNode)
    return LostNode(found["reason"], found["exit_code"]) if found else None
