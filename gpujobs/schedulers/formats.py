"""Small formats and parsers that several batch schedulers share."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PART = r"\d{1,10}(-\d{1,10}(:[1-9]\d{0,9})?)?"
_LIST = re.compile(rf"{_PART}(,{_PART})*")
_MOST_MEMBERS = 5_000_000
"""Slurm's largest MaxArraySize is 4,000,001."""


def members(text: str) -> list[int]:
    """Return the numbers of ``[1-3,5%2]``, ``1-9:2`` and the like.

    ``[]`` for other text, and for more numbers than an array can have.
    """
    body = text.strip("[]").split("%")[0]
    if not _LIST.fullmatch(body):
        return []
    found: list[int] = []
    for part in body.split(","):
        numbers = _span(part)
        if len(found) + len(numbers) > _MOST_MEMBERS:
            return []
        found += numbers
    return found


def _span(text: str) -> range:
    """Return the numbers of ``5``, ``1-9`` or ``1-9:2``."""
    ends, _, step = text.partition(":")
    first, _, last = ends.partition("-")
    return range(int(first), int(last or first) + 1, int(step or 1))


def integer(text: str) -> int | None:
    """Return ``text`` as a whole number, None if it is not one."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return None


def find_integer(pattern: str, text: str) -> int | None:
    """Return the first group of ``pattern`` in ``text`` as a number, None if it is not there."""
    found = re.search(pattern, text, re.M)
    return int(found[1]) if found else None


def names_ids(words: Sequence[str], text: str) -> bool:
    """Return whether ``text`` has every job id among the words of a command.

    As a job that is listed, or as one that is said not to be there: ``Job <7> is not found``.
    """
    ids = [found[0] for word in words if (found := re.match(r"\d+", word))]
    before = r'^\s*|["<]|: |\bId |\bError '
    named = set(re.findall(rf"(?:{before})(\d+)\b", text, re.M))
    return named.issuperset(ids)


def quoted_path(path: str, plain: str) -> str:
    """Return ``path`` in double quotes, unless all of its characters are in the set ``plain``."""
    if re.fullmatch(f"[{plain}]+", path):
        return path
    return f'"{path}"'


def memory_bytes(text: str) -> int | None:
    """Return ``32gb``, ``24684092kb`` or ``23.541G`` as bytes; None for other text."""
    found = re.fullmatch(r"([\d.]+)\s*([kmgt]?)b?", text.strip(), re.I)
    if not found:
        return None
    return int(float(found[1]) * 1024 ** (" kmgt".index(found[2].lower() or " ")))


def clock_seconds(text: str) -> int | None:
    """Return ``1-00:00:00``, ``24:00:00`` or ``10:00`` as seconds; None for other text."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text.strip())
    if not found:
        return None
    parts = [int(part) for part in found[2].split(":")]
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + part
    if not found[1]:
        return seconds
    for _ in range(3 - len(parts)):  # after days, the first part is hours
        seconds *= 60
    return 86400 * int(found[1]) + seconds


def listed_attributes(stdout: str) -> dict[str, dict[str, str]]:
    """Return the attributes of the jobs, queues or servers that ``qstat -f1`` lists, by name."""
    found: dict[str, dict[str, str]] = {}
    attributes: dict[str, str] = {}
    for line in stdout.splitlines():
        if title := re.match(r"(?:Job Id|Queue|Server): (\S+)", line):
            attributes = found[title[1]] = {}
        elif row := re.match(r"    (\S+) = (.*)", line):
            attributes[row[1]] = row[2]
    return found
