"""Retires the workers of jobs that were released, also those that connect late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .daskside import DaskSide
from .job import PoolJob


class Retirer:
    """Retires workers; those that are being retired are left alone."""

    def __init__(self, dask: DaskSide) -> None:
        self._dask = dask
        self._names: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()

    async def retire(self, names: Iterable[str]) -> None:
        """Let workers transfer their data and close them."""
        new = [name for name in names if name not in self._names]
        if not new:
            return
        self._names.update(new)
        try:
            await self._dask.retire(new)
        finally:
            self._names.difference_update(new)

    def retire_late(self, released: Iterable[PoolJob]) -> None:
        """Retire, in the background, connected workers of jobs that are to be cancelled.

        They have connected after the release, and would get tasks until the cancel is confirmed.
        """
        connected = (self._dask.connected or frozenset()).difference(self._names)
        late = [name for job in released for name in job.report.workers if name in connected]
        if late:
            task = asyncio.ensure_future(self.retire(late))
            self._background.add(task)  # a task without a reference may be collected
            task.add_done_callback(self._background.discard)
