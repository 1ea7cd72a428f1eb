"""The report on a cluster and its jobs: one vocabulary, JSON and table for all readers.

`judge.judge` makes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from ..injob.folder import Binding, EndKind
from ..injob.names import RUN
from ..injob.transport import Choice
from ..schedulers import JobId, JobState
from ..text import StrEnum, measured_size_text
from .findings import notes
from .folderstate import FolderState
from .ledger import ClusterRecord

if TYPE_CHECKING:
    from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class ClusterState(StrEnum):
    """The state of a whole cluster."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class JobPhase(StrEnum):
    """How far a job has come. The JSON has other words for some: see `json_phase`."""

    WAITING = "WAITING"
    """The batch scheduler accepted it, and has not started it."""
    STARTING = "STARTING"
    """It runs, and some of its workers have not connected yet."""
    RUNNING = "RUNNING"
    """All its workers are connected."""
    AWAY = "AWAY"
    """Its workers were connected and are not any more, or are suspended with it."""
    LEAVING = "LEAVING"
    """It was asked to leave, and counts towards no target."""
    ENDED = "ENDED"


NOT_WITH_MIG = "not available for MIG"
"""How busy a slice is, which NVML does not know."""


@dataclass(frozen=True)
class WorkerGpu:
    """A GPU of a connected worker; ``memory`` is in bytes."""

    worker: str
    node: str
    uuid: str
    model: str | None
    memory: int | None
    busy: float | None = None
    """Percent, in the last sample; None if it is not known, or not asked for."""
    used: int | None = None
    """Bytes of memory in use, like ``busy``."""
    binding: Binding = field(default_factory=Binding, hash=False)
    """The CPUs of the worker."""
    mps: bool = False
    """Whether several workers use the GPU at the same time, through CUDA's MPS."""


@dataclass(frozen=True)
class JobReport:
    """One job."""

    number: int
    job: JobId
    phase: JobPhase
    state: JobState
    native: str = ""
    """The batch scheduler's own word for the state."""
    reason: str = ""
    exit_code: int | None = None
    node: str = ""
    began: float | None = None
    """When it last started, in epoch seconds of its node; None: it has not."""
    has_run: bool = False
    """Whether its script has ever run."""
    expected_start: str = ""
    """When a waiting job is expected to start, if the batch scheduler says so."""
    head: bool = False
    attempt: int = 1
    """Which start of the cluster it is for."""
    group: str = ""
    """Of its workers; "" if the cluster has no groups, or for the head's own job."""
    workers: tuple[str, ...] = ()
    """Names of its workers."""
    connected: tuple[str, ...] = ()
    gpus: tuple[WorkerGpu, ...] = ()
    """Of all connected workers: several of one worker, or one of several workers."""
    unseen: bool = False
    """It waits, and the batch scheduler was not queried since it accepted the job."""
    in_vain: bool = False
    """It ended, unasked, before all its workers had connected."""
    stuck: bool = False
    """It has failed, and stays in the queue until it is cancelled."""
    log: tuple[str, ...] = ()
    """The last lines of its log, if it failed."""
    id: str = ""
    """Its id in the batch scheduler's own spelling (`Scheduler.show_id`)."""

    @property
    def active(self) -> bool:
        """Whether the batch scheduler has the job, or may have it."""
        return self.state.active

    @property
    def word(self) -> str:
        """Its state for people: how far it has come, or how it ended."""
        if self.active:
            return self.phase.value
        if self.in_vain and self.state is JobState.COMPLETED:
            return JobState.FAILED.value
        return self.state.value

    @property
    def waits(self) -> bool:
        """Whether it has not started."""
        return self.phase is JobPhase.WAITING

    @property
    def suspended(self) -> bool:
        """Whether the batch scheduler has stopped it for some time."""
        return self.phase is JobPhase.AWAY and self.state is JobState.SUSPENDED

    @property
    def lacks_workers(self) -> bool:
        """Whether it runs, and workers that were connected are not any more."""
        return self.phase is JobPhase.AWAY and not self.suspended

    @property
    def in_queue(self) -> bool:
        """Whether it is active, or has failed and is stuck in the queue."""
        return self.active or self.stuck

    @property
    def failed(self) -> bool:
        """Whether it ended by an error, or has lost workers."""
        if self.in_vain or self.lacks_workers:
            return True
        return not self.active and self.state not in (JobState.COMPLETED, JobState.CANCELLED)

    @property
    def loss(self) -> str:
        """Why it brings no workers any more, as ``job 1 did not start: node2: launch failed``."""
        verb = "ended" if self.has_run else "did not start"
        return ": ".join(
            filter(None, (f"job {self.number} {verb}", self.node, self.reason or self.state.value))
        )

    @property
    def run_failed(self) -> bool:
        """Whether it is the head, and ended because `run` failed."""
        return self.head and self.reason.startswith(RUN)

    @property
    def exit_remark(self) -> str:
        """The exit code if it is not 0, as ``exit code 3``; "" if the reason contains it."""
        remark = f"exit code {self.exit_code}"
        return remark if self.exit_code and remark not in self.reason else ""

    @property
    def start_remark(self) -> str:
        """The expected start, as ``starts 2026-11-22T10:58:32``; "" if it is not known."""
        return f"starts {self.expected_start}" if self.expected_start else ""


@dataclass(frozen=True)
class ClusterReport:
    """One cluster. ``reason`` says why it is in its state, or why its jobs wait."""

    record: ClusterRecord
    state: ClusterState
    kind: EndKind | None
    reason: str
    exit_code: int | None
    jobs: tuple[JobReport, ...]
    folder: FolderState
    connected: int = 0
    """Number of connected workers."""
    attempt: int = 1
    """Which start of the cluster this is."""
    bad_nodes: tuple[str, ...] = ()
    """Bad nodes on which its jobs have failed, with the reason."""

    @property
    def active(self) -> bool:
        """Whether some job may still be there."""
        return any(job.in_queue for job in self.jobs)

    @property
    def held(self) -> list[JobReport]:
        """The failed jobs in the queue that the cluster does not wait for any more."""
        return [
            job for job in self.jobs if job.stuck and (self.finished or job.attempt < self.attempt)
        ]

    @property
    def finished(self) -> bool:
        """Whether the state is final."""
        return self.state in (ClusterState.DONE, ClusterState.FAILED, ClusterState.CANCELLED)

    @property
    def cure(self) -> str:
        """What the user can do after such an end; "" if that is not known."""
        if self.kind is EndKind.WALLTIME:
            return "a longer `walltime`, or checkpoints and `requeue`"
        return ""

    @property
    def gone(self) -> dict[int, str]:
        """Why jobs of this attempt bring no workers any more, by number."""
        return {} if self.finished else gone_jobs(self.record, self.current_jobs)

    @property
    def current_jobs(self) -> tuple[JobReport, ...]:
        """The jobs of this attempt."""
        return tuple(job for job in self.jobs if job.attempt == self.attempt)

    @property
    def run_failed(self) -> bool:
        """Whether `run` has ended with an error, which its output explains."""
        return self.kind is EndKind.FAILED and self.reason.startswith(RUN)

    @property
    def ends_at(self) -> float | None:
        """When the cluster ends if it stays without work (epoch seconds); None if it has work."""
        return None if self.finished else self.folder.dask.ends_at

    @property
    def target(self) -> int:
        """Wanted number of workers."""
        return self.record.workers

    @property
    def complete(self) -> bool:
        """Whether every group has its workers."""
        return self.connected > 0 and has_all_workers(self.record, self.jobs)

    @property
    def groups(self) -> list[GroupRow]:
        """The named groups; none if the cluster has no groups."""
        rows = zip(group_rows(self), self.record.groups)
        return [row for row, group in rows if group.name]

    @property
    def notes(self) -> list[str]:
        """Remarks for the user: of the plan, about the transport, and about groups that failed."""
        return [*self.record.notes, *notes(self.folder), *self.bad_nodes, *self.errors]

    @property
    def errors(self) -> list[str]:
        """Why groups get no more jobs."""
        return [f"no more jobs: {group.error}" for group in self.record.groups if group.error]


def connected_by_group(jobs: Iterable[JobReport]) -> Counter[str]:
    """Return how many workers of each group are connected, without those that leave."""
    counts: Counter[str] = Counter()
    for job in jobs:
        if job.phase is not JobPhase.LEAVING:
            counts[job.group] += len(job.connected)
    return counts


def has_all_workers(record: ClusterRecord, jobs: Iterable[JobReport]) -> bool:
    """Return whether as many workers of every group are connected as are wanted."""
    found = connected_by_group(jobs)
    return all(found[group.name] >= group.workers for group in record.groups)


def gone_jobs(record: ClusterRecord, jobs: Iterable[JobReport]) -> dict[int, str]:
    """Return why jobs that were not asked to leave bring no workers any more, by number."""
    return {
        job.number: job.loss
        for job in jobs
        if job.number not in record.removed
        and (job.stuck or not job.active)
        and (job.phase, job.state) != (JobPhase.ENDED, JobState.COMPLETED)
    }


def ended_message(cluster_id: str, reason: str) -> str:
    """Return the error for a cluster that has ended; without a ``reason`` its `run` is done."""
    return f"{cluster_id} has ended: {reason or 'run: has finished'}"


# -- machine-readable ------------------------------------------------------------------------------
def json_phase(job: JobReport) -> str:
    """Return the phase of a job in the words of the JSON, which are older than those of tables."""
    if job.waits:
        return "SUBMITTED" if job.unseen else "PENDING"
    if job.phase is JobPhase.AWAY:
        return "SUSPENDED" if job.suspended else "LOST"
    if job.phase is JobPhase.ENDED and job.in_vain:
        return "FAILED"
    return str(job.phase.value)


def job_json(job: JobReport) -> dict[str, Json]:
    """Return one job as JSON; the same for the command line and for Python."""
    group: dict[str, Json] = {"group": job.group} if job.group else {}
    return {
        "number": job.number,
        "attempt": job.attempt,
        **group,
        "id": job.id,
        "phase": json_phase(job),
        "state": job.state.value,
        "native": job.native,
        "reason": job.reason,
        "exit_code": job.exit_code,
        "node": job.node,
        "starts": job.expected_start,
        "head": job.head,
        "workers": list(job.workers),
        "connected": list(job.connected),
        "gpus": [asdict(gpu) for gpu in job.gpus],
        "log": list(job.log),
    }


def transport_json(transport: Choice) -> dict[str, Json]:
    """Return the protocol between dask's processes and the measured rates, in GB/s, as JSON."""
    measured: dict[str, Json] = {
        name: {"within": one.within, "between": one.between, "problem": one.problem}
        for name, one in transport.measured.items()
    }
    return {"protocol": transport.scheme, "reason": transport.reason, "measured": measured}


def cluster_json(
    report: ClusterReport, job: Callable[[JobReport], Json] = job_json
) -> dict[str, Json]:
    """Return one cluster as JSON; ``job``: how a job of it is written."""
    record, folder = report.record, report.folder
    encrypted = folder.encrypted
    if encrypted is None:
        encrypted = record.encrypted
    return {
        "id": record.id,
        "site": record.site,
        "scheduler": record.scheduler,
        "state": report.state.value,
        "kind": report.kind and report.kind.value,
        "reason": report.reason,
        "exit_code": report.exit_code,
        "workers": _workers_json(report),
        "address": folder.dask.address,
        "encrypted": encrypted,
        "transport": transport_json(folder.transport),
        "folder": record.folder,
        "created": record.created,
        "after": record.after or None,
        "attempt": report.attempt,
        "attempts": record.attempts,
        "ends_at": report.ends_at,
        "run": list(record.run),
        "notes": list(report.notes),
        "jobs": [job(one) for one in report.jobs],
    }


def _workers_json(report: ClusterReport) -> dict[str, Json]:
    """Return the workers of a cluster; those of jobs that leave do not count as connected."""
    connected = set(report.folder.dask.connected) if report.connected else set()
    for job in report.jobs:
        if job.phase is JobPhase.LEAVING:
            connected.difference_update(job.workers)
    found: dict[str, Json] = {"wanted": report.record.workers, "connected": [*sorted(connected)]}
    if report.groups:
        found["groups"] = [
            {"name": row.name, "wanted": row.wanted, "connected": row.connected}
            for row in report.groups
        ]
    return found


# -- rows of the tables of a cluster: its groups of workers, and its jobs --------------------------
HEAD_JOB = "head"
"""Name of the row of a job without workers: it runs the dask scheduler."""
ONLY_GROUP = "workers"
"""Name of the row of a cluster without groups."""
_SHOWN_REASONS = 3


@dataclass(frozen=True)
class GroupRow:
    """The workers of one group, and their jobs."""

    name: str
    wanted: int
    """Target number of workers."""
    connected: int
    jobs: tuple[str, ...]
    """Number of the other jobs in each state, as ``2 running``."""
    waiting: tuple[str, ...]
    """Number of the jobs with each reason, as ``2: Resources``."""
    failed: tuple[str, ...]
    """Like ``waiting``."""
    gpus: str
    """Of the connected workers, as ``4 A100, 160GiB``; "" if there are none."""
    memory: str
    """Limit of the host memory of the connected workers; "" if it is not known."""

    @property
    def percent(self) -> int:
        """Connected part of the wanted workers, at most 100."""
        return min(100, 100 * self.connected // max(1, self.wanted))


def group_rows(report: ClusterReport) -> list[GroupRow]:
    """Return a row for each group, and one for a job that has no workers."""
    heads = [job for job in report.current_jobs if not job.workers]
    with_workers = [job for job in report.current_jobs if job.workers]
    connected = connected_by_group(report.jobs if report.connected else ())
    rows = []
    for group in report.record.groups:
        jobs = [job for job in with_workers if job.group == group.name]
        name, number = group.name or ONLY_GROUP, connected[group.name]
        rows.append(_group_row(report, name, jobs, wanted=group.workers, connected=number))
    if heads:
        rows.append(_group_row(report, HEAD_JOB, heads, wanted=0, connected=0))
    return rows


def _group_row(
    report: ClusterReport, name: str, jobs: Sequence[JobReport], *, wanted: int, connected: int
) -> GroupRow:
    failed = [job for job in jobs if job.failed]
    waiting = [job for job in jobs if job.waits]
    others = [job for job in jobs if job.active and not job.failed and not job.waits]
    return GroupRow(
        name=name,
        wanted=wanted,
        connected=connected,
        jobs=tuple(f"{len(own)} {word.lower()}" for word, own in _by_word(others).items()),
        waiting=_reasons(
            ", ".join(filter(None, (job.reason, job.start_remark))) for job in waiting
        ),
        failed=_reasons(map(_failure, failed)),
        gpus=_gpus(jobs),
        memory=_memory(report, jobs),
    )


def _reasons(reasons: Iterable[str]) -> tuple[str, ...]:
    """Return each reason with the number of its jobs, the most frequent ones first."""
    counts = Counter(reasons)
    most = counts.most_common(_SHOWN_REASONS)
    lines = [f"{count}: {reason}".removesuffix(": ") for reason, count in most]
    if hidden := counts.total() - sum(count for _, count in most):
        lines.append(f"{hidden} with other reasons")
    return tuple(lines)


def _failure(job: JobReport) -> str:
    reason = job.reason or job.state.value
    return f"{reason} ({job.exit_remark})".removesuffix(" ()")


def numa_text(binding: Binding) -> str:
    """Return the NUMA nodes of a worker's CPUs, and those of its GPUs if these are others."""
    nodes, gpu_nodes = binding.get("nodes") or "-", binding.get("gpu_nodes")
    return f"{nodes}, GPU {gpu_nodes}" if gpu_nodes not in ("", None, nodes) else nodes


def _own_gpus(jobs: Iterable[JobReport]) -> list[WorkerGpu]:
    """Return each GPU once: several workers may share it."""
    return list({(gpu.node, gpu.uuid): gpu for job in jobs for gpu in job.gpus}.values())


def _gpus(jobs: Iterable[JobReport]) -> str:
    gpus = _own_gpus(jobs)
    parts = [gpu_models(gpus)]
    if memory := sum(gpu.memory or 0 for gpu in gpus):
        parts.append(measured_size_text(memory))
    return ", ".join(parts)


def gpu_models(gpus: Iterable[WorkerGpu]) -> str:
    """Return ``3 A100, 1 H100``."""
    models = Counter(gpu.model or "?" for gpu in gpus)
    return ", ".join(f"{number} {model}" for model, number in models.items())


def _memory(report: ClusterReport, jobs: Iterable[JobReport]) -> str:
    workers = report.folder.dask.connected
    limits = [
        workers[name].get("memory", 0) for job in jobs for name in job.connected if name in workers
    ]
    if not limits or not all(limits):
        return ""
    return measured_size_text(sum(limits))


def _remarks(job: JobReport) -> str:
    remarks = [
        f"attempt {job.attempt}" if job.attempt > 1 else "",
        job.group,
        "head" if job.head else "",
        job.reason,
        job.exit_remark,
        job.start_remark,
        "suspended" if job.suspended else "",
        f"({job.native})" if job.state is JobState.UNKNOWN and job.native else "",
    ]
    return ", ".join(remark for remark in remarks if remark)


JOB_COLUMNS: dict[str, Callable[[JobReport], str]] = {
    "JOB": lambda job: str(job.number),
    "ID": lambda job: job.id,
    "STATE": lambda job: job.word,
    "NODE": lambda job: job.node or "-",
    "WORKERS": lambda job: f"{len(job.connected)}/{len(job.workers)}",
    "GPUS": lambda job: gpu_models(_own_gpus([job])) or "-",
    "": _remarks,
}
"""The columns of a table of jobs: the head of each, and its cell of a job."""
JOB_HEADER = tuple(JOB_COLUMNS)


def job_cells(job: JobReport) -> tuple[str, ...]:
    """Return the row of one job; see `JOB_COLUMNS`."""
    return tuple(cell(job) for cell in JOB_COLUMNS.values())


def job_counts(jobs: Iterable[JobReport], *, reasons: bool = False) -> str:
    """Return ``2 RUNNING, 1 WAITING``; with ``reasons``: ``1 WAITING (Resources)``."""
    parts = []
    for word, found in _by_word(jobs).items():
        why = reasons_text(found) if reasons and word == JobPhase.WAITING else ""
        parts.append(f"{len(found)} {word}{why}")
    return ", ".join(parts)


def reasons_text(jobs: Iterable[JobReport]) -> str:
    """Return `` (Priority, Resources)``: the reasons of jobs; "" without one."""
    reasons = sorted({job.reason for job in jobs if job.reason})
    return f" ({', '.join(reasons)})" if reasons else ""


def _by_word(jobs: Iterable[JobReport]) -> dict[str, list[JobReport]]:
    """Return jobs by the word of their state, in the order of a job's life."""
    found: dict[str, list[JobReport]] = {state.value: [] for state in (*JobPhase, *JobState)}
    for job in jobs:
        found[job.word].append(job)
    return {word: own for word, own in found.items() if own}
