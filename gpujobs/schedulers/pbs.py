"""OpenPBS and PBS Professional: qsub, qstat, qselect, qdel."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from .base import CommandResult, JobId, JobStatus, Reply, Scheduler
from .formats import find_integer, quoted_path, ranges
from .inventory import Inventory
from .pbs_inventory import PBSInventory
from .pbs_output import job_id, job_status, listed_jobs

# Exit codes are the server's error number modulo 256. They differ between releases and in Torque,
# so the messages decide. An empty list with one of these messages does not mean that there are no
# jobs.
_AWAY = re.compile(
    r"cannot connect to server|couldn't connect to|unable to communicate|communication failure|"
    r"connection (refused|timed out|reset)|timed out|no route to host|unknown host|end of file|"
    r"batch protocol error|too busy|server busy|premature end of message|server shutting down|"
    r"system error",
    re.I,
)
_ALREADY_ENDED = re.compile(
    r"unknown (job|array) id|nonexistent job id|job has finished|has finished|"
    r"invalid (for )?state (of|for) job",
    re.I,
)
_NO_HISTORY = re.compile(r"not configured to maintain job history|job_history_enable", re.I)

_QSTAT = ("qstat", "-t", "-f", "-F", "json")

_CHUNK_OPTIONS = {
    f"-l {name}" for name in ("ncpus", "ngpus", "nodes", "mem", "vmem", "mpiprocs", "ompthreads")
}
"""Resources that `select` gives for each chunk: qsub refuses them beside it."""


class PBS(Scheduler):
    """OpenPBS 20 and newer, PBS Professional 18.2 and newer.

    A submission's id here is ``123.server``, that of an array ``123[].server``, as qsub prints it:
    some releases of qdel abort, or delete nothing, if the server's name is missing in a list.
    ``cluster`` is the name of a server that is not the default one.
    """

    name = "pbs"
    inventory: ClassVar[type[Inventory] | None] = PBSInventory
    prefix = "#PBS"
    reservation_directive = "-q {reservation}"
    reservation_is_queue = True
    environment = ("PBS_CONF_FILE", "PBS_SERVER", "PBS_EXEC", "PBS_DEFAULT", "PBS_HOME")
    request: ClassVar[tuple[str, ...]] = (
        "-q {queue}",
        "-l select={nodes}:ncpus={cpus_per_node}:ngpus={gpus_per_node}:mem={memory_per_node:MB}mb",
    )
    cpu_request: ClassVar[tuple[str, ...]] = (
        "-q {queue}",
        "-l select={nodes}:ncpus={cpus_per_node}:mem={memory_per_node:MB}mb",
    )
    mpi_command = ("mpiexec", "-n", "{ranks}", "--bind-to", "none")
    managed = frozenset({"-N", "-o", "-e", "-j", "-k", "-m", "-r", "-S", "-J", "-l walltime"})
    refused: ClassVar = {
        "-V": "a job inherits nothing from the shell that submits it: name variables in `env`",
        "-I": "an interactive job waits for a terminal",
        "-z": "qsub would not print the job's id",
        "-C": "it changes the prefix of directives",
        "-W block": "qsub would wait for the end of the job",
        "-W depend": "a dependency on another cluster is the key `after`",
    }
    with_value: ClassVar = frozenset("aAcCeJjklmMNopPqrRSuvW")
    """Letters of options that have a value."""
    multi_cluster = True
    memory_unit = ""  # bytes
    largest_array = 1000  # max_array_size is 10000 unless the site chose otherwise
    index_variable = "PBS_ARRAY_INDEX"
    job_variable = "PBS_JOBID"
    after = ("-W", "depend=afterany:{ids}")
    away = _AWAY
    # qdel kills the login shell above the job's script at once. pbs_mom then looks at the job's
    # other processes only every 10 s or more; the end of a script it sees immediately. That of
    # Torque kills them.
    slow_cancel = True
    # No `cancel_waiting`: qdel cannot choose by state, and would end running jobs, too. A pending
    # job finds that the cluster has ended when it starts.

    def __init__(self, cluster: str | None = None) -> None:
        super().__init__(cluster)
        if cluster:  # all commands read it; PBS_DEFAULT is the older name, and Torque's
            self.fixed_environment = {"PBS_SERVER": cluster, "PBS_DEFAULT": cluster}

    # -- the script --------------------------------------------------------------------------------
    def output(self, root: str, cluster: str, array: bool) -> str:
        file = f"{self.name}-^array_index^.log" if array else f"{self.name}.log"
        return quoted_path(f"{root}/{cluster}/logs/{file}", plain=r"\w./%@:+=^-")

    def array(self, count: int) -> str:
        return f"-J 0-{count - 1}"

    def options(self, line: str) -> set[str]:
        found = set()
        words = iter(shlex.split(line))
        for word in words:
            if not re.match(r"-\w", word):
                raise ValueError(f"{word} is not an option")
            letter, value = word[1], word[2:]
            if letter not in self.with_value:
                found |= {f"-{flag}" for flag in word[1:]}
                continue
            value = value or next(words, "")
            if not value:
                raise ValueError(f"-{letter} needs a value")
            found |= _options_of(letter, value)
        return found

    def repeated(self, line: str, taken: Iterable[str]) -> str:
        options, others = self.options(line), set(taken)
        if "-l select" in others and options & _CHUNK_OPTIONS:
            return "-l select"
        if "-l select" in options and others & _CHUNK_OPTIONS:
            return min(others & _CHUNK_OPTIONS)
        return super().repeated(line, others)

    # -- replies -----------------------------------------------------------------------------------
    def reply(self, result: CommandResult) -> Reply:
        # 255 of qstat: it has reached no server. 255 of qsub may be a refusal.
        is_query = result.argv[0].endswith(("qstat", "qselect"))
        if is_query and result.exit_code == 255:
            return Reply.NONE
        return super().reply(result)

    def is_complete(self, result: CommandResult) -> bool:
        output = result.stdout.strip()
        if "json" in result.argv:  # without jobs it has the name of the server
            return output.startswith("{") and output.endswith("}")
        if result.argv[1:2] == ("-u",):  # qselect
            return all(job_id(line.strip()) for line in output.splitlines())
        return True

    def found_nothing(self, result: CommandResult) -> bool:
        return self.already_ended(result) or _NO_HISTORY.search(result.stderr) is not None

    # -- submit ------------------------------------------------------------------------------------
    def submit_command(self) -> list[str]:
        return ["qsub"]

    def parse_submit(self, stdout: str) -> str | None:
        for line in reversed(stdout.strip().splitlines()):
            if found := re.fullmatch(r"\d+(\[\])?(\.\S+)?", line.strip()):
                return found[0]
        return None

    def find_command(self, name: str, user: str) -> list[str]:
        # It does not find a job that has ended. If a job was sent twice, the claims in the
        # cluster's folder decide which one does the work.
        return ["qselect", "-u", user, "-N", name]

    def parse_find(self, stdout: str, name: str) -> set[str]:
        return {job.submission for line in stdout.splitlines() if (job := job_id(line.strip()))}

    def limit_command(self) -> list[str] | None:
        return ["qstat", "-B", "-f", "-F", "json"]

    def parse_limit(self, stdout: str) -> int | None:
        return find_integer(r'"max_array_size":\s*(\d+)', stdout)

    # -- query -------------------------------------------------------------------------------------
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        return [*_QSTAT, "-x", *_submissions(ids)]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
        jobs = listed_jobs(result.stdout)
        statuses = ((id_, job_status(id_, jobs)) for id_ in ids)
        return {id_: status for id_, status in statuses if status is not None}

    def more_status_commands(
        self, missing: Sequence[JobId], result: CommandResult
    ) -> list[list[str]]:
        # OpenPBS since December 2023 lists only the jobs of the first id in JSON, without an error.
        # A site that keeps no history refuses `-x`; active jobs are listed without it.
        history = [] if _NO_HISTORY.search(result.stderr) else ["-x"]
        return [[*_QSTAT, *history, submission] for submission in _submissions(missing)]

    # -- cancel ------------------------------------------------------------------------------------
    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["qdel", *targets]

    def cancel_commands(self, jobs: Mapping[str, Sequence[int]]) -> list[list[str]]:
        # OpenPBS since September 2024: a pending member of an array crashes the server if it is one
        # of several targets, so each has a command of its own. In a list of whole submissions an
        # array must not precede a job.
        whole = sorted((id_ for id_, indexes in jobs.items() if not indexes), key=_is_array)
        parts = (self.target(id_, indexes) for id_, indexes in jobs.items() if indexes)
        lists = [whole, *([word] for words in parts for word in words)]
        return [self.cancel_command(words) for words in lists if words]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        if not indexes:
            return [submission]
        number, _, server = submission.partition("[]")
        return [f"{number}[{span}]{server}" for span in ranges(indexes).split(",")]

    def show_id(self, job: JobId) -> str:
        shown = super().show_id(job)
        return shown if self.cluster else shown.partition(".")[0]

    def already_ended(self, result: CommandResult) -> bool:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return bool(lines) and all(_ALREADY_ENDED.search(line) for line in lines)


def _submissions(ids: Sequence[JobId]) -> list[str]:
    return sorted({job.submission for job in ids})


def _is_array(submission: str) -> bool:
    return "[" in submission


def _options_of(letter: str, value: str) -> set[str]:
    """Return the options of ``-l a=1,b=2``: each resource is one, ``-l a`` and ``-l b``."""
    if letter not in "lW":
        return {f"-{letter}"}
    names = re.findall(r"(?:^|,)\s*([\w.-]+)", value)
    return {f"-{letter} {name}" for name in names} or {f"-{letter}"}
