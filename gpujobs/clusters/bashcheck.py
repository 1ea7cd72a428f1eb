"""The syntax of the bash texts of a profile or a site, which bash itself checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..config.document import Document, Loc
from ..errors import Position, Problem

BASH = "/bin/bash"


def bash_problems(document: Document, places: Iterable[Loc]) -> Iterator[Problem]:
    """Yield the syntax errors of the bash texts at ``places`` of a document."""
    for loc in places:
        text = document.value_at(loc)
        if isinstance(text, str) and (message := bash_error(text)):
            position = _line_inside(document.position(loc), message)
            name = ".".join(map(str, loc))
            yield Problem(f"`{name}`: bash -n refuses it: {message}", position)


def bash_error(text: str) -> str:
    """Return the first error of ``bash -n`` in ``text``; "" if it is correct, or without bash."""
    # It does not execute `shopt -s extglob`, and so has the option from the beginning.
    from ..batch import process  # most profiles have no bash text

    result = process.run([BASH, "-O", "extglob", "-n"], stdin=text)
    if not result.started or (result.exit_code == 0 and not result.stderr):
        return ""
    return result.first_line.removeprefix(f"{BASH}: ")


def _line_inside(position: Position, message: str) -> Position:
    """Return the line of the file that bash means, if the text is a block of lines."""
    found = re.match(r"line (\d+):", message)
    if not found or not position.text.split("#")[0].rstrip().endswith("|"):
        return position
    return replace(position, line=position.line + int(found[1]), column=1, text="")
