"""Grid Engine (Sun's, Son of, Univa, Altair): qsub, qstat, qacct, qdel."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar
from xml.etree import ElementTree

from .base import CommandResult, JobId, JobState, JobStatus, Scheduler, members, ranges

_AWAY = re.compile(
    r"unable to (send message to|contact) qmaster|commlib error|comunication_error|failed receiving gdi request|"
    r"qmaster is (down|not running)|message receive timeout",
    re.I,
)
_GONE = re.compile(r'job "\d+" does not exist|has (registered|deleted)|already in deletion|^\s*$')

# What `failed` of qacct means where it is neither 0 nor one of these is FAILED; see sge_status(5).
_FAILED = {
    "18": JobState.NODE_FAIL, "19": JobState.NODE_FAIL, "21": JobState.NODE_FAIL, "24": JobState.PREEMPTED,
    "25": JobState.PREEMPTED,
}  # fmt: skip


class GridEngine(Scheduler):
    """Grid Engine 6.2 and newer, all of its families."""

    name = "sge"
    prefix = "#$"
    request = ("-q {queue}", "-pe smp {cpus_per_job}", "-l gpu={gpus_per_job}")
    cpu_request = ("-q {queue}", "-pe smp {cpus_per_job}")
    account_directive = "-P {account}"
    mpi_command = ("mpiexec", "-n", "{ranks}", "-ppn", "{ranks_per_node}")
    managed = frozenset(
        {
            "-N",
            "-o",
            "-e",
            "-j",
            "-t",
            "-S",
            "-cwd",
            "-wd",
            "-notify",
            "-terse",
            "-sync",
            "-b",
            "-i",
            "-l h_rt",
        }
    )
    refused: ClassVar = {
        "-V": "it takes the whole environment of a shell into every job",
        "-l s_rt": "with a soft limit Grid Engine does not enforce the hard one any more",
        "-C": "the script's directives would not be read",
        "-clear": "the directives before it would not count",
        "-@": "nobody could see what the file asks for; write its options",
        "-hold_jid": "a dependency of one job of an array holds all of them",
        "-hold_jid_ad": "a dependency of one job of an array holds all of them",
    }
    name_rule = (
        r"[A-Za-z_][A-Za-z0-9_-]{0,63}",
        "up to 64 letters, digits, - and _, no digit or - first",
    )
    first_index = 1
    index_variable = "SGE_TASK_ID"
    job_variable = "JOB_ID"
    cancel_waiting = "bash -c gpujobs_qdel_waiting"  # of the template

    def output(self, root: str, cluster: str, array: bool) -> str:
        # In the working folder, which is root/cluster: no character of its name can be taken for a host or variable.
        return "logs/sge-$JOB_ID" + (".$TASK_ID.log" if array else ".log")

    def array(self, count: int) -> str:
        return f"-t 1-{count}"

    def options(self, line: str) -> set[str]:
        found, words = set(), shlex.split(line)
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word in ("-l", "-soft", "-hard"):  # `-l a=1,b` asks for two things
                found |= {
                    f"-l {item.split('=')[0].strip()}"
                    for item in following.split(",")
                    if word == "-l"
                }
            elif word.startswith("-") and not re.fullmatch(r"-\d+", word):
                found.add(word)
        return found

    # -- submit ---------------------------------------------------------------------------------------------
    def submit_command(self) -> list[str]:
        return ["qsub", "-terse"]

    def parse_submit(self, stdout: str) -> str | None:
        for line in reversed(stdout.strip().splitlines()):
            if found := re.fullmatch(r"(\d+)(\.\d+-\d+:\d+)?", line.strip()):
                return found[1]
        return None

    def unreachable(self, result: CommandResult) -> bool:
        # `qstat -j … -xml` says so with exit code 0; qdel says so on its standard output.
        said = result.stdout[-2000:] + result.stderr
        return result.exit_code is None or (
            _AWAY.search(said) is not None and "access denied" not in said
        )

    def answered(self, result: CommandResult) -> bool:
        return result.exit_code == 0 and _xml(result.stdout) is not None

    def find_command(self, name: str, user: str) -> list[str]:
        return ["qstat", "-u", user, "-xml"]  # the plain table cuts names after ten letters

    def parse_find(self, stdout: str, name: str) -> set[str]:
        return {job.submission for job, fields in _listed(stdout) if fields.get("JB_name") == name}

    def limit_command(self) -> list[str]:
        return ["qconf", "-sconf"]

    def parse_limit(self, stdout: str) -> int | None:
        found = re.search(r"^max_aj_tasks\s+(\d+)", stdout, re.M)
        return int(found[1]) or None if found else None

    def estimate_command(self) -> list[str]:
        return ["qsub", "-w", "v"]

    def parse_estimate(self, result: CommandResult) -> str:
        if "found suitable queue" in result.stdout + result.stderr:
            return "Grid Engine does not say when; there are queues that can run it"
        return result.message

    # -- watch ----------------------------------------------------------------------------------------------
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        # All jobs of the user: a departed id makes `qstat -j` fail. What waits in an array is one element.
        return ["qstat", "-u", user, "-xml"]

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> dict[JobId, JobStatus]:
        wanted, found = set(ids), {}
        for job, fields in _listed(result.stdout):
            if job in wanted:
                native = fields.get("state", "")
                state = _state(native)
                node = fields.get("queue_name", "").partition("@")[2]
                found[job] = JobStatus(
                    state, native, _reason(native), node=node, stuck=state is JobState.FAILED
                )
        return found

    def detail_command(self, listed: Mapping[JobId, JobStatus]) -> list[str] | None:
        asked = sorted(
            {job.submission for job, status in listed.items() if _unexplained(status)}, key=int
        )
        return ["qstat", "-j", ",".join(asked)] if asked else None

    def parse_detail(
        self, result: CommandResult, listed: Mapping[JobId, JobStatus]
    ) -> dict[JobId, JobStatus]:
        waits, errors = _why(result.stdout)
        found = {}
        for job, status in listed.items():
            why = (waits if status.state is JobState.PENDING else errors).get(
                job if status.stuck else JobId(job.submission), ""
            )
            if why and _unexplained(status):
                found[job] = replace(status, reason=why)
        return found

    def accounting_commands(self, ids: Sequence[JobId]) -> list[list[str]]:
        return [
            ["qacct", "-j", submission]
            for submission in sorted({job.submission for job in ids}, key=int)
        ]

    def parse_accounting(
        self, result: CommandResult, ids: Sequence[JobId]
    ) -> dict[JobId, JobStatus]:
        wanted, found = set(ids), {}
        for block in re.split(r"^=+$", result.stdout, flags=re.M)[1:]:
            pairs = (line.split(None, 1) for line in block.splitlines())
            fields = {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}
            task = fields.get("taskid", "undefined")
            job = JobId(fields.get("jobnumber", ""), int(task) if task.isdigit() else None)
            if job in wanted:
                found[job] = _accounted(
                    fields
                )  # the last one counts: a job that was rescheduled has several
        return found

    # -- cancel ---------------------------------------------------------------------------------------------
    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["qdel", *targets]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        return (
            [f"{submission}.{part}" for part in ranges(indexes).split(",")]
            if indexes
            else [submission]
        )

    def already_gone(self, result: CommandResult) -> bool:
        return all(_GONE.search(line) for line in result.stdout.splitlines())


def _xml(text: str) -> ElementTree.Element | None:
    try:
        return ElementTree.fromstring(text)  # noqa: S314 - of the site's own qstat
    except ElementTree.ParseError:
        return None


def _listed(text: str) -> Iterator[tuple[JobId, dict[str, str]]]:
    """Yield the jobs of `qstat -xml` with their fields; a waiting array is one element with a range of tasks."""
    root = _xml(text)
    for item in root.iter("job_list") if root is not None else ():
        fields = {child.tag: (child.text or "").strip() for child in item}
        number, tasks = fields.get("JB_job_number", ""), members(fields.get("tasks", ""))
        for job in [JobId(number, task) for task in tasks] or [JobId(number)]:
            yield job, fields


def _state(native: str) -> JobState:
    """Return the state of letters such as qw, hRwq, dr, Rt, ts, Eqw: the gravest letter counts."""
    if "E" in native:
        return JobState.FAILED
    if set(native) & set("sST"):
        return JobState.SUSPENDED
    if set(native) & set("rt"):
        return JobState.RUNNING
    return JobState.PENDING if set(native) & set("qw") else JobState.UNKNOWN


def _reason(native: str) -> str:
    if "E" in native:
        return ""  # qstat -j says why
    if "q" in native:
        return "held, or waiting for another job" if "h" in native else "waiting"
    return "being deleted" if "d" in native else ""


def _unexplained(status: JobStatus) -> bool:
    return status.stuck or (status.state is JobState.PENDING and "h" not in status.native)


def _why(text: str) -> tuple[dict[JobId, str], dict[JobId, str]]:
    """Return of `qstat -j` why jobs wait, and the errors of jobs and of members of arrays."""
    waits, errors = {}, {}
    for block in re.split(r"^=+$", text, flags=re.M):
        number = re.search(r"^job_number:\s+(\d+)", block, re.M)
        if number is None:
            continue
        array = re.search(r"^job-array tasks:", block, re.M) is not None
        if info := re.search(r"^scheduling info:((?:\s+.+\n?)+)", block, re.M):
            waits[JobId(number[1])] = _wait(info[1].splitlines())
        for task, why in re.findall(
            r"^error reason\s+(\d+):\s+(?:\S+ \S+ \[\d+:\d+\]: )?(?:error: )?(.+)", block, re.M
        ):
            errors[JobId(number[1], int(task) if array else None)] = why.strip()
    return waits, errors


def _wait(lines: Sequence[str]) -> str:
    """Return the line of the scheduling info that is about the job, rather than about queues that it did not want."""
    said = [
        line.strip()
        for line in lines
        if line.strip() and not re.search("no messages available|turned off", line)
    ]
    return next(
        (line for line in said if not line.startswith("queue instance")), said[0] if said else ""
    )


def _seconds(text: str) -> int:
    total = 0
    for part in text.split(":"):
        total = 60 * total + int(part or 0)
    return total


def _accounted(fields: Mapping[str, str]) -> JobStatus:
    failed, _, text = fields.get("failed", "").partition(":")
    failed, reason = failed.strip(), text.strip()
    status, _, signal = fields.get("exit_status", "").partition(" ")
    exit_code = int(status) if status.isdigit() else None
    if failed == "0":
        state, reason = (JobState.COMPLETED if exit_code == 0 else JobState.FAILED), ""
    elif failed == "37":
        state = _limit(fields)
    else:
        state = _FAILED.get(failed, JobState.FAILED)
    if failed == "100":  # "assumedly after job": it was killed, by whom cannot be told
        reason = f"ended by a signal {signal.strip()}".strip()
    native = f"failed {failed}" if failed != "0" else "done"
    return JobStatus(state, native, reason, exit_code, fields.get("hostname", ""))


def _limit(fields: Mapping[str, str]) -> JobState:
    """Tell which limit was enforced: `failed` is 37 for h_rt, h_cpu and h_vmem alike."""
    asked = fields.get("category", "")
    walltime = re.search(r"\bh_rt=([\d:]+)", asked)
    lasted = re.match(r"[\d.]+", fields.get("ru_wallclock", ""))
    early = walltime is not None and lasted is not None and float(lasted[0]) < _seconds(walltime[1])
    return JobState.OUT_OF_MEMORY if early and "h_vmem=" in asked else JobState.TIMEOUT
