"""Collects the errors and notes of planning, so that all errors are reported in one run."""

from __future__ import annotations

from ..config.spec import ClusterSpec
from ..errors import InputError, Position, Problem


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
        group = Diagnostics(spec)
        group.problems, group.notes = self.problems, self.notes
        group.prefix = f"group {name}: " if name else ""
        return group

    def in_queue(self, key: str) -> Diagnostics:
        """Return the diagnostics of jobs in the site's queue ``key``, which adds to these."""
        queue = Diagnostics(self.spec.in_queue(key))
        queue.problems, queue.notes, queue.prefix = self.problems, self.notes, self.prefix
        return queue

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

    def note(self, text: str) -> None:
        """Add a note: information that is not an error."""
        text = f"{self.prefix}{text}"
        if text not in self.notes:
            self.notes.append(text)

    def raise_problems(self) -> None:
        """Raise InputError with all problems, if there are any."""
        if self.problems:
            raise InputError(self.problems)
