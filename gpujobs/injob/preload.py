"""Preloaded by dask's processes: workers report their GPU, the dask scheduler its workers."""

from __future__ import annotations

import asyncio
import os
import time

from distributed import Scheduler, Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

from .folder import IDLE, Folder, Gpu, RegisteredWorker
from .gpus import worker_gpu
from .log import log

_WRITE_INTERVAL = 0.25
"""Seconds for which changes are collected before `workers.json` is written."""


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

    The file is written at most four times a second, and not on the event loop.
    """

    def __init__(self, scheduler: Scheduler, folder: str) -> None:
        self._scheduler = scheduler
        self._folder = Folder(folder)
        self._seen: set[str] = set()
        self._write_planned = False
        self._writing: asyncio.Task[None] | None = None

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Note a worker that registers. ``worker`` is its address."""
        self._seen.add(str(scheduler.workers[worker].name))
        self._plan_write()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Note that a worker is gone."""
        self._plan_write()

    async def before_close(self) -> None:
        """Note whether the dask scheduler closes because it was idle."""
        if message := idle_message(self._scheduler):
            await asyncio.to_thread(self._folder.write, IDLE, {"reason": message})

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
        }
        try:
            await asyncio.to_thread(self._folder.write, "workers.json", value)
        except OSError as error:
            log(f"cannot write workers.json: {error}")
        except RuntimeError:  # this process is ending
            return


def _row(state: WorkerState) -> RegisteredWorker:
    return {
        "address": state.address,
        "threads": state.nthreads,
        "gpu": state.extra.get("gpujobs"),
    }
