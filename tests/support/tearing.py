"""Answers of commands that are cut off, joined or garbled, at random."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

NUMBERS = ("99999", "0-9999999999", "1e999", "9" * 5000)
"""One of them may be the id of another job, which no reader can see."""
GARBAGE = ("?", "#", "²", "\0\0", "é", "-", "", *NUMBERS)
KINDS = ("cut", "cut", "join", "drop", "repeat", "garble", "garble", "nul")


def torn(
    text: str,
    chance: random.Random,
    *,
    kinds: Sequence[str] = KINDS,
    garbage: Sequence[str] = GARBAGE,
) -> str:
    """Return a changed answer; ``garbage`` replaces a word."""
    lines = text.splitlines(keepends=True)
    place = chance.randrange(len(lines))
    kind = chance.choice(kinds)
    if kind == "cut":
        kept = text[: chance.randrange(len(text))]
        return kept + chance.choice(("", "\n"))
    if kind == "join":
        lines[place] = lines[place].rstrip("\n")
    elif kind == "drop":
        del lines[place : place + chance.randint(1, 3)]
    elif kind == "repeat":
        lines.insert(chance.randrange(len(lines)), lines[place])
    elif kind == "garble":
        words = re.split(r"([|\s/\"=:<>]+)", lines[place])
        words[chance.randrange(0, len(words), 2)] = chance.choice(garbage)
        lines[place] = "".join(words)
    else:
        at = chance.randrange(len(lines[place]))
        lines[place] = lines[place][:at] + "\0" * chance.randint(1, 9) + lines[place][at + 1 :]
    return "".join(lines)
