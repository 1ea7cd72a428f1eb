"""Checks directives: each by itself, and all of one job against each other."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import placeholders
from ..errors import Position, Problem
from ..schedulers import Scheduler
from .diagnostics import Diagnostics


@dataclass(frozen=True)
class Directive:
    """One directive of a job, without its prefix."""

    text: str
    position: Position | None = None
    """In the site file or the profile; None for a line of gpujobs."""
    by_user: bool = False
    """It is a line of the profile."""

    @property
    def writer(self) -> str:
        """Who wrote it, for messages."""
        if self.by_user:
            return "another line of the profile"
        return "the site" if self.position else "gpujobs"


class DirectiveChecker:
    """Checks the directives of one job, in the order of the script.

    A batch scheduler does not report an option that occurs twice: it takes the last one, which may
    replace the request for GPUs.
    """

    def __init__(self, diagnostics: Diagnostics, scheduler: Scheduler) -> None:
        self.diagnostics, self.scheduler = diagnostics, scheduler
        own = Directive("")
        self._writers: dict[str, Directive] = dict.fromkeys(scheduler.managed, own)
        """The first directive that sets an option."""

    def add(self, directive: Directive) -> None:
        """Report why ``directive`` is not allowed, and remember its options for later ones."""
        try:
            options = self.scheduler.options(directive.text)
        except ValueError as error:
            self._report(directive, f" is no directive: {error}")
            return
        if refused := self.scheduler.refusal(directive.text):
            self._report(directive, f" is refused: {self.scheduler.refused[refused]}")
        elif clash := self._clash(directive):
            first = self._writers[clash]
            self._report(directive, f": {clash} is written by {first.writer}", first.position)
        for option in options:
            self._writers.setdefault(option, directive)

    def _clash(self, directive: Directive) -> str:
        find = self.scheduler.clash if directive.by_user else self.scheduler.repeated
        return find(directive.text, self._writers)

    def _report(self, directive: Directive, message: str, related: Position | None = None) -> None:
        text = f"`{directive.text}`{message}"
        self.diagnostics.add(Problem(text, directive.position, related=related))


def check_memory_units(text: str, scheduler: Scheduler) -> None:
    """Raise ValueError unless the unit of each memory placeholder in ``text`` is also written.

    ``mem={memory_per_node:GB}`` would request 13 bytes instead of 13 GB.
    """
    for token, unit, written in placeholders.memory_suffixes(text):
        if not written and unit in scheduler.memory_unit:
            continue
        if written != unit:
            name = scheduler.name
            shown = f"{token}{written}" if written else token
            raise ValueError(
                f"`{shown}` is a number of {unit}B, and {name} would take it in another unit: "
                f"write {token}{unit}"
            )
