"""OpenPBS and PBS Professional: qsub, qstat, qselect, qdel."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

from ..injob.names import ranges
from . import words
from .base import Scheduler
from .formats import clock_seconds, find_integer, integer, members, names_ids, quoted_path
from .inventory import Inventory
from .jobs import CommandResult, JobId, JobState, JobStatus, Reply, Statuses
from .pbs_inventory import MAX_ARRAY_SIZE, Attributes, PBSInventory, json_attributes

# -- the output of qstat: job ids, attributes, and the status that follows from them ---------------
STATES = {
    "Q": JobState.PENDING, "H": JobState.PENDING, "W": JobState.PENDING, "T": JobState.PENDING,
    "R": JobState.RUNNING, "E": JobState.RUNNING, "B": JobState.RUNNING,
    "S": JobState.SUSPENDED, "U": JobState.SUSPENDED,
}  # fmt: skip
_PENDING_REASONS = {"Q": "queued", "H": "held", "W": "waiting for its time", "T": "in transit"}
_HELD_BY_A_PERSON = {
    "u": "held by its user (qhold; qrls releases it)",
    "o": "held by an operator",
    "p": "held: the password of its user is not valid",
}
"""Reasons by `Hold_Types`. "s", the system's, is also that of a job that waits for another one."""
_ENDED = ("F", "X")
_STATES_OF_EXIT_CODES = {
    -29: JobState.TIMEOUT, -28: JobState.TIMEOUT,
    -27: JobState.OUT_OF_MEMORY, -26: JobState.OUT_OF_MEMORY,
    -4: JobState.NODE_FAIL, -5: JobState.NODE_FAIL, -6: JobState.NODE_FAIL,
    -14: JobState.NODE_FAIL, -20: JobState.NODE_FAIL, -30: JobState.NODE_FAIL,
}  # fmt: skip
_DELETED, _FINISHED = "91", "92"
"""Values of `substate`."""
_ARRAY_BEGAN = "Job Array Began at"
"""A comment of arrays that does not say why the others of its jobs are pending."""

_MEMBERS_OF_DELETED = {
    "Subjob finished": (JobState.COMPLETED, 0),
    "Subjob failed": (JobState.FAILED, None),
    "Subjob terminated": (JobState.CANCELLED, None),
}
"""Comments of members that ended before their array was deleted: the rest is that of the array."""

_LAUNCH_FAILED = "job held, too many failed attempts to run"
"""The comment of a job that is held because it could not be started, 20 times."""

_ID = re.compile(r"\d+(\[\d*\])?(\..*)?")
_JOB_LINE = re.compile(r'\s*"(\d+(?:\[\d*\])?\.[^"]+)":\s*\{')
_ATTRIBUTE_LINE = re.compile(
    r'\s*"(job_state|substate|Exit_status|comment|exec_host|array_indices_remaining|Hold_Types)":'
    r"\s*(.+?),?\s*$"
)


def job_id(text: str) -> JobId | None:
    """Return the id in ``123.server``, ``123[].server`` or ``123[4].server``, else None."""
    if not _ID.fullmatch(text):
        return None
    return JobId(re.sub(r"\[\d+\]", "[]", text), find_integer(r"\[(\d+)\]", text))


def without_server(id_: JobId) -> JobId:
    """Return the id without the server's name, which a job and a login node may spell unlike."""
    return JobId(id_.submission.partition(".")[0], id_.index)


def node_names(exec_host: str) -> str:
    """Return the nodes in ``node1/0*4+node2/0`` as ``node1,node2``."""
    return ",".join(dict.fromkeys(re.findall(r"([\w.-]+)/", exec_host)))


def shell_exit_code(status: int | None) -> int | None:
    """Return ``256 + signal`` as ``128 + signal``, other values as they are."""
    if status is not None and status > 256:
        return status - 128
    return status


def by_id(jobs: Mapping[str, Attributes]) -> dict[JobId, Attributes]:
    """Return the attributes of ``jobs`` by ids without the server's name."""
    ids = ((job_id(text), attributes) for text, attributes in jobs.items())
    return {without_server(id_): attributes for id_, attributes in ids if id_}


def listed_jobs(stdout: str) -> dict[JobId, Attributes]:
    """Return the jobs that ``qstat -f -F json`` lists; none if it is no such output."""
    try:
        return by_id(json_attributes(stdout, "Jobs"))
    except ValueError:  # some releases print a job's variables as invalid JSON
        return by_id(_line_by_line(stdout))


def job_status(id_: JobId, jobs: Mapping[JobId, Attributes]) -> JobStatus | None:
    """Return the status of a job, None if neither it nor its array is listed in ``jobs``."""
    id_ = without_server(id_)
    array = jobs.get(JobId(id_.submission), {})
    job = jobs[id_] if id_ in jobs else _unlisted_member(id_, array)
    if job is None:
        return None
    if job.get("job_state") not in _ENDED and _is_deleted(array):
        job = {**job, "job_state": "F", "substate": _DELETED}  # it was pending
    return _status({"comment": _array_comment(array), **job})


def _array_comment(array: Attributes) -> str:
    """Return the comment of an array; that it began says nothing of a member."""
    comment = array.get("comment", "")
    return "" if comment.startswith(_ARRAY_BEGAN) else comment


def _unlisted_member(id_: JobId, array: Attributes) -> Attributes | None:
    """Return a member as far as its array tells: PBS lists no member that has not started."""
    if _is_deleted(array):
        return array
    state = array.get("job_state", "")
    if state == "F":
        return None
    if state in _PENDING_REASONS:
        return {"job_state": state, "Hold_Types": array.get("Hold_Types", "")}
    if id_.index in _indexes(array.get("array_indices_remaining", "")):
        return {"job_state": "Q"}
    return None


def _is_deleted(job: Attributes) -> bool:
    return (job.get("job_state"), job.get("substate")) == ("F", _DELETED)


@lru_cache(maxsize=16)
def _indexes(text: str) -> frozenset[int]:
    return frozenset(members(text))


def _status(job: Attributes) -> JobStatus:
    names = ("job_state", "comment", "Hold_Types", "exec_host")
    native, comment, holds, hosts = (job.get(name, "") for name in names)
    code, nodes = shell_exit_code(integer(job.get("Exit_status", ""))), node_names(hosts)
    if native in _ENDED and comment in _MEMBERS_OF_DELETED:
        state, code = _MEMBERS_OF_DELETED[comment]
        return JobStatus(state, native, "", code, nodes)
    if native in _ENDED:
        state, reason = _end(job, native, comment)
        return JobStatus(state, native, reason, code, nodes)
    state = STATES.get(native, JobState.UNKNOWN)
    if state is JobState.RUNNING:
        return JobStatus(state, native, node=nodes)
    if state is not JobState.PENDING:
        return JobStatus(state, native, comment, code, nodes)
    if native == "H" and comment.startswith(_LAUNCH_FAILED):
        return JobStatus(JobState.FAILED, native, comment, code, stuck=True)
    persons = [_HELD_BY_A_PERSON[hold] for hold in holds if hold in _HELD_BY_A_PERSON]
    person = persons[0] if persons else ""
    reason = person or comment or _PENDING_REASONS[native]
    starts = job.get("estimated.start_time", "")
    return JobStatus(state, native, reason, code, nodes, starts)


def _end(job: Attributes, native: str, comment: str) -> tuple[JobState, str]:
    """Return the final state of a job, and the reason."""
    code, substate = integer(job.get("Exit_status", "")), job.get("substate")
    if substate == _DELETED or (native == "X" and code is None):  # the latter never ran
        return JobState.CANCELLED, comment
    if code is None and substate == _FINISHED:
        dependency = "the batch scheduler removed it: a job that it depended on failed"
        return JobState.FAILED, comment or dependency
    if code is None:  # moved to another server, or an incomplete record
        return JobState.UNKNOWN, comment
    if "exceeded resource walltime" in comment:
        return JobState.TIMEOUT, comment
    if code == 0:
        return JobState.COMPLETED, ""
    return _STATES_OF_EXIT_CODES.get(code, JobState.FAILED), comment


def _line_by_line(text: str) -> dict[str, dict[str, str]]:
    """Return the attributes in output that is invalid JSON."""
    jobs: dict[str, dict[str, str]] = {}
    attributes: dict[str, str] = {}
    for line in text.splitlines():
        if found := _JOB_LINE.match(line):
            attributes = jobs[found[1]] = {}
        elif found := _ATTRIBUTE_LINE.match(line):
            attributes[found[1]] = found[2].strip('"')
    return jobs


# -- the class -------------------------------------------------------------------------------------
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
    hold = "-h"
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
    node_launcher = ("pbs_tmrsh", "{node}")
    mpi_command = ("mpiexec", "-n", "{ranks}", "--bind-to", "none")
    managed = frozenset({"-N", "-o", "-e", "-j", "-k", "-r", "-S", "-J", "-l walltime"})
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
    option_keys: ClassVar = {
        **dict.fromkeys(("-l select", "-l nodes"), words.chunk),
        "-l ncpus": words.number("cpus_per_job"),
        **dict.fromkeys(("-l ngpus", "-l gpus"), words.number("gpus_per_job")),
        "-l mem": words.memory,
        "-l walltime": words.walltime(clock_seconds),
        "-q": words.to("queue"),
        "-A": words.to("account"),
        "-N": words.to("name"),
        **dict.fromkeys(("-o", "-e"), words.logs),
        **dict.fromkeys(("-j", "-k"), words.only(r"\w+", "")),
        "-r": words.only("n", words.STARTED_AGAIN, "requeue: 1"),
    }
    multi_cluster = True
    memory_unit = ""  # bytes
    largest_array = 1000  # max_array_size is 10000 unless the site chose otherwise
    id_line = r"(\d+(?:\[\])?(?:\.\S+)?)"
    limit = ("qstat -B -f -F json", MAX_ARRAY_SIZE)
    index_variable = "PBS_ARRAY_INDEX"
    job_variable = "PBS_JOBID"
    queue_variable = "PBS_QUEUE"
    submit_folder = "PBS_O_WORKDIR"
    after = ("-W", "depend=afterany:{ids}")
    # Exit codes are the server's error number modulo 256. They differ between releases and in
    # Torque, so the messages decide. An empty list with one of these does not mean "no jobs".
    away = re.compile(
        r"cannot connect to server|couldn't connect to|unable to communicate|communication failure|"
        r"connection (refused|timed out|reset)|timed out|no route to host|unknown host|end of file|"
        r"batch protocol error|too busy|server busy|premature end of message|server shutting down|"
        r"system error",
        re.I,
    )
    unsent = re.compile(r"qsub: cannot connect to server", re.I)
    ended = re.compile(
        r"unknown (job|array) id|nonexistent job id|job has finished|has finished|"
        r"invalid (for )?state (of|for) job",
        re.I,
    )
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
        return quoted_path(self.log_path(root, cluster, file), plain=r"\w./%@:+=^-")

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

    def option_values(self, group: Sequence[str]) -> list[words.OptionValue]:
        letter, value = group[0][1], " ".join([group[0][2:], *group[1:]]).strip()
        if letter != "l":
            return [(f"-{letter}" if letter in self.with_value else group[0], value)]
        parts = [part.strip().partition("=") for part in re.split(r",(?=\s*\w+=)", value)]
        return [(f"-l {name}", text) for name, _, text in parts]

    def option_text(self, option: str, value: str) -> str:
        if option.startswith("-l "):
            return f"{option}={value}" if value else option
        return super().option_text(option, value)

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
            return output.startswith("{") and _is_closed(output)
        if result.argv[1:2] == ("-u",):  # qselect
            return all(job_id(line.strip()) for line in output.splitlines())
        return True

    def found_nothing(self, result: CommandResult) -> bool:
        if _NO_HISTORY.search(result.stderr):
            return True
        # "Unknown Job Id 1" says nothing about job 2.
        text = f"{result.stdout}\n{result.stderr}"
        return self.already_ended(result) and names_ids(result.argv[1:], text)

    # -- submit ------------------------------------------------------------------------------------
    def submit_command(self) -> list[str]:
        return ["qsub"]

    def find_command(self, name: str, user: str) -> list[str]:
        # It does not find a job that has ended. If a job was sent twice, the claims in the
        # cluster's folder decide which one does the work.
        return ["qselect", "-u", user, "-N", name]

    def parse_find(self, stdout: str, name: str) -> set[str]:
        return {job.submission for line in stdout.splitlines() if (job := job_id(line.strip()))}

    # -- query -------------------------------------------------------------------------------------
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        return [*_QSTAT, "-x", *_submissions(ids)]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
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
        whole = sorted(
            (id_ for id_, indexes in jobs.items() if not indexes), key=lambda id_: "[" in id_
        )
        parts = (self.target(id_, indexes) for id_, indexes in jobs.items() if indexes)
        lists = [whole, *([word] for words in parts for word in words)]
        return [self.cancel_command(words) for words in lists if words]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        if not indexes:
            return [submission]
        return [submission.replace("[]", f"[{span}]") for span in ranges(indexes).split(",")]

    def show_id(self, job: JobId) -> str:
        shown = super().show_id(job)
        return shown if self.cluster else shown.partition(".")[0]


def _is_closed(output: str) -> bool:
    """Return whether the outermost brace of JSON is closed; it may be invalid otherwise."""
    if output.endswith("\n}"):  # the inner ones are indented
        return True
    try:
        json.loads(output, strict=False)
    except ValueError:
        return False
    return True


def _submissions(ids: Sequence[JobId]) -> list[str]:
    return sorted({job.submission for job in ids})


def _options_of(letter: str, value: str) -> set[str]:
    """Return the options of ``-l a=1,b=2``: each resource is one, ``-l a`` and ``-l b``."""
    if letter not in "lW":
        return {f"-{letter}"}
    names = re.findall(r"(?:^|,)\s*([\w.-]+)", value)
    return {f"-{letter} {name}" for name in names} or {f"-{letter}"}
