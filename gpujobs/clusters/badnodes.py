"""Nodes on which jobs have failed, in a file beside the records: new jobs avoid them."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..injob.folder import DamagedError, read_lines
from ..schedulers import JobState
from .clusterfolder import best_effort, version_of, write_atomically
from .ledger import Ledger
from .report import ClusterReport, JobReport

FILE = "bad-nodes"
"""In the folder of the records: a line of JSON for each failure."""
BAD = 6 * 3600.0
"""Seconds for which a node is bad after its last failure."""
_KEPT = 24 * 3600.0
_SOON = 120.0
"""Seconds after its start in which a job is lost early."""
_HARDWARE = re.compile(
    r"NVML(?!Error_(LibraryNotFound|DriverNotLoaded|NotFound)| Shared Library Not Found)"
    r"|GPUs (were requested, but|visible)|\bECC\b|remapped rows"
    r"|Xid (?!(13|31|43|45)\b)|launch failed"
    r"|cudaError|CUDA_ERROR|CUDARuntimeError|CUDA (driver|error|unknown error)"
)
"""Reasons of jobs that concern the node rather than the program, which these Xids are of.

A missing driver is none: the job may have requested no GPU, or its container may hide the driver.
"""
_FAILING_GPU = re.compile(r"GpuIsLost|GPUs visible|\bECC\b|remapped rows|Xid (?!(13|31|43|45)\b)")
"""Reasons of jobs by which a GPU of the node fails; others may concern the start of a job only."""
_NODE = re.compile(r"[A-Za-z0-9][\w.-]*")
_ON_NODE = re.compile(r"^(?:worker |rank )?\S+ on ([A-Za-z0-9][\w.-]*)(?:: | ended )")
"""At the beginning of reasons that a job writes."""
_PATH = re.compile(r"(?<![\w:])/[^\s:,)]+")
"""A path, which may contain the name of a user."""


@dataclass(frozen=True)
class NodeFailure:
    """A job that failed on a node. ``sure``: one is enough, else the node fails with the second."""

    time: float
    """Seconds since the epoch."""
    site: str
    node: str
    cluster: str
    job: str
    """The batch scheduler's id."""
    began: float
    reason: str
    sure: bool


def failures(report: ClusterReport, now: float) -> Iterator[NodeFailure]:
    """Yield the failures of nodes in a report.

    If no worker of its group has connected elsewhere, only a reason about hardware blames a node.
    """
    for job in report.jobs:
        sure, node = _blames_node(report, job, now), _failed_node(job)
        if sure is not None and _NODE.fullmatch(node):
            reason = _PATH.sub("(path)", job.reason or job.state.value)
            at, record = min(now, report.folder.end_time(now)), report.record
            began = job.began or 0.0
            yield NodeFailure(at, record.site, node, record.id, job.id, began, reason, sure)


def _failed_node(job: JobReport) -> str:
    """Return the node of a job: of several, the one that the reason names."""
    named = _ON_NODE.search(job.reason)
    if named and named[1].partition(".")[0] != job.node.partition(".")[0]:
        return named[1]
    return job.node


def _blames_node(report: ClusterReport, job: JobReport, now: float) -> bool | None:
    """Return `NodeFailure.sure` of an ended job; None if its node is not to blame."""
    folder = report.folder
    if job.active or job.run_failed or job.number in report.record.removed:
        return None
    if job.in_vain and _HARDWARE.search(job.reason):
        return True
    owner_gone = report.finished and report.record.replaces == "owner"  # its jobs end with it
    if folder.ended is not None or owner_gone:
        return None
    if job.state in (JobState.CANCELLED, JobState.PREEMPTED):
        return None
    if job.in_vain and job.has_run:
        others = (one for one in report.jobs if one.group == job.group and one.node != job.node)
        return any(folder.dask.seen.intersection(one.workers) for one in others) or None
    gone = max((folder.dask.gone.get(name, 0.0) for name in job.workers), default=0.0) or now
    early = job.began is not None and gone - job.began < _SOON
    return False if early and job.state in (JobState.FAILED, JobState.NODE_FAIL) else None


def bad_nodes(found: Iterable[NodeFailure], site: str, now: float) -> dict[str, NodeFailure]:
    """Return the bad nodes of a site, the last failure of each; newest first."""
    fresh = [one for one in found if one.site == site]
    fresh = list(filter(lambda one: abs(now - one.time) < BAD, fresh))  # clocks differ
    weights: Counter[str] = Counter()
    for one in fresh:
        weights[one.node] += 1 + one.sure
    last = {one.node: one for one in fresh if weights[one.node] >= 2}
    return dict(sorted(last.items(), key=lambda item: -item[1].time))


def read(ledger: Ledger) -> list[NodeFailure]:
    """Return all failures that are kept."""
    with contextlib.suppress(DamagedError):
        lines = read_lines(ledger.folder / FILE, NodeFailure)
        return [one for one in lines if _NODE.fullmatch(one.node)]
    return []


class FailuresReader:
    """Reads the failures again and again: the file is opened only if it has changed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._version: tuple[int, int, int] | None = None
        self._found: list[NodeFailure] = []

    def read(self) -> list[NodeFailure]:
        """Return all failures that are kept."""
        try:
            status = (self._ledger.folder / FILE).lstat()
        except OSError:
            return []
        version = version_of(status)
        if version != self._version:
            self._version, self._found = version, read(self._ledger)
        return self._found


def turned_bad(
    jobs: Iterable[JobReport], found: Iterable[NodeFailure], cluster_id: str
) -> dict[int, NodeFailure]:
    """Return the jobs, by number, on whose nodes a GPU was seen to fail since they started.

    Another job of the cluster saw it, so that new ones avoid the node. A job that started later did
    so although the node was known to be bad: it stays.
    """
    own = [one for one in found if one.cluster == cluster_id and one.sure]
    failing = [one for one in own if _FAILING_GPU.search(one.reason)]
    bad: dict[int, NodeFailure] = {}
    for job in jobs:
        nodes = job.node.split(",")
        for one in failing:
            if one.node in nodes and job.began is not None and one.time > job.began:
                bad.setdefault(job.number, one)
    return bad


def note(reports: Iterable[ClusterReport], ledger: Ledger, now: float) -> list[ClusterReport]:
    """Write new failures into the file; return the reports with the bad nodes of each cluster."""
    known: list[NodeFailure] | None = None
    noted = []
    for report in reports:
        if found := list(failures(report, now)):
            known = _with_new(report, found, read(ledger) if known is None else known, ledger, now)
            report = _with_bad_nodes(report, found, known, now)
        noted.append(report)
    return noted


def _with_new(
    report: ClusterReport,
    found: Iterable[NodeFailure],
    known: list[NodeFailure],
    ledger: Ledger,
    now: float,
) -> list[NodeFailure]:
    """Return the failures that are ``known`` now, after those of a report were written."""
    keys = {(one.cluster, one.job, one.began) for one in known}
    new = [one for one in found if (one.cluster, one.job, one.began) not in keys]
    if new and not report.record.finished:  # else they were noted when it ended
        known = [*(one for one in known if abs(now - one.time) < _KEPT), *new]
        with best_effort():
            lines = (f"{json.dumps(asdict(one))}\n" for one in known)
            write_atomically(ledger.folder / FILE, "".join(lines))
    return known


def _with_bad_nodes(
    report: ClusterReport, found: Iterable[NodeFailure], known: Iterable[NodeFailure], now: float
) -> ClusterReport:
    """Return a report with the bad nodes among those of its failures, ``found``."""
    bad = bad_nodes(known, report.record.site, now)
    own = sorted(bad.keys() & {one.node for one in found})
    texts = (f"node {node} is bad for six hours: {bad[node].reason}" for node in own)
    return replace(report, bad_nodes=tuple(texts))


def rows(found: Sequence[NodeFailure], now: float) -> list[dict[str, Any]]:
    """Return the nodes with failures for `gpujobs nodes`, the newest first."""
    last = {(one.site, one.node): one for one in sorted(found, key=lambda one: one.time)}
    return [
        {
            "node": node,
            "site": site,
            "time": one.time,
            "bad": node in bad_nodes(found, site, now),
            "jobs": [other.job for other in found if (other.site, other.node) == (site, node)],
            "reason": one.reason,
        }
        for (site, node), one in sorted(last.items(), key=lambda item: -item[1].time)
    ]
