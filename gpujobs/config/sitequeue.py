"""The queues of a site file, and the keys that a queue and the site may both have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..text import matches
from . import placeholders
from . import sitekinds as kinds
from .model import (
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
    Model,
    Scalar,
    Section,
    Table,
    ValueErrorInside,
    choice,
    optional,
    required,
)
from .profile import LAYOUT, Layout
from .sitesoftware import Containers, NamedEnvironment, SiteEnvironment

ANY_TYPE = "any"
"""`gpu_type` of profiles for GPUs of any type."""


@dataclass(frozen=True, kw_only=True)
class Account(Model):
    """How the account (project, budget, bank) is named."""

    directive: str | None = optional(
        Scalar(kinds.account_directive, {"type": "string"}),
        "the directive, with {account}; if left out, the batch scheduler's usual one",
    )
    required: bool = optional(FLAG, "refuse profiles without an account", default=False)
    pattern: str | None = optional(PATTERN, "that the whole account must match")
    hint: str | None = optional(TEXT, "shown if the account does not match")


@dataclass(frozen=True, kw_only=True)
class Charge(Model):
    """The charge for GPUs, by the time for which they are granted, or by their energy."""

    per_gpu_hour: float | None = optional(NUMBER, "amount, in units, for a granted GPU and hour")
    per_kwh: float | None = optional(NUMBER, "amount for the energy of GPUs, instead")
    unit: str = required(WORD, "SU, EUR")

    def check(self) -> None:
        """Refuse a charge with both amounts, or with none."""
        if (self.per_gpu_hour is None) is (self.per_kwh is None):
            raise ValueError("needs one of `per_gpu_hour` and `per_kwh`")


@dataclass(frozen=True, kw_only=True)
class Mpi(Model):
    """How one command is started on every node of a job."""

    command: tuple[str, ...] | None = optional(
        kinds.LAUNCHER, "launcher; {ranks} {nodes} {ranks_per_node} are replaced"
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
    protocols: tuple[kinds.Protocol, ...] = optional(
        kinds.PROTOCOLS,
        "allowed ones, best first; listing ucxx consents to unencrypted traffic inside the job",
        default=("tcp",),
    )
    encryption: Literal["required", "optional"] = optional(
        choice("required", "optional"),
        "required: refuse profiles with unencrypted traffic between nodes",
        default="optional",
    )
    ports: str | None = optional(
        kinds.PORTS,
        "range of ports at which dask's processes accept connections from other nodes, as "
        "8000-8100; default: any",
    )

    def check(self) -> None:
        """Refuse a protocol that has no encryption where it is required."""
        if self.encryption == "required" and "ucxx" in self.protocols:
            raise ValueError("has `encryption: required`, but ucxx has no encryption")


_PART_OF_A_LINE = r"[A-Za-z0-9_./-]+"


@dataclass(frozen=True, kw_only=True)
class Option(Model):
    """A directive of the site with a value that a profile may choose."""

    directive: str | None = optional(
        kinds.OPTION_DIRECTIVE,
        "with {NAME}, the name of the option; if left out, `request` or another line has {NAME}",
    )
    default: str | None = optional(
        kinds.OPTION_DEFAULT,
        "value for profiles without one; if left out, they have no directive",
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

        if not self.directive and self.default is None and not self.required:
            message = "needs `default` or `required: true` without `directive`"
            raise ValueError(f"{message}: the line with it cannot be left out")

    def matches(self, value: str) -> bool:
        """Return whether a profile may choose ``value``.

        In a line of the site, without a pattern, it is one word: "," and ":" begin other resources.
        """
        if not self.directive and "pattern" not in self.given:
            return matches(_PART_OF_A_LINE, value)
        return matches(self.pattern, value)

    def extends_default(self, value: str) -> bool:
        """Return whether the profile's ``value`` is added to the default."""
        return self.separator is not None and value.startswith(self.separator)


@dataclass(frozen=True, kw_only=True)
class OfSiteOrQueue(Model):
    """Keys of a site that a queue may have, too. Those of the queue override those of the site."""

    request: tuple[str, ...] | None = optional(
        kinds.SITE_DIRECTIVES,
        "all directives that request queue, nodes, CPUs, GPUs and memory of a GPU job",
    )
    cpu_request: tuple[str, ...] | None = optional(
        kinds.SITE_DIRECTIVES, "the same for jobs without GPUs"
    )
    multi_node_request: tuple[str, ...] | None = optional(
        kinds.SITE_DIRECTIVES, "`request` of jobs of several nodes, if it differs"
    )
    submit_arguments: tuple[str, ...] = optional(
        kinds.SUBMIT_ARGUMENTS,
        "arguments of sbatch, qsub or bsub that are no directives, such as -g {account}",
        default=(),
    )
    options: dict[str, Option] = optional(
        Table(kinds.OPTION_NAME, Section(Option)),
        "directives with values of the profile",
        default={},
    )
    environments: dict[str, NamedEnvironment] = optional(
        Table(WORD, Section(NamedEnvironment)),
        "name → setup, python, container; profiles have `environment: NAME`",
        default={},
    )
    account: Account | None = optional(Section(Account), "how the account is named")
    visible_devices: str | None = optional(
        kinds.VISIBLE_DEVICES, "how a job finds out which GPUs it has"
    )
    layouts: tuple[Layout, ...] = optional(
        Items(LAYOUT, extendable=True),
        "layouts of profiles that are allowed; default: all",
        default=(),
    )
    notes: tuple[str, ...] = optional(kinds.NOTES, "shown with every plan", default=())

    def check(self) -> None:
        """Check directives and defaults of the options."""
        for name, option in self.options.items():
            if option.directive and f"{{{name}}}" not in option.directive:
                message = f"must have {{{name}}}, which is replaced by the value of the option"
                raise ValueErrorInside(message, "options", name, "directive")
            default = option.default
            if default and not placeholders.names(default) and not option.matches(default):
                message = f"{default!r} does not match the option's pattern {option.pattern}"
                raise ValueErrorInside(message, "options", name, "default")


@dataclass(frozen=True, kw_only=True)
class Queue(OfSiteOrQueue):
    """One queue or partition: the shape of its nodes, and its limits. Limits are of one job."""

    name: str | None = optional(WORD, "the batch scheduler's name, if it is not the key")
    like: str | None = optional(WORD, "another queue of the site, whose keys this one inherits")
    auto: bool = optional(
        FLAG,
        "`queue: auto` may choose it; if false, only its name does: for debug queues",
        default=True,
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
    gpu_vendor: Literal["nvidia", "amd", "intel"] = optional(
        choice("nvidia", "amd", "intel"),
        "maker of the GPUs; with amd and intel, the queue takes CPU workers only",
        default="nvidia",
    )
    gpu_memory: int | None = optional(
        SIZE, "memory of one GPU; `plan` then shows fractions of it as sizes"
    )
    driver_cuda: str | None = optional(
        kinds.CUDA_VERSION,
        "CUDA version that the driver of the nodes supports, as nvidia-smi shows it: 12.8",
    )
    charge: Charge | None = optional(
        Section(Charge), "`plan` then shows the most that the jobs cost, `report` what they did"
    )
    cpus_per_node: int | None = optional(POSITIVE, "CPUs of a node; a job gets its GPUs' share")
    cpus_per_gpu: int | None = optional(POSITIVE, "instead of cpus_per_node")
    memory_per_node: int | None = optional(
        SIZE,
        "memory of a node that jobs may request; a job gets its GPUs' share; if left out, none is "
        "requested",
    )
    resources: dict[str, int] = optional(
        kinds.RESOURCES,
        "name → amount of a node, a size or a number: {NAME_per_node:GB}, or {NAME_per_node}, is "
        "the part of a job",
        default={},
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
    max_jobs: int | None = optional(POSITIVE, "most jobs of one user; checked per cluster")
    max_gpus_per_user: int | None = optional(POSITIVE, "most GPUs of one user; checked per cluster")
    directives: tuple[str, ...] | None = optional(kinds.SITE_DIRECTIVES, "overrides the site's")
    setup: str | None = optional(SCRIPT, "overrides the site's")
    scratch: str | None = optional(kinds.FOLDER, "overrides the site's")
    network: SiteNetwork | None = optional(
        Section(SiteNetwork), "overrides the keys of the site's that it has"
    )
    mpi: Mpi | None = optional(Section(Mpi), "overrides the site's")
    workers_launcher: tuple[str, ...] | None = optional(
        kinds.WORKERS_LAUNCHER, "overrides the site's; []: none"
    )
    node_launcher: tuple[str, ...] | None = optional(kinds.NODE_LAUNCHER, "overrides the site's")
    run_launcher: tuple[str, ...] | None = optional(
        kinds.WORKERS_LAUNCHER, "overrides the site's; []: none"
    )
    containers: Containers | None = optional(
        Section(Containers), "overrides the keys of the site's that it has; images are added"
    )
    environment: SiteEnvironment | None = optional(
        Section(SiteEnvironment), "overrides the keys of the site's that it has"
    )
    env: dict[str, str] = optional(
        Table(VARIABLE, TEXT), "environment variables, under those of the profile", default={}
    )

    def check(self) -> None:
        """Check that the limits agree."""
        super().check()
        if self.cpus_per_node and self.cpus_per_gpu:
            raise ValueError("cannot have both cpus_per_node and cpus_per_gpu")
        for least, most in (
            ("min_nodes", "max_nodes"),
            ("min_gpus", "max_gpus"),
            ("min_gpus", "max_gpus_per_user"),
        ):
            fewest, largest = getattr(self, least), getattr(self, most)
            if fewest and largest and fewest > largest:
                raise ValueError(f"has {least} {fewest} above {most} {largest}")
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

    def longest_walltime(self, nodes: int) -> int | None:
        """Return the most seconds of a job of ``nodes`` nodes; None if there is no limit."""
        limits = [self.max_walltime]
        if self.max_node_hours:
            limits.append(int(self.max_node_hours * 3600 / nodes))
        return min(filter(None, limits), default=None)

    @property
    def worker_gpus(self) -> int:
        """GPUs of a node that GPU workers can have."""
        return (self.gpus_per_node or 0) if self.gpu_vendor == "nvidia" else 0

    @property
    def named_types(self) -> dict[str, str]:
        """GPU types that a profile may name, and the batch scheduler's names of them."""
        if self.gpu_type and not self.gpu_types:
            return {self.gpu_type: self.gpu_type}
        return self.gpu_types

    def type_name(self, wanted: str | None) -> str | None:
        """Return the batch scheduler's name of the GPU type of a job; None: any type."""
        if wanted == ANY_TYPE and self.gpu_types:
            return self.gpu_types.get(ANY_TYPE)
        if wanted == ANY_TYPE:
            wanted = None  # all GPUs are of one
        return self.named_types.get(wanted or self.gpu_type or "")
