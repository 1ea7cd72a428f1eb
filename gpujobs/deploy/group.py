"""The workers of one kind in a cluster that this process owns: how many there should be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..batch.system import HOST, System
from ..clusters.ledger import GroupRecord
from ..clusters.report import JobPhase, JobReport
from ..errors import JobFailedError
from ..injob.names import group_prefix
from ..planning import workeroptions
from ..planning.plan import JobGroup
from .attempts import Attempts
from .ceiling import Ceiling
from .job import PoolJob


class WorkerGroup:
    """A group of workers. Its name is "" in a cluster without groups."""

    def __init__(self, jobs: JobGroup, system: System = HOST) -> None:
        self.jobs = jobs
        """As they were planned."""
        self.name = jobs.group
        self.target = 0
        """Wanted number of jobs."""
        self.maximum: int | None = None
        """Most jobs that there may be at any time, while the group adapts; None: it does not."""
        self.attempts = Attempts(system)
        self.ceiling = Ceiling(system)
        self.error: Exception | None = None
        """Why no more jobs of it are submitted."""
        self.refused: Exception | None = None
        """Why the last `scale` brought no more jobs; those that there were are kept."""

    @property
    def label(self) -> str:
        """The start of messages about it, ``group gpu: ``; "" in a cluster without groups."""
        return f"group {self.name}: " if self.name else ""

    @property
    def size(self) -> int:
        """Number of workers of a job."""
        return self.jobs.shape.workers

    def workers(self, present: int) -> int:
        """Return the wanted number of workers; `adapt` keeps idle ones of the ``present`` jobs."""
        kept = 0 if self.maximum is None else present
        return max(self.target, kept) * self.size

    def jobs_for(self, workers: int) -> int:
        """Return the number of jobs that have ``workers`` workers or more."""
        return math.ceil(workers / self.size)

    @property
    def worker_options(self) -> dict[str, object]:
        """Threads and memory of a worker, by dask's names."""
        shape = self.jobs.shape
        return {"nthreads": shape.worker_threads, "memory_limit": shape.worker_memory or 0}

    def demand(self, cluster_id: str, groups: Iterable[JobGroup]) -> dict[str, object]:
        """Return the arguments of `gpujobs.injob.demand`; ``groups``: all of the cluster.

        Tasks that ask for no resource are for groups without GPUs, if there are any.
        """
        jobs = self.jobs
        return {
            "prefix": group_prefix(cluster_id, self.name),
            "resources": workeroptions.amounts(jobs.profile.workers, bool(jobs.shape.gpus)),
            "threads": jobs.shape.worker_threads,
            "plain_tasks": not jobs.shape.gpus or all(group.shape.gpus for group in groups),
        }

    def as_record(self, record: GroupRecord, present: int) -> GroupRecord:
        """Return the record of the group with its target (see `workers`), and why it is missed.

        The reason is one line, without the lines of a failed job's log.
        """
        problem = self.error or self.refused or self.attempts.error or self.ceiling.refusal
        lines = (line.strip() for line in str(problem or "").splitlines())
        reason = " ".join(line for line in lines if line[:1] != "|")
        return replace(record, workers=self.workers(present), error=reason)

    def forget_failures(self) -> None:
        """Allow submitting again after failed starts and refusals."""
        self.attempts.succeeded()
        self.ceiling.forget()
        self.error = self.refused = None

    def stop_submitting(self, past: Iterable[JobReport]) -> None:
        """Too many jobs in a row have failed: note why, in `error`; ``past`` are ended jobs."""
        self.error = self.attempts.error or self._failed_starts_error(past)

    def _failed_starts_error(self, past: Iterable[JobReport]) -> JobFailedError:
        own = [job for job in past if job.group == self.name]
        ended = [job for job in own if job.phase is not JobPhase.LEAVING]
        last = next((job for job in reversed(ended) if job.phase is JobPhase.FAILED), ended[-1])
        tail = "".join(f"\n  | {line}" for line in last.log)
        when = "before their workers connected"
        if last.phase is not JobPhase.FAILED:
            when = "soon after their workers had connected"
        jobs = f"{self.label}{self.attempts.failures} jobs in a row ended {when}"
        hint = "fix it and call scale() again; see cluster.jobs and cluster.get_logs()"
        return JobFailedError(f"{jobs}; the last one: {last.reason}{tail}", hint=hint)


def count_ends(
    groups: Mapping[str, WorkerGroup],
    active: Iterable[PoolJob],
    ended: Iterable[PoolJob],
    now: float,
) -> None:
    """Count jobs that ended without success; workers that stay end the count of their group."""
    for job in active:
        group = groups.get(job.report.group)
        if group and job.steady(now) and not job.counted:
            group.attempts.succeeded()
        job.counted = job.counted or job.steady(now)
    failed = Counter(job.report.group for job in ended if not job.steady(now))
    for name, number in failed.items():
        if name in groups:
            groups[name].attempts.failed(number)
