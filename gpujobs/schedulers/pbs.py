"""OpenPBS and PBS Professional: qsub, qstat, qselect, qdel."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from .base import CommandResult, JobId, JobState, JobStatus, Scheduler, members

# Exit codes are the server's error number modulo 256 and mean something else in each release and in Torque, so words
# decide. An empty list with one of these words is no answer.
_AWAY = re.compile(
    r"cannot connect to server|couldn't connect to|unable to communicate|connection (refused|timed out|reset)|"
    r"timed out|no route to host|unknown host|end of file|batch protocol error|communication failure|too busy|"
    r"server busy|premature end of message|server shutting down|system error",
    re.I,
)
_GONE = re.compile(
    r"unknown job id|nonexistent job id|job has finished|has finished|invalid (for )?state (of|for) job",
    re.I,
)

_NO_HISTORY = re.compile(r"not configured to maintain job history|job_history_enable", re.I)

_STATES = {
    "Q": JobState.PENDING, "H": JobState.PENDING, "W": JobState.PENDING, "T": JobState.PENDING,
    "R": JobState.RUNNING, "E": JobState.RUNNING, "B": JobState.RUNNING,
    "S": JobState.SUSPENDED, "U": JobState.SUSPENDED,
}  # fmt: skip
_WORDS = {"Q": "queued", "H": "held", "W": "waits for its time", "T": "in transit"}
_CODES = {
    -29: JobState.TIMEOUT, -28: JobState.TIMEOUT, -27: JobState.OUT_OF_MEMORY, -26: JobState.OUT_OF_MEMORY,
    -4: JobState.NODE_FAIL, -5: JobState.NODE_FAIL, -6: JobState.NODE_FAIL, -14: JobState.NODE_FAIL,
    -20: JobState.NODE_FAIL, -30: JobState.NODE_FAIL,
}  # fmt: skip
_DELETED, _FINISHED = 91, 92  # substates
_OF_CHUNKS = {
    f"-l {name}" for name in ("ncpus", "ngpus", "nodes", "mem", "vmem", "mpiprocs", "ompthreads")
}


class PBS(Scheduler):
    """OpenPBS 20 and newer, PBS Professional 18.2 and newer.

    A submission's id here is ``123``, that of an array ``123[]``: without the server's name, which commands do not
    need and which may be written differently in a job and on a login node. ``cluster`` names another server than the
    default one.
    """

    name = "pbs"
    prefix = "#PBS"
    request: ClassVar[tuple[str, ...]] = (
        "-q {queue}",
        "-l select={nodes}:ncpus={cpus_per_node}:ngpus={gpus_per_node}:mem={memory_per_node:MB}mb",
    )
    cpu_request: ClassVar[tuple[str, ...]] = (
        "-q {queue}",
        "-l select={nodes}:ncpus={cpus_per_node}:mem={memory_per_node:MB}mb",
    )
    mpi_command = ("mpiexec", "-n", "{ranks}")
    managed = frozenset({"-N", "-o", "-e", "-j", "-k", "-m", "-r", "-S", "-J", "-l walltime"})
    refused: ClassVar = {
        "-V": "a job inherits nothing from the shell that submits it: name variables in `env`",
        "-I": "an interactive job waits for a terminal",
        "-z": "qsub would not tell the job's id",
        "-C": "it changes what a directive looks like",
        "-W block": "qsub would wait for the end of the job",
        "-W depend": "a dependency of one job of an array holds all of them",
    }
    with_value: ClassVar = frozenset("aAcCeJjklmMNopPqrRSuvW")
    """Letters of options that have a value."""
    largest_array = 1000  # max_array_size is 10000 unless the site chose otherwise
    index_variable = "PBS_ARRAY_INDEX"
    job_variable = "PBS_JOBID"
    # No `cancel_waiting`: qdel has no choice by state, and would end jobs that run as well. Jobs that still wait see
    # that the cluster has ended when they start.

    # -- what a script says ---------------------------------------------------------------------------------
    def output(self, root: str, cluster: str, array: bool) -> str:
        path = f"{root}/{cluster}/logs/{self.name}" + ("-^array_index^.log" if array else ".log")
        return path if re.fullmatch(r"[\w./%@:+=^-]+", path) else f'"{path}"'

    def array(self, count: int) -> str:
        return f"-J 0-{count - 1}"

    def options(self, line: str) -> set[str]:
        # `-l a=1 -l b=2` and `-l a=1,b=2` say the same, so that each resource counts as an option: `-l a`, `-l b`.
        found, words = set(), iter(shlex.split(line))
        for word in words:
            if not re.match(r"-\w", word):
                raise ValueError(f"{word} is no option")
            letter, value = word[1], word[2:]
            if letter not in self.with_value:
                found |= {f"-{flag}" for flag in word[1:]}
                continue
            if not value and (value := next(words, "")) == "":
                raise ValueError(f"-{letter} needs a value")
            names = re.findall(r"(?:^|,)\s*([\w.-]+)", value) if letter in "lW" else []
            found |= {f"-{letter} {name}" for name in names} or {f"-{letter}"}
        return found

    def clash(self, line: str, taken: Iterable[str]) -> str:
        # qsub refuses `select` together with what a chunk of it may say.
        mine, theirs = self.options(line), set(taken)
        if "-l select" in theirs and mine & _OF_CHUNKS:
            return "-l select"
        if "-l select" in mine and theirs & _OF_CHUNKS:
            return min(theirs & _OF_CHUNKS)
        return super().clash(line, theirs)

    # -- submit ---------------------------------------------------------------------------------------------
    def submit_command(self) -> list[str]:
        return ["qsub"]

    def parse_submit(self, stdout: str) -> str | None:
        for line in reversed(stdout.strip().splitlines()):
            if found := re.fullmatch(r"(\d+(?:\[\])?)(\.\S+)?", line.strip()):
                return found[1]
        return None

    def unreachable(self, result: CommandResult) -> bool:
        if result.exit_code in (None, 0):
            return result.exit_code is None
        # qstat ends with 255 when it has reached no server; from qsub the same number may be a refusal.
        asked = result.argv[0].endswith(("qstat", "qselect")) and result.exit_code == 255
        return asked or _AWAY.search(result.stderr) is not None

    def answered(self, result: CommandResult) -> bool:
        """Tell an answer, though it be that the jobs are not known, from a failure."""
        return (
            result.exit_code == 0
            or self.already_gone(result)
            or _NO_HISTORY.search(result.stderr) is not None
        )

    def find_command(self, name: str, user: str) -> list[str]:
        # A job that has ended is not found; the jobs of the cluster's folder say which of two came first.
        return [
            "qselect",
            "-u",
            user,
            "-N",
            name,
            *([f"-q@{self.cluster}"] if self.cluster else []),
        ]

    def parse_find(self, stdout: str, name: str) -> set[str]:
        return {job.submission for line in stdout.splitlines() if (job := job_id(line.strip()))}

    def limit_command(self) -> list[str] | None:
        return ["qstat", "-B", "-f", "-F", "json", *([self.cluster] if self.cluster else [])]

    def parse_limit(self, stdout: str) -> int | None:
        found = re.search(r'"max_array_size":\s*(\d+)', stdout)
        return int(found[1]) if found else None

    # -- watch ----------------------------------------------------------------------------------------------
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        return ["qstat", "-x", "-t", "-f", "-F", "json", *self._submissions(ids)]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
        records, found = self.records(result.stdout), {}
        for job in ids:
            parent = records.get(JobId(job.submission), {}) if job.index is not None else {}
            record = records.get(job) or _unlisted(job, parent)
            if record is not None:
                found[job] = self.status(record, parent)
        return found

    def accounting_command(self, ids: Sequence[JobId]) -> list[str] | None:
        # Where the site keeps no history `qstat -x` is refused, and living jobs are seen without it.
        return ["qstat", "-t", "-f", "-F", "json", *self._submissions(ids)]

    def parse_accounting(
        self, result: CommandResult, ids: Sequence[JobId]
    ) -> dict[JobId, JobStatus]:
        return self.parse_status(result, ids)

    def records(self, stdout: str) -> dict[JobId, Mapping[str, Any]]:
        """Return what is listed: the attributes of each job. Values are typed by their looks, names too."""
        try:
            listed = json.loads(stdout, strict=False)
            jobs = listed.get("Jobs") if isinstance(listed, dict) else None
        except ValueError:  # some releases write a job's variables so that it is no JSON
            jobs = _line_by_line(stdout)
        rows = jobs.items() if isinstance(jobs, dict) else ()
        return {
            job: record
            for text, record in rows
            if (job := job_id(text)) and isinstance(record, dict)
        }

    def status(self, record: Mapping[str, Any], parent: Mapping[str, Any]) -> JobStatus:
        """Return the status of the job with the attributes ``record``; ``parent`` has those of its array."""
        native, substate, code = (
            str(record.get("job_state", "")),
            record.get("substate"),
            record.get("Exit_status"),
        )
        said = str(record.get("comment") or parent.get("comment") or "")
        code = code if isinstance(code, int) else None
        if (
            native not in ("F", "X")
            and parent.get("job_state") == "F"
            and parent.get("substate") == _DELETED
        ):
            native, substate = (
                "F",
                _DELETED,
            )  # a member that waited when the whole array was deleted
        hosts = dict.fromkeys(re.findall(r"([\w.-]+)/", str(record.get("exec_host", ""))))
        estimated = record.get("estimated")
        starts = (
            str(estimated.get("start_time", ""))
            if isinstance(estimated, dict) and native in _WORDS
            else ""
        )
        state = _STATES.get(native, JobState.UNKNOWN)
        if native in ("F", "X"):
            never_ran = native == "X" and code is None
            state, said = _ended(_DELETED if never_ran else substate, code, said)
        elif native in _WORDS:
            said = said or _WORDS[native]
        elif state is JobState.RUNNING:
            said = ""
        exit_code = (
            None
            if code is None or state is JobState.RUNNING
            else code - 128
            if code > 256
            else code
        )
        return JobStatus(state, native, said, exit_code, ",".join(hosts), starts)

    def _submissions(self, ids: Sequence[JobId]) -> list[str]:
        return [
            word
            for submission in sorted({job.submission for job in ids})
            for word in self.target(submission)
        ]

    # -- cancel ---------------------------------------------------------------------------------------------
    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["qdel", *targets]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        server = f".{self.cluster}" if self.cluster else ""
        return [f"{JobId(submission, index)}{server}" for index in indexes] or [
            f"{submission}{server}"
        ]

    def already_gone(self, result: CommandResult) -> bool:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return bool(lines) and all(_GONE.search(line) for line in lines)


def job_id(text: str) -> JobId | None:
    """Return the id in ``123.server``, ``123[].server`` or ``123[4].server``; None where it is something else."""
    found = re.fullmatch(r"(\d+)(?:\[(\d*)\])?(?:\..*)?", text)
    if not found:
        return None
    number, index = found.groups()
    return JobId(number) if index is None else JobId(f"{number}[]", int(index) if index else None)


def _unlisted(job: JobId, parent: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what is known of a member from its array: the server lists none that have not started."""
    if parent.get("job_state") == "F":
        return parent if parent.get("substate") == _DELETED else None
    waits = parent.get("job_state") in _WORDS or job.index in _numbers(
        str(parent.get("array_indices_remaining", ""))
    )
    return {"job_state": "Q"} if waits else None


@lru_cache(maxsize=16)
def _numbers(text: str) -> frozenset[int]:
    return frozenset(members(text))


def _ended(substate: object, code: int | None, comment: str) -> tuple[JobState, str]:
    """Return how a job ended, and why."""
    if substate == _DELETED:
        return JobState.CANCELLED, comment
    if code is None and substate == _FINISHED:
        return (
            JobState.FAILED,
            comment or "the batch scheduler removed it: a job that it depended on failed",
        )
    if code is None:  # moved to another server, or half a record
        return JobState.UNKNOWN, comment
    if "exceeded resource walltime" in comment:
        return JobState.TIMEOUT, comment
    if code == 0:
        return JobState.COMPLETED, ""
    return _CODES.get(code, JobState.FAILED), comment


def _line_by_line(text: str) -> dict[str, dict[str, Any]]:
    jobs: dict[str, dict[str, Any]] = {}
    record: dict[str, Any] = {}
    for line in text.splitlines():
        if found := re.match(r'\s*"(\d+(?:\[\d*\])?\.[^"]+)":\s*\{', line):
            record = jobs[found[1]] = {}
        elif found := re.match(
            r'\s*"(job_state|substate|Exit_status|comment|exec_host|array_indices_remaining)":\s*(.+?),?\s*$',
            line,
        ):
            word = found[2].strip('"')
            record[found[1]] = int(word) if re.fullmatch(r"-?\d+", word) else word
    return jobs
