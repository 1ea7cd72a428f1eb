"""The command line of `injob.pyz`. Each option is a field of a dataclass; times are in seconds."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .names import WorkerSize


def _option(help_text: str, **argument: Any) -> Any:
    """Return a field that is an option; ``argument`` goes to argparse, with ``default``."""
    if argument.get("action") == "store_true":
        argument["default"] = False
    metadata = {"argument": {"help": help_text, **argument}}
    return field(default=argument.get("default", dataclasses.MISSING), metadata=metadata)


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


@dataclass(frozen=True)
class SuperviseOptions:
    """Options of ``supervise``: one job."""

    folder: str = _option("the cluster's folder")
    job: int = _option("number of this job", type=int)
    started: float = _option("when the job started, since the epoch", type=float, default=0.0)
    walltime: int = _option("0: none", type=int, default=0)
    warning: int = _option("time before the walltime at which to stop", type=int, default=60)
    gpus: int = _option("GPUs of this job", type=int, default=0)
    visible_devices: str = _option("where they are listed", default="scheduler")
    cuda: str = _option("CUDA version that the driver must support", default="")
    each_gpu: bool = _option("start one plain worker per GPU", action="store_true")
    gpus_per_worker: int = _option("GPUs of each worker", type=int, default=1)
    workers_per_gpu: int = _option("workers that share a GPU", type=int, default=1)
    mps: bool = _option("they do so through CUDA's MPS", action="store_true")
    mps_thread_percentage: int = _option("of each of them; 0: no limit", type=int, default=0)
    ranks: int = _option("nodes or MPI ranks that have workers", type=int, default=0)
    nodes: int = _option("nodes of this job", type=int, default=1)
    ranks_per_node: int = _option("ranks that the launcher starts on each", type=int, default=1)
    rank_env: tuple[str, ...] = _option("variables of the profile", type=_words, default=())
    keep_going: bool = _option("the others go on if a node is lost", action="store_true")
    run_on: str = _option("ranks: run is in them", choices=["head", "ranks"], default="head")
    schemes: tuple[str, ...] = _option("protocols, best first", type=_words, default=("tls",))
    single_job: bool = _option("no other job of the cluster on its nodes", action="store_true")
    interface: str | None = _option("network interface", default=None)
    group: str = _option("group of this job's workers", default="")
    start_workers: int = _option("run starts with this many workers", type=int, default=1)
    start_groups: tuple[str, ...] = _option(
        "GROUP=N,…: and with so many of groups", type=_words, default=()
    )
    start_timeout: int = _option("limit for processes to register", type=int, default=300)
    task_time: int = _option("the longest task, as the user states", type=int, default=0)
    ask_outside: bool = _option("the batch script runs queries", action="store_true")
    cancel: str = _option("command that cancels waiting jobs; ids are appended", default="")
    attempt: int = _option("which start of the cluster this is", type=int, default=1)
    attempts: int = _option("how many there are", type=int, default=1)
    walltime_exit: int = _option("run asks for the next attempt", type=int, default=0)
    end_after: str = _option("when a cluster without work ends, see demand.py", default="")
    lease: int = _option("limit for the owner to renew its lease", type=int, default=0)
    batch_script: str = _option("its process, as PID@NAMESPACE", default="")
    python_folder: str = _option("folder that is first on PATH", default="")
    client_owns: bool = _option("a client handles jobs that fail", action="store_true")
    scheduler: tuple[str, ...] = ()
    """Command of the dask scheduler; empty if this job cannot be the head."""
    workers: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    node: int | None = None
    """Number of this node in its job, if this process supervises only that."""

    @property
    def has_next_attempt(self) -> bool:
        """Whether the batch scheduler starts the cluster again when its jobs have ended."""
        return self.attempt < self.attempts

    @property
    def number(self) -> int:
        """Number in the names of the workers: of the job, or of the node, through all jobs."""
        return self.job if self.node is None else self.job * self.nodes + self.node

    @property
    def node_numbers(self) -> range:
        """Numbers of the nodes whose processes a launcher of this job starts."""
        if not self.ranks or self.run_on == "ranks":
            return range(0)
        return range(self.job * self.nodes, (self.job + 1) * self.nodes)

    @property
    def worker_size(self) -> WorkerSize:
        """The size of the workers."""
        return WorkerSize(self.gpus_per_worker, self.workers_per_gpu)

    @property
    def n_workers(self) -> int:
        """Number of workers of this job."""
        return self.worker_size.workers(self.gpus) if self.gpus else 1


@dataclass(frozen=True)
class RankOptions:
    """Options of ``rank``: one MPI rank; from `worker_class` on for its dask_mpi.initialize()."""

    folder: str = _option("the cluster's folder")
    size: int = _option("ranks that the launcher was to start", type=int)
    gpus: int = _option("GPUs of each rank", type=int)
    gpus_per_worker: int = _option("GPUs of each worker", type=int, default=1)
    workers_per_gpu: int = _option("workers that share a GPU", type=int, default=1)
    on_node: int = _option("ranks with GPUs on each node", type=int, default=1)
    nodes: int = _option("nodes of this job", type=int, default=1)
    visible_devices: str = _option("where they are listed", default="scheduler")
    cuda: str = _option("CUDA version that the driver must support", default="")
    worker_class: str | None = _option("class of the workers", default=None)
    nthreads: int | None = _option("threads of a worker", type=int, default=None)
    memory_limit: str = _option("of a worker", default="auto")
    local_directory: str | None = _option("of a worker", default=None)
    scratch: str = _option("the same, unless dask's configuration has one", default="")
    resources: str = _option("of a worker, below dask's configuration", default="")
    interface: str | None = _option("network interface", default=None)
    dashboard: str = _option(
        "of the dask scheduler", choices=["off", "local", "on"], default="local"
    )
    encryption: str = _option("of the site", choices=["optional", "required"], default="optional")
    worker_options: Mapping[str, Any] | None = _option("JSON", type=json.loads, default=None)
    command: tuple[str, ...] = ()
    """The user's script, and its arguments."""

    @property
    def worker_size(self) -> WorkerSize:
        """The size of the workers."""
        return WorkerSize(self.gpus_per_worker, self.workers_per_gpu)

    @property
    def node_gpus(self) -> int:
        """GPUs of the job on each node. Ranks with one worker each may share a GPU."""
        return self.gpus * max(1, self.on_node // self.workers_per_gpu)


@dataclass(frozen=True)
class DaskOptions:
    """Options of ``scheduler``: the dask scheduler."""

    command: tuple[str, ...] = ()
    """A module with dask's command, and its arguments."""


@dataclass(frozen=True)
class WorkersOptions:
    """Options of ``workers``: the process that runs the nannies of a job.

    Those before the command are defaults, which dask's configuration overrides.
    """

    resources: str = _option("of a worker", default="")
    local_directory: str = _option("of a worker", default="")
    command: tuple[str, ...] = ()
    """A module with dask's command, and its arguments."""


@dataclass(frozen=True)
class RetireOptions:
    """Options of ``retire``."""

    timeout: float = _option("limit", type=float)
    workers: tuple[str, ...] = _option("their names, with commas", type=_words)


@dataclass(frozen=True)
class UsageOptions:
    """Options of ``usage``: samples of a job on one node."""

    folder: str = _option("the cluster's folder")
    job: int = _option("number of this job", type=int)
    devices: tuple[str, ...] = _option("index or UUID, with commas", type=_words)


@dataclass(frozen=True)
class MpsOptions:
    """Options of ``mps``: CUDA's MPS for a job on one node."""

    folder: str = _option("folder of the service")
    devices: tuple[str, ...] = _option("index or UUID, with commas", type=_words)


@dataclass(frozen=True)
class GpuErrorsOptions:
    """Options of ``gpu-errors``: what speaks against the GPUs of a job."""

    devices: tuple[str, ...] = _option("index or UUID, with commas", type=_words)
    age: float = _option("time since the job started", type=float)
    result: str = _option("file for it")


@dataclass(frozen=True)
class TryUcxxOptions:
    """Options of ``try-ucxx``."""

    interface: str | None = _option("network interface", default=None)
    gpu: bool = _option("also allocate GPU memory", action="store_true")


SUBCOMMANDS: dict[str, type] = {
    "supervise": SuperviseOptions,
    "node": SuperviseOptions,  # the workers of one node of an allocation
    "scheduler": DaskOptions,
    "workers": WorkersOptions,
    "rank": RankOptions,
    "retire": RetireOptions,
    "usage": UsageOptions,
    "mps": MpsOptions,
    "gpu-errors": GpuErrorsOptions,
    "try-ucxx": TryUcxxOptions,
    "launch": SuperviseOptions,  # the launcher outside of the container
}
_FROM_ENVIRONMENT = {"folder": "GPUJOBS_FOLDER", "job": "GPUJOBS_JOB"}
"""Variables from which options are taken that are not given."""


def vocabulary() -> str:
    """Return the options of all programs, one a line, with what they take."""
    lines = []
    for name, program in SUBCOMMANDS.items():
        for item in dataclasses.fields(program):
            argument = item.metadata.get("argument", {})
            takes = argument.get("action") or getattr(argument.get("type"), "__name__", "text")
            lines.append(" ".join([name, item.name, takes, *argument.get("choices", ())]))
    return "".join(f"{line}\n" for line in lines)


def parse(argv: list[str]) -> Any:
    """Return the options of the sub-command in ``argv``; exits with 2 if they are not valid.

    ``supervise … --scheduler WORDS --workers WORDS --run WORDS``: these are commands, in this order
    if there are several. ``node … -- WORDS``, as ``rank``, ``scheduler`` and ``workers``: one.
    """
    words = argv
    commands: dict[str, tuple[str, ...]] = {}
    if argv[:1] == ["supervise"]:
        words, commands = _split_commands(argv)
    elif argv[:1] in (["node"], ["rank"], ["scheduler"], ["workers"]) and "--" in argv:
        at = argv.index("--")
        option = "workers" if argv[0] == "node" else "command"
        words, commands = argv[:at], {option: tuple(argv[at + 1 :])}
    choice = argparse.ArgumentParser(prog="injob.pyz")
    choice.add_argument("subcommand", choices=SUBCOMMANDS)
    name = choice.parse_args(words[:1]).subcommand
    return SUBCOMMANDS[name](**vars(_parser(name).parse_args(words[1:])), **commands)


def _split_commands(argv: list[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Each command ends where the next one begins; the last one may have any words."""
    markers = ["--scheduler", "--workers", "--run"]
    if "--run-on=ranks" in argv:  # then the user's command is a part of that of the workers
        markers.remove("--run")
    options: list[str] = []
    commands: dict[str, list[str]] = {}
    current = options
    for word in argv:
        if word in markers:
            current = commands[word[2:]] = []
            markers = markers[markers.index(word) + 1 :]
        else:
            current.append(word)
    return options, {name: tuple(words) for name, words in commands.items()}


def _parser(subcommand: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"injob.pyz {subcommand}", allow_abbrev=False)
    for item in dataclasses.fields(SUBCOMMANDS[subcommand]):
        if "argument" in item.metadata:
            argument = dict(item.metadata["argument"])
            if "default" not in argument:
                argument["default"] = os.environ.get(_FROM_ENVIRONMENT.get(item.name, ""))
                argument["required"] = argument["default"] is None
            parser.add_argument(f"--{item.name.replace('_', '-')}", **argument)
    return parser
