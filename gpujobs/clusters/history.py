"""Read the history of a cluster from its folder: times of jobs, workers, GPUs and transfers.

`injob.registry`, `injob.usage` and `injob.transfers` write it. Times are in seconds since the
epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..injob.folder import EVENTS, TRANSFERS
from ..injob.usage import FOLDER
from ..text import clean
from .records import ClusterRecord
from .report import JobReport, WorkerGpu

_FRESH = 120.0
"""Seconds after which a sample says nothing about the present; clocks of nodes differ, too."""
_TAIL_BYTES = 8192
"""End of a file of samples that has its last line, also with the GPUs of a large node."""
_HEAD_BYTES = 16384


@dataclass(frozen=True)
class Connection:
    """A time for which a worker was connected; ``until`` is None if no end is known."""

    worker: str
    since: float
    until: float | None = None
    gpus: tuple[str, ...] = ()
    """UUIDs."""


@dataclass(frozen=True)
class Sample:
    """The state of a GPU for the ``seconds`` before ``time``; None: unknown."""

    time: float
    seconds: float
    busy: float | None
    """Percent."""
    used: int | None
    """Bytes of its memory."""


@dataclass(frozen=True)
class GpuSamples:
    """The samples of one GPU of a job, oldest first. ``memory`` is in bytes."""

    job: int
    node: str
    uuid: str
    memory: int
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Received:
    """The bytes that a worker received from others in the ``seconds`` before ``time``."""

    time: float
    seconds: float
    size: int


@dataclass(frozen=True)
class History:
    """The past of a cluster. Mappings are by the number of the job."""

    started: Mapping[int, float] = field(default_factory=dict)
    ended: Mapping[int, float] = field(default_factory=dict)
    connections: tuple[Connection, ...] = ()
    gpus: tuple[GpuSamples, ...] = ()
    problems: Mapping[int, str] = field(default_factory=dict)
    """Why the GPUs of a job were not sampled."""
    transfers: Mapping[str, tuple[Received, ...]] | None = None
    """By the name of the worker, oldest first; None if transfers were not recorded."""


def read_history(folder: Path) -> History:
    """Return the history in a cluster's folder. Lines that are damaged are left out."""
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    for path in _files(folder / "jobs"):
        value = next(_lines(path), {}) if path.suffix in (".started", ".json") else {}
        # Bash writes whole seconds, rounded down.
        for times, key, less in ((started, "started", 0.0), (ended, "ended", 1.0)):
            if isinstance(value.get(key), int | float):
                times[int(path.stem)] = float(value[key]) + less
    gpus: list[GpuSamples] = []
    problems: dict[int, str] = {}
    for path in _files(folder / FOLDER):
        job, node = _owner(path)
        lines = list(_lines(path))
        gpus += gpu_samples(job, node, lines)
        if errors := [line["error"] for line in lines if "error" in line]:
            problems[job] = clean(str(errors[-1]))
    events = list(_lines(folder / EVENTS))
    received = transfers(_lines(folder / TRANSFERS))
    return History(started, ended, tuple(connections(events)), tuple(gpus), problems, received)


def connections(events: Iterable[Mapping[str, Any]]) -> Iterator[Connection]:
    """Yield the connections of all workers, from the events of the dask scheduler."""
    open_ones: dict[str, Connection] = {}
    for event in events:
        worker, time = str(event.get("worker", "")), float(event.get("time", 0))
        if worker in open_ones:  # also if it connects again without an event between
            yield replace(open_ones.pop(worker), until=time)
        if event.get("event") == "connected":
            gpus = tuple(map(str, event.get("gpus", ())))
            open_ones[worker] = Connection(worker, time, gpus=gpus)
    yield from open_ones.values()


def transfers(lines: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Received, ...]] | None:
    """Return the transfers by the name of the worker; None without a line."""
    rows = list(lines)
    if not rows:
        return None
    found: dict[str, list[Received]] = {}
    for line in rows:
        for worker, size in line.get("received", {}).items():
            found.setdefault(worker, []).append(Received(line["time"], line["seconds"], size))
    return {worker: tuple(samples) for worker, samples in found.items()}


def gpu_samples(job: int, node: str, lines: Iterable[Mapping[str, Any]]) -> list[GpuSamples]:
    """Return the samples of the GPUs of a job on one node, from the lines of its file."""
    found: dict[str, tuple[int, list[Sample]]] = {}
    uuids: list[str] = []
    for line in lines:
        if "gpus" in line:  # the header, again after the job was requeued
            uuids = [str(gpu["uuid"]) for gpu in line["gpus"]]
            for gpu in line["gpus"]:
                found.setdefault(gpu["uuid"], (int(gpu["memory"]), []))
        elif "busy" in line:
            for uuid, busy, used in zip(uuids, line["busy"], line["used"], strict=False):
                found[uuid][1].append(Sample(line["time"], line["seconds"], busy, used))
    return [
        GpuSamples(job, node, uuid, memory, tuple(samples))
        for uuid, (memory, samples) in found.items()
    ]


def read_latest(folder: Path, job: int) -> dict[str, Sample]:
    """Return the last sample of each GPU of a job, by UUID; reads only the ends of the files."""
    found: dict[str, Sample] = {}
    for path in _files(folder / FOLDER):
        if _owner(path)[0] != job:
            continue
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES).decode(errors="replace").splitlines()[:1]
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                last = file.read().decode(errors="replace").splitlines()[-1:]
        except OSError:
            continue
        for gpu in gpu_samples(job, "", _parsed([*head, *last])):
            found.update((gpu.uuid, sample) for sample in gpu.samples)
    return found


def with_samples(record: ClusterRecord, job: JobReport, now: float) -> JobReport:
    """Return the report of a job with the last samples of its GPUs, unless they are old."""
    if not job.gpus:
        return job
    latest = read_latest(record.path, job.number)

    def sampled(gpu: WorkerGpu) -> WorkerGpu:
        sample = latest.get(gpu.uuid)
        if sample is None or now - sample.time > max(_FRESH, 2 * sample.seconds):
            return gpu
        return replace(gpu, busy=sample.busy, used=sample.used)

    return replace(job, gpus=tuple(sampled(gpu) for gpu in job.gpus))


def _owner(path: Path) -> tuple[int, str]:
    """Return job and node of a file of samples."""
    number, _, node = path.stem.partition("-")
    return int(number), node


def _files(folder: Path) -> list[Path]:
    """Return the files of jobs in a folder; their names start with the number of a job."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in paths if path.stem.partition("-")[0].isdigit()]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return iter(())
    return _parsed(lines)


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:  # half written
            continue
        if isinstance(value, dict):
            yield value
