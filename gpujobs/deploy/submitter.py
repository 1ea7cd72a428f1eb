"""Renders the jobs of a pool: numbers, names of workers, GPUs of this machine."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..clusters.ledger import Submission
from ..clusters.report import JobPhase, JobReport
from ..config.spec import ClusterSpec
from ..errors import RefusedError
from ..injob.names import HEAD
from ..planning.commandlines import JobRoles
from ..planning.plan import JobGroup, Plan
from ..planning.render import Script, render_jobs
from ..schedulers import JobState
from .job import PoolJob

WORKERS = JobRoles(scheduler=False, workers=True, run=False, client_owns=True)


class Submitter:
    """Renders scripts of one cluster; every job gets the next number."""

    def __init__(self, spec: ClusterSpec, plan: Plan, cluster_id: str) -> None:
        self.spec = spec
        self.plan = plan
        self.cluster_id = cluster_id
        self._next_number = 0

    def worker_scripts(
        self, group: JobGroup, count: int, used_devices: Collection[str], limit: int | None = None
    ) -> list[Script]:
        """Return the scripts of ``count`` jobs of a group, at most ``limit`` jobs each.

        Raises RefusedError without free GPUs.
        """
        devices = self._free_devices(group, count, used_devices)
        return self._render(group, WORKERS, count, devices, limit)

    def head_scripts(self, used_devices: Collection[str]) -> list[Script]:
        """Return the script of the dask scheduler's job."""
        jobs = next(jobs for jobs in self.plan.all_jobs if self.plan.may_be_head(jobs))
        workers = self.plan.head is None
        roles = JobRoles(scheduler=True, workers=workers, run=False, client_owns=True)
        devices = self._free_devices(jobs, 1, used_devices) if workers else ()
        return self._render(jobs, roles, 1, devices)

    def next_script(self, group: JobGroup) -> str:
        """Return the script of the next job of a group, without using its number."""
        number = self._next_number
        try:
            return self._render(group, WORKERS, 1)[0].text
        finally:
            self._next_number = number

    def jobs_of(
        self, submission: Submission, now: float, devices: tuple[str, ...] = ()
    ) -> Iterator[PoolJob]:
        """Yield the jobs of a submission that was accepted at ``now``, of the monotonic clock.

        ``devices``: the GPUs of this machine that all of them use.
        """
        workers = submission.group != HEAD
        jobs = next(jobs for jobs in self.plan.all_jobs if jobs.group == submission.group)
        gpus = jobs.shape.gpus
        for n, (number, job) in enumerate(submission.jobs.items()):
            names = self.plan.job_worker_names(self.cluster_id, number, jobs) if workers else []
            report = JobReport(
                number=number,
                job=job,
                phase=JobPhase.SUBMITTED,
                state=JobState.UNKNOWN,
                group=jobs.group if workers else "",
                workers=tuple(names),
                id=self.plan.scheduler.show_id(job),
            )
            yield PoolJob(
                report,
                now,
                devices=devices[n * gpus : (n + 1) * gpus],
                start_timeout=self.plan.profile.start_timeout,
            )

    def _render(
        self,
        group: JobGroup,
        roles: JobRoles,
        count: int,
        devices: tuple[str, ...] = (),
        limit: int | None = None,
    ) -> list[Script]:
        first = self._next_number
        self._next_number += count
        folder = self.spec.site.path.parent
        return render_jobs(
            self.plan,
            self.cluster_id,
            group,
            roles,
            first,
            count,
            limit=limit,
            site_folder=folder,
            devices=devices,
        )

    def _free_devices(self, group: JobGroup, count: int, used: Collection[str]) -> tuple[str, ...]:
        """Return GPUs of this machine for ``count`` jobs; none with a batch scheduler."""
        if not self.plan.devices:
            return ()
        free = [device for device in self.plan.devices if device not in used]
        wanted = count * group.shape.gpus
        if len(free) < wanted:
            total = len(self.plan.devices)
            raise RefusedError(
                f"{wanted} more GPUs wanted; {len(free)} of this machine's {total} are free"
            )
        return tuple(free[:wanted])
