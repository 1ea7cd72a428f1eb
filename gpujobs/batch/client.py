"""Run the commands of a site's batch scheduler: with retries, and recovery of lost replies."""

from __future__ import annotations

import logging
import math
import os
import pwd
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import RefusedError, UnavailableError, UnusableError
from ..schedulers import NOT_LISTED, CommandResult, JobId, JobState, JobStatus, Reply, Scheduler
from ..schedulers.answers import reading
from ..schedulers.local import INHERIT
from ..text import printable, with_home
from . import process
from .process import HOST, System


# -- names of users of this host -------------------------------------------------------------------
def user_name(number: int | None = None) -> str:
    """Return the name of a user, by default of this process; its number if it has no name."""
    number = os.getuid() if number is None else number
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def with_canceller(status: JobStatus) -> JobStatus:
    """Return ``status`` with the name of another user who cancelled the job as its reason."""
    user = status.cancelled_by
    if user is None or user == os.getuid():
        return status
    name = user_name(user)
    return replace(status, reason=f"cancelled by {f'user {name}' if name.isdigit() else name}")


# -- one command of a batch scheduler --------------------------------------------------------------
SHORTEST_TIMEOUT = 5.0
"""Seconds that a command has at least."""
FIRST_DELAY, LONGEST_DELAY = 1.0, 8.0
"""Seconds between two attempts: doubled each time."""


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


# -- the client of a batch scheduler ---------------------------------------------------------------
logger = logging.getLogger("gpujobs")

RETRY_TIMEOUT = 90.0
"""Seconds for which a command is retried while the batch scheduler is unreachable."""
HOST_TIMEOUT = 5.0
"""The same if this host is the reason: a daemon that the commands need does not run on it."""
CONFIRM_DELAY = 3.0
"""Seconds after which the batch scheduler is asked again whether it has a submission."""
OLDEST_ANSWER = 90.0
"""Seconds by which an answer may be older than its query: some sites cache that of squeue."""
SAME_ANSWERS = 3
"""Answers in a row that lack a submission which may have been accepted, until it counts as lost."""
CANCEL_TIMEOUT = 8.0
"""Seconds for which a pending job may still be listed after it was cancelled."""
LIMIT_TIMEOUT = 10.0
"""Seconds for the query of the largest array."""
MOST_DOUBTS = 2
"""Submissions that may have been accepted, as far as the reply says, and that nothing lists."""


def never() -> bool:
    """Return False: the default of `SchedulerClient.stopping`."""
    return False


def nothing() -> None:
    """Return None: the default of `SchedulerClient.claimed`."""


@dataclass(frozen=True)
class SchedulerClient:
    """A batch scheduler, and how this site calls its commands.

    Methods raise UnavailableError if the batch scheduler is unreachable for ``timeout`` seconds,
    its command cannot be run, or ``stopping`` returns True while they wait.
    """

    scheduler: Scheduler
    commands: Mapping[str, str] = field(default_factory=dict)
    """The site's `commands`: other paths of sbatch, squeue, …"""
    arguments: Sequence[str] = ()  # after the command that submits
    timeout: float = RETRY_TIMEOUT
    """Seconds for which a command is retried."""
    stopping: Callable[[], bool] = never
    """Return whether to give up waiting."""
    claimed: Callable[[], str | None] = nothing
    """Return the id of a submission without a reply if one of its jobs says that it has started."""
    system: System = HOST

    # -- submit ------------------------------------------------------------------------------------
    def submit(
        self, script: str, name: str, known: Collection[str], cwd: Path, after: Sequence[str] = ()
    ) -> str:
        """Submit ``script`` exactly once, from the folder ``cwd``; return the submission's id.

        ``name`` is the job's name, unique to the cluster, and ``known`` are the earlier submissions
        of that name: if a reply is lost, a submission of that name that is not one of them is ours.
        It starts after all submissions ``after``. RefusedError if the batch scheduler refuses it.
        """
        after_options = self.scheduler.after_options(after)
        argv = [*self.scheduler.submit_command(), *self.arguments, *after_options]
        began = self.system.monotonic()
        doubts, pauses = 0, delays()
        while True:
            left = began + self.timeout - self.system.monotonic()
            result = replace(self, timeout=left)._run(argv, stdin=script, cwd=cwd)
            sent = self.system.monotonic()
            if submission := self._submission_in(result, name, known):
                return submission
            deadline = began + self._timeout_after(result)
            # The reply was lost or garbled: the job may have been accepted all the same.
            message = "%s did not respond (%s); checking whether it accepted the job"
            logger.warning(message, self.scheduler.name, self._reason(result))
            doubtful = not self.scheduler.unsent.search(result.stderr)
            since = sent if doubtful else -math.inf
            found = self._recover_submission(name, known, deadline, next(pauses), since)
            if found is not None:
                return found
            if doubtful:  # the time of the doubt does not count
                doubts, began = doubts + 1, self.system.monotonic()
            if result.exit_code == 0:
                message = f"{self.scheduler.name} returned no job id: {result.message}"
                raise UnavailableError(message)
            late = not doubtful and self.system.monotonic() > deadline
            if late or doubts == MOST_DOUBTS:
                message = f"{self.scheduler.name} has not accepted the job for {self.timeout:.0f} s"
                raise UnavailableError(f"{message}: {result.message}", hint="try again later")

    def find(self, name: str) -> set[str]:
        """Return the ids of the submissions called ``name``.

        UnavailableError also if the command fails for a reason that is not known.
        """
        result = self.query(self.scheduler.find_command(name, user_name()))
        if self.scheduler.reply(result) is not Reply.ANSWER:
            command = Path(result.argv[0]).name
            message = f"{command} failed with exit code {result.exit_code}: {result.message}"
            raise UnavailableError(message, hint=f"run {command} on this host to see why")
        with reading(result.argv[:1]):
            return self.scheduler.parse_find(result.stdout, name)

    def accepted(self, name: str, known: Collection[str], age: float) -> str | None:
        """Return the submission called ``name`` that is not one of ``known``; None: there is none.

        ``age``: seconds since it began. Unlike `find`, this asks again before it says so. Raises
        UnavailableError.
        """
        now = self.system.monotonic()
        return self._recover_submission(name, known, now + self.timeout, 0.0, now - age)

    def array_limit(self) -> int | None:
        """Return the most jobs of an array, None if the batch scheduler does not report it."""
        argv = self.scheduler.limit_command()
        if not argv:
            return None
        client = replace(self, timeout=min(self.timeout, LIMIT_TIMEOUT))
        result = client._run(argv)
        if self.scheduler.reply(result) is not Reply.ANSWER:
            return None
        with reading(result.argv[:1]):
            return self.scheduler.parse_limit(result.stdout)

    def estimate(self, script: str, cwd: Path) -> str | None:
        """Return the expected start of ``script``, None if the batch scheduler has no estimates.

        That is the earliest one in any of its queues. Raises RefusedError if the script cannot
        start in one of them, or UnavailableError.
        """
        results = self._tested(script, cwd)
        if not results:
            return None
        starts = map(self.scheduler.parse_estimate, results)
        if start := min(filter(None, starts), default=""):
            return start
        message = results[0].message
        raise RefusedError(f"{self.scheduler.name} gives no start of the job: {message}")

    def refusal(self, script: str, cwd: Path) -> str | None:
        """Return why ``script`` would be refused, "" if it would be accepted; None: unknown."""
        reasons = [self.scheduler.refuses(result) for result in self._tested(script, cwd)]
        if not reasons:
            return None
        return reasons[0] if all(reasons) else ""  # it is accepted in one of its queues

    def _tested(self, script: str, cwd: Path) -> list[CommandResult]:
        """Return the results of `estimate_command` in each queue of ``script``; [] if it is none.

        Raises UnavailableError.
        """
        argv = self.scheduler.estimate_command()
        if not argv:
            return []
        parts = self.scheduler.queue_by_queue(script)
        return [self._test([*argv, *self.arguments], part, cwd) for part in parts]

    def _test(self, argv: Sequence[str], script: str, cwd: Path) -> CommandResult:
        result = self._run(argv, stdin=script, cwd=cwd)
        if self.scheduler.reply(result) is Reply.NONE:
            check_usable(result)
            raise self._unavailable(result)
        return result

    # -- query -------------------------------------------------------------------------------------
    def status(
        self, ids: Sequence[JobId], names: Sequence[str], ended: Collection[JobId] = ()
    ) -> dict[JobId, JobStatus]:
        """Return the status of all ``ids``, jobs of the clusters ``names``.

        One command for all, one for details, and accounting for those that are not listed.
        Jobs that had ``ended`` are among them if the queue lists them: they were requeued.
        """
        if not ids:
            return {}
        found, problem = self._listed(ids, names, ended)
        listed = {job: found.pop(job) for job in ended if job in found}
        returned = {job: status for job, status in listed.items() if status.in_queue}
        found.update(self._details(found))
        ended_jobs, unanswered = self._accounting([job for job in ids if job not in found])
        found.update(ended_jobs)
        problem = problem or unanswered
        missing = JobStatus(JobState.UNKNOWN, reason=problem) if problem else NOT_LISTED
        return returned | {job: found.get(job, missing) for job in ids}

    def in_queue(self, ids: Collection[JobId], names: Sequence[str]) -> dict[JobId, JobStatus]:
        """Return those of ``ids`` that are in the queue or run, of clusters ``names``.

        Raises UnavailableError also if the queue could not be asked for all of them.
        """
        found, problem = self._listed(sorted(ids, key=str), names)
        if problem:
            raise UnavailableError(problem)
        return {job: status for job, status in found.items() if status.in_queue}

    def _listed(
        self, ids: Sequence[JobId], names: Sequence[str], ended: Collection[JobId] = ()
    ) -> tuple[dict[JobId, JobStatus], str]:
        """Return the jobs that the queue lists, and why others may be missing, "" if they are not.

        Jobs that have ``ended`` are not asked for; some batch schedulers list them all the same.
        """
        result = self.query(self.scheduler.status_command(ids, names, user_name()))
        results = [result]
        found = self._statuses(result, [*ids, *ended])
        missing = [job for job in ids if job not in found]
        for argv in self.scheduler.more_status_commands(missing, result):
            results.append(self.query(argv))
            found.update(self._statuses(results[-1], missing))
        refused = (r for r in results if self.scheduler.reply(r) is not Reply.ANSWER)
        return found, next((result.first_line for result in refused), "")

    def _statuses(self, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
        if self.scheduler.reply(result) is not Reply.ANSWER:
            return {}
        with reading(result.argv[:1]):
            return self.scheduler.parse_status(result, ids)

    def _details(self, listed: Mapping[JobId, JobStatus]) -> dict[JobId, JobStatus]:
        argv = self.scheduler.detail_command(listed)
        if not argv:
            return {}
        result = self._run(argv)
        if self.scheduler.reply(result) is Reply.NONE:
            return {}
        with reading(result.argv[:1]):
            return self.scheduler.parse_detail(result, listed)

    def _accounting(self, ids: Sequence[JobId]) -> tuple[dict[JobId, JobStatus], str]:
        """Return the jobs that accounting has, and why others may be missing, "" if they are not.

        A host without its command has no accounting.
        """
        found: dict[JobId, JobStatus] = {}
        problem = ""
        if not ids:
            return found, problem
        for argv in self.scheduler.accounting_commands(ids):
            result = self._run(argv)
            if self.scheduler.reply(result) is not Reply.NONE:
                with reading(result.argv[:1]):
                    parsed = self.scheduler.parse_accounting(result, ids)
                found.update((job, with_canceller(status)) for job, status in parsed.items())
            elif result.usable:
                problem = f"accounting did not answer: {self._reason(result)}"
        return found, problem

    # -- cancel ------------------------------------------------------------------------------------
    def cancel(
        self, jobs: Collection[JobId], names: Sequence[str], remaining: Iterable[JobId] = ()
    ) -> None:
        """Cancel ``jobs`` of the clusters ``names``, and check that none of them keeps waiting.

        A submission without ``remaining`` jobs is cancelled as a whole. RefusedError names the jobs
        that the batch scheduler did not cancel; jobs that have ended are not an error. A running
        job may stay listed until the batch scheduler has killed its processes.
        """
        kept = {job.submission for job in remaining}
        targets: dict[str, list[int]] = {}  # without indexes: the whole submission
        for job in jobs:
            indexes = targets.setdefault(job.submission, [])
            if job.index is not None and job.submission in kept:
                indexes.append(job.index)
        refusals = [
            result.message
            for argv in self.scheduler.cancel_commands(targets)
            if (result := self.query(argv, accept=self.scheduler.already_ended)).exit_code != 0
            and not self.scheduler.already_ended(result)
        ]
        waiting = self._still_waiting(jobs, names) if jobs else []
        if refusals or waiting:
            ids = ", ".join(self.scheduler.show_id(job) for job in waiting or jobs)
            reason = "\n".join(refusals) or "its command succeeded, but they are still in the queue"
            raise RefusedError(f"{self.scheduler.name} did not cancel {ids}:\n{reason}")

    def _still_waiting(self, jobs: Collection[JobId], names: Sequence[str]) -> list[JobId]:
        """Return those of ``jobs`` that wait in the queue some time after they were cancelled."""
        client = replace(self, timeout=min(CANCEL_TIMEOUT, self.timeout))
        deadline = self.system.monotonic() + client.timeout
        waiting = list(jobs)
        for delay in delays(first=0.1):
            try:
                found = client.in_queue(waiting, names)
                waiting = [job for job in waiting if job in found and found[job].waits]
                if not waiting or self.system.monotonic() + delay > deadline:
                    break
                self._wait(delay)
            except UnavailableError as error:
                if not self.stopping():
                    logger.warning("could not check that the jobs are cancelled: %s", error)
                return []
        return waiting

    # -- a lost reply ------------------------------------------------------------------------------
    def _submission_in(
        self, result: CommandResult, name: str, known: Collection[str]
    ) -> str | None:
        """Return the submission's id in the reply of a submit command, None if it has none."""
        if result.exit_code == 0:
            possible = self.scheduler.possible_ids(result.stdout)
            if len(possible) > 1:
                return self._one_of(possible, name, known)
            return self.scheduler.parse_submit(result.stdout)
        check_usable(result)
        if self.scheduler.reply(result) is not Reply.NONE:
            message = f"{self.scheduler.name} refused the job:\n{result.message}"
            raise RefusedError(message, hint=self.scheduler.remedy(result))
        return None

    def _one_of(self, possible: Sequence[str], name: str, known: Collection[str]) -> str:
        """Return the one of several numbers in a reply that is a new submission called ``name``.

        Raises UnavailableError if that is not certain: another one may be another job of this user.
        """
        for delay in (0.0, CONFIRM_DELAY):
            self._wait(delay)
            found = self.find(name).intersection(possible).difference(known)
            if len(found) == 1:
                return found.pop()
        numbers = ", ".join(possible)
        raise UnavailableError(
            f"{self.scheduler.name} printed several numbers, and none is certain to be the job's"
            f" id: {numbers}",
            hint=f"look for the job {name}; gpujobs does not know it, and it ends by itself",
        )

    def _recover_submission(
        self, name: str, known: Collection[str], deadline: float, delay: float, since: float
    ) -> str | None:
        """Wait until the batch scheduler responds; return the submission that it accepted, or None.

        An answer that lacks it says little: it may be older than the submission, or lack rows.
        "None" counts only if several in a row list the same, the last one so late that it cannot be
        from before the submission, which ended at ``since``. After a message that nothing was
        submitted, ``since`` is minus infinity, and two answers are enough.
        """
        wanted = 2 if since == -math.inf else SAME_ANSWERS
        before: set[str] | None = None
        same = 0
        while True:
            self._wait(self.system.spread(delay))
            result = self._run(self.scheduler.find_command(name, user_name()))
            if self.scheduler.reply(result) is Reply.ANSWER:
                with reading(result.argv[:1]):
                    listed = self.scheduler.parse_find(result.stdout, name)
                if found := listed.difference(known):
                    return min(found)
                same = same + 1 if listed == before else 1
                late = self.system.monotonic() >= since + OLDEST_ANSWER
                if same >= wanted and late:
                    return self.claimed()
                is_first, before = before is None, listed
                if is_first or not late:
                    delay = max(CONFIRM_DELAY, min(LONGEST_DELAY, delay * 2))
                    continue
                delay = CONFIRM_DELAY
            if self.system.monotonic() > deadline:
                seconds = f"{self._timeout_after(result):.0f} s"
                message = f"{self.scheduler.name} has not responded for {seconds}"
                raise UnavailableError(
                    f"{message}: {self._reason(result)}",
                    hint="nothing is lost: if it accepted the job after all, the job ends by"
                    " itself; try again later",
                )
            delay = min(LONGEST_DELAY, max(FIRST_DELAY, delay * 2))

    # -- commands ----------------------------------------------------------------------------------
    def query(
        self, argv: Sequence[str], accept: Callable[[CommandResult], bool] = lambda result: False
    ) -> CommandResult:
        """Run a command; retry while the batch scheduler is away, unless ``accept`` does."""
        began, pauses = self.system.monotonic(), delays()
        while True:
            result = self._run(argv)
            if self.scheduler.reply(result) is not Reply.NONE:
                return result
            check_usable(result)
            if accept(result):
                return result
            delay = next(pauses)
            if self.system.monotonic() + delay > began + self._timeout_after(result):
                raise self._unavailable(result)
            name, reason = self.scheduler.name, printable(self._reason(result))
            logger.warning("%s is not available (%s); retrying", name, reason)
            self._wait(delay)

    def _timeout_after(self, result: CommandResult) -> float:
        """Return for how many seconds a command with such a result is retried."""
        here = self.scheduler.host_fault(result)
        return min(self.timeout, HOST_TIMEOUT) if here else self.timeout

    def _reason(self, result: CommandResult) -> str:
        """Return why a command got no answer, in one line."""
        here = self.scheduler.host_fault(result)
        if result.exit_code == 0 and not result.stderr.strip():
            here = f"the answer of {Path(result.argv[0]).name} is incomplete"
        return f"{here}: {result.first_line}" if here else result.first_line

    def _unavailable(self, result: CommandResult) -> UnavailableError:
        message = f"{self.scheduler.name} is not available: {self._reason(result)}"
        here = self.scheduler.host_fault(result)
        hint = "contact the support of the site, or use another login node" if here else ""
        return UnavailableError(message, hint=hint or "try again later")

    def _run(
        self, argv: Sequence[str], *, stdin: str = "", cwd: Path | None = None
    ) -> CommandResult:
        command, *arguments = argv
        if command in self.commands:
            command = with_home(self.commands[command])
        names = os.environ if INHERIT in arguments else self.scheduler.environment
        return self.system.run(
            [command, *arguments],
            stdin=stdin,
            cwd=cwd,
            timeout=min(process.COMMAND_TIMEOUT, max(SHORTEST_TIMEOUT, self.timeout)),
            env=process.environment(names, self.scheduler.fixed_environment),
        )

    def _wait(self, seconds: float) -> None:
        deadline = self.system.monotonic() + seconds
        while (left := deadline - self.system.monotonic()) > 0:
            if self.stopping():
                name = self.scheduler.name
                raise UnavailableError(f"{name} did not respond before the cluster was closed")
            self.system.sleep(min(0.25, left))
