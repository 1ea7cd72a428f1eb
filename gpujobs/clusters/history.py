"""Read the history of a cluster from its folder: times of jobs, workers and GPUs.

`injob.registry` and `injob.sampler` write it. Times are in seconds since the
epoch.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ..injob.events import Event, attempts_in, events_file
from ..injob.folder import (
    DamagedError,
    Folder,
    all_gpus,
    open_file,
    parse_json,
    read_lines,
)
from ..injob.sampler import USAGE, UsageLine
from ..text import clean
from . import oldfolder
from .clusterfolder import file_names, folder_problem, job_files
from .folderstate import JobTrace
from .ledger import ClusterRecord
from .report import JobReport, WorkerGpu

_FRESH = 120.0
"""Seconds after which a sample says nothing about the present; clocks of nodes differ, too."""
_TAIL_BYTES = 8192
"""End of a file of samples that has its last line, also with the GPUs of a large node."""
_HEAD_BYTES = 16384
_JOULES_OF_KWH = 3.6e6

Line = TypeVar("Line", Event, oldfolder.OldEvent, UsageLine)

logger = logging.getLogger("gpujobs")


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
    energy: float | None = None
    """Joules."""


@dataclass(frozen=True)
class GpuSamples:
    """The samples of one GPU of a job, oldest first. ``memory`` is in bytes."""

    job: int
    node: str
    uuid: str
    memory: int
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Energy:
    """The energy of GPUs in the samples that have it."""

    joules: float
    idle_joules: float
    """Of each sample, the part of the time for which no program ran on the GPU."""
    seconds: float
    """Of all GPUs."""

    @property
    def kwh(self) -> float:
        """The energy in kWh."""
        return self.joules / _JOULES_OF_KWH

    @property
    def idle_kwh(self) -> float:
        """The idle part in kWh."""
        return self.idle_joules / _JOULES_OF_KWH

    @property
    def mean_power(self) -> float:
        """Watts of a GPU."""
        return self.joules / self.seconds


def measured_energy(samples: Iterable[Sample]) -> Energy | None:
    """Return the energy in samples; None if none has it."""
    joules = idle = seconds = 0.0
    for one in samples:
        if one.energy is not None and one.energy >= 0:
            joules += one.energy
            seconds += one.seconds
            idle += one.energy * (1 - (one.busy or 0.0) / 100)
    return Energy(joules, idle, seconds) if seconds else None


@dataclass(frozen=True)
class HostSample:
    """What a job used on a node in the ``seconds`` before ``time``."""

    time: float
    seconds: float
    cpu: float
    """CPU seconds."""
    memory: int
    """Of all its processes, in bytes."""


@dataclass(frozen=True)
class HostSamples:
    """The samples of a job on one node, oldest first."""

    job: int
    node: str
    samples: tuple[HostSample, ...] = ()


@dataclass(frozen=True)
class History:
    """The past of a cluster. Mappings are by the number of the job."""

    started: Mapping[int, float] = field(default_factory=dict)
    ended: Mapping[int, float] = field(default_factory=dict)
    connections: tuple[Connection, ...] = ()
    gpus: tuple[GpuSamples, ...] = ()
    hosts: tuple[HostSamples, ...] = ()
    problems: Mapping[int, str] = field(default_factory=dict)
    """Why the GPUs of a job were not sampled."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Why workers have left that have not connected again, by name."""


def read_history(
    path: Path, jobs: Mapping[int, JobTrace], last: Sequence[Event] | None = None
) -> History:
    """Return the history in a cluster's folder; lines that are damaged are left out.

    ``jobs``: their traces in the folder, by number. ``last``: the events of the last attempt, if
    they were just read.
    """
    folder = Folder(str(path))
    if folder_problem(path):
        return History()
    started, ended = _job_times(jobs)
    events = _events(folder, last)
    history = History(
        started=started,
        ended=ended,
        connections=tuple(connections(events)),
        left=_leaving(events),
    )
    return _add_samples(history, path)


def _events(folder: Folder, last: Sequence[Event] | None) -> list[Event]:
    """Return the events of all attempts; ``last``: see `read_history`."""
    attempts = attempts_in(folder.names())
    if last is not None:
        attempts = attempts[:-1]
    files = [folder.path / events_file(attempt) for attempt in attempts]
    events = [*(event for file in files for event in _lines(file, Event)), *(last or ())]
    events += map(oldfolder.as_event, _lines(folder.path / oldfolder.EVENTS, oldfolder.OldEvent))
    return events


def _add_samples(history: History, path: Path) -> History:
    """Return the history with the samples that the jobs have written."""
    gpus: list[GpuSamples] = []
    hosts: list[HostSamples] = []
    problems: dict[int, str] = {}
    for job, name in job_files(file_names(path / USAGE), "-"):
        lines = list(_lines(path / USAGE / f"{job}-{name}", UsageLine))
        node = name.removesuffix(".jsonl")
        gpus += gpu_samples(job, node, lines)
        hosts.append(HostSamples(job, node, tuple(host_samples(lines))))
        if errors := [line["error"] for line in lines if "error" in line]:
            problems[job] = clean(errors[-1])
    return replace(history, gpus=tuple(gpus), hosts=tuple(hosts), problems=problems)


def _leaving(events: Iterable[Event]) -> dict[str, str]:
    """Return why workers have left that have not connected again, by name."""
    found: dict[str, str] = {}
    for event in events:
        worker = event.get("worker", "")
        if event.get("event") == "left":
            found[worker] = event.get("why", "")
        elif event.get("event") == "connected":  # the job was requeued
            found.pop(worker, None)
    return found


def _job_times(jobs: Mapping[int, JobTrace]) -> tuple[dict[int, float], dict[int, float]]:
    """Return when the jobs started and ended, by their numbers."""
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    for number, job in jobs.items():
        if job.facts.script is not None:
            started[number] = job.facts.script
        if job.left and job.left.at is not None:
            ended[number] = job.left.at + 1.0  # bash writes whole seconds, rounded down
    return started, ended


def connections(events: Iterable[Event]) -> Iterator[Connection]:
    """Yield the connections of all workers, from the events of the dask schedulers."""
    open_ones: dict[str, Connection] = {}
    for event in events:
        if event.get("event") not in ("connected", "disconnected"):
            continue
        worker, time = event.get("worker", ""), event.get("at", 0.0)
        if worker in open_ones:  # also if it connects again without an event between
            yield replace(open_ones.pop(worker), until=time)
        if event.get("event") == "connected":
            gpus = (str(gpu["uuid"]) for gpu in all_gpus(event.get("row", {}).get("gpu")))
            open_ones[worker] = Connection(worker, time, gpus=tuple(gpus))
    yield from open_ones.values()


def gpu_samples(job: int, node: str, lines: Iterable[UsageLine]) -> list[GpuSamples]:
    """Return the samples of the GPUs of a job on one node, from the lines of its file."""
    memory: dict[str, int] = {}
    samples: dict[str, list[Sample]] = {}
    uuids: list[str] = []
    for line in lines:
        if "gpus" in line:  # the header, again after the job was requeued
            uuids = []
            for gpu in line["gpus"]:
                uuids.append(gpu["uuid"])
                memory.setdefault(gpu["uuid"], gpu["memory"])
            continue
        time, seconds = _span(line)
        energy = line.get("energy", [None for _ in uuids])  # an older gpujobs has not written it
        values = zip(uuids, line.get("busy", ()), line.get("used", ()), energy, strict=False)
        for uuid, busy, used, joules in values:
            sample = Sample(time, seconds, _percent(busy), used, joules)
            samples.setdefault(uuid, []).append(sample)
    return [
        GpuSamples(job, node, uuid, size, tuple(samples.get(uuid, ())))
        for uuid, size in memory.items()
    ]


def _percent(value: float | None) -> float | None:
    """Return a part of 100; None if it cannot be one, as in a damaged file."""
    return value if value is not None and 0 <= value <= 100 else None


def host_samples(lines: Iterable[UsageLine]) -> Iterator[HostSample]:
    """Yield the samples of CPU time and memory in the lines of a file."""
    for line in lines:
        if "cpu" in line and "memory" in line:
            time, seconds = _span(line)
            yield HostSample(time, seconds, line["cpu"], line["memory"])


def _span(line: UsageLine) -> tuple[float, float]:
    """Return the end of the time that a line is about, and its seconds."""
    return line.get("time", 0.0), line.get("seconds", 0.0)


def read_latest(folder: Path, job: int) -> dict[str, Sample]:
    """Return the last sample of each GPU of a job, by UUID; reads only the ends of the files."""
    found: dict[str, Sample] = {}
    for owner, name in job_files(file_names(folder / USAGE), "-"):
        if owner != job:
            continue
        with contextlib.suppress(OSError, DamagedError):
            lines = _ends(folder / USAGE / f"{owner}-{name}")
            for gpu in gpu_samples(job, "", lines):
                found.update((gpu.uuid, sample) for sample in gpu.samples)
    return found


def _ends(path: Path) -> list[UsageLine]:
    """Return the first and the last line with text. Raises OSError, or DamagedError."""
    with open_file(path) as file:
        head = file.read(_HEAD_BYTES).lstrip().splitlines()[:1]  # an append begins with a line feed
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        last = file.read(_TAIL_BYTES).strip().splitlines()[-1:]
    return [parse_json(line.decode(errors="replace"), UsageLine) for line in (*head, *last)]


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


def _lines(path: Path, shape: type[Line]) -> Iterator[Line]:
    """Yield the lines of a file; a damaged file is logged."""
    try:
        yield from read_lines(path, shape)
    except DamagedError as error:
        logger.warning("%s", error)
