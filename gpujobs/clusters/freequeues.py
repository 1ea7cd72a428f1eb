"""What is free: GPUs of this machine, nodes of the queues of a site; the order of `--soonest`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..batch.client import SchedulerClient
from ..config.site import Site
from ..config.sitefiles import SiteFile
from ..config.sitequeue import Queue
from ..config.spec import ClusterSpec, group_specs
from ..errors import InputError, RefusedError, UnavailableError
from ..injob.gpus import (
    device_handle,
    gpus_with_nvlink,
    listed_devices,
    memory_of,
    nvml,
    uuid_of,
    visible_to_nvml,
)
from ..planning.plan import JobGroup, Machine, Plan, make_plan
from ..planning.render import render
from ..planning.sitecheck import NO_SETTINGS, SMALLEST, try_site
from ..schedulers import get_scheduler
from ..schedulers.answers import reading
from ..schedulers.inventory import Ask, Inventory, LiveNode
from ..text import table, walltime_text
from .cgroups import available_memory
from .ledger import Ledger


# -- the free GPUs, the CPUs and the memory of this machine, for the `local` site ------------------
def this_machine(devices: tuple[str, ...] | None = None, used: tuple[str, ...] = ()) -> Machine:
    """Return this machine; ``devices`` are the GPUs to use, even if they are not free.

    ``used``: GPUs of other jobs of the cluster, which are not free. Its free GPUs are those of
    CUDA_VISIBLE_DEVICES, else those without a compute process or a job of this user's clusters.
    """
    free, busy = _gpus() if devices is None else (list(devices), {})
    taken = {_identity(device) for device in used}
    free = [device for device in free if _identity(device) not in taken]
    return Machine(
        gpus=tuple(free),
        cpus=_cpus(),
        memory=available_memory(),
        busy=busy,
        nvlink=gpus_with_nvlink(free),
        gpu_memory=_least_memory(free),
        planned=len(used),
    )


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> tuple[list[str], dict[str, str]]:
    """Return the free GPUs, and the busy ones with their users."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return listed_devices(listed), {}
    try:
        devices = visible_to_nvml()
        own = gpus_of_clusters() if devices else {}
        users = {device: own.get(_identity(device)) or _users(device) for device in devices}
    except Exception:  # no package, driver or device: no GPU that CUDA workers could use
        return [], {}
    free = [index for index, processes in users.items() if not processes]
    return free, {index: processes for index, processes in users.items() if processes}


def gpus_of_clusters() -> dict[str, str]:
    """Return the GPUs of jobs of this user's clusters, whose workers may start only now."""
    from ..batch import localqueue

    found: dict[str, str] = {}
    for record in Ledger().all():
        own = () if record.finished else record.submissions
        for one in (submission for submission in own if submission.devices):
            for number, state in zip(one.jobs, localqueue.status(one.id), strict=False):
                if state.endswith(" RUNNING"):
                    devices = map(_identity, one.devices_of(number))
                    found |= dict.fromkeys(devices, f"cluster {record.id}")
    return found


def _identity(device: str) -> str:
    """Return the UUID of a GPU, which CUDA_VISIBLE_DEVICES may name by index or UUID."""
    try:
        return uuid_of(device_handle(device))
    except Exception:  # NVML has many errors, and each means the same here
        return device


def _least_memory(devices: list[str]) -> int | None:
    try:
        return min(memory_of(device_handle(device)) for device in devices)
    except Exception:  # NVML has many errors, and each means the same here; or no GPU is free
        return None


def _users(device: str) -> str:
    """Return the other processes with a CUDA context on a GPU: this one may be a notebook."""
    api, handle = nvml(), device_handle(device)
    try:
        processes = api.nvmlDeviceGetComputeRunningProcesses(handle)
    except api.NVMLError:
        return ""
    others = (process.pid for process in processes if process.pid != os.getpid())
    return ", ".join(f"process {pid}" for pid in others)


# -- the client of a site's batch scheduler --------------------------------------------------------
Read = TypeVar("Read")

TIMEOUT = 10.0
"""Seconds for which the batch scheduler may fail to answer."""


def site_client(site_file: SiteFile) -> SchedulerClient:
    """Return a client of the batch scheduler of a site."""
    site = site_file.site
    scheduler = get_scheduler(site.scheduler)(site.cluster)
    return SchedulerClient(scheduler, site.commands, timeout=TIMEOUT)


def ask_with(client: SchedulerClient, inventory: Inventory) -> Ask:
    """Return the function with which an inventory runs commands.

    It raises UnavailableError if the command that reports the nodes fails; the output of others is
    "" then.
    """
    needed = inventory.nodes_command()

    def ask(argv: Sequence[str]) -> str:
        try:
            result = client.query(argv)
        except UnavailableError:
            if list(argv) == needed:
                raise
            return ""
        if result.exit_code != 0 and list(argv) == needed:
            raise UnavailableError(f"{argv[0]} failed: {result.message}")
        return result.stdout if result.exit_code == 0 else ""

    return ask


def read_with(client: SchedulerClient, inventory: Inventory, read: Callable[[Ask], Read]) -> Read:
    """Return what ``read`` makes of the answers of commands. Raises UnavailableError.

    Also for answers that cannot be read, such as one that is cut off.
    """
    ask = ask_with(client, inventory)
    commands: list[str] = []

    def noted(argv: Sequence[str]) -> str:
        commands.append(argv[0])
        return ask(argv)

    with reading(commands):
        return read(noted)


# -- free resources of queues ----------------------------------------------------------------------
logger = logging.getLogger("gpujobs")

_NEVER = "~"
"""Sorted behind each time."""
_Job = tuple[str, object]
"""The queue and the GPU type of a job; None: any type."""


@dataclass(frozen=True)
class FreeQueue:
    """The free resources of one queue, or of its nodes with one GPU type; None: not reported."""

    queue: str
    """The queue's key in the site file."""
    name: str
    """The batch scheduler's name of it."""
    gpu_type: str | None
    """As a profile names it; all of `gpu_types` with commas, if no types are reported."""
    gpus_per_node: int
    nodes: int
    usable_nodes: int
    """Nodes on which jobs may start now."""
    gpus: int | None
    free_gpus: int | None
    most_free_gpus: int | None
    """Free GPUs of the node that has most of them: the largest job that could start."""
    free_cpus: int
    max_walltime: int | None
    """In seconds, as in the site file."""
    start: str | None = None
    """Expected start of the smallest job, if it was asked for and is estimated."""


def free_queues(site_file: SiteFile, *, estimate: bool = False) -> list[FreeQueue]:
    """Return the free resources of all queues of a site, by GPU type if a queue has several.

    ``estimate``: also query the start of the smallest job in each queue. Raises InputError if
    gpujobs cannot ask this batch scheduler, UnavailableError if it does not answer.
    """
    client = site_client(site_file)
    found = list(_free_queues(client, site_file.site))
    if not estimate:
        return found
    starts = dict(_starts(client, site_file))

    def start(free: FreeQueue) -> str | None:
        typed = (free.queue, free.gpu_type)
        return starts.get(typed, starts.get((free.queue, None)))

    return [replace(free, start=start(free)) for free in found]


def _free_queues(client: SchedulerClient, site: Site) -> Iterator[FreeQueue]:
    if site.machines:
        message = "the machines of this site have no queues"
        raise InputError(message, hint="`gpujobs plan PROFILE` asks them for their free GPUs")
    nodes = _nodes(client)
    for key in site.queues:
        yield from _free(site, key, nodes)


def usable_nodes(client: SchedulerClient, plan: Plan) -> list[int]:
    """Return the number of nodes for each of the jobs of ``plan``; 0: it is not known.

    The batch scheduler is asked if the site does not state it.
    """
    queues, free = plan.site.queues, list[FreeQueue]()
    if not all(queues[jobs.queue_key].nodes for jobs in plan.all_jobs):
        with contextlib.suppress(InputError, UnavailableError):
            free = list(_free_queues(replace(client, timeout=TIMEOUT), plan.site))

    def usable(jobs: JobGroup) -> int:
        parts = _parts(free, jobs.queue_key, {jobs.profile.gpu_type})
        return queues[jobs.queue_key].nodes or sum(part.usable_nodes for part in parts)

    return [usable(jobs) for jobs in plan.all_jobs]


def with_order(spec: ClusterSpec, *, soonest: bool) -> ClusterSpec:
    """Return ``spec`` with `soonest_first` or the order of the site. Raises as `free_queues`."""
    if not soonest:
        return spec
    return soonest_first(spec, free_queues(spec.site), partial(_expected_start, spec))


def soonest_first(
    spec: ClusterSpec, queues: Sequence[FreeQueue], expected_start: Callable[[str], str | None]
) -> ClusterSpec:
    """Return ``spec`` so that `queue: auto` first tries the queues where its jobs start soonest.

    Queues with enough free GPUs for all its jobs come first, then those with the earliest
    ``expected_start``, then those with the most free GPUs. Equal ones stay in the order of the
    site, as do those whose free GPUs are not reported.
    """
    profiles = [one.profile for one in group_specs(spec).values()]
    types = {profile.gpu_type for profile in profiles if profile.gpu_type}
    wanted = sum(profile.gpus for profile in profiles if isinstance(profile.gpus, int))
    largest = max((profile.gpus_per_job or 1 for profile in profiles), default=1)

    def free(key: str) -> int:
        fitting = [
            part.free_gpus or 0
            for part in _parts(queues, key, types)
            # The largest job has at most as many GPUs as a node.
            if (part.most_free_gpus or 0) >= min(largest, part.gpus_per_node)
        ]
        return min(sum(fitting), wanted)

    keys = dict.fromkeys(queue.queue for queue in queues)
    order = sorted(keys, key=free, reverse=True)  # which keeps the order of equal ones
    if free(order[0]) < wanted:
        order.sort(key=lambda key: expected_start(key) or _NEVER)
    return replace(spec, queue_order=tuple(order))


def _expected_start(spec: ClusterSpec, key: str) -> str | None:
    """Return when jobs would start in the queue ``key``, if they fit and it is estimated."""
    queue, wanted = spec.site.site.queues[key], spec.profile.queue
    if not ({key, queue.name} & set(wanted) or (queue.auto and "auto" in wanted)):
        return None
    alone = replace(spec, profile=replace(spec.profile, queue=(key,)))
    with contextlib.suppress(InputError, RefusedError, UnavailableError):
        plan = make_plan(alone, python=spec.python)
        folder = spec.site.path.parent  # of its templates
        script = render(plan, f"{plan.name}-0000", site_folder=folder)[-1]  # the first: the head's
        client = replace(site_client(spec.site), arguments=script.jobs.submit_arguments)
        return client.estimate(script.text, Path.cwd())
    return None


def _parts(queues: Sequence[FreeQueue], key: str, types: Collection[str | None]) -> list[FreeQueue]:
    """Return the parts of the queue ``key`` with one of ``types``; all if it has no such part."""
    parts = [queue for queue in queues if queue.queue == key]
    return [part for part in parts if part.gpu_type in types] or parts


def queues_text(queues: Sequence[FreeQueue], columns: int | None = None) -> str:
    """Return a table with a line for each queue and GPU type; ``columns``: of the terminal."""
    header = ["QUEUE", "GPU TYPE", "NODES", "FREE GPUS", "ON ONE NODE", "FREE CPUS", "WALLTIME"]
    rows = [_row(free) for free in queues]
    if any(free.start for free in queues):  # estimates were asked for
        header.append("START")
        rows = [[*row, free.start or "-"] for row, free in zip(rows, queues, strict=True)]
    return table(header, rows, columns, spare=("ON ONE NODE", "NODES", "FREE CPUS"))


def queues_json(site_file: SiteFile, queues: Sequence[FreeQueue]) -> dict[str, object]:
    """Return the queues as JSON."""
    return {"version": 1, "site": site_file.name, "queues": [asdict(free) for free in queues]}


def _nodes(client: SchedulerClient) -> list[LiveNode]:
    scheduler = client.scheduler
    if scheduler.on_this_machine:
        return [_this_node()]
    if scheduler.inventory is None:
        raise InputError(f"gpujobs cannot ask {scheduler.name} for its queues")
    inventory = scheduler.inventory(scheduler.cluster)
    nodes = read_with(client, inventory, inventory.nodes)
    if any(node.gpus != 0 for node in nodes):
        return nodes
    # A site may count GPUs with a resource of its own.
    return [replace(node, gpus=None, free_gpus=None) for node in nodes]


def _this_node() -> LiveNode:
    machine, name = this_machine(), socket.gethostname()
    free, cpus = len(machine.gpus), machine.cpus
    gpus = free + len(machine.busy)
    return LiveNode(name, "", True, cpus, cpus, machine.memory, gpus=gpus, free_gpus=free)


def _free(site: Site, key: str, nodes: Sequence[LiveNode]) -> list[FreeQueue]:
    """Return the free resources of one queue, by GPU type if its nodes report several."""
    queue, name = site.queues[key], site.queue_name(key)
    if get_scheduler(site.scheduler).on_this_machine:
        queue = replace(queue, gpus_per_node=nodes[0].gpus)
    names = {node.queue for node in nodes}
    names = {"", name} if name in names else names
    own = [node for node in nodes if node.queue in names and _fits(node, queue)]
    types = queue.named_types
    if len(types) < 2 or not all(node.gpu_type for node in own):
        return [_free_of_type(key, name, queue, ", ".join(types) or None, own)]
    return [
        _free_of_type(key, name, queue, kind, [node for node in own if node.gpu_type == reported])
        for kind, reported in types.items()
    ]


def _free_of_type(
    key: str, name: str, queue: Queue, gpu_type: str | None, own: Sequence[LiveNode]
) -> FreeQueue:
    usable = [node for node in own if node.usable]
    return FreeQueue(
        queue=key,
        name=name,
        gpu_type=gpu_type,
        gpus_per_node=queue.gpus_per_node or 0,
        nodes=_count(own),
        usable_nodes=_count(usable),
        gpus=_total(sum, [node.gpus for node in own]),
        free_gpus=_total(sum, [node.free_gpus for node in usable]),
        most_free_gpus=_total(max, [node.free_gpus for node in usable]),
        free_cpus=sum({node.name: node.free_cpus for node in usable}.values()),
        max_walltime=queue.max_walltime,
    )


def _count(nodes: Sequence[LiveNode]) -> int:
    return len({node.name for node in nodes})


def _total(function: Callable[[list[int]], int], numbers: Sequence[int | None]) -> int | None:
    """Return the sum or the maximum of ``numbers``; None if one of them is not known."""
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    return function(known or [0])


def _fits(node: LiveNode, queue: Queue) -> bool:
    """Return whether a node has the GPUs of the jobs of a queue."""
    types = set(queue.named_types.values())
    fits = node.gpus != 0 and (not types or node.gpu_type in {"", *types})
    return fits or not queue.gpus_per_node


def _starts(client: SchedulerClient, site_file: SiteFile) -> Iterator[tuple[_Job, str | None]]:
    """Yield the start of the smallest job in each queue, and of that with each GPU type."""
    for result in try_site(site_file, NO_SETTINGS, any_account=False):
        trial, gpu_type = result.trial, result.trial.profile.get("gpu_type")
        if result.scripts and (trial.shape == SMALLEST or gpu_type):
            script = result.scripts[0].text
            try:
                yield (trial.queue, gpu_type), client.estimate(script, Path.cwd())
            except RefusedError as error:
                logger.warning("queue %s: %s", trial.queue, error)
                yield (trial.queue, gpu_type), None


def _row(free: FreeQueue) -> list[str]:
    gpus = ["-", "-"]
    if free.gpus_per_node:
        gpus = [_of(free.free_gpus, free.gpus), _of(free.most_free_gpus)]
    return [
        free.queue,
        free.gpu_type or "-",
        f"{free.usable_nodes}/{free.nodes}",
        *gpus,
        str(free.free_cpus),
        walltime_text(free.max_walltime) if free.max_walltime else "-",
    ]


def _of(free: int | None, whole: int | None = None) -> str:
    if free is None:
        return "?"
    return str(free) if whole is None else f"{free}/{whole}"
