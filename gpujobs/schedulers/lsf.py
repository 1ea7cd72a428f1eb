"""LSF: bsub, bjobs, bhist, bkill."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from ..injob.names import ranges
from . import words
from .base import Scheduler
from .formats import find_integer, names_ids, quoted_path
from .jobs import CommandResult, JobId, JobState, JobStatus, Statuses, of_ids
from .lsf_inventory import LSFInventory

# -- the output of bjobs and bhist -----------------------------------------------------------------
_STATES = {
    "PEND": JobState.PENDING, "PSUSP": JobState.PENDING, "WAIT": JobState.PENDING,
    "FWD_PEND": JobState.PENDING,
    "RUN": JobState.RUNNING, "PROV": JobState.RUNNING,
    "USUSP": JobState.SUSPENDED, "SSUSP": JobState.SUSPENDED,
    "DONE": JobState.COMPLETED, "EXIT": JobState.FAILED, "ZOMBI": JobState.NODE_FAIL,
}  # fmt: skip

_SUSPENDED_WHILE_PENDING = "suspended while pending (bstop, or too many failed starts; bresume)"
"""The reason of PSUSP, if the job's record has none."""

_TERMINATION_STATES = {
    "RUNLIMIT": JobState.TIMEOUT, "CPULIMIT": JobState.TIMEOUT, "DEADLINE": JobState.TIMEOUT,
    "WINDOW": JobState.TIMEOUT,
    "MEMLIMIT": JobState.OUT_OF_MEMORY, "SWAP": JobState.OUT_OF_MEMORY,
    "SWAPLIMIT": JobState.OUT_OF_MEMORY,
    "OWNER": JobState.CANCELLED, "FORCE_OWNER": JobState.CANCELLED, "ADMIN": JobState.CANCELLED,
    "FORCE_ADMIN": JobState.CANCELLED, "BUCKET_KILL": JobState.CANCELLED,
    "PREEMPT": JobState.PREEMPTED, "REQUEUE_OWNER": JobState.PREEMPTED,
    "REQUEUE_ADMIN": JobState.PREEMPTED, "RC": JobState.PREEMPTED, "RC_RECLAIM": JobState.PREEMPTED,
    "REMOVE_HUNG_JOB": JobState.NODE_FAIL, "ZOMBIE": JobState.NODE_FAIL,
}  # fmt: skip
"""States of jobs that LSF ended itself, by its TERM_… word; other words are failures."""

_SIGNAL_STATES = {
    128 + signal.SIGUSR2: JobState.TIMEOUT,
    128 + signal.SIGINT: JobState.CANCELLED,
    128 + signal.SIGTERM: JobState.CANCELLED,
}
"""States by exit code, for versions without a TERM_… word: the run limit sends SIGUSR2, bkill
SIGINT and SIGTERM."""

_EVENT = re.compile(r"\w{3} \w{3} +\d+ \d\d:\d\d:\d\d(?: \d{4})?: (.*)")
_FEWEST_COLUMNS = 7
_MOST_REASONS = 3
"""The reasons after these hold for fewer hosts."""


def is_listing(stdout: str) -> bool:
    """Return whether ``bjobs -w`` has written a whole list: a header, and rows of jobs."""
    header, *lines = stdout.splitlines() or [""]
    titled = header.split()[:3] == ["JOBID", "USER", "STAT"]
    whole = titled and stdout.endswith("\n")
    return whole and all(_is_row(line) for line in lines if line.strip())


def _is_row(line: str) -> bool:
    words = line.split()
    return len(words) >= _FEWEST_COLUMNS and words[0].isdigit()


def listed_jobs(stdout: str) -> Iterator[tuple[JobId, set[str], JobStatus]]:
    """Yield each job of ``bjobs -w`` with its names and its status as far as its line has it.

    Any of the columns from FROM_HOST on may be the name, with the index in an array behind it.
    """
    for line in stdout.splitlines():
        words = line.split()
        if len(words) < _FEWEST_COLUMNS or not words[0].isdigit():
            continue
        number, _, native, _, *columns = words
        index = find_integer(r"\S\[(\d+)\](?: |$)", " ".join(columns))
        names = {column.split("[")[0] for column in columns}
        yield JobId(number, index), names, _listed_status(native, columns[1])


def _listed_status(native: str, hosts: str) -> JobStatus:
    """Return the status by STAT and EXEC_HOST, which is "-" if the job has not started."""
    hosts = hosts.removeprefix("-")
    state = _STATES.get(native, JobState.UNKNOWN)
    if native == "EXIT" and not hosts:
        state = JobState.CANCELLED  # it never started
    reason = _SUSPENDED_WHILE_PENDING if native == "PSUSP" else ""
    nodes = dict.fromkeys(host.rpartition("*")[2] for host in hosts.split(":"))
    return JobStatus(state, native, reason, node=",".join(nodes))


def records(stdout: str) -> Iterator[tuple[JobId, list[str]]]:
    """Yield each job of the long formats of bjobs and bhist, with its lines after the first."""
    text = re.sub(r"\n {21}", "", stdout)  # joins lines that were too long
    for block in re.split(r"^(?=Job <\d+(?:\[\d+\])?>, )", text, flags=re.M)[1:]:
        first, *lines = block.splitlines()  # the first has the text of the script
        yield JobId.parse(first.removeprefix("Job <").partition(">")[0]), lines


def pending_reason(lines: Sequence[str]) -> str:
    """Return why a job is pending, from the lines of its record."""
    text = "\n".join(line.strip() for line in lines)
    reasons = text.partition("PENDING REASONS:\n")[2].partition("\n\n")[0].splitlines()
    return "; ".join(reason.rstrip(";") for reason in reasons[:_MOST_REASONS])


def end_status(lines: Sequence[str]) -> JobStatus | None:
    """Return how a job ended, from the events of its record; None if it has not."""
    events = [found[1] for line in lines if (found := _EVENT.match(line))]
    if any("Done successfully" in event for event in events):
        return JobStatus(JobState.COMPLETED, "DONE", exit_code=0)
    exits = [event for event in events if re.search(r"\b(exited|completed <exit>)", event, re.I)]
    if not exits:
        return None
    text = " ".join(exits)
    code = _exit_code(text)
    if word := re.search(r"TERM_(\w+)(?:: ([^.;]*))?", text):
        state = _TERMINATION_STATES.get(word[1], JobState.FAILED)
        return JobStatus(state, "EXIT", word[2] or word[0], code)
    if code is None:  # it never started
        return JobStatus(JobState.CANCELLED, "EXIT")
    state = _SIGNAL_STATES.get(code, JobState.FAILED)
    reason = "the run limit was reached" if state is JobState.TIMEOUT else ""
    return JobStatus(state, "EXIT", reason, code)


def _exit_code(text: str) -> int | None:
    if found := re.search(r"exit code (\d+)", text, re.I):
        return int(found[1])
    if found := re.search(r"by (?:LSF )?signal <?(?:(\d+)|(?:SIG)?(\w+))", text, re.I):
        return 128 + int(found[1] or getattr(signal, f"SIG{found[2]}", 0))
    return None


# -- the class -------------------------------------------------------------------------------------
_NO_JOBS = re.compile(r"\bno (\w+ )?jobs? found|is not found", re.I)
_INTERACTIVE = re.compile(r"^(-I(p|s|sp|S|X|ps)?|-XF)$")
_NO_OPTION = re.compile(r"(?:illegal option|option cannot have an argument) -- (\w+)")
_REMEDIES = {
    "r": "leave out `requeue`: it needs `-rn`, without which a queue may start jobs again itself",
    "gpu": "a `request` in the site file; `gpujobs sites init` drafts it",
    "U": "leave out `reservation`: this LSF has none",
}
"""Remedies by the option that a relative of LSF does not have."""
_MOST_DETAILS = 100
"""Jobs of one `bjobs -UF`: the record of each has the text of the script."""


_WRITTEN = ("mode=shared", "j_exclusive=yes", "j_exclusive=no", "mps=no")
"""Parts of the value of -gpu that are written, or that change nothing for the job's workers."""


def _gpus(value: str) -> words.Settings:
    """Read ``num=2:gmodel=A100:j_exclusive=yes``."""
    parts = [part.strip() for part in value.split(":")]
    found: dict[str, str | int] = {"gpus_per_job": 1}
    for part in parts:
        name, _, text = part.partition("=")
        if name == "num" and text.removesuffix("/host").isdecimal():
            found["gpus_per_job"] = int(text.removesuffix("/host"))
        elif name == "gmodel":
            found["gpu_type"] = text
        elif part and part not in _WRITTEN:
            hint = "`request` of the site file has the line that requests GPUs"
            raise words.NotHere(f"{part} has no key: jobs have {', '.join(_WRITTEN[:2])}", hint)
    return found


class LSF(Scheduler):
    """IBM Spectrum LSF 10.1, and its open relatives, which have no ``-gpu``."""

    name = "lsf"
    inventory = LSFInventory
    prefix = "#BSUB"
    environment = ("LSF_ENVDIR", "LSF_SERVERDIR", "LSF_LIBDIR", "LSF_BINDIR", "LSB_CONFDIR")
    request = (
        "-q {queue}",
        "-n {cpus_per_job}",
        '-gpu "num={gpus_per_node}:mode=shared:j_exclusive=yes"',  # num is of each host
        '-R "span[ptile={cpus_per_node}]"',
        '-R "rusage[mem={memory_per_node:MB}MB]"',
    )
    account_directive = "-P {account}"
    reservation_directive = "-U {reservation}"
    hold = "-H"
    visible_devices = "scheduler"
    node_launcher = ("blaunch", "{node}")
    mpi_command = (
        "mpiexec", "-n", "{ranks}", "--map-by", "ppr:{ranks_per_node}:node", "--bind-to", "none",
    )  # fmt: skip
    managed = frozenset({"-J", "-o", "-oo", "-e", "-eo", "-W", "-cwd", "-i", "-is"})
    refused: ClassVar = {
        "-K": "bsub would wait for the job",
        "-I": "a job cannot be interactive",
        "-w": "a dependency on another cluster is the key `after`",
        "-r": "a job that is started again has lost its dask scheduler; see the key `requeue`",
        "-env": "it selects the variables that reach the job: name them in `env`",
        "-wa": "gpujobs has its own clock, and ends the job before the run limit",
    }
    option_keys: ClassVar = {
        "-gpu": _gpus,
        "-n": words.number("cpus_per_job"),
        "-W": words.walltime(words.lsf_seconds),
        "-q": words.to("queue"),
        "-P": words.to("account"),
        "-J": words.to("name"),
        "-U": words.to("reservation"),
        **dict.fromkeys(("-o", "-oo", "-e", "-eo"), words.logs),
    }
    short_clock = True
    spans_nodes_hint = "write span[ptile={cpus_per_node}] in `request` of the site file"
    repeatable = frozenset({"-R"})  # those of the site are joined
    first_index = 1
    largest_array = 1000  # MAX_JOB_ARRAY_SIZE unless the site raised it
    id_line = r"Job <(\d+)> is submitted.*"
    limit = ("bparams -l", r"MAX_JOB_ARRAY_SIZE\s*=\s*(\d+)")
    index_variable = "LSB_JOBINDEX"
    job_variable = "LSB_JOBID"
    queue_separator = " "
    queue_variable = "LSB_QUEUE"
    submit_folder = "LS_SUBCWD"
    reads_script = "< "
    away = re.compile(
        r"still trying|LIM is down|try later|please wait|communication time ?out|"
        r"timeout on connect|connection (refused|timed out|reset)|server is not connected|"
        r"batch daemon (cannot fork|internal error)|query limit",
        re.I,
    )
    unsent = re.compile(r"job not submitted", re.I)
    ended = re.compile(  # "Operation is in progress" is the reply to a cancel of a whole array
        r"already finished|no matching job found|operation is in progress|is being terminated|"
        r"is not found",
        re.I,
    )

    # -- the script --------------------------------------------------------------------------------
    def walltime(self, seconds: int) -> str:
        minutes = -(-seconds // 60)
        return f"{minutes // 60}:{minutes % 60:02d}"

    def output(self, root: str, cluster: str, array: bool) -> str:
        # Without -o, LSF mails the report of the job.
        file = "lsf-%J.%I.log" if array else "lsf-%J.log"
        return quoted_path(self.log_path(root, cluster, file), plain=r"\w./%@:+,=-")

    def array(self, count: int) -> str:
        return f"[1-{count}]"  # follows the name

    def options(self, line: str) -> set[str]:
        found = set()
        for word in shlex.split(line):
            if re.match("--[A-Za-z]", word):
                raise ValueError(f"bsub has no option {word}")
            if re.match("-[A-Za-z]", word):
                found.add(_INTERACTIVE.sub("-I", word))
        return found

    def spans_nodes(self, request: Sequence[str]) -> bool:
        return super().spans_nodes(request) and not any("hosts=1]" in line for line in request)

    def clash(self, line: str, taken: Iterable[str]) -> str:
        options = self.options(line)
        if options == {"-R"} and _selects_only(line):  # it is joined with those of the site
            return ""
        return self._first_of(options, taken)

    def joined(self, lines: Sequence[str]) -> list[str]:
        # IBM's LSF merges several -R itself, others refuse a second one.
        requirements = [line for line in lines if line.split()[:1] == ["-R"]]
        values = _requirement_values(requirements)
        if len(values) < 2 or not all(_is_mergeable(value) for value in values):
            return list(lines)
        others = [line for line in lines if line not in requirements]
        others.insert(list(lines).index(requirements[0]), f'-R "{_merged_requirement(values)}"')
        return others

    def avoid(self, nodes: Sequence[str]) -> str:
        return f"""-R "select[{" && ".join(f"hname!='{node}'" for node in nodes)}]\""""

    # -- replies -----------------------------------------------------------------------------------
    def is_complete(self, result: CommandResult) -> bool:
        if result.argv[1:3] != ("-a", "-w"):  # not a list of jobs
            return True
        if self.found_nothing(result):
            return True
        return is_listing(result.stdout) and _is_about_all(result)

    def found_nothing(self, result: CommandResult) -> bool:
        if not _NO_JOBS.search(result.stderr):
            return False
        # "Job <1> is not found" says nothing about job 2.
        whole = not result.stdout or is_listing(result.stdout)
        return result.argv[1:3] != ("-a", "-w") or (whole and _is_about_all(result))

    # -- submit ------------------------------------------------------------------------------------
    def submit_command(self) -> list[str]:
        return ["bsub"]

    def after_options(self, submissions: Sequence[str]) -> list[str]:
        text = " && ".join(f"ended({submission})" for submission in submissions)
        return ["-w", text] if text else []

    def remedy(self, result: CommandResult) -> str:
        found = _NO_OPTION.search(result.stderr)
        return _REMEDIES.get(found[1], "") if found else ""

    def find_command(self, name: str, user: str) -> list[str]:
        return ["bjobs", "-a", "-w"]  # all of the user: versions differ in whether -J finds arrays

    def parse_find(self, stdout: str, name: str) -> set[str]:
        return {job.submission for job, names, _ in listed_jobs(stdout) if name in names}

    # -- query -------------------------------------------------------------------------------------
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        # -w is the one format that all versions have and that truncates nothing. The id of an array
        # selects all of its members.
        return ["bjobs", "-a", "-w", *sorted({job.submission for job in ids})]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        return of_ids({job: status for job, _, status in listed_jobs(result.stdout)}, ids)

    def detail_command(self, listed: Mapping[JobId, JobStatus]) -> list[str] | None:
        pending = _with_state(listed, JobState.PENDING)
        one_of_each_array = {job.submission: job for job in pending}.values()
        jobs = [*one_of_each_array, *_with_state(listed, JobState.FAILED)][:_MOST_DETAILS]
        return ["bjobs", "-UF", *map(str, jobs)] if jobs else None

    def parse_detail(self, result: CommandResult, listed: Mapping[JobId, JobStatus]) -> Statuses:
        found, reasons = {}, {}
        pending = _with_state(listed, JobState.PENDING)
        for job, lines in records(result.stdout):
            if job in pending:
                reasons[job.submission] = pending_reason(lines)
            elif job in listed and (end := end_status(lines)):
                found[job] = replace(end, native=listed[job].native, node=listed[job].node)
        for job in pending:  # the same for all pending members of an array
            if reason := reasons.get(job.submission):
                found[job] = replace(listed[job], reason=reason)
        return found

    def accounting_command(self, ids: Sequence[JobId]) -> list[str] | None:
        return ["bhist", "-n", "10", "-l", *sorted({job.submission for job in ids})]

    def parse_accounting(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        found = {}
        for job, lines in records(result.stdout):
            if job in ids and (end := end_status(lines)):
                found[job] = end
        return found

    # -- cancel ------------------------------------------------------------------------------------
    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["bkill", *targets]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        if not indexes:
            return [submission]
        return [f"{submission}[{ranges(indexes)}]"]


def _is_about_all(result: CommandResult) -> bool:
    """Return whether bjobs has listed, or has not found, each job that it was asked for."""
    return names_ids(result.argv, f"{result.stdout}\n{result.stderr}")


def _with_state(listed: Mapping[JobId, JobStatus], state: JobState) -> list[JobId]:
    return [job for job, status in listed.items() if status.state is state]


def _requirement_values(lines: Iterable[str]) -> list[str]:
    """Return the values of all -R; none if another option stands in one of their lines."""
    try:
        words = shlex.split(" ".join(lines))
    except ValueError:  # reported when the directives are checked
        return []
    options, values = words[::2], words[1::2]
    is_pairs = len(options) == len(values) and set(options) == {"-R"}
    return values if is_pairs and "-R" not in values else []


def _selects_only(line: str) -> bool:
    """Return whether a -R has nothing but a condition on hosts."""
    values = _requirement_values([line])
    sections = [name for value in values for name in re.findall(r"(\w+)\[", value)]
    return bool(values) and all(map(_is_mergeable, values)) and {*sections} <= {"select"}


def _is_mergeable(requirement: str) -> bool:
    """Return whether it has sections only, or none; alternatives cannot be merged."""
    rest = re.sub(r"\w+\[[^\[\]]*\]", "", requirement).strip()
    return rest in ("", requirement.strip())


def _merged_requirement(requirements: Iterable[str]) -> str:
    sections: dict[str, list[str]] = {"select": []}  # LSF wants it first
    for requirement in requirements:
        found = re.findall(r"(\w+)\[([^\]]*)\]", requirement) or [("select", requirement)]
        for name, body in found:
            alternatives = name == "select" and "||" in body
            sections.setdefault(name, []).append(f"({body})" if alternatives else body)
    separators = {"select": " && ", "rusage": ":"}
    return " ".join(
        f"{name}[{separators.get(name, ' ').join(bodies)}]"
        for name, bodies in sections.items()
        if bodies
    )
