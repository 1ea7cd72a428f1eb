"""The rule by which workers leave before their job ends: the rest is too short for a task."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dask.utils import parse_timedelta
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import TaskPrefix, WorkerState, heartbeat_interval

from .configuration import MARGIN, WALLTIME
from .drain import INFORMATION, Drain, Key, life_key
from .names import DRAINED

NAME = "gpujobs-rest"
"""Of the dask scheduler's plugin."""
INTERVAL = 1.0
"""Seconds between two looks at all workers."""
_UNDONE = ("waiting", "queued", "no-worker", "processing")
"""States of tasks that run, or will."""
_ANNOTATION = "task_time"
"""``dask.annotate(task_time="4m")``: a task takes so long at most."""


@dataclass
class _Life:
    """Times in seconds. A worker whose first life was too short for a task never waits for it."""

    ends: float
    """By the monotonic clock of the dask scheduler."""
    longest: float
    """From the first registration of the worker in this run of its job until ``ends``."""
    task_time: float


class Rest(SchedulerPlugin):  # type: ignore[misc]
    """Lets a worker leave when the rest of its job is shorter than the longest task that may start.

    Tasks take as long as the longest of their prefix that has ended or runs, or as the user
    states. A task that is longer than a worker ever lives drains none: it would be lost anyway.
    """

    def __init__(self, scheduler: Scheduler, drain: Drain, tell: Callable[[str], None]) -> None:
        """``tell`` gets messages for the user."""
        self._scheduler = scheduler
        self._drain = drain
        self._tell = tell
        self._lives: dict[str, _Life] = {}
        """Of the workers with an end, by address."""
        self._first: dict[Key, float] = {}
        """`_Life.longest`, also of workers that their nanny restarts."""
        self._seen: dict[str, float] = {}
        """Seconds of the longest task that has ended, by prefix."""
        self._stated: dict[str, float] = {}
        """Seconds in annotations, by prefix."""
        self._longest = -1.0
        """Seconds of the longest task at the last look; -1: there was none."""
        self._told: set[str] = set()
        self._watching: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Add this to the dask scheduler, and watch the workers."""
        self._scheduler.add_plugin(self, name=NAME)
        self._scheduler.handlers[DRAINED] = self.drained
        self._watching = asyncio.create_task(self._watch())

    def drained(self) -> dict[str, Any]:
        """Return the names of the workers that leave, and the longest task for which others do.

        The names are in `names`, the seconds in `task_time`.
        """
        names = [str(state.name) for state in self._drain.leaving()]
        durations = self._durations(self._undone())
        needed = [_needed(life, MARGIN, durations) for life in self._lives.values()]
        return {"names": names, "task_time": max(needed, default=0.0)}

    # -- hooks of the dask scheduler ---------------------------------------------------------------
    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note when a worker ends. ``worker`` is its address."""
        state = scheduler.workers[worker]
        life: Mapping[str, Any] = state.extra.get(INFORMATION, {})
        left = life.get("left", float("inf"))
        if left < float("inf"):
            first = self._first.setdefault(life_key(state), left)
            self._lives[worker] = _Life(time.monotonic() + left, first, life["task_time"])
            self._decide(state, self._durations(self._undone()))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Forget a worker."""
        self._lives.pop(worker, None)

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, startstops: Any = None, **_: Any
    ) -> None:
        """Note how long a task took. This is called several times for each task."""
        if start == "processing" and finish == "memory" and startstops:
            name = self._scheduler.tasks[key].prefix.name
            for part in startstops:
                took = part["stop"] - part["start"]
                if part["action"] == "compute" and took > self._seen.get(name, 0.0):
                    self._seen[name] = took

    def update_graph(
        self,
        scheduler: Scheduler,
        *,
        tasks: Iterable[Any],
        annotations: Mapping[str, Mapping[Any, Any]],
        **_: object,
    ) -> None:
        """Look at the workers before new tasks start, if they take longer than the others."""
        for key, value in annotations.get(_ANNOTATION, {}).items():
            if task := scheduler.tasks.get(key):
                self._note_stated(task.prefix.name, value)
        if self._lives:
            coming = {scheduler.tasks[key].prefix for key in tasks}
            if max((self._duration(prefix) for prefix in coming), default=-1.0) > self._longest:
                self.look(coming)

    async def before_close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()

    # -- the rule ----------------------------------------------------------------------------------
    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(INTERVAL)

    def look(self, coming: Iterable[TaskPrefix] = ()) -> None:
        """Let workers leave, or stay if the reason is gone; ``coming``: prefixes of new tasks."""
        prefixes = {*coming, *self._undone()}
        durations = self._durations(prefixes)
        self._longest = durations[-1] if durations else -1.0
        for address in self._lives:
            if state := self._scheduler.workers.get(address):
                self._decide(state, durations)
        self._tell_of_long_tasks(prefixes)

    def _undone(self) -> list[TaskPrefix]:
        """Return the prefixes of the tasks that run, or will."""
        every = self._scheduler.task_prefixes.values()
        return [prefix for prefix in every if any(prefix.states.get(state) for state in _UNDONE)]

    def _durations(self, prefixes: Iterable[TaskPrefix]) -> list[float]:
        return sorted(self._duration(prefix) for prefix in prefixes)

    def _decide(self, state: WorkerState, durations: Sequence[float]) -> None:
        """Let a worker leave, or stay if it was this rule that let it leave."""
        life, why = self._lives[state.address], self._drain.why_leaving(state)
        margin = MARGIN + state.nbytes / self._scheduler.bandwidth
        rest = life.ends - time.monotonic() - margin
        if rest >= _needed(life, margin, durations):
            if why == WALLTIME:
                self._drain.undrain(state)
        elif why is None and self._may_leave(state):
            self._drain.drain(state, WALLTIME)

    def _may_leave(self, state: WorkerState) -> bool:
        """Return whether a worker may leave: without any, dask may fail the tasks that wait."""
        return self._scheduler.no_workers_timeout is None or bool(self._scheduler.running - {state})

    def _duration(self, prefix: TaskPrefix) -> float:
        """Return how many seconds the longest task of a prefix takes; 0 if that is unknown."""
        name, running = prefix.name, float(prefix.max_exec_time)
        if running > 0:  # which heartbeats report late
            running += heartbeat_interval(len(self._scheduler.workers))
        return max(running, self._seen.get(name, 0.0), self._stated.get(name, 0.0))

    def _note_stated(self, prefix: str, value: Any) -> None:
        try:
            seconds = float(parse_timedelta(value))
        except (TypeError, ValueError, KeyError):
            text = f"task_time of {prefix}: {value!r} is no time"
            self._tell_once(text, text)
            return
        self._stated[prefix] = max(seconds, self._stated.get(prefix, 0.0))

    def _tell_of_long_tasks(self, prefixes: Iterable[TaskPrefix]) -> None:
        if len(self._lives) < len(self._scheduler.workers) or not self._lives:
            return
        longest = max(life.longest for life in self._lives.values()) - MARGIN
        for prefix in prefixes:
            if self._duration(prefix) > longest:
                lives = f"the {longest:.0f} s that a worker lives"
                text = f"tasks {prefix.name} take longer than {lives}: they are lost with it"
                self._tell_once(f"long {prefix.name}", text)  # the seconds differ

    def _tell_once(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self._tell(text)


def _needed(life: _Life, margin: float, durations: Sequence[float]) -> float:
    """Return the longest task that a worker waits for; ``durations``: of all, sorted."""
    if not durations:
        return 0.0
    most = life.longest - margin
    number = bisect_right(durations, most)
    longest = durations[number - 1] if number else 0.0
    return max(longest, life.task_time) if life.task_time <= most else longest
