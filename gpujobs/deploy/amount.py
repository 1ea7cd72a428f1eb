"""The number of jobs that `scale` requests, from any way to say it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dask.utils import parse_bytes

from ..errors import InputError
from ..planning.plan import Plan
from ..text import plural


@dataclass(frozen=True)
class Amount:
    """The arguments of `scale`: the largest of ``n``, ``memory`` and ``cores``, or ``jobs``."""

    n: int | None = None
    jobs: int | None = None
    memory: str | int | None = None
    cores: int | None = None

    def in_jobs(self, plan: Plan, log: Callable[[str], None]) -> int:
        """Return the number of whole jobs; ``log`` is called if that means more workers.

        Raises InputError.
        """
        for name, value in (("n", self.n), ("jobs", self.jobs), ("cores", self.cores)):
            if value is not None and not _is_number(value):
                raise InputError(f"scale: {name}={value!r} is not a number of at least 0")
        if self.jobs is not None:
            return math.ceil(self.jobs)
        workers, size = self._workers(plan), plan.workers.shape.workers
        jobs = math.ceil(workers / size)
        if jobs * size != workers:
            log(f"{workers} workers are {plural(jobs, 'job')} of {size}: {jobs * size} workers")
        return jobs

    def _workers(self, plan: Plan) -> int:
        workers = [self.n or 0]
        if self.memory is not None and plan.workers.shape.worker_memory:
            workers.append(math.ceil(parse_bytes(self.memory) / plan.workers.shape.worker_memory))
        if self.cores is not None:
            workers.append(math.ceil(self.cores / plan.workers.shape.worker_threads))
        return max(workers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
