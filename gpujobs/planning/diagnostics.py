"""What planning finds: problems at their places in the profile and the site file, and notes for the user."""

from __future__ import annotations

from ..config.spec import ClusterSpec
from ..errors import InputError, Position, Problem


class Diagnostics:
    """Collects problems, so that all of them are told in one run. The same one is kept once."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def profile(
        self, message: str, *loc: str | int, hint: str = "", related: Position | None = None
    ) -> None:
        """Report a problem at the profile's key ``loc``."""
        self._add(Problem(message, self.spec.position(*loc), hint=hint, related=related))

    def site(self, message: str, *loc: str | int, hint: str = "") -> None:
        """Report a problem at the site's key ``loc``."""
        self._add(Problem(message, self.spec.site_position(*loc), hint=hint))

    def at(self, message: str, position: Position) -> None:
        """Report a problem at ``position``."""
        self._add(Problem(message, position))

    def note(self, text: str) -> None:
        """Tell the user something that is no problem."""
        if text not in self.notes:
            self.notes.append(text)

    def check(self) -> None:
        """Raise InputError with all problems, if there are any."""
        if self.problems:
            raise InputError(self.problems)

    def _add(self, problem: Problem) -> None:
        if problem not in self.problems:
            self.problems.append(problem)
