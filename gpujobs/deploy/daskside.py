"""What the scaler needs of a dask cluster."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from ..injob.folder import EndKind


class DaskSide(Protocol):
    """The part of a dask cluster that the scaler needs."""

    @property
    def open(self) -> bool:
        """Whether the cluster has been started and not closed."""

    @property
    def connected(self) -> frozenset[str] | None:
        """Names of the connected workers; None if the dask scheduler cannot be queried."""

    def adapts(self, group: str) -> bool:
        """Return whether a group of workers scales adaptively."""

    def end_of_scheduler(self) -> tuple[EndKind, str] | None:
        """Return why a dask scheduler in this process has closed; None if it runs."""

    async def running_workers(self, leaving: Collection[str]) -> int:
        """Return how many workers are ready for tasks, without those that are ``leaving``."""

    async def load(self) -> dict[str, int]:
        """Return how many tasks each worker has, by name."""

    async def give_up(self, error: Exception | None) -> None:
        """Fail what clients wait for with ``error``; None: workers may come again."""

    async def retire(self, names: list[str]) -> None:
        """Let workers transfer their data and close them."""

    def disconnect(self) -> None:
        """Stop what queries the dask scheduler regularly: it is gone."""

    def log(self, message: str) -> None:
        """Show a line to the user."""
