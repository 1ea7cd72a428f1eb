"""Blocking calls of dask's processes, which must not stop their event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping

from .folder import Folder


async def in_thread(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in a thread, or here if the process is ending and starts no more threads."""
    try:
        await asyncio.to_thread(function, *arguments)
    except RuntimeError:
        function(*arguments)


class AppendedLines:
    """Lines of JSON for a file of the cluster's folder, which this process alone writes."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._lines: list[str] = []
        """They are not written yet."""

    def add(self, line: Mapping[str, object]) -> None:
        """Add a line, which the next `write` writes."""
        self._lines.append(json.dumps(line))

    async def write(self) -> None:
        """Append the lines; after an OSError, which is raised, they stay for the next time."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            await in_thread(self._folder.append, self._name, lines)
        except OSError:
            self._lines = lines + self._lines
            raise
