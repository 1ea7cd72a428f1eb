"""Text that goes into a batch script as it is; errors and notes of planning."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from ..config.spec import ClusterSpec
from ..errors import InputError, Position, Problem
from ..text import with_home

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


def without(names: Iterable[str]) -> list[str]:
    """Return the bash that hides variables from the command after it; [] if there are none."""
    options = [f"-u {name}" for name in names]
    return ["env", *options] if options else []


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


# -- the site's ``directory``: where the folders of clusters are -----------------------------------
_PATH_VARIABLE = re.compile(r"\$(?:(?P<name>\w+)|\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\})")


def expand_directory(text: str) -> str:
    """Return the site's ``directory`` with ~ and environment variables expanded on this host.

    Raises InputError if a variable without a default is unset or empty, or a user is unknown.
    """

    def value(found: re.Match[str]) -> str:
        name, default = found["name"] or found["braced"], found["default"]
        if os.environ.get(name):
            return os.environ[name]
        if default is None:
            raise InputError(f"the site's `directory` is {text}, but ${name} is not set here")
        return default

    path = with_home(_PATH_VARIABLE.sub(value, text))
    if path.startswith("~"):
        raise InputError(f"the site's `directory` is {text}, but there is no such user here")
    return str(Path(path))


# -- errors and notes of planning ------------------------------------------------------------------
class Diagnostics:
    """The problems of one cluster spec with their positions, and notes for the user.

    Equal problems and equal notes are kept once.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.prefix = ""
        """Names the group of workers in messages."""

    def of_group(self, name: str, spec: ClusterSpec) -> Diagnostics:
        """Return the diagnostics of the group ``name``, which adds to these; "" is no group."""
        return self._inside(spec, f"group {name}: " if name else "")

    def in_queue(self, key: str) -> Diagnostics:
        """Return the diagnostics of jobs in the site's queue ``key``, which adds to these."""
        return self._inside(self.spec.in_queue(key), self.prefix)

    def _inside(self, spec: ClusterSpec, prefix: str) -> Diagnostics:
        inner = Diagnostics(spec)
        inner.problems, inner.notes, inner.prefix = self.problems, self.notes, prefix
        return inner

    def profile_error(
        self, message: str, *loc: str | int, hint: str = "", related: Position | None = None
    ) -> None:
        """Add a problem at the profile's key ``loc``, which conflicts with ``related``."""
        position = self.spec.position(*loc)
        self.add(Problem(f"{self.prefix}{message}", position, hint=hint, related=related))

    def site_error(self, message: str, *loc: str | int, hint: str = "") -> None:
        """Add a problem at the site's key ``loc``."""
        self.add(Problem(message, self.spec.site_position(*loc), hint=hint))

    def add(self, problem: Problem) -> None:
        """Add ``problem``."""
        if problem not in self.problems:
            self.problems.append(problem)

    def note(self, *texts: str) -> None:
        """Add notes: information that is not an error."""
        for text in texts:
            shown = f"{self.prefix}{text}"
            if shown not in self.notes:
                self.notes.append(shown)

    def raise_problems(self) -> None:
        """Raise InputError with all problems, if there are any."""
        if self.problems:
            raise InputError(self.problems)
