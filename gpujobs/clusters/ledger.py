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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

from ..errors import GpujobsError, InputError, NoSuchClusterError
from ..injob.folder import DamagedError, Folder, UnreadableError, parse_json, read_file, typed
from ..injob.names import HEAD, RECORD, job_file, job_worker_names
from ..schedulers import JobId
from .clusterfolder import (
    OF_STATE,
    PresentFolders,
    best_effort,
    check_folder,
    disk_errors,
    file_names,
    is_removed,
    job_files,
    private_folder,
    read_claim,
    write_atomically,
    write_new,
)
from .lastword import EndedJob, LastWord, wrong_claim
from .targets import MOST_WORKERS, Count, Target, Targets, append_targets, read_targets

if TYPE_CHECKING:
    from ..planning.lifetime import Replaces

# -- the record of a cluster: its groups of workers and its submissions ----------------------------
VERSION = 2
_MOST_PLANNED = 10**5
"""Jobs of a job folder: as many as the most GPUs of a profile."""
_Positive = Annotated[int, range(1, MOST_WORKERS + 1)]


@dataclass(frozen=True)
class Submission:
    """One array, or lone job: planned, being submitted (an intent), or accepted.

    It has ``count`` jobs, numbered from ``first``.
    """

    id: str
    """Of the batch scheduler; "" before it has accepted the submission."""
    first: Count
    count: Count
    group: str = ""
    array: bool = False
    first_index: int = 0
    attempt: int = 1
    time: float = 0.0
    """Seconds since the epoch; 0 in a record of an older gpujobs."""
    devices: tuple[str, ...] = ()
    """GPUs of this machine that its jobs have, in their order; empty with a batch scheduler."""
    script: str = ""
    """File in a job folder."""
    arguments: tuple[str, ...] = ()
    """Extra arguments of the command that submits the script."""

    @property
    def numbers(self) -> range:
        """The numbers of its jobs."""
        return range(self.first, self.first + self.count)

    @property
    def jobs(self) -> dict[int, JobId]:
        """The batch scheduler's ids by job number."""
        if not self.array:
            return dict.fromkeys(self.numbers, JobId(self.id, None))
        first = self.first_index - self.first
        return {number: JobId(self.id, number + first) for number in self.numbers}

    def devices_of(self, number: int) -> tuple[str, ...]:
        """Return the GPUs of this machine that the cluster's job ``number`` has."""
        each = len(self.devices) // self.count
        start = (number - self.first) * each
        return self.devices[start : start + each]


@dataclass(frozen=True)
class GroupRecord:
    """The workers of one kind. ``name`` is "" if the profile has no groups."""

    name: str
    workers: Count
    """Target number of workers."""
    workers_per_job: _Positive
    gpus_per_job: Count
    queue: str = ""
    """Key of the queue in the site file."""
    walltime: int = 0
    """Seconds of each job; 0: none, or a record of an older gpujobs."""
    error: str = ""
    """Why its owner submits no more jobs of it."""
    nodes_per_job: _Positive = 1
    cpus_per_job: int = 0
    """0: not known."""
    memory_per_job: int = 0
    """Bytes; 0: not known."""
    gpu_pool: bool = False
    """Its workers take GPU memory in advance."""
    charge: float = 0.0
    """Per GPU hour, in ``charge_unit``; 0: none, or not known."""
    charge_unit: str = ""
    energy_charge: float = 0.0
    """Per kWh of the GPUs, in ``charge_unit``; 0: none."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of the workers."""
        return self.workers // self.workers_per_job * self.gpus_per_job


@dataclass(frozen=True)
class ClusterRecord:
    """One cluster as it was submitted."""

    id: str
    site: str
    scheduler: str
    folder: str
    created: float
    groups: tuple[GroupRecord, ...]
    run: tuple[str, ...]
    encrypted: bool
    poll: Annotated[int, range(86400)] = 5
    """Least seconds between two queries."""
    multi_cluster: Optional[str] = None
    """The site's `cluster`: the batch scheduler's multi-cluster name."""
    commands: dict[str, str] = field(default_factory=dict)
    layout: str = "workers"
    ranks: Count = 0
    """MPI ranks with workers; 0 without MPI."""
    owner: str = "cluster"
    """A word of 0.2.0 for `replaces`: "client" for an owner, else "cluster"."""
    after: str = ""
    """The cluster after whose end this one starts."""
    attempts: int = 1
    """How often the cluster starts at most; the jobs of all attempts are submitted at once."""
    submissions: tuple[Submission, ...] = ()
    intent: Optional[Submission] = None
    planned: tuple[Submission, ...] = ()
    """The scripts in the job folder of the cluster; empty if it has none."""
    removed: tuple[int, ...] = ()
    """Jobs that were asked to leave."""
    finished: bool = False
    """All jobs are known to have ended; the batch scheduler is not queried any more."""
    ended: dict[str, EndedJob] = field(default_factory=dict)
    """Jobs that have ended, by number, while the cluster goes on."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Of a finished cluster: the state of each job by number. The batch scheduler forgets it."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Of a finished cluster: the reason of each job that has one."""
    last: Optional[LastWord] = None
    """Of a finished cluster whose folder says nothing new any more."""
    notes: tuple[str, ...] = ()
    contact: Optional[str] = None
    """The site's contact, who can explain a refused job."""
    targets: tuple[Target, ...] = ()
    """Of a record of an older gpujobs, until the next change: they are in a file of their own."""
    dashboard: str = "on"
    """`network.dashboard` of the profile."""
    head: str = ""
    """The group whose jobs may be the head; `HEAD`: a job of its own; "": any job."""
    start_timeout: int = 300
    """Seconds in which the workers of a job that has started connect."""
    unlisted: dict[str, float] = field(default_factory=dict)
    """Jobs that the batch scheduler does not list, by number: since when (epoch seconds)."""
    trial: bool = False
    """Of `doctor` or `sites verify`: `status --all` does not list it once it has ended."""
    version: int = VERSION

    @property
    def replaces(self) -> Replaces:
        """Who replaces lost jobs."""
        return "owner" if self.owner == "client" else "none"

    @property
    def on_one_host(self) -> bool:
        """Whether each job is on one host, so that one file has all that it says."""
        return all(group.nodes_per_job == 1 for group in self.groups)

    @property
    def elastic(self) -> bool:
        """Whether jobs may come and go: an allocation has nodes of its own, a `--here` has not."""
        grows = self.layout == "allocation" and self.ranks > 0 and self.scheduler != "local"
        return self.layout == "workers" or grows

    @property
    def jobs(self) -> dict[int, JobId]:
        """The batch scheduler's ids of all jobs by number."""
        return {
            number: job
            for submission in self.submissions
            for number, job in submission.jobs.items()
        }

    def current_jobs(self, claims: Mapping[int, JobId]) -> dict[int, JobId]:
        """Return the job that does the work of each number.

        ``claims`` are those of the cluster's folder. They differ from `jobs` only if a number was
        submitted twice.
        """
        return {**self.jobs, **claims}

    @property
    def workers(self) -> int:
        """Target number of workers of all groups."""
        return sum(group.workers for group in self.groups)

    @property
    def gpus(self) -> int:
        """Number of GPUs of all groups."""
        return sum(group.gpus for group in self.groups)

    def group(self, name: str) -> GroupRecord:
        """Return the group ``name``. Raises LookupError."""
        return next(group for group in self.groups if group.name == name)

    def with_target(self, name: str, workers: int) -> tuple[GroupRecord, ...]:
        """Return the groups after a change of the target of one."""
        return tuple(
            replace(group, workers=workers) if group.name == name else group
            for group in self.groups
        )

    def changed_targets(self, before: ClusterRecord, time: float) -> list[Target]:
        """Return the targets that differ from those of ``before``."""
        known = {group.name: group.workers for group in before.groups}
        return [
            Target(time, group.workers, group.name)
            for group in self.groups
            if group.workers != known.get(group.name)
        ]

    @property
    def first_targets(self) -> list[Target]:
        """The targets at the submission, while none has been changed."""
        return [Target(self.created, group.workers, group.name) for group in self.groups]

    @property
    def path(self) -> Path:
        """The cluster's folder."""
        return Path(self.folder)

    @property
    def argument(self) -> str:
        """How commands name the cluster: its id, or the path of its job folder."""
        return str(self.path.parent) if self.planned else self.id

    def worker_names(self, number: int, group: str) -> tuple[str, ...]:
        """Return the names of the workers of the job ``number``, of ``group``."""
        if group == HEAD:
            return ()
        workers = self.group(group).workers_per_job
        return tuple(job_worker_names(self.id, number, workers, self.ranks, group))

    @property
    def unseen(self) -> list[Submission]:
        """The scripts in the job folder of which no submission is known."""
        known = {submission.first for submission in self.submissions}
        return [planned for planned in self.planned if planned.first not in known]

    def at(self, path: Path | None) -> ClusterRecord:
        """Return the record with the folder ``path`` of the cluster; None: it has no job folder.

        A job folder may have been copied, and its jobs submitted by hand: they write their ids.
        """
        if not self.planned or path is None:
            return self
        claims = dict(_claims(path)) if self.unseen else {}
        found = (_submitted(planned, claims) for planned in self.unseen)
        submissions = (*self.submissions, *filter(None, found))
        created = min((sent.time for sent in submissions if sent.time), default=self.created)
        return replace(self, folder=str(path), submissions=submissions, created=created)

    def claimed_intent(self) -> Optional[Submission]:
        """Return the submission of the intent, from the claims of its jobs; None without one."""
        return _submitted(self.intent, dict(_claims(self.path))) if self.intent else None


def _claims(path: Path) -> Iterator[tuple[int, tuple[JobId, float]]]:
    """Yield the number, id and start of each job that has started in a cluster's folder."""
    for number, kind in job_files(file_names(path / "jobs"), "."):
        if kind != "claim":
            continue
        name = job_file(number, kind)
        with contextlib.suppress(DamagedError, OSError):  # `FolderReader` reports it
            if job := read_claim(Folder(str(path)), name):
                yield number, (job, (path / name).stat().st_mtime)


def _submitted(
    planned: Submission, claims: Mapping[int, tuple[JobId, float]]
) -> Optional[Submission]:
    """Return the submission of a script, from what its jobs have written; None if none has."""
    number = next((number for number in planned.numbers if number in claims), None)
    if number is None:
        return None
    job, time = claims[number]
    first_index = 0 if job.index is None else job.index - (number - planned.first)
    return replace(planned, id=job.submission, first_index=first_index, time=time)


def parse(value: dict[str, Any]) -> ClusterRecord:
    """Return a record from its JSON. Raises DamagedError."""
    if value.get("version") != VERSION:
        raise DamagedError("it was written by another version of gpujobs")
    if isinstance(intent := value.get("intent"), dict):
        intent.setdefault("id", "")  # missing in release 0.2.0
    record: ClusterRecord = typed(value, ClusterRecord)
    if problem := _contradiction(record):
        raise DamagedError(problem)
    return record


def _contradiction(record: ClusterRecord) -> str:
    """Return why the numbers and names of a record do not go together, or ""."""
    names = {group.name for group in record.groups}
    if not names:
        return "`groups` is empty"
    if unknown := {sent.group for sent in record.submissions} - names - {HEAD}:
        return f"`groups` has no {min(unknown)!r}"
    for sent in record.submissions:
        if not JobId(sent.id).plausible:
            return f"{sent.id!r} is not the id of a job"
    workers = max(group.workers_per_job for group in record.groups) * max(1, record.ranks)
    if sum(sent.count for sent in record.submissions) * workers > MOST_WORKERS:
        return f"it has more than {MOST_WORKERS} workers"
    if sum(planned.count for planned in record.planned) > _MOST_PLANNED:
        return f"`planned` has more than {_MOST_PLANNED} jobs"
    shown = (record.site, record.contact or "", *(group.queue for group in record.groups))
    if any(len(text.splitlines()) > 1 for text in shown):  # the others would look like messages
        return "a name has several lines"
    if record.last and record.last.problem:
        return record.last.problem
    if any(number != str(job.files["number"]) for number, job in record.ended.items()):
        return "`ended` has another number than its job"
    if problem := wrong_claim(job.files for job in record.ended.values()):
        return problem
    if not record.path.is_absolute():
        return "`folder` is not an absolute path"
    return ""


# -- the records of a user -------------------------------------------------------------------------
logger = logging.getLogger("gpujobs")
_MOST_KNOWN = 8
"""Records that a process keeps: with 10,000 jobs, one has some megabytes."""
_TARGETS = ".targets.jsonl"
"""End of the name of the file beside a record that has the changes of its targets."""


class Ledger:
    """The records of this user's clusters."""

    def __init__(self, folder: Path | None = None) -> None:
        if folder is None:
            from platformdirs import user_state_path

            folder = user_state_path("gpujobs") / "clusters"
        self.folder = folder
        self._job_folders: dict[str, Path] = {}
        """Folders of the clusters whose records are in their job folders, by id."""
        self._known: dict[str, tuple[str, ClusterRecord]] = {}
        """Text and content of the last records that were asked for, by id: an owner reads the same
        text every second."""

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
        private_folder(self.folder, OF_STATE)
        with disk_errors(self.folder, OF_STATE):
            write_new(self._path(record.id), _dump(record), durable=True)

    @staticmethod
    def create(record: ClusterRecord) -> None:
        """Write the record of a cluster into its new job folder."""
        write_atomically(record.path / RECORD, _dump(record), durable=True)

    def get(self, cluster_id: str) -> ClusterRecord:
        """Return the record of a cluster: its id, or the path of its job folder.

        Raises NoSuchClusterError, or InputError if the job folder is not trusted.
        """
        if cluster_id not in self._job_folders and self._is_path(cluster_id):
            cluster_id = self._open(Path(cluster_id))
        try:
            known = self._known.pop(cluster_id, None)
            text, record = _load(self._path(cluster_id), cluster_id, known)
            self._known[cluster_id] = text, record
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            if cluster_id in self._job_folders:
                record = _with_known_commands(record)
            return record.at(self._job_folders.get(cluster_id))
        except FileNotFoundError:
            similar = self._beginning(cluster_id)
            hint = "`gpujobs status --all` lists your clusters"
            if similar:
                hint = f"did you mean {similar[0]}?"
            elif owner := self._cluster_of_job(cluster_id):
                hint = f"job {cluster_id} belongs to {owner}"
            raise NoSuchClusterError(f"there is no cluster {cluster_id!r}", hint=hint) from None

    def resolve(self, text: str) -> str:
        """Return what `get` takes for ``text``, which may be the beginning of an id.

        It must be that of one cluster that has not ended, else of one of all. For commands that
        only read: `get` itself takes whole ids. Raises NoSuchClusterError if it is not clear.
        """
        if not text or _names_path(text) or self._may_have(text):
            return text
        found = self._beginning(text)
        if len(found) > 1:
            active = {record.id for record in self.all() if not record.finished}
            found = [name for name in found if name in active] or found
        if len(found) > 1:
            message = f"{len(found)} clusters have an id that begins with {text!r}"
            raise NoSuchClusterError(message, hint=f"name one: {', '.join(found[:10])}")
        if found and self._is_path(text):
            message = f"{text!r} is a job folder here, and the beginning of {found[0]}"
            raise NoSuchClusterError(message, hint=f"./{text} or {found[0]}")
        return found[0] if found else text

    def _may_have(self, cluster_id: str) -> bool:
        """Return whether a cluster has a record; `get` says why it cannot be looked up."""
        try:
            return self._path(cluster_id).exists()
        except OSError:
            return True

    def _beginning(self, text: str) -> list[str]:
        """Return the ids of the ledger that begin with ``text``."""
        return [path.stem for path in self._paths() if path.stem.startswith(text)]

    def _is_path(self, text: str) -> bool:
        """Return whether ``text`` is a path: a word alone is if it has a job folder, and no record.

        A directory may have the name of a program, and of its clusters.
        """
        if _names_path(text):
            return True
        return any(Path(text).glob(f"*/{RECORD}")) and not self._may_have(text)

    def _open(self, path: Path) -> str:
        """Add the cluster of the job folder at ``path``; return its id."""
        found = [record.parent.absolute() for record in path.glob(f"*/{RECORD}")]
        if len(found) != 1:
            hint = "`gpujobs render PROFILE -o FOLDER` makes one"
            raise NoSuchClusterError(f"{path} is not a job folder", hint=hint)
        check_folder(found[0])
        known = self._job_folders.setdefault(found[0].name, found[0])
        if known != found[0]:
            raise InputError(f"{path} is a copy of {known.parent}; name one of them")
        return known.name

    def all(self) -> list[ClusterRecord]:
        """Return all records, oldest first. A record that cannot be read is logged and skipped."""
        records = []
        for path in self._paths():
            try:
                records.append(_load(path, path.stem)[1])
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
            record = self._with_targets(before, replace(before, **changes))
            self._save(record)
        return record

    def targets(self, record: ClusterRecord) -> Targets:
        """Return all changes of the targets of a cluster, with the first targets."""
        names = [group.name for group in record.groups]
        found = read_targets(self._targets_path(record.id), record.targets, names)
        return found if found.changes else replace(found, changes=tuple(record.first_targets))

    def _with_targets(self, before: ClusterRecord, record: ClusterRecord) -> ClusterRecord:
        """Write the changed targets of a record into their file; return the record without any.

        What the disk refuses is missing in `gpujobs report`, and nowhere else.
        """
        changed = record.changed_targets(before, time.time())
        if not changed:
            return record
        path = self._targets_path(record.id)
        with best_effort():
            if not os.path.lexists(path):
                changed = [*(before.targets or before.first_targets), *changed]
            append_targets(path, changed)
            record = replace(record, targets=())
        return record

    def _targets_path(self, cluster_id: str) -> Path:
        return self._path(cluster_id).with_suffix(_TARGETS)

    def begin_submission(self, cluster_id: str, intent: Submission) -> ClusterRecord:
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
        self,
        record: ClusterRecord,
        outcomes: dict[str, str],
        reasons: dict[str, str],
        last: LastWord | None = None,
    ) -> None:
        """Note how all jobs of ``record`` have ended, unless others are or were submitted since.

        ``last``: of its folder, if that says nothing new any more.
        """
        with self._locked(record.id):
            now = self.get(record.id)
            if now.intent is None and now.submissions == record.submissions:
                over = replace(now, finished=True, outcomes=outcomes, reasons=reasons, last=last)
                self._save(replace(over, ended={}))

    def note_ended(
        self, cluster_id: str, ended: Mapping[str, EndedJob], returned: Collection[str]
    ) -> ClusterRecord:
        """Note jobs that have ended, and those that are in the queue again; return the record."""
        with self._locked(cluster_id):
            record = self.get(cluster_id)
            found = {**record.ended, **ended}
            found = {number: job for number, job in found.items() if number not in returned}
            record = replace(record, ended=found)
            self._save(record)
        return record

    def remove(self, cluster_id: str) -> None:
        """Delete the record of a cluster."""
        for suffix in (".json", _TARGETS, ".lock", ".busy"):
            self._path(cluster_id).with_suffix(suffix).unlink(missing_ok=True)

    def without_removed(self, folders: PresentFolders) -> list[ClusterRecord]:
        """Return all records, oldest first; delete those of clusters that are of no use any more.

        They have ended, and their users have removed their folders.
        """
        kept = []
        for record in self.all():
            if record.finished and record.path not in folders and is_removed(record.path):
                with best_effort(), disk_errors(self.folder):
                    self.remove(record.id)
                    continue
            kept.append(record)
        return kept

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
        hint = OF_STATE if path.parent == self.folder else ""
        with disk_errors(path.parent, hint):
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600
            )
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _path(self, cluster_id: str) -> Path:
        if _names_path(cluster_id):
            raise NoSuchClusterError(f"there is no cluster {cluster_id!r}")
        if cluster_id in self._job_folders:
            return self._job_folders[cluster_id] / RECORD
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


def _names_path(text: str) -> bool:
    """Return whether ``text`` can only be a path."""
    return "/" in text or text.startswith(".")


def _with_known_commands(record: ClusterRecord) -> ClusterRecord:
    """Return the record of a job folder with commands that a site of the user's has, if with any.

    The folder may be another person's, and `gpujobs status FOLDER` runs them.
    """
    if not record.commands:
        return record
    from ..config.sitefiles import is_path, load_site  # `judge.pyz` has no room `config`

    try:
        known = {} if is_path(record.site) else load_site(record.site).site.commands
    except InputError:
        known = {}
    if record.commands == known:
        return record
    logger.warning("%s: its `commands` are not those of a site %s", record.id, record.site)
    return replace(record, commands=known)


def _dump(record: ClusterRecord) -> str:
    return json.dumps(asdict(record), indent=1) + "\n"


def _load(
    path: Path, cluster_id: str, known: Optional[tuple[str, ClusterRecord]] = None
) -> tuple[str, ClusterRecord]:
    """Return the text and the content of a record, which may be ``known``."""
    try:
        text = read_file(path)
        if known is not None and text == known[0]:
            return known
        record = parse(parse_json(text, dict[str, Any]))
        if record.id != cluster_id:
            raise DamagedError(f"it is that of {record.id}")
    except UnreadableError as error:
        raise GpujobsError(str(error)) from None
    except DamagedError as error:
        jobs = f"if jobs called {cluster_id} are in the queue, cancel them there"
        hint = f"{jobs}; then remove the file"
        message = f"{path} is not a valid record of a cluster: {error}"
        raise GpujobsError(message, hint=hint) from None
    return text, record


def _leading_number(job: str) -> str:
    """Return ``105`` of the ids ``105_3`` and ``105[].server``."""
    return re.split(r"\D", job, maxsplit=1)[0]
