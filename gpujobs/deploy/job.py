"""A job of a cluster that this process owns."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace

from distributed.core import Status

from ..clusters.report import ClusterReport, JobPhase, JobReport
from ..clusters.scale import jobs_to_release
from ..planning.render import warning
from ..schedulers import JobId

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
        self.leaving = False

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
                changed = known.update(replace(job, head=head), now) or changed
                self._note_wait(known, now)
        self._note_leaving(now)
        return changed

    def _take_back(self, job: JobReport) -> None:
        """Add a job in the queue again if it had ended: the batch scheduler has requeued it."""
        number = job.number
        if number in self.active or number in self.released or number not in self._all:
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
        start of the workers; so that these can take over the data.
        """
        walltime = self._walltimes[group] or 0
        waits = [job.waited(now) for job in self.counting(group) if job.report.phase.waits]
        wait = max([*self._waits[group], *waits], default=0.0)
        longest = LONGEST_LEAD * _working_time(walltime)
        return min(longest, wait + min(START_UP, walltime / 4))

    # -- query -------------------------------------------------------------------------------------
    def counting(self, group: str | None = None) -> list[PoolJob]:
        """Return the jobs that count towards the target of a group; None: of all groups."""
        found = [job for job in self.active.values() if job.report.workers and not job.leaving]
        return [job for job in found if group in (None, job.report.group)]

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
        """Return the GPUs of this machine that jobs use, ``but`` not those of that group."""
        jobs = (job for job in self.active.values() if job.report.group != but)
        return {device for job in jobs for device in job.devices}

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
