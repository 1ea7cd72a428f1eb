"""The site file: facts about a machine, written once by its administrators for all users."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import InputError
from ..schedulers import get_scheduler, scheduler_names
from . import fields, placeholders
from .kinds import (
    ANYTHING,
    COUNT,
    DURATION,
    FLAG,
    PATTERN,
    POSITIVE,
    SCRIPT,
    SIZE,
    TEXT,
    WORD,
    Items,
    Kind,
    Place,
    Scalar,
    Schema,
    Table,
    choice,
)
from .model import Model, Section, optional, required
from .profile import Profile


def _site_directive(value: object) -> str:
    return placeholders.check(fields.directive(value))


def _account_directive(value: object) -> str:
    text = placeholders.check(fields.printable(value), placeholders.ACCOUNT)
    if not text.startswith("-") or "{account}" not in text:
        raise ValueError("must be a directive such as '-A {account}'")
    return text


def _launch_word(value: object) -> str:
    return placeholders.check(fields.printable(value), placeholders.LAUNCH)


def _shell(value: object) -> str:
    text = fields.printable(value, "a path")
    if not re.fullmatch(r"/[\w./-]*bash( -[a-z]+)*", text):
        raise ValueError(f"{text!r}: the jobs are bash scripts; write /bin/bash or /bin/bash -l")
    return text


def _folder(value: object) -> str:
    text = fields.printable(value, "a path")
    if re.search(r'["`\\]|\$\(', text) or not re.match(r"[/~$]", text):
        raise ValueError(
            f"{text!r} must be an absolute path; it may contain ~, $NAME and ${{NAME:-/else}}"
        )
    return text


def _protocols(value: object) -> Sequence[object]:
    protocols = fields.sequence(value)
    if not protocols:
        raise ValueError("needs at least one of tcp, ucxx, ws")
    return protocols


@dataclass(frozen=True)
class Variable:
    """The GPUs of a job are listed in this environment variable."""

    variable: str


@dataclass(frozen=True)
class File:
    """The GPUs of a job are listed in a file; this environment variable has its path."""

    file: str


Protocol: TypeAlias = Literal["tcp", "ucxx", "ws"]
VisibleDevices: TypeAlias = Literal["scheduler", "exclusive"] | Variable | File


class _VisibleDevicesKind(Kind[VisibleDevices]):
    """One of two words, or a mapping with one key."""

    def read(self, value: object, place: Place) -> VisibleDevices:
        """Return how a job finds out which GPUs it has."""
        if value == "scheduler":
            return "scheduler"
        if value == "exclusive":
            return "exclusive"
        if isinstance(value, dict) and list(value) == ["variable"]:
            return Variable(_VARIABLE.read(value["variable"], place.inside("variable")))
        if isinstance(value, dict) and list(value) == ["file"]:
            return File(_VARIABLE.read(value["file"], place.inside("file")))
        message = "must be `scheduler`, `exclusive`, {variable: NAME} or {file: NAME}"
        raise place.error(ValueError(message))

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        """Return the JSON Schema."""
        words = {"enum": ["scheduler", "exclusive"]}
        return {"anyOf": [words, _one_key("variable"), _one_key("file")]}


class _Defaults(Table[object]):
    """Keys of a profile. They are validated with a profile that uses them, at their position."""

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        """Return the JSON Schema of a profile."""
        return Section(Profile).schema(definitions)


class _SchedulerName(Kind[str]):
    """The name of a batch scheduler that is registered or can be found."""

    def read(self, value: object, place: Place) -> str:
        """Return the name."""
        name = WORD.read(value, place)
        try:
            get_scheduler(name)
        except InputError as error:
            raise place.error(error) from None
        return name

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        """Return the JSON Schema, which lists the batch schedulers that are known now."""
        return {"type": "string", "enum": scheduler_names()}


def _one_key(name: str) -> Schema:
    return {
        "type": "object",
        "properties": {name: _VARIABLE.json_schema},
        "required": [name],
        "additionalProperties": False,
    }


_VARIABLE = Scalar(
    fields.variable_name, {"type": "string", "pattern": f"^{fields.VARIABLE.pattern}$"}
)
_PATH = {"type": "string"}
_DIRECTIVES = Items(Scalar(_site_directive, {"type": "string", "pattern": "^-"}))
_FOLDER = Scalar(_folder, _PATH)
_SHELL = Scalar(_shell, _PATH)
_LAUNCHER = Items(Scalar(_launch_word, {"type": "string"}), split=fields.argv, text_too=True)
_PROTOCOLS: Items[Protocol] = Items(choice("tcp", "ucxx", "ws"), split=_protocols)
_DEFAULTS = _Defaults(TEXT, ANYTHING)
_VISIBLE_DEVICES = _VisibleDevicesKind()


@dataclass(frozen=True, kw_only=True)
class Account(Model):
    """How the account (project, budget, bank) is named."""

    directive: str = optional(
        Scalar(_account_directive, {"type": "string"}),
        "the directive; {account} is replaced",
        default="-A {account}",
    )
    required: bool = optional(FLAG, "refuse profiles without an account", default=False)
    pattern: str | None = optional(PATTERN, "regular expression of a valid account")
    hint: str | None = optional(TEXT, "shown if the account does not match")


@dataclass(frozen=True, kw_only=True)
class SiteNetwork(Model):
    """How dask's processes may communicate."""

    interface: str | None = optional(
        WORD, "as `ip link` names it on the compute nodes, e.g. ib0 or hsn0"
    )
    protocols: tuple[Protocol, ...] = optional(
        _PROTOCOLS,
        "allowed ones, best first; listing ucxx consents to unencrypted traffic inside the job",
        default=("tcp",),
    )


@dataclass(frozen=True, kw_only=True)
class Mpi(Model):
    """How one command is started on every node of a job."""

    command: tuple[str, ...] | None = optional(
        _LAUNCHER, "launcher; {ranks} {nodes} {ranks_per_node} are replaced"
    )
    setup: str = optional(
        SCRIPT, "bash text before the launcher, e.g. module load openmpi", default=""
    )


@dataclass(frozen=True, kw_only=True)
class Queue(Model):
    """One queue or partition: the shape of its nodes, and its limits. Limits are of one job."""

    name: str | None = optional(WORD, "the batch scheduler's name, if it is not the key")
    gpus_per_node: int | None = optional(
        COUNT, "GPUs of a node; if left out, the queue has no GPUs"
    )
    gpu_type: str | None = optional(WORD, "as the batch scheduler names it, e.g. a100")
    gpu_memory: int | None = optional(
        SIZE, "memory of one GPU; `plan` then shows fractions of it as sizes"
    )
    cpus_per_node: int | None = optional(POSITIVE, "CPUs of a node; a job gets its GPUs' share")
    cpus_per_gpu: int | None = optional(POSITIVE, "instead of cpus_per_node")
    memory_per_node: int | None = optional(
        SIZE, "memory of a node that jobs may request, e.g. 490GiB"
    )
    exclusive: bool = optional(FLAG, "jobs get whole nodes", default=False)
    gpu_fractions: bool = optional(
        FLAG, "{gpus_per_cpu} may be a decimal fraction such as 0.5", default=False
    )
    max_walltime: int | None = optional(DURATION, "longest walltime")
    max_nodes: int | None = optional(POSITIVE, "most nodes of one job")
    min_nodes: int | None = optional(POSITIVE, "fewest nodes of one job")
    max_gpus: int | None = optional(POSITIVE, "most GPUs of one job")
    max_jobs: int | None = optional(POSITIVE, "most jobs of one user; checked per cluster")
    request: tuple[str, ...] | None = optional(_DIRECTIVES, "overrides the site's")
    cpu_request: tuple[str, ...] | None = optional(_DIRECTIVES, "overrides the site's")
    directives: tuple[str, ...] | None = optional(_DIRECTIVES, "overrides the site's")
    account: Account | None = optional(Section(Account), "overrides the site's")
    visible_devices: VisibleDevices | None = optional(_VISIBLE_DEVICES, "overrides the site's")

    def check(self) -> None:
        """Check that the limits agree."""
        if self.cpus_per_node and self.cpus_per_gpu:
            raise ValueError("cannot have both cpus_per_node and cpus_per_gpu")
        if self.max_nodes and self.min_nodes and self.min_nodes > self.max_nodes:
            raise ValueError(f"has min_nodes {self.min_nodes} above max_nodes {self.max_nodes}")


@dataclass(frozen=True, kw_only=True)
class Site(Model):
    """A site file. The site's name is the file's stem."""

    description: str = required(TEXT, "name of the machine, for users")
    source: str | None = optional(TEXT, "reference for these numbers, for administrators")
    contact: str | None = optional(TEXT, "contact address, for users")
    hostnames: tuple[str, ...] = optional(
        Items(PATTERN),
        "regular expressions; a full match of the host name selects the site",
        default=(),
    )
    scheduler: str = required(_SchedulerName(), "the batch scheduler")
    extends: str | None = optional(TEXT, "another site that this one is layered on")
    queues: dict[str, Queue] = required(
        Table(WORD, Section(Queue), empty="needs at least one queue"),
        "name → shape and limits, in the order that `queue: auto` tries",
    )
    request: tuple[str, ...] | None = optional(
        _DIRECTIVES, "all directives that request the resources of a GPU job"
    )
    cpu_request: tuple[str, ...] | None = optional(_DIRECTIVES, "the same for jobs without GPUs")
    directives: tuple[str, ...] = optional(
        _DIRECTIVES, "extra directives for every job", default=()
    )
    account: Account | None = optional(Section(Account), "how the account is named")
    visible_devices: VisibleDevices | None = optional(
        _VISIBLE_DEVICES, "how a job finds out which GPUs it has"
    )
    network: SiteNetwork = optional(
        Section(SiteNetwork), "interface and allowed protocols", default=SiteNetwork()
    )
    mpi: Mpi = optional(Section(Mpi), "how MPI is started", default=Mpi())
    shell: str = optional(_SHELL, "first line of every script", default="/bin/bash")
    setup: str = optional(SCRIPT, "bash text run first in every job, before the user's", default="")
    scratch: str = optional(
        _FOLDER, "node-local scratch space, as the job sees it", default="${TMPDIR:-/tmp}"
    )
    directory: str = optional(
        _FOLDER, "folder that login and compute nodes can write", default="~/.gpujobs"
    )
    cluster: str | None = optional(WORD, "multi-cluster name, repeated in each command")
    commands: dict[str, str] = optional(
        Table(WORD, TEXT), "other paths of sbatch, squeue, qsub, …", default={}
    )
    poll: int = optional(
        DURATION, "shortest time between two queries of the batch scheduler", default=5
    )
    max_array_size: int | None = optional(
        POSITIVE, "most jobs of one array; more are submitted as several arrays"
    )
    max_queued_jobs: int | None = optional(POSITIVE, "most jobs of one user; checked per cluster")
    defaults: dict[str, object] = optional(_DEFAULTS, "any keys of a profile", default={})

    instead_of_required = "extends"

    def queue_name(self, key: str) -> str:
        """Return the batch scheduler's name of the queue entry ``key``."""
        return self.queues[key].name or key
