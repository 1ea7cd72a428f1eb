"""Compare what the jobs of a cluster requested with what they used: sizes that were enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..injob.folder import EndKind
from ..schedulers import JobState
from .history import HostSample
from .ledger import GroupRecord
from .usage import JobUsage, UsageReport

PEAK_SECONDS = 10.0
"""Peaks of CPUs last so long: imports use several for a moment."""
CPU_TOLERANCE = 0.25
"""Part of a core above a whole number for which no CPU is added."""
MEMORY_MARGIN, GPU_MARGIN, WALLTIME_MARGIN = 1.5, 1.25, 1.25
"""Dask's workers spill at 70 % of the host memory, and at 80 % of that of a GPU."""
MARGINS = (
    "CPUs: the peak, rounded up; memory: 1.5 times the peak; GPU memory and walltime: 1.25 times"
)
SMALLER = 0.9
"""Part of the request below which a smaller one is worth a change."""
_SAMPLED = 0.5
"""Part of a job's time with samples below which nothing is known of its use."""
_GIB, _MEMORY_STEP, _WALLTIME_STEP = 2**30, 2**28, 300


@dataclass(frozen=True)
class Size:
    """What a group requested of a resource, and used of it; None: not known.

    ``key``: of the profile, also the unit: numbers, bytes (memory, gpu_type) or seconds (walltime).
    ``mean`` of `gpus` is the busy share. ``enough``: None if the size fits.
    """

    group: str
    key: str
    requested: float | None
    mean: float | None = None
    peak: float | None = None
    enough: float | None = None


def sizes(usage: UsageReport) -> list[Size]:
    """Return the sizes of all groups. `enough` is known of clusters that have ended."""
    found: list[Size] = []
    for group in usage.cluster.record.groups:
        jobs = [job for job in usage.jobs if job.report.group == group.name and job.seconds]
        if jobs:
            found += _Group(usage, group, jobs).sizes()
    return found


def unsampled(usage: UsageReport) -> list[int]:
    """Return the numbers of the jobs with workers whose use is not known."""
    groups = {group.name: group for group in usage.cluster.record.groups}
    return [
        job.report.number
        for job in usage.jobs
        if job.served and not _is_sampled(job, groups[job.report.group])
    ]


def _is_sampled(job: JobUsage, group: GroupRecord) -> bool:
    """Return whether each node of a job has samples for most of the time with workers."""
    served = job.until - (job.served or job.until)
    known = [sum(one.seconds for one in host.samples) for host in job.hosts]
    complete = len(known) >= group.nodes_per_job
    return complete and all(seconds >= _SAMPLED * served for seconds in known)


class _Group:
    def __init__(self, usage: UsageReport, group: GroupRecord, jobs: Sequence[JobUsage]) -> None:
        self._usage, self._group, self._jobs = usage, group, jobs
        unknown = unsampled(usage)
        served = [job for job in jobs if job.served]
        self._known = bool(served) and not any(job.report.number in unknown for job in served)
        self._hosts = [host.samples for job in jobs for host in job.hosts if host.samples]
        self._final = self._known and usage.cluster.finished

    def sizes(self) -> Iterator[Size]:
        """Yield the GPUs, the CPUs, the memory and the walltime."""
        if self._group.gpus_per_job:
            yield self._gpus()
            yield self._gpu_memory()
        yield self._cpus()
        yield self._memory()
        yield self._walltime()

    def _size(
        self,
        key: str,
        requested: float,
        mean: float | None = None,
        peak: float | None = None,
        enough: float | None = None,
    ) -> Size:
        fits = enough is None or not requested or enough > SMALLER * requested
        if fits or not self._final:
            enough = None
        return Size(self._group.name, key, requested or None, mean, peak, enough)

    def _gpus(self) -> Size:
        """Return the GPUs; without work of one it is not needed, without work of any no GPU is."""
        busy = self._usage.group_hours[self._group.name].busy_fraction
        devices = [gpu for job in self._jobs for gpu in job.gpu_samples]
        known = [[one.busy for one in gpu.samples if one.busy is not None] for gpu in devices]
        worked: int | None = sum(map(any, known))
        if self._usage.cluster.record.owner != "cluster" or not known or not all(known):
            worked = None  # its Python program scales it, or NVML does not know the use
        elif worked and worked > self._group.gpus_per_job:
            each = self._group.gpus_per_job
            worked = -(-worked // each) * each
        return self._size("gpus", self._group.gpus, busy, None, worked)

    def _gpu_memory(self) -> Size:
        devices = [gpu for job in self._jobs for gpu in job.gpu_samples]
        used = [one.used for gpu in devices for one in gpu.samples if one.used is not None]
        peak = max(used, default=None)
        total = min((gpu.memory for gpu in devices), default=0)
        enough = None if peak is None else _up(GPU_MARGIN * peak, _GIB)
        return self._size("gpu_type", total, None, peak, enough)

    def _cpus(self) -> Size:
        """Return the cores of a job; those of several nodes are equal, and the largest counts."""
        nodes = self._group.nodes_per_job
        if not self._known or not self._hosts:
            return self._size("cpus_per_job", self._group.cpus_per_job)
        spent = sum(one.cpu for host in self._hosts for one in host)
        seconds = sum(one.seconds for host in self._hosts for one in host)
        peak = nodes * max(map(_peak_cores, self._hosts))
        each = max(1, math.ceil(peak / nodes - CPU_TOLERANCE), self._workers_of_node)
        mean = nodes * spent / max(seconds, 0.1)
        return self._size("cpus_per_job", self._group.cpus_per_job, mean, peak, nodes * each)

    @property
    def _workers_of_node(self) -> int:
        return -(-self._group.workers_per_job // self._group.nodes_per_job)

    def _memory(self) -> Size:
        requested, nodes = self._group.memory_per_job, self._group.nodes_per_job
        if not self._known or not self._hosts:
            return self._size("memory_per_job", requested)
        peak = nodes * max(one.memory for host in self._hosts for one in host)
        enough = None if self._lacked_memory else _up(MEMORY_MARGIN * peak, nodes * _MEMORY_STEP)
        return self._size("memory_per_job", requested, None, peak, enough)

    @property
    def _lacked_memory(self) -> bool:
        killed = any(job.report.state is JobState.OUT_OF_MEMORY for job in self._jobs)
        return killed or bool(self._usage.cluster.folder.over_memory)

    def _walltime(self) -> Size:
        """Return the walltime; it was enough only if `run` has ended by itself."""
        longest, cluster = max(job.seconds for job in self._jobs), self._usage.cluster
        enough = None
        if cluster.kind is EndKind.DONE and cluster.record.run:
            enough = _up(WALLTIME_MARGIN * longest, _WALLTIME_STEP)
        return self._size("walltime", self._group.walltime, None, longest, enough)


def _peak_cores(samples: Iterable[HostSample]) -> float:
    """Return the most cores for `PEAK_SECONDS`; of a shorter job, for all of its time."""
    peaks, cpu, seconds = [0.0], 0.0, 0.0
    for one in samples:
        cpu, seconds = cpu + one.cpu, seconds + one.seconds
        if seconds >= PEAK_SECONDS:
            peaks.append(cpu / seconds)
            cpu = seconds = 0.0
    if len(peaks) == 1 and seconds:
        peaks.append(cpu / seconds)
    return max(peaks)


def _up(number: float, step: int) -> int:
    return max(1, math.ceil(number / step)) * step
