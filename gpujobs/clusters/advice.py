"""Compare what the jobs of a cluster requested with what they used: sizes that were enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ..injob.folder import EndKind
from ..schedulers import JobState
from .history import GpuSamples, HostSample
from .ledger import GroupRecord
from .report import ClusterReport, ClusterState
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
_RESERVED, _ALLOCATED = 2**30, 2**26
"""Memory of a GPU that the driver may take by itself, and the least that a context of CUDA adds."""
_SAMPLED = 0.5
"""Part of a job's time with samples below which nothing is known of its use."""
_GIB, _MEMORY_STEP, _WALLTIME_STEP = 2**30, 2**28, 300


@dataclass(frozen=True)
class Size:
    """What a group requested of a resource, and used of it; None: not known.

    ``key``: of the profile, or `gpu_memory`. It gives the unit: numbers, bytes (memory) or seconds
    (walltime). ``mean`` of `gpus` is the busy share. ``enough``: None if the size fits.
    """

    group: str
    key: str
    requested: float | None
    mean: float | None = None
    peak: float | None = None
    enough: float | None = None


def sizes(usage: UsageReport) -> list[Size]:
    """Return the sizes of all groups. `enough` is known of clusters that have succeeded."""
    found: list[Size] = []
    for group in usage.cluster.record.groups:
        jobs = [job for job in usage.jobs if job.report.group == group.name and job.seconds]
        if jobs:
            found += _Group(usage, group, jobs).sizes()
    return found


def has_succeeded(cluster: ClusterReport) -> bool:
    """Return whether a cluster has ended with its work done: what it used was enough."""
    interactive = cluster.state is ClusterState.CANCELLED and not cluster.record.run
    return cluster.state is ClusterState.DONE or interactive


def unsampled(usage: UsageReport) -> list[int]:
    """Return the numbers of the jobs with workers whose use is not known."""
    nodes = {group.name: group.nodes_per_job for group in usage.cluster.record.groups}
    served = [job for job in usage.jobs if job.served]
    return [job.report.number for job in served if not _is_sampled(job, nodes[job.report.group])]


def _is_sampled(job: JobUsage, nodes: int) -> bool:
    """Return whether each node of a job has samples for most of the time with workers."""
    served = job.until - (job.served or job.until)
    known = [sum(one.seconds for one in host.samples) for host in job.hosts]
    return len(known) >= nodes and min(known) >= _SAMPLED * served


class _Group:
    def __init__(self, usage: UsageReport, group: GroupRecord, jobs: Sequence[JobUsage]) -> None:
        self._usage, self._group, self._jobs = usage, group, jobs
        self._devices = list(chain.from_iterable(job.gpu_samples for job in jobs))
        served = {job.report.number for job in jobs if job.served}
        self._known = bool(served) and served.isdisjoint(unsampled(usage))
        self._final = self._known and has_succeeded(usage.cluster)

    def sizes(self) -> Iterator[Size]:
        """Yield the GPUs, the CPUs, the memory and the walltime."""
        if self._group.gpus_per_job:
            yield self._gpus()
            yield self._gpu_memory()
        if self._known:
            yield from self._host([host.samples for job in self._jobs for host in job.hosts])
        else:
            yield self._size("cpus_per_job", self._group.cpus_per_job)
            yield self._size("memory_per_job", self._group.memory_per_job)
        yield self._walltime()

    def _size(
        self,
        key: str,
        requested: float,
        mean: float | None = None,
        peak: float | None = None,
        enough: float | None = None,
    ) -> Size:
        if enough is None or enough > SMALLER * requested or not self._final:
            enough = None
        return Size(self._group.name, key, requested or None, mean, peak, enough)

    def _gpus(self) -> Size:
        """Return the GPUs; one that no process used is not needed.

        A Python program scales its GPUs itself; and NVML may not know the use.
        """
        busy = self._usage.group_hours[self._group.name].busy_fraction
        known = [[one.busy for one in gpu.samples] for gpu in self._devices]
        enough, each = sum(map(_was_used, self._devices)), self._group.gpus_per_job
        if enough > each:
            enough = -(-enough // each) * each
        if self._usage.cluster.record.replaces == "none" and _complete(known):
            return self._size("gpus", self._group.gpus, busy, None, enough)
        return self._size("gpus", self._group.gpus, busy)

    def _gpu_memory(self) -> Size:
        """Return the memory of a GPU; how much a pool needs is not known, nor what work would."""
        total = min((gpu.memory for gpu in self._devices), default=0)
        samples = list(chain.from_iterable(gpu.samples for gpu in self._devices))
        peak = max((one.used or 0 for one in samples), default=0)
        if self._group.gpu_pool or not peak or all(one.busy == 0 for one in samples):
            return self._size("gpu_memory", total, None, peak or None)
        return self._size("gpu_memory", total, None, peak, _up(GPU_MARGIN * peak, _GIB))

    def _host(self, hosts: Sequence[Sequence[HostSample]]) -> Iterator[Size]:
        """Yield the cores and the memory of a job; nodes are equal, and the largest counts."""
        group, nodes = self._group, self._group.nodes_per_job
        samples = list(chain.from_iterable(hosts))
        mean = nodes * sum(one.cpu for one in samples) / sum(one.seconds for one in samples)
        peak = max(map(_peak_cores, hosts))
        workers = -(-group.workers_per_job // nodes)
        cores = max(1, math.ceil(peak - CPU_TOLERANCE), workers)
        yield self._size("cpus_per_job", group.cpus_per_job, mean, nodes * peak, nodes * cores)
        used = nodes * max(one.memory for one in samples)
        enough = None if self._lacked_memory else _up(MEMORY_MARGIN * used, nodes * _MEMORY_STEP)
        yield self._size("memory_per_job", group.memory_per_job, None, used, enough)

    @property
    def _lacked_memory(self) -> bool:
        killed = any(job.report.state is JobState.OUT_OF_MEMORY for job in self._jobs)
        return killed or bool(self._usage.cluster.folder.dask.over_memory)

    def _walltime(self) -> Size:
        """Return the walltime; it was enough only if `run` has ended by itself."""
        longest, cluster = max(job.seconds for job in self._jobs), self._usage.cluster
        enough = None
        if cluster.kind is EndKind.DONE and cluster.record.run:
            enough = _up(WALLTIME_MARGIN * longest, _WALLTIME_STEP)
        return self._size("walltime", self._group.walltime, None, longest, enough)


def _was_used(gpu: GpuSamples) -> bool:
    """Return whether a process computed on a GPU or allocated memory; samples miss short work."""
    if any(one.busy for one in gpu.samples):
        return True
    used = [one.used for one in gpu.samples if one.used is not None]
    return bool(used) and (max(used) > _RESERVED or max(used) - min(used) > _ALLOCATED)


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


def _complete(values: Sequence[Sequence[float | None]]) -> bool:
    """Return whether there are values, of all samples of all GPUs."""
    return bool(values) and all(values) and not any(None in some for some in values)


def _up(number: float, step: int) -> int:
    return max(1, math.ceil(number / step)) * step
