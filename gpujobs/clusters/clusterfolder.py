"""A cluster's folder as this side of the batch scheduler makes, writes and reads it.

The files in it are documented in `gpujobs.injob`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..batch import receive
from ..errors import GpujobsError, InputError
from ..injob import archive
from ..injob import folder as files
from ..injob.certificate import make_certificate
from ..injob.folder import (
    DamagedError,
    Ended,
    EndKind,
    Folder,
)
from ..injob.names import ARCHIVE, JUDGE
from ..injob.transport import Choice
from ..schedulers import JobId
from ..text import clean

logger = logging.getLogger("gpujobs")

SPEC = "spec.json"
TAIL_BYTES = 65536


# -- files and folders that are private to the user ------------------------------------------------
def write_new(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a new file, mode 0600; ``durable``: onto the disk. Raises FileExistsError."""
    data = content.encode() if isinstance(content, str) else content
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def write_atomically(path: Path, content: str, *, durable: bool = False) -> None:
    """Replace a file in one step; the new one has mode 0600. See `write_new` for ``durable``."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with disk_errors(path.parent):
        try:
            write_new(temporary, content, durable=durable)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of files and of folders, whose names end in "/"; no links."""
    for path in folder.rglob("*"):
        if not path.is_symlink() and (path.is_dir() or path.is_file()):
            yield path.relative_to(folder).as_posix() + "/" * path.is_dir(), path


def file_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder, in order; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not Paths
    except OSError:
        return []


def job_files(names: Iterable[str], separator: str) -> Iterator[tuple[int, str]]:
    """Yield number and rest of those of the ``names`` that begin with ``N.``."""
    for name in names:
        number, found, rest = name.partition(separator)
        if found and number.isascii() and number.isdecimal():
            yield int(number), rest


def is_removed(folder: Path) -> bool:
    """Return whether ``folder`` was removed; not if its parent is gone, as of an unmounted disk."""
    try:
        folder.stat()
    except FileNotFoundError:
        return folder.parent.is_dir()
    except OSError:
        return False
    return False


def version_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return by what a file that was written anew, or replaced, differs from before."""
    return status.st_mtime_ns, status.st_size, status.st_ino


class PresentFolders:
    """The folders of clusters at one look: the folder that has them is looked at once for all."""

    def __init__(self) -> None:
        self._names: dict[Path, frozenset[str]] = {}
        self._problems: dict[Path, str] = {}

    def __contains__(self, path: Path) -> bool:
        if path.parent not in self._names:
            self._names[path.parent] = frozenset(file_names(path.parent))
        return path.name in self._names[path.parent]

    def contents(self, path: Path) -> tuple[frozenset[str], str]:
        """Return the names of the files in a cluster's folder, and why it is not trusted, or "".

        Without names if it is missing, or not trusted (see `folder_problem`).
        """
        above = path.parent
        if above not in self._problems:
            self._problems[above] = _problem_text(_check, above)
        if problem := self._problems[above]:
            return frozenset(), problem
        try:
            # The folder that is checked is the one that is listed, and its name is looked up once.
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            return frozenset(), _problem_text(_check, path)
        try:
            problem = _problem_text(_check_status, path, os.fstat(descriptor))
            return frozenset(() if problem else os.listdir(descriptor)), problem  # noqa: PTH208
        except OSError:
            return frozenset(), ""
        finally:
            os.close(descriptor)


OF_SITE = "see `directory` of the site"
OF_STATE = "XDG_STATE_HOME=FOLDER keeps the records of clusters in a folder that you can write"
"""Hints about the folders of clusters, and about the state folder."""


def private_folder(path: Path, hint: str = OF_SITE) -> None:
    """Make the folder ``path`` with mode 0700, or check that only this user can write to it.

    Raises InputError if it cannot be made, or is a symbolic link, belongs to another user or is
    writable by others; ``hint`` says how to use another folder.
    """
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.is_symlink() and not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be used: {error.strerror}", hint=hint) from None
    _check(path, hint)


def check_folder(path: Path) -> None:
    """Raise InputError if others could change the folder of a cluster, in which there are keys."""
    for folder in (path.parent, path):
        _check(folder)


def folder_problem(path: Path) -> str:
    """Return why others could change the folder of a cluster; "" if they cannot, or it is missing.

    Who can write the folder above could put another one in its place.
    """
    return _problem_text(check_folder, path)


def _problem_text(check: Callable[..., None], *arguments: object) -> str:
    """Return in short why a check refuses a folder, or ""."""
    try:
        check(*arguments)
    except InputError as error:
        return error.problems[0].message.partition(";")[0]
    return ""


def _check(path: Path, hint: str = OF_SITE) -> None:
    with contextlib.suppress(OSError):
        status = path.lstat()
        _check_status(path, status, hint)


def _check_status(path: Path, status: os.stat_result, hint: str = OF_SITE) -> None:
    hint = f"use another folder: {hint}"
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif status.st_uid != os.getuid():
        problem = "belongs to another user"
    elif status.st_mode & 0o022:
        problem, hint = "is writable by other users", f"chmod 700 {path}, or {hint}"
    else:
        return
    raise InputError(f"{path} {problem}; gpujobs stores keys below it", hint=hint)


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Log a GpujobsError of a write that a reader can do without, as on a full disk."""
    try:
        yield
    except GpujobsError as error:
        logger.warning("%s", error)


@contextlib.contextmanager
def disk_errors(path: Path, hint: str = "") -> Iterator[None]:
    """Turn every OSError but FileExistsError into a GpujobsError that names ``path``."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise GpujobsError(f"cannot write in {path}: {error.strerror}", hint=hint) from error


# -- make a cluster's folder -----------------------------------------------------------------------
def make(folder: Path, *, encrypted: bool, logs: Path | None = None) -> None:
    """Make the folder of a new cluster, mode 0700, with its certificate and `injob`.

    ``logs``: a folder elsewhere; the logs are then in a folder of the cluster's name inside it.
    """
    private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
        receive.mark(folder)
        for name in ("jobs", "scripts"):
            (folder / name).mkdir(mode=0o700)
        _make_logs(folder, logs)
        write_new(folder / ARCHIVE, archive.build())
        # No file system compresses random bytes away.
        write_new(folder / files.RESERVE, os.urandom(files.RESERVE_BYTES))
        if encrypted:
            make_certificate(folder)
    except FileExistsError:
        raise InputError(f"{folder} exists already") from None
    except OSError as error:
        discard(folder)
        message = f"{folder} cannot be used: {error.strerror}"
        raise GpujobsError(message, hint="nothing was submitted") from None


def _make_logs(folder: Path, logs: Path | None) -> None:
    if logs is None:
        (folder / "logs").mkdir(mode=0o700)
        return
    elsewhere = logs.absolute() / folder.name
    elsewhere.mkdir(mode=0o700, parents=True)
    (folder / "logs").symlink_to(elsewhere)


def remove_packages(folder: Path) -> None:
    """Remove what only jobs need, once the last one has ended: nearly all of the folder's size.

    A job that is requeued all the same finds `ended` before it looks for these files.
    """
    with disk_errors(folder):
        for name in (ARCHIVE, JUDGE, files.RESERVE):
            (folder / name).unlink(missing_ok=True)


# -- remove a folder -------------------------------------------------------------------------------
def is_ours(folder: Path) -> bool:
    """Return whether gpujobs has made ``folder``; not a link to it, nor a copy of another name."""
    if folder.is_symlink():
        return False
    try:
        text = files.read_file(folder / receive.MARKER, 1024)
        # Killed before the name was written: there is nothing else in the folder.
        return text == f"{folder.name}\n" or (not text and len(list(folder.iterdir())) == 1)
    except (OSError, DamagedError):
        return False


def remove(folder: Path) -> None:
    """Remove a folder that gpujobs has made. Raises GpujobsError if it has not, or OSError.

    Every other removal of a folder below `directory` ends here.
    """
    if not is_ours(folder):
        raise GpujobsError(f"{folder} stays: gpujobs has not made it")
    receive.remove(folder)


def discard(folder: Path) -> None:
    """Remove a folder that gpujobs has just made for something that failed, if that is possible."""
    with contextlib.suppress(OSError, GpujobsError):
        remove(folder)


# -- write into it ---------------------------------------------------------------------------------
def end(folder: Path, kind: EndKind, exit_code: int, reason: str) -> None:
    """Write `ended`, unless it exists already. Every job that finds it exits."""
    if not folder.is_dir():
        return
    if problem := folder_problem(folder):
        logger.warning("%s; its jobs are not asked to exit", problem)
        return
    try:
        Folder(str(folder)).try_to_end(Ended(kind, exit_code, reason))
    except OSError:  # the folder is gone
        return


def write_transport(folder: Path, transport: Choice) -> None:
    """Write the protocol that this side has chosen."""
    write_atomically(folder / files.TRANSPORT, json.dumps(transport.json()))


def write_after(folder: Path, cluster: str, other: Path, *, any_end: bool) -> None:
    """Write that this cluster starts after the end of ``cluster``, whose folder is ``other``."""
    value = {"cluster": cluster, "folder": str(other), "any_end": any_end}
    write_atomically(folder / files.AFTER, json.dumps(value))


# -- read single files -----------------------------------------------------------------------------
def read_claim(folder: Folder, name: str) -> JobId | None:
    """Return the job in a claim; None if there is none, or none yet. Raises DamagedError."""
    text = folder.load_text(name)
    return parse_claim(text, f"{folder.path / name}") if text else None


def parse_claim(text: str, place: str) -> JobId:
    """Return the job in the text of a claim. Raises DamagedError."""
    job = JobId.parse(text)
    if not job.plausible:
        raise DamagedError(f"{place} is damaged: it is not the id of a job")
    return job


def tail(folder: Path, log: str, lines: int = 10) -> list[str]:
    """Return the last lines of a log of a cluster, without control characters.

    At most 64 KiB are read, and nothing of a folder that others can change.
    """
    path = folder / "logs" / log
    if folder_problem(folder):
        return []
    try:
        with files.open_file(path) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except (OSError, DamagedError):
        return []
    return [clean(line) for line in text.splitlines()[-lines:]]


def read_transport(folder: Path) -> Choice:
    """Return the protocol of a cluster, from its folder."""
    return Choice.parse(Folder(str(folder)).read(files.TRANSPORT))
