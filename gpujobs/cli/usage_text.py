"""GPU hours in human-readable output: the text of `gpujobs report`, and a line of `submit`."""

from __future__ import annotations

from collections.abc import Iterator

from ..clusters.usage import JobUsage, UsageReport
from ..text import clock_text, plural, table


def hours_text(hours: float) -> str:
    """Return ``15.2 GPU h``; short times as ``12 GPU min`` or ``7 GPU s``."""
    number, unit = _time(hours)
    return f"{number} GPU {unit}"


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
    return "\n".join([*_facts(usage), "", _job_table(usage)])


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
    for problem in usage.problems:
        yield f"  note       {problem}"


def _job_table(usage: UsageReport) -> str:
    header = ("JOB", "ID", "STATE", "NODE", "GPUS", "PENDING", "STARTING", "RUNNING", "")
    return table(header, [_row(job) for job in usage.jobs])


def _row(job: JobUsage) -> tuple[object, ...]:
    report, started = job.report, job.started
    served = job.until if started is not None and job.served is None else job.served
    return (
        report.number,
        report.id,
        report.state,
        report.node or "-",
        job.gpus,
        _length(job.submitted, started or job.until),
        _length(started, served),
        _length(job.served, job.until),
        _remark(job),
    )


def _length(start: float | None, end: float | None) -> str:
    return "-" if start is None or end is None else clock_text(max(0.0, end - start))


def _remark(job: JobUsage) -> str:
    parts = [part for part in (job.report.reason, job.report.exit_remark) if part]
    if job.replaced_by is not None:
        parts.append(f"replaced by job {job.replaced_by}")
    return ", ".join(parts)
