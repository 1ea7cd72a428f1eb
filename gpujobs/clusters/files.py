"""Writing files that are private to the user: made exclusively, or replaced atomically."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import GpujobsError, InputError

logger = logging.getLogger("gpujobs")


def write_new(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file that must not exist yet, with mode 0600.

    ``durable``: return only after the content is on the disk. Raises FileExistsError.
    """
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


def job_files(folder: Path, separator: str) -> Iterator[tuple[int, str]]:
    """Yield number and rest of the names of the files in ``folder`` that begin with ``N.``."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - names, not Paths
    except OSError:
        return
    for name in names:
        number, found, rest = name.partition(separator)
        if found and number.isdecimal():
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


def private_folder(path: Path) -> None:
    """Make the folder ``path`` with mode 0700, or check that only this user can write to it.

    Raises InputError if it is a symbolic link, belongs to another user or is writable by others.
    """
    try:
        for folder in (*reversed(path.parents), path):
            if not folder.is_symlink() and not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        hint = "see `directory` of the site"
        raise InputError(f"{path} cannot be used: {error.strerror}", hint=hint) from None
    _check(path)


def check_folder(path: Path) -> None:
    """Raise InputError if others could change the folder of a cluster, in which there are keys."""
    for folder in (path.parent, path):
        _check(folder)


def folder_problem(path: Path) -> str:
    """Return why others could change the folder of a cluster; "" if they cannot, or it is missing.

    Who can write the folder above could put another one in its place.
    """
    try:
        check_folder(path)
    except InputError as error:
        return error.problems[0].message.partition(";")[0]
    return ""


def _check(path: Path) -> None:
    try:
        status = path.lstat()
    except OSError:
        return
    hint = "use another folder: see `directory` of the site"
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
def disk_errors(path: Path) -> Iterator[None]:
    """Turn every OSError but FileExistsError into a GpujobsError that names ``path``."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise GpujobsError(f"cannot write in {path}: {error.strerror}") from error
