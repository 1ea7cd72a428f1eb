"""Grid Engine's queues, hosts and resources: qstat, qconf."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from .formats import clock_seconds, find_integer, memory_bytes
from .inventory import Ask, Inventory, LiveNode, LiveQueue, Survey, several_types
from .jobs import CommandResult


# -- resource quotas: the most GPUs of one user in a queue, from ``qconf -srqs`` -------------------
@dataclass(frozen=True)
class QuotaRule:
    """One line ``limit`` of a resource quota set."""

    filters: Mapping[str, str]
    """``users``, ``queues``, …: patterns as they are written, such as ``{*}`` or ``a,!b``."""
    limits: Mapping[str, str]

    def applies(self, queue: str, user: str) -> bool:
        """Return whether the rule is for jobs of ``user`` in the queue."""
        return self._has("queues", queue) and self._has("users", user)

    def limit_of_user(self, user: str, resource: str) -> int | None:
        """Return the most that one user may have of a resource; None: no limit, or not known."""
        users, number = self.filters.get("users", ""), self.limits.get(resource, "")
        of_one_user = "{" in users or users == user
        known = number.isdigit() and set(self.filters) <= {"users", "queues"}
        return int(number) if of_one_user and known else None

    def _has(self, name: str, value: str) -> bool:
        """Return whether a filter has ``value``; a rule without the filter has all."""
        words = self.filters.get(name, "*").strip("{}").replace(" ", "").split(",")
        if any(fnmatchcase(value, word[1:]) for word in words if word.startswith("!")):
            return False
        return any(fnmatchcase(value, word) for word in words if not word.startswith("!"))


def quota_sets(stdout: str) -> list[list[QuotaRule]]:
    """Return the rules of each enabled set, in their order."""
    blocks = re.findall(r"^\{(.*?)^\}", re.sub(r"\\\n\s*", " ", stdout), re.M | re.S)
    enabled = re.compile(r"^\s*enabled\s+true\s*$", re.M | re.I)
    limits = (
        re.findall(r"^\s*limit\s+(.*)$", block, re.M) for block in blocks if enabled.search(block)
    )
    return [list(map(_rule, lines)) for lines in limits]


def gpus_of_user(
    sets: Sequence[Sequence[QuotaRule]], queue: str, user: str, gpu: str
) -> dict[str, int]:
    """Return the most GPUs of ``user`` in the queue as ``{"": number}``; {} if there is no limit.

    ``gpu`` is the resource that counts GPUs. In each set the first rule that matches applies.
    """
    first = [next((rule for rule in rules if rule.applies(queue, user)), None) for rules in sets]
    limits = [rule.limit_of_user(user, gpu) for rule in first if rule]
    known = [limit for limit in limits if limit is not None]
    return {"": min(known)} if known else {}


def _rule(line: str) -> QuotaRule:
    """Return the rule of ``users {*} queues gpu.q to gpu=4,slots=8``."""
    where, _, what = f" {line}".rpartition(" to ")
    filters = re.findall(r"\b(users|projects|pes|queues|hosts)\s+(\{[^}]*\}|\S+)", where)
    return QuotaRule(dict(filters), dict(re.findall(r"([\w.-]+)=([^,\s]+)", what)))


# -- queues, hosts and resources -------------------------------------------------------------------
_INSTANCE = re.compile(r"^(\S+)@(\S+)\s+\S+\s+(\d+)/(\d+)/(\d+)\s+\S+\s+\S+ *(\S*)$", re.M)
_RESOURCE = re.compile(r"^\s+(\w\w):([\w.-]+)=(.*)$", re.M)
_TYPE = "gpu_type"
"""Resource of the hosts that sites use for the type of the GPUs."""
_MOST_HOSTS = 50
"""Hosts with GPUs that are queried one by one."""
_LISTS = re.compile(r"\b(SGE_HGR_\w+|CUDA_VISIBLE_DEVICES|SGE_GPU)\b")
"""Variables with the GPUs of a job that prologs usually set."""


class GridEngineInventory(Inventory):
    """One row for each queue instance."""

    commands = ("qconf", "qstat")
    version_command = ("qstat", "-help")

    def nodes_command(self) -> list[str]:
        """Return qstat with all resources; those that jobs consume are the free ones."""
        return ["qstat", "-f", "-F"]

    def parse_nodes(self, result: CommandResult) -> list[LiveNode]:
        blocks = re.split(r"^-{20,}$", result.stdout, flags=re.M)
        return [node for block in blocks for node in _node(block)]

    def survey(self, ask: Ask, user: str) -> Survey:
        names = ask(["qconf", "-sql"]).split()
        queues = {name: _settings(ask(["qconf", "-sq", name])) for name in names}
        kinds = _complexes(ask(["qconf", "-sc"]))
        gpu = gpu_resource(kinds)
        nodes = _nodes(ask, self.nodes(ask), gpu)
        environments = ask(["qconf", "-spl"]).split()
        rules = {name: _settings(ask(["qconf", "-sp", name])) for name in environments}
        environment = _environment(rules)
        config = _settings(ask(["qconf", "-sconf"]))
        type_lines = []
        if _TYPE in kinds and several_types(nodes):
            type_lines = [f"-l {_TYPE}={{gpu_type}}"]
        return Survey(
            queues=tuple(_live_queues(ask, queues, user, gpu)),
            nodes=tuple(nodes),
            max_array_size=find_integer(r"^(\d+)", config.get("max_aj_tasks", "")) or None,
            account_required=config.get("enforce_project") == "true",
            request=(*_request(gpu, kinds, environment), *type_lines),
            cpu_request=_request("", kinds, environment),
            visible_devices=_visible_devices(ask, gpu, kinds, [config, *queues.values()]),
            parallel_environments=tuple(environments),
            resources=tuple(kinds),
            comments=tuple(_comments(gpu, kinds, environment)),
        )

    def unknown(self, line: str, survey: Survey) -> str:
        environments, resources = survey.parallel_environments or (), survey.resources or ()
        for pattern in re.findall(r"-pe\s+(\S+)", line):
            if not any(fnmatchcase(name, pattern) for name in environments):
                known = ", ".join(environments) or "none"
                return f"there is no parallel environment {pattern} (qconf -spl: {known})"
        for values in re.findall(r"-l\s+(\S+)", line):
            for item in values.split(","):
                name = item.partition("=")[0]
                if "{" not in name and name not in resources:
                    return f"there is no resource {name} (qconf -sc)"
        return ""


@dataclass(frozen=True)
class _Complex:
    type: str
    consumable: str


def gpu_resource(names: Iterable[str]) -> str:
    """Return the resource that counts GPUs: ``gpu``, else the shortest name with it; or ""."""
    found = [name for name in names if re.search(r"gpus?$|^gpu", name, re.I)]
    return min(found, key=lambda name: (name not in ("gpu", "gpus"), len(name)), default="")


def _live_queues(
    ask: Ask, queues: Mapping[str, Mapping[str, str]], user: str, gpu: str
) -> Iterator[LiveQueue]:
    """Yield the queues with their limits. Rules of quotas are asked for only if GPUs are counted.

    ``queues``: the settings of each.
    """
    quotas = quota_sets(ask(["qconf", "-srqs"])) if gpu else []
    for name, settings in queues.items():
        longest = clock_seconds(settings.get("h_rt", ""))
        yield LiveQueue(name, longest, user_gpus=gpus_of_user(quotas, name, user, gpu))


def _nodes(ask: Ask, found: Sequence[LiveNode], gpu: str) -> list[LiveNode]:
    """Return the nodes with the numbers of their GPUs, which are asked of busy ones first."""
    idle = _idle_hosts(found)
    hosts = dict.fromkeys(node.name for node in found if node.gpus is None)
    busy_first = sorted(hosts, key=lambda host: host in idle)
    values = {host: _host_values(ask, host) for host in busy_first[:_MOST_HOSTS]}
    return [_with_gpus(node, values, gpu, idle=node.name in idle) for node in found]


def _node(block: str) -> Iterator[LiveNode]:
    """Yield the queue instance that a block of ``qstat -f -F`` is about."""
    found = _INSTANCE.search(block)
    if not found:
        return
    queue, host, *numbers, states = found.groups()
    reserved, used, slots = map(int, numbers)
    rows, usable = _RESOURCE.findall(block), not states
    values = {name: value for _, name, value in rows}
    gpu = gpu_resource(name for kind, name, _ in rows if kind[1] == "c")  # a consumable
    yield LiveNode(
        name=host,
        queue=queue,
        usable=usable,
        cpus=slots,
        free_cpus=max(0, slots - used - reserved) * usable,
        memory=memory_bytes(values.get("mem_total", "")),
        gpus=None if gpu else 0,
        free_gpus=int(float(values.get(gpu, 0))) * usable,
        gpu_type=values.get(_TYPE, ""),
    )


def _settings(stdout: str) -> dict[str, str]:
    """Return the settings that qconf prints, a line each, long ones continued with ``\\``."""
    text = re.sub(r"\\\n\s*", "", stdout)
    return dict(re.findall(r"^(\w+)\s+(.*?)\s*$", text, re.M))


def _host_values(ask: Ask, host: str) -> dict[str, str]:
    values = _settings(ask(["qconf", "-se", host])).get("complex_values", "")
    return dict(re.findall(r"([\w.-]+)=([^,\s]+)", values))


def _idle_hosts(nodes: Iterable[LiveNode]) -> set[str]:
    """Return the hosts on which no job has a slot in any queue: their free GPUs are all GPUs."""
    used = {node.name for node in nodes if not node.usable or node.free_cpus < node.cpus}
    return {node.name for node in nodes} - used


def _with_gpus(
    node: LiveNode, values: Mapping[str, Mapping[str, str]], gpu: str, *, idle: bool
) -> LiveNode:
    """Return the node with the number of its GPUs, as far as it is known.

    ``qconf -se`` reports it, but not of a host that this one cannot resolve. ``qstat`` reports
    the free ones only.
    """
    own = values.get(node.name, {})
    number = find_integer(r"^(\d+)", own.get(gpu, ""))
    slots = find_integer(r"^(\d+)", own.get("slots", "")) or node.cpus
    if node.gpus is None:
        node = replace(node, gpus=node.free_gpus if number is None and idle else number)
    return replace(node, cpus=min(node.cpus, slots))


def _complexes(stdout: str) -> dict[str, _Complex]:
    """Return the resources that ``qconf -sc`` lists; shortcuts are names, too."""
    found: dict[str, _Complex] = {}
    for line in stdout.splitlines():
        words = line.split()
        if len(words) >= 8 and not line.startswith("#"):
            found |= dict.fromkeys(words[:2], _Complex(words[2], words[5]))
    return found


def _environment(rules: Mapping[str, Mapping[str, str]]) -> str:
    """Return the parallel environment of jobs on one node, or ""."""
    found = [name for name, rule in rules.items() if rule.get("allocation_rule") == "$pe_slots"]
    return min(found, key=lambda name: (name != "smp", name), default="")


def _request(gpu: str, kinds: Mapping[str, _Complex], environment: str) -> tuple[str, ...]:
    lines = ["-q {queue}"]
    if environment:
        lines.append(f"-pe {environment} {{cpus_per_job}}")
    if gpu:
        scope = "gpus_per_cpu" if kinds[gpu].consumable == "YES" else "gpus_per_job"
        lines.append(f"-l {gpu}={{{scope}}}")
    return tuple(lines)


def _visible_devices(
    ask: Ask, gpu: str, kinds: Mapping[str, _Complex], settings: list[dict[str, str]]
) -> str:
    """Return the variable that a job's GPUs are in; the prologs are read to find it."""
    if gpu and kinds[gpu].type == "RSMAP":
        return f"{{variable: SGE_HGR_{gpu}}}"
    paths = dict.fromkeys(own.get("prolog", "NONE").split()[0] for own in settings)
    for path in paths:
        file = path.partition("@")[2] or path
        if file.startswith("/") and (found := _LISTS.search(ask(["cat", file]))):
            return "scheduler" if found[1].startswith("CUDA") else f"{{variable: {found[1]}}}"
    return ""


def _comments(gpu: str, kinds: Mapping[str, _Complex], environment: str) -> Iterator[str]:
    if gpu and kinds[gpu].consumable == "YES":
        yield f"the resource {gpu} is counted per slot (consumable YES), so is its request"
    if not environment:
        yield "no parallel environment has all slots on one node ($pe_slots)"
