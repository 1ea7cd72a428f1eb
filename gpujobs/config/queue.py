"""The queues of a site file: shapes of nodes, and limits of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..text import matches
from . import placeholders
from .kinds import (
    COUNT,
    DURATION,
    FLAG,
    NUMBER,
    PATTERN,
    POSITIVE,
    SCRIPT,
    SIZE,
    TEXT,
    VARIABLE,
    WORD,
    Items,
    Scalar,
    Table,
    ValueErrorInside,
    choice,
)
from .model import Model, Section, optional, required
from .sitekinds import (
    FOLDER,
    LAUNCHER,
    LAYOUTS,
    NOTES,
    OPTION_DEFAULT,
    OPTION_DIRECTIVE,
    OPTION_NAME,
    PORTS,
    PROTOCOLS,
    RESOURCES,
    SITE_DIRECTIVES,
    SUBMIT_ARGUMENTS,
    VISIBLE_DEVICES,
    WORKERS_LAUNCHER,
    LayoutName,
    Protocol,
    VisibleDevices,
    account_directive,
)


@dataclass(frozen=True, kw_only=True)
class Account(Model):
    """How the account (project, budget, bank) is named."""

    directive: str | None = optional(
        Scalar(account_directive, {"type": "string"}),
        "the directive; {account} is replaced; if left out, the batch scheduler's usual one",
    )
    required: bool = optional(FLAG, "refuse profiles without an account", default=False)
    pattern: str | None = optional(PATTERN, "regular expression of a valid account")
    hint: str | None = optional(TEXT, "shown if the account does not match")


@dataclass(frozen=True, kw_only=True)
class Mpi(Model):
    """How one command is started on every node of a job."""

    command: tuple[str, ...] | None = optional(
        LAUNCHER, "launcher; {ranks} {nodes} {ranks_per_node} are replaced"
    )
    setup: str = optional(
        SCRIPT, "bash text before the launcher, e.g. module load openmpi", default=""
    )


@dataclass(frozen=True, kw_only=True)
class SiteNetwork(Model):
    """How dask's processes may communicate."""

    interface: str | None = optional(
        WORD, "as `ip link` names it on the compute nodes, e.g. ib0 or hsn0"
    )
    protocols: tuple[Protocol, ...] = optional(
        PROTOCOLS,
        "allowed ones, best first; listing ucxx consents to unencrypted traffic inside the job",
        default=("tcp",),
    )
    encryption: Literal["required", "optional"] = optional(
        choice("required", "optional"),
        "required: refuse profiles with unencrypted traffic between nodes",
        default="optional",
    )
    ports: str | None = optional(
        PORTS, "range of ports between nodes, as 8000-8100; default: any port"
    )

    def check(self) -> None:
        """Refuse a protocol that has no encryption where it is required."""
        if self.encryption == "required" and "ucxx" in self.protocols:
            raise ValueError("has `encryption: required`, but ucxx has no encryption")


@dataclass(frozen=True, kw_only=True)
class Option(Model):
    """A directive of the site with a value that a profile may choose."""

    directive: str = required(OPTION_DIRECTIVE, "with {NAME}, the name of the option")
    default: str | None = optional(
        OPTION_DEFAULT, "value for profiles without one; if left out, they have no directive"
    )
    pattern: str = optional(
        PATTERN, "regular expression of a valid value", default=r"[A-Za-z0-9_.:+=,/-]+"
    )
    required: bool = optional(FLAG, "refuse profiles without a value", default=False)
    hint: str | None = optional(TEXT, "shown if a value does not match, or is missing")
    separator: Literal["+", ",", ":"] | None = optional(
        choice("+", ",", ":"), "a value that starts with it is added to the default"
    )

    def check(self) -> None:
        """Refuse a default of an option that must be chosen, and additions to no default."""
        if self.required and self.default is not None:
            raise ValueError("cannot have `default` with `required: true`")
        if self.separator and self.default is None:
            raise ValueError("needs `default` with `separator`: values are added to it")

    def extends_default(self, value: str) -> bool:
        """Return whether the profile's ``value`` is added to the default."""
        return self.separator is not None and value.startswith(self.separator)


def check_options(options: Mapping[str, Option]) -> None:
    """Check directives and defaults of options. Raises ValueErrorInside."""
    for name, option in options.items():
        if f"{{{name}}}" not in option.directive:
            message = f"must have {{{name}}}, which is replaced by the value of the option"
            raise ValueErrorInside(message, "options", name, "directive")
        default = option.default
        if default and not placeholders.names(default) and not matches(option.pattern, default):
            message = f"{default!r} does not match the option's pattern {option.pattern}"
            raise ValueErrorInside(message, "options", name, "default")


@dataclass(frozen=True, kw_only=True)
class Queue(Model):
    """One queue or partition: the shape of its nodes, and its limits. Limits are of one job."""

    name: str | None = optional(WORD, "the batch scheduler's name, if it is not the key")
    like: str | None = optional(WORD, "another queue of the site, whose keys this one inherits")
    auto: bool = optional(
        FLAG, "`queue: auto` may choose it; if false, only its name does", default=True
    )
    gpus_per_node: int | None = optional(
        COUNT, "GPUs of a node; if left out, the queue has no GPUs"
    )
    gpu_type: str | None = optional(WORD, "as the batch scheduler names it, e.g. a100")
    gpu_types: dict[str, str] = optional(
        Table(WORD, WORD),
        "several types: what a profile writes → the batch scheduler's name; none: any type",
        default={},
    )
    gpu_memory: int | None = optional(
        SIZE, "memory of one GPU; `plan` then shows fractions of it as sizes"
    )
    cpus_per_node: int | None = optional(POSITIVE, "CPUs of a node; a job gets its GPUs' share")
    cpus_per_gpu: int | None = optional(POSITIVE, "instead of cpus_per_node")
    memory_per_node: int | None = optional(
        SIZE, "memory of a node that jobs may request, e.g. 490GiB"
    )
    resources: dict[str, int] = optional(
        RESOURCES, "name → amount of a node; {NAME_per_node:GB} is the part of a job", default={}
    )
    nodes: int | None = optional(POSITIVE, "number of nodes; `plan` notes clusters that need more")
    exclusive: bool = optional(FLAG, "jobs get whole nodes", default=False)
    gpu_fractions: bool = optional(
        FLAG, "{gpus_per_cpu} may be a decimal fraction such as 0.5", default=False
    )
    walltime: int | None = optional(
        DURATION, "walltime of profiles without one, instead of the site's default"
    )
    max_walltime: int | None = optional(DURATION, "longest walltime")
    min_walltime: int | None = optional(DURATION, "shortest walltime")
    max_nodes: int | None = optional(POSITIVE, "most nodes of one job")
    min_nodes: int | None = optional(POSITIVE, "fewest nodes of one job")
    max_node_hours: float | None = optional(
        NUMBER, "most nodes times hours of one job; a part of a node counts as a node"
    )
    max_gpus: int | None = optional(POSITIVE, "most GPUs of one job")
    min_gpus: int | None = optional(POSITIVE, "fewest GPUs of one job")
    gpus_per_job: tuple[int, ...] = optional(
        Items(POSITIVE, extendable=True),
        "the only numbers of GPUs that one job may have",
        default=(),
    )
    layouts: tuple[LayoutName, ...] = optional(LAYOUTS, "overrides the site's", default=())
    max_jobs: int | None = optional(POSITIVE, "most jobs of one user; checked per cluster")
    max_gpus_per_user: int | None = optional(POSITIVE, "most GPUs of one user; checked per cluster")
    notes: tuple[str, ...] = optional(NOTES, "shown with every plan", default=())
    request: tuple[str, ...] | None = optional(SITE_DIRECTIVES, "overrides the site's")
    cpu_request: tuple[str, ...] | None = optional(SITE_DIRECTIVES, "overrides the site's")
    multi_node_request: tuple[str, ...] | None = optional(SITE_DIRECTIVES, "overrides the site's")
    directives: tuple[str, ...] | None = optional(SITE_DIRECTIVES, "overrides the site's")
    submit_arguments: tuple[str, ...] = optional(
        SUBMIT_ARGUMENTS, "overrides the site's", default=()
    )
    options: dict[str, Option] = optional(
        Table(OPTION_NAME, Section(Option)), "adds to the site's, and overrides them", default={}
    )
    account: Account | None = optional(Section(Account), "overrides the site's")
    visible_devices: VisibleDevices | None = optional(VISIBLE_DEVICES, "overrides the site's")
    setup: str | None = optional(SCRIPT, "overrides the site's")
    scratch: str | None = optional(FOLDER, "overrides the site's")
    network: SiteNetwork | None = optional(
        Section(SiteNetwork), "overrides the keys of the site's that it has"
    )
    mpi: Mpi | None = optional(Section(Mpi), "overrides the site's")
    workers_launcher: tuple[str, ...] | None = optional(
        WORKERS_LAUNCHER, "overrides the site's; []: none"
    )
    env: dict[str, str] = optional(
        Table(VARIABLE, TEXT), "environment variables, under those of the profile", default={}
    )

    def check(self) -> None:
        """Check that the limits agree."""
        check_options(self.options)
        if self.cpus_per_node and self.cpus_per_gpu:
            raise ValueError("cannot have both cpus_per_node and cpus_per_gpu")
        if self.max_nodes and self.min_nodes and self.min_nodes > self.max_nodes:
            raise ValueError(f"has min_nodes {self.min_nodes} above max_nodes {self.max_nodes}")
        if self.max_gpus and self.min_gpus and self.min_gpus > self.max_gpus:
            raise ValueError(f"has min_gpus {self.min_gpus} above max_gpus {self.max_gpus}")
        most = self.max_gpus_per_user
        if most and self.min_gpus and self.min_gpus > most:
            raise ValueError(f"has min_gpus {self.min_gpus} above max_gpus_per_user {most}")
        if self.max_walltime and self.min_walltime and self.min_walltime > self.max_walltime:
            raise ValueError("has a min_walltime above its max_walltime")
        if self.walltime and self.max_walltime and self.walltime > self.max_walltime:
            raise ValueError("has a walltime above its max_walltime")
        if self.max_node_hours == 0:
            raise ValueError("has max_node_hours 0, which no job could have")
        self._check_gpus_per_job()
        if self.gpu_types and self.gpu_type and self.gpu_type not in self.gpu_types:
            raise ValueError(f"has gpu_type {self.gpu_type}, which is not one of its gpu_types")

    def _check_gpus_per_job(self) -> None:
        node = self.gpus_per_node or 0
        for gpus in self.gpus_per_job:
            if gpus > node and (not node or gpus % node):
                message = (
                    f"{gpus}: a node has {node} GPUs, and jobs of several nodes have all of them"
                )
                raise ValueErrorInside(message, "gpus_per_job")

    def allows_node_hours(self, nodes: int, seconds: int) -> bool:
        """Return whether a job of ``nodes`` nodes may last for ``seconds``, by `max_node_hours`."""
        return not self.max_node_hours or nodes * seconds <= self.max_node_hours * 3600

    def longest_walltime(self, nodes: int) -> int | None:
        """Return the most seconds of a job of ``nodes`` nodes; None if there is no limit."""
        limits = [self.max_walltime]
        if self.max_node_hours:
            limits.append(int(self.max_node_hours * 3600 / nodes))
        return min(filter(None, limits), default=None)

    @property
    def named_types(self) -> dict[str, str]:
        """GPU types that a profile may name, and the batch scheduler's names of them."""
        if self.gpu_type and not self.gpu_types:
            return {self.gpu_type: self.gpu_type}
        return self.gpu_types

    def type_name(self, wanted: str | None) -> str | None:
        """Return the batch scheduler's name of the GPU type of a job; None: any type."""
        return self.named_types.get(wanted or self.gpu_type or "")
