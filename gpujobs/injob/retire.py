"""Retire workers: move their data to other workers, and close them."""

from __future__ import annotations

import time
from collections.abc import Iterable


def retire(names: Iterable[str], timeout: float) -> int:
    """Retire the workers ``names``; return 0 if that took at most ``timeout`` seconds, else 1."""
    from distributed import Client

    deadline = time.monotonic() + timeout
    with Client(timeout=timeout) as client:
        # If no other worker can take the data, the dask scheduler does nothing and returns {}.
        while time.monotonic() < deadline:
            if client.retire_workers(names=list(names), close_workers=True):
                return 0
            time.sleep(1)
    return 1
