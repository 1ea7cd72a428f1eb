"""Read the state of a cluster's folder into typed rows.

The files in it are documented in `gpujobs.injob`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..injob.folder import (
    AFTER,
    HEARTBEAT,
    TRANSPORT,
    DamagedError,
    Ended,
    Folder,
    JsonObject,
    OverMemory,
    RegisteredWorker,
    all_gpus,
    over_memory_message,
)
from ..injob.transport import Choice
from ..schedulers import JobId
from ..text import clean
from .files import folder_problem, is_removed, job_files


@dataclass(frozen=True)
class ExitRecord:
    """How a job ended, written by its bash script."""

    exit_code: int | None
    host: str


@dataclass(frozen=True)
class FolderState:
    """The contents of a cluster's folder at one moment. Mappings are by job number or worker."""

    ended: Ended | None = None
    workers: Mapping[str, RegisteredWorker] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    """Names of all workers that were ever registered."""
    gone: Mapping[str, float] = field(default_factory=dict)
    """When workers disconnected that have not connected again (epoch seconds of the head)."""
    exits: Mapping[int, ExitRecord] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why jobs failed."""
    claims: Mapping[int, JobId] = field(default_factory=dict)
    """The job of the batch scheduler that does the work of each number."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The nodes of the jobs whose supervisor has started."""
    began: Mapping[int, float] = field(default_factory=dict)
    """When the jobs last started (epoch seconds of their nodes); a requeued one starts again."""
    alive: Mapping[int, float] = field(default_factory=dict)
    """When the jobs that have started last gave a sign of life (epoch seconds)."""
    head: int | None = None
    """Number of the head's job."""
    address: str | None = None
    """Address of the dask scheduler."""
    dashboard: int | None = None
    """Port of the dashboard."""
    transport: Choice = field(default_factory=Choice)
    """The protocol between dask's processes."""
    over_memory: Mapping[str, OverMemory] = field(default_factory=dict)
    """Workers that were restarted because of their memory."""
    ends_at: float | None = None
    """When the cluster ends if it stays without work (epoch seconds); None if it has work."""
    ends_by: str = ""
    """The rule by which it ends then (see `injob.idle`)."""
    waits_for: str = ""
    """The cluster after whose end this one starts; "" when that has ended."""
    removed: bool = False
    """Whether a user has removed the folder."""
    setups: Mapping[int, str] = field(default_factory=dict)
    """The first line of `setup` that failed."""
    damaged: tuple[str, ...] = ()
    """Which files cannot be read, and why; their content is missing here."""
    refused: str = ""
    """Why the folder is not trusted, and nothing in it was read."""

    def has_started(self, number: int) -> bool:
        """Return whether job ``number`` has begun, perhaps before it was requeued."""
        return number in self.claims or number in self.nodes

    def end_time(self, otherwise: float) -> float:
        """Return when the cluster ended; ``otherwise`` if it has not."""
        return self.ended.time if self.ended else otherwise

    @property
    def scheme(self) -> str:
        """The protocol between dask's processes, as in its addresses; "" while it is unknown."""
        return self.transport.scheme or str(self.address or "").partition("://")[0]

    @property
    def encrypted(self) -> bool | None:
        """Whether the traffic is encrypted; None while it is unknown."""
        return self.scheme in ("tls", "wss") if self.scheme else None

    @property
    def unused_networks(self) -> list[str]:
        """Fast networks that workers have and that the chosen protocol does not use."""
        if not self.scheme or self.scheme == "ucxx":
            return []
        return sorted({name for worker in self.workers.values() for name in _fast(worker)})

    def _between(self, network: str) -> str:
        workers = (worker for worker in self.workers.values() if network in _fast(worker))
        gpus = len({gpu["uuid"] for worker in workers for gpu in all_gpus(worker.get("gpu"))})
        return f"{network} between {gpus} GPUs" if gpus > 1 else network

    @property
    def notes(self) -> list[str]:
        """Remarks for the user: findings, and missing encryption."""
        if self.encrypted is False:
            return [*self.findings, f"not encrypted: dask uses {self.scheme}"]
        return self.findings

    @property
    def findings(self) -> list[str]:
        """What only the jobs could find out: setup, memory of workers, transport."""
        found = [*self.damaged]
        found += [f"setup: {text}" for text in sorted(set(self.setups.values()))]
        found += [over_memory_message(*item) for item in sorted(self.over_memory.items())]
        found += filter(None, (self.transport.reason, self.transport.remark))
        if unused := self.unused_networks:
            names = " and ".join(self._between(name) for name in unused)
            message = f"{names} seen and left unused: dask uses {self.scheme}, not ucxx"
            found.append(f"{message}; `protocol: ucxx` uses it, not encrypted")
        return found


def _fast(worker: RegisteredWorker) -> list[str]:
    gpu = worker.get("gpu")
    return gpu.get("fast", []) if gpu else []


class FolderReader:
    """Reads a cluster's folder; files of jobs that have not changed are not read again.

    Files that the cluster replaces are always opened, because NFS checks only then whether its
    cache is out of date.
    """

    def __init__(self, path: Path) -> None:
        self._folder = Folder(str(path))
        self._job_files: dict[str, tuple[tuple[int, int, int], Any]] = {}
        """Key of the version and content of the files of jobs, by name."""
        self._damaged: list[str] = []

    def read(self) -> FolderState:
        """Return the present state; an empty one if the folder is gone, or is not trusted."""
        path = self._folder.path
        if problem := folder_problem(path):
            return FolderState(damaged=(problem,), refused=problem)
        self._damaged = []
        scheduler, registry = self._json("scheduler.json"), self._json("workers.json")
        jobs = self._read_jobs()
        started, head = jobs["started"], self._json("head/owner").get("job")
        return FolderState(
            ended=_ended(self._json("ended")),
            removed=is_removed(path),
            workers=registry.get("workers", {}),
            over_memory=registry.get("over_memory", {}),
            waits_for=self._waits_for(),
            ends_at=registry.get("ends_at"),
            ends_by=registry.get("ends_by", ""),
            seen=frozenset(registry.get("seen", ())).union(registry.get("workers", ())),
            gone=registry.get("gone", {}),
            exits={n: _exit_record(value) for n, value in jobs["json"].items() if value},
            reasons={n: clean(text) for n, text in jobs["reason"].items()},
            setups={n: clean(text) for n, text in jobs["setup"].items() if text},
            claims={n: JobId.parse(text) for n, text in jobs["claim"].items() if text},
            nodes={n: start.get("node", "") for n, start in started.items()},
            began={n: start["started"] for n, start in started.items() if "started" in start},
            alive={n: self._last_sign(n, head) for n in started},
            head=head,
            address=scheduler.get("address"),
            dashboard=scheduler.get("services", {}).get("dashboard"),
            transport=Choice.parse(self._json(TRANSPORT)),
            damaged=tuple(self._damaged),
        )

    def _last_sign(self, number: int, head: int | None) -> float:
        """Return when a job last wrote its log or its heartbeat; 0 if it has written neither."""
        names = [f"logs/job-{number}.log", f"jobs/{number}.now"]
        if number == head:
            names.append(HEARTBEAT)
        return max(_modified_at(self._folder.path / name) for name in names)

    def _waits_for(self) -> str:
        after = self._json(AFTER)
        if not after or (Path(after["folder"]) / "ended").exists():
            return ""
        return str(after["cluster"])

    def _read_jobs(self) -> dict[str, dict[int, Any]]:
        """Return the content of the files ``jobs/NUMBER.KIND`` by kind and number."""
        readers = {
            "json": self._json,
            "started": self._json,
            "reason": self._text,
            "claim": self._text,
            "setup": self._text,
        }
        found: dict[str, dict[int, Any]] = {kind: {} for kind in readers}
        for number, kind in job_files(self._folder.path / "jobs", "."):
            if kind in readers:
                found[kind][number] = self._job_file(f"jobs/{number}.{kind}", readers[kind])
        return found

    def _job_file(self, name: str, read: Callable[[str], Any]) -> Any:
        try:
            status = (self._folder.path / name).lstat()
        except OSError:  # a restarted job has just removed it
            return read(name)
        key = (status.st_mtime_ns, status.st_size, status.st_ino)
        if name not in self._job_files or self._job_files[name][0] != key:
            before = len(self._damaged)
            value = read(name)
            if len(self._damaged) > before:
                return value
            self._job_files[name] = (key, value)
        return self._job_files[name][1]

    def _json(self, name: str) -> JsonObject:
        try:
            return self._folder.load(name)
        except DamagedError as error:
            self._damaged.append(str(error))
            return {}

    def _text(self, name: str) -> str:
        try:
            return self._folder.load_text(name)
        except DamagedError as error:
            self._damaged.append(str(error))
            return ""


def read_state(folder: Path) -> FolderState:
    """Return the present state of a cluster's folder; an empty one if the folder is gone."""
    return FolderReader(folder).read()


def read_transport(folder: Path) -> Choice:
    """Return the protocol of a cluster, from its folder."""
    return Choice.parse(Folder(str(folder)).read(TRANSPORT))


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _ended(value: JsonObject) -> Ended | None:
    if not value:
        return None
    ended = Ended.parse(value)
    # The reason may quote the last line of a command, with characters that move the cursor.
    return replace(ended, reason=clean(ended.reason))


def _exit_record(value: JsonObject) -> ExitRecord:
    return ExitRecord(value.get("exit_code"), value.get("host", ""))
