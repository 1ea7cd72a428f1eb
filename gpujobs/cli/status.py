"""The output of `gpujobs status`, once or again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..clusters.history import with_samples
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.logs import last_output
from ..clusters.monitor import ClusterMonitor, with_log
from ..clusters.report import ClusterReport
from ..schedulers import JobState
from . import display, live, messages

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
            messages.echo(display.status_json([_with_details(report) for report in self._reports]))
        elif text := self._text():
            messages.echo(text)
        else:
            messages.progress.write(_NONE_ACTIVE)

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
                parts += ["", "last lines of run:", *(f"  | {line}" for line in lines)]
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
