"""The HTML page of `gpujobs report`: one file, without a script and without a network request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..clusters.history import GpuSamples, Sample
from ..clusters.html import html_template
from ..clusters.usage import JobUsage, Steps, UsageReport
from ..text import clock_text, measured_size_text, plural
from .usage_text import hours_text, percent_text

TEMPLATE = "report.html.j2"
WIDTH, HEIGHT = 1000, 100
"""Size of the coordinates of a chart; a browser stretches it."""
MOST_POINTS = 250
"""Points of a line: more are not visible, and a job of days has thousands of samples."""
TICKS = 4


@dataclass(frozen=True)
class Bar:
    """A part of a job, from ``left`` to ``left + width`` in percent of the time axis."""

    kind: str
    left: float
    width: float
    title: str


@dataclass(frozen=True)
class Chart:
    """A GPU: points of two SVG lines, and the figures next to them."""

    name: str
    busy: str
    memory: str
    mean: str
    most: str


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
        return [(100 * share, clock_text(self._length * share)) for share in shares]

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
        facts=_facts(usage),
        plural=plural,
        axis=axis,
        jobs=[(job, _bars(job, axis)) for job in usage.jobs],
        most_workers=most,
        connected=_step_line([(axis.start, 0), *usage.workers], axis, most),
        target=_step_line(usage.targets, axis, most),
        charts=[_chart(job, gpu, axis) for job in usage.jobs for gpu in job.gpu_samples],
        created=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(usage.start)),
        failures=[(job, _length(axis.start, job.ended)) for job in usage.failures],
    )


def _facts(usage: UsageReport) -> list[tuple[str, str, str]]:
    """Return name, value and explanation of the GPU hours."""
    hours = usage.hours
    return [
        ("asked", hours_text(hours.asked), "GPUs and walltime of the jobs that started"),
        ("granted", hours_text(hours.granted), "from the start to the end of the jobs"),
        ("connected", hours_text(hours.connected), "with a connected worker"),
        ("busy", hours_text(hours.busy), f"{percent_text(hours.busy_fraction)} of the samples"),
        ("idle", hours_text(hours.idle), "sampled, and not busy"),
    ]


def _bars(job: JobUsage, axis: Axis) -> list[Bar]:
    """Return the time of a job in the queue, without all its workers, and with them."""
    started = job.started
    parts = [("pending", job.submitted, started or job.until)]
    if started is not None:
        parts += [
            ("starting", started, job.served or job.until),
            ("failed" if job.failed else "running", job.served, job.until),
        ]
    return [
        Bar(
            kind,
            axis.percent(since),
            round(axis.percent(until) - axis.percent(since), 3),
            f"{kind} for {clock_text(until - since)}",
        )
        for kind, since, until in parts
        if since is not None and since < until
    ]


def _length(start: float, end: float | None) -> str:
    return "" if end is None else clock_text(max(0.0, end - start))


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
    mean = _mean(gpu.samples, lambda sample: sample.busy)
    return Chart(
        name=f"job {job.report.number}, {gpu.node}, {gpu.uuid}",
        busy=_line(gpu.samples, axis, lambda sample: sample.busy, 100),
        memory=_line(gpu.samples, axis, lambda sample: sample.used, gpu.memory or 1),
        mean=percent_text(None if mean is None else mean / 100),
        most=_most_memory(used, gpu.memory),
    )


def _most_memory(used: Sequence[int], memory: int) -> str:
    if not used:
        return "unknown"
    return f"{measured_size_text(max(used))} of {measured_size_text(memory)}"


def _line(
    samples: Sequence[Sample],
    axis: Axis,
    value: Callable[[Sample], float | None],
    most: float,
) -> str:
    """Return the points of a line of mean values."""
    size = max(1, -(-len(samples) // MOST_POINTS))
    points = []
    for first in range(0, len(samples), size):
        some = samples[first : first + size]
        mean = _mean(some, value)
        if mean is not None:
            y = HEIGHT * (1 - min(1.0, mean / most))
            points.append(f"{axis.x(some[-1].time):.1f},{y:.1f}")
    return " ".join(points)


def _mean(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """Return the mean, weighted by the times for which the samples stand."""
    pairs = [(one.seconds, found) for one in samples if (found := value(one)) is not None]
    total = sum(seconds for seconds, _ in pairs)
    return sum(seconds * found for seconds, found in pairs) / total if total else None
