"""Read the files of the dask scheduler in folders of clusters that an earlier gpujobs has made.

Their jobs go on with the package that is in the folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, TypedDict

from ..injob.events import DaskWorkers, Event
from ..injob.folder import Gpu, JsonObject, OverMemory, RegisteredWorker

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
    )


def as_event(line: OldEvent) -> Event:
    """Return a line of `EVENTS` as an event of today."""
    event = Event(
        event=line.get("event", ""), at=line.get("time", 0.0), worker=line.get("worker", "")
    )
    if gpus := [Gpu(uuid=uuid) for uuid in line.get("gpus", ())]:
        event["row"] = {"gpu": {**gpus[0], "others": gpus[1:]}}
    return event
