"""Small formats and parsers that several batch schedulers share."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = r"\d+(-\d+(:\d+)?)?"
_LIST = re.compile(rf"{_PART}(,{_PART})*")


def ranges(numbers: Iterable[int]) -> str:
    """Return ``{1, 2, 3, 5}`` as ``1-3,5``."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(_span(first, last) for first, last in spans)


def members(text: str) -> list[int]:
    """Return the numbers of ``[1-3,5%2]``, ``1-9:2`` and the like; ``[]`` for other text."""
    body = text.strip("[]").split("%")[0]
    if not _LIST.fullmatch(body):
        return []
    found: list[int] = []
    for part in body.split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


def integer(text: str) -> int | None:
    """Return ``text`` as a whole number, None if it is not one."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return None


def find_integer(pattern: str, text: str) -> int | None:
    """Return the first group of ``pattern`` in ``text`` as a number, None if it is not there."""
    found = re.search(pattern, text, re.M)
    return int(found[1]) if found else None


def quoted_path(path: str, plain: str) -> str:
    """Return ``path`` in double quotes, unless all of its characters are in the set ``plain``."""
    if re.fullmatch(f"[{plain}]+", path):
        return path
    return f'"{path}"'


def _span(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}-{last}"
