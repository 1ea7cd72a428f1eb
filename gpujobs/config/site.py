"""The site file: what a sysadmin writes once, and what is true of the machine whoever asks."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from ..schedulers import get_scheduler, scheduler_names
from . import placeholders
from .fields import (
    Argv,
    Count,
    Duration,
    Flag,
    Positive,
    Size,
    Text,
    Word,
    printable,
    sequence,
    word,
)  # fmt: skip
from .model import Model


def _directive(value: Any) -> str:
    line = printable(value, "a directive").strip()
    if not line.startswith("-"):
        raise ValueError(
            f"{line!r} does not start with '-'; write it without its #SBATCH, #PBS, #BSUB or #$"
        )
    return line


def _pattern(value: Any) -> str:
    text = printable(value, "a regular expression")
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    return text


def _shell(value: Any) -> str:
    text = printable(value, "a path")
    if not re.fullmatch(r"/[\w./-]*bash( -[a-z]+)*", text):
        raise ValueError(f"{text!r}: the jobs are bash scripts; write /bin/bash or /bin/bash -l")
    return text


def _folder(value: Any) -> str:
    text = printable(value, "a path")
    if re.search(r'["`\\]|\$\(', text) or not re.match(r"[/~$]", text):
        raise ValueError(
            f"{text!r} must be an absolute path; ~, $NAME and ${{NAME:-/else}} may stand in it"
        )
    return text


def _script(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be bash text")
    return value.rstrip() + "\n" if value.strip() else ""


def _scheduler(value: Any) -> str:
    name = word(value)
    get_scheduler(name)
    return name


class _KnownSchedulers:
    """Lists the batch schedulers in the JSON Schema."""

    def __get_pydantic_json_schema__(self, *arguments: object) -> dict[str, object]:
        return {"type": "string", "enum": scheduler_names()}


Directive = Annotated[
    str, BeforeValidator(_directive), WithJsonSchema({"type": "string", "pattern": "^-"})
]
Directives = Annotated[tuple[Directive, ...], BeforeValidator(sequence)]
"""Lines for the batch scheduler, without their prefix."""
SiteDirectives = Annotated[
    tuple[Annotated[Directive, AfterValidator(placeholders.check)], ...], BeforeValidator(sequence)
]
"""The same, in which placeholders may stand."""
Pattern = Annotated[
    str, BeforeValidator(_pattern), WithJsonSchema({"type": "string", "format": "regex"})
]
Folder = Annotated[str, BeforeValidator(_folder), WithJsonSchema({"type": "string"})]
Script = Annotated[str, BeforeValidator(_script), WithJsonSchema({"type": "string"})]
Shell = Annotated[str, BeforeValidator(_shell), WithJsonSchema({"type": "string"})]
SchedulerName = Annotated[str, BeforeValidator(_scheduler), _KnownSchedulers()]
"""A batch scheduler that is registered, or can be found."""


class Account(Model):
    """How the account (project, budget, bank) is named."""

    directive: Text = Field("-A {account}", description="the line; {account} is replaced")
    required: Flag = Field(False, description="refuse profiles without an account")
    pattern: Pattern | None = Field(None, description="what the whole account must match")
    hint: Text | None = Field(None, description="shown when it does not")

    @model_validator(mode="after")
    def _check(self) -> "Account":
        placeholders.check(self.directive, placeholders.ACCOUNT)
        if not self.directive.startswith("-") or "{account}" not in self.directive:
            raise ValueError("needs a directive such as '-A {account}'")
        return self


class Variable(Model):
    """The GPUs of a job are listed in this environment variable."""

    variable: Annotated[str, BeforeValidator(printable), Field(pattern=r"^[A-Za-z_]\w*$")]


class File(Model):
    """The GPUs of a job are listed in the file that this environment variable names."""

    file: Annotated[str, BeforeValidator(printable), Field(pattern=r"^[A-Za-z_]\w*$")]


VisibleDevices = Literal["scheduler", "exclusive"] | Variable | File


def _visible_devices(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"variable"}:
        return Variable.model_validate(value)
    if isinstance(value, dict) and set(value) == {"file"}:
        return File.model_validate(value)
    if value in ("scheduler", "exclusive") or isinstance(value, Variable | File):
        return value
    raise ValueError("must be `scheduler`, `exclusive`, {variable: NAME} or {file: NAME}")


WhichDevices = Annotated[VisibleDevices, BeforeValidator(_visible_devices)]


def _protocols(value: Any) -> list[Any]:
    names = sequence(value)
    if not names:
        raise ValueError("needs at least one of tcp, ucxx, ws")
    return names


class SiteNetwork(Model):
    """What dask's processes may talk over."""

    interface: Word | None = Field(
        None, description="as `ip link` names it on the compute nodes, e.g. ib0 or hsn0"
    )
    protocols: Annotated[tuple[Literal["tcp", "ucxx", "ws"], ...], BeforeValidator(_protocols)] = (
        Field(
            ("tcp",),
            description="allowed ones, best first; listing ucxx consents to unencrypted traffic inside the job",
        )
    )


class Mpi(Model):
    """How one command is started on every node of a job."""

    command: Argv | None = Field(
        None, description="launcher; {ranks} {nodes} {ranks_per_node} are replaced"
    )
    setup: Script = Field("", description="bash text before the launcher, e.g. module load openmpi")

    @model_validator(mode="after")
    def _check(self) -> "Mpi":
        for item in self.command or ():
            placeholders.check(item, placeholders.LAUNCH)
        return self


class Queue(Model):
    """One queue or partition: the shape of its nodes, and its limits. Limits are of one job."""

    name: Word | None = Field(None, description="the batch scheduler's name, if it is not the key")
    gpus_per_node: Count | None = Field(
        None, description="GPUs of a node; none: a queue without GPUs"
    )
    gpu_type: Word | None = Field(None, description="as the batch scheduler names it, e.g. a100")
    gpu_memory: Size | None = Field(
        None, description="of one GPU; `plan` then shows fractions of it as sizes"
    )
    cpus_per_node: Positive | None = Field(
        None, description="CPUs of a node; a job gets its GPUs' share"
    )
    cpus_per_gpu: Positive | None = Field(None, description="instead of cpus_per_node")
    memory_per_node: Size | None = Field(
        None, description="what jobs may ask for on a node, e.g. 490GiB"
    )
    exclusive: Flag = Field(False, description="jobs get whole nodes")
    gpu_fractions: Flag = Field(
        False, description="{gpus_per_cpu} may be a decimal fraction such as 0.5"
    )
    max_walltime: Duration | None = Field(None, description="longest walltime")
    max_nodes: Positive | None = Field(None, description="most nodes of one job")
    min_nodes: Positive | None = Field(None, description="fewest nodes of one job")
    max_gpus: Positive | None = Field(None, description="most GPUs of one job")
    max_jobs: Positive | None = Field(None, description="most jobs of one user in the queue")
    request: SiteDirectives | None = Field(None, description="wins over the site's")
    cpu_request: SiteDirectives | None = Field(None, description="wins over the site's")
    directives: SiteDirectives | None = Field(None, description="wins over the site's")
    account: Account | None = Field(None, description="wins over the site's")
    visible_devices: WhichDevices | None = Field(None, description="wins over the site's")

    @model_validator(mode="after")
    def _check(self) -> "Queue":
        if self.cpus_per_node and self.cpus_per_gpu:
            raise ValueError("cannot have both cpus_per_node and cpus_per_gpu")
        if self.max_nodes and self.min_nodes and self.min_nodes > self.max_nodes:
            raise ValueError(f"has min_nodes {self.min_nodes} above max_nodes {self.max_nodes}")
        return self


class Site(Model):
    """A site file. The site's name is the file's stem."""

    description: Text = Field(description="for people: which machine this is")
    source: Text | None = Field(None, description="for people: where these numbers stand")
    contact: Text | None = Field(None, description="for people: whom to ask")
    hostnames: tuple[Pattern, ...] = Field(
        (), description="regexes; a whole match of the host name chooses the site"
    )
    scheduler: SchedulerName = Field(description="the batch scheduler")
    extends: Text | None = Field(None, description="another site that this one is layered on")
    queues: dict[Word, Queue] = Field(
        description="name → shape and limits, in the order that `queue: auto` tries"
    )
    request: SiteDirectives | None = Field(
        None, description="all lines that ask for what one GPU job needs"
    )
    cpu_request: SiteDirectives | None = Field(None, description="the same for jobs without GPUs")
    directives: SiteDirectives = Field((), description="further lines for every job")
    account: Account | None = Field(None, description="how the account is named")
    visible_devices: WhichDevices | None = Field(
        None, description="who says which GPUs are the job's"
    )
    network: SiteNetwork = Field(SiteNetwork(), description="interface and allowed protocols")
    mpi: Mpi = Field(Mpi(), description="how MPI is started")
    shell: Shell = Field("/bin/bash", description="first line of every script")
    setup: Script = Field("", description="bash text run first in every job, before the user's")
    scratch: Folder = Field(
        "${TMPDIR:-/tmp}", description="node-local scratch space, as the job sees it"
    )
    directory: Folder = Field(
        "~/.gpujobs", description="folder that login and compute nodes can write"
    )
    cluster: Word | None = Field(None, description="multi-cluster name, repeated in each command")
    commands: dict[Word, Text] = Field({}, description="other paths of sbatch, squeue, qsub, …")
    poll: Duration = Field(5, description="least time between two questions to the batch scheduler")
    max_array_size: Positive | None = Field(
        None, description="most jobs of one array; more are sent as several"
    )
    max_queued_jobs: Positive | None = Field(
        None, description="most jobs of one user; more are refused"
    )
    defaults: dict[str, Any] = Field({}, description="any keys of a profile")

    @model_validator(mode="after")
    def _check(self) -> "Site":
        if not self.queues:
            raise ValueError("needs at least one queue")
        return self

    def queue_name(self, key: str) -> str:
        """Return what the batch scheduler calls the queue entry ``key``."""
        return self.queues[key].name or key
