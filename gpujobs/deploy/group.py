"""The groups of workers of a cluster that this process owns: targets, limits, failures."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from ..batch.process import HOST, System
from ..clusters.ledger import GroupRecord
from ..clusters.report import JobPhase, JobReport
from ..errors import JobFailedError
from ..injob.names import group_prefix
from ..planning import workeroptions
from ..planning.plan import JobGroup
from ..schedulers import JobState
from ..text import quoted
from .pooljobs import Drained, PoolJob

# -- why a group gets no more jobs -----------------------------------------------------------------
REFUSAL_TIME = 600.0
"""Seconds after a refusal until more jobs are requested than were accepted."""


class Scope(IntEnum):
    """What a halt concerns. Of several halts, the one with the lowest scope is the reason."""

    CLUSTER = 1
    """All groups: the cluster has ended."""
    GROUP = 2
    """All jobs of the group: too many in a row have failed."""
    SCALE = 3
    """The last `scale`, which brought no jobs; those that there were are kept and replaced."""
    REPLACEMENT = 4
    """The replacement of jobs: there is a pause after a failure."""
    NUMBER = 5
    """Jobs above a number: the batch scheduler, the site or this machine allows no more."""


@dataclass(frozen=True)
class Halt:
    """Why a group of workers gets no more jobs than ``jobs``."""

    scope: Scope
    error: Exception | None
    """Calls that wait raise it; None: the jobs say why, as in a pause after one has failed."""
    jobs: int = 0
    """The most jobs that there may be, with those that leave."""
    until: float = math.inf
    """By the monotonic clock."""

    @property
    def stops(self) -> bool:
        """Whether no job is submitted any more, until `scale` is called again."""
        return self.scope <= Scope.GROUP

    @property
    def text(self) -> str:
        """The reason in one line, without the lines of a failed job's log."""
        lines = (line.strip() for line in str(self.error or "").splitlines())
        return " ".join(line for line in lines if line[:1] != "|")


# -- the limit of replacements ---------------------------------------------------------------------
MOST_FAILURES = 3
"""Jobs per missing job that may end without success, one after another."""
PAUSES = (0.0, 5.0, 15.0, 45.0, 135.0, 300.0)
"""Seconds before the next replacement, after so many rounds of failures."""


@dataclass
class Failures:
    """Counts the jobs, and the refusals, in a row that brought no worker that stays."""

    jobs: int = 0
    rounds: int = 0

    def pause(self) -> float:
        """Return the seconds before the next submission, each time more."""
        self.rounds += 1
        return PAUSES[min(self.rounds, len(PAUSES)) - 1]

    def exhausted(self, missing: int, alive: int) -> bool:
        """Return whether to stop: ``missing`` jobs are to be replaced, ``alive`` ones remain."""
        # If nothing is left, the cause concerns all jobs: a broken setup need not be tried thrice.
        limit = MOST_FAILURES * max(1, missing if alive else 1)
        return self.jobs >= limit


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
        self.failures = Failures()
        self.halts: dict[Scope, Halt] = {}
        """The last halt of each scope, perhaps over by now; see `present_halts`."""
        self._system = system

    @property
    def label(self) -> str:
        """The start of messages about it, ``group gpu: ``; "" in a cluster without groups."""
        return f"group {self.name}: " if self.name else ""

    @property
    def size(self) -> int:
        """Number of workers of a job."""
        return self.jobs.shape.workers

    @property
    def most(self) -> int:
        """Jobs above this number are removed; `adapt` keeps idle ones up to its maximum."""
        return self.target if self.maximum is None else max(self.target, self.maximum)

    def workers(self, present: int) -> int:
        """Return the wanted number of workers; `adapt` keeps idle ones of the ``present`` jobs."""
        kept = 0 if self.maximum is None else min(present, self.most)
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
        """Return the arguments of `gpujobs.injob.demand`; ``groups``: all of the cluster."""
        jobs = self.jobs
        return {
            "prefix": group_prefix(cluster_id, self.name),
            "resources": workeroptions.amounts(jobs.profile.workers, bool(jobs.shape.gpus)),
            "threads": jobs.shape.worker_threads,
            "plain_tasks": not jobs.shape.gpus or all(group.shape.gpus for group in groups),
        }

    def as_record(self, record: GroupRecord, present: int) -> GroupRecord:
        """Return the record of the group with its target (see `workers`), and why it is missed."""
        reason = next((halt.text for halt in self.present_halts if halt.error), "")
        return replace(record, workers=self.workers(present), error=reason)

    # -- why it gets no more jobs ------------------------------------------------------------------
    @property
    def present_halts(self) -> list[Halt]:
        """Why it gets no more jobs now, by scope."""
        now = self._system.monotonic()
        return [halt for _, halt in sorted(self.halts.items()) if now < halt.until]

    def halt(
        self,
        scope: Scope,
        error: Exception | None,
        jobs: int = sys.maxsize,
        seconds: float = math.inf,
    ) -> None:
        """Submit no more than ``jobs`` jobs for ``seconds``; replaces an earlier halt."""
        until = self._system.monotonic() + seconds
        self.halts[scope] = Halt(scope, error, jobs, until)

    def failed(self, jobs: int = 1, error: Exception | None = None) -> None:
        """Pause after ``jobs`` jobs that failed at the same time; ``error``: a refusal instead."""
        self.failures.jobs += jobs
        self.pause(error)

    def pause(self, error: Exception | None = None) -> None:
        """Submit no jobs for some time, each time for longer."""
        self.halt(Scope.REPLACEMENT, error, 0, self.failures.pause())

    def succeeded(self) -> None:
        """Workers have connected and stay: failures are counted anew."""
        self.failures = Failures()
        self.halts.pop(Scope.REPLACEMENT, None)

    def forget_failures(self) -> None:
        """Allow submitting again after failed starts and refusals."""
        self.failures = Failures()
        self.halts.clear()

    def stop_submitting(self, past: Iterable[JobReport]) -> None:
        """Too many jobs in a row have failed, or were refused; ``past`` are ended jobs."""
        pause = self.halts.get(Scope.REPLACEMENT)
        refusal = pause and pause.error
        self.halt(Scope.GROUP, refusal or self._failed_starts_error(past), 0)

    def _failed_starts_error(self, past: Iterable[JobReport]) -> JobFailedError:
        own = [job for job in past if job.group == self.name]
        ended = [job for job in own if job.phase is JobPhase.ENDED]
        last = next((job for job in reversed(ended) if job.in_vain), ended[-1])
        tail = "\n".join(["", *quoted(last.log)])
        when = "before their workers connected"
        if not last.in_vain:
            when = "soon after their workers had connected"
        jobs = f"{self.label}{self.failures.jobs} jobs in a row ended {when}"
        hint = "fix it and call scale() again; see cluster.jobs and cluster.get_logs()"
        return JobFailedError(f"{jobs}; the last one: {last.reason}{tail}", hint=hint)


def _ended_well(job: PoolJob, now: float) -> bool:
    """Return whether a job had a success, or left in time for its tasks.

    A cancelled job did not, although its workers leave, too: so may the next one be.
    """
    drained = isinstance(job.way_out, Drained)
    return job.steady(now) or (drained and job.report.state is not JobState.CANCELLED)


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
            group.succeeded()
        job.counted = job.counted or job.steady(now)
    failed = Counter(job.report.group for job in ended if not _ended_well(job, now))
    for name, number in failed.items():
        if name in groups:
            groups[name].failed(number)
