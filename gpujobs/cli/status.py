"""The output of `gpujobs status` and `submit --wait`: clusters as text, and as they change."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from ..clusters import cleanup
from ..clusters.clusterfolder import PresentFolders, tail
from ..clusters.connect import WorkerActivity, read_activities
from ..clusters.findings import findings
from ..clusters.history import with_samples
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.logs import LogFollower
from ..clusters.monitor import ClusterMonitor, with_log
from ..clusters.report import (
    JOB_HEADER,
    NOT_WITH_MIG,
    ClusterReport,
    ClusterState,
    JobReport,
    Json,
    WorkerGpu,
    cluster_json,
    job_cells,
    job_counts,
    job_json,
    numa_text,
)
from ..clusters.times import cluster_times, job_times
from ..errors import GpujobsError, JobFailedError
from ..injob.demand import RULES
from ..injob.names import is_slice
from ..schedulers import JobState
from ..text import age_text, clock_text, measured_size_text, note_text, plural, quoted, table
from . import live
from .live import echo, progress

if TYPE_CHECKING:
    from ..clusters.handle import ClusterHandle  # it loads Jinja


# -- clusters as text: the table, one cluster in full ----------------------------------------------
SHOWN_REASON = 20
"""Characters of a reason that are worth more than where, and when, a cluster was submitted."""
SHOWN_NAMES = 2
"""Names of missing workers that are listed before they are cut short."""
SHOWN_CPUS = 20
"""Characters of a list of CPUs before it is cut short."""
FOLDED = 4
"""Equal jobs that are one row on a terminal."""
SHOWN_LOGS = 2
"""Failed jobs whose last lines are printed."""


def status_table(reports: Sequence[ClusterReport], columns: int | None = None) -> str:
    """Return one line for each cluster; see `table`."""
    header = ("CLUSTER", "SITE", "STATE", "WORKERS", "JOBS", "SUBMITTED", "TIME", "LEFT", "")
    now = time.time()
    rows = [_cluster_row(report, now) for report in reports]
    return table(header, rows, columns, spare=("SITE", "JOBS", "SUBMITTED"), last=SHOWN_REASON)


def status_json(reports: Sequence[ClusterReport]) -> str:
    """Return all clusters as JSON."""
    now = time.time()
    document = {"version": 2, "clusters": [_cluster_json(report, now) for report in reports]}
    return json.dumps(document, indent=1)


def _cluster_json(report: ClusterReport, now: float) -> dict[str, Json]:
    def with_times(job: JobReport) -> dict[str, Json]:
        return {**job_json(job), **job_times(report, job, now).json()}

    return {**cluster_json(report, with_times), **cluster_times(report, now).json()}


def status_text(
    report: ClusterReport,
    activities: Mapping[str, WorkerActivity] | None = None,
    columns: int | None = None,
) -> str:
    """Return one cluster in full, with the last lines of the logs of failed jobs.

    ``activities``: of workers by their names, for a table of the workers instead of their GPUs.
    ``columns``: of the terminal, for which equal jobs are one row.
    """
    now = time.time()
    lines = [*_facts(report, now), "", _job_table(report, now, columns)]
    if activities is None:
        workers = _gpu_table(report, columns)
    else:
        workers = worker_table(report, activities, columns)
    if workers:
        lines += ["", workers]
    for job in [job for job in report.jobs if job.log][:SHOWN_LOGS]:
        lines += last_lines("run" if job.run_failed else f"job {job.number}", job.log)
    return "\n".join(lines)


def _job_table(report: ClusterReport, now: float, columns: int | None) -> str:
    """Return a row for each job; equal ones are folded on a terminal."""
    rows = []
    for job in report.jobs:
        *cells, remarks = job_cells(job)
        times = job_times(report, job, now)
        rows.append((*cells, _age(times.elapsed), _age(times.left), remarks))
    if columns is not None:
        rows = folded(rows)
    return table((*JOB_HEADER[:-1], "TIME", "LEFT", ""), rows, columns, spare=("GPUS", "WORKERS"))


def folded(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows of jobs, in which one stands for `FOLDED` or more that follow each other.

    Those differ in their numbers and ids only: ``2..84`` are their numbers, and ``83 jobs`` is the
    first remark.
    """
    found: list[tuple[str, ...]] = []
    for _, group in groupby(rows, key=lambda row: row[2:]):
        equal = list(group)
        if len(equal) < FOLDED:
            found += equal
            continue
        first, last = equal[0], equal[-1]
        remarks = ", ".join(filter(None, (plural(len(equal), "job"), first[-1])))
        ids = first[1] if first[1] == last[1] else f"{first[1]}..{last[1]}"
        found.append((f"{first[0]}..{last[0]}", ids, *first[2:-1], remarks))
    return found


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else age_text(seconds)


def clock_of(moment: float, now: float) -> str:
    """Return a moment by the clock here: ``14:05`` of today, ``11-25 14:05``, or ``2025-11-25``."""
    found, today = time.localtime(moment), time.localtime(now)
    if found.tm_year != today.tm_year:
        return time.strftime("%Y-%m-%d", found)
    return time.strftime("%H:%M" if found.tm_yday == today.tm_yday else "%m-%d %H:%M", found)


def last_lines(name: str, log: Iterable[str]) -> list[str]:
    """Return the last lines of a log below its name and an empty line."""
    return ["", f"last lines of {name}:", *quoted(log)]


def summary(report: ClusterReport) -> str:
    """Return in one line why a cluster is in its state."""
    if report.finished and report.active:
        parts = [report.reason or "run: is done"]
        if ending := sum(job.active for job in report.jobs):
            parts.append(f"{plural(ending, 'job')} still ending")
        if held := len(report.held):
            parts.append(
                f"{plural(held, 'job')} held in the queue: gpujobs cancel {report.record.argument}"
            )
        return "; ".join(parts)
    missing = report.record.workers - report.connected
    if report.state is ClusterState.RUNNING and not report.reason and missing > 0:
        return f"{missing} missing"
    return report.reason


def _cluster_row(report: ClusterReport, now: float) -> tuple[str, ...]:
    record, times = report.record, cluster_times(report, now)
    return (
        record.id,
        record.site,
        report.state,
        "-" if report.finished else f"{report.connected}/{record.workers}",
        job_counts(report.jobs) or "-",
        clock_of(record.created, now),
        _age(times.elapsed),
        _age(times.left),
        "; ".join(filter(None, (*report.folder.damaged[:1], summary(report)))),
    )


def _facts(report: ClusterReport, now: float) -> Iterator[str]:
    record = report.record
    title = (f"{record.id} on {record.site}", report.state.value, summary(report))
    yield ": ".join(part for part in title if part)
    yield f"  time     {', '.join(_times(report, now))}"
    if not report.finished:
        yield from _connections(report)
    if record.attempts > 1:
        yield f"  attempt  {report.attempt} of {record.attempts}"
    if report.exit_code is not None:
        yield f"  exit     {report.exit_code}"
    if report.cure:
        yield f"  cure     {report.cure}"
    if record.run:
        yield f"  run      {shlex.join(record.run)}"
    if report.folder.dask.address and not report.finished:
        yield f"  dask     {report.folder.dask.address}"
    if report.ends_at:
        clock = time.strftime("%H:%M:%S", time.localtime(report.ends_at))
        condition = RULES.get(report.folder.dask.ends_by, "without work")  # of a newer version
        yield f"  ends     at {clock}, if it stays {condition}"
    if rates := report.folder.transport.text():
        yield f"  network  {rates}"
    for note in report.notes:
        kind, _, text = note_text(note).partition(": ")
        yield f"  {kind:<8} {text}"


def _times(report: ClusterReport, now: float) -> Iterator[str]:
    times = cluster_times(report, now)
    yield f"submitted {clock_of(report.record.created, now)}"
    if times.elapsed is not None:
        yield f"{'ran' if report.finished else 'running for'} {age_text(times.elapsed)}"
    if times.left is not None:
        yield f"{age_text(times.left)} of the walltime left"


def _connections(report: ClusterReport) -> Iterator[str]:
    connected, missing = report.connected, _missing_workers(report)
    yield f"  workers  {connected} of {report.record.workers} connected{missing}"
    for group in report.groups:
        yield f"  {group.name:<8} {group.connected} of {group.wanted} connected"
    sharing = Counter(gpu.uuid for job in report.jobs for gpu in job.gpus if gpu.mps)
    if sharing:
        workers = plural(max(sharing.values()), "worker")
        yield f"  MPS      up to {workers} on a GPU use it at the same time"


def _missing_workers(report: ClusterReport) -> str:
    if not report.connected:
        return ""
    staying = [job for job in report.current_jobs if job.number not in report.record.removed]
    names = [name for job in staying for name in job.workers if name not in job.connected]
    if not names:
        return ""
    if len(names) > SHOWN_NAMES:
        names = [*names[:SHOWN_NAMES], "…"]
    return f"; missing: {', '.join(names)}"


def _gpu_table(report: ClusterReport, columns: int | None) -> str:
    """Return the connected workers with their GPUs; "" if there are none."""
    gpus = [gpu for job in report.jobs for gpu in job.gpus]
    with_gpus = {gpu.worker for gpu in gpus}
    for job in report.jobs:
        others = (name for name in job.connected if name not in with_gpus)
        gpus += (WorkerGpu(name, job.node or "-", "-", None, None) for name in others)
    if report.finished or not gpus:
        return ""
    rows = [_gpu_row(gpu) for gpu in sorted(gpus, key=lambda gpu: gpu.worker)]
    header = ("WORKER", "NODE", "GPU", "UUID", "MEMORY", "BUSY", "USED", "CPUS", "NUMA")
    return table(header, rows, columns, spare=("UUID", "CPUS", "MEMORY", "NUMA"))


def _gpu_row(gpu: WorkerGpu) -> tuple[str, ...]:
    busy = _busy([gpu])
    memory, used = _memory(gpu.memory or None), _memory(gpu.used)
    cpus, numa = gpu.binding.get("cpus") or "-", numa_text(gpu.binding)
    if len(cpus) > SHOWN_CPUS:
        cpus = f"{cpus[:SHOWN_CPUS]}…"
    return gpu.worker, gpu.node, gpu.model or "-", gpu.uuid, memory, busy, used, cpus, numa


def _busy(gpus: Sequence[WorkerGpu]) -> str:
    """Return the mean of how busy the GPUs were; NVML does not know it of MIG slices."""
    busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
    if not busy:
        return NOT_WITH_MIG if is_slice(gpus[0].uuid) else "-"
    return f"{sum(busy) / len(busy):.0f} %"


def _memory(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else measured_size_text(n_bytes)


def worker_table(
    report: ClusterReport,
    activities: Mapping[str, WorkerActivity],
    columns: int | None = None,
) -> str:
    """Return a row for each connected worker, "" if there are none; see `status_text`."""
    if report.finished or not report.connected:
        return ""
    rows = [
        (
            name,
            job.node or "-",
            *_activity_cells(activities.get(name)),
            *_gpu_cells([gpu for gpu in job.gpus if gpu.worker == name]),
        )
        for job in report.jobs
        for name in job.connected
    ]
    header = ("WORKER", "NODE", "RUNNING", "WAITING", "CPU", "MEMORY", "GPU", "BUSY", "USED")
    return table(header, rows, columns, spare=("GPU", "NODE", "CPU"))


def _activity_cells(found: WorkerActivity | None) -> tuple[str, str, str, str]:
    if found is None:
        return "-", "-", "-", "-"
    memory = measured_size_text(found.memory)
    if found.memory_limit:
        memory = f"{memory} of {measured_size_text(found.memory_limit)}"
    return str(found.executing), str(found.waiting), f"{found.cpu:.0f} %", memory


def _gpu_cells(gpus: Sequence[WorkerGpu]) -> tuple[str, str, str]:
    """Return the GPUs of one worker in one row: the mean of use, the sum of memory."""
    if not gpus:
        return "-", "-", "-"
    model = gpus[0].model or "GPU"
    if len(gpus) > 1:
        model = f"{len(gpus)} x {model}"
    used = [gpu.used for gpu in gpus if gpu.used is not None]
    return model, _busy(gpus), _memory(sum(used) if used else None)


# -- `status` --------------------------------------------------------------------------------------
IDLE_REFRESH = 5.0
"""Seconds between two refreshes while no cluster is shown."""
_OUTPUT_LINES = 5
_NONE_ACTIVE = "no active clusters; `gpujobs status --all` lists ended ones"


def choose(ledger: Ledger, cluster_ids: Sequence[str]) -> list[ClusterRecord]:
    """Return the records of ``cluster_ids``; without any, those not finished.

    Raises NoSuchClusterError.
    """
    if cluster_ids:
        return [ledger.get(cluster_id) for cluster_id in cluster_ids]
    return [record for record in ledger.all() if not record.finished]


class StatusView:
    """The clusters that `gpujobs status` shows."""

    def __init__(self, ledger: Ledger, cluster_ids: Sequence[str], *, everything: bool) -> None:
        self._ledger = ledger
        self._cluster_ids = cluster_ids
        self._everything = everything
        self._known: list[ClusterRecord] = []
        """All records, if no cluster was named."""
        self._folders = PresentFolders()
        """Facts about their folders at this look."""
        self._records = self._choose()
        """Of the clusters to show, at this look."""
        self._monitor = self._new_monitor()
        self._reports: list[ClusterReport] = []

    def print_once(self, *, as_json: bool, watched: bool = False) -> None:
        """Query the clusters and print them; ``watched``: as `watch` shows them."""
        self._query()
        if as_json:
            echo(status_json([_with_details(report) for report in self._reports]))
        elif text := self._text(watched=watched):
            echo(text, coloured=True)
        else:
            progress.write(_NONE_ACTIVE)
        named = as_json or watched or self._cluster_ids
        if not named and (left := cleanup.note(self._known, self._folders)):
            progress.write(f"note: {left}")

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
        self._reports = self._monitor.reports(records=self._records, folders=self._folders)
        if not self._cluster_ids and not self._everything:
            self._reports = [report for report in self._reports if not _is_final(report)]
        if not self._cluster_ids:  # what `doctor` has started is no cluster of the user's
            self._reports = [
                one for one in self._reports if not (one.record.trial and _is_final(one))
            ]

    def _choose(self) -> list[ClusterRecord]:
        """Return the records of the named clusters, else of those not finished, or of all.

        Raises NoSuchClusterError.
        """
        if self._cluster_ids:
            return choose(self._ledger, self._cluster_ids)
        if self._everything:
            self._known = self._ledger.without_removed(self._folders)
            return self._known
        self._known = self._ledger.all()
        return [record for record in self._known if not record.finished]

    def _text(self, *, watched: bool) -> str:
        """Return the clusters as text, "" if there are none."""
        if not self._reports:
            return ""
        columns = live.columns()
        if not self._cluster_ids:
            return status_table(self._reports, columns)
        details = map(_with_details, self._reports)
        if watched:
            return "\n".join(_watched_text(report, columns) for report in details)
        return "\n".join(status_text(report, columns=columns) for report in details)

    def _sleep(self) -> None:
        """Sleep until the next refresh, and find the clusters that were submitted meanwhile."""
        polls = [float(report.record.poll) for report in self._reports]
        refresh = max(polls, default=IDLE_REFRESH)
        if any(report.finished for report in self._reports):
            self._monitor.query_soon(refresh)  # its jobs are about to exit
        time.sleep(refresh)
        self._folders = PresentFolders()
        self._records = self._choose()
        watched = [record.id for record in self._monitor.records]
        if [record.id for record in self._records] != watched:
            self._monitor = self._new_monitor()

    def _new_monitor(self) -> ClusterMonitor:
        """Return a monitor; a named cluster is shown as its folder is now, also after its end."""
        last_words = not self._cluster_ids
        return ClusterMonitor(self._records, self._ledger, last_words=last_words, skip_ended=True)


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


def _watched_text(report: ClusterReport, columns: int | None) -> str:
    """Return a cluster in full, with the tasks of its workers and the last output of `run`."""
    activities: Mapping[str, WorkerActivity] = {}
    lines: list[str] = []
    if report.connected and not report.finished:
        try:
            activities = read_activities(report)
        except GpujobsError as error:
            lines = ["", f"{error}; tasks are not known"]
    if output := tail(report.record.path, "run.log", _OUTPUT_LINES):
        lines += last_lines("run", output)
    return "\n".join([status_text(report, activities, columns), *lines])


# -- wait for a cluster, as `gpujobs submit --wait` does -------------------------------------------
def wait_for_cluster(cluster: ClusterHandle, write: Callable[[str], None] = progress.write) -> None:
    """Show progress, and ``write`` the output of `run`, until `run` has ended.

    Without `run`, until all workers are connected. Raises JobFailedError if the cluster fails or is
    cancelled; KeyboardInterrupt leaves the cluster running.
    """
    started = time.monotonic()
    output = LogFollower(lambda: [cluster.record.path / "logs" / "run.log"])
    shown: set[str] = set()

    def clock() -> str:
        return clock_text(time.monotonic() - started)

    def show(report: ClusterReport) -> None:
        for note in (*findings(report.folder), *report.gone.values()):
            if note not in shown:
                shown.add(note)
                progress.write(f"note: {note}")
        if not report.finished:
            progress.show_report(report, clock())
        for line in output.new_lines(last=report.finished and not report.active):
            progress.clear()
            write(line)

    try:
        report = cluster.wait(watch=show)
    except JobFailedError:
        _show_usage(cluster)
        raise
    finally:
        progress.clear()
        for line in output.new_lines(last=True):
            write(line)
    if report.finished:
        progress.write(f"{cluster.id} is done after {clock()}")
        if report.reason:
            progress.write(f"note: {report.reason}")
        _show_usage(cluster)
        return
    progress.write(
        f"{_all_workers(report.target)} connected; "
        f"gpujobs connect {cluster.record.argument} shows how to use them"
    )


def _all_workers(number: int) -> str:
    return "the worker is" if number == 1 else f"all {number} workers are"


def _show_usage(cluster: ClusterHandle) -> None:
    from .usage_text import advice_lines, usage_line

    usage = cluster.usage()
    for line in filter(None, (usage_line(usage), *advice_lines(usage))):
        progress.write(line)
