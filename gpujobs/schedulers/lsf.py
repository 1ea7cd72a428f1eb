"""LSF: bsub, bjobs, bhist, bkill."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from .base import CommandResult, JobId, JobState, JobStatus, Scheduler, ranges

_STATES = {
    "PEND": JobState.PENDING, "PSUSP": JobState.PENDING, "WAIT": JobState.PENDING, "FWD_PEND": JobState.PENDING,
    "RUN": JobState.RUNNING, "PROV": JobState.RUNNING, "USUSP": JobState.SUSPENDED, "SSUSP": JobState.SUSPENDED,
    "DONE": JobState.COMPLETED, "EXIT": JobState.FAILED, "ZOMBI": JobState.NODE_FAIL,
}  # fmt: skip

# What LSF says of jobs that it ended itself; others are failures.
_TERMINATED = {
    "RUNLIMIT": JobState.TIMEOUT, "CPULIMIT": JobState.TIMEOUT, "DEADLINE": JobState.TIMEOUT,
    "WINDOW": JobState.TIMEOUT,
    "MEMLIMIT": JobState.OUT_OF_MEMORY, "SWAP": JobState.OUT_OF_MEMORY, "SWAPLIMIT": JobState.OUT_OF_MEMORY,
    "OWNER": JobState.CANCELLED, "FORCE_OWNER": JobState.CANCELLED, "ADMIN": JobState.CANCELLED,
    "FORCE_ADMIN": JobState.CANCELLED, "BUCKET_KILL": JobState.CANCELLED, "REMOVE_HUNG_JOB": JobState.NODE_FAIL,
    "PREEMPT": JobState.PREEMPTED, "REQUEUE_OWNER": JobState.PREEMPTED, "REQUEUE_ADMIN": JobState.PREEMPTED,
    "RC": JobState.PREEMPTED, "RC_RECLAIM": JobState.PREEMPTED, "ZOMBIE": JobState.NODE_FAIL,
}  # fmt: skip
_SIGNALLED = {
    128 + signal.SIGUSR2: JobState.TIMEOUT, 128 + signal.SIGINT: JobState.CANCELLED,
    128 + signal.SIGTERM: JobState.CANCELLED,
}  # fmt: skip
"""Without such a word (not every version says one): the run limit sends SIGUSR2, bkill SIGINT and SIGTERM."""

_AWAY = re.compile(
    r"still trying|LIM is down|try later|please wait|communication time ?out|timeout on connect|connection (refused|"
    r"timed out|reset)|server is not connected|batch daemon (cannot fork|internal error)|query limit",
    re.I,
)
_GONE = re.compile(
    r"already finished|no matching job found|operation is in progress|is being terminated|is not found"
)
_NOTHING = re.compile(r"\bno (\w+ )?jobs? found|is not found", re.I)
_EVENT = re.compile(r"\w{3} \w{3} +\d+ \d\d:\d\d:\d\d(?: \d{4})?: (.*)")
_MOST = (
    100  # jobs of which details are asked at a time: each answer has the text of the script in it
)


class LSF(Scheduler):
    """IBM Spectrum LSF 10.1; its open relatives as far as they go (no ``-gpu``)."""

    name = "lsf"
    prefix = "#BSUB"
    request = (
        "-q {queue}",
        "-n {cpus_per_job}",
        '-gpu "num={gpus_per_node}:mode=shared:j_exclusive=yes"',  # num is of each host
        '-R "span[ptile={cpus_per_node}]"',
        '-R "rusage[mem={memory_per_node:MB}MB]"',
    )
    cpu_request = (
        "-q {queue}",
        "-n {cpus_per_job}",
        '-R "span[ptile={cpus_per_node}]"',
        '-R "rusage[mem={memory_per_node:MB}MB]"',
    )
    account_directive = "-P {account}"
    visible_devices = "scheduler"
    mpi_command = (
        "mpiexec",
        "-n",
        "{ranks}",
        "--map-by",
        "ppr:{ranks_per_node}:node",
        "--bind-to",
        "none",
    )
    managed = frozenset({"-J", "-o", "-oo", "-e", "-eo", "-W", "-cwd", "-i", "-is"})
    refused: ClassVar = {
        "-K": "bsub would wait for the job",
        "-I": "a job cannot be interactive",
        "-w": "a dependency of one job of an array holds all of them",
        "-r": "a job that is started again has lost its dask scheduler",
        "-wa": "gpujobs has its own clock, and leaves before the run limit",
    }
    first_index = 1
    largest_array = 1000  # MAX_JOB_ARRAY_SIZE unless the site raised it
    index_variable = "LSB_JOBINDEX"
    job_variable = "LSB_JOBID"

    def walltime(self, seconds: int) -> str:
        minutes = -(-seconds // 60)
        return f"{minutes // 60}:{minutes % 60:02d}"

    def output(self, root: str, cluster: str, array: bool) -> str:
        # Without -o the report of the job is mailed.
        path = f"{root}/{cluster}/logs/lsf-" + ("%J.%I.log" if array else "%J.log")
        return path if re.fullmatch(r"[\w./%@:+,=-]+", path) else f'"{path}"'

    def array(self, count: int) -> str:
        return f"[1-{count}]"  # stands behind the name

    def options(self, line: str) -> set[str]:
        found = {word for word in shlex.split(line) if re.match(r"-[A-Za-z]", word)}
        return {"-I" if re.fullmatch("-I(p|s|sp|S|X|ps)?|-XF", word) else word for word in found}

    def joined(self, lines: Sequence[str]) -> list[str]:
        """Make one ``-R`` of several: IBM joins them by itself, others refuse a second one."""
        requirements = [line for line in lines if line.split()[:1] == ["-R"]]
        try:
            words = [word for line in requirements for word in shlex.split(line)]
        except ValueError:  # which is told where the directives are checked
            return list(lines)
        if words.count("-R") < 2 or words[1::2].count("-R"):
            return list(lines)
        sections: dict[str, list[str]] = {}
        for word in words[1::2]:
            if re.sub(r"\w+\[[^\[\]]*\]", "", word).strip() not in ("", word.strip()):
                return list(lines)  # alternatives and the like
            for name, body in re.findall(r"(\w+)\[([^\]]*)\]", word) or [("select", word)]:
                sections.setdefault(name, []).append(body)
        between = {"select": " && ", "rusage": ":"}
        parts = [
            f"{name}[{between.get(name, ' ').join(bodies)}]" for name, bodies in sections.items()
        ]
        parts.sort(key=lambda part: not part.startswith("select"))
        one = f'-R "{" ".join(parts)}"'
        return [
            one if line is requirements[0] else line
            for line in lines
            if line not in requirements[1:]
        ]

    def submit_command(self) -> list[str]:
        return ["bsub"]

    def parse_submit(self, stdout: str) -> str | None:
        found = re.findall(r"^Job <(\d+)> is submitted", stdout, re.M)
        return found[-1] if found else None

    def unreachable(self, result: CommandResult) -> bool:
        return result.exit_code is None or (
            result.exit_code != 0 and _AWAY.search(result.stderr) is not None
        )

    def find_command(self, name: str, user: str) -> list[str]:
        return ["bjobs", "-a", "-w"]  # those of the caller; whether -J finds arrays differs

    def parse_find(self, stdout: str, name: str) -> set[str]:
        return {
            job.submission
            for job, _, words in _rows(stdout)
            if name in {word.split("[")[0] for word in words}
        }

    def answered(self, result: CommandResult) -> bool:
        return result.exit_code == 0 or _NOTHING.search(result.stderr) is not None

    def limit_command(self) -> list[str] | None:
        return ["bparams", "-l"]

    def parse_limit(self, stdout: str) -> int | None:
        found = re.search(r"MAX_JOB_ARRAY_SIZE\s*=\s*(\d+)", stdout)
        return int(found[1]) if found else None

    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        # -w is the one format that all versions have and that cuts nothing off; an array is given as a whole.
        return ["bjobs", "-a", "-w", *sorted({job.submission for job in ids})]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
        wanted, found = set(ids), {}
        for job, native, words in _rows(result.stdout):
            hosts = (
                [] if words[1] == "-" else [host.rpartition("*")[2] for host in words[1].split(":")]
            )
            state = _STATES.get(native, JobState.UNKNOWN)
            if native == "EXIT" and not hosts:
                state = JobState.CANCELLED  # it never started
            if job in wanted:
                found[job] = JobStatus(state, native, node=",".join(dict.fromkeys(hosts)))
        return found

    def detail_command(self, listed: Mapping[JobId, JobStatus]) -> list[str] | None:
        waiting = {
            job.submission: job
            for job, status in listed.items()
            if status.state is JobState.PENDING
        }
        ended = [job for job, status in listed.items() if status.state is JobState.FAILED]
        asked = [str(job) for job in [*waiting.values(), *ended][:_MOST]]
        return ["bjobs", "-UF", *asked] if asked else None

    def parse_detail(
        self, result: CommandResult, listed: Mapping[JobId, JobStatus]
    ) -> dict[JobId, JobStatus]:
        found, reasons = {}, {}
        for job, lines in _blocks(result.stdout):
            status = listed.get(job)
            if status is None:
                continue
            if status.state is JobState.PENDING:
                reasons[job.submission] = _pending_reason(lines)
            elif ended := _end(lines):
                found[job] = JobStatus(
                    ended.state, status.native, ended.reason, ended.exit_code, status.node
                )
        for job, status in listed.items():  # the waiting members of an array wait for the same
            if status.state is JobState.PENDING and job.submission in reasons:
                found[job] = JobStatus(status.state, status.native, reasons[job.submission])
        return found

    def accounting_command(self, ids: Sequence[JobId]) -> list[str] | None:
        return ["bhist", "-n", "10", "-l", *sorted({job.submission for job in ids})]

    def parse_accounting(
        self, result: CommandResult, ids: Sequence[JobId]
    ) -> dict[JobId, JobStatus]:
        wanted = set(ids)
        return {
            job: end
            for job, lines in _blocks(result.stdout)
            if job in wanted and (end := _end(lines))
        }

    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["bkill", *targets]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        return [f"{submission}[{ranges(indexes)}]"] if indexes else [submission]

    def already_gone(self, result: CommandResult) -> bool:
        # "Operation is in progress" is how a whole array is told to go.
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return bool(lines) and all(_GONE.search(line.lower()) for line in lines)


def _rows(stdout: str) -> Iterator[tuple[JobId, str, list[str]]]:
    """Yield id, state and the words from FROM_HOST on, of each line of `bjobs -w`. The index is in the job's name."""
    for line in stdout.splitlines():
        number, _, native, _, *words = line.split() if len(line.split()) > 6 else [""] * 7
        if number.isdigit():
            index = next(
                (found[1] for word in words if (found := re.fullmatch(r".+\[(\d+)\]", word))), None
            )
            yield JobId(number, int(index) if index else None), native, words


def _blocks(stdout: str) -> Iterator[tuple[JobId, list[str]]]:
    """Yield id and lines, the first not among them, of each job in the long formats of bjobs and bhist."""
    text = re.sub(r"\n {21}", "", stdout)  # how a line that is too long goes on
    for block in re.split(r"^(?=Job <\d+(?:\[\d+\])?>, )", text, flags=re.M)[1:]:
        first, *lines = block.splitlines()  # the first has the text of the script in it
        yield JobId.parse(first.removeprefix("Job <").partition(">")[0]), lines


def _pending_reason(lines: list[str]) -> str:
    at = next((n for n, line in enumerate(lines) if line.strip() == "PENDING REASONS:"), len(lines))
    reasons = []
    for line in lines[at + 1 :]:
        if not line.strip():
            break
        reasons.append(line.strip().rstrip(";"))
    return "; ".join(reasons[:3])  # the others are those of fewer hosts


def _end(lines: list[str]) -> JobStatus | None:
    """Return how a job ended, from what happened to it; None if it has not."""
    events = [found[1] for line in lines if (found := _EVENT.match(line))]
    if any("Done successfully" in event for event in events):
        return JobStatus(JobState.COMPLETED, "DONE", exit_code=0)
    said = " ".join(
        event for event in events if re.search(r"\b(exited|completed <exit>)", event, re.I)
    )
    if not said:
        return None
    code, state, reason = _exit_code(said), JobState.FAILED, ""
    if word := re.search(r"TERM_(\w+)(?:: ([^.;]*))?", said):
        state, reason = _TERMINATED.get(word[1], JobState.FAILED), word[2] or word[0]
    elif code in _SIGNALLED:
        state = _SIGNALLED[code]
        reason = "the run limit was reached" if state is JobState.TIMEOUT else ""
    elif code is None:
        state = JobState.CANCELLED  # it never started
    return JobStatus(state, "EXIT", reason, code)


def _exit_code(said: str) -> int | None:
    if found := re.search(r"exit code (\d+)", said, re.I):
        return int(found[1])
    if found := re.search(r"by (?:LSF )?signal <?(?:SIG)?(\w+)", said, re.I):
        number = int(found[1]) if found[1].isdigit() else getattr(signal, f"SIG{found[1]}", 0)
        return 128 + int(number)
    return None
