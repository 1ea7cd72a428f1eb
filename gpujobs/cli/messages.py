"""Messages on standard error, and the line of progress below them."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("gpujobs")

_CLEAR = "\r\033[K"
_DEFAULT_COLUMNS = 80


class Progress:
    """One line on stderr: rewritten on a terminal, printed again after a change elsewhere."""

    def __init__(self) -> None:
        self._printed = ""

    def show(self, text: str, clock: str) -> None:
        """Show ``text, clock``. Without a terminal a change of ``clock`` alone prints nothing."""
        line = f"{text}, {clock}"
        if sys.stderr.isatty():
            # The line must fit one row: `clear` would leave the part that wrapped.
            sys.stderr.write(_CLEAR + line[: _columns() - 1])
            sys.stderr.flush()
        elif text != self._printed:
            self._printed = text
            print(line, file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        """Write a line that stays, above the line of progress."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line of progress from a terminal."""
        if sys.stderr.isatty():
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()


progress = Progress()
"""The one line of progress of this process: all messages must be written above it."""


class MessageHandler(logging.Handler):
    """Writes the messages of the library to stderr, above the line of progress."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message. A closed stderr raises BrokenPipeError, which ends the command."""
        progress.write(self.format(record))


def install_handler() -> None:
    """Send the messages of the logger `gpujobs` to stderr; further calls change nothing."""
    if not any(isinstance(handler, MessageHandler) for handler in logger.handlers):
        logger.addHandler(MessageHandler())
    logger.setLevel(logging.INFO)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _DEFAULT_COLUMNS
    except OSError:
        return _DEFAULT_COLUMNS
