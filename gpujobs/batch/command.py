"""Runs one command of a batch scheduler, with the site's path and the variables that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import UnusableError
from ..schedulers import CommandResult, Scheduler
from . import process
from .system import HOST, System

SHORTEST_TIMEOUT = 5.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 8.0
"""Seconds between two attempts: doubled each time."""


def run_command(
    scheduler: Scheduler,
    commands: Mapping[str, str],
    argv: Sequence[str],
    *,
    stdin: str = "",
    cwd: Path | None = None,
    timeout: float = process.COMMAND_TIMEOUT,
    system: System = HOST,
) -> CommandResult:
    """Run ``argv``; ``commands`` are other paths of commands, ``timeout`` is in seconds."""
    command, *arguments = argv
    if command in commands:
        command = str(Path(commands[command]).expanduser())
    return system.run(
        [command, *arguments],
        stdin=stdin,
        cwd=cwd,
        timeout=min(process.COMMAND_TIMEOUT, max(SHORTEST_TIMEOUT, timeout)),
        env=process.environment(scheduler.environment, scheduler.fixed_environment),
    )


def check_usable(result: CommandResult) -> None:
    """Raise UnusableError if the command of ``result`` cannot be used on this host."""
    if result.usable:
        return
    name = Path(result.argv[0]).name
    hint = (
        "is this a login node? If it is, write the path in the site file:"
        f" commands: {{{name}: /path/to/{name}}}"
    )
    problem = result.problem or f"{name} is not configured on this host:\n{result.message}"
    raise UnusableError(problem, hint=hint)


def delays(first: float = FIRST_DELAY) -> Iterator[float]:
    """Yield the seconds to wait before the next attempts."""
    delay = first
    while True:
        yield delay
        delay = min(LONGEST_DELAY, delay * 2)
