"""The workers of one kind: their number, and the limits of replacements and of `adapt`."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..batch.process import HOST, System
from ..clusters.ledger import GroupRecord
from ..clusters.report import JobPhase, JobReport
from ..errors import JobFailedError
from ..injob.names import group_prefix
from ..planning import workeroptions
from ..planning.plan import JobGroup
from ..text import quoted
from .job import PoolJob

# -- the most jobs of a group ----------------------------------------------------------------------
REFUSAL_TIME = 600.0
"""Seconds after a refusal until more jobs are requested than were accepted."""


@dataclass(frozen=True)
class Ceiling:
    """The most jobs that a group of workers can have; by default any number."""

    jobs: int = sys.maxsize
    reason: str = ""
    until: float = math.inf
    """By the monotonic clock."""


# -- the limit of replacements ---------------------------------------------------------------------
MOST_FAILURES = 3
"""Jobs per missing job that may end without success, one after another."""
PAUSES = (0.0, 5.0, 15.0, 45.0, 135.0, 300.0)
"""Seconds before the next replacement, after so many rounds of failures."""


class Failures:
    """Counts the jobs in a row that brought no worker that stays, and what refuses them."""

    def __init__(self, system: System = HOST) -> None:
        self._system = system
        self.jobs = 0
        """Jobs in a row that ended without success."""
        self.error: Exception | None = None
        """The last refusal, if that is why jobs are missing."""
        self._rounds = 0
        self._not_before = 0.0

    def succeeded(self) -> None:
        """Workers have connected and stay: start again."""
        self.jobs = self._rounds = 0
        self.error = None
        self._not_before = 0.0

    def failed(self, jobs: int = 1, error: Exception | None = None) -> None:
        """Note ``jobs`` jobs that failed at the same time; ``error``: a refusal instead of jobs."""
        self.jobs += jobs
        self.error = error
        self.postpone()

    def postpone(self) -> None:
        """Pause before the next submission, each time for longer."""
        pause = PAUSES[min(self._rounds, len(PAUSES) - 1)]
        self._rounds += 1
        self._not_before = self._system.monotonic() + pause

    def exhausted(self, missing: int, alive: int) -> bool:
        """Return whether to stop: ``missing`` jobs are to be replaced, ``alive`` ones remain."""
        if not self.jobs:
            return False
        # If nothing is left, the cause concerns all jobs: a broken setup need not be tried thrice.
        limit = MOST_FAILURES * max(1, missing if alive else 1)
        return self.jobs >= limit

    def pausing(self) -> bool:
        """Return whether the next submission must wait."""
        return self._system.monotonic() < self._not_before


# -- the workers of one kind -----------------------------------------------------------------------
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
        self.failures = Failures(system)
        self.error: Exception | None = None
        """Why no more jobs of it are submitted."""
        self.refused: Exception | None = None
        """Why the last `scale` brought no more jobs; those that there were are kept."""
        self._system = system
        self._ceiling = Ceiling()

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
        """Return the record of the group with its target (see `workers`), and why it is missed."""
        problem = self.error or self.refused or self.failures.error or self.ceiling.reason
        return replace(record, workers=self.workers(present), error=without_log(problem))

    @property
    def ceiling(self) -> Ceiling:
        """The most jobs of it that the batch scheduler accepts, as far as is known."""
        refused = self._system.monotonic() < self._ceiling.until
        return self._ceiling if refused else Ceiling()

    def refuse(self, accepted: int, error: Exception) -> None:
        """Note that the batch scheduler accepts no more than ``accepted`` jobs for now."""
        until = self._system.monotonic() + REFUSAL_TIME
        self._ceiling = Ceiling(accepted, " ".join(str(error).split()), until)

    def forget_failures(self) -> None:
        """Allow submitting again after failed starts and refusals."""
        self.failures.succeeded()
        self._ceiling = Ceiling()
        self.error = self.refused = None

    def stop_submitting(self, past: Iterable[JobReport]) -> None:
        """Too many jobs in a row have failed: note why, in `error`; ``past`` are ended jobs."""
        self.error = self.failures.error or self._failed_starts_error(past)

    def _failed_starts_error(self, past: Iterable[JobReport]) -> JobFailedError:
        own = [job for job in past if job.group == self.name]
        ended = [job for job in own if job.phase is not JobPhase.LEAVING]
        last = next((job for job in reversed(ended) if job.phase is JobPhase.FAILED), ended[-1])
        tail = "\n".join(["", *quoted(last.log)])
        when = "before their workers connected"
        if last.phase is not JobPhase.FAILED:
            when = "soon after their workers had connected"
        jobs = f"{self.label}{self.failures.jobs} jobs in a row ended {when}"
        hint = "fix it and call scale() again; see cluster.jobs and cluster.get_logs()"
        return JobFailedError(f"{jobs}; the last one: {last.reason}{tail}", hint=hint)


def without_log(problem: object) -> str:
    """Return a problem in one line, without the lines of a failed job's log."""
    lines = (line.strip() for line in str(problem or "").splitlines())
    return " ".join(line for line in lines if line[:1] != "|")


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
            group.failures.succeeded()
        job.counted = job.counted or job.steady(now)
    failed = Counter(job.report.group for job in ended if not job.steady(now))
    for name, number in failed.items():
        if name in groups:
            groups[name].failures.failed(number)
