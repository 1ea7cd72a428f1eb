"""Text that goes into a batch script as it is."""

from __future__ import annotations

from collections.abc import Iterable

LINE_WIDTH = 90
"""Characters of command words in a line; a longer word has a line of its own."""


class Bash(str):
    """Bash text: templates do not quote it."""

    __slots__ = ()


def command(words: Iterable[str]) -> Bash:
    """Return one command of ``words``, which are bash, on as many lines as needed."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) <= LINE_WIDTH:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return Bash(" \\\n        ".join(lines))
