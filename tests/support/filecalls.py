"""Count the calls that name a file or a folder: each one is a question to a file server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

STATS = ("stat", "lstat", "access", "readlink")
"""Functions of `os`, in which those of `Path` end."""


def file_calls(function: Callable[[], object]) -> list[str]:
    """Return the calls that a function makes in this process and that name a file or a folder."""
    found: list[str] = []
    watching = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        by_name = bool(arguments) and not isinstance(arguments[0], int)
        if watching and by_name and event in ("open", "os.listdir", "os.scandir"):
            found.append(event)

    def profile(_: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ in STATS:
            found.append(argument.__name__)

    sys.addaudithook(hook)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        watching.clear()
    return found
