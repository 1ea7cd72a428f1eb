"""Grid Engine (Sun's, Son of, Univa, Altair): qsub, qstat, qacct, qdel."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar
from xml.etree import ElementTree

from ..injob.names import ranges
from . import words
from .base import Scheduler
from .formats import clock_seconds, integer, members
from .jobs import CommandResult, JobId, JobState, JobStatus, Reply, Statuses, of_ids
from .sge_inventory import GridEngineInventory

# -- the output of qstat and qacct -----------------------------------------------------------------
_FAILURES = {
    "18": JobState.NODE_FAIL,
    "19": JobState.NODE_FAIL,
    "21": JobState.NODE_FAIL,
    "24": JobState.PREEMPTED,
    "25": JobState.PREEMPTED,
}
"""States by qacct's `failed`; other values but 0 and 37 are FAILED. See sge_status(5)."""
_LIMIT_EXCEEDED = "37"
_KILLED = "100"

_BLOCKS = re.compile(r"^=+$", re.M)
_ERROR = re.compile(
    r"^error reason\s+(\d+):\s+(?:\S+ \S+ \[\d+:\d+\]: )?(?:error: )?(.+)", re.M
)  # task and text


def parse_xml(text: str) -> ElementTree.Element | None:
    """Return the root element, None if ``text`` is not complete."""
    try:
        return ElementTree.fromstring(text)  # noqa: S314 - of the site's own qstat
    except ElementTree.ParseError:
        return None


def listed_jobs(text: str) -> Iterator[tuple[JobId, dict[str, str]]]:
    """Yield the jobs of ``qstat -xml`` with their fields.

    The pending members of an array are one element with a range of tasks.
    """
    root = parse_xml(text)
    if root is None:
        return
    for item in root.iter("job_list"):
        fields = {child.tag: (child.text or "").strip() for child in item}
        number = fields.get("JB_job_number", "")
        tasks = members(fields.get("tasks", ""))
        for job in [JobId(number, task) for task in tasks] or [JobId(number)]:
            yield job, fields


def listed_status(fields: Mapping[str, str]) -> JobStatus:
    """Return the status of a job of ``qstat -xml``."""
    native = fields.get("state", "")
    state = _state(native)
    node = fields.get("queue_name", "").partition("@")[2]
    return JobStatus(state, native, _reason(native), node=node, stuck=state is JobState.FAILED)


def _state(native: str) -> JobState:
    """Return the state of letters such as qw, hRwq, dr, Rt, ts, Eqw: the gravest one decides."""
    letters = set(native)
    if "E" in letters:
        return JobState.FAILED
    if letters & set("sST"):
        return JobState.SUSPENDED
    if letters & set("rt"):
        return JobState.RUNNING
    if letters & set("qw"):
        return JobState.PENDING
    return JobState.UNKNOWN


def _reason(native: str) -> str:
    letters = set(native)
    if "E" in letters:
        return ""  # `qstat -j` has it
    if {"h", "q"} <= letters:
        return "held, or waiting for another job"
    if "q" in letters:
        return "waiting"
    if "d" in letters:
        return "being deleted"
    return ""


def parse_details(text: str) -> tuple[dict[JobId, str], dict[JobId, str]]:
    """Return why submissions wait, and the errors of jobs and members, from ``qstat -j``."""
    waits, errors = {}, {}
    for block in _BLOCKS.split(text):
        number = re.search(r"^job_number:\s+(\d+)", block, re.M)
        if number is None:
            continue
        if info := re.search(r"^scheduling info:((?:\s+.+\n?)+)", block, re.M):
            waits[JobId(number[1])] = _scheduling_reason(info[1].splitlines())
        is_array = re.search(r"^job-array tasks:", block, re.M) is not None
        for task, reason in _ERROR.findall(block):
            errors[JobId(number[1], int(task) if is_array else None)] = reason.strip()
    return waits, errors


def _scheduling_reason(lines: Sequence[str]) -> str:
    """Return the line about the job itself, rather than one about queues that do not fit."""
    ignored = re.compile("no messages available|turned off")
    reasons = []
    for line in lines:
        reason = line.strip()
        if not reason or ignored.search(reason):
            continue
        if not reason.startswith("queue instance"):
            return reason
        reasons.append(reason)
    return reasons[0] if reasons else ""


def accounted_jobs(text: str) -> Iterator[tuple[JobId, JobStatus]]:
    """Yield the jobs of ``qacct -j``; of one that was rescheduled, the last record counts."""
    for block in _BLOCKS.split(text)[1:]:
        fields = dict(re.findall(r"^(\S+)[ \t]+(.*\S)", block, re.M))
        task = integer(fields.get("taskid", ""))  # "undefined" for a lone job
        yield JobId(fields.get("jobnumber", ""), task), _accounted_status(fields)


def _accounted_status(fields: Mapping[str, str]) -> JobStatus:
    if not {"failed", "exit_status"} <= fields.keys():
        return JobStatus(JobState.UNKNOWN, reason="its record in qacct is incomplete")
    code, _, reason = (part.strip() for part in fields.get("failed", "").partition(":"))
    text, _, signal = fields.get("exit_status", "").partition(" ")
    exit_code = integer(text)
    node = fields.get("hostname", "")
    if code == "0":
        state = JobState.COMPLETED if exit_code == 0 else JobState.FAILED
        return JobStatus(state, "done", "", exit_code, node)
    if code == _KILLED:  # "assumedly after job": Grid Engine does not report by whom
        reason = f"ended by a signal {signal.strip()}".strip()
    if code == _LIMIT_EXCEEDED:
        state = _exceeded_limit(fields)
    else:
        state = _FAILURES.get(code, JobState.FAILED)
    return JobStatus(state, f"failed {code}", reason, exit_code, node)


def _exceeded_limit(fields: Mapping[str, str]) -> JobState:
    """Return which limit was enforced: `failed` is 37 for h_rt, h_cpu and h_vmem alike."""
    request = fields.get("category", "")
    walltime = re.search(r"\bh_rt=([\d:]+)", request)
    elapsed = re.match(r"[\d.]+", fields.get("ru_wallclock", ""))
    if not walltime or not elapsed or "h_vmem=" not in request:
        return JobState.TIMEOUT
    if float(elapsed[0]) < (clock_seconds(walltime[1]) or 0):
        return JobState.OUT_OF_MEMORY
    return JobState.TIMEOUT


# -- the class -------------------------------------------------------------------------------------
_AWAY = re.compile(
    r"unable to (send message to|contact) qmaster|commlib error|comunication_error|"
    r"failed receiving gdi request|qmaster is (down|not running)|message receive timeout",
    re.I,
)
_ALREADY_ENDED = re.compile(
    r'job "\d+" does not exist|has (registered|deleted)|already in deletion|^\s*$'
)

_NO_OPTION = re.compile(r"-soft|-hard|-\d+")


class GridEngine(Scheduler):
    """Grid Engine 6.2 and newer, all of its families."""

    name = "sge"
    inventory = GridEngineInventory
    warns_all_processes = True  # the script asks for them: -notify
    prefix = "#$"
    unsent = re.compile(r"unable to contact qmaster|connection refused", re.I)
    environment = (
        "SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_ARCH",
        "SGE_QMASTER_PORT", "SGE_EXECD_PORT",
    )  # fmt: skip
    request = ("-q {queue}", "-pe smp {cpus_per_job}", "-l gpu={gpus_per_job}")
    account_directive = "-P {account}"
    reservation_directive = "-ar {reservation}"
    hold = "-h"
    node_launcher = ("qrsh", "-inherit", "-nostdin", "-noshell", "{node}")
    mpi_command = ("mpiexec", "-n", "{ranks}", "-ppn", "{ranks_per_node}", "--bind-to", "none")
    managed = frozenset({
        "-N", "-o", "-e", "-j", "-t", "-S", "-cwd", "-wd", "-notify", "-terse", "-sync", "-b", "-i",
        "-l h_rt",
    })  # fmt: skip
    refused: ClassVar = {
        "-V": "it takes the whole environment of a shell into every job",
        "-l s_rt": "with a soft limit Grid Engine does not enforce the hard one any more",
        "-C": "the script's directives would not be read",
        "-clear": "the directives before it would not count",
        "-@": "gpujobs does not read the file; write its options",
        "-verify": "qsub would submit nothing",
        "-w v": "qsub would submit nothing",
        "-w p": "qsub would submit nothing",
        "-r": "a job that is started again has lost its dask scheduler",
        "-hold_jid": "a dependency on another cluster is the key `after`",
        "-hold_jid_ad": "a dependency on another cluster is the key `after`",
    }
    option_keys: ClassVar = {
        **dict.fromkeys(("-l gpu", "-l gpus", "-l ngpus"), words.number("gpus_per_job")),
        "-l h_rt": words.walltime(clock_seconds),
        "-pe": lambda value: words.number("cpus_per_job")(value.rpartition(" ")[2]),
        "-q": words.to("queue"),
        "-N": words.to("name"),
        "-ar": words.to("reservation"),
        **dict.fromkeys(("-o", "-e"), words.logs),
        "-j": words.only("y|yes", "the output and the errors of a job are in one log"),
        "-cwd": words.only("", ""),
        "-r": words.only("n|no", words.STARTED_AGAIN, "requeue: 1"),
    }
    name_rule = (
        r"[A-Za-z_][A-Za-z0-9_-]{0,63}",
        "up to 64 letters, digits, - and _, no digit or - first",
    )
    spans_nodes_hint = (
        "write a parallel environment that spans nodes in `request` of the site file; smp has all "
        "slots on one node"
    )
    repeatable = frozenset({"-ac", "-dc", "-sc", "-v"})
    memory_unit = ""  # bytes
    first_index = 1
    id_line = r"(\d+)(\.\d+-\d+:\d+)?"
    limit = ("qconf -sconf", r"^max_aj_tasks\s+(\d+)")  # 0: no limit
    index_variable = "SGE_TASK_ID"
    job_variable = "JOB_ID"
    job_mark = "SGE_JOB_SPOOL_DIR"
    queue_variable = "QUEUE"
    submit_folder = "SGE_O_WORKDIR"
    cancel_waiting = "bash -c gpujobs_qdel_waiting"  # of the template

    # -- the script --------------------------------------------------------------------------------
    def output(self, root: str, cluster: str, array: bool) -> str:
        # Relative to the working folder, root/cluster: Grid Engine would take some characters of
        # its name for a host or a variable.
        file = "sge-$JOB_ID.$TASK_ID.log" if array else "sge-$JOB_ID.log"
        return f"logs/{file}" if root else file

    def array(self, count: int) -> str:
        return f"-t 1-{count}"

    def options(self, line: str) -> set[str]:
        words = shlex.split(line)
        found = set()
        for word, value in zip(words, [*words[1:], ""]):
            if word == "-l":  # `-l a=1,b` requests two resources
                found |= {f"-l {item.split('=')[0].strip()}" for item in value.split(",")}
            elif word.startswith("--"):
                raise ValueError(f"qsub has no option {word}")
            elif word == "-w":  # `-w v` verifies a job instead of submitting it
                found.add(f"-w {value}" if value in ("v", "p") else "-w")
            elif word.startswith("-") and not _NO_OPTION.fullmatch(word):
                found.add(word)
        return found

    def option_values(self, group: Sequence[str]) -> list[words.OptionValue]:
        if group[0] != "-l":
            return [(group[0], " ".join(group[1:]))]
        parts = [part.strip().partition("=") for part in " ".join(group[1:]).split(",")]
        return [(f"-l {name}", text) for name, _, text in parts]

    def option_text(self, option: str, value: str) -> str:
        if option.startswith("-l "):
            return f"{option}={value}" if value else option
        return super().option_text(option, value)

    def spans_nodes(self, request: Sequence[str]) -> bool:
        on_one_node = any(re.match(r"-pe\s+smp\s", line) for line in request)
        return super().spans_nodes(request) and not on_one_node

    def avoid(self, nodes: Sequence[str]) -> str:
        return f"-l h='!({'|'.join(nodes)})'"

    # -- replies -----------------------------------------------------------------------------------
    def reply(self, result: CommandResult) -> Reply:
        # `qstat -j … -xml` exits with 0 then, and qdel writes it to its standard output.
        output = result.stdout[-2000:] + result.stderr
        if _AWAY.search(output) and "access denied" not in output:
            return Reply.NONE
        return super().reply(result)

    def is_complete(self, result: CommandResult) -> bool:
        return "-xml" not in result.argv or parse_xml(result.stdout) is not None

    # -- submit ------------------------------------------------------------------------------------
    def submit_command(self) -> list[str]:
        return ["qsub", "-terse"]

    def after_options(self, submissions: Sequence[str]) -> list[str]:
        return ["-hold_jid", ",".join(submissions)] if submissions else []

    def find_command(self, name: str, user: str) -> list[str]:
        return ["qstat", "-u", user, "-xml"]  # the plain table cuts names after ten letters

    def parse_find(self, stdout: str, name: str) -> set[str]:
        jobs = listed_jobs(stdout)
        return {job.submission for job, fields in jobs if fields.get("JB_name") == name}

    def estimate_command(self) -> list[str]:
        return ["qsub", "-w", "v"]

    def parse_estimate(self, result: CommandResult) -> str:
        if "found suitable queue" in result.stdout + result.stderr:
            return "Grid Engine reports no time; there are queues that can run it"
        return ""

    # -- query -------------------------------------------------------------------------------------
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        # All jobs of the user: `qstat -j` fails if one id has left the queue.
        return ["qstat", "-u", user, "-xml"]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        submissions = {job.submission for job in ids}
        jobs = listed_jobs(result.stdout)
        listed = {job: listed_status(row) for job, row in jobs if job.submission in submissions}
        return of_ids(listed, ids)

    def detail_command(self, listed: Mapping[JobId, JobStatus]) -> list[str] | None:
        unexplained = {job.submission for job, status in listed.items() if _is_unexplained(status)}
        submissions = ",".join(sorted(unexplained, key=int))
        return ["qstat", "-j", submissions] if submissions else None

    def parse_detail(self, result: CommandResult, listed: Mapping[JobId, JobStatus]) -> Statuses:
        waits, errors = parse_details(result.stdout)
        found = {}
        for job, status in listed.items():
            reason = waits.get(JobId(job.submission), "")  # of the whole array
            if status.stuck:
                reason = errors.get(job, "")
            if reason and _is_unexplained(status):
                found[job] = replace(status, reason=reason)
        return found

    def accounting_commands(self, ids: Sequence[JobId]) -> list[list[str]]:
        submissions = sorted({job.submission for job in ids}, key=int)
        return [["qacct", "-j", submission] for submission in submissions]

    def parse_accounting(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        found = dict(accounted_jobs(result.stdout))
        return {job: found[job] for job in ids if job in found}

    # -- cancel ------------------------------------------------------------------------------------
    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["qdel", *targets]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        if not indexes:
            return [submission]
        return [f"{submission}.{part}" for part in ranges(indexes).split(",")]

    def already_ended(self, result: CommandResult) -> bool:
        return all(_ALREADY_ENDED.search(line) for line in result.stdout.splitlines())


def _is_unexplained(status: JobStatus) -> bool:
    """Return whether `qstat -j` may report more: why a job is stuck, or pending but not held."""
    return status.stuck or (status.state is JobState.PENDING and "h" not in status.native)
