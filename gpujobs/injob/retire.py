"""Retire workers: move their data to other workers, and close them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Client


def retire(names: Iterable[str], timeout: float) -> int:
    """Retire the workers ``names``; return 0 if that took at most ``timeout`` seconds, else 1.

    Return 1 at once if the dask scheduler does not have them any more.
    """
    from distributed import Client

    wanted = set(names)
    deadline = time.monotonic() + timeout
    with Client(timeout=timeout) as client:
        # If no other worker can take the data, the dask scheduler does nothing and returns {}.
        while time.monotonic() < deadline and not wanted.isdisjoint(_connected(client)):
            if client.retire_workers(names=list(wanted), close_workers=True):
                return 0
            time.sleep(1)
    return 1


def _connected(client: Client) -> set[str]:
    """Return the names of all workers."""
    workers = client.scheduler_info(n_workers=-1)["workers"]  # some releases default to 5
    return {str(worker["name"]) for worker in workers.values()}
