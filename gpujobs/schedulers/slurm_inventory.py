"""Slurm's partitions and nodes: sinfo, scontrol, sacctmgr."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .formats import clock_seconds, find_integer, integer, members, memory_bytes
from .inventory import Ask, Inventory, LiveNode, LiveQueue, Survey
from .jobs import CommandResult

_COLUMNS = {
    "NodeList": 80, "Partition": 80, "StateLong": 40, "CPUsState": 40, "Gres": 400, "GresUsed": 400,
    "Memory": 30, "Available": 20,
}  # fmt: skip
"""Columns of sinfo and their widths."""
_USABLE = re.compile(r"(idle|mixed|allocated|completing|planned)[^*]*")


class SlurmInventory(Inventory):
    """One line of sinfo for each node in each partition."""

    commands = ("sinfo", "scontrol", "sacctmgr")
    version_command = ("sinfo", "--version")

    @classmethod
    def configuration_files(cls, environ: Mapping[str, str]) -> list[str]:
        """Return the paths of slurm.conf; that in /run is the copy of a host without its own."""
        if own := environ.get("SLURM_CONF"):
            return [own]
        folders = ("/etc/slurm", "/run/slurm/conf", "/etc/slurm-llnl", "/usr/local/etc")
        return [f"{folder}/slurm.conf" for folder in folders]

    @classmethod
    def cluster_name(cls, text: str) -> str:
        """Return ClusterName, from slurm.conf."""
        found = re.search(r"^\s*ClusterName\s*=\s*([^\s#]+)", text, re.M | re.I)
        return found[1] if found else ""

    def nodes_command(self) -> list[str]:
        columns = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
        return ["sinfo", *self._clusters(), "-h", "-a", "-N", "-O", columns]

    def parse_nodes(self, result: CommandResult) -> list[LiveNode]:
        """Return a row for each type of GPU of each node in each partition."""
        return [node for row in _rows(result.stdout) for node in _nodes(row)]

    def survey(self, ask: Ask, user: str) -> Survey:
        rows = list(_rows(ask(self.nodes_command())))
        settings = _settings(ask(["scontrol", "show", "config", *self._clusters()]))
        enforced = settings.get("AccountingStorageEnforce", "")
        accounts = _accounts(ask(_associations(user, "Account,User")))
        names = {row["Partition"] for row in rows}
        size = integer(settings.get("MaxArraySize", ""))
        return Survey(
            queues=tuple(self._queues(ask, names, user, accounts, settings)),
            nodes=tuple(node for row in rows for node in _nodes(row)),
            max_array_size=size and max(1, size - 1),
            accounts=accounts,
            account_required="associations" in enforced if enforced else None,
            visible_devices="scheduler",
            comments=tuple(_comments(settings)),
            cluster_name=settings.get("ClusterName", ""),
        )

    def _queues(
        self,
        ask: Ask,
        names: Iterable[str],
        user: str,
        accounts: tuple[str, ...],
        settings: Mapping[str, str],
    ) -> Iterator[LiveQueue]:
        """Yield the partitions, the default one first, with what limits this user in each.

        ``names``: as sinfo has them, in no fixed order, that of the default one as ``main*``.
        """
        show = ["scontrol", "show", "partition", "-o", "-a", *self._clusters()]
        partitions = _partitions(ask(show))
        rules = (accounts, _qos_of_user(ask, user, partitions))
        qos = {}
        if re.search(r"\b(limits|safe|all)\b", settings.get("AccountingStorageEnforce", "")):
            qos = _gpus_of_qos(ask([*_SACCTMGR, "qos", "format=Name,MaxTRESPU"]))
        late_signal = _late_signal(settings)
        for listed in sorted(names, key=lambda name: ("*" not in name, name)):
            name = listed.rstrip("*")
            yield _queue(name, partitions.get(name, {}), rules, qos, late_signal)

    def _clusters(self) -> list[str]:
        return [f"--clusters={self.cluster}"] if self.cluster else []


_SACCTMGR = ("sacctmgr", "-n", "-P", "show")


def _associations(user: str, columns: str) -> list[str]:
    return [*_SACCTMGR, "associations", f"user={user}", f"format={columns}"]


def _qos_of_user(
    ask: Ask, user: str, partitions: Mapping[str, Mapping[str, str]]
) -> tuple[str, ...]:
    """Return the user's QOS, which is asked for only if a partition is not for all of them."""
    for partition in partitions.values():
        if _restricted(partition, "AllowQos") or _restricted(partition, "DenyQos"):
            return _own_qos(ask(_associations(user, "User,QOS")), user)
    return ()


def _rows(stdout: str) -> Iterator[dict[str, str]]:
    width = sum(_COLUMNS.values())
    for line in stdout.splitlines():
        if len(line.rstrip()) <= _COLUMNS["NodeList"]:  # "CLUSTER: name" of several clusters
            continue
        row, start = {}, 0
        for name, size in _COLUMNS.items():
            row[name] = line.ljust(width)[start : start + size].strip()
            start += size
        yield row


def _nodes(row: dict[str, str]) -> Iterator[LiveNode]:
    states = [int(part) for part in row["CPUsState"].split("/")]
    idle, cpus = (states[1], states[3]) if len(states) == 4 else (0, 0)  # allocated/idle/other/all
    used = _used_gpus(row["GresUsed"])
    usable = bool(_USABLE.fullmatch(row["StateLong"])) and row["Available"] == "up"
    for gpu_type, number in gpus_in(row["Gres"]) or [("", 0)]:
        yield LiveNode(
            name=row["NodeList"],
            queue=row["Partition"].rstrip("*"),
            usable=usable,
            cpus=cpus,
            free_cpus=idle if usable else 0,
            memory=memory_bytes(row["Memory"] + "m"),
            gpus=number,
            free_gpus=max(0, number - used[gpu_type]) if usable else 0,
            gpu_type=gpu_type,
        )


def _used_gpus(gres: str) -> Counter[str]:
    """Return the number of used GPUs of each type, with those of which shards are used."""
    used = Counter(dict(gpus_in(gres)))
    used.update(_shared_gpus(gres))
    return used


def gpus_in(gres: str) -> list[tuple[str, int]]:
    """Return the types and numbers in ``gpu:a100:4(S:0-1),gpu:2``."""
    found = re.findall(r"(?:^|,)gpu(?::([^:,()]+))?:(\d+)(?=[,(]|$)", gres)
    return [(gpu_type, int(number)) for gpu_type, number in found]


def _partitions(stdout: str) -> dict[str, dict[str, str]]:
    """Return the settings of each partition, from a line of ``PartitionName=main AllowQos=ALL``."""
    lines = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in stdout.splitlines())
    return {line["PartitionName"]: line for line in lines if "PartitionName" in line}


_USERS = {
    "AllowGroups": "only for groups", "AllowAccounts": "only for accounts",
    "DenyAccounts": "not for accounts", "AllowQos": "only for QOS", "DenyQos": "not for QOS",
}  # fmt: skip
"""Settings of a partition that exclude users."""
_WHOLE_NODES = {("OverSubscribe", "EXCLUSIVE"), ("Exclusive", "NODE"), ("Exclusive", "TOPO")}
"""Settings of a partition whose jobs get whole nodes; the last two from 26.05 on."""
_ALL = ("ALL", "(null)", "")
_MOST_NAMES = 6


def _shared_gpus(gres_used: str) -> dict[str, int]:
    """Return the types and numbers of GPUs with shards in use, which are not among the used ones.

    They are listed as ``shard:a100:2(IDX:0,2)``, or with shards of each GPU: ``(2/4,0/4,1/4,0/4)``.
    """
    found = re.findall(r"(?:^|,)shard:(?:([^:,()]+):)?\d+\(([^)]*)\)", gres_used)
    return {kind: _number_shared(gpus) for kind, gpus in found}


def _number_shared(gpus: str) -> int:
    if gpus.startswith("IDX:"):
        return len(members(gpus.removeprefix("IDX:")))
    return sum(not shards.startswith("0/") for shards in gpus.split(","))


def _queue(
    name: str,
    settings: Mapping[str, str],
    own: tuple[Sequence[str], Sequence[str]],
    qos: Mapping[str, Mapping[str, int]],
    late_signal: str,
) -> LiveQueue:
    """Return a queue from the settings of its partition, for a user with ``own`` accounts and QOS.

    ``qos``: the most GPUs of one user in each QOS; ``late_signal``: of those with a grace time.

    sinfo abbreviates its limits: ``2-1K`` for 1024 nodes, ``1`` for MaxNodes=1, and from 26.05 on
    it does not say that a partition is exclusive.
    """
    found = _restrictions(settings)
    texts = [f"{_USERS[name]} {_listed(names)}" for name, names in found.items()]
    # Newer releases also admit subaccounts of those listed, so this is not certain.
    for_user = _admits(found, "Accounts", own[0]) and _admits(found, "Qos", own[1])
    fewest = integer(settings.get("MinNodes", ""))
    return LiveQueue(
        name=name,
        max_walltime=clock_seconds(settings.get("MaxTime", "")),
        max_nodes=integer(settings.get("MaxNodes", "")),
        min_nodes=fewest if fewest and fewest > 1 else None,
        exclusive=not _WHOLE_NODES.isdisjoint(settings.items()),
        late_signal=late_signal * _has_grace(settings),
        open=settings.get("State", "UP") == "UP",
        hidden="YES" in (settings.get("Hidden"), settings.get("RootOnly")),
        restriction="; ".join(texts),
        for_user=for_user,
        user_gpus=qos.get(settings.get("QoS", ""), {}),
    )


def _restrictions(settings: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the settings of a partition that exclude users, and their names."""
    found = {}
    for setting in _USERS:
        names = _restricted(settings, setting)
        if names:
            found[setting] = names
    return found


def _restricted(settings: Mapping[str, str], name: str) -> list[str]:
    """Return the names in a setting of a partition such as AllowQos; [] if it excludes no user."""
    value = settings.get(name, "ALL")
    return [] if value in _ALL else value.split(",")


def _admits(found: Mapping[str, Sequence[str]], kind: str, own: Sequence[str]) -> bool:
    """Return whether a partition admits one of the user's ``own`` accounts, or QOS."""
    allowed = set(found.get(f"Allow{kind}", own)) - set(found.get(f"Deny{kind}", ()))
    return not own or bool(allowed & set(own))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def _accounts(stdout: str) -> tuple[str, ...]:
    pairs = (line.split("|") for line in stdout.splitlines())
    return tuple(dict.fromkeys(pair[0] for pair in pairs if len(pair) == 2 and pair[1]))


def _own_qos(stdout: str, user: str) -> tuple[str, ...]:
    """Return the QOS in lines ``ada|normal,gpu`` of a user."""
    pairs = (line.split("|") for line in stdout.splitlines())
    names = (pair[1].split(",") for pair in pairs if len(pair) == 2 and pair[0] == user)
    return tuple(dict.fromkeys(name for own in names for name in own if name))


def _gpus_of_qos(stdout: str) -> dict[str, dict[str, int]]:
    """Return types and numbers in ``long|cpu=64,gres/gpu=8,gres/gpu:a100=4``, by QOS."""
    found = {}
    for line in stdout.splitlines():
        name, _, limits = line.partition("|")
        types = re.findall(r"(?:^|,)gres/gpu(?::([^=,]+))?=(\d+)", limits)
        found[name] = {gpu_type: int(number) for gpu_type, number in types}
    return found


def _settings(config: str) -> dict[str, str]:
    """Return the settings that ``scontrol show config`` lists."""
    return dict(re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", config, re.M))


def _late_signal(settings: Mapping[str, str]) -> str:
    """Return the setting that lacks for jobs to get `--signal` when they are preempted."""
    if settings.get("PreemptType", "none").endswith("none"):
        return ""
    names = ("SlurmctldParameters", "PreemptParameters")
    sends = any("send_user_signal" in settings.get(name, "") for name in names)
    return "" if sends else "slurm.conf lacks SlurmctldParameters=preempt_send_user_signal"


def _has_grace(partition: Mapping[str, str]) -> bool:
    """Return whether jobs of a partition may be preempted, and have a grace time then."""
    preempted = partition.get("PreemptMode", "OFF") != "OFF"
    return preempted and bool(find_integer(r"(\d+)", partition.get("GraceTime", "")))


def _comments(settings: Mapping[str, str]) -> Iterator[str]:
    if settings.get("ConstrainDevices") == "yes":
        yield "Slurm lets a job open only its own GPUs (ConstrainDevices)"
    elif settings:
        yield "Slurm sets CUDA_VISIBLE_DEVICES, but a job can open all GPUs of its node"
