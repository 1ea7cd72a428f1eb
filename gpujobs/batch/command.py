"""Runs one command of a batch scheduler, with the site's path and the variables that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..schedulers import CommandResult, Scheduler
from . import process
from .system import HOST, System

SHORTEST_TIMEOUT = 5.0


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
