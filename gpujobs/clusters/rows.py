"""Rows of the tables of a cluster: its groups of workers, and its jobs. No side effects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..schedulers import JobState
from ..text import measured_size_text
from .report import ClusterReport, JobPhase, JobReport, WorkerGpu, connected_by_group

JOB_HEADER = ("JOB", "ID", "STATE", "NODE", "WORKERS", "GPUS", "")
"""Of `job_cells`."""
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
    pending: tuple[str, ...]
    """Number of the jobs with each reason, as ``2: Resources``."""
    failed: tuple[str, ...]
    """Like ``pending``."""
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
    jobs = [job for job in report.jobs if job.attempt == report.attempt]
    heads = [job for job in jobs if not job.workers]
    connected = connected_by_group(report.jobs if report.connected else ())
    rows = [
        _group_row(
            report,
            group.name or ONLY_GROUP,
            [job for job in jobs if job.workers and job.group == group.name],
            wanted=group.workers,
            connected=connected[group.name],
        )
        for group in report.record.groups
    ]
    if heads:
        rows.append(_group_row(report, HEAD_JOB, heads, wanted=0, connected=0))
    return rows


def _group_row(
    report: ClusterReport, name: str, jobs: Sequence[JobReport], *, wanted: int, connected: int
) -> GroupRow:
    failed = [job for job in jobs if job.failed]
    pending = [job for job in jobs if job.phase.waits]
    others = [job for job in jobs if job.active and not job.failed and not job.phase.waits]
    return GroupRow(
        name=name,
        wanted=wanted,
        connected=connected,
        jobs=tuple(f"{len(own)} {word.lower()}" for word, own in _by_word(others).items()),
        pending=_reasons(map(_pending_reason, pending)),
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


def _pending_reason(job: JobReport) -> str:
    return ", ".join(filter(None, (job.reason, job.start_remark)))


def _failure(job: JobReport) -> str:
    reason = job.reason or job.state.value
    return f"{reason} ({job.exit_remark})".removesuffix(" ()")


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
    workers = report.folder.workers
    limits = [
        workers[name].get("memory", 0) for job in jobs for name in job.connected if name in workers
    ]
    if not limits or not all(limits):
        return ""
    return measured_size_text(sum(limits))


def job_cells(job: JobReport) -> tuple[str, ...]:
    """Return the row of one job; see `JOB_HEADER`."""
    remarks = [
        f"attempt {job.attempt}" if job.attempt > 1 else "",
        job.group,
        "head" if job.head else "",
        job.reason,
        job.exit_remark,
        job.start_remark,
        f"({job.native})" if job.state is JobState.UNKNOWN and job.native else "",
    ]
    return (
        str(job.number),
        job.id,
        job.word,
        job.node or "-",
        f"{len(job.connected)}/{len(job.workers)}",
        gpu_models(_own_gpus([job])) or "-",
        ", ".join(remark for remark in remarks if remark),
    )


def job_counts(jobs: Iterable[JobReport], *, reasons: bool = False) -> str:
    """Return ``2 RUNNING, 1 PENDING``; with ``reasons``: ``1 PENDING (Resources)``."""
    parts = []
    for word, found in _by_word(jobs).items():
        why = sorted({job.reason for job in found if job.reason})
        shown = f" ({', '.join(why)})" if reasons and why and word == JobPhase.PENDING else ""
        parts.append(f"{len(found)} {word}{shown}")
    return ", ".join(parts)


def _by_word(jobs: Iterable[JobReport]) -> dict[str, list[JobReport]]:
    """Return jobs by the word of their state, in the order of a job's life."""
    found: dict[str, list[JobReport]] = {state.value: [] for state in (*JobPhase, *JobState)}
    for job in jobs:
        found[job.word].append(job)
    return {word: own for word, own in found.items() if own}
