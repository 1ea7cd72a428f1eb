"""The jobs of a cluster that this process owns: submit, remove and replace them.

Knows nothing of dask's classes. `ClusterMonitor` judges the jobs; this module decides what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from ..clusters import cancel as cancelling
from ..clusters import folder as folders
from ..clusters.folderstate import FolderState
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.monitor import ClusterMonitor, client_of, with_log
from ..clusters.report import ClusterReport, JobPhase, JobReport
from ..clusters.scale import check_job_limits, jobs_to_release
from ..clusters.submit import new_record, send
from ..config.spec import ClusterSpec
from ..errors import GpujobsError, JobFailedError
from ..injob.folder import EndKind
from ..injob.gpus import shared_gpu_message
from ..planning.commandlines import warning
from ..planning.plan import Plan
from ..planning.render import Script
from ..schedulers import JobId
from .job import PoolJob
from .submitter import Submitter

FAILED_STARTS = 3
"""Submitting stops after this many consecutive jobs end before their workers connect."""
LOST_TIMEOUT = 60.0
"""Seconds after which a running job whose workers have disconnected is cancelled."""
CLOSE_TIMEOUT = 12.0
"""Seconds for which closing waits for a batch scheduler that is away; the jobs then exit alone."""
QUERY_DELAY = 1.0
"""Seconds between a change and the query for it."""
MAX_OVERLAP = 120.0
"""Most seconds before its walltime at which a job's successor is submitted."""

Retire = Callable[[list[str]], Awaitable[None]]
"""Closes the workers of these names after they have transferred their data."""

logger = logging.getLogger("gpujobs")


class JobPool:
    """The jobs of a cluster that this process owns. Blocking calls run in threads."""

    def __init__(self, spec: ClusterSpec, plan: Plan, ledger: Ledger) -> None:
        self.plan = plan
        self.ledger = ledger
        self.id = ledger.new_id(plan.name)
        self.record: ClusterRecord = new_record(plan, self.id, owner="client")
        self.workers_per_job = plan.workers.shape.workers
        self.jobs: dict[int, PoolJob] = {}
        self.past: deque[JobReport] = deque(maxlen=200)
        self.failed_starts = 0
        self.error: Exception | None = None
        """Why no more jobs are submitted."""
        self.conflict: Exception | None = None
        """Two workers share a GPU."""
        self.report: ClusterReport | None = None
        self._submitter = Submitter(spec, plan, self.id)
        self._closing = threading.Event()
        self._client = client_of(self.record, stopping=self._closing.is_set)
        self._monitor = ClusterMonitor([self.record], ledger, stopping=self._closing.is_set)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def ended(self) -> bool:
        """Whether the whole cluster has ended."""
        return self.report is not None and self.report.folder.ended is not None

    @property
    def folder_state(self) -> FolderState:
        """The state of the cluster's folder at the last refresh."""
        return self.report.folder if self.report else FolderState()

    def forget_failures(self) -> None:
        """Allow submitting again after failed starts."""
        self.failed_starts = 0
        if not self.ended:
            self.error = None

    def counting(self) -> list[PoolJob]:
        """Return the jobs that count towards the target."""
        return [job for job in self.jobs.values() if job.report.workers and not job.leaving]

    def latest(self, connected: Iterable[str]) -> list[JobReport]:
        """Return the active jobs as they are now, then the past ones, newest first."""
        known = [*(job.report for job in self.jobs.values()), *reversed(self.past)]
        if not self.record.submissions:
            return known
        fresh = {job.number: job for job in self._monitor.latest(connected).jobs}
        return [self._newer(job, fresh.get(job.number)) for job in known]

    def _newer(self, known: JobReport, fresh: JobReport | None) -> JobReport:
        """Return the present report of a job; how it ended is final, why it leaves is kept."""
        if fresh is None or known.phase in (JobPhase.FAILED, JobPhase.ENDED):
            return known
        return replace(fresh, reason=known.reason) if known.phase is JobPhase.LEAVING else fresh

    # -- submit ------------------------------------------------------------------------------------
    async def submit(self, count: int) -> None:
        """Submit ``count`` worker jobs as one array, or as few arrays as the site allows."""
        if self.ended:
            raise self._ended_error()
        with_workers = sum(bool(job.report.workers) for job in self.jobs.values())
        check_job_limits(self.plan, with_workers + count)
        await self._submit(self._submitter.worker_scripts(count, self._used_devices()), True)

    async def submit_head(self) -> PoolJob:
        """Submit the job of the dask scheduler: one of its own shape, or the first worker job."""
        scripts = self._submitter.head_scripts(self._used_devices())
        await self._submit(scripts, self.plan.head is None)
        job = self.jobs[scripts[0].first]
        job.report = replace(job.report, head=True)
        return job

    def next_script(self) -> str:
        """Return the script of the next worker job."""
        return self._submitter.next_script()

    async def _submit(self, scripts: Sequence[Script], workers: bool) -> None:
        for script in scripts:
            record = await asyncio.to_thread(send, self.record, script, self._client, self.ledger)
            self.record = record
            for job in self._submitter.jobs_of(record, script, workers):
                self.jobs[job.report.number] = job
        self.query_soon()

    def _used_devices(self) -> set[str]:
        return {device for job in self.jobs.values() for device in job.devices}

    # -- remove ------------------------------------------------------------------------------------
    def cheapest(self, count: int, load: dict[str, int]) -> list[PoolJob]:
        """Return the jobs that cost least to lose (see `jobs_to_release`)."""
        chosen = jobs_to_release((job.report for job in self.counting()), count, load)
        return [self.jobs[job.number] for job in chosen]

    async def remove(self, jobs: Sequence[PoolJob], retire: Retire) -> None:
        """Remove jobs: their workers transfer their data through ``retire``, then one cancel."""
        if not jobs:
            return
        for job in jobs:  # first of all, so that they are not replaced
            self._finish(job, JobPhase.LEAVING, "removed")
        numbers = tuple(job.report.number for job in jobs)
        removed = (*self.record.removed, *numbers)
        self.record = await asyncio.to_thread(self._update, removed=removed)
        names = [name for job in jobs for name in job.report.connected]
        if names:
            await retire(names)
        await self._cancel(jobs)

    async def _cancel(self, jobs: Sequence[PoolJob]) -> None:
        await self._cancel_jobs([job.report.job for job in jobs])

    async def _cancel_jobs(self, jobs: Sequence[JobId]) -> None:
        remaining = [job.report.job for job in self.jobs.values()]
        others = [job for job in remaining if job not in jobs]
        await asyncio.to_thread(self._client.cancel, jobs, [self.id], others)

    def end_all(self) -> None:
        """Cancel all jobs; those that cannot be cancelled now find `ended` and exit."""
        self._closing.set()
        for job in list(self.jobs.values()):
            self._finish(job, JobPhase.ENDED, "the cluster was closed")
        folders.end(self.record.path, EndKind.CLOSED, 0, "closed by its owner")
        record = self.ledger.get(self.id)
        if not record.submissions:
            self._update(finished=True)
            return
        try:
            cancelling.cancel(record, timeout=CLOSE_TIMEOUT)
        except GpujobsError as error:
            logger.warning("%s was closed, but %s; its jobs exit by themselves", self.id, error)

    def write_target(self, jobs: int) -> None:
        """Write the wanted number of workers into the ledger."""
        workers = jobs * self.workers_per_job
        if workers != self.record.workers:
            gpus = jobs * self.plan.workers.shape.gpus
            self.record = self._update(workers=workers, gpus=gpus)

    def _update(self, **changes: object) -> ClusterRecord:
        return self.ledger.update(self.id, **changes)

    # -- watch -------------------------------------------------------------------------------------
    def query_soon(self) -> None:
        """Something has changed: query the batch scheduler at the next refresh."""
        self._monitor.query_soon(QUERY_DELAY)

    async def refresh(self, connected: frozenset[str], lock: asyncio.Lock) -> list[JobReport]:
        """Take in a new report; return the jobs that have ended since the last one.

        ``connected``: the names of the workers that dask reports. ``lock``: held while jobs are
        judged, since a job that is being removed is not to be replaced.
        """
        report = self.report = await asyncio.to_thread(self._monitor.report, connected)
        now = time.monotonic()
        async with lock:
            changed = self._update_jobs(report, now)
            ended = [job for job in self.jobs.values() if self._has_ended(job, now)]
            reports = [self._judge_end(job) for job in ended]
        if changed:
            self.query_soon()
        self._check_cluster(report)
        return reports

    def _update_jobs(self, report: ClusterReport, now: float) -> bool:
        changed = False
        for job in report.jobs:
            known = self.jobs.get(job.number)
            if known is None:
                continue
            job = replace(job, head=job.head or known.report.head)
            changed = known.update(job, now) or changed
            if job.phase is JobPhase.RUNNING:
                self.failed_starts = 0
            self._note_walltime(known, now)
        return changed

    def _has_ended(self, job: PoolJob, now: float) -> bool:
        lost = job.lost_since is not None and now - job.lost_since > LOST_TIMEOUT
        return lost or not job.report.active

    def _judge_end(self, job: PoolJob) -> JobReport:
        """Move a job that has ended to the past ones; a start that failed is counted."""
        report = job.report
        if report.phase is JobPhase.LOST:
            self._in_background(self._cancel_jobs([report.job]))
            return self._finish(job, JobPhase.ENDED, "it runs, but its workers disconnected")
        reason = report.reason or report.state.value
        if report.phase is JobPhase.FAILED:
            self.failed_starts += 1
        return self._finish(job, report.phase, reason)

    def _check_cluster(self, report: ClusterReport) -> None:
        """Note why no more jobs are to be submitted."""
        if message := shared_gpu_message(report.folder.workers):
            hint = "two jobs were given the same GPU: contact the support of the site"
            self.conflict = JobFailedError(message, hint=hint)
        if self.error is not None:
            return
        if self.ended and not self._closing.is_set():
            self.error = self._ended_error()
        elif self.failed_starts >= FAILED_STARTS:
            self.error = self._failed_starts_error()

    def _ended_error(self) -> JobFailedError:
        reason = self.report.reason if self.report else ""
        return JobFailedError(f"{self.id} has ended: {reason or 'run: has finished'}")

    def _failed_starts_error(self) -> JobFailedError:
        last = next(job for job in reversed(self.past) if job.phase is JobPhase.FAILED)
        tail = "".join(f"\n  | {line}" for line in last.log)
        jobs = f"{self.failed_starts} jobs in a row ended before their workers connected"
        hint = "fix it and call scale() again; see cluster.jobs and cluster.get_logs()"
        return JobFailedError(f"{jobs}; the last one: {last.reason}{tail}", hint=hint)

    def _note_walltime(self, job: PoolJob, now: float) -> None:
        """A job is replaced before its walltime, so that its workers can transfer their data."""
        walltime = self.plan.workers.walltime
        if walltime and job.running_since is not None and not job.report.head:
            overlap = min(MAX_OVERLAP, walltime / 4)
            ran = now - job.running_since
            job.leaving = ran > walltime - warning(walltime) - overlap

    def _finish(self, job: PoolJob, phase: JobPhase, reason: str) -> JobReport:
        """Move a job to the past ones; return its last report."""
        report = replace(job.report, phase=phase, reason=reason)
        if phase is JobPhase.FAILED:
            report = with_log(self.record, report)
        self.jobs.pop(report.number, None)
        self.past.append(report)
        return report

    def _in_background(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            with contextlib.suppress(GpujobsError):
                await work

        task = asyncio.ensure_future(run())
        self._background.add(task)  # a task without a reference may be collected
        task.add_done_callback(self._background.discard)
