"""The ledger: one JSON file per submitted cluster in the user's state folder.

The file is written before the batch scheduler is called: its *intent* says which jobs are being
submitted. After a crash between call and reply, the job can be found again by its name, which is
the cluster's id.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import GpujobsError, NoSuchClusterError
from ..schedulers import JobId
from .files import disk_errors, private_folder, write_atomically, write_new

VERSION = 2

logger = logging.getLogger("gpujobs")


@dataclass(frozen=True)
class Submission:
    """One array, or lone job, that the batch scheduler accepted.

    It has ``count`` jobs, numbered from ``first``.
    """

    id: str
    first: int
    count: int
    group: str = ""
    array: bool = False
    first_index: int = 0

    def job(self, number: int) -> JobId:
        """Return the batch scheduler's id of the cluster's job ``number``."""
        index = number - self.first + self.first_index
        return JobId(self.id, index if self.array else None)

    @property
    def jobs(self) -> dict[int, JobId]:
        """The batch scheduler's ids by job number."""
        return {number: self.job(number) for number in range(self.first, self.first + self.count)}


@dataclass(frozen=True)
class Intent:
    """A submission that is being made: the fields of `Submission` that are known before it."""

    first: int
    count: int
    group: str = ""
    array: bool = False
    time: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True)
class ClusterRecord:
    """One cluster as it was submitted."""

    id: str
    site: str
    scheduler: str
    folder: str
    created: float
    workers: int
    """Target number of workers."""
    workers_per_job: int
    gpus: int
    gpus_per_job: int
    walltime: int | None
    run: tuple[str, ...]
    encrypted: bool
    poll: int = 5
    """Least seconds between two queries."""
    multi_cluster: str | None = None
    """The site's `cluster`: the batch scheduler's multi-cluster name."""
    commands: dict[str, str] = field(default_factory=dict)
    layout: str = "workers"
    ranks: int = 0
    """MPI ranks with workers; 0 without MPI."""
    owner: str = "cluster"
    """Who handles a failed job: the "cluster" itself, or a "client" in a Python process."""
    submissions: tuple[Submission, ...] = ()
    intent: Intent | None = None
    removed: tuple[int, ...] = ()
    """Jobs that were asked to leave."""
    finished: bool = False
    """All jobs are known to have ended; the batch scheduler is not queried any more."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Of a finished cluster: the state of each job by number. The batch scheduler forgets it."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Of a finished cluster: the reason of each job that has one."""
    notes: tuple[str, ...] = ()
    unlisted: dict[str, float] = field(default_factory=dict)
    """Jobs that the batch scheduler does not list, by number: since when (epoch seconds)."""
    version: int = VERSION

    @property
    def jobs(self) -> dict[int, JobId]:
        """The batch scheduler's ids of all jobs by number."""
        return {
            number: job
            for submission in self.submissions
            for number, job in submission.jobs.items()
        }

    @property
    def path(self) -> Path:
        """The cluster's folder."""
        return Path(self.folder)


class Ledger:
    """The records of this user's clusters."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            from platformdirs import user_state_path

            folder = user_state_path("gpujobs") / "clusters"
        self.folder = folder

    def new_id(self, name: str) -> str:
        """Return an unused cluster id that starts with ``name``."""
        for _ in range(100):
            cluster_id = f"{name}-{secrets.token_hex(2)}"
            if not self._path(cluster_id).exists():
                return cluster_id
        hint = "use another name; the records are in " + str(self.folder)
        raise GpujobsError(f"too many clusters are called {name}", hint=hint)

    def add(self, record: ClusterRecord) -> None:
        """Write a new record."""
        private_folder(self.folder)
        with disk_errors(self.folder):
            write_new(self._path(record.id), _dump(record), durable=True)

    def get(self, cluster_id: str) -> ClusterRecord:
        """Return the record of a cluster. Raises NoSuchClusterError."""
        try:
            return _load(self._path(cluster_id))
        except FileNotFoundError:
            similar = [path.stem for path in self._paths() if path.stem.startswith(cluster_id)]
            hint = "`gpujobs status --all` lists your clusters"
            if similar:
                hint = f"did you mean {similar[0]}?"
            raise NoSuchClusterError(f"there is no cluster {cluster_id!r}", hint=hint) from None

    def all(self) -> list[ClusterRecord]:
        """Return all records, oldest first. A record that cannot be read is logged and skipped."""
        records = []
        for path in self._paths():
            try:
                records.append(_load(path))
            except FileNotFoundError:
                continue  # its submission failed meanwhile
            except GpujobsError as error:  # a full disk, or another version; the others are valid
                logger.warning("%s", error)
        return sorted(records, key=lambda record: record.created)

    def update(self, cluster_id: str, **changes: Any) -> ClusterRecord:
        """Replace fields of a record; return the new record."""
        with self._locked(cluster_id):
            record = replace(self.get(cluster_id), **changes)
            self._save(record)
        return record

    def begin_submission(self, cluster_id: str, intent: Intent) -> ClusterRecord:
        """Write the intent of a submission, before the batch scheduler is called."""
        intent = replace(intent, time=time.time())
        return self.update(cluster_id, intent=intent, finished=False)

    def end_submission(self, cluster_id: str, submission: Submission) -> ClusterRecord:
        """Add an accepted submission and clear the intent."""
        with self._locked(cluster_id):
            record = self.get(cluster_id)
            submissions = (*record.submissions, submission)
            record = replace(record, submissions=submissions, intent=None)
            self._save(record)
        return record

    def remove(self, cluster_id: str) -> None:
        """Delete the record of a cluster."""
        for suffix in (".json", ".lock", ".busy"):
            self._path(cluster_id).with_suffix(suffix).unlink(missing_ok=True)

    def exclusive(self, cluster_id: str) -> contextlib.AbstractContextManager[None]:
        """Lock the size of a cluster: while it is held, no other process scales it."""
        return self._locked(cluster_id, ".busy")

    def _save(self, record: ClusterRecord) -> None:
        # An intent must survive a crash of the host; everything else can be found again.
        durable = record.intent is not None
        write_atomically(self._path(record.id), _dump(record), durable=durable)

    @contextlib.contextmanager
    def _locked(self, cluster_id: str, suffix: str = ".lock") -> Iterator[None]:
        with self._path(cluster_id).with_suffix(suffix).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, cluster_id: str) -> Path:
        if "/" in cluster_id or cluster_id.startswith("."):
            raise NoSuchClusterError(f"there is no cluster {cluster_id!r}")
        return self.folder / f"{cluster_id}.json"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"))


def _dump(record: ClusterRecord) -> str:
    return json.dumps(asdict(record), indent=1) + "\n"


def _load(path: Path) -> ClusterRecord:
    try:
        return _parse(json.loads(path.read_text()))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        jobs = f"if jobs called {path.stem} are in the queue, cancel them there"
        hint = f"{jobs}; then remove the file"
        message = f"{path} is not a valid record of a cluster: {error}"
        raise GpujobsError(message, hint=hint) from None


def _parse(value: dict[str, Any]) -> ClusterRecord:
    version = value.get("version")
    if version == 1:  # of release 0.1
        value["multi_cluster"] = value.pop("cluster", None)
    elif version != VERSION:
        raise ValueError("it was written by another version of gpujobs")
    value["version"] = VERSION
    value["created"] = float(value["created"])
    value["submissions"] = tuple(Submission(**item) for item in value["submissions"])
    intent = value.get("intent")
    if intent is not None:
        value["intent"] = Intent(**{"time": value["created"], **intent})
    for name in ("run", "removed", "notes"):
        value[name] = tuple(value[name])
    return ClusterRecord(**value)
