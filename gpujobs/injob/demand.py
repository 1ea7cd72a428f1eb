"""Calls of a cluster's owner: the workers that a group needs, and that no more will come."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState


HANDLER = "gpujobs_demand"
"""Name of the call, which the dask scheduler answers."""
GIVE_UP = "gpujobs_give_up"
"""Name of the call that fails what clients wait for."""
_GIVE_UP_INTERVAL = 0.5
_UNKNOWN_DURATION = 0.5
"""Seconds of a task of which none has ended yet; dask's default."""
_SAMPLE = 1000
"""Waiting tasks that are inspected; more are extrapolated."""
_FULL = 0.6
"""Part of the memory above which more workers are needed."""


def add_handlers(scheduler: Scheduler) -> None:
    """Let the dask scheduler answer the calls of its owner."""

    def demand(
        prefix: str,
        resources: Mapping[str, float],
        threads: int,
        plain_tasks: bool,
        target_duration: float,
    ) -> int:
        group = _Group(scheduler, prefix, resources, threads, plain_tasks)
        return max(group.for_tasks(target_duration), group.for_memory())

    scheduler.handlers[HANDLER] = demand
    scheduler.handlers[GIVE_UP] = _GivenUp(scheduler).set_error


class _GivenUp:
    """Fails the tasks that clients wait for while there are no workers and none will come."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._error = b""
        self._failed: set[tuple[str, object]] = set()
        self._task: asyncio.Task[None] | None = None

    def set_error(self, error: bytes) -> None:
        """Fail tasks with the pickled exception ``error`` from now on; b"": no longer."""
        self._error = error
        if error and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        from distributed.core import Status

        self._failed.clear()
        while self._error and self._scheduler.status == Status.running:
            if not self._scheduler.workers:
                self._fail_tasks()
            await asyncio.sleep(_GIVE_UP_INTERVAL)

    def _fail_tasks(self) -> None:
        """The dask scheduler keeps the tasks: workers of a later `scale` do them."""
        for name, comm in self._scheduler.client_comms.items():
            for task in self._scheduler.clients[name].wants_what:
                sent = (name, task.key)
                if task.state in ("memory", "erred") or sent in self._failed:
                    continue
                self._failed.add(sent)
                message = {"op": "task-erred", "key": task.key, "exception": self._error}
                comm.send({**message, "traceback": None})


class _Group:
    """The workers whose names start with ``prefix``, each with ``resources`` and ``threads``.

    ``plain_tasks``: tasks that ask for no resource are theirs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        prefix: str,
        resources: Mapping[str, float],
        threads: int,
        plain_tasks: bool,
    ) -> None:
        self._resources, self._threads, self._plain_tasks = resources, threads, plain_tasks
        every: Iterable[WorkerState] = scheduler.workers.values()
        self._workers = [worker for worker in every if str(worker.name).startswith(prefix)]
        self._scheduler = scheduler

    def for_tasks(self, target_duration: float) -> int:
        """Return how many workers run all tasks within ``target_duration`` seconds, or can."""
        running = [task for worker in self._workers for task in worker.processing]
        number, waiting, scale = self._waiting()
        tasks = sum(map(self._share, running)) + scale * sum(map(self._share, waiting))
        seconds = sum(map(self._work, running)) + scale * sum(map(self._work, waiting))
        wanted = math.ceil(min(tasks, seconds / target_duration))
        return max(1, wanted) if number and not self._workers else wanted

    def for_memory(self) -> int:
        """Return how many workers hold the data of the group, with room to spare."""
        limit: int = sum(worker.memory_limit for worker in self._workers)
        used: int = sum(worker.nbytes for worker in self._workers)
        if not limit:
            return len(self._workers) if used else 0
        if used > _FULL * limit:
            return 2 * len(self._workers)
        return math.ceil(2 * used / (limit / len(self._workers)))

    def _waiting(self) -> tuple[int, list[TaskState], float]:
        """Return the number of waiting tasks, a sample of them, and what it stands for."""
        queued, unrunnable = self._scheduler.queued, self._scheduler.unrunnable
        number = len(queued) + len(unrunnable)
        sample = list(islice(chain(unrunnable, queued), _SAMPLE))
        own = [task for task in sample if self._can_run(task)]
        return len(own), own, number / max(1, len(sample))

    def _can_run(self, task: TaskState) -> bool:
        needed = task.resource_restrictions or {}
        if not needed:
            return self._plain_tasks
        return all(self._resources.get(name, 0) >= amount for name, amount in needed.items())

    def _share(self, task: TaskState) -> float:
        """Return the part of a worker that the task needs."""
        needed: Mapping[str, float] = task.resource_restrictions or {}
        parts = [
            amount / self._resources[name]
            for name, amount in needed.items()
            if amount and self._resources.get(name)
        ]
        return max(1 / self._threads, *parts, 0.0)

    def _work(self, task: TaskState) -> float:
        duration: float = task.prefix.duration_average
        return self._share(task) * (duration if duration >= 0 else _UNKNOWN_DURATION)
