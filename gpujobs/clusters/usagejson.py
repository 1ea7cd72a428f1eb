"""The JSON of `gpujobs report`; times in seconds since the epoch, memory and data in bytes."""

from __future__ import annotations

from .history import GpuSamples
from .report import Json
from .usage import (
    GpuHours,
    JobUsage,
    UsageReport,
    WorkerTransfers,
    busy_fraction,
    shorter_samples,
    shorter_transfers,
    timeline,
)


def usage_json(usage: UsageReport) -> dict[str, Json]:
    """Return the report as JSON."""
    cluster, hours = usage.cluster, usage.hours
    return {
        "version": 1,
        "id": cluster.record.id,
        "site": cluster.record.site,
        "state": cluster.state.value,
        "reason": cluster.reason,
        "start": usage.start,
        "end": usage.end,
        "gpu_hours": _hours_json(hours),
        "groups": [
            {"name": name, "gpu_hours": _hours_json(hours), "busy": hours.busy_fraction}
            for name, hours in usage.group_hours.items()
        ],
        "busy": hours.busy_fraction,
        "most_gpus": usage.most_gpus,
        "received": usage.received,
        "workers": [[time, number] for time, number in usage.workers],
        "targets": [[time, number] for time, number in usage.targets],
        "jobs": [_job_json(usage, job) for job in usage.jobs],
        "failures": [job.report.number for job in usage.failures],
        "problems": list(usage.problems),
    }


def _hours_json(hours: GpuHours) -> dict[str, Json]:
    return {
        "asked": hours.asked,
        "granted": hours.granted,
        "connected": hours.connected,
        "sampled": hours.sampled,
        "busy": hours.busy,
        "idle": hours.idle,
    }


def _job_json(usage: UsageReport, job: JobUsage) -> dict[str, Json]:
    report = job.report
    return {
        "number": report.number,
        "id": report.id,
        "attempt": report.attempt,
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
        "timeline": [
            {"kind": phase.kind.value, "since": phase.since, "until": phase.until}
            for phase in timeline(usage, job)
        ],
        "workers": [
            {"name": one.worker, "since": one.since, "until": one.until} for one in job.connections
        ],
        "devices": [_gpu_json(job, gpu) for gpu in job.gpu_samples],
        "transfers": [_transfers_json(one) for one in job.transfers or ()],
    }


def _gpu_json(job: JobUsage, gpu: GpuSamples) -> dict[str, Json]:
    return {
        "node": gpu.node,
        "uuid": gpu.uuid,
        "workers": list[Json](job.workers_of(gpu.uuid)),
        "memory": gpu.memory,
        "most_used": max((sample.used or 0 for sample in gpu.samples), default=None),
        "busy": busy_fraction(gpu.samples),
        "samples": [
            [one.time, one.seconds, one.busy, one.used] for one in shorter_samples(gpu.samples)
        ],
    }


def _transfers_json(transfers: WorkerTransfers) -> dict[str, Json]:
    return {
        "worker": transfers.worker,
        "received": transfers.received,
        "samples": [
            [one.time, one.seconds, one.size] for one in shorter_transfers(transfers.samples)
        ],
    }
