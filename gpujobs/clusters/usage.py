"""Where the GPU hours of a cluster went, as numbers and as JSON; `gpuhours` makes it.

Times are in seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .history import Connection, GpuSamples
from .records import ClusterRecord
from .report import ClusterReport, JobReport, Json

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
    """Of its workers, within the job."""
    gpu_samples: tuple[GpuSamples, ...]
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
        started = [job for job in self.jobs if job.started is not None]
        samples = [
            sample
            for job in started
            for gpu in job.gpu_samples
            for sample in gpu.samples
            if sample.busy is not None
        ]
        return GpuHours(
            asked=sum(job.gpus * job.walltime for job in started) / HOUR,
            granted=sum(job.gpus * job.seconds for job in started) / HOUR,
            connected=sum(job.connected_seconds for job in started) / HOUR,
            sampled=sum(sample.seconds for sample in samples) / HOUR,
            busy=sum(sample.seconds * (sample.busy or 0) / 100 for sample in samples) / HOUR,
        )

    @property
    def most_gpus(self) -> int:
        """Most GPUs that the cluster had at the same time."""
        return max((number for _, number in self._gpus()), default=0)

    def _gpus(self) -> Steps:
        spans = [(job.started, job.until, job.gpus) for job in self.jobs if job.started is not None]
        return _steps(spans)

    @property
    def workers(self) -> Steps:
        """The number of connected workers over time."""
        spans = [
            (one.since, one.until or job.until, 1) for job in self.jobs for one in job.connections
        ]
        return _steps(spans)

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
        if self.cluster.active or not self.jobs:
            return max(self.now, self.start + 1)
        ends = [job.until for job in self.jobs if job.started is not None]
        ended = self.cluster.folder.ended
        return max([self.start + 1, *ends, ended.time if ended else 0.0])


def _steps(spans: Iterable[tuple[float, float, int]]) -> Steps:
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


# -- machine-readable ------------------------------------------------------------------------------
def usage_json(usage: UsageReport) -> dict[str, Json]:
    """Return the report as JSON; times in seconds since the epoch, memory in bytes."""
    cluster, hours = usage.cluster, usage.hours
    return {
        "version": 1,
        "id": cluster.record.id,
        "site": cluster.record.site,
        "state": cluster.state.value,
        "reason": cluster.reason,
        "start": usage.start,
        "end": usage.end,
        "gpu_hours": {
            "asked": hours.asked,
            "granted": hours.granted,
            "connected": hours.connected,
            "sampled": hours.sampled,
            "busy": hours.busy,
            "idle": hours.idle,
        },
        "busy": hours.busy_fraction,
        "most_gpus": usage.most_gpus,
        "workers": [[time, number] for time, number in usage.workers],
        "targets": [[time, number] for time, number in usage.targets],
        "jobs": [_job_json(job) for job in usage.jobs],
        "failures": [job.report.number for job in usage.failures],
        "problems": list(usage.problems),
    }


def _job_json(job: JobUsage) -> dict[str, Json]:
    report = job.report
    return {
        "number": report.number,
        "id": report.id,
        "group": report.group,
        "node": report.node,
        "state": report.state.value,
        "phase": report.phase.value,
        "reason": report.reason,
        "exit_code": report.exit_code,
        "gpus": job.gpus,
        "walltime": job.walltime or None,
        "submitted": job.submitted,
        "started": job.started,
        "served": job.served,
        "ended": job.ended,
        "replaced_by": job.replaced_by,
        "workers": [
            {"name": one.worker, "since": one.since, "until": one.until} for one in job.connections
        ],
        "devices": [_gpu_json(gpu) for gpu in job.gpu_samples],
    }


def _gpu_json(gpu: GpuSamples) -> dict[str, Json]:
    known = [sample for sample in gpu.samples if sample.busy is not None]
    seconds = sum(sample.seconds for sample in known)
    busy = sum(sample.seconds * (sample.busy or 0) / 100 for sample in known)
    return {
        "node": gpu.node,
        "uuid": gpu.uuid,
        "memory": gpu.memory,
        "most_used": max((sample.used or 0 for sample in gpu.samples), default=None),
        "busy": busy / seconds if seconds else None,
    }
