"""The dask scheduler in a job: for dask it is a process to start, to have an address and to close."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from ..clusters import folder as folders
from ..errors import JobFailedError
from ..schedulers import JobState
from .pool import off_loop

if TYPE_CHECKING:
    from .pool import JobPool


class HeadJob(ProcessInterface):  # type: ignore[misc]
    """Submits the head's job, waits for its dask scheduler, and says why it did not come."""

    def __init__(self, workforce: JobPool, security: Any = None, **kwargs: Any) -> None:
        self.workforce, self.security = workforce, security
        self.job_started = float("inf")
        super().__init__(**kwargs)

    async def start(self) -> None:
        """Return when the dask scheduler has an address; JobFailedError when its job is over before that."""
        force, path = self.workforce, self.workforce.record.path
        job = await force.submit_head()
        lock = asyncio.Lock()
        while (facts := await off_loop(folders.read, path)).address is None:
            await asyncio.sleep(0.2)
            if await force.look(frozenset(), lock) or facts.ended is not None:
                tail = folders.tail(path / "logs" / "scheduler.log", 5) or list(job.tail)
                reason = (facts.ended or {}).get("reason") or job.reason
                raise JobFailedError(
                    f"the dask scheduler's job {job.job_id} ended: {reason}"
                    + "".join(f"\n  | {line}" for line in tail)
                )
            if (
                job.status.state is JobState.RUNNING
            ):  # a long queue is no failure, a job that does nothing is
                self.job_started = min(self.job_started, time.monotonic())
            if time.monotonic() - self.job_started > force.plan.profile.start_timeout:
                raise JobFailedError(
                    f"the dask scheduler's job {job.job_id} runs, but has no address yet"
                )
        self.address = facts.address
        if self.security is not None:  # the job may have chosen ucxx
            self.security.require_encryption = facts.scheme in ("tls", "wss")
        self.status = Status.running

    async def close(self) -> None:
        """Nothing is left to do: the cluster cancels all its jobs."""
        self.status = Status.closed
