"""The contract of a batch scheduler: formats and parsers, no I/O; and how its class is found.

A batch scheduler is one subclass of `Scheduler` in a file of its own, and a template of the same
name. The subclass says how numbers are written, which commands submit, query and cancel, and how
their output is parsed. `gpujobs.batch` runs the commands.
"""

from __future__ import annotations

import importlib
import logging
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from ..errors import InputError
from ..text import did_you_mean
from .formats import find_integer
from .inventory import Inventory
from .jobs import CommandResult, Granted, JobId, JobState, JobStatus, Reply, Statuses
from .words import Meaning, OptionValue, Reader, meaning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger("gpujobs")

REGISTERED: dict[str, type[Scheduler]] = {}
"""The classes whose modules have been imported, by name. `get_scheduler` finds the others."""


class Scheduler(ABC):
    """One batch scheduler. Instances are stateless; ``cluster`` is the site's multi-cluster name.

    A subclass that sets ``name`` registers itself.
    """

    name: ClassVar[str]
    """The value of `scheduler` in site files, and the name of the template."""
    prefix: ClassVar[str]
    """Start of a directive line."""
    environment: ClassVar[tuple[str, ...]] = ()
    """Variables of the user's environment that the commands need; the others are not passed on."""
    fixed_environment: Mapping[str, str] = MappingProxyType({})
    """Variables that are set for the commands."""
    multi_cluster: ClassVar[bool] = False
    """The site's `cluster` is supported."""
    request: ClassVar[tuple[str, ...]]
    """Built-in directives of a GPU job. A line with a number that the site does not give is left
    out; a site's own `request` replaces them all."""
    cpu_request: ClassVar[tuple[str, ...]]
    """The same for a job without GPUs; by default the lines of `request` without GPUs."""
    account_directive: ClassVar[str] = "-A {account}"
    reservation_directive: ClassVar[str] = ""
    """Directive with {reservation}; "" if a job cannot name one."""
    reservation_is_queue: ClassVar[bool] = False
    """A reservation has a queue of its own name, in which its jobs are submitted."""
    visible_devices: ClassVar[str | None] = None
    """How a job finds its own GPUs; None if each site must say."""
    mpi_command: ClassVar[tuple[str, ...]]
    node_launcher: ClassVar[tuple[str, ...]] = ()
    """Command that starts a process on each node of a job; with {node}, on that node."""
    managed: ClassVar[frozenset[str]]
    """Options that gpujobs writes itself (see `options`)."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Options that break a promise of gpujobs, and why."""
    option_keys: ClassVar[Mapping[str, Reader]] = {}
    """Options that mean keys of a profile, and their readers (see `words`)."""
    short_clock: ClassVar[bool] = False
    """``4:00`` is a walltime of four hours."""
    hold: ClassVar[str] = ""
    """Directive of a job that waits until a person releases it: the tests submit such jobs."""
    spans_nodes_hint: ClassVar[str] = "write {nodes} in `request` of the site file"
    """Cure for a request that `spans_nodes` finds to be for one node."""
    repeatable: ClassVar[frozenset[str]] = frozenset()
    """Options that may occur several times, because their values add up."""
    memory_unit: ClassVar[str] = "KMGT"
    """Units of memory that a number without a unit may have; all of them if the site decides."""
    name_rule: ClassVar[tuple[str, str]] = (
        r"[A-Za-z0-9_-]{1,64}",
        "up to 64 letters, digits, - and _",
    )
    """Pattern of a job's name, and the same in words."""
    first_index: ClassVar[int] = 0
    """Index of the first job of an array."""
    largest_array: ClassVar[int] = 1000
    """Most jobs of an array, if neither the site nor `limit_command` gives a number."""
    limit: ClassVar[tuple[str, str]] = ("", "")
    """The command that reports how large an array may be, and the pattern of the number."""
    id_line: ClassVar[str] = ""
    """Pattern of a line of the output of `submit_command`; its first group is the id."""
    index_variable: ClassVar[str]
    """Environment variable with the job's index in the array."""
    job_variable: ClassVar[str]
    """Environment variable with the job's id."""
    job_mark: ClassVar[str] = ""
    """Variable that only its jobs have, if `job_variable` is also used by others."""
    queue_separator: ClassVar[str] = ""
    """Between the queues in which one job waits; "" if it waits in one only."""
    queue_variable: ClassVar[str] = ""
    """Environment variable with the job's queue."""
    submit_folder: ClassVar[str] = ""
    """Environment variable with the folder of the submission; "": its jobs cannot find theirs."""
    reads_script: ClassVar[str] = ""
    """Comes before the name of a script in the command that submits it: "< " if it takes none."""
    enter: ClassVar[tuple[str, ...]] = ()
    """Command that runs another one on a node of the job, for shells of the job on login nodes."""
    step_gpus: ClassVar[tuple[str, ...]] = ()
    """More words of `enter` and `node_launcher` in a job that gpujobs has not submitted."""
    job_request: ClassVar[tuple[str, ...]] = ()
    """Variables of a job that its launchers must not have (see `injob.names.JOB_REQUEST`)."""
    after: ClassVar[tuple[str, ...]] = ()
    """Option of `submit_command` for jobs that wait until the submissions {ids} have ended."""
    cancel_waiting: ClassVar[str] = ""
    """Command that cancels pending jobs from inside a job; ids of submissions are appended."""
    inventory: ClassVar[type[Inventory] | None] = None
    """How it reports its queues and nodes; None if gpujobs cannot ask for them."""
    away: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    """Messages of a command that did not reach the batch scheduler, or that found it busy."""
    unsent: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    """Messages of the submit command after which it is certain that nothing was submitted."""
    ended: ClassVar[re.Pattern[str]] = re.compile("(?!)")
    """Messages of a cancel about jobs that had ended already."""
    host_faults: ClassVar[Mapping[str, str]] = {}
    """Why no command works on this host, by a pattern of its messages: a daemon does not run."""
    slow_cancel: ClassVar[bool] = False
    """A running job that is cancelled keeps its nodes for long, or is killed at once."""
    warns_all_processes: ClassVar[bool] = False
    """It sends its warnings, SIGUSR1 and SIGUSR2, to all processes of a job."""
    on_this_machine: ClassVar[bool] = False
    """Jobs run on this machine, on the GPUs that are free here."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "request" in vars(cls) and "cpu_request" not in vars(cls):
            cls.cpu_request = tuple(line for line in cls.request if "{gpu" not in line)
        if "name" in vars(cls):
            _register(cls)

    def __init__(self, cluster: str | None = None) -> None:
        self.cluster = cluster

    # -- the script --------------------------------------------------------------------------------
    def walltime(self, seconds: int) -> str:
        """Return a walltime in the batch scheduler's format, rounded up if it must be."""
        return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def log_path(self, root: str, cluster: str, file: str) -> str:
        """Return the path of the batch scheduler's own log; see `output`."""
        return f"{root}/{cluster}/logs/{file}" if root else file

    @abstractmethod
    def output(self, root: str, cluster: str, array: bool) -> str:
        """Return the path of the batch scheduler's own log, in ``root/cluster/logs``, quoted.

        Without ``root`` (see `submit_folder`), a file in the folder of the submission.

        The job's output goes elsewhere. This file is for messages of the batch scheduler, and of a
        shell that fails.
        """

    @abstractmethod
    def array(self, count: int) -> str:
        """Return the directive of an array of ``count`` jobs."""

    def options(self, line: str) -> set[str]:
        """Return the options that the directive ``line`` sets, in one spelling for each.

        ValueError if the line cannot be parsed.
        """
        found = set()
        for item in shlex.split(line):
            if item.startswith("-") and not re.fullmatch(r"-\d+", item):
                found.add(item.split("=")[0])
        return found

    def meaning(self, line: str) -> Meaning:
        """Return the keys of a profile that the directive ``line`` means, and the rest of it.

        Raises NotHere for a value that no job can have, ValueError if it cannot be parsed.
        """
        return meaning(line, self.option_keys, self.option_values, self.option_text)

    def option_values(self, group: Sequence[str]) -> Iterable[OptionValue]:
        """Return the options of ``group``, an option and the words of its value."""
        return [(group[0], " ".join(group[1:]))]

    def option_text(self, option: str, value: str) -> str:
        """Return an option and its value as text of a directive."""
        if re.search(r"[\s\[\]&|<>!;*?]", value) and not option.startswith("-pe"):
            value = f'"{value}"'
        return f"{option} {value}".rstrip()

    def spans_nodes(self, request: Sequence[str]) -> bool:
        """Return whether ``request``, with its placeholders, requests all nodes of a job."""
        return any(re.search(r"\{(nodes|\w+_per_job)\b", line) for line in request)

    def step_request(self, lines: Sequence[str]) -> tuple[str, ...]:
        """Return more words of the own launchers in a job with the directives ``lines``."""
        return ()

    def joined(self, lines: Sequence[str]) -> list[str]:
        """Return the site's lines; those with an option that may occur only once are merged."""
        return list(lines)

    def refusal(self, line: str) -> str:
        """Return the option of ``line`` that is `refused`, or ``""``."""
        return self._first_of(self.options(line), self.refused)

    def repeated(self, line: str, taken: Iterable[str]) -> str:
        """Return the one of the options ``taken`` that ``line`` would replace, or ``""``."""
        return self._first_of(self.options(line), set(taken) - self.repeatable)

    def clash(self, line: str, taken: Iterable[str]) -> str:
        """Return the one of ``taken`` that ``line`` of a user must not change, or ``""``."""
        return self.repeated(line, taken)

    def _first_of(self, options: Set[str], names: Iterable[str]) -> str:
        """Return the first of ``names`` that is one of ``options``, or ``""``."""
        return min(options & set(names), default="")

    def queue_list(self, names: Sequence[str]) -> str:
        """Return the queues of a job as a word of a directive."""
        text = self.queue_separator.join(names)
        return f'"{text}"' if " " in text else text

    def avoid(self, nodes: Sequence[str]) -> str:
        """Return the directive of jobs that avoid ``nodes``; "" if there is none."""
        return ""

    @classmethod
    def granted(cls, environ: Mapping[str, str]) -> Granted:
        """Return what the job of a process with ``environ`` has, besides lists of its nodes."""
        return Granted()

    # -- replies -----------------------------------------------------------------------------------
    def reply(self, result: CommandResult) -> Reply:
        """Judge a command by its exit code and messages; its output is not read before.

        The one place that decides whether the batch scheduler has answered. An output in which jobs
        are missing because something went wrong must not be taken for an answer.
        """
        if result.exit_code is None:
            return Reply.NONE
        if result.exit_code == 0:
            return Reply.ANSWER if self.is_complete(result) else Reply.NONE
        if self.away.search(result.stderr) or self.host_fault(result):
            return Reply.NONE
        return Reply.ANSWER if self.found_nothing(result) else Reply.REFUSAL

    def is_complete(self, result: CommandResult) -> bool:
        """Return whether a command that exited with 0 has written all of its output.

        An empty or damaged list of jobs is not the list of no jobs.
        """
        return True

    def found_nothing(self, result: CommandResult) -> bool:
        """Return whether a query failed only because some of its jobs, or all, are not listed."""
        return False

    def host_fault(self, result: CommandResult) -> str:
        """Return why the command did not work on this host, "" if that was not the reason."""
        if result.exit_code == 0:
            return ""
        faults = self.host_faults.items()
        return next((why for text, why in faults if re.search(text, result.stderr, re.I)), "")

    # -- submit ------------------------------------------------------------------------------------
    @abstractmethod
    def submit_command(self) -> list[str]:
        """Return the command that submits the script on its standard input."""

    def after_options(self, submissions: Sequence[str]) -> list[str]:
        """Return the options of `submit_command` for jobs that wait for ``submissions``.

        They start when all jobs of these have ended, however they ended. [] without submissions,
        and if that is not supported.
        """
        ids = ":".join(submissions)
        return [word.replace("{ids}", ids) for word in self.after] if ids else []

    def parse_submit(self, stdout: str) -> str | None:
        """Return the submission's id, or None if ``stdout`` has none; warnings may come first."""
        ids = self.possible_ids(stdout)
        return ids[-1] if ids else None

    def possible_ids(self, stdout: str) -> list[str]:
        """Return all that looks like a submission's id; a site's wrapper may print more numbers.

        A line without an end may be cut off: what is left of an id is that of another job.
        """
        *lines, _ = stdout.split("\n")
        found = (re.fullmatch(self.id_line, line.strip()) for line in lines)
        return list(dict.fromkeys(line[1] for line in found if line))

    def remedy(self, result: CommandResult) -> str:
        """Return what to do about the message of a refused submission; "" if that is not known."""
        return ""

    @abstractmethod
    def find_command(self, name: str, user: str) -> list[str]:
        """Return the command that lists the submissions of ``user`` called ``name``.

        It is run when the reply to a submission was lost. ``user``: see `status_command`.
        """

    @abstractmethod
    def parse_find(self, stdout: str, name: str) -> set[str]:
        """Return the ids of the submissions called ``name``."""

    def limit_command(self) -> list[str] | None:
        """Return the command that reports how large an array may be; None if there is none."""
        return self.limit[0].split() or None

    def parse_limit(self, stdout: str) -> int | None:
        """Return the most jobs of an array, or None if ``stdout`` does not have it."""
        return find_integer(self.limit[1], stdout) or None

    def estimate_command(self) -> list[str] | None:
        """Return the command that estimates the start of the script on its standard input.

        It submits nothing. None if there is no such command.
        """
        return None

    def queue_by_queue(self, script: str) -> list[str]:
        """Return the scripts that `estimate_command` gets for one that waits in several queues."""
        return [script]

    def parse_estimate(self, result: CommandResult) -> str:
        """Return the expected start; "" if the script cannot start, or without an answer."""
        return ""

    def refuses(self, result: CommandResult) -> str:
        """Return why the batch scheduler would refuse the script of `estimate_command`, or ""."""
        return "" if result.exit_code == 0 else result.message

    # -- query -------------------------------------------------------------------------------------
    @abstractmethod
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        """Return ONE command that reports all these jobs, by ``ids`` or by ``names``.

        ``user``: the name of the user, or the number if that has no name.
        """

    @abstractmethod
    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        """Return the status of those of ``ids`` that are listed. Not listed is not finished."""

    def more_status_commands(
        self, missing: Sequence[JobId], result: CommandResult
    ) -> list[list[str]]:
        """Return commands that query ``missing`` jobs again, which ``result`` did not list.

        ``result`` is of `status_command`. Some batch schedulers report only the first id.
        """
        return []

    def show_id(self, job: JobId) -> str:
        """Return the id as the batch scheduler's commands take it, for users."""
        return "".join(self.target(job.submission, [] if job.index is None else [job.index]))

    def detail_command(self, listed: Mapping[JobId, JobStatus]) -> list[str] | None:
        """Return the command that reports why ``listed`` jobs are pending or how they ended.

        None if `status_command` has reported it already.
        """
        return None

    def parse_detail(self, result: CommandResult, listed: Mapping[JobId, JobStatus]) -> Statuses:
        """Return a more detailed status of those of ``listed`` that the result has."""
        return {}

    def accounting_command(self, ids: Sequence[JobId]) -> list[str] | None:
        """Return the command that reports jobs which have left the queue; None if there is none."""
        return None

    def accounting_commands(self, ids: Sequence[JobId]) -> list[list[str]]:
        """Return the accounting commands: several if one can report only one submission."""
        return list(filter(None, [self.accounting_command(ids)]))

    def parse_accounting(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        """Return the status of those of ``ids`` that accounting has."""
        return {}

    # -- cancel ------------------------------------------------------------------------------------
    @abstractmethod
    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        """Return a command that cancels all ``targets`` (see `target`)."""

    def cancel_commands(self, jobs: Mapping[str, Sequence[int]]) -> list[list[str]]:
        """Return the commands that cancel submissions, all of their jobs or those of the indexes.

        Several if one command cannot cancel all of them safely.
        """
        words = [word for id_, indexes in jobs.items() for word in self.target(id_, indexes)]
        return [self.cancel_command(words)] if words else []

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        """Return the arguments of a cancel for a submission, or for its ``indexes`` only."""
        return [f"{submission}[{index}]" for index in indexes] or [submission]

    def already_ended(self, result: CommandResult) -> bool:
        """Return whether a cancel failed only because the jobs had ended already.

        All of its messages say so (see `ended`).
        """
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return bool(lines) and all(self.ended.search(line) for line in lines)


def _register(cls: type[Scheduler]) -> None:
    other = REGISTERED.get(cls.name, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        places = " and ".join(f"{known.__module__}.{known.__qualname__}" for known in (other, cls))
        raise TypeError(f"two batch schedulers have the name {cls.name}: {places}")
    REGISTERED[cls.name] = cls


# -- the class of a batch scheduler, by the name that site files use -------------------------------
# A class registers itself when its module is imported. A name that is not registered yet is looked
# up as a module of this package, then as an entry point; only that one module is imported.


ENTRY_POINTS = "gpujobs.schedulers"
"""Group of the entry points of other packages: ``NAME = "package.module"``."""


def get_scheduler(name: str) -> type[Scheduler]:
    """Return the class of the batch scheduler ``name``; InputError if there is none."""
    if name not in REGISTERED and name.isidentifier() and find_spec(f"{__package__}.{name}"):
        importlib.import_module(f"{__package__}.{name}")
    if name not in REGISTERED:
        _import_entry_point(name)
    if name not in REGISTERED:
        known = scheduler_names()
        message = f"{name!r} is not one of the known batch schedulers ({', '.join(known)})"
        raise InputError("; ".join(filter(None, (message, did_you_mean(name.lower(), known)))))
    return REGISTERED[name]


def scheduler_names() -> list[str]:
    """Return the names of all batch schedulers that can be used here, sorted."""
    import pkgutil

    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return sorted({*REGISTERED, *(entry.name for entry in _entry_points())})


def usable_schedulers() -> list[type[Scheduler]]:
    """Return the classes of all batch schedulers; one that cannot be imported is a warning."""
    found = []
    for name in scheduler_names():
        try:
            found.append(get_scheduler(name))
        except InputError as error:
            logger.warning("%s", error)
    return found


def _entry_points() -> Iterator[EntryPoint]:
    """Yield those of other packages; `entry_points` takes no group in Python 3.9, as in jobs."""
    from importlib.metadata import distributions  # slow, and seldom needed

    for distribution in distributions():
        for entry in distribution.entry_points:
            if entry.group == ENTRY_POINTS:
                yield entry


def _import_entry_point(name: str) -> None:
    for entry in _entry_points():
        if entry.name != name:
            continue
        try:
            entry.load()
        except Exception as error:  # whatever another package's code raises
            cause = f"{type(error).__name__}: {error}"
            message = f"batch scheduler {name}: {entry.value} cannot be imported ({cause})"
            raise InputError(message) from error


# -- names of the commands of a batch scheduler, which the key `commands` of a site may replace ----
_JOB = JobId("1")


def needed_commands(scheduler: Scheduler) -> set[str]:
    """Return the commands that submit, query and cancel; nothing works without them."""
    commands = (
        scheduler.submit_command(),
        scheduler.find_command("name", "user"),
        scheduler.status_command([_JOB], ["name"], "user"),
        *scheduler.cancel_commands({_JOB.submission: ()}),
    )
    return {command[0] for command in commands}


def all_commands(scheduler: Scheduler) -> set[str]:
    """Return also the commands that report limits, estimates, details, ended jobs and nodes."""
    optional = (
        *scheduler.accounting_commands([_JOB]),
        scheduler.limit_command(),
        scheduler.estimate_command(),
        scheduler.detail_command({_JOB: JobStatus(JobState.PENDING)}),
    )
    of_nodes = scheduler.inventory.commands if scheduler.inventory else ()
    return {
        *needed_commands(scheduler),
        *(command[0] for command in optional if command),
        *of_nodes,
    }
