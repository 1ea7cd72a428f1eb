"""Where the GPU hours of a cluster went: pure functions of its report and its history.

Times are in seconds since the epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .history import Connection, GpuSamples, History, Received
from .report import ClusterReport, JobPhase, JobReport
from .usage import JobUsage, UsageReport, WorkerTransfers

ROUNDING = 1.0
"""Seconds by which the recorded end of a job may be late."""


def make_usage(cluster: ClusterReport, history: History, now: float) -> UsageReport:
    """Return where the time of a cluster and its GPUs went."""
    jobs = [_job_usage(cluster, job, history, now) for job in cluster.jobs]
    problems = sorted({f"GPUs were not sampled: {text}" for text in history.problems.values()})
    problems += cluster.folder.damaged
    return UsageReport(cluster, tuple(_with_replacements(cluster, jobs)), now, tuple(problems))


def _job_usage(cluster: ClusterReport, job: JobReport, history: History, now: float) -> JobUsage:
    record, number = cluster.record, job.number
    started, ended = history.started.get(number), history.ended.get(number)
    submission = next(one for one in record.submissions if number in one.jobs)
    group = next((one for one in record.groups if job.workers and one.name == job.group), None)
    names = set(job.workers)
    own = [one for one in history.connections if one.worker in names]
    gpus = [one for one in history.gpus if one.job == number]
    if ended is None and not job.active and started is not None:
        ended = _last_sign(started, own, gpus)
    until = ended or now
    if started is None and not job.active and cluster.folder.ended is not None:
        until = min(now, cluster.folder.ended.time)
    start = started or until
    within = tuple(_within(own, start, ended, now))
    return JobUsage(
        report=_excused(cluster, job),
        gpus=group.gpus_per_job if group else 0,
        walltime=group.walltime if group else 0,
        submitted=submission.time or None,
        started=started,
        served=_served(within, names),
        ended=ended,
        until=until,
        connections=within,
        gpu_samples=tuple(_samples_within(gpu, start, until) for gpu in gpus),
        transfers=_transfers_within(history.transfers, within),
    )


def _excused(cluster: ClusterReport, job: JobReport) -> JobReport:
    """Return the report of a job; an ended cluster loses its workers before their jobs exit."""
    if cluster.folder.ended is not None and job.active and job.phase is JobPhase.LOST:
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
        first[one.worker] = min(one.since, first.get(one.worker, one.since))
    return max(first.values()) if names and names == first.keys() else None


def _samples_within(gpu: GpuSamples, start: float, end: float) -> GpuSamples:
    samples = tuple(sample for sample in gpu.samples if start <= sample.time <= end + 1)
    return GpuSamples(gpu.job, gpu.node, gpu.uuid, gpu.memory, samples)


def _transfers_within(
    transfers: Mapping[str, Sequence[Received]] | None, connections: Sequence[Connection]
) -> tuple[WorkerTransfers, ...] | None:
    """Return the transfers of the connected workers, during their connections."""
    if transfers is None:
        return None
    return tuple(
        _of_worker(worker, transfers.get(worker, ()), connections)
        for worker in sorted({one.worker for one in connections})
    )


def _of_worker(
    worker: str, samples: Sequence[Received], connections: Iterable[Connection]
) -> WorkerTransfers:
    own = [one for one in connections if one.worker == worker]
    within = [sample for sample in samples if any(_overlap(sample, one) for one in own)]
    return WorkerTransfers(worker, tuple(within))


def _overlap(sample: Received, connection: Connection) -> bool:
    """Return whether a sample, which is rounded, contains a part of a connection."""
    begins_before_end = sample.time - sample.seconds <= (connection.until or math.inf) + ROUNDING
    return begins_before_end and sample.time + ROUNDING >= connection.since


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
    end = cluster.folder.ended.time if cluster.folder.ended else math.inf
    for job in jobs:
        by_itself = job.ended is not None and job.report.number not in cluster.record.removed
        if by_itself and job.until < end:
            yield job
