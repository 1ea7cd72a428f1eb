"""Blocking calls of dask's processes, which must not stop their event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in a thread, or here if the process is ending and starts no more threads."""
    try:
        await asyncio.to_thread(function, *arguments)
    except RuntimeError:
        function(*arguments)
