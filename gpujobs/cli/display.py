"""Human-readable output about clusters: the table, one cluster in full, the line of progress."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from ..clusters.report import (
    ClusterReport,
    ClusterState,
    WorkerGpu,
    cluster_json,
)
from ..clusters.rows import JOB_HEADER, job_cells, job_counts
from ..injob.idle import RULES
from ..text import clock_text, measured_size_text, plural, quoted, table

if TYPE_CHECKING:
    from ..clusters.connect import WorkerActivity

SHOWN_NAMES = 4
"""Names of missing workers that are listed before they are cut short."""
SHOWN_LOGS = 2
"""Failed jobs whose last lines are printed."""


def status_table(reports: Sequence[ClusterReport]) -> str:
    """Return one line for each cluster."""
    header = ("CLUSTER", "SITE", "STATE", "WORKERS", "JOBS", "AGE", "")
    return table(header, [_cluster_row(report) for report in reports])


def status_json(reports: Sequence[ClusterReport]) -> str:
    """Return all clusters as JSON."""
    document = {"version": 2, "clusters": [cluster_json(report) for report in reports]}
    return json.dumps(document, indent=1)


def status_text(
    report: ClusterReport, activities: Mapping[str, WorkerActivity] | None = None
) -> str:
    """Return one cluster in full, with the last lines of the logs of failed jobs.

    ``activities``: of workers by their names, for a table of the workers instead of their GPUs.
    """
    lines = [*_facts(report), "", table(JOB_HEADER, [job_cells(job) for job in report.jobs])]
    workers = _gpu_table(report) if activities is None else worker_table(report, activities)
    if workers:
        lines += ["", workers]
    for job in [job for job in report.jobs if job.log][:SHOWN_LOGS]:
        lines += last_lines("run" if job.run_failed else f"job {job.number}", job.log)
    return "\n".join(lines)


def last_lines(name: str, log: Iterable[str]) -> list[str]:
    """Return the last lines of a log below its name and an empty line."""
    return ["", f"last lines of {name}:", *quoted(log)]


def summary(report: ClusterReport) -> str:
    """Return in one line why a cluster is in its state."""
    if report.finished and report.active:
        parts = [report.reason or "run: is done"]
        if ending := sum(job.active for job in report.jobs):
            parts.append(f"{plural(ending, 'job')} still ending")
        if held := len(report.held):
            parts.append(
                f"{plural(held, 'job')} held in the queue: gpujobs cancel {report.record.id}"
            )
        return "; ".join(parts)
    missing = report.record.workers - report.connected
    if report.state is ClusterState.RUNNING and not report.reason and missing > 0:
        return f"{missing} missing"
    return report.reason


def age(report: ClusterReport) -> str:
    """Return the time since a cluster was submitted."""
    return clock_text(max(0.0, time.time() - report.record.created))


def _cluster_row(report: ClusterReport) -> tuple[str, ...]:
    record = report.record
    return (
        record.id,
        record.site,
        report.state,
        "-" if report.finished else f"{report.connected}/{record.workers}",
        job_counts(report.jobs) or "-",
        age(report),
        "; ".join(filter(None, (*report.folder.damaged[:1], summary(report)))),
    )


def _facts(report: ClusterReport) -> Iterator[str]:
    record = report.record
    title = (f"{record.id} on {record.site}", report.state.value, summary(report))
    yield ": ".join(part for part in title if part)
    if not report.finished:
        yield from _connections(report)
    if record.attempts > 1:
        yield f"  attempt  {report.attempt} of {record.attempts}"
    if report.exit_code is not None:
        yield f"  exit     {report.exit_code}"
    if record.run:
        yield f"  run      {shlex.join(record.run)}"
    if report.folder.address and not report.finished:
        yield f"  dask     {report.folder.address}"
    if report.ends_at:
        yield f"  ends     {_end_text(report.ends_at, report.folder.ends_by)}"
    if rates := report.folder.transport.text():
        yield f"  network  {rates}"
    for note in report.notes:
        yield f"  note     {note}"


def _connections(report: ClusterReport) -> Iterator[str]:
    connected, missing = report.connected, _missing_workers(report)
    yield f"  workers  {connected} of {report.record.workers} connected{missing}"
    for group in report.groups:
        yield f"  {group.name:<8} {group.connected} of {group.wanted} connected"


def _end_text(ends_at: float, rule: str) -> str:
    """Return when a cluster without work ends, and what it must stay without."""
    clock = time.strftime("%H:%M:%S", time.localtime(ends_at))
    condition = RULES.get(rule, "without work")  # of a newer version
    return f"at {clock}, if it stays {condition}"


def _missing_workers(report: ClusterReport) -> str:
    if not report.connected:
        return ""
    staying = [job for job in report.current_jobs if job.number not in report.record.removed]
    names = [name for job in staying for name in job.workers if name not in job.connected]
    if not names:
        return ""
    if len(names) > SHOWN_NAMES:
        names = [*names[:SHOWN_NAMES], "…"]
    return f"; missing: {', '.join(names)}"


def _gpu_table(report: ClusterReport) -> str:
    """Return the connected workers with their GPUs; "" if there are none."""
    gpus = [gpu for job in report.jobs for gpu in job.gpus]
    with_gpus = {gpu.worker for gpu in gpus}
    for job in report.jobs:
        others = (name for name in job.connected if name not in with_gpus)
        gpus += (WorkerGpu(name, job.node or "-", "-", None, None) for name in others)
    if report.finished or not gpus:
        return ""
    rows = [_gpu_row(gpu) for gpu in sorted(gpus, key=lambda gpu: gpu.worker)]
    return table(("WORKER", "NODE", "GPU", "UUID", "MEMORY", "BUSY", "USED"), rows)


def _gpu_row(gpu: WorkerGpu) -> tuple[str, ...]:
    busy = "-" if gpu.busy is None else f"{gpu.busy:.0f} %"
    memory, used = _memory(gpu.memory or None), _memory(gpu.used)
    return gpu.worker, gpu.node, gpu.model or "-", gpu.uuid, memory, busy, used


def _memory(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else measured_size_text(n_bytes)


def worker_table(report: ClusterReport, activities: Mapping[str, WorkerActivity]) -> str:
    """Return a row for each connected worker, "" if there are none; see `status_text`."""
    if report.finished or not report.connected:
        return ""
    rows = [
        (
            name,
            job.node or "-",
            *_activity_cells(activities.get(name)),
            *_gpu_cells([gpu for gpu in job.gpus if gpu.worker == name]),
        )
        for job in report.jobs
        for name in job.connected
    ]
    header = ("WORKER", "NODE", "RUNNING", "WAITING", "CPU", "MEMORY", "GPU", "BUSY", "USED")
    return table(header, rows)


def _activity_cells(found: WorkerActivity | None) -> tuple[str, str, str, str]:
    if found is None:
        return "-", "-", "-", "-"
    memory = measured_size_text(found.memory)
    if found.memory_limit:
        memory = f"{memory} of {measured_size_text(found.memory_limit)}"
    return str(found.executing), str(found.waiting), f"{found.cpu:.0f} %", memory


def _gpu_cells(gpus: Sequence[WorkerGpu]) -> tuple[str, str, str]:
    """Return the GPUs of one worker in one row: the mean of use, the sum of memory."""
    if not gpus:
        return "-", "-", "-"
    model = gpus[0].model or "GPU"
    if len(gpus) > 1:
        model = f"{len(gpus)} x {model}"
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    used = [gpu.used for gpu in gpus if gpu.used is not None]
    if not busy or not used:
        return model, "-", "-"
    return model, f"{fmean(busy):.0f} %", measured_size_text(sum(used))
