"""`gpujobs top`: a table of what the workers of one cluster do now."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from statistics import fmean

from ..clusters.activity import ActivityReader, WorkerActivity
from ..clusters.history import with_samples
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.monitor import ClusterMonitor
from ..clusters.report import ClusterReport, JobReport, WorkerGpu
from ..errors import GpujobsError
from ..text import measured_size_text, table
from . import live, messages
from .display import progress_text

_HEADER = ("WORKER", "NODE", "RUNNING", "WAITING", "CPU", "MEMORY", "GPU", "BUSY", "USED")


def show(record: ClusterRecord, ledger: Ledger, *, interval: float, once: bool) -> None:
    """Print the table; on a terminal, every ``interval`` seconds until the cluster ends."""
    monitor = ClusterMonitor([record], ledger)
    console = live.terminal(sys.stdout)
    with ActivityReader() as reader:
        if once or console is None:
            messages.echo(_text(monitor.report(), reader))
            return
        with live.area(console) as area:
            while True:
                report = monitor.report()
                area.update(live.styled(_text(report, reader)), refresh=True)
                if report.finished:
                    return
                time.sleep(interval)


def _text(report: ClusterReport, reader: ActivityReader) -> str:
    """Return the table of a cluster, above it how far it has come."""
    notes = [f"{report.record.id}: {report.state}, {progress_text(report)}"]
    notes += report.folder.damaged
    if report.finished or not report.connected:
        return "\n".join(notes)
    activities: Mapping[str, WorkerActivity] = {}
    try:
        activities = reader.read(report)
    except GpujobsError as error:
        notes.append(f"{error}; tasks are not known")
    now = time.time()
    jobs = [with_samples(report.record, job, now) for job in report.jobs]
    return "\n".join([*notes, "", worker_table(jobs, activities)])


def worker_table(jobs: Sequence[JobReport], activities: Mapping[str, WorkerActivity]) -> str:
    """Return a row for each connected worker; ``activities`` are by the worker's name."""
    rows = [
        (
            name,
            job.node or "-",
            *_activity(activities.get(name)),
            *_gpus([gpu for gpu in job.gpus if gpu.worker == name]),
        )
        for job in jobs
        for name in job.connected
    ]
    return table(_HEADER, rows)


def _activity(found: WorkerActivity | None) -> tuple[str, str, str, str]:
    if found is None:
        return "-", "-", "-", "-"
    memory = measured_size_text(found.memory)
    if found.memory_limit:
        memory = f"{memory} of {measured_size_text(found.memory_limit)}"
    return str(found.executing), str(found.waiting), f"{found.cpu:.0f} %", memory


def _gpus(gpus: Sequence[WorkerGpu]) -> tuple[str, str, str]:
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
