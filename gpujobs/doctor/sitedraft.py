"""Drafts a site file from the report of a batch scheduler, for `gpujobs sites init`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..schedulers import Scheduler
from ..schedulers.inventory import LiveNode, LiveQueue, Survey
from ..text import plural, size_text, walltime_text

TO_BE_FILLED_IN = "# to be filled in:"
DEFAULT_WALLTIME = 3600
GIB = 2**30
SHOWN_INTERFACES = 8


@dataclass(frozen=True)
class Host:
    """The host on which the draft is made."""

    name: str
    interfaces: Sequence[str]


@dataclass(frozen=True)
class Entry:
    """One entry of `queues`."""

    key: str
    queue: LiveQueue
    gpus: int
    gpu_type: str
    cpus: int
    memory: int | None
    nodes: int
    whole_nodes: bool = False
    """A job takes all GPUs of a node, since nothing lists those of a job."""
    unknown: int = 0
    """How many other nodes of the queue have GPUs whose number is not reported."""

    def text(self) -> str:
        """Return the entry as a line of YAML."""
        queue, memory = self.queue, self.memory
        keys = {
            "name": _word(queue.name) if queue.name != self.key else None,
            "auto": None if queue.for_user else "false",
            "gpus_per_node": self.gpus or None,
            "gpu_type": _word(self.gpu_type) if self.gpu_type else None,
            "cpus_per_node": self.cpus or None,
            "memory_per_node": size_text(memory) if memory else None,
            "nodes": self.nodes or None,
            "exclusive": "true" if queue.exclusive or self.whole_nodes else None,
            "max_walltime": _time(queue.max_walltime),
            "min_walltime": _time(queue.min_walltime),
            "max_nodes": queue.max_nodes,
            "min_nodes": queue.min_nodes,
            "max_gpus_per_user": queue.gpus_of_user(self.gpu_type) if self.gpus else None,
        }
        listed = ", ".join(f"{name}: {value}" for name, value in keys.items() if value is not None)
        comment = f"   # {queue.restriction}" if queue.restriction else ""
        if self.unknown:
            nodes = plural(self.unknown, "node")
            comment += f"   {TO_BE_FILLED_IN} the GPUs of {nodes}; their number is not reported"
        return f"  {_word(self.key)}: {{{listed}}}{comment}"


def draft(scheduler: type[Scheduler], survey: Survey, host: Host) -> str:
    """Return a commented site file. Marks what the batch scheduler did not report."""
    entries = [entry for queue in survey.queues for entry in _entries(queue, survey.nodes)]
    if survey.visible_devices == "exclusive":
        entries = [
            *(replace(entry, whole_nodes=entry.gpus > 0) for entry in entries),
            *_cpus(entries),
        ]
    return "\n".join(
        [
            *_about(scheduler, host, survey),
            *_account(survey),
            *_request(survey),
            *_types(scheduler, survey, entries),
            *_visible_devices(scheduler, survey),
            *_network(host),
            *([f"max_array_size: {survey.max_array_size}"] if survey.max_array_size else []),
            *_queues(survey, entries),
            *_defaults(entries),
            "",
        ]
    )


def _about(scheduler: type[Scheduler], host: Host, survey: Survey) -> Iterator[str]:
    yield f"# Draft of a site file, from the answers of {scheduler.name} on {host.name}."
    yield "# Review it, then run: gpujobs sites check FILE --live --run"
    yield f"description: the cluster of {host.name}   {TO_BE_FILLED_IN} its name, for users"
    yield f"# contact: support@example.org   {TO_BE_FILLED_IN} address for questions"
    pattern = re.sub(r"\d+", lambda found: r"\d+", re.escape(host.name))
    yield f"# hostnames: ['{pattern}']   {TO_BE_FILLED_IN} pattern of the names of all login nodes"
    if survey.cluster_name:
        yield f"cluster_names: [{json.dumps(re.escape(survey.cluster_name))}]"
    yield f"scheduler: {scheduler.name}"


def _account(survey: Survey) -> Iterator[str]:
    listed = f"   # of this user: {', '.join(survey.accounts)}" if survey.accounts else ""
    if survey.account_required:
        yield f"account: {{required: true}}{listed}"
    elif survey.account_required is None:
        yield f"# account: {{required: true}}   {TO_BE_FILLED_IN} if jobs need an account"
    elif listed:
        yield f"# account: {{}}{listed}; they are not required"


def _request(survey: Survey) -> Iterator[str]:
    for name, lines in (("request", survey.request), ("cpu_request", survey.cpu_request)):
        if lines:
            yield f"{name}:"
            yield from (f"  - {json.dumps(line)}" for line in lines)


def _types(scheduler: type[Scheduler], survey: Survey, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield a mark if a queue has GPUs of several types that no line of the request names."""
    types: dict[str, set[str]] = {}
    for entry in entries:
        types.setdefault(entry.queue.name, set()).update({entry.gpu_type} - {""})
    named = "{gpu_type}" in " ".join(survey.request or scheduler.request)
    if not named and any(len(own) > 1 for own in types.values()):
        yield f"{TO_BE_FILLED_IN} a `request` with {{gpu_type}}: a queue has several GPU types"


def _visible_devices(scheduler: type[Scheduler], survey: Survey) -> Iterator[str]:
    question = f"{TO_BE_FILLED_IN} how a job finds its GPUs, see `visible_devices` in docs/sites.md"
    if survey.visible_devices and survey.visible_devices != scheduler.visible_devices:
        yield f"visible_devices: {survey.visible_devices}"
    elif not survey.visible_devices:
        yield f"visible_devices: scheduler   {question}"


def _network(host: Host) -> Iterator[str]:
    names = ", ".join([name for name in host.interfaces if name != "lo"][:SHOWN_INTERFACES])
    fast = next((name for name in host.interfaces if re.match(r"ib|hsn|bond", name)), "ib0")
    yield (
        f"# network: {{interface: {fast}}}   {TO_BE_FILLED_IN} the fast network of the compute "
        f"nodes; this host has {names or 'none'}"
    )
    yield f"# directory: ~/.gpujobs   {TO_BE_FILLED_IN} if compute nodes do not share your home"


def _queues(survey: Survey, entries: Sequence[Entry]) -> Iterator[str]:
    yield from (f"# {comment}" for comment in survey.comments)
    if not any(entry.gpus for entry in entries):
        yield f"{TO_BE_FILLED_IN} gpus_per_node of the queues; no node reports GPUs"
    yield "# memory_per_node is the memory of the smallest such node; jobs may be allowed less."
    if hidden := [queue.name for queue in survey.queues if queue.hidden]:
        yield f"# left out, because the batch scheduler hides them: {', '.join(hidden)}"
    yield "queues:   # in the order in which `queue: auto` tries them"
    yield from (entry.text() for entry in entries)


def _defaults(entries: Sequence[Entry]) -> Iterator[str]:
    limits = [entry.queue.max_walltime or DEFAULT_WALLTIME for entry in entries]
    walltime = min(DEFAULT_WALLTIME, max(limits, default=DEFAULT_WALLTIME))
    yield f"defaults: {{walltime: {walltime_text(walltime)}}}"


def _entries(queue: LiveQueue, nodes: Sequence[LiveNode]) -> Iterator[Entry]:
    """Yield one entry for each number and type of GPUs in an open queue, the largest first."""
    usable = queue.open and not queue.hidden
    own = [node for node in nodes if usable and node.queue in ("", queue.name)]
    counted = [node for node in own if node.gpus is not None]
    unknown = len({node.name for node in own} - {node.name for node in counted})
    own = counted or own
    shapes = sorted({_shape(node) for node in own}, reverse=True)
    for shape in shapes:
        alike = [node for node in own if _shape(node) == shape]
        entry = _entry(queue, _key(queue.name, *shape, shapes), alike)
        yield replace(entry, unknown=unknown)


def _cpus(entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield an entry for CPU workers, which need no whole nodes, for each queue with GPUs."""
    for entry in entries:
        if entry.gpus:
            yield replace(entry, key=f"{entry.key}-cpu", gpus=0, gpu_type="")


def _shape(node: LiveNode) -> tuple[int, str]:
    return node.gpus or 0, node.gpu_type


def _entry(queue: LiveQueue, key: str, nodes: Sequence[LiveNode]) -> Entry:
    """Return the entry of nodes with the same GPUs, with the least CPUs and memory of them."""
    gpus, gpu_type = _shape(nodes[0])
    memory = min((node.memory for node in nodes if node.memory), default=0)
    return Entry(
        key=key,
        queue=queue,
        gpus=gpus,
        gpu_type=gpu_type,
        cpus=min(node.cpus for node in nodes),
        memory=memory // GIB * GIB or None,
        nodes=len({node.name for node in nodes}),
    )


def _key(queue: str, gpus: int, gpu_type: str, shapes: Sequence[tuple[int, str]]) -> str:
    if len(shapes) == 1:
        return queue
    return f"{queue}-{gpu_type}x{gpus}" if gpus else f"{queue}-cpu"


def _time(seconds: int | None) -> str | None:
    """Return a limit as YAML; None if there is none."""
    return walltime_text(seconds) if seconds else None


def _word(text: str) -> str:
    """Return a name as YAML."""
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", text)
    reserved = text.lower() in ("true", "false", "null", "yes", "no", "on", "off")
    return text if plain and not reserved else json.dumps(text)
