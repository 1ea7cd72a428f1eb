"""The site file: facts about a machine, written once by its administrators for all users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from ..schedulers import get_scheduler
from .kinds import (
    ARGV,
    DURATION,
    PATTERN,
    POSITIVE,
    SCRIPT,
    TEXT,
    WORD,
    Items,
    Table,
    ValueErrorInside,
)
from .model import Model, Section, optional, required
from .profile import RUNTIME, Runtime
from .queue import Account, Mpi, Option, Queue, SiteNetwork, check_options
from .sitekinds import (
    BINDS,
    DEFAULTS,
    FOLDER,
    IMAGES,
    LAYOUTS,
    NOTES,
    OPTION_NAME,
    SHELL,
    SITE_DIRECTIVES,
    SUBMIT_ARGUMENTS,
    VARIABLE_NAME,
    VISIBLE_DEVICES,
    WORKERS_LAUNCHER,
    LayoutName,
    SchedulerName,
    VisibleDevices,
)

T = TypeVar("T")


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
class Site(Model):
    """A site file. The site's name is the file's stem."""

    description: str = required(TEXT, "name of the machine, for users")
    source: str | None = optional(TEXT, "reference for these numbers, for administrators")
    contact: str | None = optional(TEXT, "contact address, for users")
    hostnames: tuple[str, ...] = optional(
        Items(PATTERN, extendable=True),
        "regular expressions; a full match of the host name selects the site",
        default=(),
    )
    environment_variables: dict[str, str] = optional(
        Table(VARIABLE_NAME, PATTERN),
        "variable → regular expression; if all match, this selects the site before `hostnames`",
        default={},
    )
    cluster_names: tuple[str, ...] = optional(
        Items(PATTERN, extendable=True),
        "regular expressions; Slurm's ClusterName selects the site if no host name does",
        default=(),
    )
    scheduler: str = required(SchedulerName(), "the batch scheduler")
    extends: str | None = optional(TEXT, "another site that this one is layered on")
    queues: dict[str, Queue] = required(
        Table(WORD, Section(Queue), empty="needs at least one queue", removable=True),
        "name → shape and limits, in the order that `queue: auto` tries",
    )
    queue_defaults: Queue = optional(
        Section(Queue), "keys of all queues that do not have them", default=Queue()
    )
    request: tuple[str, ...] | None = optional(
        SITE_DIRECTIVES, "all directives that request the resources of a GPU job"
    )
    cpu_request: tuple[str, ...] | None = optional(
        SITE_DIRECTIVES, "the same for jobs without GPUs"
    )
    multi_node_request: tuple[str, ...] | None = optional(
        SITE_DIRECTIVES, "`request` of jobs of several nodes, if it differs"
    )
    directives: tuple[str, ...] = optional(
        SITE_DIRECTIVES, "extra directives for every job", default=()
    )
    submit_arguments: tuple[str, ...] = optional(
        SUBMIT_ARGUMENTS, "arguments of sbatch, qsub or bsub, such as -g {account}", default=()
    )
    options: dict[str, Option] = optional(
        Table(OPTION_NAME, Section(Option)), "directives with values of the profile", default={}
    )
    account: Account | None = optional(Section(Account), "how the account is named")
    visible_devices: VisibleDevices | None = optional(
        VISIBLE_DEVICES, "how a job finds out which GPUs it has"
    )
    network: SiteNetwork = optional(
        Section(SiteNetwork), "interface and allowed protocols", default=SiteNetwork()
    )
    mpi: Mpi = optional(Section(Mpi), "how MPI is started", default=Mpi())
    workers_launcher: tuple[str, ...] = optional(
        WORKERS_LAUNCHER, "starts the processes of a job on its node, such as jsrun", default=()
    )
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
        DURATION, "longest time without tasks of clusters without run, longest client_timeout"
    )
    layouts: tuple[LayoutName, ...] = optional(
        LAYOUTS, "layouts of profiles that the site allows; default: all", default=()
    )
    notes: tuple[str, ...] = optional(NOTES, "shown with every plan", default=())
    defaults: dict[str, object] = optional(DEFAULTS, "any keys of a profile", default={})

    instead_of_required = "extends"

    def check(self) -> None:
        """Check that the batch scheduler supports `cluster`."""
        check_options(self.options)
        for key in self.queues:
            try:
                self.network_of(key).check()
            except ValueError as error:
                raise ValueErrorInside(str(error), "queues", key, "network") from None
        if self.cluster and not get_scheduler(self.scheduler).multi_cluster:
            raise ValueErrorInside(f"{self.scheduler} does not support it here", "cluster")
        for place, account in self._accounts():
            self._check_account(account, *place)

    def _accounts(self) -> Iterator[tuple[tuple[str, ...], Account | None]]:
        """Yield how the account is named, by the site and by its queues, and where it stands."""
        yield (), self.account
        for key, queue in self.queues.items():
            yield ("queues", key), queue.account

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
        queue = self.queues[key]
        return replace(
            self,
            setup=_either(queue.setup, self.setup),
            scratch=queue.scratch or self.scratch,
            mpi=queue.mpi or self.mpi,
            workers_launcher=_either(queue.workers_launcher, self.workers_launcher),
            network=self.network_of(key),
            options={**self.options, **queue.options},
        )

    def network_of(self, key: str) -> SiteNetwork:
        """Return the network of jobs in the queue ``key``: its own keys over those of the site."""
        own = self.queues[key].network
        if own is None:
            return self.network
        values = {name: getattr(own, name) for name in own.given}
        return replace(self.network, **values, given=self.network.given | own.given)

    def queue_name(self, key: str) -> str:
        """Return the batch scheduler's name of the queue entry ``key``."""
        return self.queues[key].name or key


def _either(own: T | None, default: T) -> T:
    """Return the value of a queue, else the one of its site; a queue's may be empty."""
    return default if own is None else own
