"""The number of jobs that `scale` requests, from any way to say it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dask.utils import parse_bytes

from ..errors import InputError
from ..text import plural
from .group import WorkerGroup


@dataclass(frozen=True)
class Amount:
    """The arguments of `scale`, of which the largest counts; ``jobs`` only without ``n``."""

    n: int | None = None
    jobs: int | None = None
    memory: str | int | None = None
    cores: int | None = None

    @property
    def given(self) -> bool:
        """Whether there is any number."""
        return self != Amount()

    def in_jobs(self, group: WorkerGroup, log: Callable[[str], None]) -> int:
        """Return the number of whole jobs of a group; ``log`` is called if that is more workers.

        Raises InputError.
        """
        for name, value in (("n", self.n), ("jobs", self.jobs), ("cores", self.cores)):
            if value is not None and not _is_number(value):
                raise InputError(f"scale: {name}={value!r} is not a number of at least 0")
        workers, size = self._workers(group), group.size
        jobs = group.jobs_for(workers)
        if jobs * size != workers:
            log(f"{workers} workers are {plural(jobs, 'job')} of {size}: {jobs * size} workers")
        if self.jobs is not None and self.n is None:
            return max(jobs, math.ceil(self.jobs))
        return jobs

    def _workers(self, group: WorkerGroup) -> int:
        workers, shape = [self.n or 0], group.jobs.shape
        if self.memory is not None:
            if not shape.worker_memory:
                message = "scale: the memory of a worker is not known; give a number of workers"
                raise InputError(message, hint="or set worker_memory=…")
            workers.append(math.ceil(parse_bytes(self.memory) / shape.worker_memory))
        if self.cores is not None:
            workers.append(math.ceil(self.cores / shape.worker_threads))
        return max(workers)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
