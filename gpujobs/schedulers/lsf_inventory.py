"""Queues and hosts of LSF: bhosts, bqueues, lshosts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from .formats import find_integer, integer, memory_bytes
from .inventory import Ask, Inventory, LiveNode, LiveQueue, Survey, has_memory, several_types
from .jobs import CommandResult

_USABLE = ("ok", "closed_Full")
_GPU_RESOURCES = ("ngpus", "ngpus_physical", "gpus")
"""Shared or host resources that count GPUs where LSF has no ``-gpu``."""
_GPU_FIELDS = (
    "ngpus", "ngpus_alloc", "ngpus_excl_alloc", "ngpus_shared_alloc", "ngpus_shared_jexcl_alloc",
    "ngpus_excl_avail", "ngpus_shared_avail",
)  # fmt: skip
_CPU_REQUEST = ("-q {queue}", "-n {cpus_per_job}", '-R "span[ptile={cpus_per_node}]"')
"""Without memory: versions without ``-gpu`` refuse the unit in ``rusage[mem=1024MB]``."""
_GPUS_COMMAND = ["bhosts", "-o", f"HOST_NAME {' '.join(_GPU_FIELDS)} delimiter='|'"]


class LSFInventory(Inventory):
    """One row for each host; all queues use it, unless they name their hosts."""

    commands = ("bhosts", "lshosts", "bqueues", "bparams", "lsid")
    version_command = ("lsid",)

    def nodes_command(self) -> list[str]:
        """Return bhosts with all its columns; it reports slots."""
        return ["bhosts", "-w"]

    def parse_nodes(self, result: CommandResult) -> list[LiveNode]:
        """Return the hosts; their GPUs are not in this output."""
        return [node for line in result.stdout.splitlines() for node in _node(line)]

    def nodes(self, ask: Ask) -> list[LiveNode]:
        """Return the hosts and their free GPUs.

        Without GPUs in the first answer, as in versions without ``-gpu``, a shared resource counts.
        """
        hosts = super().nodes(ask)
        gpus = _free_gpus(ask(_GPUS_COMMAND))
        if not any(number for number, _ in gpus.values()):
            _, gpus = _shared_gpus(ask(["bhosts", "-s"]))
        if not gpus:
            return hosts
        counts = ((host, *gpus.get(host.name, (0, 0))) for host in hosts)
        return [
            replace(host, gpus=number, free_gpus=free * host.usable)
            for host, number, free in counts
        ]

    def survey(self, ask: Ask, user: str) -> Survey:
        gpus, (resource, _) = _gpus(ask(["lshosts", "-gpu"])), _shared_gpus(ask(["bhosts", "-s"]))
        memory = _memory(ask(["lshosts", "-w"]))
        counted = [
            _with_type(replace(node, memory=memory.get(node.name)), gpus)
            for node in self.nodes(ask)
        ]
        texts = re.split(r"^QUEUE: ", ask(["bqueues", "-l"]), flags=re.M)[1:]
        config = ask(["bparams", "-l"])
        survey = Survey(
            queues=tuple(map(_queue, texts)),
            nodes=tuple(counted),
            max_array_size=find_integer(r"MAX_JOB_ARRAY_SIZE\s*=\s*(\d+)", config),
            request=_typed_request(counted),
            visible_devices="scheduler",
        )
        if gpus or not resource:
            return survey
        return replace(
            survey,
            request=(*_CPU_REQUEST, f'-R "rusage[{resource}={{gpus_per_node}}]"'),
            cpu_request=_CPU_REQUEST,
            visible_devices="exclusive",
            comments=(
                f"the GPUs are the shared resource {resource}, and nothing lists those of a job:",
                "each job takes all of its nodes; see `visible_devices` in docs/sites.md",
            ),
        )


def _node(line: str) -> Iterator[LiveNode]:
    words = line.split()
    if len(words) < 9 or words[0] == "HOST_NAME" or not words[4].isdigit():
        return
    slots = int(words[3]) if words[3].isdigit() else int(words[4])
    usable = words[1] in _USABLE
    free = max(0, slots - int(words[4])) * usable
    yield LiveNode(words[0], "", usable, slots, free, memory=None, gpus=None, free_gpus=None)


def _gpus(stdout: str) -> dict[str, Counter[str]]:
    """Return the number of GPUs of each model, by host, from ``lshosts -gpu``.

    After IBM's documentation: its first line has all columns, further GPUs of a host have no name.
    """
    found: dict[str, Counter[str]] = {}
    host = ""
    for name, model in re.findall(r"^(\S*)[ \t]+\d+[ \t]+(\S+)", stdout, re.M):
        host = name or host
        found.setdefault(host, Counter())[model] += 1
    return found


def _shared_gpus(stdout: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return the resource that counts GPUs, and their number and free ones, by host.

    From ``bhosts -s``; "" if there is none.
    """
    resource, found = "", {}
    for line in stdout.splitlines():
        words = line.split()
        if len(words) == 4 and words[0] in _GPU_RESOURCES:
            free, reserved = (int(float(word)) for word in words[1:3])
            resource = resource or words[0]
            found[words[3]] = (free + reserved, free)
    return resource, found


def _free_gpus(stdout: str) -> dict[str, tuple[int, int]]:
    """Return the number of GPUs and of those without jobs, by host, from ``bhosts -o``."""
    found = {}
    for line in stdout.splitlines():
        host, *numbers = line.strip().split("|")
        if len(numbers) == len(_GPU_FIELDS) and numbers[0].isdigit():
            gpus, allocated = int(numbers[0]), integer(numbers[1]) or 0
            found[host] = (gpus, max(0, gpus - allocated))
    return found


def _with_type(node: LiveNode, gpus: dict[str, Counter[str]]) -> LiveNode:
    """Return the node with the number of GPUs of its most frequent model, if that is reported."""
    if models := gpus.get(node.name):
        model, number = models.most_common(1)[0]
        free = node.free_gpus and min(node.free_gpus, number)
        return replace(node, gpus=number, free_gpus=free, gpu_type=model)
    return node


def _memory(stdout: str) -> dict[str, int | None]:
    """Return the memory of hosts from ``lshosts -w``."""
    found = {}
    for line in stdout.splitlines():
        words = line.split()
        if len(words) > 6:
            found[words[0]] = memory_bytes(words[5])
    return found


def _queue(text: str) -> LiveQueue:
    limit = re.search(r"^ RUNLIMIT\s*\n\s*([\d.]+) min", text, re.M)
    status = re.search(r"\b(Open|Closed):(\w+)", text)
    return LiveQueue(
        text.split()[0],
        max_walltime=int(float(limit[1]) * 60) if limit else None,
        open=bool(status and status.groups() == ("Open", "Active")),
    )


def _typed_request(nodes: list[LiveNode]) -> tuple[str, ...]:
    """Return the request for GPUs of one of several types, as ``lshosts -gpu`` names them."""
    if not several_types(nodes):
        return ()
    memory = ['-R "rusage[mem={memory_per_node:MB}MB]"'] if has_memory(nodes) else []
    return (
        "-q {queue}",
        "-n {cpus_per_job}",
        '-gpu "num={gpus_per_node}:mode=shared:j_exclusive=yes:gmodel={gpu_type}"',
        '-R "span[ptile={cpus_per_node}]"',
        *memory,
    )
