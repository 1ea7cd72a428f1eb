"""In dask's processes: workers report their GPU, the dask scheduler writes them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Scheduler, Worker
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

from .children import defer_signals
from .demand import END_AFTER, IdleWatch, add_handlers, parse_rules
from .drain import offer_drain
from .drains import install_drain
from .events import VERSION, Event, EventQueue, events_file
from .folder import Folder, OverMemory, RegisteredWorker
from .gpus import bind, choose_cpus, let_dask_cuda_measure_slices, worker_gpu
from .log import log
from .memory import paused_message
from .names import RUN_OF_JOB
from .network import end_handshakes_with


# -- blocking calls of dask's processes, which must not stop their event loop ----------------------
async def in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in a thread, or here if the process is ending and starts no more threads."""
    try:
        await asyncio.to_thread(function, *arguments)
    except RuntimeError:
        function(*arguments)


class AppendedLines:
    """Lines of JSON for a file of the cluster's folder, which this process alone writes."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lines: list[str] = []
        """They are not written yet."""
        self._lock = asyncio.Lock()
        """Lines stay in their order."""

    @property
    def waiting(self) -> bool:
        """Whether there are lines that are not written yet."""
        return bool(self._lines)

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line, which the next `write` writes."""
        self._lines.append(json.dumps(line))

    async def write(self) -> None:
        """Append the lines; after an OSError, which is raised, they stay for the next time."""
        async with self._lock:
            lines, self._lines = self._lines, []
            if not lines:
                return
            try:
                await in_thread(self._folder.append, self._name, lines)
            except OSError:
                self._lines = lines + self._lines
                raise


# -- the registry of workers -----------------------------------------------------------------------
_NAME = "gpujobs"
"""Of the dask scheduler's plugin."""
_NO_CLIENTS = ("fire-and-forget", "Client-worker-")
"""Starts of names in the dask scheduler's list of clients: a dummy, and tasks that submit tasks."""
_RESTART_EVENT = "worker-restart-memory"
"""Of a nanny that restarts its worker."""
_STATUS_EVENT = "worker-status-change"
"""Of a worker that is paused because of its memory, or runs again."""
_PAUSED_AFTER = 2.0
"""Seconds after which a worker that is still paused is reported, with its memory of then."""
_WRITE_INTERVAL = 0.25
"""Seconds for which events are collected before they are written."""
_LATER_INTERVAL = 20.0
"""Seconds until the next look at events that wait (see `EventQueue`)."""
_CLOCK_TOLERANCE = 5.0
"""Seconds by which the expected end of the cluster may move before it is written again."""


async def dask_setup(server: Scheduler | Worker) -> None:
    """Set up a worker or a dask scheduler; dask calls this when the process starts."""
    if "GPUJOBS_RANK" not in os.environ:  # which its launcher ends by SIGTERM
        defer_signals()
    if isinstance(server, Worker):
        let_dask_cuda_measure_slices()
        run = json.loads(os.environ.get(RUN_OF_JOB, "null"))
        server.startup_information["gpujobs_run"] = lambda _: run
        gpu = worker_gpu()  # the worker sends it to the dask scheduler when it registers
        server.startup_information["gpujobs"] = lambda _: gpu
        _bind(server)
        offer_drain(server, os.environ)
    elif isinstance(server, Scheduler):
        folder = Folder(os.environ["GPUJOBS_FOLDER"])
        rules = parse_rules(os.environ.get(END_AFTER, ""))
        attempt = int(os.environ.get("GPUJOBS_ATTEMPT", "1"))
        run = json.loads(os.environ.get(RUN_OF_JOB, "null")) or {}
        job = run.get("job")
        WorkerRegistry(server, str(folder.path), rules, attempt=attempt, job=job).install()
        if "scheduler.json" not in folder.names():  # dask_mpi.initialize() writes none
            folder.write("scheduler.json", server.identity())


def _bind(worker: Worker) -> None:
    """Bind the worker to CPUs near its GPU now, and after dask-cuda's plugins: one binds, too."""
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return
    cpus, binding = choose_cpus(worker.state.nthreads)
    bind(cpus)

    def gpujobs_binding(worker: Worker) -> Any:
        bind(cpus)
        return binding

    worker.startup_information["gpujobs_binding"] = gpujobs_binding


def idle_message(scheduler: Scheduler) -> str:
    """Return that the dask scheduler was idle for longer than its, or the site's, limit; or ""."""
    registry = scheduler.plugins.get(_NAME)
    if isinstance(registry, WorkerRegistry) and registry.idle_reason:
        return registry.idle_reason
    since, timeout = scheduler.idle_since, scheduler.idle_timeout
    if not since or not timeout or time.time() < since + timeout:
        return ""
    return f"the dask scheduler was idle for {timeout:g} s (its idle timeout)"


class WorkerRegistry(SchedulerPlugin):  # type: ignore[misc]
    """Writes the events of the dask scheduler into the cluster's folder (see `events`).

    Workers that exceed their memory are among them: dask writes that only to their own log.

    The file is written at most four times a second, and not on the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        folder: str,
        end_after: Mapping[str, int],
        *,
        attempt: int = 1,
        job: int | None = None,
        in_owner: bool = False,
    ) -> None:
        """``end_after``: when a cluster without work ends, seconds by rule (see `demand`).

        ``job``: number of the head's.
        ``in_owner``: the dask scheduler is in the process that owns the cluster, so that no head
        ends it.
        """
        self._scheduler = scheduler
        add_handlers(scheduler)
        self._folder = Folder(folder)
        self._names: dict[str, tuple[str, int]] = {}
        """Name and memory limit of each worker, by its address."""
        self._over_memory: dict[str, OverMemory] = {}
        self._paused: dict[str, int] = {}
        """Bytes of workers when they were first paused: one that pauses often is reported once."""
        self._job = job
        self._events = EventQueue()
        self._lines = AppendedLines(self._folder, events_file(attempt))
        self._write_planned = False
        self._written = float("-inf")
        """When it was last written, by the clock of the event loop."""
        self._writing: asyncio.Task[None] | None = None
        self._later: asyncio.TimerHandle | None = None
        """The next look at events that wait, or could not be written."""
        self._clients: set[str] = set()
        """Names of the clients that are connected."""
        self._end: tuple[float, str] | None = None
        """When the cluster ends if it stays without work, since the epoch, and by which rule."""
        self._end_after = end_after
        self._in_owner = in_owner
        self.idle_reason = ""
        """Why the cluster ends without work; "" while it does not."""
        self._watching: asyncio.Task[None] | None = None

    def install(self) -> None:
        """Add this to the dask scheduler; watch whether it has work."""
        identity = self._scheduler.identity()
        opened = Event(event="opened", version=VERSION, address=identity["address"])
        if dashboard := identity["services"].get("dashboard"):
            opened["dashboard"] = dashboard
        if self._job is not None:
            opened["job"] = self._job
        self._add(opened)
        self._scheduler.add_plugin(self, name=_NAME)
        end_handshakes_with(self._scheduler.listeners)
        install_drain(self._scheduler, self._add, in_owner=self._in_owner)
        if self._end_after:
            watch = IdleWatch(self._end_after)
            self._watching = asyncio.create_task(self._watch_idle(watch))

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note a worker that registers. ``worker`` is its address."""
        state = scheduler.workers[worker]
        self._names[worker] = (str(state.name), state.memory_limit)
        self._add(Event(event="connected", worker=str(state.name), row=_row(state)))

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Note that a client has connected; not the dummy of dask."""
        if not client.startswith(_NO_CLIENTS):
            self._clients.add(client)
            self._add(Event(event="client", clients=len(self._clients)))

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Note that a client has disconnected."""
        if client in self._clients:
            self._clients.remove(client)
            self._add(Event(event="client", clients=len(self._clients)))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Note that a worker is gone."""
        if worker in self._names:
            self._note_pause(worker)
            self._add(Event(event="disconnected", worker=self._names[worker][0]))

    async def before_close(self) -> None:
        """Write the last events, and whether the cluster ends because it was idle."""
        if self._watching is not None:
            self._watching.cancel()
        if message := idle_message(self._scheduler):
            self._add(Event(event="idle", reason=message))
        self._add(Event(event="closed"))
        if self._writing is not None:
            await self._writing
        with contextlib.suppress(OSError):
            await self._write_events(everything=True)

    async def _watch_idle(self, watch: IdleWatch) -> None:
        """End the cluster, or ask the head to end it, when it has been without work for too long.

        A cluster whose workers are all pending is not without work: its user waits for them.
        """
        while not self._names:
            await asyncio.sleep(watch.interval)
        warning = ""
        while not watch.reason:
            clients = any(not client.startswith(_NO_CLIENTS) for client in self._scheduler.clients)
            busy = self._scheduler.check_idle() is None
            workers = bool(self._scheduler.workers)
            watch.observe(time.monotonic(), tasks=busy, clients=clients, workers=workers)
            self._note_end(watch.next_end)
            if watch.warning and not warning:
                log(watch.warning)
                self._scheduler.log_event("warn", watch.warning)  # which clients print
            warning = watch.warning
            await asyncio.sleep(watch.interval)
        self.idle_reason = watch.reason
        if self._in_owner:
            self._closing = asyncio.create_task(self._scheduler.close(reason=watch.reason))
            return
        log(watch.reason)
        self._add(Event(event="idle", reason=watch.reason))
        while self._events or self._lines.waiting:  # the disk may be full for a while
            await asyncio.sleep(watch.interval)
            self._plan_write()

    def _note_end(self, end: tuple[float, str] | None) -> None:
        known = self._end
        if end is not None:
            end = (time.time() + end[0], end[1])
            if known and known[1] == end[1] and abs(known[0] - end[0]) < _CLOCK_TOLERANCE:
                return
        if known != end:
            self._end = end
            idle = Event(event="idle", ends_at=end[0], by=end[1]) if end else Event(event="idle")
            self._add(idle)

    def log_event(self, topic: str, msg: Any) -> None:
        """Note a worker that a nanny restarts, or that is paused, because of its memory."""
        if topic == _RESTART_EVENT:
            self._note_restart(msg.get("worker"))
        elif topic in self._names and isinstance(msg, dict) and msg.get("action") == _STATUS_EVENT:
            asyncio.get_running_loop().call_later(_PAUSED_AFTER, self._note_pause, topic)

    def _note_restart(self, worker: str) -> None:
        """Count a restart by a nanny. The event may arrive after its worker has gone."""
        if worker in self._names:
            name, limit = self._names[worker]
            known = self._over_memory.get(name, {"restarts": 0, "limit": limit})
            self._note_memory(name, {"restarts": known["restarts"] + 1, "limit": limit})

    def _note_pause(self, worker: str) -> None:
        """Note whether a worker is paused: its memory is nearly full, and it starts no task."""
        name, limit = self._names[worker]
        state = self._scheduler.workers.get(worker)
        known = self._over_memory.get(name, {"restarts": 0, "limit": limit})
        if state is not None and state.status is Status.paused:
            is_first = name not in self._paused
            used = self._paused.setdefault(name, int(state.metrics.get("memory", 0)))
            noted: OverMemory = {**known, "paused": used}
            if is_first and not self._in_owner:  # for `logs` of a cluster without `run`
                log(paused_message(name, noted))
            self._note_memory(name, noted)
        elif "paused" in known:
            self._note_memory(name, {"restarts": known["restarts"], "limit": limit})

    def _note_memory(self, name: str, found: OverMemory) -> None:
        self._over_memory[name] = found
        event = Event(
            event="over memory", worker=name, restarts=found["restarts"], limit=found["limit"]
        )
        if "paused" in found:
            event["paused"] = found["paused"]
        self._add(event)

    # -- the file ----------------------------------------------------------------------------------
    def _add(self, event: Event) -> None:
        self._events.add({**event, "at": round(time.time(), 2)})
        self._plan_write()

    def _plan_write(self) -> None:
        if not self._write_planned:
            self._write_planned = True
            # The address and the first worker are written at once: jobs and the head wait for them.
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._written + _WRITE_INTERVAL), self._start_write)

    def _start_write(self) -> None:
        self._written = asyncio.get_running_loop().time()
        self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        self._write_planned = False
        if self._scheduler.status in (Status.closing, Status.closed):
            return  # the file keeps the workers that the cluster had at its end
        try:
            await self._write_events()
        except OSError as error:
            log(f"cannot write the events of the workers: {error}")
        if self._later is not None:
            self._later.cancel()
        if self._events or self._lines.waiting:
            loop = asyncio.get_running_loop()
            self._later = loop.call_later(_LATER_INTERVAL, self._plan_write)

    async def _write_events(self, *, everything: bool = False) -> None:
        for event in self._events.take(time.monotonic(), everything=everything):
            self._lines.add(event)
        await self._lines.write()


def _row(state: WorkerState) -> RegisteredWorker:
    return {
        "address": state.address,
        "threads": state.nthreads,
        "gpu": state.extra.get("gpujobs"),
        "binding": state.extra.get("gpujobs_binding"),
        "memory": int(state.memory_limit or 0),
        "run": state.extra.get("gpujobs_run"),
    }
