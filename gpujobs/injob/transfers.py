"""How much data workers receive from each other, as a time series in the cluster's folder.

A worker adds the bytes of each transfer to a sum, which its heartbeats carry to the dask scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any

from dask.sizeof import sizeof
from distributed import Scheduler, Worker
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import WorkerState

from .folder import TRANSFERS, Folder
from .threads import AppendedLines
from .usage import interval

METRIC = "gpujobs_received"
"""Name of the sum among the metrics of a worker."""
_SHUFFLE = "shuffle_receive"
"""Name of dask's handler of the data of a shuffle."""
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
    shuffles = _Shuffles(worker)
    worker.metrics[METRIC] = lambda _: log.received + shuffles.received()


class _Shuffles:
    """The bytes that a worker receives in shuffles, which are not in the log of its transfers."""

    def __init__(self, worker: Worker) -> None:
        self._handlers = worker.handlers
        self._received = 0
        self._own: Callable[..., Awaitable[Any]] | None = None

    def received(self) -> int:
        """Return the sum of all shuffles until now.

        The first heartbeats begin to count: dask adds its handler after the worker has registered.
        """
        handler = self._handlers.get(_SHUFFLE)
        if handler is not None and handler is not self._own:
            self._own = self._handlers[_SHUFFLE] = self._counted(handler)
        return self._received

    def _counted(self, handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(handler)
        async def receive(*arguments: Any, data: Any, **keywords: Any) -> Any:
            self._received += sizeof(data)
            return await handler(*arguments, data=data, **keywords)

        return receive


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
