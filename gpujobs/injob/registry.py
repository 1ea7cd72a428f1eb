"""In dask's processes: workers report their GPU and transfers, the dask scheduler writes them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Scheduler, Worker
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

from .demand import END_AFTER, IdleWatch, add_handlers, parse_rules
from .drain import offer_drain
from .drains import install_drain
from .folder import (
    DRAINS,
    EVENTS,
    IDLE,
    TRANSFERS,
    WORKERS,
    Folder,
    OverMemory,
    RegisteredWorker,
    all_gpus,
)
from .gpus import bind, choose_cpus, interval, let_dask_cuda_measure_slices, worker_gpu
from .log import log
from .memory import paused_message
from .process import defer_signals


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

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line, which the next `write` writes."""
        self._lines.append(json.dumps(line))

    async def write(self) -> None:
        """Append the lines; after an OSError, which is raised, they stay for the next time."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            await in_thread(self._folder.append, self._name, lines)
        except OSError:
            self._lines = lines + self._lines
            raise


# -- how much data workers receive from each other, as a time series in the cluster's folder -------
# A worker adds the bytes of each transfer to a sum, which its heartbeats carry to the dask
# scheduler. Dask does not log the data of its own shuffles (p2p).

METRIC = "gpujobs_received"
"""Name of the sum among the metrics of a worker."""
_FEW_WORKERS = 16
"""With more workers there are fewer samples, so that the size of the file is limited."""


class _CountedLog(deque):  # type: ignore[type-arg]  # Python 3.9 in jobs
    """The worker's log of received data, which also sums its bytes: dask limits its length."""

    received = 0

    def append(self, entry: dict[str, Any]) -> None:
        self.received += entry["total"]
        super().append(entry)


def count_transfers(worker: Worker) -> None:
    """Have the heartbeats of a worker carry how many bytes it has received from workers."""
    log = _CountedLog(worker.transfer_incoming_log, worker.transfer_incoming_log.maxlen)
    worker.transfer_incoming_log = log
    worker.metrics[METRIC] = lambda _: log.received


class TransferRecorder(SchedulerPlugin):  # type: ignore[misc]
    """Appends to `transfers.jsonl` how many bytes each worker has received since the last line.

    A line has `time`, the `seconds` before it for which it stands, and `received`: bytes by the
    name of the worker. The first line has no worker; times without transfers have no line.
    """

    def __init__(self, scheduler: Scheduler, folder: str) -> None:
        self._states: dict[str, WorkerState] = dict(scheduler.workers)
        """By address; those that have left stay until the next sample."""
        self._left: set[str] = set()
        self._counted: dict[str, int] = {}
        self._before = time.monotonic()
        self._lines = AppendedLines(Folder(folder), TRANSFERS)
        self._lines.add({"time": round(time.time(), 1), "received": {}})
        self._recording = asyncio.create_task(self._record())

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Count for a new worker. ``worker`` is its address."""
        self._forget(worker)
        self._states[worker] = scheduler.workers[worker]

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Note that a worker is gone; its last heartbeat still counts."""
        self._left.add(worker)

    async def before_close(self) -> None:
        """Write the last sample."""
        self._recording.cancel()
        await self._write()

    async def _record(self) -> None:
        started = time.monotonic()
        while True:
            await self._write()
            more = max(1.0, len(self._states) / _FEW_WORKERS)
            await asyncio.sleep(interval(time.monotonic() - started) * more)

    async def _write(self) -> None:
        now = time.monotonic()
        if received := self._sample():
            line = {"time": round(time.time(), 1), "seconds": round(now - self._before, 1)}
            self._lines.add({**line, "received": received})
        self._before = now
        with contextlib.suppress(OSError):  # a full disk: the next sample may find room
            await self._lines.write()

    def _sample(self) -> dict[str, int]:
        """Return the bytes since the last sample, by the name of the worker."""
        received: Counter[str] = Counter()
        for address, state in self._states.items():
            total = int(state.metrics.get(METRIC, 0))
            received[str(state.name)] += total - self._counted.get(address, 0)
            self._counted[address] = total
        for address in self._left:
            self._forget(address)
        self._left.clear()
        return {name: size for name, size in received.items() if size > 0}

    def _forget(self, address: str) -> None:
        self._states.pop(address, None)
        self._counted.pop(address, None)


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
"""Seconds for which changes are collected before `workers.json` is written."""
_MOST_EVENTS = 50_000
"""Most lines of the file of events: a worker may restart again and again."""
_CLOCK_TOLERANCE = 5.0
"""Seconds by which the expected end of the cluster may move before it is written again."""


async def dask_setup(server: Scheduler | Worker) -> None:
    """Set up a worker or a dask scheduler; dask calls this when the process starts."""
    if "GPUJOBS_RANK" not in os.environ:  # which its launcher ends by SIGTERM
        defer_signals()
    if isinstance(server, Worker):
        let_dask_cuda_measure_slices()
        gpu = worker_gpu()  # the worker sends it to the dask scheduler when it registers
        server.startup_information["gpujobs"] = lambda _: gpu
        _bind(server)
        count_transfers(server)
        offer_drain(server, os.environ)
    elif isinstance(server, Scheduler):
        folder = Folder(os.environ["GPUJOBS_FOLDER"])
        rules = parse_rules(os.environ.get(END_AFTER, ""))
        WorkerRegistry(server, str(folder.path), rules).install()
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
    """Keeps `workers.json` in the cluster's folder: registered workers, and names ever seen.

    Workers that exceed their memory are in it, too: dask writes that only to their own log.

    The file is written at most four times a second, and not on the event loop.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        folder: str,
        end_after: Mapping[str, int],
        *,
        in_owner: bool = False,
    ) -> None:
        """``end_after``: when a cluster without work ends, seconds by rule (see `demand`).

        ``in_owner``: the dask scheduler is in the process that owns the cluster, so that no head
        ends it.
        """
        self._scheduler = scheduler
        add_handlers(scheduler)
        self._folder = Folder(folder)
        self._seen: set[str] = set()
        self._gone: dict[str, float] = {}
        """When workers disconnected, by name, until they connect again (epoch seconds)."""
        self._names: dict[str, tuple[str, int]] = {}
        """Name and memory limit of each worker, by its address."""
        self._over_memory: dict[str, OverMemory] = {}
        self._paused: dict[str, int] = {}
        """Bytes of workers when they were first paused: one that pauses often is reported once."""
        self._events = AppendedLines(self._folder, EVENTS)
        self._event_count = 0
        self._write_planned = False
        self._writing: asyncio.Task[None] | None = None
        self._had_client = False
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
        """Add this and `TransferRecorder` to the dask scheduler; watch whether it has work."""
        self._scheduler.add_plugin(self, name=_NAME)
        recorder = TransferRecorder(self._scheduler, str(self._folder.path))
        self._scheduler.add_plugin(recorder, name=f"{_NAME}-transfers")
        drains = AppendedLines(self._folder, DRAINS)
        install_drain(self._scheduler, self._folder, drains, in_owner=self._in_owner)
        if self._end_after:
            watch = IdleWatch(self._end_after)
            self._watching = asyncio.create_task(self._watch_idle(watch))

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note a worker that registers. ``worker`` is its address."""
        state = scheduler.workers[worker]
        self._seen.add(str(state.name))
        self._gone.pop(str(state.name), None)
        self._names[worker] = (str(state.name), state.memory_limit)
        gpus = [gpu["uuid"] for gpu in all_gpus(state.extra.get("gpujobs"))]
        self._add_event(worker, "connected", gpus=gpus)
        self._plan_write()

    def add_client(self, scheduler: Scheduler, client: str) -> None:
        """Note that a client has connected; not the dummy of dask."""
        if client.startswith(_NO_CLIENTS):
            return
        self._had_client = True
        self._clients.add(client)
        if len(self._clients) == 1:
            self._plan_write()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Note that a client has disconnected."""
        if client in self._clients:
            self._clients.remove(client)
            self._plan_write()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Note that a worker is gone."""
        if worker in self._names:
            self._gone[self._names[worker][0]] = time.time()
            self._note_pause(worker)
        self._add_event(worker, "disconnected")
        self._plan_write()

    async def before_close(self) -> None:
        """Write the last state of the workers, and whether the cluster ends because it was idle."""
        if self._watching is not None:
            self._watching.cancel()
        if message := idle_message(self._scheduler):
            await in_thread(self._folder.write, IDLE, {"reason": message})
        if self._writing is not None:
            await self._writing
        with contextlib.suppress(OSError):
            await self._write_files()

    async def _watch_idle(self, watch: IdleWatch) -> None:
        """End the cluster, or ask the head to end it, when it has been without work for too long.

        A cluster whose workers are all pending is not without work: its user waits for them.
        """
        while not self._seen:
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
        while True:  # the disk may be full for a while
            with contextlib.suppress(OSError):
                await in_thread(self._folder.write, IDLE, {"reason": watch.reason})
                return
            await asyncio.sleep(watch.interval)

    def _note_end(self, end: tuple[float, str] | None) -> None:
        known = self._end
        if end is not None:
            end = (time.time() + end[0], end[1])
            if known and known[1] == end[1] and abs(known[0] - end[0]) < _CLOCK_TOLERANCE:
                return
        if known != end:
            self._end = end
            self._plan_write()

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
            self._over_memory[name] = {"restarts": known["restarts"] + 1, "limit": limit}
            self._plan_write()

    def _note_pause(self, worker: str) -> None:
        """Note whether a worker is paused: its memory is nearly full, and it starts no task."""
        name, limit = self._names[worker]
        state = self._scheduler.workers.get(worker)
        known = self._over_memory.get(name, {"restarts": 0, "limit": limit})
        if state is not None and state.status is Status.paused:
            is_first = name not in self._paused
            used = self._paused.setdefault(name, int(state.metrics.get("memory", 0)))
            noted = self._over_memory[name] = {**known, "paused": used}
            if is_first and not self._in_owner:  # for `logs` of a cluster without `run`
                log(paused_message(name, noted))
            self._plan_write()
        elif "paused" in known:
            del self._over_memory[name]
            if known["restarts"]:
                self._over_memory[name] = {"restarts": known["restarts"], "limit": limit}
            self._plan_write()

    def _add_event(self, worker: str, event: str, **more: object) -> None:
        name, _ = self._names.get(worker, ("", 0))
        if name and self._event_count < _MOST_EVENTS:
            self._event_count += 1
            line = {"time": round(time.time(), 2), "event": event, "worker": name, **more}
            self._events.add(line)

    def _plan_write(self) -> None:
        if not self._write_planned:
            self._write_planned = True
            asyncio.get_running_loop().call_later(_WRITE_INTERVAL, self._start_write)

    def _start_write(self) -> None:
        self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        self._write_planned = False
        if self._scheduler.status in (Status.closing, Status.closed):
            return  # the file keeps the workers that the cluster had at its end
        try:
            await self._write_files()
        except OSError as error:
            log(f"cannot write {WORKERS}: {error}")

    async def _write_files(self) -> None:
        workers = {str(state.name): _row(state) for state in self._scheduler.workers.values()}
        ends_at, ends_by = self._end or (None, "")
        value = {
            "version": 1,
            "time": time.time(),
            "workers": workers,
            "seen": sorted(self._seen.union(workers)),
            "gone": self._gone,
            "over_memory": self._over_memory,
            "had_client": self._had_client,
            "clients": len(self._clients),
            "ends_at": ends_at,
            "ends_by": ends_by,
        }
        await in_thread(self._folder.write, WORKERS, value)
        await self._events.write()


def _row(state: WorkerState) -> RegisteredWorker:
    return {
        "address": state.address,
        "threads": state.nthreads,
        "gpu": state.extra.get("gpujobs"),
        "binding": state.extra.get("gpujobs_binding"),
        "memory": int(state.memory_limit or 0),
    }
