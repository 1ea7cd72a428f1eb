"""Wait for a cluster, as `gpujobs submit --wait` does."""

from __future__ import annotations

import time

from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.logs import LogFollower
from ..clusters.monitor import ClusterMonitor
from ..clusters.report import ClusterReport, ClusterState
from ..errors import JobFailedError
from ..text import clock_text
from .display import progress_text
from .messages import progress

REFRESH = 0.5
"""Seconds between two reports."""
EXIT_TIMEOUT = 15.0
"""Seconds for which the jobs of a cluster that has ended may take to exit."""


def wait_for_cluster(record: ClusterRecord, ledger: Ledger) -> None:
    """Show progress and the output of `run` on stderr until `run` has ended.

    Without `run`, until all workers are connected. Raises JobFailedError if the cluster fails or is
    cancelled; KeyboardInterrupt leaves the cluster running.
    """
    waiting = _Wait(record, ledger)
    try:
        report = waiting.until_done()
    except KeyboardInterrupt:
        progress.write(f"the cluster continues; to end it: gpujobs cancel {record.id}")
        raise
    if not report.finished:
        progress.write(
            f"all {record.workers} workers are connected; "
            f"gpujobs connect {record.id} shows how to use them"
        )
        return
    report = waiting.until_jobs_exit()
    progress.clear()
    if report.state is not ClusterState.DONE:
        raise JobFailedError(
            f"{record.id}: {report.reason}",
            hint=f"gpujobs status {record.id}",
            code=report.exit_code,
        )
    progress.write(f"{record.id} is done after {waiting.clock()}")


class _Wait:
    """The monitor, the output and the clock of one wait."""

    def __init__(self, record: ClusterRecord, ledger: Ledger) -> None:
        self._record = record
        self._monitor = ClusterMonitor([record], ledger)
        self._output = LogFollower(lambda: [record.path / "logs" / "run.log"])
        self._started = time.monotonic()

    def clock(self) -> str:
        """Return the time since the start of the wait."""
        return clock_text(time.monotonic() - self._started)

    def until_done(self) -> ClusterReport:
        """Wait for the end of the cluster, or for all workers of one without `run`."""
        while True:
            report = self._monitor.report()
            self._write_output(last=False)
            ready = not self._record.run and report.complete
            if report.finished or ready:
                return report
            progress.show(progress_text(report), self.clock())
            time.sleep(REFRESH)

    def until_jobs_exit(self) -> ClusterReport:
        """Wait for the last output and the exit codes of the jobs."""
        report = self._monitor.wait_until_inactive(EXIT_TIMEOUT)
        self._write_output(last=True)
        return report

    def _write_output(self, *, last: bool) -> None:
        for line in self._output.new_lines(last=last):
            progress.write(line)
