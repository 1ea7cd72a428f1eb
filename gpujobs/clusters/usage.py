"""Where the GPU hours of a cluster went, as numbers; `gpuhours` makes them.

Times are in seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from .history import Connection, GpuSamples, Received, Sample
from .records import ClusterRecord
from .report import ClusterReport, JobReport

HOUR = 3600.0
Steps = list[tuple[float, int]]
"""Times, and the number from each time on."""


@dataclass(frozen=True)
class WorkerTransfers:
    """The data that a worker received from other workers, oldest first."""

    worker: str
    samples: tuple[Received, ...] = ()

    @property
    def received(self) -> int:
        """Bytes."""
        return sum(sample.size for sample in self.samples)


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
    transfers: tuple[WorkerTransfers, ...] | None = None
    """Of the workers that were connected; None if transfers were not recorded."""
    replaced_by: int | None = None

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
    def sampled_seconds(self) -> float:
        """GPU seconds for which it is known how busy the GPUs were."""
        return sum(sample.seconds for sample in self._busy_samples())

    @property
    def busy_seconds(self) -> float:
        """GPU seconds for which the GPUs were busy."""
        return sum(sample.seconds * (sample.busy or 0) / 100 for sample in self._busy_samples())

    def _busy_samples(self) -> Iterator[Sample]:
        for gpu in self.gpu_samples:
            yield from (sample for sample in gpu.samples if sample.busy is not None)

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
    """Why GPUs were not sampled."""

    @cached_property
    def hours(self) -> GpuHours:
        """The GPU hours of all jobs."""
        return _gpu_hours(self.jobs)

    @property
    def has_gpus(self) -> bool:
        """Whether any job had GPUs."""
        return any(job.gpus for job in self.jobs)

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

    @property
    def received(self) -> int | None:
        """Bytes that workers received from other workers; None if they were not recorded."""
        if all(job.transfers is None for job in self.jobs):
            return None
        return sum(one.received for one in self.transfers)

    @property
    def transfers(self) -> list[WorkerTransfers]:
        """Of all workers that were connected."""
        return [one for job in self.jobs for one in job.transfers or ()]

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
        connections = [one for job in self.jobs for one in job.connections]
        found = steps((one.since, one.until or math.inf, 1) for one in connections)
        return [(time, number) for time, number in found if time != math.inf]

    @property
    def targets(self) -> Steps:
        """The target number of workers over time."""
        return targets_of(self.cluster.record)

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
        ended = self.cluster.folder.ended
        return max([self.start + 1, *ends, ended.time if ended else 0.0])


def _gpu_hours(jobs: Iterable[JobUsage]) -> GpuHours:
    started = [job for job in jobs if job.started is not None]
    return GpuHours(
        asked=sum(job.gpus * job.walltime for job in started) / HOUR,
        granted=sum(job.gpus * job.seconds for job in started) / HOUR,
        connected=sum(job.connected_seconds for job in started) / HOUR,
        sampled=sum(job.sampled_seconds for job in started) / HOUR,
        busy=sum(job.busy_seconds for job in started) / HOUR,
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


def targets_of(record: ClusterRecord) -> Steps:
    """Return the target number of workers of all groups over time."""
    current: dict[str, int] = {}
    found: dict[float, int] = {}
    for target in record.targets or record.first_targets:
        current[target.group] = target.workers
        found[target.time] = sum(current.values())
    return list(found.items())
