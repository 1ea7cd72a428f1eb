"""Where the GPU hours of a cluster went: a `UsageReport` from its report and history.

Times are in seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from ..injob.configuration import WALLTIME
from ..injob.names import is_slice
from . import findings
from .history import (
    Connection,
    Energy,
    GpuSamples,
    History,
    HostSamples,
    Sample,
    measured_energy,
)
from .report import ClusterReport, JobPhase, JobReport
from .targets import Target, Targets

HOUR = 3600.0
Steps = list[tuple[float, int]]
"""Times, and the number from each time on."""


@dataclass(frozen=True)
class JobUsage:
    """One job over time. A time is None if it is not known, or has not come yet."""

    report: JobReport
    gpus: int
    walltime: int
    """Seconds; 0: none, or not known."""
    submitted: float | None
    started: float | None
    served: float | None
    """When all its workers were connected for the first time."""
    ended: float | None
    until: float
    """The end, or now if it runs."""
    connections: tuple[Connection, ...]
    """Of its workers, within the job; those of connected workers have no end."""
    gpu_samples: tuple[GpuSamples, ...]
    replaced_by: int | None = None
    hosts: tuple[HostSamples, ...] = ()
    """By node."""
    drained: bool = False
    """Whether all its workers left before its walltime, when no task would have ended."""

    @property
    def saved_seconds(self) -> float:
        """GPU seconds of its walltime that were not used, as its workers left early."""
        early = self.drained and self.ended is not None
        return self.gpus * max(0.0, self.walltime - self.seconds) if early else 0.0

    @property
    def seconds(self) -> float:
        """Seconds for which the job ran; 0 if it has not started."""
        return 0.0 if self.started is None else max(0.0, self.until - self.started)

    @property
    def failed(self) -> bool:
        """Whether it ended by an error, has lost workers, or was replaced."""
        return self.report.failed or self.replaced_by is not None

    @property
    def connected_seconds(self) -> float:
        """GPU seconds with a connected worker."""
        workers = len(self.report.workers) or 1
        spans = sum((one.until or self.until) - one.since for one in self.connections)
        return spans * self.gpus / workers

    @property
    def busy_samples(self) -> list[tuple[float, float]]:
        """Seconds, and for which of them a GPU was busy; of the samples that say it."""
        return [
            (one.seconds, one.seconds * one.busy / 100)
            for one in self.samples
            if one.busy is not None
        ]

    @property
    def samples(self) -> list[Sample]:
        """The samples of all its GPUs."""
        return [sample for gpu in self.gpu_samples for sample in gpu.samples]

    @property
    def energy(self) -> Energy | None:
        """The energy of its GPUs; None if no sample has it."""
        return measured_energy(self.samples)

    def workers_of(self, uuid: str) -> list[str]:
        """Return the workers that had a GPU; none if that is not known."""
        had = [one.worker for one in self.connections if uuid in one.gpus]
        have = [gpu.worker for gpu in self.report.gpus if gpu.uuid == uuid]
        return sorted({*had, *have})


@dataclass(frozen=True)
class GpuHours:
    """GPU hours of a cluster. ``asked``: GPUs and walltime of the jobs that started."""

    asked: float
    granted: float
    connected: float
    """With a connected worker."""
    sampled: float
    busy: float

    @property
    def idle(self) -> float:
        """Sampled, and not busy."""
        return self.sampled - self.busy

    @property
    def busy_fraction(self) -> float | None:
        """Busy part of the sampled time; None without samples."""
        return self.busy / self.sampled if self.sampled else None


@dataclass(frozen=True)
class UsageReport:
    """The past of a cluster until ``now``."""

    cluster: ClusterReport
    jobs: tuple[JobUsage, ...]
    now: float
    problems: tuple[str, ...] = ()
    """Why GPUs were not sampled, and files that are damaged."""
    changes: tuple[Target, ...] = ()
    """All changes of the targets of its groups, oldest first, with the first targets."""

    @cached_property
    def hours(self) -> GpuHours:
        """The GPU hours of all jobs."""
        return _gpu_hours(self.jobs)

    @property
    def has_gpus(self) -> bool:
        """Whether any job had GPUs."""
        return any(job.gpus for job in self.jobs)

    @property
    def has_slices(self) -> bool:
        """Whether any GPU was a MIG slice, of which NVML does not know how busy it is."""
        return any(is_slice(gpu.uuid) for job in self.jobs for gpu in job.gpu_samples)

    @property
    def worker_hours(self) -> float:
        """The time for which workers were connected, added up."""
        spans = ((one, job.until) for job in self.jobs for one in job.connections)
        return sum((one.until or until) - one.since for one, until in spans) / HOUR

    @cached_property
    def group_hours(self) -> dict[str, GpuHours]:
        """The GPU hours of each group, by its name; the head's own job has none."""
        names = [group.name for group in self.cluster.record.groups]
        return {
            name: _gpu_hours([job for job in self.jobs if job.report.group == name])
            for name in names
        }

    @cached_property
    def energy(self) -> Energy | None:
        """The energy of all jobs; None if no sample has it."""
        return _energy_of(self.jobs)

    @cached_property
    def group_energy(self) -> dict[str, Energy | None]:
        """The energy of each group, by its name."""
        return {
            name: _energy_of(job for job in self.jobs if job.report.group == name)
            for name in self.group_hours
        }

    @property
    def drained(self) -> list[JobUsage]:
        """The jobs whose workers left before their walltime."""
        return [job for job in self.jobs if job.drained]

    @property
    def saved_hours(self) -> float:
        """GPU hours of walltimes that were not used, as workers left early."""
        return sum(job.saved_seconds for job in self.jobs) / HOUR

    @property
    def charges(self) -> dict[str, float]:
        """The charges of the queues for the granted GPU hours and the energy, by unit."""
        found = dict(self.hour_charges)
        for unit, amount in self.energy_charges.items():
            found[unit] = found.get(unit, 0.0) + amount
        return found

    @property
    def hour_charges(self) -> dict[str, float]:
        """The charges for the granted GPU hours, by unit."""
        found: dict[str, float] = {}
        for group in self.cluster.record.groups:
            if group.charge_unit and not group.energy_charge:
                granted = self.group_hours[group.name].granted
                unit = group.charge_unit
                found[unit] = found.get(unit, 0.0) + group.charge * granted
        return found

    @property
    def energy_charges(self) -> dict[str, float]:
        """The charges for the energy of groups of which it is known, by unit."""
        found: dict[str, float] = {}
        for group in self.cluster.record.groups:
            energy, unit = self.group_energy[group.name], group.charge_unit
            if group.energy_charge and energy is not None:
                found[unit] = found.get(unit, 0.0) + group.energy_charge * energy.kwh
        return found

    @property
    def most_gpus(self) -> int:
        """Most GPUs that the cluster had at the same time."""
        attempts = {job.report.attempt for job in self.jobs}
        return max((number for one in attempts for _, number in self._gpus(one)), default=0)

    def _gpus(self, attempt: int) -> Steps:
        """Return the GPUs of an attempt over time; of rounded times, two attempts may overlap."""
        jobs = [job for job in self.jobs if job.report.attempt == attempt]
        return steps((job.started, job.until, job.gpus) for job in jobs if job.started is not None)

    @property
    def workers(self) -> Steps:
        """The number of connected workers over time."""
        found = steps(
            (one.since, one.until or math.inf, 1) for job in self.jobs for one in job.connections
        )
        return [(time, number) for time, number in found if time != math.inf]

    @property
    def targets(self) -> Steps:
        """The target number of workers of all groups over time."""
        current: dict[str, int] = {}
        found: dict[float, int] = {}
        for target in self.changes:
            current[target.group] = target.workers
            found[target.time] = sum(current.values())
        return list(found.items())

    @property
    def failures(self) -> list[JobUsage]:
        """The jobs that failed or lost workers."""
        return [job for job in self.jobs if job.failed]

    @property
    def start(self) -> float:
        """The submission of the cluster."""
        return self.cluster.record.created

    @property
    def end(self) -> float:
        """The last end of a job, or now."""
        if any(job.active for job in self.cluster.jobs) or not self.jobs:
            return max(self.now, self.start + 1)
        ends = [job.until for job in self.jobs if job.started is not None]
        return max([self.start + 1, *ends, self.cluster.folder.end_time(0.0)])


def _energy_of(jobs: Iterable[JobUsage]) -> Energy | None:
    return measured_energy(sample for job in jobs for sample in job.samples)


def _gpu_hours(jobs: Iterable[JobUsage]) -> GpuHours:
    started = [job for job in jobs if job.started is not None]

    def hours(seconds: Callable[[JobUsage], float]) -> float:
        return sum(map(seconds, started)) / HOUR

    return GpuHours(
        asked=hours(lambda job: job.gpus * job.walltime),
        granted=hours(lambda job: job.gpus * job.seconds),
        connected=hours(lambda job: job.connected_seconds),
        sampled=hours(lambda job: sum(seconds for seconds, _ in job.busy_samples)),
        busy=hours(lambda job: sum(busy for _, busy in job.busy_samples)),
    )


def steps(spans: Iterable[tuple[float, float, int]]) -> Steps:
    """Return how much of all spans (start, end, number) there is over time."""
    changes: dict[float, int] = {}
    for start, end, number in spans:
        changes[start] = changes.get(start, 0) + number
        changes[end] = changes.get(end, 0) - number
    found, total = [], 0
    for time in sorted(changes):
        total += changes[time]
        found.append((time, total))
    return found


# -- shorter time series ---------------------------------------------------------------------------
MOST_POINTS = 250
"""Points of a line: more are not visible, and a job of days has thousands of samples."""

T = TypeVar("T")
Sampled = TypeVar("Sampled", GpuSamples, HostSamples)


def shorter_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return at most `MOST_POINTS` means of successive samples of a GPU."""
    return [
        Sample(
            time=some[-1].time,
            seconds=sum(one.seconds for one in some),
            busy=_mean(some, lambda sample: sample.busy),
            used=_rounded(_mean(some, lambda sample: sample.used)),
        )
        for some in _parts(samples)
    ]


def busy_fraction(samples: Sequence[Sample]) -> float | None:
    """Return which part of the time a GPU was busy; None if that is not known."""
    percent = _mean(samples, lambda sample: sample.busy)
    return None if percent is None else percent / 100


def _mean(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """Return the mean, weighted by the times for which the samples stand; None without values."""
    pairs = [(one.seconds, found) for one in samples if (found := value(one)) is not None]
    total = sum(seconds for seconds, _ in pairs)
    if not total:
        return None
    return sum(seconds * found for seconds, found in pairs) / total


def _rounded(number: float | None) -> int | None:
    return None if number is None else round(number)


def _parts(samples: Sequence[T]) -> Iterator[Sequence[T]]:
    size = max(1, -(-len(samples) // MOST_POINTS))
    for first in range(0, len(samples), size):
        yield samples[first : first + size]


# -- from a report and the history of a cluster to its GPU hours -----------------------------------
# Times are in seconds since the epoch.

ROUNDING = 1.0
"""Seconds by which the recorded end of a job may be late."""


def make_usage(
    cluster: ClusterReport, history: History, targets: Targets, now: float
) -> UsageReport:
    """Return where the time of a cluster and its GPUs went."""
    jobs = [_job_usage(cluster, job, history, now) for job in cluster.jobs]
    problems = sorted({f"GPUs were not sampled: {text}" for text in history.problems.values()})
    problems += [*findings.problems(cluster.folder), *cluster.bad_nodes]
    if targets.problem:
        problems.append(targets.problem)
    replaced = tuple(_with_replacements(cluster, jobs))
    return UsageReport(cluster, replaced, now, tuple(problems), targets.changes)


def _job_usage(cluster: ClusterReport, job: JobReport, history: History, now: float) -> JobUsage:
    number, names = job.number, set(job.workers)
    connections = [one for one in history.connections if one.worker in names]
    gpus = [one for one in history.gpus if one.job == number]
    hosts = [one for one in history.hosts if one.job == number]
    started, ended = history.started.get(number), history.ended.get(number)
    if ended is None and not job.active and started is not None:
        ended = _last_sign(started, connections, gpus)
    until = ended or _still(cluster, job, started, now)
    start = started or until
    within = tuple(_within(connections, start, ended, now))
    gpus_per_job, walltime = _requested(cluster, job)
    return JobUsage(
        report=_excused(cluster, job),
        gpus=gpus_per_job,
        walltime=walltime,
        submitted=_submitted(cluster, number),
        started=started,
        served=_served(within, names),
        ended=ended,
        until=until,
        connections=within,
        gpu_samples=tuple(_during(gpu, start, until) for gpu in gpus),
        hosts=tuple(_during(host, start, until) for host in hosts),
        drained=bool(names) and all(history.left.get(name) == WALLTIME for name in names),
    )


def _still(cluster: ClusterReport, job: JobReport, started: float | None, now: float) -> float:
    """Return until when a job without a known end is counted: one that never ran, to the end."""
    if started is None and not job.active and cluster.folder.ended is not None:
        return min(now, cluster.folder.ended.time)
    return now


def _requested(cluster: ClusterReport, job: JobReport) -> tuple[int, int]:
    """Return the GPUs and the walltime of a job; the head's own job has no GPUs."""
    if not job.workers:
        return 0, 0
    group = cluster.record.group(job.group)
    return group.gpus_per_job, group.walltime


def _submitted(cluster: ClusterReport, number: int) -> float | None:
    submission = next(one for one in cluster.record.submissions if number in one.numbers)
    return submission.time or None


def _excused(cluster: ClusterReport, job: JobReport) -> JobReport:
    """Return the report of a job; an ended cluster loses its workers before their jobs exit."""
    if cluster.folder.ended is not None and job.active and job.lacks_workers:
        return replace(job, phase=JobPhase.LEAVING)
    return job


def _last_sign(
    started: float, connections: Iterable[Connection], gpus: Iterable[GpuSamples]
) -> float:
    """Return the last time at which a job without an exit record is known to have run."""
    times = [started, *(one.until or one.since for one in connections)]
    times += [sample.time for gpu in gpus for sample in gpu.samples[-1:]]
    return max(times)


def _within(
    connections: Iterable[Connection], start: float, ended: float | None, now: float
) -> Iterable[Connection]:
    """Yield the connections, cut at the start and the end of their job."""
    for one in connections:
        since, ends = max(one.since, start), (one.until, ended)
        until = min((end for end in ends if end is not None), default=None)
        if since < (until or now):
            yield replace(one, since=since, until=until)


def _served(connections: Iterable[Connection], names: set[str]) -> float | None:
    first: dict[str, float] = {}
    for one in connections:
        first.setdefault(one.worker, one.since)
    return max(first.values()) if names and names == first.keys() else None


def _during(source: Sampled, start: float, end: float) -> Sampled:
    samples = tuple(sample for sample in source.samples if start <= sample.time <= end + 1)
    return replace(source, samples=samples)


def _with_replacements(cluster: ClusterReport, jobs: Sequence[JobUsage]) -> list[JobUsage]:
    """Return the jobs, each lost one with the job that was submitted in its place.

    A job replaces the first one of its group that ended by itself, and has no replacement yet,
    before it was submitted. Jobs of one submission replace no job of it: the recorded end of a job
    that fails at once may be before it.
    """
    lost = sorted(_lost(cluster, jobs), key=lambda job: job.until)
    replaced: dict[int, int] = {}
    for new in sorted(jobs, key=lambda job: job.submitted or 0.0):
        latest = (new.submitted or 0.0) + ROUNDING
        for job in lost:
            same_group = job.report.group == new.report.group
            later = (job.submitted or 0.0) < (new.submitted or 0.0)
            if same_group and later and job.until < latest:
                replaced[job.report.number] = new.report.number
                lost.remove(job)
                break
    return [replace(job, replaced_by=replaced.get(job.report.number)) for job in jobs]


def _lost(cluster: ClusterReport, jobs: Iterable[JobUsage]) -> Iterable[JobUsage]:
    """Yield the jobs that ended by themselves, before the cluster did."""
    end = cluster.folder.end_time(math.inf)
    for job in jobs:
        by_itself = job.ended is not None and job.report.number not in cluster.record.removed
        if by_itself and job.until < end and not job.drained:
            yield job


# -- the time line of a job ------------------------------------------------------------------------
# Times are in seconds since the epoch.


class PhaseKind(StrEnum):
    """The state of a job for some time."""

    PENDING = "pending"
    STARTING = "starting"
    """It runs, and some of its workers have not connected yet."""
    RUNNING = "running"
    """With all its workers."""
    LOST = "lost"
    """It runs, and workers that were connected are not any more."""
    FAILED = "failed"
    """The moment of its end, if it failed or was replaced."""
    REPLACED = "replaced"
    """From its end until the workers of the job in its place are connected."""


@dataclass(frozen=True)
class Phase:
    """A part of the time line of a job."""

    kind: PhaseKind
    since: float
    until: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.until - self.since


def timeline(usage: UsageReport, job: JobUsage) -> list[Phase]:
    """Return the time line of a job, without parts of no length except `PhaseKind.FAILED`."""
    phases = [*_before_running(job), *_with_workers(job), *_after(usage, job)]
    return [one for one in phases if one.seconds > 0 or one.kind is PhaseKind.FAILED]


def total(phases: list[Phase], kind: PhaseKind) -> float:
    """Return the seconds of all phases of a kind."""
    return sum(phase.seconds for phase in phases if phase.kind is kind)


def _before_running(job: JobUsage) -> Iterator[Phase]:
    if job.started is None:
        if job.submitted is not None and not job.report.in_vain:  # when it left is not known
            yield Phase(PhaseKind.PENDING, job.submitted, job.until)
        return
    if job.submitted is not None:
        yield Phase(PhaseKind.PENDING, job.submitted, job.started)
    yield Phase(PhaseKind.STARTING, job.started, job.served or job.until)


def _with_workers(job: JobUsage) -> Iterator[Phase]:
    """Yield when all workers were connected, and when not any more, alternately."""
    if job.served is None:
        return
    changes = [(job.served, PhaseKind.RUNNING), *_changes(job, job.served)]
    if changes[-1][1] is PhaseKind.LOST and not job.failed:
        changes.pop()  # these workers are not lost: they exit before their job
    ends = [*(time for time, _ in changes[1:]), job.until]
    for (since, kind), until in zip(changes, ends, strict=True):
        yield Phase(kind, since, until)


def _changes(job: JobUsage, served: float) -> Iterator[tuple[float, PhaseKind]]:
    """Yield when workers were lost, and when all were connected again, until the job's end."""
    before = PhaseKind.RUNNING
    for time, workers in _connected(job):
        complete = workers == len(job.report.workers)
        kind = PhaseKind.RUNNING if complete else PhaseKind.LOST
        if served < time < job.until and kind is not before:
            yield time, kind
            before = kind


def _connected(job: JobUsage) -> Steps:
    return steps((one.since, one.until or job.until, 1) for one in job.connections)


def _after(usage: UsageReport, job: JobUsage) -> Iterator[Phase]:
    if job.failed and job.ended is not None:
        yield Phase(PhaseKind.FAILED, job.ended, job.ended)
    if job.replaced_by is not None:
        new = next(one for one in usage.jobs if one.report.number == job.replaced_by)
        yield Phase(PhaseKind.REPLACED, job.until, new.served or new.until)
