"""Queues and nodes of PBS and of Torque: pbsnodes, qstat."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar
from xml.etree import ElementTree

from .formats import clock_seconds, find_integer, integer, listed_attributes, members, memory_bytes
from .inventory import Ask, Inventory, LiveNode, LiveQueue, Survey, has_memory, several_types
from .jobs import CommandResult

Attributes = Mapping[str, str]
"""Of a job, a queue or a node, by PBS's names."""

_GPU_TYPES = ("gpu_type", "gpu_model", "accelerator_model", "gputype")
"""Resources that sites use for the type of the GPUs."""
_RESOURCES = (
    "accelerator", "accelerator_memory", "accelerator_model", "aoe", "arch", "cput", "eoe", "file",
    "hbmem", "host", "max_walltime", "mem", "min_walltime", "mpiprocs", "naccelerators", "ncpus",
    "nice", "nodes", "ompthreads", "pcput", "place", "pmem", "preempt_targets", "pvmem", "select",
    "site", "soft_walltime", "software", "vmem", "vnode", "vntype", "walltime",
)  # fmt: skip
"""Resources of PBS itself, which qmgr does not list."""
_VERSION = r"pbs_version\W+(\d[\w.]*)"
MAX_ARRAY_SIZE = r'"max_array_size":\s*(\d+)'


class PBSInventory(Inventory):
    """One row for each virtual node."""

    commands = ("pbsnodes", "qstat", "qmgr")
    version_command = ("qstat", "-B", "-f")
    version_pattern = _VERSION

    def nodes_command(self) -> list[str]:
        return ["pbsnodes", "-a", "-F", "json"]

    def parse_nodes(self, result: CommandResult) -> list[LiveNode]:
        return [_node(name, fields) for name, fields in _table(result.stdout, "nodes").items()]

    def survey(self, ask: Ask, user: str) -> Survey:
        table = _table(ask(self.nodes_command()), "nodes")
        nodes = [_node(name, fields) for name, fields in table.items()]
        queues = _table(ask(["qstat", "-Q", "-f", "-F", "json"]), "Queue")
        resources = ask(["qmgr", "-c", "list resource"])  # qmgr may not be for users
        types = {_type_resource(fields) for fields in table.values()} - {""}
        return Survey(
            queues=_execution_queues(queues, user),
            nodes=tuple(nodes),
            max_array_size=find_integer(MAX_ARRAY_SIZE, ask(["qstat", "-B", "-f", "-F", "json"])),
            request=_typed_request(nodes, types),
            resources=tuple(re.findall(r"^Resource (\S+)", resources, re.M)) or None,
            comments=tuple(_type_comments(nodes)),
        )

    def unknown(self, line: str, survey: Survey) -> str:
        if survey.resources is None:
            return ""
        known = {*_RESOURCES, *survey.resources}
        unknown = (name for name in _requested(line) if "{" not in name and name not in known)
        if name := next(unknown, ""):
            return f"there is no resource {name} (qmgr -c 'list resource')"
        return ""


class TorqueInventory(Inventory):
    """One row for each node."""

    commands = ("pbsnodes", "qstat")
    version_command = ("qstat", "-B", "-f")
    version_pattern = _VERSION
    SERVER: ClassVar = ["qstat", "-B", "-f1"]

    def nodes_command(self) -> list[str]:
        return ["pbsnodes", "-x"]

    def parse_nodes(self, result: CommandResult) -> list[LiveNode]:
        """Return the nodes; the GPUs of jobs are in this output only where NVML is used."""
        try:
            root = ElementTree.fromstring(result.stdout)  # noqa: S314 - of the batch scheduler
        except ElementTree.ParseError:
            return []
        return [_torque_node(node) for node in root.iter("Node")]

    def nodes(self, ask: Ask) -> list[LiveNode]:
        """Return the nodes and their free GPUs, which are those without a job."""
        nodes = super().nodes(ask)
        used = _gpus_of_jobs(ask(["qstat", "-t", "-f1"]))
        left = ((node, (node.gpus or 0) - used[node.name]) for node in nodes)
        return [
            replace(node, free_gpus=max(0, min(node.free_gpus or 0, gpus))) for node, gpus in left
        ]

    def survey(self, ask: Ask, user: str) -> Survey:
        queues = listed_attributes(ask(["qstat", "-Q", "-f1"]))
        return Survey(
            _execution_queues(queues, user),
            tuple(self.nodes(ask)),
            max_array_size=find_integer(r"max_job_array_size = (\d+)", ask(self.SERVER)),
            visible_devices="scheduler",
        )


def json_attributes(stdout: str, kind: str) -> dict[str, dict[str, str]]:
    """Return the attributes of all ``kind`` ("Jobs", …) in PBS's JSON, as `listed_attributes` does.

    All are texts: PBS writes one that looks like JSON, 7 or null, as such. Raises ValueError if it
    is not JSON.
    """
    found = json.loads(stdout, strict=False)
    table = found.get(kind) if isinstance(found, dict) else None
    rows = table.items() if isinstance(table, dict) else ()
    return {name: _flat(fields) for name, fields in rows if isinstance(fields, dict)}


def _flat(fields: Mapping[str, object]) -> dict[str, str]:
    """Return ``{"a": {"b": 1}}`` as ``{"a.b": "1"}``, which is Torque's way to write it."""
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found.update({f"{name}.{key}": text for key, text in _flat(value).items()})
        elif value is not None:
            found[name] = str(value)
    return found


def _table(stdout: str, kind: str) -> dict[str, dict[str, str]]:
    try:
        return json_attributes(stdout, kind)
    except ValueError:
        return {}


def _requested(line: str) -> Iterator[str]:
    """Yield the resources in ``-l select=2:ncpus=4:gpu_type={gpu_type}+1:mem=4gb,walltime=1:0``."""
    text = re.sub(r"\{(\w+):\w+\}", r"{\1}", line)  # without colons of units
    for values in re.findall(r"-l\s*(\S+)", text):
        for item in values.split(","):
            name, _, value = item.partition("=")
            yield name
            if name == "select":
                parts = (part for chunk in value.split("+") for part in chunk.split(":"))
                yield from (part.partition("=")[0] for part in parts if "=" in part)


def _node(name: str, fields: Attributes) -> LiveNode:
    usable = fields.get("state") in ("free", "job-busy", "<various>")
    cpus, gpus, used_cpus, used_gpus = (
        integer(fields.get(f"resources_{kind}.{resource}", "")) or 0
        for kind in ("available", "assigned")
        for resource in ("ncpus", "ngpus")
    )
    return LiveNode(
        name=name,
        queue=fields.get("queue") or fields.get("resources_available.Qlist", ""),
        usable=usable,
        cpus=cpus,
        free_cpus=max(0, cpus - used_cpus) * usable,
        memory=memory_bytes(fields.get("resources_available.mem", "")),
        gpus=gpus,
        free_gpus=max(0, gpus - used_gpus) * usable,
        gpu_type=fields.get(f"resources_available.{_type_resource(fields)}", ""),
    )


def _execution_queues(queues: Mapping[str, Attributes], user: str) -> tuple[LiveQueue, ...]:
    """Return the queues in which jobs run; a routing queue passes them on."""
    return tuple(
        LiveQueue(
            name,
            max_walltime=clock_seconds(fields.get("resources_max.walltime", "")),
            max_nodes=integer(fields.get("resources_max.nodect", "")) or None,
            min_nodes=integer(fields.get("resources_min.nodect", "")) or None,
            min_walltime=clock_seconds(fields.get("resources_min.walltime", "")),
            user_gpus=_user_gpus(fields, user),
            open=(fields.get("enabled"), fields.get("started")) == ("True", "True"),
        )
        for name, fields in queues.items()
        if fields.get("queue_type") == "Execution"
    )


def _user_gpus(fields: Attributes, user: str) -> dict[str, int]:
    """Return the most GPUs of one user, from ``[u:PBS_GENERIC=4],[u:ada=8]``.

    A limit of the user takes precedence over that of all users.
    """
    limits = []
    for attribute in ("max_run_res.ngpus", "max_queued_res.ngpus"):
        numbers = dict(re.findall(r"\bu:([^=\s]+)=(\d+)", fields.get(attribute, "")))
        limits.append(numbers.get(user) or numbers.get("PBS_GENERIC"))
    return {"": min(known)} if (known := [int(limit) for limit in limits if limit]) else {}


def _type_resource(fields: Attributes) -> str:
    """Return the resource of a node that is the type of its GPUs, or ""."""
    return next((name for name in _GPU_TYPES if f"resources_available.{name}" in fields), "")


def _typed_request(nodes: list[LiveNode], resources: set[str]) -> tuple[str, ...]:
    """Return the request for GPUs of one type, if there are several."""
    if not several_types(nodes) or len(resources) != 1:
        return ()
    chunk = f"ncpus={{cpus_per_node}}:ngpus={{gpus_per_node}}:{min(resources)}={{gpu_type}}"
    memory = ":mem={memory_per_node:MB}mb" if has_memory(nodes) else ""
    return ("-q {queue}", f"-l select={{nodes}}:{chunk}{memory}")


def _type_comments(nodes: list[LiveNode]) -> Iterator[str]:
    if several_types(nodes):
        yield "to be filled in: whether jobs can request the type of their GPUs as in `request`"
    elif any(node.gpu_type for node in nodes):
        yield "pbsnodes reports the type of the GPUs; `select` may have to request it"


def _gpus_of_jobs(stdout: str) -> Counter[str]:
    """Return the number of GPUs that jobs have, by node, from ``exec_gpus = n1-gpu/0+n1-gpu/1``."""
    jobs = listed_attributes(stdout).values()
    hosts = (job.get("exec_gpus", "") for job in jobs if job.get("job_state") in ("R", "E"))
    return Counter(re.findall(r"([\w.-]+)-gpu/\d+", " ".join(hosts)))


def _torque_node(node: ElementTree.Element) -> LiveNode:
    # "0-1,3/47[0],2/48": the slots of each job. A part without a job has more slots of the next.
    parts = (part.partition("/")[0] for part in (node.findtext("jobs") or "").split(","))
    slots = sum(len(members(part.strip())) for part in parts)
    state = node.findtext("state") or ""
    usable = set(state.split(",")) <= {"free", "job-exclusive", "job-sharing", "busy"}
    cpus, gpus = int(node.findtext("np") or 0), int(node.findtext("gpus") or 0)
    status = node.findtext("gpu_status") or ""
    busy = len(re.findall(r"gpu_state=(?!Unallocated)\w+", status))
    memory = re.search(r"physmem=(\w+)", node.findtext("status") or "")
    return LiveNode(
        name=node.findtext("name") or "",
        queue="",
        usable=usable,
        cpus=cpus,
        free_cpus=max(0, cpus - slots) if usable else 0,
        memory=memory_bytes(memory[1]) if memory else None,
        gpus=gpus,
        free_gpus=max(0, gpus - busy) if usable else 0,
    )
