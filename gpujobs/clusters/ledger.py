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
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import GpujobsError, NoSuchClusterError
from ..injob.folder import DamagedError, UnreadableError, parse_json, read_file
from .files import best_effort, disk_errors, is_removed, private_folder, write_atomically, write_new
from .records import ClusterRecord, GroupRecord, Intent, Submission, parse

__all__ = ["ClusterRecord", "GroupRecord", "Intent", "Ledger", "Submission"]

logger = logging.getLogger("gpujobs")


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
            elif owner := self._cluster_of_job(cluster_id):
                hint = f"job {cluster_id} belongs to {owner}"
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

    def _cluster_of_job(self, text: str) -> str:
        """Return the newest cluster with a job of the batch scheduler's id ``text``, or ""."""
        number = _leading_number(text)
        owners = [
            record.id
            for record in self.all()
            for submission in record.submissions
            if number and _leading_number(submission.id) == number
        ]
        return owners[-1] if owners else ""

    def update(self, cluster_id: str, **changes: Any) -> ClusterRecord:
        """Replace fields of a record; return the new record."""
        with self._locked(cluster_id):
            before = self.get(cluster_id)
            record = replace(before, **changes).remember_targets(before, time.time())
            self._save(record)
        return record

    def begin_submission(self, cluster_id: str, intent: Intent) -> ClusterRecord:
        """Write the intent of a submission, before the batch scheduler is called."""
        return self.update(cluster_id, intent=intent, finished=False)

    def end_submission(self, cluster_id: str, submission: Submission) -> ClusterRecord:
        """Add an accepted submission and clear the intent."""
        with self._locked(cluster_id):
            record = self.get(cluster_id)
            # Another command may have found its job by the name, and recorded it.
            submissions = dict.fromkeys((*record.submissions, submission))
            record = replace(record, submissions=tuple(submissions), intent=None)
            self._save(record)
        return record

    def finish(
        self, record: ClusterRecord, outcomes: dict[str, str], reasons: dict[str, str]
    ) -> None:
        """Note how all jobs of ``record`` have ended, unless others are or were submitted since."""
        with self._locked(record.id):
            now = self.get(record.id)
            if now.intent is None and now.submissions == record.submissions:
                self._save(replace(now, finished=True, outcomes=outcomes, reasons=reasons))

    def remove(self, cluster_id: str) -> None:
        """Delete the record of a cluster."""
        for suffix in (".json", ".lock", ".busy"):
            self._path(cluster_id).with_suffix(suffix).unlink(missing_ok=True)

    def forget_removed(self) -> None:
        """Delete the records of clusters that have ended and whose users removed their folders."""
        for record in self.all():
            if record.finished and is_removed(record.path):
                with best_effort(), disk_errors(self.folder):
                    self.remove(record.id)

    def exclusive(self, cluster_id: str) -> contextlib.AbstractContextManager[None]:
        """Lock the size of a cluster: while it is held, no other process scales it."""
        return self._locked(cluster_id, ".busy")

    def _save(self, record: ClusterRecord) -> None:
        # An intent must survive a crash of the host; everything else can be found again.
        durable = record.intent is not None
        write_atomically(self._path(record.id), _dump(record), durable=durable)

    @contextlib.contextmanager
    def _locked(self, cluster_id: str, suffix: str = ".lock") -> Iterator[None]:
        path = self._path(cluster_id).with_suffix(suffix)
        with disk_errors(self.folder):
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
            )
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, cluster_id: str) -> Path:
        if "/" in cluster_id or cluster_id.startswith("."):
            raise NoSuchClusterError(f"there is no cluster {cluster_id!r}")
        return self.folder / f"{cluster_id}.json"

    def _paths(self) -> list[Path]:
        """Return the files of all records. Raises GpujobsError if the folder cannot be read.

        `Path.glob` would return nothing then, as if there were no clusters.
        """
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return []
        except OSError as error:
            message = f"the clusters in {self.folder} cannot be read: {error.strerror}"
            raise GpujobsError(message) from None


def _dump(record: ClusterRecord) -> str:
    return json.dumps(asdict(record), indent=1) + "\n"


def _load(path: Path) -> ClusterRecord:
    try:
        record = parse(parse_json(read_file(path), dict[str, Any]))
        if record.id != path.stem:
            raise DamagedError(f"it is that of {record.id}")
    except UnreadableError as error:
        raise GpujobsError(str(error)) from None
    except DamagedError as error:
        jobs = f"if jobs called {path.stem} are in the queue, cancel them there"
        hint = f"{jobs}; then remove the file"
        message = f"{path} is not a valid record of a cluster: {error}"
        raise GpujobsError(message, hint=hint) from None
    return record


def _leading_number(job: str) -> str:
    """Return ``105`` of the ids ``105_3`` and ``105[].server``."""
    return re.split(r"\D", job, maxsplit=1)[0]
