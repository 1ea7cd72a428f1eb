"""Compares a site file with the batch scheduler of this host, for `gpujobs sites check --live`."""

from __future__ import annotations

import getpass
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..batch.client import SchedulerClient
from ..batch.process import is_available
from ..clusters.siteclient import TIMEOUT, ask_with, site_client
from ..config import placeholders
from ..config.document import Document
from ..config.queue import Queue
from ..config.sitefiles import SiteFile
from ..errors import InputError, Problem, UnavailableError
from ..planning.directives import request_texts
from ..planning.sitecheck import NO_SETTINGS, Finding, findings, try_site
from ..schedulers import Scheduler, get_scheduler, scheduler_names
from ..schedulers.inventory import Inventory, LiveNode, LiveQueue, Survey
from ..text import plural, size_text, walltime_text
from .checks import Check, passed, warning

OTHER_SCHEDULER = "is this a login node? --scheduler NAME names the one to ask"


def take_survey(client: SchedulerClient) -> Survey | None:
    """Return the queues and nodes of the batch scheduler; None if gpujobs cannot ask for them.

    Raises UnavailableError if the first command fails; the answers of others may be missing.
    """
    kind = client.scheduler.inventory
    if kind is None:
        return None
    inventory = kind(client.scheduler.cluster)
    return inventory.survey(ask_with(client, inventory), getpass.getuser())


def find_survey(name: str | None) -> tuple[SchedulerClient, Survey]:
    """Return the batch scheduler of this host, and its queues and nodes.

    ``name``: the value of `scheduler`; None: the first one that answers. Raises InputError if there
    is none.
    """
    reasons = []
    for client in _clients(name):
        try:
            survey = take_survey(client)
        except UnavailableError as error:
            reasons.append(f"{client.scheduler.name}: {error}")
            continue
        if survey and survey.nodes:
            return client, survey
        reasons.append(f"{client.scheduler.name} reports no nodes")
    if reasons:
        raise UnavailableError("\n".join(reasons), hint=OTHER_SCHEDULER)
    message = "no command of a batch scheduler was found on this host"
    raise InputError(message, hint=OTHER_SCHEDULER)


def _clients(name: str | None) -> list[SchedulerClient]:
    """Return the batch scheduler ``name``, or those whose commands are on this host."""
    kinds = [get_scheduler(known) for known in ([name] if name else scheduler_names())]
    return [SchedulerClient(kind(), timeout=TIMEOUT) for kind in kinds if name or _is_here(kind)]


def _is_here(kind: type[Scheduler]) -> bool:
    return kind.inventory is not None and is_available(kind.inventory.own_command)


def live_findings(
    site_file: SiteFile, settings: Document = NO_SETTINGS
) -> tuple[list[Finding], list[Check]]:
    """Return the differences between the file and the batch scheduler, and what was compared.

    ``settings``: keys of the profiles whose scripts the batch scheduler tests.

    Raises UnavailableError if the batch scheduler does not answer.
    """
    client = site_client(site_file)
    survey, name = take_survey(client), client.scheduler.name
    if survey is None:
        checks = [warning("live", f"{name}: gpujobs cannot ask for its queues")]
        found = []
    else:
        nodes = len({node.name for node in survey.nodes})
        number = f"{plural(len(survey.queues), 'queue')}, {plural(nodes, 'node')}"
        checks = [passed("live", f"{name} reports {number}")]
        if not any(node.gpus for node in survey.nodes):
            checks.append(warning("GPUs", f"not compared: {name} reports none"))
        found = [Finding(problem) for problem in Comparison(site_file, survey).problems()]
    refused, check = _test_scripts(client, site_file, settings)
    return [*found, *refused], [*checks, check]


def _test_scripts(
    client: SchedulerClient, site_file: SiteFile, settings: Document
) -> tuple[list[Finding], Check]:
    """Let the batch scheduler test each script, without submitting it."""
    argv = client.scheduler.estimate_command()
    if argv is None:
        return [], warning("scripts", f"not tested: {client.scheduler.name} has no such command")
    command, refused, tested = " ".join(argv), [], 0
    for result in try_site(site_file, settings, any_account=False):
        tested += len(result.scripts)
        messages = (client.refusal(script.text, Path.cwd()) for script in result.scripts)
        if message := next(filter(None, messages), None):
            position = site_file.document.key_position(result.trial.place)
            problem = Problem(f"{command} refuses the script: {message}", position)
            refused.append(replace(result, problems=(problem,)))
    if not tested:
        remedy = "if the site requires an account: --set account=…"
        return [], warning("scripts", "not tested: no profile can be planned", remedy)
    return findings(refused), passed("scripts", f"{plural(tested, 'script')}: {command}")


@dataclass(frozen=True)
class Comparison:
    """A site file, and what its batch scheduler reports."""

    site_file: SiteFile
    survey: Survey

    @property
    def scheduler(self) -> type[Scheduler]:
        """The class of the batch scheduler."""
        return get_scheduler(self.site_file.site.scheduler)

    @property
    def _reports_gpus(self) -> bool:
        """Whether GPUs are reported at all: a site may have its own resource for them."""
        return any(node.gpus for node in self.survey.nodes)

    def problems(self) -> Iterator[Problem]:
        """Yield each difference at its line of the file."""
        site, most = self.site_file.site, self.survey.max_array_size
        for key, queue in site.queues.items():
            yield from self._queue_problems(key, queue)
        yield from self._unknown_names()
        if most and site.max_array_size and site.max_array_size > most:
            yield self._problem(f"arrays have at most {most} jobs", "max_array_size")

    def _queue_problems(self, key: str, queue: Queue) -> Iterator[Problem]:
        site = self.site_file.site
        name = site.queue_name(key)
        live = next((live for live in self.survey.queues if live.name == name), None)
        nodes = [node for node in self.survey.nodes if node.queue in ("", name)]
        if live is None:
            if self._names_the_queue(key, queue):
                known = ", ".join(sorted(live.name for live in self.survey.queues))
                yield self._problem(f"there is no queue {name}; there are {known}", "queues", key)
            return
        yield from self._limit_problems(key, queue, live)
        yield from self._node_problems(key, queue, nodes)

    def _names_the_queue(self, key: str, queue: Queue) -> bool:
        """Return whether jobs name the queue; otherwise its key is only the name of a shape."""
        gpus = bool(queue.gpus_per_node)
        texts = request_texts(self.site_file.site, self.scheduler(), key, gpus=gpus, nodes=1)
        return "queue" in placeholders.names(" ".join(texts))

    def _limit_problems(self, key: str, queue: Queue, live: LiveQueue) -> Iterator[Problem]:
        own, limit = queue.max_walltime, live.max_walltime
        if own and limit and own > limit:
            message = f"the walltime in queue {live.name} is at most {walltime_text(limit)}"
            yield self._problem(message, "queues", key, "max_walltime")
        if queue.max_nodes and live.max_nodes and queue.max_nodes > live.max_nodes:
            message = f"jobs in queue {live.name} have at most {plural(live.max_nodes, 'node')}"
            yield self._problem(message, "queues", key, "max_nodes")
        most = live.gpus_of_user(queue.type_name(None))
        if queue.max_gpus_per_user and most and queue.max_gpus_per_user > most:
            message = f"one user has at most {plural(most, 'GPU')} in queue {live.name}"
            yield self._problem(message, "queues", key, "max_gpus_per_user")
        if not live.open:
            yield self._problem(f"queue {live.name} is closed", "queues", key)

    def _node_problems(
        self, key: str, queue: Queue, nodes: Sequence[LiveNode]
    ) -> Iterator[Problem]:
        if queue.gpus_per_node:
            types = sorted({node.gpu_type for node in nodes if node.gpu_type})
            if types and (unknown := sorted(set(queue.named_types.values()) - set(types))):
                message = f"its nodes have GPUs of type {', '.join(types)}, not {unknown[0]}"
                name = "gpu_types" if queue.gpu_types else "gpu_type"
                yield self._problem(message, "queues", key, name)
                return
            nodes = _nodes_of_types(nodes, queue)
            yield from self._gpu_problems(key, queue, nodes)
            nodes = [node for node in nodes if (node.gpus or 0) >= queue.gpus_per_node]
        if nodes:
            yield from self._size_problems(key, queue, nodes)

    def _gpu_problems(self, key: str, queue: Queue, nodes: Sequence[LiveNode]) -> Iterator[Problem]:
        numbers = sorted({node.gpus for node in nodes if node.gpus is not None})
        if numbers and self._reports_gpus and queue.gpus_per_node not in numbers:
            listed = " or ".join(map(str, numbers))
            yield self._problem(f"its nodes have {listed} GPUs", "queues", key, "gpus_per_node")

    def _size_problems(
        self, key: str, queue: Queue, nodes: Sequence[LiveNode]
    ) -> Iterator[Problem]:
        cpus = max(node.cpus for node in nodes)
        if queue.cpus_per_node and queue.cpus_per_node > cpus:
            yield self._problem(
                f"its nodes have {plural(cpus, 'CPU')}", "queues", key, "cpus_per_node"
            )
        memory = max(node.memory or 0 for node in nodes)
        if queue.memory_per_node and memory and queue.memory_per_node > memory:
            message = f"its nodes have {size_text(memory)} of memory"
            yield self._problem(message, "queues", key, "memory_per_node")
        number = len({node.name for node in nodes})
        if queue.nodes and queue.nodes > number:
            yield self._problem(f"it has {plural(number, 'such node')}", "queues", key, "nodes")

    def _unknown_names(self) -> Iterator[Problem]:
        kind = self.scheduler.inventory
        if kind is None:
            return
        inventory: Inventory = kind(self.site_file.site.cluster)
        site = self.site_file.site
        tables: list[tuple[tuple[str, ...], object]] = [((), site)]
        tables += [(("queues", key), queue) for key, queue in site.queues.items()]
        for place, holder in tables:
            for name in ("request", "cpu_request", "multi_node_request", "directives"):
                for number, line in enumerate(getattr(holder, name) or ()):
                    if message := inventory.unknown(line, self.survey):
                        yield self._problem(message, *place, name, number)

    def _problem(self, message: str, *loc: str | int) -> Problem:
        name = self.site_file.site.scheduler
        return Problem(f"{name}: {message}", self.site_file.document.key_position(loc))


def _nodes_of_types(nodes: Sequence[LiveNode], queue: Queue) -> list[LiveNode]:
    """Return the nodes whose GPUs are of a type of the queue, if types are reported."""
    types = queue.named_types.values()
    return [node for node in nodes if not types or node.gpu_type in ("", *types)]
