"""Output: data, messages, and text that rich rewrites on a terminal."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

import click

from ..clusters.progress import Progress, columns_of
from ..text import clean, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from ..clusters.report import ClusterReport

_BAR_COLUMNS = 20
_STATES = {
    **dict.fromkeys(("RUNNING", "DONE", "COMPLETED"), "green"),
    **dict.fromkeys(("PENDING", "WAITING", "STARTING", "SUSPENDED", "LEAVING"), "yellow"),
    **dict.fromkeys(("FAILED", "CANCELLED", "TIMEOUT", "PREEMPTED", "AWAY"), "red"),
    **dict.fromkeys(("NODE_FAIL", "OUT_OF_MEMORY"), "red"),
}
"""Colours of states; they are readable on light and dark."""
_STATE = re.compile(rf"\b({'|'.join(_STATES)})\b")
_CHECKS = {"ok": "green", "warning": "yellow", "failed": "red"}
_CHECK = re.compile(rf"^({'|'.join(_CHECKS)})(?=  )", re.M)
"""How a check of `doctor` has ended, at the beginning of its line."""
_LABELS = {"error": "red", "warning": "yellow", "note": "blue", "hint": "cyan"}
_LABEL = re.compile(rf"^( *)({'|'.join(_LABELS)}):", re.M)
_PLACE = re.compile(r"(?<![^ \n])[^\s:]+\.ya?ml:\d+(?::\d+)?(?=:)")


def has_colors(file: TextIO) -> bool:
    """Return whether text for ``file`` has colours: `--color`, else NO_COLOR and the terminal."""
    context = click.get_current_context(silent=True)
    if context and context.color is not None:
        return context.color
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return file.isatty()


def with_labels(text: str) -> str:
    """Return a message with colours for its labels and for places in files."""
    text = _PLACE.sub(lambda found: click.style(found[0], bold=True), text)
    return _LABEL.sub(_with_label, text)


def _with_label(found: re.Match[str]) -> str:
    indent, label = found.groups()
    return indent + click.style(f"{label}:", fg=_LABELS[label], bold=True)


def with_states(text: str) -> str:
    """Return text with colours for the states in it, but not for headers of tables."""
    text = "\n".join(
        line if _is_header(line) else _STATE.sub(_state, line) for line in text.split("\n")
    )
    return _CHECK.sub(lambda found: click.style(found[0], fg=_CHECKS[found[0]]), text)


def _state(found: re.Match[str]) -> str:
    return click.style(found[0], fg=_STATES[found[0]])


def _is_header(line: str) -> bool:
    return not any(character.islower() or character.isdigit() for character in line)


def columns() -> int | None:
    """Return the characters in a row of the terminal; None if stdout is not one."""
    return columns_of(sys.stdout) if sys.stdout and sys.stdout.isatty() else None


def terminal(file: TextIO) -> Console | None:
    """Return a console for a terminal whose text can be rewritten; None for all other files."""
    if not file.isatty():
        return None
    from rich.console import Console

    console = Console(file=file, highlight=False, no_color=not has_colors(file))
    if console.is_dumb_terminal:
        return None
    return console


def progress_text(report: ClusterReport) -> str:
    """Return ``6/8 workers, 2 waiting (Resources)``."""
    parts = [f"{report.connected}/{report.record.workers} workers"]
    if groups := [f"{group.name} {group.connected}/{group.wanted}" for group in report.groups]:
        parts = [f"{', '.join(groups)} workers"]
    if report.finished:
        parts.append(report.state)
    elif report.reason:
        parts.append(report.reason)
    return ", ".join(parts)


class ReportProgress(Progress):
    """The progress of a cluster on stderr: a bar and one line on a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._live: Live | None = None

    def show_report(self, report: ClusterReport, clock: str) -> None:
        """Show how many workers are connected, and why others wait."""
        if self._live is None and (console := terminal(sys.stderr)):
            self._live = area(console, transient=True)
            self._live.start()
        if self._live is None:
            self.show(progress_text(report), clock)
            return
        line = progress_line(report, clock, self._live.console.width)
        self._live.update(line, refresh=True)

    def write(self, text: str) -> None:
        """Write a line that stays, above the progress; its labels have colours."""
        self.clear()
        text = printable(text)
        print(with_labels(text) if has_colors(sys.stderr) else text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the progress from a terminal."""
        if self._live is None:
            super().clear()
        else:
            self._live.stop()
            self._live = None


def area(console: Console, *, transient: bool = False) -> Live:
    """Return an area at the end of a terminal; ``transient``: `stop` removes it."""
    from rich.live import Live

    return Live(
        console=console,
        transient=transient,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def progress_line(report: ClusterReport, clock: str, columns: int) -> RenderableType:
    """Return a bar with `progress_text`, in one row."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = ProgressBar(
        total=max(report.target, 1),
        completed=min(report.connected, report.target),
        width=min(_BAR_COLUMNS, columns // 4),
    )
    line = Table.grid(padding=(0, 1))
    line.add_row(
        bar, Text(clean(f"{progress_text(report)}, {clock}"), no_wrap=True, overflow="ellipsis")
    )
    return line


def styled(text: str) -> RenderableType:
    """Return text for rich with colours for the states in it. It is not markup."""
    from rich.text import Text

    found = Text.from_ansi(with_states(printable(text)))
    found.overflow = "fold"
    return found


# -- data on standard output, messages on standard error, and the line of progress below them ------
_FIRST_FILE = 3
"""The first descriptor after those of stdin, stdout and stderr."""

logger = logging.getLogger("gpujobs")

progress = ReportProgress()
"""The one line of progress of this process: all messages must be written above it."""


def echo(text: str, *, coloured: bool = False) -> None:
    """Print data to stdout, without control characters. Raises OSError if it is full or closed.

    ``coloured``: the states and labels in it have colours, on a terminal.
    """
    if sys.stdout is None:  # `>&-`
        raise OSError(errno.EBADF, "stdout is closed")
    colours, text = has_colors(sys.stdout), printable(text)
    if coloured and colours:
        text = with_states(with_labels(text))
    click.echo(text, color=colours)


def show(as_json: bool, document: Callable[[], object], text: Callable[[], str]) -> None:
    """Print a result, as JSON or as text with colours: only that one is made."""
    if as_json:
        echo(json.dumps(document(), indent=1))
    elif found := text():
        echo(found, coloured=True)


def keep_descriptors() -> None:
    """Open those of stdin, stdout and stderr that are closed: the next file would get them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < _FIRST_FILE:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


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
