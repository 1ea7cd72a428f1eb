"""A simulated host: a clock that jumps, and Slurm's commands with queue, nodes and jobs in this process.

The real classes run on it: everything above `System.run`, and all text formats between.
"""

from __future__ import annotations

import asyncio
import random
import re
import selectors
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpujobs.batch.process import System
from gpujobs.injob.folder import EndKind
from gpujobs.injob.names import job_worker_names
from gpujobs.schedulers import CommandResult
from gpujobs.schedulers.formats import members

from .events import write_events
from .jobevents import write_job
from .tearing import GARBAGE, NUMBERS, torn
from .transcripts import SQUEUE_FOUND_HEADER, SQUEUE_HEADER

START, START_TIMEOUT = 1.7e9, 300.0
COMMAND_SECONDS, EXIT_SECONDS = 0.05, 4.0
BROKEN = ("invalid user", "empty", "torn", "munged")
"""How commands fail while the controller is there: the first three exit with 0."""
TORN = 0.7
"""Probability that an answer is torn while they are."""
FIRST_ID = 7041
"""What is left of an id that was cut is the id of another job."""
BALANCE = "Remaining balance of project 117 (GPU hours):\n%d\n"
"""What a wrapper of sbatch prints, with a number on a line."""
INVALID_USER = "squeue: error: Invalid user: alice\n\n"
MUNGED = """sbatch: error: If munged is up, restart with --num-threads=10
sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory (Did you start munged?)
sbatch: error: Batch job submission failed: Protocol authentication error
"""
UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_REPLY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
REFUSED = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed"


@dataclass
class SimulatedJob:
    """A job of the simulated Slurm."""

    submission: str
    index: int | None
    number: int
    group: str
    walltime: float
    workers: tuple[str, ...]
    submitted: float
    eligible: float
    state: str = "PENDING"
    started: float = 0.0
    connects: float = 0.0
    connected: float = -1.0
    """The start after which its workers have connected."""
    idle_since: float = 0.0
    """When its workers have connected, or `adapt` last saw one of them with a task."""
    exits: float | None = None
    """When it leaves the queue."""
    final: str = ""
    code: int | None = 0
    """Exit code of its exit record; None: it leaves none."""
    superfluous: bool = False
    hung: bool = False
    """Its workers were gone for some time, so that it may be given up."""
    unanswered: bool = False
    """A cancel got no reply before it was busy: that of the next attempt may come too late."""
    listed: bool = True
    """Whether squeue and sacct know it."""
    reason: str = "None"
    """Why it waits, in the words of squeue."""
    restored: bool = False
    """It was requeued after its end."""
    cancelled_waiting: float | None = None
    """When it was cancelled before it had started."""

    @property
    def alive(self) -> bool:
        return self.state in ("PENDING", "RUNNING", "COMPLETING")

    @property
    def occupies(self) -> bool:
        """Whether it uses GPUs, or will: not if its script has ended, and Slurm cleans up."""
        ended = self.state == "COMPLETING" and self.code is not None
        return self.alive and not ended and not self.superfluous

    @property
    def id(self) -> str:
        return self.submission if self.index is None else f"{self.submission}_{self.index}"


@dataclass
class SimulatedSlurm(System):
    """Slurm with ``capacity`` nodes, one job each; and the workers of the jobs that run.

    ``wait``: returns for how many seconds a new job is not eligible. ``start_up``: seconds from the
    start of a job until its workers connect.
    """

    folder: Path
    random: random.Random
    capacity: int = 1000
    wait: Callable[[], float] = lambda: 0.0
    start_up: float = 20.0
    workers_per_job: Mapping[str, int] = field(default_factory=dict)
    """By group."""
    max_jobs: int = 10**6
    """Submissions above are refused, by Slurm itself."""
    broken: Collection[str] = ()
    """Groups whose jobs fail when they start."""
    away_until: float = 0.0
    broken_until: float = 0.0
    broken_how: str = ""
    """One of `BROKEN`."""
    refuse_until: float = 0.0
    accept_while_away: float = 0.0
    """Probability that a submission is accepted although its reply is lost."""
    demand: Callable[[str], int] = lambda group: 0
    """Returns how many workers of a group the tasks need."""
    scattered: bool = False
    """Whether some jobs have workers with tasks and others without."""
    seconds: float = 0.0
    jobs: list[SimulatedJob] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """What must not happen, and did."""
    watchers: list[Callable[[], None]] = field(default_factory=list)
    """Called after each accepted submission and each step."""
    on_connect: Callable[[], object] = lambda: None
    """Called when the workers of a job have connected."""
    connected: dict[str, SimulatedJob] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    _submissions: int = FIRST_ID - 1

    # -- the clock ---------------------------------------------------------------------------------
    def monotonic(self) -> float:
        return self.seconds

    def time(self) -> float:
        return START + self.seconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def spread(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.8, 1.2)

    def advance(self, seconds: float) -> None:
        """Let time pass; jobs start and end in steps of at most five seconds."""
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds = min(end, self.seconds + 5.0)
            self._events()

    @property
    def faulty_until(self) -> float:
        """Until when commands fail, or have no answer."""
        return max(self.away_until, self.broken_until)

    # -- jobs --------------------------------------------------------------------------------------
    @property
    def alive(self) -> list[SimulatedJob]:
        return [job for job in self.jobs if job.alive]

    @property
    def running(self) -> list[SimulatedJob]:
        return [job for job in self.jobs if job.state == "RUNNING"]

    @property
    def busy(self) -> set[str]:
        """Names of the workers with tasks: those of each group that have been there for longest.

        Or, if `scattered`, the same arbitrary ones as long as they are connected.
        """
        workers = list(self.connected.items())
        if self.scattered:
            workers.sort(key=lambda item: zlib.crc32(item[0].encode()))
        left = {group: self.demand(group) for group in self.workers_per_job}
        found = set()
        for name, job in workers:
            if name not in self.retired and left[job.group] > 0:
                left[job.group] -= 1
                found.add(name)
        return found

    def end(self, job: SimulatedJob, state: str, code: int | None) -> None:
        """End a running job: its workers disconnect now."""
        self._disconnect(job)
        job.state, job.final, job.code = "COMPLETING", state, code
        job.exits = self.seconds + EXIT_SECONDS
        if code is not None and not job.superfluous:
            self._tell(job, "left", code=code)

    def fail(self, job: SimulatedJob, reason: str) -> None:
        """End a running job as one that writes why it fails."""
        self._tell(job, "failed", reason=reason)
        self.end(job, "FAILED", 1)

    def vanish(self, job: SimulatedJob) -> None:
        """Lose a job: no exit record, and no command knows it any more."""
        self._disconnect(job)
        job.state, job.listed = "VANISHED", False

    def forget(self, job: SimulatedJob) -> None:
        """Lose the last job, as a controller that restarts from an old state; its id is free again."""
        self.vanish(job)
        self._submissions -= 1

    def fail_launch(self, job: SimulatedJob) -> None:
        """Let a job fail when it is launched: Slurm holds it for ever."""
        self._disconnect(job)
        job.state, job.reason, job.hung = "PENDING", "launch failed requeued held", True
        job.eligible = float("inf")

    def hang(self, job: SimulatedJob) -> None:
        """Disconnect the workers of a job, which keeps running."""
        self._disconnect(job)
        job.connects, job.hung = float("inf"), True

    def requeue(self, job: SimulatedJob) -> None:
        """Put a running job back into the queue."""
        self._disconnect(job)
        self._tell(job, "left", code=143)
        job.state, job.eligible, job.hung = "PENDING", self.seconds + 30 + self.wait(), True

    def restore(self, job: SimulatedJob) -> None:
        """Put a job that has ended back into the queue, as slurmctld does after its own failure."""
        job.state, job.eligible, job.exits = "PENDING", self.seconds + 30, None
        job.reason = "None"
        job.restored = job.hung = True
        self.retired.difference_update(job.workers)

    def _events(self) -> None:
        alive = self.alive
        used = sum(job.state != "PENDING" for job in alive)
        for job in alive:
            if job.state == "PENDING":
                if job.eligible <= self.seconds and used < self.capacity:
                    used += 1
                    self._start(job)
            elif job.state == "COMPLETING":
                if job.exits is not None and job.exits <= self.seconds:
                    job.state = job.final
            else:
                self._run_on(job)
        for watch in self.watchers:
            watch()

    def _start(self, job: SimulatedJob) -> None:
        job.state, job.started = "RUNNING", self.seconds
        job.connects = self.seconds + self.start_up
        claim = self.folder / "jobs" / f"{job.number}.claim"
        name = job.submission if job.index is None else f"{job.submission}[{job.index}]"
        if claim.exists() and claim.read_text().strip() != name:
            job.superfluous = True
            self.end(job, "COMPLETED", 0)
            return
        claim.write_text(name)
        self._tell(job, "script")
        self._tell(job, "started", began=self.time())

    def _tell(self, job: SimulatedJob, event: str, **values: object) -> None:
        """Append an event of the present start of a job."""
        run = f"{job.started:.0f}-n1-{job.number}"
        write_job(self.folder, job.number, event, run=run, at=self.time(), **values)

    def _run_on(self, job: SimulatedJob) -> None:
        ran = self.seconds - job.started
        if job.group in self.broken and job.connects > self.seconds:
            self.end(job, "FAILED", 1)
        elif ran >= job.walltime - min(60, max(10, job.walltime // 10)) or self.retired.issuperset(
            job.workers
        ):
            self.end(job, "COMPLETED", 0)
        elif ran > START_TIMEOUT and job.connected != job.started:
            self.end(job, "FAILED", 1)  # the supervisor does not wait for longer
        elif job.connects <= self.seconds and job.workers[0] not in self.connected:
            self.connected.update(dict.fromkeys(job.workers, job))
            job.connected, job.idle_since = job.started, self.seconds
            self.on_connect()
            for name in job.workers:
                self._write_event("connected", name)

    def _disconnect(self, job: SimulatedJob) -> None:
        for name in job.workers:
            if self.connected.pop(name, None):
                self._write_event("disconnected", name)

    def _write_event(self, event: str, worker: str) -> None:
        write_events(self.folder, {"event": event, "at": self.time(), "worker": worker})

    # -- commands ----------------------------------------------------------------------------------
    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        timeout: float = 0.0,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        words = tuple(argv)
        self.calls[words[0]] += 1
        self.seconds += COMMAND_SECONDS
        away = self.seconds < self.away_until
        how = self.broken_how if self.seconds < self.broken_until else ""
        if words[0] == "scancel" and (away or how == "munged"):
            for job in self._targets(words):
                job.unanswered = job.unanswered or not self.busy.intersection(job.workers)
        if how == "munged":
            return CommandResult(words, 1, "", MUNGED)
        if away:
            if words[0] == "sbatch" and self.random.random() < self.accept_while_away:
                self._sbatch(stdin)
                return CommandResult(words, 1, "", NO_REPLY)
            return CommandResult(words, 1, "", UNREACHABLE)
        result = self._answer(words, stdin)
        if how == "torn" and result.stdout and self.random.random() < TORN:
            return replace(result, stdout=self._torn(result))
        return _broken(result, how)

    def _torn(self, result: CommandResult) -> str:
        """Return an output that is cut, joined or garbled, so that a reader can see it.

        No number becomes another one, and no whole row is missing.
        """
        text, chance = result.stdout, self.random.random()
        if result.argv[0] == "sbatch" and chance < 0.3:  # the id is whole
            return text + BALANCE % self.random.randrange(FIRST_ID + 100)
        if result.argv[0] == "sbatch" or result.argv[-1] == "%F|%j" or chance < 0.5:
            return text[: self.random.randrange(len(text))].rstrip("\n")
        garbage = [one for one in GARBAGE if one not in NUMBERS]
        return torn(text, self.random, kinds=("join", "repeat", "garble", "nul"), garbage=garbage)

    def _answer(self, words: tuple[str, ...], stdin: str) -> CommandResult:
        if words[0] == "sbatch":
            refused = self.seconds < self.refuse_until
            count = _count(stdin)
            if refused or len(self.alive) + count > self.max_jobs:
                return CommandResult(words, 1, "", REFUSED)
            return CommandResult(words, 0, f"{self._sbatch(stdin)}\n")
        outputs = {"squeue": self._squeue, "sacct": self._sacct, "scancel": self._scancel}
        if words[0] == "sinfo":  # its nodes have no names that a job could exclude
            return CommandResult(words, 0, "")
        if words[0] == "scontrol":
            return CommandResult(words, 0, "MaxArraySize            = 1001\n")
        return CommandResult(words, 0, "".join(f"{line}\n" for line in outputs[words[0]](words)))

    def _sbatch(self, script: str) -> str:
        self._submissions += 1
        submission, name = str(self._submissions), _match(r"--job-name=(\S+)", script)
        first = int(_match(r"export GPUJOBS_JOB=\$?\(*(\d+)", script))
        hours, minutes, seconds = _match(r"--time=(\d+:\d+:\d+)", script).split(":")
        walltime = int(hours) * 3600 + int(minutes) * 60 + int(seconds)
        group = _match(r"--group=(\S+)", script, "")
        is_array = "#SBATCH --array" in script
        numbers = range(first, first + _count(script))
        if twice := [job.id for job in self.alive if job.listed and job.number in numbers]:
            self.faults.append(f"{', '.join(twice)} submitted twice")
        for index in range(_count(script)):
            number = first + index
            workers = job_worker_names(name, number, self.workers_per_job[group], 0, group)
            self.jobs.append(
                SimulatedJob(
                    submission,
                    index if is_array else None,
                    number,
                    group,
                    walltime,
                    tuple(workers),
                    self.seconds,
                    self.seconds + self.wait(),
                )
            )
        for watch in self.watchers:
            watch()
        return submission

    def _squeue(self, words: Sequence[str]) -> Iterator[str]:
        columns = words[-1]
        yield (SQUEUE_FOUND_HEADER if columns == "%F|%j" else SQUEUE_HEADER).strip()
        for job in self.alive:
            if job.listed:
                index = "N/A" if job.index is None else job.index
                row = f"{job.submission}|{index}|{job.state}|n1|N/A|{job.reason}|{self.folder.name}"
                yield f"{job.submission}|{self.folder.name}" if columns == "%F|%j" else row

    def _sacct(self, words: Sequence[str]) -> Iterator[str]:
        wanted = set(words[words.index("-j") + 1].split(","))
        for job in self.jobs:
            if job.listed and job.submission in wanted:
                code = f"{job.code or 0}:0"
                yield f"{job.id}|{job.state}|{code}|n1"

    def _scancel(self, words: Sequence[str]) -> Iterator[str]:
        for job in self._targets(words):
            self._cancel(job)
        yield from ()

    def _targets(self, words: Sequence[str]) -> list[SimulatedJob]:
        """Return the jobs that a scancel names. Note a fault if one is not of the cluster."""
        found = []
        known = {job.submission for job in self.jobs}
        for target in words[1:]:
            submission, _, indexes = target.partition("_")
            if submission not in known:
                self.faults.append(f"{target}, another job, was cancelled")
            chosen = members(indexes) if indexes else None
            own = (job for job in self.alive if job.submission == submission)
            found += [job for job in own if not chosen or job.index in chosen]
        return found

    def _cancel(self, job: SimulatedJob) -> None:
        if job.state == "PENDING":
            job.state, job.cancelled_waiting = "CANCELLED", self.seconds
        elif job.state == "RUNNING":
            excused = job.hung or job.unanswered
            if self.busy.intersection(job.workers) and not excused:
                self.faults.append(f"{job.id} was cancelled while it was busy")
            self.end(job, "CANCELLED", 143)


def _broken(result: CommandResult, how: str) -> CommandResult:
    """Return the result of a command whose answer is lost on the way; it exits with 0."""
    if how == "invalid user" and result.argv[0] == "squeue":
        header = result.stdout.split("\n")[0]
        return replace(result, stdout=f"{header}\n", stderr=INVALID_USER)
    if how == "empty":
        return replace(result, stdout="")
    return result


def _match(pattern: str, text: str, default: str | None = None) -> str:
    found = re.search(pattern, text)
    if found is None and default is not None:
        return default
    assert found, f"{pattern} is not in {text[:400]}"
    return found[1]


def _count(script: str) -> int:
    found = re.search(r"#SBATCH --array=0-(\d+)", script)
    return int(found[1]) + 1 if found else 1


# -- dask's side -----------------------------------------------------------------------------------
@dataclass
class SimulatedDask:
    """The dask cluster: `gpujobs.deploy.daskscheduler.DaskControl`, and the calls of the dask scheduler."""

    slurm: SimulatedSlurm
    adapting: set[str] = field(default_factory=set)
    hold_of: Callable[[str], float] = lambda group: 0.0
    """Returns for how long `adapt` keeps an idle job of a group."""
    on_release: Callable[[list[SimulatedJob]], None] = lambda jobs: None
    """Called with the jobs that `adapt` releases."""
    surplus: Callable[[SimulatedJob], bool] = lambda job: False
    """Returns whether a job is one too many, so that it leaves although it is busy."""
    messages: list[str] = field(default_factory=list)
    open: bool = True
    leaving: set[str] = field(default_factory=set)
    """Workers that the dask scheduler lets leave before their walltime."""
    task_seconds: float = 0.0
    """Seconds for which the tasks of workers that leave still run."""
    moving: set[str] = field(default_factory=set)
    """Workers whose data already moves, so that they cannot stay."""
    given_up: Exception | None = None
    """The error of the tasks that clients wait for."""

    @property
    def connected(self) -> frozenset[str]:
        return frozenset(name for name in self.slurm.connected if name not in self.slurm.retired)

    def adapts(self, group: str) -> bool:
        return group in self.adapting

    def end_of_scheduler(self) -> tuple[EndKind, str] | None:
        return None

    async def running_workers(self, leaving: Collection[str]) -> int:
        return len(self.connected.difference(leaving))

    async def load(self) -> dict[str, int]:
        for name in self.slurm.busy:
            self.slurm.connected[name].idle_since = self.slurm.seconds
        return dict.fromkeys(self.slurm.busy, 1)

    async def drained(self) -> tuple[frozenset[str], float]:
        return frozenset(self.leaving), 0.0

    async def give_up(self, error: Exception | None) -> None:
        self.given_up = error

    @property
    def running(self) -> bool:
        return self.open

    async def drain(self, names: Collection[str], why: str, limit: float | None) -> bool:
        connected = self.slurm.connected
        jobs = {connected[name].id: connected[name] for name in names if name in connected}
        for job in jobs.values():
            self._check_release(job, names)
        self.on_release([job for job in jobs.values() if self._may_stay(job)])
        if self.task_seconds:
            self.leaving.update(names)
            seconds = self.task_seconds if limit is None else min(limit, self.task_seconds)
            asyncio.get_running_loop().call_later(seconds, self._leave, names)
        else:
            self.slurm.retired.update(names)
        return True

    def _leave(self, names: Collection[str]) -> None:
        """Let those of ``names`` leave that were not taken back."""
        left = self.leaving.intersection(names)
        self.leaving -= left
        self.slurm.retired |= left

    async def undrain(self, names: Collection[str]) -> frozenset[str]:
        kept = self.leaving.intersection(names).difference(self.moving)
        self.leaving -= kept
        return frozenset(kept)

    def _check_release(self, job: SimulatedJob, names: Collection[str]) -> None:
        """Note a fault if workers of a job stay, or if `adapt` releases a job that has tasks.

        Or if it releases one that has not been idle for its `hold`.
        """
        slurm = self.slurm
        if left := self.connected.intersection(job.workers).difference(names):
            slurm.faults.append(f"{job.id} was released without {sorted(left)}")
        if not self._may_stay(job) or self.surplus(job):
            return
        if busy := slurm.busy.intersection(job.workers):
            slurm.faults.append(f"{job.id} was released while {sorted(busy)} were busy")
        idle, hold = slurm.seconds - job.idle_since, self.hold_of(job.group)
        if idle < hold:
            slurm.faults.append(f"{job.id} was released after {idle:.0f} of {hold:.0f} s")

    def _may_stay(self, job: SimulatedJob) -> bool:
        """Return whether `adapt` must leave a busy job alone."""
        return self.adapts(job.group) and not (job.hung or job.unanswered)

    def disconnect(self) -> None:
        return

    def log(self, message: str) -> None:
        self.messages.append(message)

    async def adaptive_target(self, target_duration: Any = None) -> int:
        return self.slurm.demand("")

    async def gpujobs_demand(self, prefix: str, **_: object) -> int:
        """Answer as the handler of `gpujobs.injob.demand`; ``prefix``: CLUSTER-GROUP-."""
        return self.slurm.demand(prefix.split("-")[-2])


# -- the event loop --------------------------------------------------------------------------------
class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Lets the simulated time pass instead of waiting."""

    def __init__(self, slurm: SimulatedSlurm) -> None:
        super().__init__()
        self.slurm = slurm

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is left to wait for"
        self.slurm.advance(timeout)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop on the simulated clock; what would run in threads runs at once."""

    def __init__(self, slurm: SimulatedSlurm) -> None:
        self.slurm = slurm
        super().__init__(_JumpingSelector(slurm))

    def time(self) -> float:
        return self.slurm.monotonic()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future
