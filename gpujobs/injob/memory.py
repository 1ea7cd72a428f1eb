"""Messages about workers that are paused, or were restarted, because of their memory."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .folder import OverMemory

MEMORY_KEY = "memory_per_job"
"""The key of a profile that gives workers more memory."""
_KILLED_WORKER = re.compile(r"\S*KilledWorker: .*")
"""Of dask: a task has ended several workers, and it does not say how."""


def memory_messages(workers: Mapping[str, OverMemory]) -> list[str]:
    """Return which workers are paused, or were restarted, because of their memory."""
    found = [paused_message(*item) for item in sorted(workers.items()) if "paused" in item[1]]
    restarted = sorted(item for item in workers.items() if item[1]["restarts"])
    return found + [over_memory_message(*item) for item in restarted]


def paused_message(name: str, worker: OverMemory) -> str:
    """Return a sentence for the user: a worker that is paused starts no task."""
    used, limit = worker["paused"] // 2**20, worker["limit"] // 2**20
    return f"worker {name} is paused: {used} of {limit} MiB"


def over_memory_message(name: str, worker: OverMemory) -> str:
    """Return that a worker was restarted, and the cure."""
    times = "once" if worker["restarts"] == 1 else f"{worker['restarts']} times"
    size = f"{worker['limit'] / 2**30:.3g} GiB"
    return f"worker {name} restarted {times}: over its memory limit of {size}: {MEMORY_KEY}"


def with_memory(reason: str, workers: Mapping[str, OverMemory]) -> str:
    """Return the reason of an end with the workers that lack memory, which may be its cause.

    They explain dask's KilledWorker, and follow another reason in parentheses.
    """
    found = memory_messages(workers)
    if not found:
        return reason
    worst = max(workers, key=lambda name: workers[name]["restarts"])
    if workers[worst]["restarts"] and _KILLED_WORKER.search(reason):
        message = over_memory_message(worst, workers[worst])
        return _KILLED_WORKER.sub(lambda _: f"KilledWorker: {message}", reason)
    more = f", and {len(found) - 1} more" if found[1:] else ""
    return f"{reason} ({found[0]}{more})"
