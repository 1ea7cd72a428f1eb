"""GPU hours in human-readable output: the text of `gpujobs report`, and a line of `submit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from ..clusters.timeline import Phase, PhaseKind, timeline, total
from ..clusters.usage import GpuHours, JobUsage, UsageReport
from ..text import clock_text, plural, short_size_text, table

T = TypeVar("T")

GROUP_HEADER = ("GROUP", "GRANTED", "CONNECTED", "BUSY", "IDLE")


def hours_text(hours: float, owner: str = "GPU") -> str:
    """Return ``15.2 GPU h``; short times as ``12 GPU min`` or ``7 GPU s``."""
    number, unit = _time(hours)
    return f"{number} {owner} {unit}"


def percent_text(fraction: float | None) -> str:
    """Return ``71 %``; None: not known."""
    return "unknown" if fraction is None else f"{100 * fraction:.0f} %"


def usage_line(usage: UsageReport) -> str:
    """Return ``8 GPUs x 1.9 h = 15.2 GPU h, 71 % busy``; "" if the cluster had no GPU."""
    gpus, hours = usage.most_gpus, usage.hours
    if not gpus:
        return ""
    number, unit = _time(hours.granted / gpus)
    line = f"{plural(gpus, 'GPU')} x {number} {unit} = {hours_text(hours.granted)}"
    busy = hours.busy_fraction
    return line if busy is None else f"{line}, {percent_text(busy)} busy"


def usage_text(usage: UsageReport) -> str:
    """Return the report in full."""
    parts = [*_facts(usage), "", _job_table(usage)]
    if rows := group_rows(usage):
        parts += ["", table(GROUP_HEADER, rows)]
    return "\n".join(parts)


def group_rows(usage: UsageReport) -> list[tuple[str, ...]]:
    """Return the GPU hours of each group, for `GROUP_HEADER`; none if there is only one."""
    if len(usage.group_hours) < 2:
        return []
    return [_group_row(name, hours) for name, hours in usage.group_hours.items()]


def _group_row(name: str, hours: GpuHours) -> tuple[str, ...]:
    if not hours.granted:
        return (name, "-", "-", "-", "-")
    return (
        name,
        hours_text(hours.granted),
        hours_text(hours.connected),
        f"{hours_text(hours.busy)}, {percent_text(hours.busy_fraction)}",
        hours_text(hours.idle),
    )


def _time(hours: float) -> tuple[str, str]:
    """Return a time as number and unit: s below two minutes, min below two hours, else h."""
    seconds = hours * 3600
    if seconds < 120:
        return f"{seconds:.0f}", "s"
    return (f"{seconds / 60:.0f}", "min") if hours < 2 else (f"{hours:.1f}", "h")


def _facts(usage: UsageReport) -> Iterator[str]:
    cluster, hours = usage.cluster, usage.hours
    title = (f"{cluster.record.id} on {cluster.record.site}", cluster.state.value, cluster.reason)
    yield ": ".join(part for part in title if part)
    if line := usage_line(usage):
        yield f"  used       {line}"
        if hours.asked:  # the jobs have a walltime
            yield f"  asked      {hours_text(hours.asked)} (GPUs and walltime of the started jobs)"
        yield f"  connected  {hours_text(hours.connected)} with a worker"
        yield f"  idle       {hours_text(hours.idle)} of {hours_text(hours.sampled)} sampled"
    elif usage.worker_hours:
        yield f"  connected  {hours_text(usage.worker_hours, 'worker')}"
    if usage.received is not None:
        yield f"  transfers  {short_size_text(usage.received)} between workers"
    for problem in usage.problems:
        yield f"  note       {problem}"


def _job_table(usage: UsageReport) -> str:
    times = ("PENDING", "STARTING", "RUNNING", "LOST")
    header = ["JOB", "ID", "GROUP", "STATE", "NODE", "GPUS", *times, ""]
    rows = [_row(usage, job) for job in usage.jobs]
    if not any(job.report.group for job in usage.jobs):
        group = header.index("GROUP")
        header, rows = _without(header, group), [_without(row, group) for row in rows]
    return table(header, rows)


def _without(cells: list[T], index: int) -> list[T]:
    return [*cells[:index], *cells[index + 1 :]]


def _row(usage: UsageReport, job: JobUsage) -> list[object]:
    report, phases = job.report, timeline(usage, job)
    kinds = (PhaseKind.PENDING, PhaseKind.STARTING, PhaseKind.RUNNING, PhaseKind.LOST)
    return [
        report.number,
        report.id,
        report.group or "-",
        report.state,
        report.node or "-",
        job.gpus,
        *(_length(phases, kind) for kind in kinds),
        _remark(job),
    ]


def _length(phases: list[Phase], kind: PhaseKind) -> str:
    if kind not in {phase.kind for phase in phases}:
        return "-"
    return clock_text(total(phases, kind))


def _remark(job: JobUsage) -> str:
    parts = [part for part in (job.report.reason, job.report.exit_remark) if part]
    if job.replaced_by is not None:
        parts.append(f"replaced by job {job.replaced_by}")
    return ", ".join(parts)
