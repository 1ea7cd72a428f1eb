"""The exceptions that gpujobs raises.

::

    GpujobsError              exit code
    ├── InputError            2   a file, an option or a keyword is invalid; nothing was submitted
    ├── RefusedError          1   the batch scheduler rejected a submission; the message is its own
    ├── UnavailableError      3   the batch scheduler did not respond; nothing is lost, try again
    │   └── UnusableError     3   its commands are missing here, or not configured
    ├── NoSuchClusterError    4   no cluster has that id
    └── JobFailedError        5   a job, or the command in it, failed

The message names the error and its position; ``hint`` is the cure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXCERPT_WIDTH = 110
"""Characters of a line that an excerpt shows."""
EXCERPT_LEAD = 80
"""Characters before the position that a shortened excerpt keeps."""


@dataclass(frozen=True)
class Position:
    """A place in a file, ``--set`` or a keyword: 1-based line and column, 0 if there is none."""

    source: str
    line: int = 0
    column: int = 0
    text: str = ""
    """The whole line, for the excerpt."""
    width: int = 1
    """Number of characters to underline."""

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    def excerpt(self) -> str:
        """Return the line with a caret under the position, or ``""`` if there is no line."""
        if not self.line or not self.text:
            return ""
        start = max(0, self.column - EXCERPT_LEAD)
        visible = self.text[start : start + EXCERPT_WIDTH]
        shown = "".join(c if c.isprintable() else " " for c in visible)
        column = self.column - 1 - start
        margin = f"{self.line:5d} | "
        caret = "^" * max(1, min(self.width, len(shown) - column))
        return f"{margin}{shown}\n{' ' * (len(margin) - 2)}| {' ' * column}{caret}"


@dataclass(frozen=True)
class Problem:
    """One error: its position, its cure, and ``related``, the position it conflicts with."""

    message: str
    position: Position | None = None
    hint: str = ""
    related: Position | None = None

    def __str__(self) -> str:
        lines = [self.message]
        if self.position:
            lines = [f"{self.position}: {self.message}", self.position.excerpt()]
        if self.related:
            lines += [f"  see {self.related}", self.related.excerpt()]
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(line for line in lines if line)


class GpujobsError(Exception):
    """The base class: ``str(error)`` is human-readable, ``exit_code`` is for the shell."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        message = f"{message}\n  hint: {self.hint}" if self.hint else message
        # A name from a damaged file, or one that is not UTF-8, cannot be written to a log.
        return message.encode("utf-8", "backslashreplace").decode()


class InputError(GpujobsError, ValueError):
    """The input is invalid. ``problems`` are all errors found, in the order of the file."""

    exit_code = 2

    def __init__(self, problems: str | Problem | Sequence[Problem], *, hint: str = "") -> None:
        if isinstance(problems, str):
            problems = Problem(problems, hint=hint)
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RefusedError(GpujobsError):
    """The batch scheduler rejected a submission; the message is its own."""


class UnavailableError(GpujobsError):
    """The batch scheduler did not respond in time, or its command could not be run."""

    exit_code = 3


class UnusableError(UnavailableError):
    """The commands of the batch scheduler cannot be used on this host: nothing was sent to it."""


class NoSuchClusterError(GpujobsError):
    """The ledger has no cluster with that id."""

    exit_code = 4


class JobFailedError(GpujobsError):
    """The cluster failed. ``code`` is the exit code of its command, if that exited."""

    exit_code = 5

    def __init__(self, message: str, *, hint: str = "", code: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code
