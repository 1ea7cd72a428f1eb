"""The site file: facts about a machine, written once by its administrators for all users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..schedulers import get_scheduler
from ..text import matches
from . import placeholders
from . import sitekinds as kinds
from .model import (
    ARGV,
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
from .profile import LAYOUT, Environment, Layout
from .sitesoftware import Containers, NamedEnvironment, SiteEnvironment, overridden

ANY_TYPE = "any"
"""`gpu_type` of profiles for GPUs of any type."""


# -- the queues of a site file ---------------------------------------------------------------------
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
    """The charge for a GPU that is granted for an hour."""

    per_gpu_hour: float = required(NUMBER, "amount, in units")
    unit: str = required(WORD, "SU, EUR")


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
class _OfSiteOrQueue(Model):
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
class Queue(_OfSiteOrQueue):
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


# -- the site file ---------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Site(_OfSiteOrQueue):
    """A site file. The site's name is the file's stem."""

    description: str = required(TEXT, "name of the machine, for users")
    source: str | None = optional(TEXT, "where these values are from, such as an address")
    contact: str | None = optional(
        TEXT, "for questions; shown with the site, and if the batch scheduler refuses a job"
    )
    maintainers: tuple[str, ...] = optional(
        kinds.NOTES, "who keeps this file up to date, e.g. @names of a repository", default=()
    )
    hostnames: tuple[str, ...] = optional(
        Items(PATTERN, extendable=True),
        "regular expressions; a full match of the host name selects the site",
        default=(),
    )
    hosts: tuple[str, ...] = optional(
        Items(WORD),
        "login nodes for ssh; the first is used where its batch scheduler is not",
        default=(),
    )
    environment_variables: dict[str, str] = optional(
        Table(kinds.VARIABLE_NAME, PATTERN),
        "variable → regular expression; if all match, this selects the site before `hostnames`",
        default={},
    )
    cluster_names: tuple[str, ...] = optional(
        Items(PATTERN, extendable=True),
        "regular expressions; Slurm's ClusterName selects the site if no host name does",
        default=(),
    )
    scheduler: str = required(kinds.SchedulerName(), "the batch scheduler")
    extends: str | None = optional(TEXT, "another site that this one is layered on")
    queues: dict[str, Queue] = required(
        Table(WORD, Section(Queue), empty="needs at least one queue", removable=True),
        "name → shape and limits, in the order that `queue: auto` tries",
    )
    queue_defaults: Queue = optional(
        Section(Queue), "keys of all queues that do not have them", default=Queue()
    )
    directives: tuple[str, ...] = optional(
        kinds.SITE_DIRECTIVES, "extra directives for each job", default=()
    )
    network: SiteNetwork = optional(
        Section(SiteNetwork), "interface and allowed protocols", default=SiteNetwork()
    )
    mpi: Mpi = optional(Section(Mpi), "how MPI is started", default=Mpi())
    workers_launcher: tuple[str, ...] = optional(
        kinds.WORKERS_LAUNCHER,
        "starts the processes of a job on its node, such as jsrun",
        default=(),
    )
    node_launcher: tuple[str, ...] = optional(
        kinds.NODE_LAUNCHER,
        "starts a process on each node of a job (`layout: allocation`); with {node}, on one",
        default=(),
    )
    run_launcher: tuple[str, ...] = optional(
        kinds.WORKERS_LAUNCHER,
        "starts `run` on a compute node where another launcher starts the workers, such as jsrun",
        default=(),
    )
    containers: Containers = optional(
        Section(Containers), "container runtime, images, binds", default=Containers()
    )
    shell: str = optional(
        kinds.SHELL,
        "bash in the first line of every script; /bin/bash -l is a login shell, with module",
        default="/bin/bash",
    )
    environment: SiteEnvironment = optional(
        Section(SiteEnvironment),
        "environment that is copied to the nodes",
        default=SiteEnvironment(),
    )
    environments_only: bool = optional(
        FLAG,
        "refuse profiles without a name of `environments`, or with another Python, setup or "
        "container; a rule, not a fence",
        default=False,
    )
    setup: str = optional(SCRIPT, "bash text run first in every job, before the user's", default="")
    scratch: str = optional(
        kinds.FOLDER, "node-local scratch space, as the job sees it", default="${TMPDIR:-/tmp}"
    )
    directory: str = optional(
        kinds.FOLDER, "folder that login and compute nodes can write", default="~/.gpujobs"
    )
    quota_command: tuple[str, ...] = optional(
        ARGV,
        "prints the quota of the user, such as [lfs, quota, -q, /scratch]; plan, submit and doctor "
        "run it and warn if less than 1 GiB or 10,000 files are left",
        default=(),
    )
    cluster: str | None = optional(WORD, "name in a multi-cluster setup, for all commands")
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
    max_idle_timeout: int | None = optional(
        DURATION, "longest time without tasks of clusters without run, longest client_timeout"
    )
    defaults: dict[str, object] = optional(kinds.DEFAULTS, "any keys of a profile", default={})

    instead_of_required = "extends"

    def check(self) -> None:
        """Check that the batch scheduler supports `cluster`."""
        super().check()
        for key in self.queues:
            try:
                self.in_queue(key).network.check()
            except ValueError as error:
                raise ValueErrorInside(str(error), "queues", key, "network") from None
        if self.cluster and not get_scheduler(self.scheduler).multi_cluster:
            raise ValueErrorInside(f"{self.scheduler} does not support it here", "cluster")
        for place, section in self.sections():
            self._check_account(section.account, *place)
        self._check_lines()
        self._check_uses()

    def _check_lines(self) -> None:
        """Check that the names of options in lines exist."""
        options = {name for _, section in self.sections() for name in section.options}
        for place, line in self._lines():
            try:
                placeholders.check_options(line, options)
            except ValueError as error:
                raise ValueErrorInside(str(error), *place) from error

    def _check_uses(self) -> None:
        """Check that a line has each option without a directive of its own."""
        used = {name for _, line in self._lines() for name in placeholders.names(line)}
        for place, section in self.sections():
            for name, option in section.options.items():
                if not option.directive and name not in used:
                    message = f"needs `directive`: no line of the site has {{{name}}}"
                    raise ValueErrorInside(message, *place, "options", name)

    def _lines(self) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the lines for the batch scheduler of the site and its queues, and their places."""
        for place, section in self.sections():
            for key in _LINES:
                for number, line in enumerate(getattr(section, key) or ()):
                    yield (*place, key, number), line

    def sections(self) -> Iterator[tuple[tuple[str, ...], Site | Queue]]:
        """Yield the site and its queues, which may have the same keys, and their places."""
        yield (), self
        for key, queue in self.queues.items():
            yield ("queues", key), queue

    def _check_account(self, account: Account | None, *place: str) -> None:
        """Refuse a directive that sets other options than the account."""
        scheduler = get_scheduler(self.scheduler)
        if account is None or not account.directive or scheduler.on_this_machine:
            return
        try:
            options = scheduler().options(account.directive)
        except ValueError as error:
            message = f"is no directive: {error}"
            raise ValueErrorInside(message, *place, "account", "directive") from None
        if len(options) > 1:
            names = " and ".join(sorted(options))
            message = f"must set one option, the account, not {names}; others are `directives`"
            raise ValueErrorInside(message, *place, "account", "directive")

    def in_queue(self, key: str) -> Site:
        """Return this site with the values that the queue ``key`` has instead."""
        own = self.queues[key]
        values = {name: getattr(own, name) for name in _OVERRIDDEN}
        given = {name: value for name, value in values.items() if value is not None}
        if own.request is not None and own.multi_node_request is None:
            given["multi_node_request"] = None  # the queue's `request` replaces both
        for name in ("submit_arguments", "layouts"):
            if name in own.given:
                given[name] = getattr(own, name)
        return replace(
            self,
            **given,
            options={**self.options, **own.options},
            environments={**self.environments, **own.environments},
            network=overridden(self.network, own.network),
            containers=self.containers.with_own(own.containers),
            environment=overridden(self.environment, own.environment),
        )

    @property
    def has_accounts(self) -> bool:
        """Whether an account has a meaning in one of its queues."""
        stated = self.account or any(queue.account for queue in self.queues.values())
        local = get_scheduler(self.scheduler).on_this_machine
        return bool(stated) or not (local or "account" in self.given)

    @property
    def environment_names(self) -> set[str]:
        """The names of its environments, and of those that only queues have."""
        return {name for _, section in self.sections() for name in section.environments}

    def with_environment(self, own: Environment) -> Environment:
        """Return the environment of a profile, with the keys of the one that it names.

        One that this site, or its queue, does not have is returned as it is.
        """
        named = self.environments.get(own.name or "")
        return named.with_own(own) if named else own

    @property
    def one_machine(self) -> bool:
        """Whether all processes of its clusters are on this machine."""
        return get_scheduler(self.scheduler).on_this_machine and not self.node_launcher

    def queue_name(self, key: str) -> str:
        """Return the batch scheduler's name of the queue entry ``key``."""
        return self.queues[key].name or key


_LINES = ("request", "cpu_request", "multi_node_request", "directives", "submit_arguments")
"""Keys with lines for the batch scheduler."""
_OVERRIDDEN = (
    "request", "cpu_request", "multi_node_request", "directives", "account", "visible_devices",
    "setup", "scratch", "mpi", "workers_launcher", "node_launcher", "run_launcher",
)  # fmt: skip
"""Keys whose value in a queue replaces that of the site, also an empty one.

An empty `request` is the built-in one.
"""
