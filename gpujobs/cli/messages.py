"""Data on standard output, messages on standard error, and the line of progress below them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys

import click

from ..text import printable
from .live import ReportProgress

_FIRST_FILE = 3
"""The first descriptor after those of stdin, stdout and stderr."""

logger = logging.getLogger("gpujobs")

progress = ReportProgress()
"""The one line of progress of this process: all messages must be written above it."""


def echo(text: str) -> None:
    """Print data to stdout, without the control characters of names, reasons and files.

    Raises OSError if stdout is full or closed.
    """
    if sys.stdout is None:  # `>&-`
        raise OSError(errno.EBADF, "stdout is closed")
    click.echo(printable(text))


def keep_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed: the next file would get their number.

    Messages are lost without stderr; `echo` fails without stdout.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _FIRST_FILE:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def discard_output() -> None:
    """Give up stdout, which cannot be written: Python would fail again when it exits."""
    with contextlib.suppress(AttributeError, OSError):  # closed, or not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
