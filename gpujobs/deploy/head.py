"""The dask scheduler of a cluster that this process owns: in this process, or in a job."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import Scheduler
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from ..clusters import folder as folders
from ..clusters.folderstate import FolderState
from ..errors import InputError, JobFailedError
from ..injob.names import LOOPBACK
from ..injob.ports import first_free, port_range
from ..schedulers import JobState
from .encryption import check_encryption
from .job import PoolJob
from .pool import JobPool

if TYPE_CHECKING:
    from distributed.security import Security

ADDRESS_INTERVAL = 0.2


def local_scheduler(
    pool: JobPool,
    security: Security | None,
    options: dict[str, Any],
    place: str = "scheduler_options",
) -> dict[str, object]:
    """Return dask's specification of a dask scheduler in this process; ``options`` win.

    ``place`` names them in messages. Raises InputError.
    """
    plan = pool.plan
    dashboard = plan.profile.network.dashboard
    own: dict[str, object] = {
        "protocol": f"{plan.transport.protocols[0]}://",
        "security": security,
        "dashboard_address": ":8787" if dashboard == "on" else f"{LOOPBACK}:8787",
        "scheduler_file": str(pool.record.path / "scheduler.json"),
    }
    check_encryption(plan, options, place)
    if plan.site.network.ports:
        own["port"] = first_free(port_range(plan.site.network.ports))
    if dashboard == "off":
        own |= {"dashboard": False, "dashboard_address": f"{LOOPBACK}:0"}
    if "host" not in options and "interface" not in options:
        if plan.transport.interface:
            _check_interface(plan.transport.interface)
            own["interface"] = plan.transport.interface
        elif plan.scheduler.on_this_machine:
            own["host"] = LOOPBACK
    return {"cls": Scheduler, "options": {**own, **options}}


def _check_interface(name: str) -> None:
    """Raise InputError if this host, for example a login node, does not have the interface."""
    here = [interface for _, interface in socket.if_nameindex()]
    if name not in here:
        message = f"this host has no network interface {name}; it has {', '.join(here)}"
        hint = (
            'scheduler="job" runs the dask scheduler in a job, which has it; or name an interface '
            'of this host that compute nodes reach: scheduler_options={"interface": …}'
        )
        raise InputError(message, hint=hint)


def job_scheduler(pool: JobPool, security: Security | None) -> dict[str, object]:
    """Return dask's specification of a dask scheduler in a job."""
    return {"cls": HeadJob, "options": {"pool": pool, "security": security}}


@dataclass
class _Start:
    """The start of the head's job; times are those of the monotonic clock."""

    job: PoolJob
    running_since: float | None = None

    def runs_for(self) -> float:
        """Return for how many seconds the job has run."""
        now = time.monotonic()
        if self.running_since is None and self.job.report.state is JobState.RUNNING:
            self.running_since = now
        return 0.0 if self.running_since is None else now - self.running_since


class HeadJob(ProcessInterface):  # type: ignore[misc]
    """Submits the head's job and waits for its dask scheduler; for dask it is a process."""

    def __init__(self, pool: JobPool, security: Security | None = None, **kwargs: Any) -> None:
        self.pool = pool
        self.security = security
        super().__init__(**kwargs)

    async def start(self) -> None:
        """Return when the dask scheduler has an address.

        Raises JobFailedError if its job ends before that, or runs too long without one.
        """
        start = _Start(await self.pool.submit_head())
        state = await self._wait_for_address(start)
        self.address = state.address
        if self.security is not None:  # the job may have chosen ucxx
            self.security.require_encryption = state.encrypted
        self.status = Status.running

    async def _wait_for_address(self, start: _Start) -> FolderState:
        pool, lock = self.pool, asyncio.Lock()
        while True:
            ended = await pool.refresh(frozenset(), lock)
            state = pool.folder_state
            if state.address is not None and state.ended is None:
                return state
            if ended or state.ended is not None:
                raise JobFailedError(self._why_ended(start.job, state))
            # A long queue is no failure; a job that runs without a dask scheduler is.
            if start.runs_for() > pool.plan.profile.start_timeout:
                job = start.job.report.id
                raise JobFailedError(f"the dask scheduler's job {job} runs, but has no address yet")
            await asyncio.sleep(ADDRESS_INTERVAL)

    def _why_ended(self, job: PoolJob, state: FolderState) -> str:
        reason = state.ended.reason if state.ended else ""
        past = (past for past in self.pool.jobs.past if past.number == job.report.number)
        last = next(past, job.report)
        log = folders.tail(self.pool.record.path / "logs" / "scheduler.log", 5) or last.log
        lines = "".join(f"\n  | {line}" for line in log)
        return f"the dask scheduler's job {job.report.id} ended: {reason or last.reason}{lines}"

    async def close(self) -> None:
        """Do nothing: the cluster cancels all its jobs."""
        self.status = Status.closed
