"""The jobs of a pool: those that are active, and how the others ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..clusters.report import ClusterReport, JobPhase, JobReport
from ..clusters.scale import jobs_to_release
from ..planning.commandlines import warning
from .job import PoolJob

MAX_OVERLAP = 120.0
"""Most seconds before its walltime at which a job's successor is submitted."""


class PoolJobs:
    """The jobs of a pool by number. ``walltimes``: of the jobs of each group, in seconds."""

    def __init__(self, walltimes: Mapping[str, int | None]) -> None:
        self.active: dict[int, PoolJob] = {}
        self.past: deque[JobReport] = deque(maxlen=200)
        self.longest_wait = 0.0
        """Seconds that a job has waited in the queue before it ran; the longest so far."""
        self._walltimes = walltimes

    def __len__(self) -> int:
        return len(self.active)

    def add(self, job: PoolJob) -> None:
        """Add a job that was submitted."""
        self.active[job.report.number] = job

    def finish(self, job: PoolJob, phase: JobPhase, reason: str) -> JobReport:
        """Move a job to the past ones; return its last report."""
        report = replace(job.report, phase=phase, reason=reason)
        self.active.pop(report.number, None)
        self.past.append(report)
        return report

    # -- update ------------------------------------------------------------------------------------
    def update(self, report: ClusterReport, now: float) -> bool:
        """Take over a new report on the cluster; return whether the phase of a job has changed."""
        changed = False
        for job in report.jobs:
            if known := self.active.get(job.number):
                head = job.head or known.report.head
                changed = known.update(replace(job, head=head), now) or changed
                self._note_times(known, now)
        return changed

    def _note_times(self, job: PoolJob, now: float) -> None:
        if job.running_since is None:
            return
        self.longest_wait = max(self.longest_wait, job.waited(now))
        walltime = self._walltimes.get(job.report.group)
        if walltime and not job.report.head:
            # It is replaced before its walltime, so that its workers can transfer their data.
            overlap = min(MAX_OVERLAP, walltime / 4)
            ran = now - job.running_since
            job.leaving = ran > walltime - warning(walltime) - overlap

    # -- query -------------------------------------------------------------------------------------
    def counting(self, group: str | None = None) -> list[PoolJob]:
        """Return the jobs that count towards the target of a group; None: of all groups."""
        found = [job for job in self.active.values() if job.report.workers and not job.leaving]
        return [job for job in found if group in (None, job.report.group)]

    def numbers(self, *, counting: bool = False) -> Counter[str]:
        """Return how many jobs with workers each group has; or only those that count."""
        jobs = self.counting() if counting else self.active.values()
        return Counter(job.report.group for job in jobs if job.report.workers)

    def cheapest(self, group: str, count: int, load: dict[str, int]) -> list[PoolJob]:
        """Return the jobs of a group that cost least to lose (see `jobs_to_release`)."""
        chosen = jobs_to_release((job.report for job in self.counting(group)), count, load)
        return [self.active[job.number] for job in chosen]

    def leaving_workers(self) -> set[str]:
        """Return the names of workers that were asked to leave."""
        leaving = (job for job in self.past if job.phase is JobPhase.LEAVING)
        return {name for job in leaving for name in job.workers}

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
