"""The jobs of a cluster that this process owns: the phase of each, and which of them count."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from distributed.core import Status

from ..clusters.report import ClusterReport, JobPhase, JobReport, json_phase
from ..clusters.resize import jobs_to_release
from ..planning.lifetime import warning
from ..schedulers import JobId


# -- the phases of one job -------------------------------------------------------------------------
# Times are those of the owner's monotonic clock when it first saw the job so, in seconds: clocks of
# nodes may be wrong by minutes, and a job is given up by these times.
@dataclass(frozen=True)
class Waiting:
    """It is in the queue."""

    again: bool = False
    """The batch scheduler has requeued it."""


@dataclass(frozen=True)
class Starting:
    """It runs, and its workers have not all been connected in this run."""

    started: float
    again: bool = False
    """In an earlier run they were, so that they count as missing only after the start timeout."""


@dataclass(frozen=True)
class Running:
    """Its workers are connected since this time, as far as is known."""

    started: float
    connected: float


@dataclass(frozen=True)
class Away:
    """It runs, and workers that were connected are not any more."""

    started: float
    connected: float | None
    """When all were; None: they have come and gone between two looks."""
    since: float


Phase: TypeAlias = Waiting | Starting | Running | Away


def next_phase(phase: Phase, report: JobReport, now: float, start_timeout: float) -> Phase:
    """Return the phase of a job after a look at it that gave ``report``."""
    if report.waits:
        return phase if isinstance(phase, Waiting) else Waiting(again=True)
    if isinstance(phase, Waiting):
        phase = Starting(now, phase.again)
    if report.phase is JobPhase.RUNNING:
        return _with_workers(phase, now)
    if report.lacks_workers:
        return _without_workers(phase, now, start_timeout)
    if report.active and isinstance(phase, Away):  # suspended, for example
        connected = phase.connected
        return Starting(phase.started) if connected is None else Running(phase.started, connected)
    return phase


def _with_workers(phase: Starting | Running | Away, now: float) -> Running:
    if isinstance(phase, Running):
        return phase
    connected = phase.connected if isinstance(phase, Away) else None
    return Running(phase.started, now if connected is None else connected)


def _without_workers(
    phase: Starting | Running | Away, now: float, start_timeout: float
) -> Starting | Away:
    if isinstance(phase, Away):
        return phase
    if isinstance(phase, Running):
        return Away(phase.started, phase.connected, now)
    if phase.again and now - phase.started <= start_timeout:
        return phase
    return Away(phase.started, None, now)


# -- the way out of one job ------------------------------------------------------------------------
FIRST_PAUSE, LONGEST_PAUSE = 60.0, 600.0
"""Seconds after which a job that is still there is cancelled again: doubled each time."""


@dataclass(frozen=True)
class Stays:
    """It counts towards the target of its group, as no job on its way out does."""


@dataclass(frozen=True)
class RunsOut:
    """Its walltime is nearly over: its successor is due."""


@dataclass(frozen=True)
class Drained:
    """All of its workers leave, as its rest is too short for a task."""


@dataclass(frozen=True)
class EndsTasks:
    """It was removed, and is cancelled when its workers have left."""

    may_return: bool = True
    """It may be taken back until then: its node is not bad, and its data was not seen to move."""


@dataclass(frozen=True)
class Cancelled:
    """It was removed or given up, and is cancelled until the batch scheduler has it no longer."""

    times: int = 0
    """How often it has been cancelled."""
    again: float = 0.0
    """When it is cancelled the next time."""

    def once_more(self, now: float) -> Cancelled:
        """Return the state after another cancellation."""
        return Cancelled(self.times + 1, now + min(LONGEST_PAUSE, FIRST_PAUSE * 2**self.times))


WayOut: TypeAlias = Stays | RunsOut | Drained | EndsTasks | Cancelled

# -- one job ---------------------------------------------------------------------------------------
STEADY = 30.0
"""Seconds that all workers of a job stay connected until its start has succeeded."""

_STATUS = {
    JobPhase.WAITING: Status.running,  # as in dask-jobqueue: it was submitted
    JobPhase.STARTING: Status.running,
    JobPhase.RUNNING: Status.running,
    JobPhase.AWAY: Status.undefined,
    JobPhase.LEAVING: Status.closing,
    JobPhase.ENDED: Status.closed,
}


@dataclass
class PoolJob:
    """A job of the pool."""

    report: JobReport
    queued: float
    """When it was submitted, or last requeued; like all times here, of the monotonic clock."""
    devices: tuple[str, ...] = ()
    """GPUs of this machine that it uses; none if a batch scheduler assigns them."""
    phase: Phase = Waiting()
    way_out: WayOut = Stays()
    idle_since: float | None = None
    counted: bool = False
    """Its success has been counted."""

    def update(self, report: JobReport, now: float, start_timeout: float = math.inf) -> bool:
        """Take over a new report; return whether its phase has changed.

        ``start_timeout``: seconds for which a requeued job may be without its workers.
        """
        if self._is_requeued(report):
            self.phase, self.queued = Waiting(again=True), now
            self.way_out = Stays()
        self.phase = next_phase(self.phase, report, now, start_timeout)
        before = self.report
        self.report = self.judged(report)
        if self.report.began is None and before.began is not None:
            self.report = replace(self.report, began=before.began)
        return json_phase(self.report) != json_phase(before)  # also from not yet listed to waiting

    def _is_requeued(self, report: JobReport) -> bool:
        """Return whether it waits again, or has started again before it was seen to wait."""
        if isinstance(self.phase, Waiting):
            return False
        starts = {self.report.began, report.began} - {None}
        return report.waits or len(starts) > 1

    def note_drained(self, names: frozenset[str]) -> None:
        """Note whether its workers, of ``names``, leave; when none is connected, they have left."""
        if not self.report.connected:
            return
        if names.issuperset(self.report.connected) and not self.report.head:
            self.way_out = Drained()
        elif isinstance(self.way_out, Drained):
            self.way_out = Stays()

    def judged(self, report: JobReport) -> JobReport:
        """Return the report with all that is known of a requeued job: its workers start again."""
        if report.lacks_workers and self._starts_again:
            return replace(report, phase=JobPhase.STARTING)
        return report

    @property
    def _starts_again(self) -> bool:
        return isinstance(self.phase, Waiting | Starting) and self.phase.again

    @property
    def started(self) -> float | None:
        """When it was first seen to run, since it was last queued."""
        return None if isinstance(self.phase, Waiting) else self.phase.started

    def steady(self, now: float) -> bool:
        """Return whether its workers have been connected long enough to call it a success."""
        if isinstance(self.phase, Running):
            return now - self.phase.connected >= STEADY
        if isinstance(self.phase, Away) and self.phase.connected is not None:
            return self.phase.since - self.phase.connected >= STEADY
        return False

    def away(self, now: float) -> float:
        """Return for how many seconds its workers have been away."""
        return now - self.phase.since if isinstance(self.phase, Away) else 0.0

    # -- as dask's clusters show their workers -----------------------------------------------------
    def __await__(self) -> Generator[None, None, PoolJob]:
        return self
        yield

    @property
    def status(self) -> Status:
        """Its phase, in dask's words."""
        if self.report.suspended:
            return Status.paused
        return Status.failed if self.report.in_vain else _STATUS[self.report.phase]

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
    """The jobs of a pool by number. ``walltimes``: of the jobs of each group, in seconds.

    ``start_timeout``: seconds for which a requeued job may be without its workers.
    """

    def __init__(
        self, walltimes: Mapping[str, int | None], start_timeout: float = math.inf
    ) -> None:
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
        self._start_timeout = start_timeout
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

    def release(
        self, job: PoolJob, phase: JobPhase, reason: str, way_out: EndsTasks | Cancelled
    ) -> JobReport:
        """Do `finish` with a job that the batch scheduler still has."""
        self.released[job.report.number] = job
        job.way_out = way_out
        return self.finish(job, phase, reason)

    def returnable(self, group: str, now: float) -> list[PoolJob]:
        """Return the jobs of a group that leave after their tasks, but could stay.

        Their walltimes allow that: no successor is due yet. Those with the longest rest come first.
        """
        walltime = self._walltimes[group]
        oldest = now - _working_time(walltime) + self.lead(group, now) if walltime else -math.inf
        found: list[tuple[float, PoolJob]] = []
        for job in self.released.values():
            could_stay = isinstance(job.way_out, EndsTasks) and job.way_out.may_return
            if could_stay and job.report.group == group and job.started is not None:
                found.append((job.started, job))
        found.sort(key=lambda item: -item[0])
        return [job for started, job in found if started >= oldest]

    def take_back(self, job: PoolJob) -> None:
        """Count a job again that was released."""
        number = job.report.number
        self._forget_past(number)
        self.active[number] = self.released.pop(number)
        self.drained = self.drained.difference(job.report.workers)  # an answer of before
        job.way_out, job.idle_since = Stays(), None

    def _forget_past(self, number: int) -> None:
        self.past = deque((past for past in self.past if past.number != number), self.past.maxlen)

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
                if known.report.head and not job.head:  # not for all: a copy of each is felt
                    job = replace(job, head=True)
                before = known.phase
                changed |= known.update(job, now, self._start_timeout)
                if isinstance(before, Waiting) and known.started is not None:
                    self._note_wait(known, before, now)
                known.note_drained(self.drained)
        self._note_leaving(now)
        return changed

    def _take_back(self, job: JobReport) -> None:
        """Add a job in the queue again if it had ended: the batch scheduler has requeued it."""
        number = job.number
        if number in self.active or number in self.released or not self.knows(number):
            return
        self._forget_past(number)
        known = self._all[number]
        if job.phase is JobPhase.LEAVING:
            self.released[number] = known
        else:
            self.active[number], known.way_out = known, Stays()

    def _note_wait(self, job: PoolJob, queue: Waiting, now: float) -> None:
        """Note how long a job that starts now has waited in the queue."""
        waited = now - job.queued
        self.longest_wait = max(self.longest_wait, waited)
        if job.report.workers and not queue.again:
            self._waits[job.report.group].append(waited)

    def _note_leaving(self, now: float) -> None:
        """Mark the jobs whose walltime is over so soon that their successors are due."""
        for group, walltime in self._walltimes.items():
            if not walltime:
                continue
            latest = now - _working_time(walltime) + self.lead(group, now)
            for job in self.counting(group):
                if job.started is not None and job.started < latest and not job.report.head:
                    job.way_out = RunsOut()

    def lead(self, group: str, now: float) -> float:
        """Return how many seconds before a job of a group must leave its successor is submitted.

        As long as the last jobs have waited in the queue, or those wait that are in it, and the
        start of the workers; so that these can take over the data. And as long before as workers
        leave for the sake of their tasks.
        """
        walltime = self._walltimes[group] or 0
        waits = [now - job.queued for job in self.counting(group) if job.started is None]
        wait = max([*self._waits[group], *waits], default=0.0)
        longest = LONGEST_LEAD * _working_time(walltime)
        return min(longest, wait + min(START_UP, walltime / 4) + self.task_time)

    # -- query -------------------------------------------------------------------------------------
    def counting(self, group: str | None = None) -> list[PoolJob]:
        """Return the jobs that count towards the target of a group; None: of all groups."""
        active = [job for job in self.active.values() if group in (None, job.report.group)]
        return [job for job in active if job.report.workers and isinstance(job.way_out, Stays)]

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
        failed = (job.reason for job in reversed(self.past) if job.in_vain)
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
        if fresh is None or known.phase is JobPhase.ENDED:
            return known
        if known.phase is JobPhase.LEAVING:
            return replace(fresh, reason=known.reason)
        fresh = replace(fresh, head=fresh.head or known.head)
        job = self.active.get(known.number)
        return job.judged(fresh) if job else fresh


def _working_time(walltime: int) -> int:
    """Return for how many seconds a job of this walltime runs until its workers leave."""
    return walltime - warning(walltime)
