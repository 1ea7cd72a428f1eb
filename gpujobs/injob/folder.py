"""The cluster's folder, as its jobs see it. The package's docstring lists the files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypedDict, cast

from .log import log
from .names import ARCHIVE

JsonObject = dict[str, Any]

EXIT_FAILED = 70
"""EX_SOFTWARE: gpujobs ended the cluster because of an error, not the user's command."""
EXIT_STOPPED = 143
"""128 + SIGTERM: the batch scheduler stopped the job."""
HEARTBEAT = "head/heartbeat"
"""File that the head writes again and again."""
EVENTS = "events.jsonl"
"""File of the dask scheduler: a line for each worker that connects or disconnects."""
TRANSFERS = "transfers.jsonl"
"""File of the dask scheduler: samples of the bytes that each worker has received from workers."""
SCRIPT_ENDED = "script-ended"
"""File of the rank that ran the user's script in all MPI ranks: the script is over."""
IDLE = "idle"
"""File that the dask scheduler writes if the cluster must end because it had no work."""
AFTER = "after"
"""File that names another cluster, after whose end this one starts."""


class EndKind(str, Enum):
    """Why a cluster has ended."""

    DONE = "done"
    """`run` exited with 0."""
    FAILED = "failed"
    """An error, or `run` exited with another code."""
    CANCELLED = "cancelled"
    """By `gpujobs cancel`, or by the batch scheduler."""
    WALLTIME = "walltime"
    """The head's job reached its walltime before `run` exited."""
    IDLE = "idle"
    """The cluster had no work for too long."""
    CLOSED = "closed"
    """The Python process that owns the cluster closed it."""
    SHUTDOWN = "shutdown"
    """A client called ``client.shutdown()``."""


@dataclass(frozen=True)
class Ended:
    """The contents of the file `ended`."""

    kind: EndKind
    exit_code: int
    reason: str = ""
    job: int | None = None
    """Number of the job that ended the cluster; None if that was no job."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Ended:
        """Return an `Ended` from its JSON. gpujobs 0.1 wrote no kind, and its bash no time."""
        exit_code, reason = value.get("exit_code", EXIT_FAILED), str(value.get("reason") or "")
        try:
            kind = EndKind(value.get("kind"))
        except ValueError:
            kind = _kind_of_old(exit_code, reason)
        return cls(kind, exit_code, reason, value.get("job"), value.get("time", 0.0))

    def json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({**asdict(self), "kind": self.kind.value}) + "\n"


def _kind_of_old(exit_code: int, reason: str) -> EndKind:
    if reason == "cancelled by gpujobs":
        return EndKind.CANCELLED
    return EndKind.DONE if exit_code == 0 else EndKind.FAILED


class Gpu(TypedDict, total=False):
    """The first GPU of a worker. ``uuid`` is None if it has none."""

    node: str
    uuid: str | None
    model: str | None
    memory: int | None
    """Bytes."""
    fast: list[str]
    """Fast connections of the GPU and its node: InfiniBand, NVLink."""
    error: str
    """Why NVML did not report more than this."""
    others: list[Gpu]
    """The other GPUs of a worker that has several."""
    sharing: int
    """How many workers may have this GPU, if these are several."""


def all_gpus(gpu: Gpu | None) -> list[Gpu]:
    """Return the GPUs of a worker that have a UUID."""
    if not gpu:
        return []
    return [one for one in (gpu, *gpu.get("others", [])) if one.get("uuid")]


class _WorkerMemory(TypedDict, total=False):
    memory: int
    """Limit of the worker's memory in bytes; 0: none. Missing in files of an older gpujobs."""


class RegisteredWorker(_WorkerMemory):
    """A worker in `workers.json`."""

    address: str
    threads: int
    gpu: Gpu | None


class OverMemory(TypedDict):
    """A worker in `workers.json` that its nanny has restarted because of its memory."""

    restarts: int
    limit: int
    """Bytes."""


def over_memory_message(name: str, worker: OverMemory) -> str:
    """Return a sentence for the user."""
    times = "once" if worker["restarts"] == 1 else f"{worker['restarts']} times"
    limit = f"{worker['limit'] / 2**30:.3g} GiB"
    return f"worker {name} restarted {times}: over its memory limit of {limit}"


class Folder:
    """The cluster's folder: atomic writes, and reads that never fail."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @property
    def cluster_id(self) -> str:
        """The cluster's id."""
        return self.path.name

    @property
    def logs(self) -> Path:
        """The folder of the logs."""
        return self.path / "logs"

    @property
    def archive(self) -> Path:
        """The file with this package."""
        return self.path / ARCHIVE

    def write(self, name: str, value: object) -> None:
        """Replace the file ``name`` atomically by ``value`` as JSON."""
        temporary = self.path / f"{name}.{os.urandom(6).hex()}"
        temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
        temporary.replace(self.path / name)

    def append(self, name: str, lines: Iterable[str]) -> None:
        """Append lines to the file ``name``, which one process writes. Raises OSError.

        It is opened for that, because NFS shows others only what is written in a closed file.
        """
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def create(self, name: str, text: str) -> bool:
        """Create the file ``name``; return False if it exists already, or cannot be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(self.path / name, flags, 0o600)
        except OSError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return True

    def read(self, name: str) -> JsonObject:
        """Return the JSON object in the file ``name``; {} if it is missing or half written."""
        try:
            value = json.loads((self.path / name).read_text(encoding="utf-8", errors="replace"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def read_text(self, name: str) -> str:
        """Return the text in the file ``name``, stripped; "" if it is missing."""
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def names(self) -> set[str]:
        """Return the names of all files.

        A listing, since NFS caches for a minute that a single name was missing.
        """
        try:
            return set(os.listdir(self.path))  # noqa: PTH208 - names, not Paths
        except OSError:
            return set()

    def end(self, ended: Ended) -> bool:
        """Write `ended`; return False if another process has written it before."""
        temporary = self.path / f"ended.{os.urandom(6).hex()}"
        try:
            temporary.write_text(ended.json(), encoding="utf-8")
            os.link(temporary, self.path / "ended")
        except FileExistsError:
            return False
        except OSError as error:
            log(f"cannot write {self.path / 'ended'}: {error}")
            return False
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        return True

    def registered(self) -> dict[str, RegisteredWorker]:
        """Return the workers that are registered with the dask scheduler, by name."""
        workers = self.read("workers.json").get("workers", {})
        return cast("dict[str, RegisteredWorker]", workers)

    def over_memory(self) -> dict[str, OverMemory]:
        """Return the workers that were restarted because of their memory, by name."""
        workers = self.read("workers.json").get("over_memory", {})
        return cast("dict[str, OverMemory]", workers)


def modified_at(path: Path) -> float:
    """Return when a file was written, by the clock of the file server.

    Only times by that clock are comparable: the clocks of two nodes may differ by minutes. The file
    is opened, since NFS caches the attributes of a file for a minute. Raises OSError.
    """
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime
