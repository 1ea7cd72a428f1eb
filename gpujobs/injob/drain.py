"""Workers that leave: no new task starts on them, waiting ones go back, running ones end.

`retire_workers` of dask waits for data, never for tasks: those that run start again elsewhere. Here
it comes last. The order matters:

1. The dask scheduler takes the worker out of those that run, so that it gets no more tasks.
2. Through their stream, which keeps the order of messages, the worker is told to start nothing, and
   answers with the tasks that have not started. Another connection would overtake messages that
   are on their way, and tasks would start twice.
3. The dask scheduler takes those tasks back. It asks again and again, until the worker has none: a
   task may be on its way, and an older message of the worker may undo its new state for a moment.
4. `retire_workers` moves the data and closes the worker. It does nothing, and is repeated, while no
   other worker can take the data, and as long as the worker holds an actor. A worker that is no
   longer wanted is closed then all the same, without its data (`DATA_TIMEOUT`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from distributed import Scheduler, Worker
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

from .configuration import LIFE, WALLTIME, life_variable
from .events import Event
from .names import DRAIN, UNDRAIN

# -- the worker's part -----------------------------------------------------------------------------
INFORMATION = "gpujobs_life"
"""Key of the life of a worker, which it tells the dask scheduler when it registers."""
_LOOK, _WAITING = "gpujobs-look", "gpujobs-waiting"
"""Messages: of the dask scheduler, which tasks have not started? And the answer."""


def offer_drain(worker: Worker, environ: Mapping[str, str]) -> None:
    """Let the dask scheduler drain this worker; call it before the worker registers."""
    worker.stream_handlers[_LOOK] = partial(_answer, worker)
    worker.startup_information[INFORMATION] = partial(_life, environ=environ)


def _life(worker: Worker, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the life of a worker: which run of its job it is of, and how many seconds it has left.

    A lifetime is the user's own. Its worker leaves before; but one that restarts is left to dask.
    """
    job, ends, task_time = environ.get(LIFE, life_variable(0, float("inf"))).split()
    left = float(ends) - time.time()
    if worker.lifetime and not worker.lifetime_restart:
        left = min(left, worker.lifetime)
    return {"job": job, "left": left, "task_time": float(task_time)}


def _answer(worker: Worker, number: int) -> None:
    """Start no more tasks, and name those that have not started."""
    if worker.status in (Status.running, Status.paused):
        worker.status = Status.closing_gracefully  # which the memory monitor leaves alone
    states, tasks = ("waiting", "ready", "constrained"), worker.state.tasks.items()
    keys = [key for key, task in tasks if task.state in states]
    if worker.status is Status.closing_gracefully:
        worker.batched_send({"op": _WAITING, "keys": keys, "number": number})


# -- the dask scheduler's part ---------------------------------------------------------------------
NAME = "gpujobs-drain"
"""Of the dask scheduler's plugin."""
_POLL = 0.2
"""Seconds between two looks at a worker that leaves."""
_RETRY = 1.0
"""Seconds after which `retire_workers` is called again."""
DATA_TIMEOUT = 30.0
"""Seconds for the data of a worker without tasks that is no longer wanted: no other may take it.

Before a walltime it has the rest of its job: a successor may still come.
"""
_BARRIER = "shuffle-barrier-"
"""Start of the keys of tasks, one in each p2p shuffle."""

Key = tuple[str, str]
"""A worker through restarts by its nanny: its name, and the run of its job."""


@dataclass(eq=False)
class Leaving:
    """A worker that leaves."""

    state: WorkerState
    why: str
    since: float
    deadline: float
    """When it is retired at any rate, by the monotonic clock."""
    busy: float
    """When it last had a task."""
    number: int = -1
    """Of the last question; -1: it was not asked yet."""
    retiring: bool = False
    running: dict[str, float] = field(default_factory=dict)
    """The tasks that ran at the last look: seconds by prefix, of the longest."""
    told: bool = False
    """Whether it was said that tasks or an actor keep it."""


class Drain(SchedulerPlugin):  # type: ignore[misc]
    """Lets workers leave. A drain belongs to the job: after a nanny's restart it goes on."""

    def __init__(
        self, scheduler: Scheduler, note: Callable[[Event], None], tell: Callable[[str], None]
    ) -> None:
        """``note`` gets events, ``tell`` messages for the user."""
        self._scheduler = scheduler
        self._note = note
        self._tell = tell
        self._leaving: dict[str, Leaving] = {}
        """By address."""
        self._kept: dict[Key, tuple[str, float]] = {}
        """Why workers leave, and by when; also of those that are between two lives."""
        self._numbers = itertools.count()
        self._barriers: set[str] = set()
        """Those of shuffles that have not begun, which use running workers only."""
        self._tasks: set[asyncio.Task[None]] = set()

    def install(self) -> None:
        """Add this to the dask scheduler, and answer calls."""
        self._scheduler.add_plugin(self, name=NAME)
        self._scheduler.stream_handlers[_WAITING] = self._take_back
        self._scheduler.handlers[DRAIN] = self.drain_names
        self._scheduler.handlers[UNDRAIN] = self.undrain_names

    # -- calls -------------------------------------------------------------------------------------
    def drain_names(self, names: Iterable[str], limit: float | None = None, why: str = "") -> None:
        """Let workers leave by their names; tasks that run after ``limit`` seconds are lost."""
        seconds = float("inf") if limit is None else limit
        for state in self._named(names):
            self.drain(state, why, seconds)

    def undrain_names(self, names: Iterable[str]) -> list[str]:
        """Let workers stay; return the names of those that do: not if their data already moves."""
        return [str(state.name) for state in self._named(names) if self.undrain(state)]

    def leaving(self, why: str | None = None) -> list[WorkerState]:
        """Return the workers that leave, for any reason or this one."""
        found = self._leaving.values()
        return [leaving.state for leaving in found if why is None or leaving.why == why]

    def why_leaving(self, state: WorkerState) -> str | None:
        """Return why a worker leaves; None if it stays."""
        leaving = self._leaving.get(state.address)
        return leaving.why if leaving else None

    def drain(self, state: WorkerState, why: str, limit: float = float("inf")) -> None:
        """Let a worker leave, after ``limit`` seconds at any rate.

        A second call for another reason replaces the first one; the earlier deadline counts.
        """
        now, known = time.monotonic(), self._leaving.get(state.address)
        deadline = min(now + limit, known.deadline if known else float("inf"))
        self._kept[life_key(state)] = (why, deadline)
        if known is not None:
            known.why, known.deadline = why, deadline
            return
        leaving = self._leaving[state.address] = Leaving(state, why, now, deadline, busy=now)
        self._note(Event(event="draining", worker=str(state.name), why=why))
        if not self._in_shuffle(state.address):
            self._ask(leaving)
        task = asyncio.create_task(self._leave(leaving))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def undrain(self, state: WorkerState) -> bool:
        """Let a worker stay; return whether that was possible: not when its data already moves."""
        leaving = self._leaving.get(state.address)
        if leaving is None or leaving.retiring:
            return False
        del self._leaving[state.address]
        del self._kept[life_key(state)]
        if leaving.number >= 0:  # by the stream, after the last question
            message = {"op": "worker-status-change", "status": "running", "stimulus_id": UNDRAIN}
            self._scheduler.worker_send(state.address, message)
        self._note(Event(event="undrained", worker=str(state.name)))
        return True

    # -- hooks of the dask scheduler ---------------------------------------------------------------
    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Drain a worker that its nanny has restarted again. ``worker`` is its address."""
        state = scheduler.workers[worker]
        if kept := self._kept.get(life_key(state)):
            why, deadline = kept
            self.drain(state, why, deadline - time.monotonic())
        self._restrict_shuffles()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Note the tasks of a worker that left before they had ended."""
        self._restrict_shuffles()
        leaving = self._leaving.pop(worker, None)
        if leaving is None:
            return
        left = Event(event="left", worker=str(leaving.state.name), why=leaving.why)
        left["seconds"] = round(time.monotonic() - leaving.since, 1)
        left["lost"] = leaving.running
        self._note(left)
        for prefix, ran in leaving.running.items():
            lost = f"{prefix} had run for {ran:.0f} s"
            self._tell(f"{leaving.state.name} left ({leaving.why}) with a task: {lost}")

    def update_graph(self, scheduler: Scheduler, *, tasks: Iterable[Any], **_: object) -> None:
        """Keep the shuffles of a new graph away from workers that leave."""
        if self._leaving:
            self._restrict_shuffles(key for key in tasks if str(key).startswith(_BARRIER))

    async def before_close(self) -> None:
        """Leave the workers to the end of the dask scheduler."""
        for task in self._tasks:
            task.cancel()

    # -- leave -------------------------------------------------------------------------------------
    async def _leave(self, leaving: Leaving) -> None:
        state, address = leaving.state, leaving.state.address
        while self._goes_on(leaving) and self._in_shuffle(address) and not _is_late(leaving):
            await asyncio.sleep(_POLL)
        self._restrict_shuffles(self._coming_shuffles())
        while self._goes_on(leaving):
            self._ask(leaving)
            await asyncio.sleep(_POLL)
            leaving.running = _running(state)
            if state.processing:
                leaving.busy = time.monotonic()
            if self._goes_on(leaving) and (_is_late(leaving) or not state.processing):
                await self._retire(leaving)

    def _goes_on(self, leaving: Leaving) -> bool:
        return self._leaving.get(leaving.state.address) is leaving

    def _ask(self, leaving: Leaving) -> None:
        """Give the worker no more tasks, and ask which have not started."""
        address = leaving.state.address
        leaving.number = next(self._numbers)
        stimulus = f"gpujobs-drain-{leaving.number}"
        self._scheduler.handle_worker_status_change(
            Status.closing_gracefully, leaving.state, stimulus
        )
        if INFORMATION in leaving.state.extra:  # else it does not know the question
            self._scheduler.worker_send(address, {"op": _LOOK, "number": leaving.number})

    def _take_back(self, worker: str, keys: list[Any], number: int) -> None:
        """Take tasks back: they go to another worker, to the queue, or wait for a worker."""
        leaving = self._leaving.get(worker)
        if leaving is None or leaving.number != number:  # it stays, or there is a newer question
            return
        here = {task.key for task in leaving.state.processing}
        back = dict.fromkeys(here.intersection(keys), "released")
        stimulus = f"gpujobs-back-{number}"
        self._scheduler.transitions(back, stimulus)
        self._scheduler.stimulus_queue_slots_maybe_opened(stimulus_id=stimulus)

    async def _retire(self, leaving: Leaving) -> None:
        state, leaving.retiring = leaving.state, True
        self._tell_once(leaving)
        try:
            retired = await self._scheduler.retire_workers(
                workers=[state.address], close_workers=True
            )
        finally:
            leaving.retiring = False
        if not retired and _keeps_data_in_vain(leaving):
            self._scheduler.close_worker(state.address)
        await asyncio.sleep(0 if retired else _RETRY)

    def _tell_once(self, leaving: Leaving) -> None:
        """Tell of an actor that keeps the worker, and of tasks that wait for it in vain."""
        if leaving.told:
            return
        leaving.told, name, address = True, leaving.state.name, leaving.state.address
        if leaving.state.actors:
            self._tell(
                f"{name} holds an actor: it gets no more tasks, but stays until its job ends"
            )
        restricted = [
            task.prefix.name
            for task in self._scheduler.unrunnable
            if task.worker_restrictions == {address} and not task.loose_restrictions
        ]
        for prefix in sorted(set(restricted)):
            number = restricted.count(prefix)
            self._tell(f"{name} leaves, and {number} tasks {prefix} may run on no other worker")

    def _named(self, names: Iterable[str]) -> list[WorkerState]:
        wanted = set(names)
        return [state for state in self._scheduler.workers.values() if str(state.name) in wanted]

    # -- shuffles (p2p) ----------------------------------------------------------------------------
    # One that runs starts again if a worker leaves it. One that begins takes its workers from the
    # restriction of its barrier, else all that there are.
    def _in_shuffle(self, address: str) -> bool:
        return any(address in run.participating_workers for run in self._active_shuffles().values())

    def _active_shuffles(self) -> Mapping[str, Any]:
        plugin = self._scheduler.plugins.get("shuffle")
        active: Mapping[str, Any] = getattr(plugin, "active_shuffles", {})
        return active

    def _coming_shuffles(self) -> list[str]:
        prefix = self._scheduler.task_prefixes.get(_BARRIER.rstrip("-"))
        if prefix is None or not prefix.states["waiting"]:
            return []
        return [key for key in self._scheduler.tasks if str(key).startswith(_BARRIER)]

    def _restrict_shuffles(self, coming: Iterable[str] = ()) -> None:
        """Let the shuffles that have not begun use the workers that run, as they are now."""
        running = [state.address for state in self._scheduler.running]
        active = self._active_shuffles()
        self._barriers = {
            key
            for key in {*coming, *self._barriers}
            if key in self._scheduler.tasks and key[len(_BARRIER) :] not in active
        }
        self._scheduler.set_restrictions(dict.fromkeys(self._barriers, running))


def life_key(state: WorkerState) -> Key:
    """Return the key of a worker, the same after a restart by its nanny."""
    return str(state.name), str(state.extra.get(INFORMATION, {}).get("job", ""))


def _keeps_data_in_vain(leaving: Leaving) -> bool:
    """Return whether no other worker has taken the data of one that is no longer wanted."""
    if leaving.why == WALLTIME or leaving.state.actors:
        return False
    return time.monotonic() - leaving.busy > DATA_TIMEOUT


def _is_late(leaving: Leaving) -> bool:
    return time.monotonic() > leaving.deadline


def _running(state: WorkerState) -> dict[str, float]:
    """Return the tasks that run on a worker, by prefix, and for how long the longest has."""
    found: dict[str, float] = {}
    for task in state.processing:
        name, seconds = task.prefix.name, state.executing.get(task, 0.0)
        found[name] = round(max(seconds, found.get(name, 0.0)), 1)
    return found
