"""Messages on standard error, and the line of progress below them."""

from __future__ import annotations

import logging

from .live import ReportProgress

logger = logging.getLogger("gpujobs")

progress = ReportProgress()
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
