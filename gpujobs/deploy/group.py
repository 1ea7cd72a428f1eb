"""The jobs of a cluster that this process owns, and its groups of workers with their limits."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from distributed.core import Status

from ..batch.process import HOST, System
from ..clusters.ledger import GroupRecord
from ..clusters.report import ClusterReport, JobPhase, JobReport
from ..clusters.scale import jobs_to_release
from ..errors import JobFailedError
from ..injob.names import group_prefix
from ..planning import workeroptions
from ..planning.lifetime import warning
from ..planning.plan import JobGroup
from ..schedulers import JobId
from ..text import quoted

# -- one job ---------------------------------------------------------------------------------------
STEADY = 30.0
"""Seconds that all workers of a job stay connected until its start has succeeded."""

_STATUS = {
    JobPhase.SUBMITTED: Status.running,  # as in dask-jobqueue: it was submitted
    JobPhase.PENDING: Status.running,
    JobPhase.STARTING: Status.running,
    JobPhase.RUNNING: Status.running,
    JobPhase.SUSPENDED: Status.paused,
    JobPhase.LOST: Status.undefined,
    JobPhase.LEAVING: Status.closing,
    JobPhase.FAILED: Status.failed,
    JobPhase.ENDED: Status.closed,
}


@dataclass
class PoolJob:
    """A job of the pool. Times are those of the monotonic clock, in seconds."""

    report: JobReport
    queued: float
    """When it was submitted, or last requeued."""
    devices: tuple[str, ...] = ()
    """GPUs of this machine that it uses; none if a batch scheduler assigns them."""
    start_timeout: float = math.inf
    """Seconds for which a requeued job may be without its workers."""
    running_since: float | None = None
    connected_since: float | None = None
    lost_since: float | None = None
    idle_since: float | None = None
    leaving: bool = False
    """Its walltime is nearly over; it no longer counts towards the target."""
    drained: bool = False
    """All of its workers leave, as its rest is too short for a task: nor does it count then."""
    requeued: bool = False
    """The batch scheduler has requeued it at some time."""
    restarting: bool = False
    """It was requeued, and its workers have not connected again yet."""
    began: float | None = None
    """When it last started, by the clock of its node."""
    counted: bool = False
    """Its success has been counted."""
    cancels: int = 0
    """How often it has been cancelled."""
    cancel_again: float = 0.0
    """When it is cancelled again if the batch scheduler still has it, once it is released."""

    def update(self, report: JobReport, now: float) -> bool:
        """Take over a new report; return whether the phase has changed."""
        if self.running_since is not None and (report.phase.waits or self._has_restarted(report)):
            self._requeue(now)
        self.began = report.began or self.began
        if self.running_since is None and not report.phase.waits:
            self.running_since = now
        self._update_restart(now)
        report = self.judged(report)
        changed = report.phase is not self.report.phase
        self.report = report
        self._update_connection(now)
        return changed

    def _has_restarted(self, report: JobReport) -> bool:
        """Return whether it was requeued, and started again before anybody saw it waiting."""
        return None not in (self.began, report.began) and self.began != report.began

    def _requeue(self, now: float) -> None:
        self.requeued, self.queued = True, now
        self.running_since = self.connected_since = None
        self.leaving = self.drained = False

    def note_drained(self, names: frozenset[str]) -> None:
        """Note whether its workers, of ``names``, leave; when none is connected, they have left."""
        if self.report.connected:
            self.drained = names.issuperset(self.report.connected) and not self.report.head

    def _update_restart(self, now: float) -> None:
        """End the excuse for missing workers in time: they may have come and gone unseen."""
        ran = now - (self.running_since or now)
        waits_for_workers = self.connected_since is None and ran <= self.start_timeout
        self.restarting = self.requeued and waits_for_workers

    def judged(self, report: JobReport) -> JobReport:
        """Return the report with all that is known of a requeued job: its workers start again."""
        if self.restarting and report.phase is JobPhase.LOST:
            return replace(report, phase=JobPhase.STARTING)
        return report

    def _update_connection(self, now: float) -> None:
        phase = self.report.phase
        if phase is JobPhase.RUNNING:
            self.connected_since = self.connected_since or now
        if phase is not JobPhase.LOST:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = now

    def steady(self, now: float) -> bool:
        """Return whether its workers have been connected long enough to call it a success."""
        if self.connected_since is None:
            return False
        return (self.lost_since or now) - self.connected_since >= STEADY

    def waited(self, now: float) -> float:
        """Return for how many seconds it has waited, or did wait, since it was last queued."""
        return (self.running_since or now) - self.queued

    # -- as dask's clusters show their workers -----------------------------------------------------
    def __await__(self) -> Generator[None, None, PoolJob]:
        return self
        yield

    @property
    def status(self) -> Status:
        """Its phase, in dask's words."""
        return _STATUS[self.report.phase]

    @property
    def job_id(self) -> str:
        """The batch scheduler's id."""
        return self.report.id


# -- the active and the past jobs of a pool --------------------------------------------------------
START_UP = 120.0
"""Seconds for a job's workers to connect; less for short walltimes."""
LONGEST_LEAD = 0.5
"""Most of the time that its workers have for which a job and its successor may both be submitted.

With more, the successor of a successor could be submitted before the first job has left.
"""
RECENT = 8
"""Starts of a group whose waiting times are remembered."""


class PoolJobs:
    """The jobs of a pool by number. ``walltimes``: of the jobs of each group, in seconds."""

    def __init__(self, walltimes: Mapping[str, int | None]) -> None:
        self.active: dict[int, PoolJob] = {}
        self.released: dict[int, PoolJob] = {}
        """Jobs that were removed or given up, until the batch scheduler no longer has them."""
        self.past: deque[JobReport] = deque(maxlen=200)
        self.longest_wait = 0.0
        """Seconds that a job has waited in the queue before it ran; the longest so far."""
        self.drained: frozenset[str] = frozenset()
        """Names of the workers that leave."""
        self.task_time = 0.0
        """Seconds of the longest task that may start: so long before its end a worker leaves."""
        self._walltimes = walltimes
        self._waits = {group: deque[float](maxlen=RECENT) for group in walltimes}
        """Seconds that the last started jobs of each group have waited."""
        self._all: dict[int, PoolJob] = {}
        """All jobs that were ever added."""

    def __len__(self) -> int:
        return len(self.active)

    def add(self, job: PoolJob) -> None:
        """Add a job that was submitted."""
        self.active[job.report.number] = self._all[job.report.number] = job

    def knows(self, number: int) -> bool:
        """Return whether a job of this number was ever added."""
        return number in self._all

    def finish(self, job: PoolJob, phase: JobPhase, reason: str) -> JobReport:
        """Move a job to the past ones; return its last report."""
        report = replace(job.report, phase=phase, reason=reason)
        self.active.pop(report.number, None)
        self.past.append(report)
        return report

    def release(self, job: PoolJob, phase: JobPhase, reason: str) -> JobReport:
        """Do `finish` with a job that the batch scheduler still has."""
        self.released[job.report.number] = job
        return self.finish(job, phase, reason)

    # -- update ------------------------------------------------------------------------------------
    def update(self, report: ClusterReport, now: float) -> bool:
        """Take over a new report on the cluster; return whether the phase of a job has changed."""
        changed = False
        for job in report.jobs:
            if not job.in_queue:
                self.released.pop(job.number, None)
            elif not report.folder.ended:
                self._take_back(job)
            if known := self.active.get(job.number):
                head = job.head or known.report.head
                changed |= known.update(replace(job, head=head), now)
                self._note_wait(known, now)
                known.note_drained(self.drained)
        self._note_leaving(now)
        return changed

    def _take_back(self, job: JobReport) -> None:
        """Add a job in the queue again if it had ended: the batch scheduler has requeued it."""
        number = job.number
        if number in self.active or number in self.released or not self.knows(number):
            return
        self.past = deque((past for past in self.past if past.number != number), self.past.maxlen)
        returned = self.released if job.phase is JobPhase.LEAVING else self.active
        returned[number] = self._all[number]

    def _note_wait(self, job: PoolJob, now: float) -> None:
        if job.running_since is None:
            return
        self.longest_wait = max(self.longest_wait, job.waited(now))
        if job.running_since == now and job.report.workers and not job.requeued:
            self._waits[job.report.group].append(job.waited(now))

    def _note_leaving(self, now: float) -> None:
        """Mark the jobs whose walltime is over so soon that their successors are due."""
        for group, walltime in self._walltimes.items():
            if not walltime:
                continue
            latest = now - _working_time(walltime) + self.lead(group, now)
            for job in self.counting(group):
                started = now if job.running_since is None else job.running_since
                job.leaving = started < latest and not job.report.head

    def lead(self, group: str, now: float) -> float:
        """Return how many seconds before a job of a group must leave its successor is submitted.

        As long as the last jobs have waited in the queue, or those wait that are in it, and the
        start of the workers; so that these can take over the data. And as long before as workers
        leave for the sake of their tasks.
        """
        walltime = self._walltimes[group] or 0
        waits = [job.waited(now) for job in self.counting(group) if job.report.phase.waits]
        wait = max([*self._waits[group], *waits], default=0.0)
        longest = LONGEST_LEAD * _working_time(walltime)
        return min(longest, wait + min(START_UP, walltime / 4) + self.task_time)

    # -- query -------------------------------------------------------------------------------------
    def counting(self, group: str | None = None) -> list[PoolJob]:
        """Return the jobs that count towards the target of a group; None: of all groups."""
        active = [job for job in self.active.values() if group in (None, job.report.group)]
        return [job for job in active if job.report.workers and not (job.leaving or job.drained)]

    def numbers(self, *, counting: bool = False) -> Counter[str]:
        """Return how many jobs with workers each group has; or only those that count."""
        jobs = self.counting() if counting else self.active.values()
        return Counter(job.report.group for job in jobs if job.report.workers)

    def occupied(self) -> Counter[str]:
        """Return how many jobs with workers each group has, with those that were released."""
        released = Counter(job.report.group for job in self.released.values() if job.report.workers)
        return self.numbers() + released

    def present_ids(self) -> list[JobId]:
        """Return the batch scheduler's ids of all jobs that it may have."""
        return [job.report.job for job in (*self.active.values(), *self.released.values())]

    def cheapest(self, group: str, count: int, load: dict[str, int]) -> list[PoolJob]:
        """Return the jobs of a group that cost least to lose (see `jobs_to_release`)."""
        chosen = jobs_to_release((job.report for job in self.counting(group)), count, load)
        return [self.active[job.number] for job in chosen]

    def leaving_workers(self) -> set[str]:
        """Return the names of workers that were asked to leave."""
        leaving = (job for job in self.past if job.phase is JobPhase.LEAVING)
        return {name for job in leaving for name in job.workers}

    def last_failure(self) -> str:
        """Return "; the last job that failed: REASON", or "" if none has."""
        failed = (job.reason for job in reversed(self.past) if job.phase is JobPhase.FAILED)
        return next((f"; the last job that failed: {reason}" for reason in failed), "")

    def devices(self, but: str | None = None) -> set[str]:
        """Return the GPUs of this machine that jobs use, ``but`` not those of that group.

        Jobs that were released use theirs until they have ended.
        """
        jobs = (*self.active.values(), *self.released.values())
        return {device for job in jobs if job.report.group != but for device in job.devices}

    def reports(self) -> list[JobReport]:
        """Return the active jobs, then the past ones, newest first."""
        return [*(job.report for job in self.active.values()), *reversed(self.past)]

    def latest(self, jobs: Iterable[JobReport]) -> list[JobReport]:
        """Return `reports` with the new reports ``jobs``."""
        fresh = {job.number: job for job in jobs}
        return [self._newer(known, fresh.get(known.number)) for known in self.reports()]

    def _newer(self, known: JobReport, fresh: JobReport | None) -> JobReport:
        """Return the present report of a job; how it ended is final, why it leaves is kept."""
        if fresh is None or known.phase in (JobPhase.FAILED, JobPhase.ENDED):
            return known
        if known.phase is JobPhase.LEAVING:
            return replace(fresh, reason=known.reason)
        fresh = replace(fresh, head=fresh.head or known.head)
        job = self.active.get(known.number)
        return job.judged(fresh) if job else fresh


def _working_time(walltime: int) -> int:
    """Return for how many seconds a job of this walltime runs until its workers leave."""
    return walltime - warning(walltime)


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
        ended = [job for job in own if job.phase is not JobPhase.LEAVING]
        last = next((job for job in reversed(ended) if job.phase is JobPhase.FAILED), ended[-1])
        tail = "\n".join(["", *quoted(last.log)])
        when = "before their workers connected"
        if last.phase is not JobPhase.FAILED:
            when = "soon after their workers had connected"
        jobs = f"{self.label}{self.failures.jobs} jobs in a row ended {when}"
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
            group.succeeded()
        job.counted = job.counted or job.steady(now)
    failed = Counter(job.report.group for job in ended if not (job.steady(now) or job.drained))
    for name, number in failed.items():
        if name in groups:
            groups[name].failed(number)
