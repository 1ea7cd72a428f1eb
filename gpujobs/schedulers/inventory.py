"""How a batch scheduler reports its queues and nodes: commands and parsers, no I/O."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from .jobs import CommandResult

Ask = Callable[[Sequence[str]], str]
"""Runs a command; returns its output, "" if it fails."""


@dataclass(frozen=True)
class LiveNode:
    """One node as one queue sees it, with its GPUs of one type."""

    name: str
    queue: str
    """The batch scheduler's name of the queue; "" if all queues use the node."""
    usable: bool
    """Whether jobs may start on it now."""
    cpus: int
    free_cpus: int
    memory: int | None
    """Of the whole node, in bytes; None if it is not reported."""
    gpus: int | None
    """None if their number is not reported."""
    free_gpus: int | None
    """None if it is not reported."""
    gpu_type: str = ""


@dataclass(frozen=True)
class LiveQueue:
    """A queue and its limits; None: no limit, or none that is reported."""

    name: str
    max_walltime: int | None = None
    """In seconds."""
    max_nodes: int | None = None
    min_nodes: int | None = None
    min_walltime: int | None = None
    """In seconds."""
    exclusive: bool = False
    """Whether each job gets whole nodes, whether it asks for them or not."""
    late_signal: str = ""
    """Why jobs that are preempted do not get a signal when their grace time begins; "": they do."""
    open: bool = True
    hidden: bool = False
    """Whether the batch scheduler hides it from most users."""
    restriction: str = ""
    """Which users it is for, as text; "" for all."""
    for_user: bool = True
    """False if no account, or no QOS, of the user who asks is among those that may use it."""
    user_gpus: Mapping[str, int] = field(default_factory=dict)
    """The most GPUs of one user, by type; "" for GPUs of any type."""

    def gpus_of_user(self, gpu_type: str | None) -> int | None:
        """Return the most GPUs of one user, if they are all of this type."""
        limits = [self.user_gpus.get(name) for name in ("", gpu_type or "")]
        return min((limit for limit in limits if limit), default=None)


@dataclass(frozen=True)
class Survey:
    """All that a batch scheduler reports about itself, for a site file."""

    queues: tuple[LiveQueue, ...]
    nodes: tuple[LiveNode, ...]
    max_array_size: int | None = None
    accounts: tuple[str, ...] = ()
    """Accounts of this user."""
    account_required: bool | None = None
    """Whether jobs need an account, their own or the user's default one; None: not known."""
    request: tuple[str, ...] = ()
    """`request` of the site file, if the built-in one is not enough."""
    cpu_request: tuple[str, ...] = ()
    visible_devices: str = ""
    """`visible_devices` as YAML; "" if it is not known."""
    parallel_environments: tuple[str, ...] | None = None
    """Names that ``-pe`` may have; None if there is no such thing."""
    resources: tuple[str, ...] | None = None
    """Resources that ``-l`` may have; None if they are not reported."""
    comments: tuple[str, ...] = ()
    """Facts for the administrator."""
    cluster_name: str = ""
    """"" if it is not known."""


class Inventory(ABC):
    """The commands of one batch scheduler that report queues and nodes.

    ``cluster`` is the site's multi-cluster name.
    """

    commands: ClassVar[tuple[str, ...]]
    """All that it runs; hosts of other batch schedulers do not have the first one."""
    version_command: ClassVar[tuple[str, ...]] = ()
    """A command whose output has the version of the batch scheduler; empty: there is none."""
    version_pattern: ClassVar[str] = r"\b(\d+\.\d[\w.+~-]*)"

    def __init__(self, cluster: str | None = None) -> None:
        self.cluster = cluster

    @classmethod
    def configuration_files(cls, environ: Mapping[str, str]) -> list[str]:
        """Return the paths of files that may name the cluster, the best first."""
        return []

    @classmethod
    def cluster_name(cls, text: str) -> str:
        """Return the name of the cluster in the text of a configuration file, or ""."""
        return ""

    @abstractmethod
    def nodes_command(self) -> list[str]:
        """Return ONE command that reports all nodes and their free resources.

        If it fails, the batch scheduler is not available.
        """

    @abstractmethod
    def parse_nodes(self, result: CommandResult) -> list[LiveNode]:
        """Return the nodes."""

    def nodes(self, ask: Ask) -> list[LiveNode]:
        """Return the nodes and their free resources."""
        command = self.nodes_command()
        return self.parse_nodes(CommandResult(tuple(command), 0, ask(command)))

    @abstractmethod
    def survey(self, ask: Ask, user: str) -> Survey:
        """Return queues, nodes, settings and the accounts of ``user``.

        ``ask`` runs commands that only read.
        """

    def version(self, ask: Ask) -> str:
        """Return the version of the batch scheduler; "" if it is not reported."""
        if not self.version_command:
            return ""
        return next(iter(re.findall(self.version_pattern, ask(self.version_command))), "")

    def unknown(self, line: str, survey: Survey) -> str:
        """Return why the batch scheduler does not know a name in the directive ``line``, or ""."""
        return ""


def several_types(nodes: Sequence[LiveNode]) -> bool:
    """Return whether the nodes have GPUs of several types, and the type of each is reported."""
    types = {node.gpu_type for node in nodes if node.gpus}
    return len(types) > 1 and "" not in types


def has_memory(nodes: Sequence[LiveNode]) -> bool:
    """Return whether all nodes with GPUs report at least 1 GiB, which jobs can then request."""
    return all((node.memory or 0) >= 2**30 for node in nodes if node.gpus)
