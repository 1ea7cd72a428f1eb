"""The jobs of one cluster: submit more, take some away, see which ones are over. Knows nothing of dask's classes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..clusters import folder as folders
from ..clusters import monitor as clusters
from ..clusters.ledger import ClusterRecord, Ledger
from ..clusters.submit import new_record, send
from ..config.sources import ClusterSpec
from ..errors import GpujobsError, InputError, JobFailedError, RefusedError
from ..injob.gpus import shared_gpu_message
from ..planning.commandlines import JobRoles, warning
from ..planning.plan import JobGroup, Plan
from ..planning.render import Script, render_jobs
from .job import Job, Phase, gpus_of

logger = logging.getLogger("gpujobs")

FAILED_STARTS = 3
"""So many jobs in a row that end before their workers connect stop the resubmitting."""
LOST = 60.0
"""Seconds after which a job that runs without workers is given up."""
CLOSE = 12.0
"""Seconds for which closing waits for a batch scheduler that is away; the jobs end by themselves."""
POLL_SLOWEST = 60.0

WORKERS = JobRoles(scheduler=False, workers=True, run=False, client_owns=True)


class JobPool:
    """The jobs of a cluster that this process owns. Methods that take time run off the event loop."""

    def __init__(self, spec: ClusterSpec, plan: Plan, ledger: Ledger) -> None:
        self.spec, self.plan, self.ledger = spec, plan, ledger
        self.id = ledger.new_id(plan.name)
        self.record: ClusterRecord = new_record(plan, self.id, owner="client")
        self.workers_per_job = plan.workers.shape.workers
        self.jobs: dict[int, Job] = {}
        self.past: deque[Job] = deque(maxlen=200)
        self.failed_starts = 0
        self.error: Exception | None = None
        self.conflict: Exception | None = None
        """Two workers have one GPU."""
        self._next = 0
        self._stopping = threading.Event()
        self._batch = clusters.batch_of(self.record, logger.info)
        self._batch.stopping = self._stopping.is_set
        self._poll_interval, self.next_poll = float(plan.site.poll), 0.0

    def counting(self) -> list[Job]:
        """Return the jobs that count towards a target: those with workers whose walltime is not nearly over."""
        return [job for job in self.jobs.values() if job.workers and not job.leaving]

    # -- more -------------------------------------------------------------------------------------------------
    async def submit(self, count: int) -> None:
        """Submit ``count`` worker jobs: one array, or as many as the site's limit makes of it."""
        self._check_limits(count)
        first, self._next = self._next, self._next + count
        scripts = self.scripts(self.plan.workers, WORKERS, first, count, self._free_devices(count))
        await self._send(scripts, workers=True)

    async def submit_head(self) -> Job:
        """Submit the job of the dask scheduler: of its own shape, or the first worker job."""
        jobs = self.plan.head or self.plan.workers
        roles = JobRoles(
            scheduler=True, workers=self.plan.head is None, run=False, client_owns=True
        )
        first, self._next = self._next, self._next + 1
        devices = self._free_devices(1) if roles.workers else ()
        await self._send(self.scripts(jobs, roles, first, 1, devices), roles.workers)
        self.jobs[first].head = True
        return self.jobs[first]

    def scripts(
        self, jobs: JobGroup, roles: JobRoles, first: int, count: int, devices: tuple[str, ...] = ()
    ) -> list[Script]:
        """Return the scripts of jobs numbered from ``first``."""
        folder = self.spec.site.path.parent
        return render_jobs(
            self.plan, self.id, jobs, roles, first, count, site_folder=folder, devices=devices
        )

    def next_script(self) -> str:
        """Return the script of the next worker job."""
        return self.scripts(self.plan.workers, WORKERS, self._next, 1)[0].text

    async def _send(self, scripts: Sequence[Script], workers: bool) -> None:
        for script in scripts:
            self.record = await off_loop(send, self.record, script, self._batch, self.ledger)
            gpus = script.jobs.shape.gpus
            for n, (number, job_id) in enumerate(self.record.submissions[-1].jobs.items()):
                names = tuple(self.plan.job_worker_names(self.id, number)) if workers else ()
                self.jobs[number] = Job(
                    number, job_id, names, devices=script.devices[n * gpus : (n + 1) * gpus]
                )
        self.look_soon()

    def _check_limits(self, count: int) -> None:
        site, jobs = self.plan.site, len(self.jobs) + count
        queue = site.queues[self.plan.workers.queue_key]
        for limit, what in (
            (queue.max_jobs, f"queue {self.plan.workers.queue}"),
            (site.max_queued_jobs, "the site"),
        ):
            if limit and jobs > limit:
                raise InputError(f"{jobs} jobs; {what} allows {limit} at once")

    def _free_devices(self, count: int) -> tuple[str, ...]:
        """Return GPUs of this machine for ``count`` more jobs; none where a batch scheduler gives them."""
        if not self.plan.devices:
            return ()
        taken = {device for job in self.jobs.values() for device in job.devices}
        free = [device for device in self.plan.devices if device not in taken]
        wanted = count * self.plan.workers.shape.gpus
        if len(free) < wanted:
            raise RefusedError(
                f"{wanted} more GPUs wanted; {len(free)} of this machine's {len(self.plan.devices)} are free"
            )
        return tuple(free[:wanted])

    # -- less -------------------------------------------------------------------------------------------------
    def cheapest(self, count: int, load: dict[str, int]) -> list[Job]:
        """Return the jobs that cost least to lose: waiting ones, then those with the least to do; never the head."""
        jobs = [job for job in reversed(self.counting()) if not job.head]

        def cost(job: Job) -> tuple[int, int]:
            return (
                2 if job.connected else job.phase is Phase.STARTING,
                sum(load.get(name, 0) for name in job.workers),
            )

        return sorted(jobs, key=cost)[:count]

    async def remove(self, jobs: list[Job], retire: Callable[[list[str]], Awaitable[Any]]) -> None:
        """Take jobs away: their workers hand over through ``retire``, then one cancel for all."""
        for job in jobs:  # first of all: they are not to be replaced
            self._over(job, Phase.ENDED, "removed")
        names = [name for job in jobs for name in job.connected]
        if names:
            await retire(names)
        await self._cancel(jobs)

    async def _cancel(self, jobs: list[Job]) -> None:
        targets: dict[str, list[int]] = {}
        for job in jobs:
            indexes = targets.setdefault(job.id.submission, [])
            indexes += [job.id.index] if job.id.index is not None else []
        for submission, indexes in targets.items():
            if not any(job.id.submission == submission for job in self.jobs.values()):
                indexes.clear()  # all that is left of it: the whole array in one word
        if targets:
            removed = (*self.record.removed, *(job.number for job in jobs))
            self.record = await off_loop(lambda: self.ledger.update(self.id, removed=removed))
            await off_loop(self._batch.cancel, targets)

    def end_all(self) -> None:
        """Cancel everything; what cannot be cancelled now finds that the cluster has ended, and leaves."""
        self._stopping.set()
        for job in list(self.jobs.values()):
            self._over(job, Phase.ENDED, "the cluster was closed")
        folders.end(self.record.path, 0, "closed by its owner")
        record = self.ledger.get(self.id)
        if not record.submissions:
            self.ledger.update(self.id, finished=True)
            return
        try:
            clusters.cancel(record, logger.info, CLOSE)
        except GpujobsError as error:
            logger.warning("%s was closed, but %s; its jobs end by themselves", self.id, error)

    # -- watch ------------------------------------------------------------------------------------------------
    def look_soon(self) -> None:
        """Something moved: ask the batch scheduler at the next look, and often for a while."""
        self._poll_interval, self.next_poll = (
            float(self.plan.site.poll),
            min(self.next_poll, time.monotonic() + 1.0),
        )

    async def look(self, observed: frozenset[str], lock: asyncio.Lock) -> list[Job]:
        """Look once: which workers are there, what jobs left behind, now and then what the batch scheduler says.

        Returns the jobs that are over since the last look.
        """
        now = time.monotonic()
        facts = await off_loop(folders.read, self.record.path)
        for job in self.jobs.values():
            job.id = facts.claims.get(
                job.number, job.id
            )  # the same, unless the number was sent twice
            job.gpus = gpus_of(job.workers, facts.workers)
        moved = [job for job in self.jobs.values() if job.look(observed, now)]
        if any(job.phase is Phase.RUNNING for job in moved):
            self.failed_starts = 0
        if now >= self.next_poll:
            await self._ask(bool(moved), observed, now)
        async with lock:
            over = [job for job in list(self.jobs.values()) if self._judge(job, facts, now)]
        if shared := shared_gpu_message(facts.workers):
            self.conflict = JobFailedError(
                shared, hint="two jobs were given the same GPU: tell the site's support"
            )
        if self.failed_starts >= FAILED_STARTS and self.error is None:
            self.error = self._why_stopped()
        return over

    async def _ask(self, moved: bool, observed: frozenset[str], now: float) -> None:
        active = list(self.jobs.values())
        found = await off_loop(self._batch.status, [job.id for job in active], [self.id])
        for job in active:
            before = job.status.state
            job.told(found[job.id], now)
            moved = moved or job.status.state is not before
            job.look(observed, now)
        fastest = float(self.plan.site.poll)
        self._poll_interval = (
            fastest if moved else min(max(POLL_SLOWEST, fastest), self._poll_interval * 1.5)
        )
        self.next_poll = now + self._poll_interval

    def _judge(self, job: Job, facts: folders.FolderState, now: float) -> bool:
        """Decide whether a job is over, and whether that was a start that failed."""
        record, state = facts.records.get(job.number), job.status.state
        left_alone = job.phase is Phase.LOST and now - (job.lost_since or now) > LOST
        if job.number not in self.jobs or (record is None and state.active and not left_alone):
            self._note_walltime(job, now)
            return False
        code = (record or {}).get("exit_code", job.status.exit_code)
        reason = (
            facts.reasons.get(job.number)
            or job.status.reason
            or ("" if state.active else state.value)
        )
        if record is None and state.active:
            reason = "it runs, but its workers are gone"
            targets = {job.id.submission: [] if job.id.index is None else [job.id.index]}
            self._in_background(off_loop(self._batch.cancel, targets))
        told = (
            job.number in facts.reasons
        )  # a job that could not reach us ends with 0, and says why
        if job.ever_connected or (code == 0 and not told):
            self._over(job, Phase.ENDED, reason)
        else:
            self.failed_starts += 1
            job.tail = tuple(folders.tail(self.record.path / "logs" / f"job-{job.number}.log", 8))
            self._over(job, Phase.FAILED, reason or f"exit code {code}")
        return True

    def _note_walltime(self, job: Job, now: float) -> None:
        """A job whose walltime is nearly over is replaced before it goes, so that its workers can hand over."""
        walltime = self.plan.workers.walltime
        if walltime and job.running_since is not None and not job.head:
            overlap = min(120.0, walltime / 4)
            job.leaving = now - job.running_since > walltime - warning(walltime) - overlap

    def _why_stopped(self) -> JobFailedError:
        last = next(job for job in reversed(self.past) if job.phase is Phase.FAILED)
        tail = "".join(f"\n  | {line}" for line in last.tail)
        return JobFailedError(
            f"{self.failed_starts} jobs in a row ended before their workers connected; the last: {last.reason}{tail}",
            hint="mend it and call scale() again; cluster.jobs and cluster.get_logs() say more",
        )

    def _over(self, job: Job, phase: Phase, reason: str) -> None:
        job.phase, job.reason = phase, reason
        self.jobs.pop(job.number, None)
        self.past.append(job)

    def _in_background(self, work: Awaitable[Any]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(GpujobsError):
                await work

        self._background = asyncio.ensure_future(quietly())  # kept, or it might be collected


async def off_loop(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that blocks, in a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, lambda: function(*arguments))
