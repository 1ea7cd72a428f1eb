"""Wait for a cluster, as `gpujobs submit --wait` does."""

from __future__ import annotations

import time

from ..clusters.handle import ClusterHandle
from ..clusters.logs import LogFollower
from ..clusters.report import ClusterReport
from ..errors import JobFailedError
from ..text import clock_text
from .messages import progress
from .usage_text import usage_line


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
