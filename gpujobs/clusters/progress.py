"""One line of progress, on a terminal or in a notebook."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from ..text import clean, printable, shortened

_CLEAR = "\r\033[K"
_DEFAULT_COLUMNS = 80


class Progress:
    """One line on stderr: rewritten on a terminal, printed again after a change elsewhere."""

    def __init__(self) -> None:
        self._printed = ""

    def show(self, text: str, clock: str) -> None:
        """Show ``text, clock``. Without a terminal a change of ``clock`` alone prints nothing.

        A text that is too long for the terminal's row ends in "…".
        """
        if sys.stderr.isatty():
            _rewrite(sys.stderr, clean(text), f", {clock}")
        elif text != self._printed:
            self._printed = text
            print(clean(f"{text}, {clock}"), file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        """Write a line that stays, above the line of progress."""
        self.clear()
        print(printable(text), file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line of progress from a terminal."""
        if sys.stderr.isatty():
            _rewrite(sys.stderr)


class LibraryProgress(Progress):
    """The progress of a call in Python: only on a terminal, or in a notebook."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self._quiet = quiet
        self._width = 0
        """Characters of the longest line so far; 0 if none is shown."""

    def show(self, text: str, clock: str) -> None:
        """Show ``text, clock``; without a terminal or a notebook nothing."""
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._width = 1
            super().show(text, clock)
        elif _in_notebook() and text != self._printed:
            self._printed, text = text, clean(text)
            self._width = max(self._width, len(text))
            sys.stdout.write("\r" + text.ljust(self._width))
            sys.stdout.flush()

    def clear(self) -> None:
        """Remove the line of progress from a terminal; end it in a notebook."""
        if not self._width:
            return
        self._width = 0
        if sys.stderr.isatty():
            super().clear()
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()


def _rewrite(terminal: TextIO, text: str = "", end: str = "") -> None:
    # The line must fit one row: `clear` would leave the part that wrapped.
    room = columns_of(terminal) - 1 - len(end)
    terminal.write(_CLEAR + shortened(text, room) + end)
    terminal.flush()


def _in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def columns_of(terminal: TextIO) -> int:
    """Return the characters in a row of a terminal."""
    try:
        return os.get_terminal_size(terminal.fileno()).columns or _DEFAULT_COLUMNS
    except OSError:
        return _DEFAULT_COLUMNS
