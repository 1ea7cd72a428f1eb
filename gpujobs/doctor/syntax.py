"""Checks the bash text of a site and the scripts of its trials with ``bash -n``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..batch import process
from ..config.document import Loc
from ..config.sitefiles import SiteFile
from ..errors import Position, Problem
from ..planning.sitecheck import Tried

BASH = "/bin/bash"
_TEXTS: tuple[Loc, ...] = (
    ("setup",),
    ("mpi", "setup"),
    ("defaults", "environment", "setup"),
)
"""The keys of a site file that have bash text."""


def syntax_problems(site_file: SiteFile, results: Sequence[Tried]) -> Iterator[Problem]:
    """Return the syntax errors of the site's bash text; if it has none, those of its scripts."""
    texts = [*_TEXTS, *(("queues", key, *loc) for key in site_file.site.queues for loc in _TEXTS)]
    problems = [problem for loc in texts for problem in _text_problems(site_file, loc)]
    return iter(problems or _script_problems(results))


def _script_problems(results: Sequence[Tried]) -> Iterator[Problem]:
    seen: set[str] = set()
    for result in results:
        for script in result.scripts:
            # Directives are comments for bash, so most scripts of a site are the same program.
            program = re.sub(r"^#.*$", "", script.text, flags=re.M)
            if program not in seen and (message := bash_error(program)):
                yield Problem(f"{result.trial}: bash -n refuses the script: {message}")
            seen.add(program)


def bash_error(text: str) -> str:
    """Return the first message of ``bash -n`` for ``text``; "" if it is correct."""
    result = process.run([BASH, "-n"], stdin=text)
    if result.exit_code == 0 and not result.stderr:
        return ""
    return result.first_line.removeprefix(f"{BASH}: ")


def _text_problems(site_file: SiteFile, loc: Loc) -> Iterator[Problem]:
    document = site_file.document
    value: object = document.value
    for step in loc:
        value = value.get(str(step)) if isinstance(value, dict) else None
    if isinstance(value, str) and (message := bash_error(value)):
        name = ".".join(map(str, loc))
        position = _line_inside(document.position(loc), message)
        yield Problem(f"`{name}`: bash -n refuses it: {message}", position)


def _line_inside(position: Position, message: str) -> Position:
    """Return the line of the file that bash means, if the text is a block of lines."""
    found = re.match(r"line (\d+):", message)
    if not found or not position.text.split("#")[0].rstrip().endswith("|"):
        return position
    return replace(position, line=position.line + int(found[1]), column=1, text="")
