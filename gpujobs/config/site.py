"""The site file: facts about a machine, written once by its administrators for all users."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedulers import get_scheduler
from .kinds import (
    ARGV,
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
    Scalar,
    Table,
)
from .model import Model, Section, optional, required
from .profile import RUNTIME, Runtime
from .sitekinds import (
    BINDS,
    DEFAULTS,
    FOLDER,
    IMAGES,
    LAUNCHER,
    PROTOCOLS,
    SHELL,
    SITE_DIRECTIVES,
    VISIBLE_DEVICES,
    Protocol,
    SchedulerName,
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
class SiteEnvironment(Model):
    """An environment of the site that its jobs copy to their nodes."""

    staging: str | None = optional(
        FOLDER, "tarball with bin/python that is unpacked once per node; jobs use its Python"
    )
    staging_folder: str | None = optional(
        FOLDER, "node-local folder that outlives jobs; default: the site's scratch"
    )


@dataclass(frozen=True, kw_only=True)
class Containers(Model):
    """How jobs run in containers."""

    runtime: Runtime | None = optional(RUNTIME, "for profiles that name none")
    images: dict[str, str] = optional(IMAGES, "name → path or address of an image", default={})
    binds: tuple[str, ...] = optional(
        BINDS, "folders of the node, as PATH or PATH:PATH_IN_THE_CONTAINER", default=()
    )
    args: tuple[str, ...] = optional(
        ARGV, "arguments of this runtime, before the profile's", default=()
    )

    def check(self) -> None:
        """Check that the arguments have a runtime."""
        if self.args and not self.runtime:
            raise ValueError("needs `runtime` with `args`: they are those of one runtime")


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
    nodes: int | None = optional(POSITIVE, "number of nodes; `plan` notes clusters that need more")
    exclusive: bool = optional(FLAG, "jobs get whole nodes", default=False)
    gpu_fractions: bool = optional(
        FLAG, "{gpus_per_cpu} may be a decimal fraction such as 0.5", default=False
    )
    max_walltime: int | None = optional(DURATION, "longest walltime")
    max_nodes: int | None = optional(POSITIVE, "most nodes of one job")
    min_nodes: int | None = optional(POSITIVE, "fewest nodes of one job")
    max_gpus: int | None = optional(POSITIVE, "most GPUs of one job")
    max_jobs: int | None = optional(POSITIVE, "most jobs of one user; checked per cluster")
    request: tuple[str, ...] | None = optional(SITE_DIRECTIVES, "overrides the site's")
    cpu_request: tuple[str, ...] | None = optional(SITE_DIRECTIVES, "overrides the site's")
    directives: tuple[str, ...] | None = optional(SITE_DIRECTIVES, "overrides the site's")
    account: Account | None = optional(Section(Account), "overrides the site's")
    visible_devices: VisibleDevices | None = optional(VISIBLE_DEVICES, "overrides the site's")

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
    scheduler: str = required(SchedulerName(), "the batch scheduler")
    extends: str | None = optional(TEXT, "another site that this one is layered on")
    queues: dict[str, Queue] = required(
        Table(WORD, Section(Queue), empty="needs at least one queue"),
        "name → shape and limits, in the order that `queue: auto` tries",
    )
    request: tuple[str, ...] | None = optional(
        SITE_DIRECTIVES, "all directives that request the resources of a GPU job"
    )
    cpu_request: tuple[str, ...] | None = optional(
        SITE_DIRECTIVES, "the same for jobs without GPUs"
    )
    directives: tuple[str, ...] = optional(
        SITE_DIRECTIVES, "extra directives for every job", default=()
    )
    account: Account | None = optional(Section(Account), "how the account is named")
    visible_devices: VisibleDevices | None = optional(
        VISIBLE_DEVICES, "how a job finds out which GPUs it has"
    )
    network: SiteNetwork = optional(
        Section(SiteNetwork), "interface and allowed protocols", default=SiteNetwork()
    )
    mpi: Mpi = optional(Section(Mpi), "how MPI is started", default=Mpi())
    containers: Containers = optional(
        Section(Containers), "container runtime, images, binds", default=Containers()
    )
    shell: str = optional(SHELL, "first line of every script", default="/bin/bash")
    environment: SiteEnvironment = optional(
        Section(SiteEnvironment),
        "environment that is copied to the nodes",
        default=SiteEnvironment(),
    )
    setup: str = optional(SCRIPT, "bash text run first in every job, before the user's", default="")
    scratch: str = optional(
        FOLDER, "node-local scratch space, as the job sees it", default="${TMPDIR:-/tmp}"
    )
    directory: str = optional(
        FOLDER, "folder that login and compute nodes can write", default="~/.gpujobs"
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
    max_idle_timeout: int | None = optional(
        DURATION, "longest idle_timeout and client_timeout of clusters without run"
    )
    defaults: dict[str, object] = optional(DEFAULTS, "any keys of a profile", default={})

    instead_of_required = "extends"

    def check(self) -> None:
        """Check that the batch scheduler supports `cluster`."""
        if self.cluster and not get_scheduler(self.scheduler).multi_cluster:
            raise ValueError(f"cannot have `cluster`: {self.scheduler} does not support it here")

    def queue_name(self, key: str) -> str:
        """Return the batch scheduler's name of the queue entry ``key``."""
        return self.queues[key].name or key
