"""What a file may cause that the user has not chosen, and which files others could have changed.

A site file is *received* if only a profile names it, by its path: it may be another person's,
as the profile may. gpujobs reads it, and it takes part in scripts, which run when the user submits
them. gpujobs itself runs no command of it and opens no connection for it: the keys `ACTS` of a
received file are not used, and a submission is refused until the user names the file. The table in
docs/security.md says it for every source of files.

Bash text of a site that is found by its name runs as the user, too: such a file is refused if other
users could have changed it.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError
from .document import Document, effective_text, parse, read_bytes

ACTS = ("commands", "hosts", "machines", "quota_command")
"""Keys of a site with which gpujobs itself runs a command or opens a connection."""


def without_acts(document: Document) -> tuple[Document, tuple[str, ...]]:
    """Return a received site's document without the keys `ACTS`, and those that it has."""
    found = tuple(key for key in ACTS if document.find((key,)))
    return document.without(*found), found


def text_without_acts(path: Path) -> bytes:
    """Return a received site file for a login node, where its name selects it: without `ACTS`."""
    # The comments of `effective_text` name the source: the file's path could end a line.
    document, _ = without_acts(parse(read_bytes(path).decode("utf-8-sig"), "received"))
    return effective_text(document).encode()


_ROOT = 0
_TOP = Path("/")
_ACL = "system.posix_acl_access"


def check_writers(path: Path, folder: Path, *, alternative: str = "", groups: bool = False) -> None:
    """Check that no other user could have written or replaced the file ``path``.

    The file, each link and each folder on the way from ``/`` to it may belong to root, to the user
    and to the owner of ``folder``, the one of the search path in which it was found. Others may
    not write them, unless a folder is sticky and its entry belongs to root, the user or the
    folder's owner; with ``groups``, groups may. Raises InputError; ``alternative`` is the end of
    its hint.
    """
    try:
        path.stat()  # fails if links form a cycle; mounts what is mounted on demand
        _check(path, _root_and_user() | {folder.stat().st_uid}, alternative, groups)
    except OSError as error:
        raise InputError(f"{path} is not used: {error.strerror}: {error.filename}") from None


def check_own(path: Path) -> None:
    """Check that only the user, or root, could have written or replaced the file ``path``.

    As `check_writers`, but the owner of the folder is not trusted: the file is not of a site.
    """
    check_writers(path, _TOP)


def check_modules(folder: Path) -> None:
    """Check that not all users could have put a module into ``folder``; raises InputError.

    Groups may write it, as is usual in projects: the program itself imports from it in any case.
    """
    check_writers(folder, folder, groups=True)
    # A sticky folder passes, but all users could add a file to it.
    if who := _other_writers(folder, folder.stat(), groups=True):
        raise InputError(f"{folder} is not used: {folder} is writable by {who}")


def check_owners(path: Path, folder: Path) -> None:
    """Check that no other user has added the file ``path`` to ``folder``, which the user has named.

    Every entry from the folder to the file must belong to root, to the user or to the folder's
    owner. Raises InputError.
    """
    trusted = _root_and_user() | {folder.stat().st_uid}
    for place in (path, *path.parents):
        if place == folder:
            return
        status = place.lstat()
        if status.st_uid not in trusted:
            reason = f"{place} belongs to {_user(status.st_uid)}"
            raise InputError(f"{path} is not used: {reason}", hint=_cure(place, status))


def _check(path: Path, trusted: frozenset[int], alternative: str, groups: bool) -> None:
    for place in _places(path.absolute()):
        status = place.lstat()
        reason = ""
        if status.st_uid not in _owners_in(place.parent, trusted, groups):
            reason = f"belongs to {_user(status.st_uid)}"
        elif not _is_sticky(status) and (who := _other_writers(place, status, groups)):
            reason = f"is writable by {who}"
        if reason:
            hint = f"{_cure(place, status)}{alternative}"
            raise InputError(f"{path} is not used: {place} {reason}", hint=hint)


def _places(path: Path) -> Iterator[Path]:
    """Yield ``/`` and each folder, link and file on the way of ``path``; no link is above one."""
    place, steps = _TOP, list(reversed(path.parts[1:]))
    yield place
    while steps:
        step = steps.pop()
        if step == "..":
            place = place.parent
            continue
        if step == "/":  # a link to an absolute path
            place = _TOP
            continue
        entry = place / step
        yield entry
        if not entry.is_symlink():
            place = entry
            continue
        steps += reversed(entry.readlink().parts)


def _root_and_user() -> frozenset[int]:
    # In a user namespace that lacks root, the owner of / is the number that stands for root.
    return frozenset((_ROOT, _TOP.stat().st_uid, os.getuid()))


def _owners_in(folder: Path, trusted: frozenset[int], groups: bool) -> frozenset[int]:
    """Return who may own the entries of ``folder``.

    In a folder that others can write, the owner of the folder of sites is not trusted: it is
    whoever was the first to make it there.
    """
    status = folder.stat()
    if _other_writers(folder, status, groups):
        return _root_and_user() | {status.st_uid}
    return trusted


def _is_sticky(status: os.stat_result) -> bool:
    return stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)


def _other_writers(place: Path, status: os.stat_result, groups: bool) -> str:
    """Return who can write ``place`` besides its owner and administrators, "" if there is none.

    With ``groups``, those that it lets write do not count, nor its access control list.
    """
    if stat.S_ISLNK(status.st_mode):
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "all users"
    if groups or not status.st_mode & stat.S_IWGRP:
        return ""
    if _has_acl(place):  # the bits of the group are then the most that any of its entries allows
        return "users or groups of its access control list"
    group = status.st_gid
    if status.st_uid == _ROOT and group not in (os.getgid(), *os.getgroups()):
        return ""  # root has chosen the group: it is one of administrators
    return "" if _is_private(group, status.st_uid) else f"group {_group(group)}"


def _has_acl(place: Path) -> bool:
    if sys.platform != "linux":
        return False
    try:
        return bool(os.getxattr(place, _ACL))
    except OSError:  # no list, or a file system without them
        return False


def _is_private(group: int, user: int) -> bool:
    """Return whether the group has the user's name and no other members."""
    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:
        return group == user
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


def _cure(place: Path, status: os.stat_result) -> str:
    if status.st_uid == os.getuid():
        return f"chmod go-w {place}"
    return "copy the file to a folder that only you can write"


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
