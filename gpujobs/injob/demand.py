"""The work of a cluster: the workers that it needs, and when a cluster without work ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    from distributed import Scheduler
    from distributed.scheduler import TaskState, WorkerState


# -- calls of a cluster's owner: the workers that a group needs, and that no more will come --------
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

    def demand(target_duration: float, **group: Any) -> int:
        found = _Group(scheduler, **group)
        return max(found.for_tasks(target_duration), found.for_memory())

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
        import asyncio

        self._error = error
        if error and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        import asyncio

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


@dataclass
class _Group:
    """The workers whose names start with ``prefix``, each with ``resources`` and ``threads``.

    ``plain_tasks``: tasks that ask for no resource are theirs.
    """

    scheduler: Scheduler
    prefix: str
    resources: Mapping[str, float]
    threads: int
    plain_tasks: bool

    def __post_init__(self) -> None:
        from distributed.core import Status

        every: Iterable[WorkerState] = self.scheduler.workers.values()
        own = [worker for worker in every if str(worker.name).startswith(self.prefix)]
        self._nbytes: int = sum(worker.nbytes for worker in own)
        # Those that leave end the tasks that they have, and others get their data.
        self._workers = [worker for worker in own if worker.status != Status.closing_gracefully]

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
        used = self._nbytes
        if not limit:
            return max(1, len(self._workers)) if used else 0
        if used > _FULL * limit:
            return 2 * len(self._workers)
        return math.ceil(2 * used / (limit / len(self._workers)))

    def _waiting(self) -> tuple[int, list[TaskState], float]:
        """Return the number of waiting tasks, a sample of them, and what it stands for."""
        queued, unrunnable = self.scheduler.queued, self.scheduler.unrunnable
        number = len(queued) + len(unrunnable)
        sample = list(islice(chain(unrunnable, queued), _SAMPLE))
        own = [task for task in sample if self._can_run(task)]
        return len(own), own, number / max(1, len(sample))

    def _can_run(self, task: TaskState) -> bool:
        needed = task.resource_restrictions or {}
        if not needed:
            return self.plain_tasks
        return all(self.resources.get(name, 0) >= amount for name, amount in needed.items())

    def _share(self, task: TaskState) -> float:
        """Return the part of a worker that the task needs."""
        needed: Mapping[str, float] = task.resource_restrictions or {}
        parts = [
            amount / self.resources[name]
            for name, amount in needed.items()
            if amount and self.resources.get(name)
        ]
        return max(1 / self.threads, *parts, 0.0)

    def _work(self, task: TaskState) -> float:
        duration: float = task.prefix.duration_average
        return self._share(task) * (duration if duration >= 0 else _UNKNOWN_DURATION)


# -- when a cluster without work ends: rules, and how long each has been true ----------------------
# A rule is what the dask scheduler must be without, and for how many seconds.

END_AFTER = "GPUJOBS_END_AFTER"
"""Variable with the rules, for the dask scheduler."""
RULES = {
    "idle": "without tasks",
    "client": "without clients",
    "unused": "without tasks and clients",
    "idle_workers": "without tasks",
}
"""The conditions by name, in words for the user.

``idle_workers``: while workers are connected; a Python process's cluster may have none for hours.
"""
_WARNED = 300
"""Seconds before the end of a cluster."""
_STEP = 2
"""A process that was stopped, or a busy event loop, counts as so many intervals, not as idle."""


def rules_text(rules: Mapping[str, int]) -> str:
    """Return ``{"idle": 600}`` as an option: ``idle=600``."""
    return ",".join(f"{name}={seconds}" for name, seconds in rules.items())


def parse_rules(text: str) -> dict[str, int]:
    """Return the rules of an option; {} for ""."""
    pairs = (item.partition("=") for item in text.split(",") if item)
    return {name: int(seconds) for name, _, seconds in pairs}


class IdleWatch:
    """How long each of ``rules`` has been true, from observations in regular intervals."""

    def __init__(self, rules: Mapping[str, int]) -> None:
        self._rules = rules
        self.interval = min([5.0, *(seconds / 4 for seconds in rules.values())])
        """Seconds between two observations."""
        self._seconds = dict.fromkeys(rules, 0.0)
        self._last: float | None = None

    def observe(self, now: float, *, tasks: bool, clients: bool, workers: bool = True) -> None:
        """Note whether there are unfinished tasks, clients and workers at ``now``, in seconds."""
        passed = 0.0 if self._last is None else min(now - self._last, _STEP * self.interval)
        self._last = now
        true = {
            "idle": not tasks,
            "client": not clients,
            "unused": not (tasks or clients),
            "idle_workers": workers and not tasks,
        }
        for name in self._rules:
            self._seconds[name] = self._seconds[name] + passed if true[name] else 0.0

    @property
    def next_end(self) -> tuple[float, str] | None:
        """Seconds until the cluster ends if nothing changes, and by which rule; None if by none."""
        lefts = [
            (self._rules[name] - spent, name) for name, spent in self._seconds.items() if spent
        ]
        return min(lefts, default=None)

    @property
    def warning(self) -> str:
        """How soon the cluster ends, in the last third of a rule, at most 5 minutes; or ""."""
        left, name = self.next_end or (0.0, "")
        if 0 < left <= min(_WARNED, self._rules[name] / 3):
            return f"the cluster ends in {left:.0f} s, if it stays {RULES[name]}"
        return ""

    @property
    def reason(self) -> str:
        """Why the cluster ends now, or ""."""
        for name, limit in self._rules.items():
            if self._seconds[name] >= limit:
                return f"the cluster was {RULES[name]} for {limit} s"
        return ""
