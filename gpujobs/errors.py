"""Every error that gpujobs raises on purpose.

::

    GpujobsError              exit code
    ├── InputError            2   a file, an option or a keyword is wrong; nothing was submitted
    ├── RefusedError          1   the batch scheduler said no; its own words are the message
    ├── UnavailableError      3   the batch scheduler did not answer; nothing is lost, try again
    ├── NoSuchClusterError    4   no cluster of that name
    └── JobFailedError        5   a job, or the command in it, failed

The message says what is wrong and where; ``hint`` says what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """A place in a file (or in ``--set``, or in a keyword): 1-based line and column, 0 where there is none."""

    source: str
    line: int = 0
    column: int = 0
    text: str = ""
    """The line itself, for the caret."""
    width: int = 1
    """Characters to underline."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def excerpt(self) -> str:
        """Return the line with a caret under the place, or ``""`` where there is no line to show."""
        if not self.line or not self.text:
            return ""
        start = max(
            0, self.column - 80
        )  # a long line is shown from where the place comes into view
        shown = "".join(c if c.isprintable() else " " for c in self.text[start : start + 110])
        column = self.column - 1 - start
        margin = f"{self.line:5d} | "
        caret = "^" * max(1, min(self.width, len(shown) - column))
        return f"{margin}{shown}\n{' ' * (len(margin) - 2)}| {' ' * column}{caret}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, with its place, what to do, and a second place where two things disagree."""

    message: str
    position: Position | None = None
    hint: str = ""
    related: Position | None = None

    def __str__(self) -> str:
        lines = [f"{self.position}: {self.message}" if self.position else self.message]
        if self.position and self.position.excerpt():
            lines.append(self.position.excerpt())
        if self.related:
            lines.append(f"  see {self.related}")
            if self.related.excerpt():
                lines.append(self.related.excerpt())
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class GpujobsError(Exception):
    """The base: ``str(error)`` is for people, ``exit_code`` for the shell."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}\n  hint: {self.hint}" if self.hint else message


class InputError(GpujobsError, ValueError):
    """What was given is wrong. ``problems`` holds everything that was found, in the order of the file."""

    exit_code = 2

    def __init__(self, problems: str | Problem | Sequence[Problem], *, hint: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(problems, hint=hint)
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RefusedError(GpujobsError):
    """The batch scheduler refused a submission; the message is what it said."""

    exit_code = 1


class UnavailableError(GpujobsError):
    """The batch scheduler did not answer in time, or its command could not be run."""

    exit_code = 3


class NoSuchClusterError(GpujobsError):
    """There is no cluster with that id in the ledger."""

    exit_code = 4


class JobFailedError(GpujobsError):
    """The cluster ended without doing what was asked. ``code`` is the command's own exit code, where it had one."""

    exit_code = 5

    def __init__(self, message: str, *, hint: str = "", code: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code
