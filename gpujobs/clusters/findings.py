"""Findings of the jobs of a cluster, in sentences for the user."""

from __future__ import annotations

from collections.abc import Iterator

from ..injob.folder import all_gpus
from ..injob.gpus import binding_messages
from ..injob.memory import memory_messages
from ..text import clean, plural
from .folderstate import FolderState


def notes(state: FolderState) -> list[str]:
    """Return remarks for the user: `findings`, and missing encryption."""
    if state.encrypted is False:
        return [*findings(state), f"not encrypted: dask uses {state.scheme}"]
    return findings(state)


def findings(state: FolderState) -> list[str]:
    """Return the findings about files, nodes, setup, memory, CPUs and transport."""
    found = problems(state)
    found += [f"setup: {text}" for text in sorted(state.failed_setups)]
    found += memory_messages(state.dask.over_memory)
    if state.head is not None and (note := state.job(state.head).note):
        found.append(note)
    found += binding_messages(state.dask.connected)
    found += filter(None, (state.transport.reason, state.transport.remark))
    if unused := unused_networks(state):
        names = " and ".join(unused)
        message = f"{names} seen and left unused: dask uses {state.scheme}, not ucxx"
        found.append(f"{message}; `protocol: ucxx` uses it, not encrypted")
    return found


def problems(state: FolderState) -> list[str]:
    """Return which files are damaged, which nodes were lost, and which tasks."""
    lost = (clean(node.reason) for node in state.lost_nodes.values())
    return [*state.damaged, *lost, *_lost_tasks(state)]


def _lost_tasks(state: FolderState) -> Iterator[str]:
    """Yield which tasks the end of their job has cut off; their names are the user's."""
    for prefix, tasks in state.dask.lost_tasks.items():
        what = f"{plural(tasks.number, 'task')} {clean(prefix)}"
        yield (
            f"{what} started again: the job ended when it had run for {tasks.seconds:.0f} s; "
            "`task_time` says how long a task takes"
        )


def unused_networks(state: FolderState) -> list[str]:
    """Return fast networks that the protocol does not use, as ``NVLink between 2 GPUs``."""
    if not state.scheme or state.scheme == "ucxx":
        return []
    found: dict[str, set[str | None]] = {}
    for worker in state.dask.connected.values():
        uuids = [gpu["uuid"] for gpu in all_gpus(worker.get("gpu"))]
        for name in (worker.get("gpu") or {}).get("fast", ()):
            found.setdefault(name, set()).update(uuids)
    return [
        f"{name} between {len(gpus)} GPUs" if len(gpus) > 1 else name
        for name, gpus in sorted(found.items())
    ]
