"""The host as far as clusters are watched from it: its clock, and the commands that run on it."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..schedulers import CommandResult
from . import process


class System:
    """This host. A simulation replaces it as a whole."""

    def monotonic(self) -> float:
        """Return the time in seconds; it does not change when the clock of the host is set."""
        return time.monotonic()

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait, in a thread."""
        time.sleep(seconds)

    def spread(self, seconds: float) -> float:
        """Return about as many seconds, so that not all processes retry at the same moment."""
        return seconds * random.uniform(0.8, 1.2)  # noqa: S311 - no secret

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str,
        timeout: float,
        cwd: Path | None,
        env: Mapping[str, str],
    ) -> CommandResult:
        """Run a command of the batch scheduler to its end (see `process.run`)."""
        return process.run(argv, stdin=stdin, timeout=timeout, cwd=cwd, env=env)


HOST = System()
