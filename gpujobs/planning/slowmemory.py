"""GPU memory with which ucxx is slower than tcp."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.profile import Profile
from ..config.workers import Workers

SLOW_MEMORY = {
    "managed": "with `rmm_managed_memory` it is slower than tcp "
    "(four H200, transpose of 12.8 GB: ucxx 8 to 16 s, tcp 1.5 to 3.3 s, "
    "ucxx without managed memory 0.07 s)",
    "async": "with `rmm_async` it is slower than tcp "
    "(blocks of 256 MiB between two H200: ucxx 0.44 GB/s, tcp 1.3 GB/s, "
    "ucxx without `rmm_async` more than 100 GB/s)",
}
"""Why ucxx is a bad choice for GPU memory that RMM allocates in these ways, as measured."""
_NOT_MEASURED = {
    "managed": ("rmm_maximum_pool_size", "rmm_track_allocations"),
    "async": ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_track_allocations"),
}
"""Options of workers that were not measured together with those ways."""


def slow_memory(groups: Sequence[Profile]) -> str:
    """Return why ucxx is slow for one of the groups, or ""."""
    return next(filter(None, (_slow_memory_of(group.workers) for group in groups)), "")


def _slow_memory_of(workers: Workers) -> str:
    text = SLOW_MEMORY.get(workers.gpu_memory, "")
    names = _NOT_MEASURED.get(workers.gpu_memory, ())
    others = [f"`{name}`" for name in names if getattr(workers, name)]
    if not others:
        return text
    return f"{text}; not measured together with {', '.join(others)}"
