"""The lease: signs of life of the owning process in the cluster's folder."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from ..clusters.folder import renew_lease
from ..errors import GpujobsError

INTERVAL = 10.0
"""Seconds between two signs of life."""


class Lease:
    """Renews the lease of one cluster while the process lives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task: asyncio.Task[None] | None = None

    def renew(self) -> None:
        """Write a sign of life."""
        renew_lease(self._folder)

    def keep(self) -> None:
        """Start to renew the lease regularly."""
        self._task = asyncio.create_task(self._renew_forever(), name="gpujobs-lease")

    def stop(self) -> None:
        """Stop renewing."""
        if self._task is not None:
            self._task.cancel()

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            with contextlib.suppress(GpujobsError, OSError):  # the next one may work
                await asyncio.to_thread(self.renew)
