"""Text that goes into a batch script as it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

LINE_WIDTH = 90
"""Characters of command words in a line; a longer word has a line of its own."""

_VARIABLE = re.compile(r"(\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*(?::-[\w./-]*)?\})")


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


def with_variables(text: str) -> str:
    """Return ``text`` as one word of bash that is expanded in the job.

    Only ``$NAME``, ``${NAME}``, ``${NAME:-/else}`` and a leading ``~/`` are; all else is literal.
    """
    if text.startswith("~/"):
        text = f"$HOME{text[1:]}"
    parts = _VARIABLE.split(text)
    if len(parts) == 1:
        return shlex.quote(text)
    literal = [re.sub(r'([$`"\\])', r"\\\1", part) for part in parts[::2]]
    parts[::2] = literal
    return f'"{"".join(parts)}"'
