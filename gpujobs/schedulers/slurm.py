"""Slurm: sbatch, squeue, sacct, scancel."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import ClassVar

from ..injob.names import JOB_REQUEST, ranges
from . import words
from .base import Scheduler
from .formats import find_integer, integer, members, quoted_path
from .jobs import CommandResult, Granted, JobId, JobState, JobStatus, Statuses, of_ids
from .slurm_inventory import SlurmInventory

# -- words and messages in the output of Slurm's commands ------------------------------------------
STATES = {
    "PENDING": JobState.PENDING, "CONFIGURING": JobState.PENDING, "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING, "REQUEUE_FED": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING, "SPECIAL_EXIT": JobState.PENDING,
    "EXPEDITING": JobState.PENDING,  # requeued, from 25.11 on
    "RUNNING": JobState.RUNNING, "COMPLETING": JobState.RUNNING, "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING, "STAGE_OUT": JobState.RUNNING,
    "SUSPENDED": JobState.SUSPENDED, "STOPPED": JobState.SUSPENDED,
    "COMPLETED": JobState.COMPLETED,
    "FAILED": JobState.FAILED, "BOOT_FAIL": JobState.FAILED, "LAUNCH_FAILED": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED, "REVOKED": JobState.CANCELLED,
    "TIMEOUT": JobState.TIMEOUT, "DEADLINE": JobState.TIMEOUT,
    "PREEMPTED": JobState.PREEMPTED, "NODE_FAIL": JobState.NODE_FAIL,
    "OUT_OF_MEMORY": JobState.OUT_OF_MEMORY,
}  # fmt: skip
"""The state of a job by Slurm's word for it."""

_HELD_AFTER_FAILURE = {
    "launch failed requeued held": "a node could not start it",
    "launch failure limit exceeded requeued held": "nodes could not start it, again and again",
    "user env retrieval failed requeued held": "a node could not read its user's environment",
    "job requeued in special exit state": "it ended with an exit code for which Slurm holds jobs",
    "JobHoldMaxRequeue": "it was started too often",
}
"""Reasons of jobs that Slurm holds because they failed, until they are cancelled or released."""
_NEEDS_A_PERSON = {
    "JobHeldUser": "held by its user, until `scontrol release`",
    "JobHeldAdmin": "held by an administrator",
    "job requeued in held state": "held by `scontrol requeuehold`, until `scontrol release`",
    "DependencyNeverSatisfied": "the job that it waits for ended in another way than it asks for",
    "BadConstraints": "no node has all that it requests",
    "PartitionNodeLimit": "it requests more or fewer nodes than the partition allows now",
    "PartitionTimeLimit": "its walltime is longer than the partition allows now",
    "ReservationDeleted": "its reservation was deleted",
    "ReservationInvalid": "its reservation is over, or not for it",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
}
"""Reasons of jobs that do not start unless a person changes something, which may still happen."""


def waiting_status(native: str, reason: str, starts: str) -> JobStatus:
    """Return the status of a job that waits, by the state and the reason of squeue.

    The reason is `state_desc` of the job, which some releases write with underscores, or else a
    word of Slurm's job_state_reason.c.
    """
    text = reason.replace("_", " ")
    if native == "SPECIAL_EXIT":
        text = "job requeued in special exit state"
    if text in _HELD_AFTER_FAILURE or text.endswith("requeued held"):
        words = _HELD_AFTER_FAILURE.get(text, "Slurm holds it after a failure")
        return JobStatus(JobState.FAILED, native, f"{text}: {words}", stuck=True)
    if words := _NEEDS_A_PERSON.get(text, ""):
        return JobStatus(JobState.PENDING, native, f"{text}: {words}")
    return JobStatus(JobState.PENDING, native, reason, starts=starts)


def is_listing(stdout: str, columns: str, names: Sequence[str]) -> bool:
    """Return whether squeue has written a whole list of jobs with these ``columns``.

    It has a header and ends with the end of a line. Its rows begin with a number and have all
    columns. ``names``: those of the jobs that were asked for.
    """
    *lines, after = stdout.split("\n")
    rows = [line for line in lines if not line.startswith("CLUSTER: ")]
    if after or not rows:
        return False
    header, *jobs = rows
    bars = columns.count("|")
    if header.count("|") != bars or not header.rstrip().endswith("|NAME"):
        return False
    whole = (job.count("|") >= bars and re.match(r"\d+\|", job) for job in jobs)
    return all(whole) and not any(_is_joined(job, names) for job in jobs)


def _is_joined(row: str, names: Sequence[str]) -> bool:
    """Return whether another row follows in the same line: a job's name is the last column."""
    before = row.rpartition("|")[0]
    return any(f"|{name}" in before for name in names)


# -- the class -------------------------------------------------------------------------------------
_LONG_OPTIONS = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "G": "gpus", "H": "hold", "i": "input",
    "J": "job-name", "k": "no-kill", "L": "licenses", "M": "clusters", "m": "distribution",
    "N": "nodes", "n": "ntasks", "o": "output", "O": "overcommit", "p": "partition", "q": "qos",
    "s": "oversubscribe", "t": "time", "W": "wait", "w": "nodelist", "x": "exclude",
    "F": "nodefile", "B": "extra-node-info", "S": "core-spec", "Q": "quiet", "v": "verbose",
    "I": "immediate", "u": "usage", "h": "help", "V": "version",
}  # fmt: skip
"""The long spelling of short options."""
_COMPLETE = {*_LONG_OPTIONS.values(), "mem", "export"}
"""Options that are no abbreviation, although others start with them: gpus-per-node."""

_ACCOUNTING = "JobID,State,ExitCode,NodeList"
"""Columns of sacct."""

_PARTITIONS = re.compile(r"^#SBATCH\s+(?:--part[a-z]*[= ]|-p ?)(\S+,\S+)\s*$", re.M)
"""The directive of a job that waits in several partitions."""

_GPUS_OF_TASK = r"gres/gpu(?::[^:=,]+)?[:=](\d+)"
"""Of ``gres/gpu:4``, ``gres/gpu=4`` and ``gres/gpu:a100:4``.

From 23.11 on, ``--gpus-per-task`` is a part of ``--tres-per-task``.
"""

_FAMILIES = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"gpus", "gpus-per-node", "gpus-per-socket", "gres/gpu"},
)
"""Each option of a family overrides the others; gres/gpu is ``--gres=gpu``."""


def _gres(value: str) -> words.Settings | None:
    """Read ``gpu:a100:4,lscratch:100``, of which only the GPUs are a key."""
    found = [part.removeprefix("gres/") for part in value.split(",")]
    of_gpus = [part for part in found if part.split(":")[0] == "gpu"]
    if not of_gpus:
        return None
    settings = words.gpus(",".join(part[len("gpu:") :] or "1" for part in of_gpus))
    others = ",".join(part for part in found if part not in of_gpus)
    return settings and {**settings, **({words.REST: others} if others else {})}


def _others(line: str) -> list[str]:
    """Return the generic resources of a line that requests only these, and no GPUs; else []."""
    try:
        words_of_line = shlex.split(line)
    except ValueError:  # which `options` reports
        return []
    if words_of_line[:1] == ["--gres"]:
        words_of_line = [f"--gres={' '.join(words_of_line[1:])}"]
    found = re.fullmatch(r"--gres=([\w:.,=/-]+)", " ".join(words_of_line))
    parts = found[1].split(",") if found else []
    names = {_gres_name(part) for part in parts}
    return [] if names & {"gpu", "shard", "mps", "none", "help", ""} else parts


def _gres_name(part: str) -> str:
    return re.split("[:=]", part.removeprefix("gres/").removeprefix("gres:"))[0]


def _memory(value: str) -> words.Settings | None:
    return words.memory(f"{value}M" if value.isdecimal() else value)


class Slurm(Scheduler):
    """Slurm 20.11 and newer."""

    name = "slurm"
    inventory = SlurmInventory
    prefix = "#SBATCH"
    environment = ("SLURM_CONF", "SLURM_CLUSTERS")
    fixed_environment = MappingProxyType({"SLURM_BITSTR_LEN": "0"})  # squeue cuts no list
    request = (
        "--partition={queue}",
        "--nodes={nodes}",
        "--ntasks-per-node=1",
        "--cpus-per-task={cpus_per_node}",
        "--gres=gpu:{gpu_type}:{gpus_per_node}",
        "--mem={memory_per_node:MB}M",
    )
    account_directive = "--account={account}"
    reservation_directive = "--reservation={reservation}"
    hold = "--hold"
    visible_devices = "scheduler"
    node_launcher = (
        "srun", "--export=ALL", "--overlap", "--nodes={nodes}", "--ntasks={nodes}",
        "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit={kill}", "--cpu-bind=none",
        "--mpi=none",
    )  # fmt: skip
    mpi_command = (
        "srun", "--export=ALL", "--kill-on-bad-exit=1", "--overcommit", "--cpu-bind=none",
        "--ntasks={ranks}", "--ntasks-per-node={ranks_per_node}",
    )  # fmt: skip
    managed = frozenset({
        "job-name", "output", "error", "time", "array", "signal", "open-mode", "chdir", "wait",
        "wrap",
    })  # fmt: skip
    refused: ClassVar = {
        "gpus-per-task": "it binds GPUs to tasks, which cuts NVLink between workers",
        "gpu-bind": "it hides the job's GPUs from each other, which cuts NVLink between workers",
        "tres-bind": "it hides the job's GPUs from each other, which cuts NVLink between workers",
        "tres-per-task": "it binds GPUs to tasks, which cuts NVLink between workers;"
        " CPUs are requested with --cpus-per-task",
        "ntasks": "a job has one task per node, which sees all of the node's GPUs",
        "dependency": "a dependency on another cluster is the key `after`",
        "clusters": "set `cluster` in the site file, so that status and cancel use the same one",
        "export": "it selects the variables that reach the job: name them in `env`",
        "export-file": "it selects the variables that reach the job: name them in `env`",
        "requeue": "a job that is started again has lost its dask scheduler; see the key `requeue`",
        "test-only": "sbatch would submit nothing",
        "wrap": "sbatch would run this command instead of the script",
    }
    option_keys: ClassVar = {
        **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task"), words.gpus),
        "gres": _gres,
        "cpus-per-task": words.number("cpus_per_job"),
        "mem": _memory,
        "time": words.walltime(words.slurm_seconds),
        "partition": words.to("queue"),
        "account": words.to("account"),
        "job-name": words.to("name"),
        "reservation": words.to("reservation"),
        "nodes": words.one_node,
        **dict.fromkeys(("ntasks", "ntasks-per-node"), words.one_task),
        **dict.fromkeys(("output", "error"), words.logs),
    }
    memory_unit = "M"
    largest_array = 1000  # MaxArraySize is 1001 unless the site raised it
    # A wrapper may drop --parsable; users may have other clusters in SLURM_CLUSTERS.
    id_line = r"(?:Submitted batch job )?(\d+)(;.*| on cluster \S+)?"
    index_variable = "SLURM_ARRAY_TASK_ID"
    job_variable = "SLURM_JOB_ID"
    queue_separator = ","
    queue_variable = "SLURM_JOB_PARTITION"
    submit_folder = "SLURM_SUBMIT_DIR"
    enter = (
        "srun", "--export=ALL", "--overlap", "--preserve-env", "--nodes=1", "--ntasks=1",
        "--cpu-bind=none", "--mpi=none", "--disable-status",
    )  # fmt: skip
    step_gpus = ("--gres=gpu:{gpus_per_node}",)
    job_request = JOB_REQUEST
    after = ("--dependency=afterany:{ids}",)
    cancel_waiting = "scancel --state=PENDING"
    multi_cluster = True
    away = re.compile(
        r"unable to contact slurm controller|socket timed out|zero bytes were transmitted|"
        r"connection (refused|timed out|reset)|communication (connection|shutdown) failure|"
        r"temporarily (unable|disabled)|resource temporarily unavailable|"
        r"unable to establish (controller|control machine)|in standby mode|slurm backup controller|"
        r"authentication error|unable to create job record",
        re.I,
    )
    unsent = re.compile(
        r"connect failure|munge encode failed|job queue full|unable to accept job", re.I
    )
    host_faults: ClassVar = {
        "munge (en|de)code failed: (failed to|socket)": "munged does not run on this host"
    }

    # -- the script --------------------------------------------------------------------------------
    def walltime(self, seconds: int) -> str:
        days, rest = divmod(seconds, 86400)
        time = super().walltime(rest)
        return f"{days}-{time}" if days else time

    def output(self, root: str, cluster: str, array: bool) -> str:
        # %x is the job's name, which is the cluster's id.
        file = "slurm-%A_%a.log" if array else "slurm-%j.log"
        path = self.log_path(root.replace("%", "%%"), "%x", file)
        return quoted_path(path, plain=r"\w./%@:+,=-")

    def array(self, count: int) -> str:
        return f"--array=0-{count - 1}"

    def joined(self, lines: Sequence[str]) -> list[str]:
        # Of two --gres, sbatch takes the last one.
        others = [line for line in lines if _others(line)]
        parts = [part for line in others for part in _others(line)]
        rest = [line for line in lines if line not in others]
        if not parts:
            return rest
        for number, line in enumerate(rest):
            if re.match(r"--gres=[^\s\"']+$", line):
                rest[number] = ",".join([line, *parts])
                return rest
        return [*rest, f"--gres={','.join(parts)}"]

    def options(self, line: str) -> set[str]:
        if parts := _others(line):  # `joined` adds them to the GPUs
            return {f"gres/{_gres_name(part)}" for part in parts}
        words = shlex.split(line)
        found = set()
        for word, following in zip(words, [*words[1:], ""]):
            if re.fullmatch(r"--gpu-bind=(verbose,)?none|--export=NONE", word):
                continue  # no binding; the job sets all variables that it needs
            if word.startswith("--"):
                name, _, value = word[2:].partition("=")
                found.add(name.lower())
                if name == "gres":
                    found |= {
                        f"gres/{_gres_name(part)}" for part in (value or following).split(",")
                    }
            elif word.startswith("-") and len(word) > 1:
                found.add(_long_option(word[1]))
            if not (_takes_value(word) or following.startswith("-") or not following):
                raise ValueError(f"{following} is not an option")
        return found

    def option_values(self, group: Sequence[str]) -> list[words.OptionValue]:
        word, *values = group
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.lower()
            known = (full for full in self.option_keys if _abbreviates(name, full))
            name = name if name in self.option_keys else next(known, name)
        else:
            name, equals, value = _LONG_OPTIONS.get(word[1], word), word[2:], word[2:]
        return [(name, " ".join([*([value] if equals else []), *values]))]

    def option_text(self, option: str, value: str) -> str:
        if option.startswith("-"):
            return super().option_text(option, value)
        return f"--{option}={shlex.quote(value)}" if value else f"--{option}"

    def _first_of(self, options: Set[str], names: Iterable[str]) -> str:
        matches = (name for name in names if any(_abbreviates(option, name) for option in options))
        return min(matches, default="")

    def clash(self, line: str, taken: Iterable[str]) -> str:
        options = self.options(line)
        for family in _FAMILIES:
            if any(_abbreviates(option, name) for option in options for name in family):
                options |= family
        return self._first_of(options, taken)

    def step_request(self, lines: Sequence[str]) -> tuple[str, ...]:
        # A step of a job whose GPUs are counted together would get one of the first node's.
        together = any("gpus" in self.options(line) for line in lines)
        return self.step_gpus if together else ()

    @classmethod
    def granted(cls, environ: Mapping[str, str]) -> Granted:
        def number(name: str) -> int:
            return find_integer(r"(\d+)$", environ.get(f"SLURM_{name}", "")) or 0  # 4, or a100:4

        nodes = number("JOB_NUM_NODES") or 1
        of_task = find_integer(_GPUS_OF_TASK, environ.get("SLURM_TRES_PER_TASK", "")) or 0
        of_task = number("GPUS_PER_TASK") or of_task
        gpus = number("GPUS") or of_task * number("NTASKS")
        gpus_per_node = number("GPUS_PER_NODE") or gpus // nodes
        return Granted(
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            memory_per_node=number("MEM_PER_NODE")
            or number("MEM_PER_CPU") * number("CPUS_ON_NODE")
            or number("MEM_PER_GPU") * gpus_per_node,
            end=number("JOB_END_TIME"),
            on_node="SLURMD_NODENAME" in environ,
        )

    def avoid(self, nodes: Sequence[str]) -> str:
        return f"--exclude={','.join(nodes)}"

    # -- replies -----------------------------------------------------------------------------------
    def is_complete(self, result: CommandResult) -> bool:
        columns = result.argv[-1]
        if columns == _ACCOUNTING:
            return bool(re.fullmatch(r"([^|\n]+(\|[^|\n]*){3}\n)*", result.stdout))
        if not columns.startswith("%"):  # not of `_squeue`
            return True
        # A user whom the system cannot resolve has no jobs, for squeue; it exits with 0.
        known = "invalid user" not in result.stderr.lower()
        option = "--name="
        words = (word for word in result.argv if word.startswith(option))
        names = [name for name in next(words, option).removeprefix(option).split(",") if name]
        return known and is_listing(result.stdout, columns, names)

    # -- submit ------------------------------------------------------------------------------------
    def submit_command(self) -> list[str]:
        return ["sbatch", "--parsable", *self._clusters()]

    def find_command(self, name: str, user: str) -> list[str]:
        return self._squeue(user, name, "%F|%j")

    def parse_find(self, stdout: str, name: str) -> set[str]:
        rows = [line.strip().partition("|") for line in stdout.splitlines()]
        return {number for number, _, found in rows if found == name and number.isdigit()}

    def limit_command(self) -> list[str]:
        return ["scontrol", "show", "config", *self._clusters()]

    def parse_limit(self, stdout: str) -> int | None:
        size = find_integer(r"MaxArraySize\s*=\s*(\d+)", stdout)
        return None if size is None else max(1, size - 1)

    def estimate_command(self) -> list[str]:
        return ["sbatch", "--test-only", *self._clusters()]

    def queue_by_queue(self, script: str) -> list[str]:
        # slurmctld before 25.11.7 and 26.05.2 may crash at a list with an empty partition.
        found = _PARTITIONS.search(script)
        if not found:
            return [script]
        before, after = script[: found.start(1)], script[found.end(1) :]
        return [f"{before}{name}{after}" for name in found[1].split(",")]

    def parse_estimate(self, result: CommandResult) -> str:
        found = re.search(r"to start at (\S+)", result.stderr)
        return found[1] if found else ""

    # -- query -------------------------------------------------------------------------------------
    def status_command(self, ids: Sequence[JobId], names: Sequence[str], user: str) -> list[str]:
        # By name: `squeue -j` fails if an id has left the queue. An array's pending jobs: one line.
        return self._squeue(user, ",".join(names), "%F|%K|%T|%N|%S|%r|%j")

    def parse_status(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        found = {}
        for line in result.stdout.splitlines():
            fields = line.strip().split("|", 6)
            if len(fields) < 7 or not fields[0].isdigit():
                continue
            number, indexes, native, node, starts, reason, _ = fields
            if starts == "N/A" or native != "PENDING":
                starts = ""
            if reason == "None" or native == "CANCELLED":  # then it is why the job had waited
                reason = ""
            status = JobStatus(_state(native), native, reason, node=node)
            if status.state is JobState.PENDING:
                status = waiting_status(native, reason, starts)
            found.update(dict.fromkeys(_jobs(number, indexes), status))
        return of_ids(found, ids)

    def accounting_command(self, ids: Sequence[JobId]) -> list[str] | None:
        numbers = ",".join(sorted({job.submission for job in ids}))
        return ["sacct", *self._clusters(), "-n", "-P", "-X", "-j", numbers, "-o", _ACCOUNTING]

    def parse_accounting(self, result: CommandResult, ids: Sequence[JobId]) -> Statuses:
        found = {}
        for line in result.stdout.splitlines():
            fields = line.strip().split("|")
            id_ = re.fullmatch(r"(\d+)(?:_(.+))?", fields[0])
            if len(fields) < 4 or not id_:
                continue
            native, _, rest = fields[1].partition(" ")  # "CANCELLED by 1000"
            user = find_integer(r"^by (\d+)$", rest)
            reason = rest if user is None else ""
            node = fields[3].replace("None assigned", "")
            status = JobStatus(
                _state(native), native, reason, _exit_code(fields[2]), node, cancelled_by=user
            )
            found.update(dict.fromkeys(_jobs(id_[1], id_[2] or ""), status))
        return of_ids(found, ids)

    # -- cancel ------------------------------------------------------------------------------------
    def cancel_command(self, targets: Sequence[str]) -> list[str]:
        return ["scancel", *self._clusters(), *targets]

    def target(self, submission: str, indexes: Sequence[int] = ()) -> list[str]:
        if not indexes:
            return [submission]
        return [f"{submission}_[{ranges(indexes)}]"]

    def show_id(self, job: JobId) -> str:
        return job.submission if job.index is None else f"{job.submission}_{job.index}"

    def already_ended(self, result: CommandResult) -> bool:
        return bool(re.search("Invalid job id|already completing or completed", result.stderr))

    def _clusters(self) -> list[str]:
        return [f"--clusters={self.cluster}"] if self.cluster else []

    def _squeue(self, user: str, names: str, columns: str) -> list[str]:
        # With its header, without which it is no answer. Not --user: the name may be that of
        # $LOGNAME. squeue refuses --me for a user without a name; the name of a cluster is unique
        # enough then.
        me = [] if user.isdigit() else ["--me"]
        return ["squeue", *self._clusters(), *me, "-t", "all", f"--name={names}", "-o", columns]


def _takes_value(word: str) -> bool:
    """Return whether the word after an option can be its value, as in ``-C haswell``."""
    if word.startswith("--"):
        return "=" not in word
    return len(word) == 2 and word.startswith("-")


def _long_option(letter: str) -> str:
    if letter not in _LONG_OPTIONS:
        raise ValueError(f"sbatch has no option -{letter}")
    return _LONG_OPTIONS[letter]


def _abbreviates(option: str, name: str) -> bool:
    """Return whether sbatch takes ``option`` for ``name``: --part=x is --partition=x."""
    return option == name or (option not in _COMPLETE and name.startswith(option))


def _state(native: str) -> JobState:
    return STATES.get(native.split(" ")[0].rstrip("+"), JobState.UNKNOWN)


def _jobs(number: str, indexes: str) -> list[JobId]:
    """Return the jobs of one line: a lone job, or the members of an array."""
    return [JobId(number, index) for index in members(indexes)] or [JobId(number)]


def _exit_code(text: str) -> int | None:
    """Return the exit code of sacct's ``CODE:SIGNAL``; a signal is 128 and its number.

    Releases before 25.11 subtract 128 from exit codes above it: 137 is 9 there.
    """
    code, signal = map(integer, f"{text}:".split(":")[:2])
    return 128 + signal if code == 0 and signal else code
