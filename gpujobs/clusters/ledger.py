"""What has been submitted: one JSON file per cluster in the user's state folder, replaced atomically.

The file is written before the batch scheduler is called (``intent`` says what is being asked), so that a crash in
between leaves something to find the job by: its name is the cluster's id.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import GpujobsError, InputError, NoSuchClusterError
from ..schedulers import JobId

VERSION = 1


@dataclass(frozen=True)
class Submission:
    """One array (or lone job) that the batch scheduler accepted: jobs ``first`` to ``first + count - 1``."""

    id: str
    first: int
    count: int
    group: str = ""
    array: bool = False
    first_index: int = 0

    def job(self, number: int) -> JobId:
        """Return the batch scheduler's id of the cluster's job ``number``."""
        return JobId(self.id, number - self.first + self.first_index if self.array else None)

    @property
    def jobs(self) -> dict[int, JobId]:
        """The batch scheduler's ids by number."""
        return {number: self.job(number) for number in range(self.first, self.first + self.count)}


@dataclass(frozen=True)
class ClusterRecord:
    """One cluster, as it was submitted. ``removed`` are jobs that were asked to go."""

    id: str
    site: str
    scheduler: str
    folder: str
    created: float
    workers: int
    """How many are wanted."""
    workers_per_job: int
    gpus: int
    gpus_per_job: int
    walltime: int | None
    run: tuple[str, ...]
    encrypted: bool
    poll: int = 5
    cluster: str | None = None
    """The batch scheduler's multi-cluster name."""
    commands: dict[str, str] = field(default_factory=dict)
    layout: str = "workers"
    ranks: int = 0
    """Of MPI."""
    owner: str = "cluster"
    """Who decides when a job fails: the cluster itself, or a "client" in Python."""
    submissions: tuple[Submission, ...] = ()
    intent: dict[str, Any] | None = None
    removed: tuple[int, ...] = ()
    finished: bool = False
    """All its jobs are known to be over: nobody needs to be asked any more."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Once finished: the state of each job by number, since the batch scheduler forgets."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The same for the reasons, where there are any."""
    notes: tuple[str, ...] = ()
    unlisted: dict[str, float] = field(default_factory=dict)
    """Jobs that the batch scheduler does not list, by number: since when."""
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
    """The records of this user."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            from platformdirs import user_state_path

            folder = user_state_path("gpujobs") / "clusters"
        self.folder = folder

    def new_id(self, name: str) -> str:
        """Return an id that no record has."""
        for _ in range(100):
            cluster = f"{name}-{secrets.token_hex(2)}"
            if not self._path(cluster).exists():
                return cluster
        raise GpujobsError(
            f"too many clusters are called {name}", hint="gpujobs cancel --help, or another name"
        )

    def add(self, record: ClusterRecord) -> None:
        """Write a record that must be new."""
        private_folder(self.folder)
        with disk_errors(self.folder):
            _write_new(self._path(record.id), _text(record), durable=True)

    def get(self, cluster: str) -> ClusterRecord:
        """Return the record of ``cluster``, or raise NoSuchClusterError."""
        try:
            return _record(self._path(cluster))
        except FileNotFoundError:
            known = [path.stem for path in self._paths()]
            near = [item for item in known if item.startswith(cluster)]
            hint = f"did you mean {near[0]}?" if near else "`gpujobs status --all` lists them"
            raise NoSuchClusterError(f"there is no cluster {cluster!r}", hint=hint) from None

    def all(self, tell: Callable[[str], None] = lambda text: None) -> list[ClusterRecord]:
        """Return all records, the oldest first; ``tell`` is called with a line for each that cannot be read."""
        records = []
        for path in self._paths():
            try:
                records.append(_record(path))
            except FileNotFoundError:
                continue  # its submission was given up meanwhile
            except (
                GpujobsError
            ) as error:  # broken by a full disk, or by another version: the others are fine
                tell(str(error))
        return sorted(records, key=lambda record: record.created)

    def update(self, cluster: str, **changes: Any) -> ClusterRecord:
        """Replace fields of a record; return the new one."""
        with self._locked(cluster):
            record = replace(self.get(cluster), **changes)
            self._save(record)
        return record

    def submitted(self, cluster: str, submission: Submission) -> ClusterRecord:
        """Add a submission that was accepted, and clear the intent."""
        with self._locked(cluster):
            record = self.get(cluster)
            record = replace(record, submissions=(*record.submissions, submission), intent=None)
            self._save(record)
        return record

    def remove(self, cluster: str) -> None:
        """Forget a cluster."""
        for suffix in (".json", ".lock", ".busy"):
            self._path(cluster).with_suffix(suffix).unlink(missing_ok=True)

    def _save(self, record: ClusterRecord) -> None:
        # What is about to be asked for must be known after a crash; the answer can be found again.
        write_atomically(self._path(record.id), _text(record), durable=record.intent is not None)

    @contextlib.contextmanager
    def busy(self, cluster: str) -> Iterator[None]:
        """Keep others from scaling the cluster while this is open."""
        with self._locked(cluster, ".busy"):
            yield

    @contextlib.contextmanager
    def _locked(self, cluster: str, suffix: str = ".lock") -> Iterator[None]:
        with self._path(cluster).with_suffix(suffix).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, cluster: str) -> Path:
        if "/" in cluster or cluster.startswith("."):
            raise NoSuchClusterError(f"there is no cluster {cluster!r}")
        return self.folder / f"{cluster}.json"

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"))


def private_folder(path: Path) -> None:
    """Make the folder ``path`` (0700) or check that it is ours alone; InputError where somebody else could write."""
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.is_symlink() and not folder.exists():
                folder.mkdir(mode=0o700)
        status = path.lstat()
    except OSError as error:
        raise InputError(
            f"{path} cannot be used: {error.strerror}", hint="see `directory` of the site"
        ) from None
    why = ""
    if stat.S_ISLNK(status.st_mode):
        why = "is a symbolic link"
    elif status.st_uid != os.getuid():
        why = "belongs to somebody else"
    elif status.st_mode & 0o022:
        why = "can be written by others"
    if why:
        raise InputError(
            f"{path} {why}; gpujobs keeps keys below it",
            hint=f"chmod 700 {path}, or another folder",
        )


def write_atomically(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file, readable by its owner alone, in one step; ``durable``: and see it on the disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with disk_errors(path.parent):
        try:
            _write_new(temporary, text, durable)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _write_new(path: Path, text: str, durable: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a disk says while this is open, but for "exists already", into a GpujobsError that names ``path``."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise GpujobsError(f"cannot write in {path}: {error.strerror}") from error


def _text(record: ClusterRecord) -> str:
    return json.dumps(asdict(record), indent=1) + "\n"


def _record(path: Path) -> ClusterRecord:
    try:
        value = json.loads(path.read_text())
        if value.get("version") != VERSION:
            raise ValueError("it was written by another version of gpujobs")
        submissions = tuple(Submission(**item) for item in value.pop("submissions"))
        value.update({name: tuple(value[name]) for name in ("run", "removed", "notes")})
        return ClusterRecord(
            **{**value, "created": float(value["created"])}, submissions=submissions
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        hint = (
            f"if jobs called {path.stem} are in the queue, cancel them there; then remove the file"
        )
        raise GpujobsError(f"{path} is no record of a cluster: {error}", hint=hint) from None
