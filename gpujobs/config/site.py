"""The site file: facts about a machine, written once by its administrators for all users."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..schedulers import get_scheduler
from . import placeholders
from . import sitekinds as kinds
from .model import (
    ARGV,
    DURATION,
    FLAG,
    PATTERN,
    POSITIVE,
    SCRIPT,
    TEXT,
    WORD,
    Items,
    Section,
    Table,
    ValueErrorInside,
    optional,
    required,
)
from .profile import Environment
from .sitequeue import Account, Mpi, OfSiteOrQueue, Queue, SiteNetwork
from .sitesoftware import Containers, SiteEnvironment, overridden


@dataclass(frozen=True, kw_only=True)
class Site(OfSiteOrQueue):
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
    machines: tuple[str, ...] = optional(
        Items(kinds.MACHINE),
        "`scheduler: local` only: machines for ssh; a job has the free GPUs of all of them",
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
        self._check_machines()
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

    def _check_machines(self) -> None:
        """Refuse machines beside a batch scheduler or another launcher, and one named twice."""
        message = ""
        if self.machines and not get_scheduler(self.scheduler).on_this_machine:
            message = f"{self.scheduler} finds its nodes by itself; `scheduler: local` has machines"
        elif self.machines and self.node_launcher:
            message = "are started by ssh; `node_launcher` is another launcher"
        elif len(set(self.machines)) < len(self.machines):
            message = "has a machine twice"
        if message:
            raise ValueErrorInside(message, "machines")

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
        others = self.node_launcher or self.machines
        return get_scheduler(self.scheduler).on_this_machine and not others

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
