"""The output of `gpujobs report`: text, the HTML page, JSON, and a line of `submit --wait`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ..clusters.advice import MARGINS, Size, has_succeeded, sizes, unsampled
from ..clusters.badnodes import BAD, NodeFailure
from ..clusters.history import Energy, GpuSamples, Sample, measured_energy
from ..clusters.ledger import GroupRecord
from ..clusters.notebook import html_template
from ..clusters.report import NOT_WITH_MIG, Json, job_json
from ..clusters.usage import (
    GpuHours,
    JobUsage,
    Phase,
    PhaseKind,
    Steps,
    UsageReport,
    busy_fraction,
    shorter_samples,
    timeline,
    total,
)
from ..injob.names import is_slice
from ..text import (
    age_text,
    charges_text,
    measured_size_text,
    plural,
    short_size_text,
    size_text,
    table,
    walltime_text,
)

_LEAST_KWH = 0.1
_SHOWN_REMARK = 20
"""Characters of the last column that are worth more than a spare one."""
_GROUP_HEADER = ("GROUP", "GRANTED", "CONNECTED", "BUSY", "IDLE")


def hours_text(hours: float, owner: str = "GPU") -> str:
    """Return ``15.2 GPU h``; short times as ``12 GPU min`` or ``7 GPU s``."""
    number, unit = _time(hours)
    return f"{number} {owner} {unit}"


def energy_text(kwh: float) -> str:
    """Return ``1.25 kWh``, or less than a tenth of it in Wh."""
    return f"{kwh:.2f} kWh" if kwh >= _LEAST_KWH else f"{1000 * kwh:.1f} Wh"


def percent_text(fraction: float | None) -> str:
    """Return ``71 %``; None: not known."""
    return "unknown" if fraction is None else f"{100 * fraction:.0f} %"


def _busy_text(fraction: float | None, *, slices: bool) -> str:
    """Return ``71 % busy``. ``slices``: the GPUs are MIG slices."""
    if fraction is None and slices:
        return f"busy share {NOT_WITH_MIG}"
    return f"{percent_text(fraction)} busy"


def usage_line(usage: UsageReport) -> str:
    """Return ``8 GPUs x 1.9 h = 15.2 GPU h, 71 % busy``; "" if the cluster had no GPU."""
    gpus, hours = usage.most_gpus, usage.hours
    if not gpus:
        return ""
    number, unit = _time(hours.granted / gpus)
    line = f"{plural(gpus, 'GPU')} x {number} {unit} = {hours_text(hours.granted)}"
    if hours.busy_fraction is None and not usage.has_slices:
        return line
    return f"{line}, {_busy_text(hours.busy_fraction, slices=usage.has_slices)}"


def usage_text(usage: UsageReport, columns: int | None = None) -> str:
    """Return the report in full; ``columns``: of the terminal."""
    cluster = usage.cluster
    title = (f"{cluster.record.id} on {cluster.record.site}", cluster.state.value, cluster.reason)
    parts = [": ".join(filter(None, title))]
    if line := usage_line(usage):
        parts.append(f"  used       {line}")
    parts += [f"  {name:<9}  {value} {meaning}" for name, value, meaning in facts(usage)]
    parts += [f"  note       {problem}" for problem in usage.problems]
    parts += ["", _job_table(usage, columns)]
    if rows := group_rows(usage):
        parts += ["", table(group_header(usage), rows, columns, spare=("ENERGY",))]
    if found := size_rows(usage):
        parts += ["", table(SIZE_HEADER, found, columns)]
        parts += [f"  {line}" for line in advice_lines(usage)]
    return "\n".join(parts)


def group_header(usage: UsageReport) -> tuple[str, ...]:
    """Return the header of `group_rows`."""
    return (*_GROUP_HEADER, "ENERGY") if usage.energy else _GROUP_HEADER


def group_rows(usage: UsageReport) -> list[tuple[str, ...]]:
    """Return the GPU hours and the energy of each group; none if there is only one."""
    if len(usage.group_hours) < 2:
        return []
    rows = []
    for name, hours in usage.group_hours.items():
        row = _group_row(name, hours)
        if usage.energy:
            row = (*row, _kwh(usage.group_energy[name]))
        rows.append(row)
    return rows


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


def _kwh(energy: Energy | None) -> str:
    return "-" if energy is None else energy_text(energy.kwh)


# -- requested and used ----------------------------------------------------------------------------
SIZE_HEADER = ("OF", "REQUESTED", "USED")


class _Resource(NamedTuple):
    """A resource of a `Size`, and how its numbers are written."""

    name: str
    requested: Callable[[int], str] = str
    measured: Callable[[float], str] = "{:.1f}".format
    enough: Callable[[int], str] = str


_MEMORY = (short_size_text, lambda size: measured_size_text(int(size)), size_text)
_RESOURCES = {
    "gpus": _Resource("GPUs"),
    "gpu_memory": _Resource("memory of a GPU", *_MEMORY),
    "cpus_per_job": _Resource("CPUs of a job"),
    "memory_per_job": _Resource("memory of a job", *_MEMORY),
    "walltime": _Resource("walltime", walltime_text, age_text, walltime_text),
}


def size_rows(usage: UsageReport) -> list[tuple[str, ...]]:
    """Return what was requested and used, for `SIZE_HEADER`; none before a job has started."""
    return [_size_row(size, _RESOURCES[size.key]) for size in sizes(usage)]


def _size_row(size: Size, resource: _Resource) -> tuple[str, ...]:
    requested = "not known"
    if size.requested is not None:
        requested = resource.requested(int(size.requested))
    name = ": ".join(filter(None, (size.group, resource.name)))
    return name, requested, _used(size, resource)


def _used(size: Size, resource: _Resource) -> str:
    if size.key == "gpus":
        return _busy_text(size.mean, slices=False)
    parts = []
    if size.mean is not None:
        parts.append(f"{size.mean:.1f} on average")
    if size.peak is not None:
        parts.append(f"up to {resource.measured(size.peak)}")
    return ", ".join(parts) or "not sampled"


def advice_lines(usage: UsageReport) -> list[str]:
    """Return the keys of the profile that were enough, by group; none without a success."""
    found = _known_sizes(usage)
    if not found or not has_succeeded(usage.cluster):
        return []
    if unknown := unsampled(usage):
        jobs = ", ".join(map(str, unknown))
        return [f"no advice about the size: too few samples of job {jobs}"]
    return list(_advice(usage.cluster.record.groups, found))


def _known_sizes(usage: UsageReport) -> list[Size]:
    """Return the sizes of the groups whose workers have connected; of others nothing is known."""
    served = {job.report.group for job in usage.jobs if job.served}
    return [size for size in sizes(usage) if size.group in served]


def _advice(groups: Iterable[GroupRecord], found: Iterable[Size]) -> Iterator[str]:
    smaller = [size for size in found if size.enough is not None]
    for group in groups:
        named = f"group {group.name}: " * bool(group.name)
        yield from map(
            named.__add__, _of_group([one for one in smaller if one.group == group.name])
        )
        if group.gpu_pool:
            yield f"{named}workers take GPU memory in advance: how much they needed is not known"
    yield f"with a margin ({MARGINS})" if smaller else "the size fits"


def _of_group(smaller: Iterable[Size]) -> Iterator[str]:
    """Yield the keys that were enough; no key of a profile has the memory of a GPU."""
    enough = {one.key: _RESOURCES[one.key].enough(int(one.enough or 0)) for one in smaller}
    memory = enough.pop("gpu_memory", "")
    if enough:
        yield "less would have been enough: " + ", ".join(
            f"{key}: {text}" for key, text in enough.items()
        )
    if memory:
        yield f"GPUs with {memory} are enough: another `queue` or `gpu_type` may have them"


def _time(hours: float) -> tuple[str, str]:
    """Return a time as number and unit: s below two minutes, min below two hours, else h."""
    seconds = hours * 3600
    if seconds < 120:
        return f"{seconds:.0f}", "s"
    return (f"{seconds / 60:.0f}", "min") if hours < 2 else (f"{hours:.1f}", "h")


def facts(usage: UsageReport) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and meaning of the GPU hours; without GPUs, of the worker hours."""
    hours = usage.hours
    if not usage.has_gpus:
        yield "connected", hours_text(usage.worker_hours, "worker"), "of CPU workers"
    else:
        if hours.asked:  # the jobs have a walltime
            asked = hours_text(hours.asked)
            yield "asked", asked, "for the GPUs and the walltime of the jobs that started"
        yield "granted", hours_text(hours.granted), "from the start to the end of the jobs"
        yield "connected", hours_text(hours.connected), "with a connected worker"
        busy = _busy_text(hours.busy_fraction, slices=usage.has_slices)
        yield "busy", hours_text(hours.busy), f"of the samples: {busy}"
        yield "idle", hours_text(hours.idle), "sampled, and not busy"
        yield from _energy_facts(usage)
        if usage.drained:
            jobs = plural(len(usage.drained), "job")
            yield "drained", hours_text(usage.saved_hours), f"not used: {jobs} left early"
        for text in charges_text(usage.hour_charges):
            yield "charge", text, "for the granted GPU hours"
        for text in charges_text(usage.energy_charges):
            yield "charge", text, "for the sampled energy"


def _energy_facts(usage: UsageReport) -> Iterator[tuple[str, str, str]]:
    """Yield the energy of the GPUs, or why it is not known; nothing without samples."""
    gpus = [gpu for job in usage.jobs for gpu in job.gpu_samples if gpu.samples]
    energy = usage.energy
    if energy is not None:
        meaning = f"{energy_text(energy.idle_kwh)} of it idle, {energy.mean_power:.0f} W a GPU"
        without = sum(measured_energy(gpu.samples) is None for gpu in gpus)
        if without:
            meaning += f"; {plural(without, 'GPU')} without a counter"
        yield "energy", energy_text(energy.kwh), meaning
    elif usage.has_slices:
        yield "energy", "unknown", NOT_WITH_MIG
    elif gpus:
        yield "energy", "unknown", "the GPUs have no counter, or an older gpujobs has not read it"


_TIMES = (PhaseKind.PENDING, PhaseKind.STARTING, PhaseKind.RUNNING, PhaseKind.LOST)


def _job_table(usage: UsageReport, columns: int | None) -> str:
    grouped = any(job.report.group for job in usage.jobs)
    times = [kind.name for kind in _TIMES]
    energy = ["ENERGY"] if usage.energy else []
    group = ["GROUP"] if grouped else []
    header = ["JOB", "ID", *group, "STATE", "NODE", "GPUS", *times, *energy, ""]
    rows = [_row(usage, job, grouped=grouped) for job in usage.jobs]
    spare = ("LOST", "STARTING", "GPUS", "PENDING", *energy)
    return table(header, rows, columns, spare=spare, last=_SHOWN_REMARK)


def _row(usage: UsageReport, job: JobUsage, *, grouped: bool) -> list[object]:
    report, phases = job.report, timeline(usage, job)
    return [
        report.number,
        report.id,
        *[report.group or "-"] * grouped,
        report.state,
        report.node or "-",
        job.gpus,
        *(_length(phases, kind) for kind in _TIMES),
        *([_kwh(job.energy)] if usage.energy else []),
        _remark(job),
    ]


def _length(phases: list[Phase], kind: PhaseKind) -> str:
    if kind not in {phase.kind for phase in phases}:
        return "-"
    return age_text(total(phases, kind))


def _remark(job: JobUsage) -> str:
    parts = [part for part in (job.report.reason, job.report.exit_remark) if part]
    if job.replaced_by is not None:
        parts.append(f"replaced by job {job.replaced_by}")
    return ", ".join(parts)


# -- the HTML page of `gpujobs report` -------------------------------------------------------------
TEMPLATE = "report.html.j2"
WIDTH, HEIGHT = 1000, 100
"""Size of the coordinates of a chart; a browser stretches it."""
TICKS = 4


@dataclass(frozen=True)
class Bar:
    """A part of a job, from ``left`` to ``left + width`` in percent of the time axis."""

    kind: str
    left: float
    width: float
    title: str
    link: int | None = None
    """Number of another job."""


@dataclass(frozen=True)
class Chart:
    """Lines of a GPU or a worker, and the figures next to them."""

    name: str
    figures: str
    lines: Mapping[str, str]
    """Points of SVG by the class of the line."""


@dataclass(frozen=True)
class Axis:
    """The time axis from ``start`` to ``end``, seconds since the epoch."""

    start: float
    end: float

    def percent(self, moment: float) -> float:
        """Return a position between 0 and 100."""
        return round(min(100.0, max(0.0, 100 * (moment - self.start) / self._length)), 3)

    def x(self, moment: float) -> float:
        """Return a coordinate of a chart."""
        return self.percent(moment) * WIDTH / 100

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Positions in percent, and times since the start."""
        shares = [number / TICKS for number in range(TICKS + 1)]
        return [(100 * share, age_text(self._length * share)) for share in shares]

    @property
    def _length(self) -> float:
        return max(1.0, self.end - self.start)


def page(usage: UsageReport) -> str:
    """Return the page. All texts are escaped: names and reasons are data."""
    axis = Axis(usage.start, usage.end)
    most = max([1, *(number for _, number in (*usage.workers, *usage.targets))])
    return html_template(TEMPLATE).render(
        usage=usage,
        cluster=usage.cluster,
        facts=list(facts(usage)),
        plural=plural,
        energy_text=energy_text,
        axis=axis,
        groups=group_rows(usage),
        group_header=[name.capitalize() for name in group_header(usage)],
        sizes=size_rows(usage),
        advice=advice_lines(usage),
        has_gpus=usage.has_gpus,
        kinds=list(PhaseKind),
        jobs=[
            (job, [_bar(job, phase, axis) for phase in timeline(usage, job)]) for job in usage.jobs
        ],
        replaces={job.replaced_by: job.report.number for job in usage.failures},
        most_workers=most,
        connected=_step_line([(axis.start, 0), *usage.workers], axis, most),
        target=_step_line(usage.targets, axis, most),
        charts=[_chart(job, gpu, axis) for job in usage.jobs for gpu in job.gpu_samples],
        created=_utc(usage.start),
        failures=[(job, _bar_length(axis.start, job.ended)) for job in usage.failures],
    )


def _bar(job: JobUsage, phase: Phase, axis: Axis) -> Bar:
    left = axis.percent(phase.since)
    width = round(axis.percent(phase.until) - left, 3)
    title, link = f"{phase.kind} for {age_text(phase.seconds)}", None
    if phase.kind is PhaseKind.FAILED:
        title = f"{job.report.state.value}: {job.report.reason or 'unknown reason'}"
    elif phase.kind is PhaseKind.REPLACED:
        link = job.replaced_by
        title = f"replaced by job {link}, which was ready after {age_text(phase.seconds)}"
    return Bar(phase.kind.value, left, width, title, link)


def _bar_length(start: float, end: float | None) -> str:
    return "" if end is None else age_text(max(0.0, end - start))


def _step_line(steps: Steps, axis: Axis, most: int) -> str:
    """Return the points of a line that keeps each number until the next one."""
    points: list[str] = []
    previous: float | None = None
    for moment, number in [*steps, (axis.end, steps[-1][1])] if steps else []:
        x, y = axis.x(moment), round(HEIGHT * (1 - number / most), 2)
        points += [f"{x:g},{previous:g}"] if previous is not None else []
        points.append(f"{x:g},{y:g}")
        previous = y
    return " ".join(points)


def _chart(job: JobUsage, gpu: GpuSamples, axis: Axis) -> Chart:
    used = [sample.used for sample in gpu.samples if sample.used is not None]
    samples = shorter_samples(gpu.samples)
    owner = ", ".join(job.workers_of(gpu.uuid)) or f"job {job.report.number}"
    most = "unknown"
    if used:
        most = f"{measured_size_text(max(used))} of {measured_size_text(gpu.memory)}"
    lines = {
        "memory-line": _line(samples, axis, lambda sample: sample.used, gpu.memory or 1),
        "busy-line": _line(samples, axis, lambda sample: sample.busy, 100),
    }
    busy = _busy_text(busy_fraction(gpu.samples), slices=is_slice(gpu.uuid))
    return Chart(f"{owner}, {gpu.node}, {gpu.uuid}", f"{busy}, memory up to {most}", lines)


def _line(
    samples: Sequence[Sample],
    axis: Axis,
    value: Callable[[Sample], float | None],
    most: float,
) -> str:
    """Return the points of a line."""
    points = []
    for sample in samples:
        found = value(sample)
        if found is not None:
            y = HEIGHT * (1 - min(1.0, found / most))
            points.append(f"{axis.x(sample.time):.1f},{y:.1f}")
    return " ".join(points)


# -- failed nodes ----------------------------------------------------------------------------------
def nodes_text(found: Sequence[Mapping[str, Any]], columns: int | None = None) -> str:
    """Return the rows of `badnodes.rows` as a table; "" if there are none."""
    if not found:
        return ""
    bad = {True: f"for {BAD / 3600:.0f} h", False: "no"}
    cells = [
        (row["node"], row["site"], _utc(row["time"]), bad[row["bad"]], row["reason"])
        for row in found
    ]
    header = ("NODE", "SITE", "FAILED", "BAD", "REASON")
    return table(header, cells, columns, spare=("SITE", "FAILED"))


def ticket(found: Iterable[NodeFailure], usage: UsageReport) -> str:
    """Return the text for the operator about the nodes on which jobs of a cluster failed."""
    cluster_id = usage.cluster.record.id
    parts = [_failure_text(one, usage) for one in found if one.cluster == cluster_id]
    return "\n\n".join(parts or [f"{cluster_id}: no job has failed on a node in the last day"])


def _failure_text(failure: NodeFailure, usage: UsageReport) -> str:
    gpus = {gpu.node: gpu.uuid for job in usage.jobs for gpu in job.gpu_samples}
    facts = {
        "job": failure.job,
        "started": _utc(failure.began) if failure.began else "it did not begin",
        "failed": _utc(failure.time),
        "reason": failure.reason,
        "GPU": gpus.get(failure.node, "none was found"),
    }
    lines = (f"  {name:<8} {value}" for name, value in facts.items())
    return "\n".join([f"node {failure.node}: a GPU job failed", *lines])


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


# -- JSON; times in seconds since the epoch, memory and data in bytes ------------------------------
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
        "charges": dict[str, Json](usage.charges),
        "groups": [
            {
                "name": name,
                "gpu_hours": _hours_json(hours),
                "busy": hours.busy_fraction,
                "energy": _energy_json(usage.group_energy[name]),
            }
            for name, hours in usage.group_hours.items()
        ],
        "busy": hours.busy_fraction,
        "energy": _energy_json(usage.energy),
        "most_gpus": usage.most_gpus,
        "received": None,  # it is not recorded; the key is for programs that read it
        "drained": {
            "jobs": [job.report.number for job in usage.drained],
            "gpu_hours": usage.saved_hours,
        },
        "workers": [[time, number] for time, number in usage.workers],
        "targets": [[time, number] for time, number in usage.targets],
        "jobs": [_job_json(usage, job) for job in usage.jobs],
        "failures": [job.report.number for job in usage.failures],
        "problems": list(usage.problems),
        "sizes": [asdict(size) for size in sizes(usage)],
        "advice": list[Json](advice_lines(usage)),
    }


def _hours_json(hours: GpuHours) -> dict[str, Json]:
    return {**asdict(hours), "idle": hours.idle}


def _energy_json(energy: Energy | None) -> Json:
    if energy is None:
        return None
    return {"kwh": energy.kwh, "idle_kwh": energy.idle_kwh, "mean_power": energy.mean_power}


_OF_JOB = ("number", "id", "attempt", "node", "state", "phase", "reason", "exit_code")
"""Keys of `status --json`."""


def _job_json(usage: UsageReport, job: JobUsage) -> dict[str, Json]:
    report = job.report
    return {
        **{key: value for key, value in job_json(report).items() if key in _OF_JOB},
        "group": report.group,
        "gpus": job.gpus,
        "walltime": job.walltime or None,
        "submitted": job.submitted,
        "started": job.started,
        "served": job.served,
        "ended": job.ended,
        "energy": _energy_json(job.energy),
        "replaced_by": job.replaced_by,
        "timeline": [asdict(phase) for phase in timeline(usage, job)],
        "workers": [
            {"name": one.worker, "since": one.since, "until": one.until} for one in job.connections
        ],
        "devices": [_gpu_json(job, gpu) for gpu in job.gpu_samples],
        "transfers": [],  # none are recorded; the key is for programs that read it
    }


def _gpu_json(job: JobUsage, gpu: GpuSamples) -> dict[str, Json]:
    return {
        "node": gpu.node,
        "uuid": gpu.uuid,
        "workers": list[Json](job.workers_of(gpu.uuid)),
        "memory": gpu.memory,
        "most_used": max((sample.used or 0 for sample in gpu.samples), default=None),
        "busy": busy_fraction(gpu.samples),
        "energy": _energy_json(measured_energy(gpu.samples)),
        "samples": [
            [one.time, one.seconds, one.busy, one.used] for one in shorter_samples(gpu.samples)
        ],
    }
