"""Clusters as they change: `status` and `submit --wait`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..clusters.connect import WorkerActivity, read_activities
from ..clusters.history import with_samples
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.logs import LogFollower, last_output
from ..clusters.monitor import ClusterMonitor, with_log
from ..clusters.report import ClusterReport
from ..errors import GpujobsError, JobFailedError
from ..schedulers import JobState
from ..text import clock_text
from . import display, live
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

    def print_once(self, *, as_json: bool, watched: bool = False) -> None:
        """Query the clusters and print them; ``watched``: as `watch` shows them."""
        self._query()
        if as_json:
            echo(display.status_json([_with_details(report) for report in self._reports]))
        elif text := self._text(watched=watched):
            echo(text)
        else:
            progress.write(_NONE_ACTIVE)

    def watch(self, *, as_json: bool) -> None:
        """Show the clusters every few seconds until those that were named have ended."""
        console = live.terminal(sys.stdout)
        if as_json or console is None:
            for _ in self._refreshes():
                self.print_once(as_json=as_json, watched=True)
            return
        with live.area(console) as area:
            for _ in self._refreshes():
                self._query()
                area.update(live.styled(self._text(watched=True) or _NONE_ACTIVE), refresh=True)

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

    def _text(self, *, watched: bool) -> str:
        """Return the clusters as text, "" if there are none."""
        if not self._reports:
            return ""
        if not self._cluster_ids:
            return display.status_table(self._reports)
        details = map(_with_details, self._reports)
        return "\n".join(map(_watched_text if watched else display.status_text, details))

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


def _watched_text(report: ClusterReport) -> str:
    """Return a cluster in full, with the tasks of its workers and the last output of `run`."""
    activities: Mapping[str, WorkerActivity] = {}
    lines: list[str] = []
    if report.connected and not report.finished:
        try:
            activities = read_activities(report)
        except GpujobsError as error:
            lines = ["", f"{error}; tasks are not known"]
    if output := last_output(report.record, _OUTPUT_LINES):
        lines += display.last_lines("run", output)
    return "\n".join([display.status_text(report, activities), *lines])


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
