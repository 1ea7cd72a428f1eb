"""Preloaded by dask's processes: workers report their GPU, the dask scheduler its workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from typing import Any

from distributed import Scheduler, Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

from .demand import add_handler
from .folder import EVENTS, IDLE, Folder, Gpu, OverMemory, RegisteredWorker
from .gpus import worker_gpu
from .log import log
from .loopback import confine_if_wanted

_RESTART_EVENT = "worker-restart-memory"
"""Of a nanny that restarts its worker."""
_WRITE_INTERVAL = 0.25
"""Seconds for which changes are collected before `workers.json` is written."""
_MOST_EVENTS = 50_000
"""Most lines of the file of events: a worker may restart again and again."""


# Here, because dask calls the functions below when its processes already listen.
confine_if_wanted()


async def dask_setup(server: Scheduler | Worker) -> None:
    """Set up a worker or a dask scheduler; dask calls this when the process starts."""
    if isinstance(server, Worker):
        _report_gpu(server)
    elif isinstance(server, Scheduler):
        folder = Folder(os.environ["GPUJOBS_FOLDER"])
        server.add_plugin(WorkerRegistry(server, str(folder.path)), name="gpujobs")
        if "scheduler.json" not in folder.names():  # dask_mpi.initialize() writes none
            folder.write("scheduler.json", server.identity())


def _report_gpu(worker: Worker) -> None:
    """Have the worker send its GPU to the dask scheduler when it registers."""
    gpu = worker_gpu()

    async def gpujobs(worker: Worker) -> Gpu:
        return gpu

    worker.startup_information["gpujobs"] = gpujobs


def idle_message(scheduler: Scheduler) -> str:
    """Return that the dask scheduler has been idle for longer than its idle timeout, or ""."""
    since, timeout = scheduler.idle_since, scheduler.idle_timeout
    if not since or not timeout or time.time() < since + timeout:
        return ""
    return f"the dask scheduler was idle for {timeout:g} s (its idle timeout)"


class WorkerRegistry(SchedulerPlugin):  # type: ignore[misc]
    """Keeps `workers.json` in the cluster's folder: registered workers, and names ever seen.

    Workers that exceed their memory are in it, too: dask writes that only to their own log.

    The file is written at most four times a second, and not on the event loop.
    """

    def __init__(self, scheduler: Scheduler, folder: str) -> None:
        self._scheduler = scheduler
        add_handler(scheduler)
        self._folder = Folder(folder)
        self._seen: set[str] = set()
        self._names: dict[str, tuple[str, int]] = {}
        """Name and memory limit of each worker, by its address."""
        self._over_memory: dict[str, OverMemory] = {}
        self._events: list[str] = []
        """Lines for the file of events, which are not written yet."""
        self._event_count = 0
        self._write_planned = False
        self._writing: asyncio.Task[None] | None = None

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note a worker that registers. ``worker`` is its address."""
        state = scheduler.workers[worker]
        self._seen.add(str(state.name))
        self._names[worker] = (str(state.name), state.memory_limit)
        self._add_event(worker, "connected")
        self._plan_write()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Note that a worker is gone."""
        self._add_event(worker, "disconnected")
        self._plan_write()

    async def before_close(self) -> None:
        """Note whether the dask scheduler closes because it was idle."""
        if message := idle_message(self._scheduler):
            await asyncio.to_thread(self._folder.write, IDLE, {"reason": message})
        with contextlib.suppress(OSError):
            await self._write_events()

    def log_event(self, topic: str, msg: Any) -> None:
        """Count a restart by a nanny. The event may arrive after its worker has gone."""
        if topic != _RESTART_EVENT or msg.get("worker") not in self._names:
            return
        name, limit = self._names[msg["worker"]]
        before = self._over_memory.get(name, {"restarts": 0, "limit": limit})
        self._over_memory[name] = {"restarts": before["restarts"] + 1, "limit": limit}
        self._plan_write()

    def _add_event(self, worker: str, event: str) -> None:
        name, _ = self._names.get(worker, ("", 0))
        if name and self._event_count < _MOST_EVENTS:
            self._event_count += 1
            line = {"time": round(time.time(), 2), "event": event, "worker": name}
            self._events.append(json.dumps(line))

    def _plan_write(self) -> None:
        if not self._write_planned:
            self._write_planned = True
            asyncio.get_running_loop().call_later(_WRITE_INTERVAL, self._start_write)

    def _start_write(self) -> None:
        self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        self._write_planned = False
        workers = {str(state.name): _row(state) for state in self._scheduler.workers.values()}
        value = {
            "version": 1,
            "time": time.time(),
            "workers": workers,
            "seen": sorted(self._seen.union(workers)),
            "over_memory": self._over_memory,
        }
        try:
            await asyncio.to_thread(self._folder.write, "workers.json", value)
            await self._write_events()
        except OSError as error:
            log(f"cannot write workers.json: {error}")
        except RuntimeError:  # this process is ending
            return

    async def _write_events(self) -> None:
        events, self._events = self._events, []
        try:
            await asyncio.to_thread(self._folder.append, EVENTS, events)
        except OSError:
            self._events = events + self._events  # for the next time
            raise


def _row(state: WorkerState) -> RegisteredWorker:
    return {
        "address": state.address,
        "threads": state.nthreads,
        "gpu": state.extra.get("gpujobs"),
    }
