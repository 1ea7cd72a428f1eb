"""What may stand in one line of text, whoever wrote it: files of users, logs of jobs."""

from __future__ import annotations

from unicodedata import category

_BREAKERS = ("Cc", "Zl", "Zp", "Cs")


def control_character(text: str) -> str:
    """Return the first character that could break a line or a terminal (control, separator, surrogate), or ``""``."""
    if text.isascii() and text.isprintable():
        return ""
    return next((character for character in text if category(character) in _BREAKERS), "")


def clean(line: str) -> str:
    """Return a line of a log without what could move a terminal's cursor."""
    if not control_character(line):
        return line
    return "".join(c for c in line if c == "\t" or category(c) not in _BREAKERS)
