"""Clusters as they change: `status`, `submit --wait`, `top`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from ..clusters.connect import ActivityReader, WorkerActivity
from ..clusters.history import with_samples
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.logs import LogFollower, last_output
from ..clusters.monitor import ClusterMonitor, with_log
from ..clusters.report import ClusterReport, JobReport, WorkerGpu
from ..errors import GpujobsError, JobFailedError
from ..schedulers import JobState
from ..text import clock_text, measured_size_text, table
from . import display, live
from .display import progress_text
from .live import echo, progress
from .usage_text import usage_line

if TYPE_CHECKING:
    from ..clusters.handle import ClusterHandle  # it loads Jinja

IDLE_REFRESH = 5.0
"""Seconds between two refreshes while no cluster is shown."""
_OUTPUT_LINES = 5
_NONE_ACTIVE = "no active clusters; `gpujobs status --all` lists ended ones"


def choose(ledger: Ledger, cluster_ids: Sequence[str], *, everything: bool) -> list[ClusterRecord]:
    """Return the records of ``cluster_ids``; without any, those not finished, or ``everything``.

    Raises NoSuchClusterError.
    """
    if cluster_ids:
        return [ledger.get(cluster_id) for cluster_id in cluster_ids]
    if everything:
        ledger.forget_removed()
    return [record for record in ledger.all() if everything or not record.finished]


class StatusView:
    """The clusters that `gpujobs status` shows."""

    def __init__(self, ledger: Ledger, cluster_ids: Sequence[str], *, everything: bool) -> None:
        self._ledger = ledger
        self._cluster_ids = cluster_ids
        self._everything = everything
        self._monitor = ClusterMonitor(self._choose(), ledger)
        self._reports: list[ClusterReport] = []

    def print_once(self, *, as_json: bool) -> None:
        """Query the clusters and print them."""
        self._query()
        if as_json:
            echo(display.status_json([_with_details(report) for report in self._reports]))
        elif text := self._text():
            echo(text)
        else:
            progress.write(_NONE_ACTIVE)

    def watch(self, *, as_json: bool) -> None:
        """Show the clusters every few seconds until those that were named have ended."""
        console = live.terminal(sys.stdout)
        if as_json or console is None:
            for _ in self._refreshes():
                self.print_once(as_json=as_json)
            return
        with live.area(console) as area:
            for _ in self._refreshes():
                self._query()
                area.update(live.styled(self._text(output=True) or _NONE_ACTIVE), refresh=True)

    def _refreshes(self) -> Iterator[None]:
        yield
        while not self._cluster_ids or not all(map(_is_final, self._reports)):
            self._sleep()
            yield

    def _query(self) -> None:
        self._reports = self._monitor.reports()
        if not self._cluster_ids and not self._everything:
            self._reports = [report for report in self._reports if not _is_final(report)]

    def _choose(self) -> list[ClusterRecord]:
        return choose(self._ledger, self._cluster_ids, everything=self._everything)

    def _text(self, *, output: bool = False) -> str:
        """Return the clusters as text, "" if there are none; ``output``: with the last of `run`."""
        if not self._reports:
            return ""
        if not self._cluster_ids:
            return display.status_table(self._reports)
        parts: list[str] = []
        for report in self._reports:
            parts.append(display.status_text(_with_details(report)))
            if output and (lines := last_output(report.record, _OUTPUT_LINES)):
                parts += display.last_lines("run", lines)
        return "\n".join(parts)

    def _sleep(self) -> None:
        """Sleep until the next refresh, and find the clusters that were submitted meanwhile."""
        polls = [float(report.record.poll) for report in self._reports]
        refresh = max(polls, default=IDLE_REFRESH)
        if any(report.finished for report in self._reports):
            self._monitor.query_soon(refresh)  # its jobs are about to exit
        time.sleep(refresh)
        records = self._choose()
        if [record.id for record in records] != [record.id for record in self._monitor.records]:
            self._monitor = ClusterMonitor(records, self._ledger)


def _is_final(report: ClusterReport) -> bool:
    return report.finished and not report.active


def _with_details(report: ClusterReport) -> ClusterReport:
    """Return the report with the logs of failed jobs, and the samples of the GPUs of others."""
    jobs = list(report.jobs)
    for index, job in enumerate(jobs):
        if job.state in (JobState.FAILED, JobState.OUT_OF_MEMORY):
            jobs[index] = with_log(report.record, job)
        else:
            jobs[index] = with_samples(report.record, job, time.time())
    return replace(report, jobs=tuple(jobs))


# -- wait for a cluster, as `gpujobs submit --wait` does -------------------------------------------


def wait_for_cluster(cluster: ClusterHandle) -> None:
    """Show progress and the output of `run` on stderr until `run` has ended.

    Without `run`, until all workers are connected. Raises JobFailedError if the cluster fails or is
    cancelled; KeyboardInterrupt leaves the cluster running.
    """
    started = time.monotonic()
    output = LogFollower(lambda: [cluster.record.path / "logs" / "run.log"])
    shown: set[str] = set()

    def clock() -> str:
        return clock_text(time.monotonic() - started)

    def show(report: ClusterReport) -> None:
        for note in (*report.folder.findings, *report.gone.values()):
            if note not in shown:
                shown.add(note)
                progress.write(f"note: {note}")
        if not report.finished:
            progress.show_report(report, clock())
        for line in output.new_lines(last=report.finished and not report.active):
            progress.write(line)

    try:
        report = cluster.wait(watch=show)
    except KeyboardInterrupt:
        progress.write(
            f"the cluster continues; to follow it: gpujobs logs -f {cluster.id}, "
            f"to end it: gpujobs cancel {cluster.id}"
        )
        raise
    except JobFailedError:
        _show_usage(cluster)
        raise
    finally:
        for line in output.new_lines(last=True):
            progress.write(line)
        progress.clear()
    if report.finished:
        progress.write(f"{cluster.id} is done after {clock()}")
        if report.reason:
            progress.write(f"note: {report.reason}")
        _show_usage(cluster)
        return
    progress.write(
        f"all {report.target} workers are connected; "
        f"gpujobs connect {cluster.id} shows how to use them"
    )


def _show_usage(cluster: ClusterHandle) -> None:
    if line := usage_line(cluster.usage()):
        progress.write(line)


# -- `gpujobs top`: a table of what the workers of one cluster do now ------------------------------


_HEADER = ("WORKER", "NODE", "RUNNING", "WAITING", "CPU", "MEMORY", "GPU", "BUSY", "USED")


def show(record: ClusterRecord, ledger: Ledger, *, interval: float, once: bool) -> None:
    """Print the table; on a terminal, every ``interval`` seconds until the cluster ends."""
    monitor = ClusterMonitor([record], ledger)
    console = live.terminal(sys.stdout)
    with ActivityReader() as reader:
        if once or console is None:
            echo(_text(monitor.report(), reader))
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
