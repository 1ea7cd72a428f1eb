"""Talk with one site's batch scheduler: its commands are run here, and what fails for a moment is tried again."""

from __future__ import annotations

import getpass
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import RefusedError, UnavailableError
from ..schedulers import CommandResult, JobId, JobState, JobStatus, Scheduler
from ..schedulers.base import NOT_LISTED
from . import process as commands

PATIENCE = 90.0
"""Seconds for which a batch scheduler that is away is waited for."""


@dataclass
class SchedulerClient:
    """A batch scheduler and how this site calls its commands."""

    scheduler: Scheduler
    paths: Mapping[str, str] = field(default_factory=dict)
    """The site's ``commands``: other paths of sbatch, squeue, …"""
    tell: Callable[[str], None] = lambda text: None
    """Called with a line for the user when something takes longer."""
    patience: float = PATIENCE
    stopping: Callable[[], bool] = lambda: False
    """Tells that nobody waits for an answer any more."""

    # -- submit -----------------------------------------------------------------------------------------------
    def submit(self, script: str, name: str, known: Collection[str], cwd: Path) -> str:
        """Submit ``script`` exactly once; return the submission's id.

        ``name`` is the job's name, unique to the cluster, and ``known`` are the submissions of that name made before:
        after a lost reply a submission of that name that is not among them is ours, and is adopted.
        """
        deadline = time.monotonic() + self.patience
        for attempt in range(1000):
            result = self._run(self.scheduler.submit_command(), stdin=script, cwd=cwd)
            if result.exit_code == 0 and (submission := self.scheduler.parse_submit(result.stdout)):
                return submission
            self._check_command(result)
            if result.exit_code not in (0, None) and not self.scheduler.unreachable(result):
                raise RefusedError(f"{self.scheduler.name} refused the job:\n{result.message}")
            # The reply was lost or garbled, and the job may have been accepted all the same.
            self.tell(
                f"{self.scheduler.name} did not answer ({_first_line(result)}); looking whether it took the job"
            )
            if found := self._adopt(name, known, deadline, attempt):
                return found
            if time.monotonic() > deadline or (result.exit_code == 0 and attempt >= 2):
                raise UnavailableError(f"{self.scheduler.name} gave no job id: {result.message}")
        raise AssertionError("unreachable")

    def _adopt(
        self, name: str, known: Collection[str], deadline: float, attempt: int
    ) -> str | None:
        """Wait until the batch scheduler answers again; return the submission that it took, None if it took none.

        It may answer this question before it has worked off what came earlier, so that "none" counts when said twice.
        """
        wait, none_before = min(8.0, 1.0 * 2**attempt), False
        while True:
            self._sleep(wait * random.uniform(0.8, 1.2))  # noqa: S311 - spreads retries, nothing secret
            result = self._run(self.scheduler.find_command(name, getpass.getuser()))
            if self.scheduler.answered(result) and not self.scheduler.unreachable(result):
                found = self.scheduler.parse_find(result.stdout, name) - set(known)
                if found or none_before:
                    return min(found, default=None)
                none_before, wait = True, 3.0
                continue
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{self.scheduler.name} has not answered for {self.patience:.0f} s: {_first_line(result)}",
                    hint="nothing is lost: if it took the job after all, the job ends by itself; try again later",
                )
            wait = min(8.0, wait * 2)

    def find(self, name: str) -> set[str]:
        """Return the submissions called ``name``."""
        result = self._ask(self.scheduler.find_command(name, getpass.getuser()))
        return self.scheduler.parse_find(result.stdout, name)

    def array_limit(self) -> int | None:
        """Return how many jobs an array may have, where the batch scheduler says so."""
        argv = self.scheduler.limit_command()
        return self.scheduler.parse_limit(self._run(argv).stdout) if argv else None

    def estimate(self, script: str, cwd: Path) -> str | None:
        """Return when ``script`` would start, as the batch scheduler says; None where it cannot say."""
        argv = self.scheduler.estimate_command()
        return (
            self.scheduler.parse_estimate(self._run(argv, stdin=script, cwd=cwd)) if argv else None
        )

    # -- watch ------------------------------------------------------------------------------------------------
    def status(self, ids: Sequence[JobId], names: Sequence[str]) -> dict[JobId, JobStatus]:
        """Return the status of all ``ids``: one call, one for details, one to accounting for those not listed."""
        if not ids:
            return {}
        result = self._ask(self.scheduler.status_command(ids, names, getpass.getuser()))
        found = self.scheduler.parse_status(result, ids)
        argv = self.scheduler.detail_command(found)
        if argv:
            found.update(self.scheduler.parse_detail(self._run(argv), found))
        gone = [job for job in ids if job not in found]
        for argv in self.scheduler.accounting_commands(gone) if gone else []:
            answer = self._run(argv)
            if answer.exit_code is not None:
                found.update(self.scheduler.parse_accounting(answer, gone))
        failure = JobStatus(JobState.UNKNOWN, reason=_first_line(result))
        other = NOT_LISTED if self.scheduler.answered(result) else failure
        return {job: found.get(job, other) for job in ids}

    # -- cancel -----------------------------------------------------------------------------------------------
    def cancel(self, targets: Mapping[str, Sequence[int]]) -> None:
        """Cancel submissions: whole ones, or only the members with the indexes given."""
        words = [
            word
            for submission, indexes in targets.items()
            for word in self.scheduler.target(submission, indexes)
        ]
        if not words:
            return
        result = self._ask(self.scheduler.cancel_command(words), accept=self.scheduler.already_gone)
        if result.exit_code != 0 and not self.scheduler.already_gone(result):
            raise RefusedError(
                f"{self.scheduler.name} did not cancel {', '.join(targets)}:\n{result.message}"
            )

    # -- small things -----------------------------------------------------------------------------------------
    def _ask(
        self, argv: list[str], accept: Callable[[CommandResult], bool] = lambda result: False
    ) -> CommandResult:
        """Run a command, and again while the batch scheduler is away."""
        deadline, wait = time.monotonic() + self.patience, 1.0
        while True:
            result = self._run(argv)
            if not self.scheduler.unreachable(result):
                return result
            self._check_command(result)
            if accept(result):
                return result
            if time.monotonic() + wait > deadline:
                raise UnavailableError(
                    f"{self.scheduler.name} is not available: {_first_line(result)}",
                    hint="try again later",
                )
            self.tell(
                f"{self.scheduler.name} is not available ({_first_line(result)}); trying again"
            )
            self._sleep(wait)
            wait = min(8.0, wait * 2)

    def _run(
        self, argv: Sequence[str], *, stdin: str = "", cwd: Path | None = None
    ) -> CommandResult:
        own = self.paths.get(argv[0])
        words = [str(Path(own).expanduser()), *argv[1:]] if own else list(argv)
        return commands.run(
            words, stdin=stdin, cwd=cwd, timeout=min(commands.TIMEOUT, max(5.0, self.patience))
        )

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.stopping():
                raise UnavailableError(
                    f"{self.scheduler.name} did not answer before the cluster was closed"
                )
            time.sleep(min(0.25, left))

    def _check_command(self, result: CommandResult) -> None:
        if "not found" in result.problem or "could not be started" in result.problem:
            name = Path(result.argv[0]).name
            hint = f"is this a login node? Else write its path in the site file: commands: {{{name}: /path/to/{name}}}"
            raise UnavailableError(result.problem, hint=hint)


def _first_line(result: CommandResult) -> str:
    return result.message.splitlines()[0][:200]
