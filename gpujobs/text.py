"""Small pure helpers for text: control characters, human-readable sizes and times, tables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from unicodedata import category

_BREAKERS = ("Cc", "Zl", "Zp", "Cs")
"""Unicode categories of `control_character`."""
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.S)
"""An escaped character or a set of characters in a regular expression."""
_REPEAT = re.compile(r"[*+?]\??|\{\d*,\d*\}\??")
_GROUP = re.compile(r"\(([^()]*)\)([*+?]|\{[^}]*\})?")
_MOST_STEPS = 10**7
_LEAST_COLUMN = 8
"""Characters of a column that is cut short."""
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


class StrEnum(str, Enum):
    """As that of Python 3.11: the packed judge runs in jobs with older ones."""

    def __str__(self) -> str:
        return str(self.value)


def with_home(path: str) -> str:
    """Return a path with ~ and ~name replaced; an unknown ~name stays, as in a shell.

    `Path.expanduser` raises RuntimeError then.
    """
    return os.path.expanduser(path)  # noqa: PTH111


def nearest(word: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """Return the known word that is most like ``word``, "" if none has the similarity (0 to 1)."""
    import difflib  # each command imports this module, and few need this

    return "".join(difflib.get_close_matches(word, list(known), n=1, cutoff=similarity))


def alike(word: str, known: Iterable[str], most: int = 4) -> list[str]:
    """Return the known words that begin with ``word`` or are like it, the most similar first."""
    import difflib

    words = list(known)
    longer = [one for one in words if word and one.startswith(word)]
    similar = difflib.get_close_matches(word, words, n=most, cutoff=0.6)
    return list(dict.fromkeys((*longer, *similar)))[:most]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question for the `nearest` word, "" if none is similar."""
    if near := nearest(word, known):
        return f"did you mean {near}?"
    return ""


def control_character(text: str) -> str:
    """Return the first control, separator or surrogate character of ``text``, or ``""``.

    Such characters can end a line of a script, or control a terminal.
    """
    if text.isascii() and text.isprintable():
        return ""
    return next((character for character in text if category(character) in _BREAKERS), "")


def clean(line: str) -> str:
    """Return a line of a log without control characters, except tabs."""
    if not control_character(line):
        return line
    return "".join(c for c in line if c == "\t" or category(c) not in _BREAKERS)


def printable(text: str) -> str:
    """Return a text of several lines, each as `clean` does."""
    return "\n".join(map(clean, text.split("\n")))


def size_text(n_bytes: int) -> str:
    """Return 64424509440 as ``60GiB``: in the largest exact unit, else with two decimals."""
    for unit, name in _UNITS:
        if n_bytes >= unit and n_bytes % unit == 0:
            return f"{n_bytes // unit}{name}"
    for unit, name in _UNITS:
        if n_bytes >= unit:
            return f"{n_bytes / unit:.2f}".rstrip("0").rstrip(".") + name
    return f"{n_bytes}B"


def exact_size_text(n_bytes: int) -> str:
    """Return a size as `size_text` does, but in bytes instead of rounded."""
    return f"{n_bytes}B" if n_bytes % 2**10 else size_text(n_bytes)


def measured_size_text(n_bytes: int) -> str:
    """Return a size that was measured, in whole MiB, as `size_text` does."""
    return size_text(n_bytes // 2**20 * 2**20)


def short_size_text(n_bytes: int) -> str:
    """Return a size as `size_text` does, but with one decimal instead of five digits or more."""
    unit, name = next(((unit, name) for unit, name in _UNITS if n_bytes >= unit), (1, "B"))
    exact = size_text(n_bytes)
    short = f"{number_text(round(n_bytes / unit, 1))}{name}"
    return min(exact, short, key=len) if len(exact) > len("9999MiB") else exact


def number_text(number: float) -> str:
    """Return 4.0 as ``4`` and 1e-06 as ``0.000001``: all digits, and no exponent."""
    if number == int(number):
        return str(int(number))
    return format(Decimal(repr(number)), "f")


def walltime_text(seconds: int) -> str:
    """Return 5400 as ``1h30m``; from two days up with days: ``2d12h``."""
    days = seconds // 86400 if seconds >= 2 * 86400 else 0
    hours, rest = divmod(seconds - days * 86400, 3600)
    minutes, left = divmod(rest, 60)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (left, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number) or "0s"


def clock_text(seconds: float) -> str:
    """Return 41 as ``00:41`` and 3661 as ``1:01:01``."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes:02d}:{left:02d}"


def plural(number: int, noun: str) -> str:
    """Return ``1 job`` or ``2 jobs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def note_text(note: str) -> str:
    """Return ``note: …``, or a note that says itself that it is a warning."""
    return note if note.startswith("warning: ") else f"note: {note}"


def quoted(log: Iterable[str]) -> list[str]:
    """Return lines of a log, marked as such."""
    return [f"  | {line}" for line in log]


def alternatives(words: Sequence[str]) -> str:
    """Return ``a``, ``a or b``, or ``a, b or c``."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def age_text(seconds: float) -> str:
    """Return 41 as ``41s``, 754 as ``12m``, 5400 as ``1h30m`` and 216000 as ``2d12h``.

    It is rounded down to minutes after the first, and to hours after two days.
    """
    whole = max(0, int(seconds))
    if whole >= 2 * 86400:
        whole -= whole % 3600
    elif whole >= 60:
        whole -= whole % 60
    return walltime_text(whole)


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    columns: int | None = None,
    spare: Sequence[str] = (),
    last: int | None = None,
) -> str:
    """Return ``header`` and ``rows`` as aligned columns, two spaces apart.

    It fits in ``columns`` characters, if these are given: those of the headers ``spare`` that do
    not fit are left out, the first one first, and then the last column is cut short. ``last``: to
    so many characters before a spare one is left out.
    """
    cells = [list(header), *([clean(str(cell).replace("\n", " ")) for cell in row] for row in rows)]
    for name in spare:
        if columns is None or _width(cells, last) <= columns:
            break
        place = cells[0].index(name)
        cells = [[*row[:place], *row[place + 1 :]] for row in cells]
    if columns is not None:
        before = _width([row[:-1] for row in cells]) + 2
        cells = [
            [*row[:-1], shortened(row[-1], max(_LEAST_COLUMN, columns - before))] for row in cells
        ]
    widths = _widths(cells)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells
    )


def wrapped(text: str, columns: int | None, indent: int) -> str:
    """Return ``text`` in lines of ``columns`` characters, the next ones ``indent`` further right.

    Without ``columns`` it stays one line. Words are not broken: they may be paths.
    """
    import textwrap  # each command imports this module, and few need this

    if columns is None or columns <= indent + _LEAST_COLUMN:
        return text
    return "\n".join(
        textwrap.wrap(
            text,
            columns,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
    )


def shortened(text: str, length: int) -> str:
    """Return ``text``, with "…" at its end if it has more than ``length`` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _widths(cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*cells)]


def _width(cells: Sequence[Sequence[str]], last: int | None = None) -> int:
    """Return the characters of a row; ``last``: the most of the last column that count."""
    *widths, end = _widths(cells)
    return sum(width + 2 for width in widths) + (end if last is None else min(end, last))


def repeats_repeats(pattern: str) -> bool:
    """Return whether a repeated group of a regular expression has repeats or alternatives.

    Such a pattern, as ``(a+)+b``, can take years for a text of 40 characters.
    """
    text, changed = _skeleton(pattern), 1
    while changed:
        for found in _GROUP.finditer(text):
            if found[2] not in (None, "?") and _repeats_of(found[1], None) != "x":
                return True
        text, changed = _GROUP.subn(lambda found: _repeats_of(found[1], found[2]), text)
    return False


def matches(pattern: str, text: str) -> bool:
    """Return whether all of ``text`` matches a regular expression of a site file.

    False if the expression is not valid, or might try more ways than can be tried in a second.
    """
    skeleton = _skeleton(pattern)
    repeats = len(_REPEAT.findall(skeleton))
    ways = math.comb(len(text) + repeats, repeats)
    ways *= math.prod(part.count("|") + 1 for part in re.split("[()]", skeleton))
    if ways > _MOST_STEPS or repeats_repeats(pattern):
        return False
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error:
        return False


def _skeleton(pattern: str) -> str:
    """Return the groups, repeats and alternatives of a regular expression."""
    return re.sub(r"\(\?(P<\w+>|[:=!>]|<[=!])", "(", _ATOM.sub("x", pattern))


def _repeats_of(body: str, repeat: str | None) -> str:
    """Return what a group is to the group around it."""
    inner = "*" if _REPEAT.search(body) or repeat else ""
    return f"x{inner}{'|' if '|' in body else ''}"


def charges_text(charges: Mapping[str, float]) -> list[str]:
    """Return ``12.5 SU`` for each unit, rounded up: it is a most."""
    hundredths = {unit: math.ceil(round(100 * one, 6)) for unit, one in charges.items()}
    return [f"{number_text(number / 100)} {unit}" for unit, number in hundredths.items()]
