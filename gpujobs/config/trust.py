"""Site files that other users could change are refused: their bash text runs as the user."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from ..errors import InputError

_ROOT = 0


def check_writers(path: Path) -> None:
    """Check that no other user could have written the file ``path``.

    Root and the owner of its folder may. It may be a link: the file itself and both
    folders count. Raises InputError.
    """
    target = path.resolve()
    for place in dict.fromkeys((target, target.parent, path.parent)):
        if who := _other_writers(place.stat()):
            raise _refusal(path, f"{place} is writable by {who}", f"chmod go-w {place}")
    owner = target.stat().st_uid
    if owner not in (_ROOT, os.getuid(), target.parent.stat().st_uid):
        raise _refusal(path, f"{target} belongs to {_user(owner)}", "copy it")


def _refusal(path: Path, reason: str, cure: str) -> InputError:
    hint = f"{cure}, or give the file's path to --site if you trust it"
    return InputError(f"{path} is not used: {reason}", hint=hint)


def _other_writers(status: os.stat_result) -> str:
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return ""  # others cannot replace what is in it
    if status.st_mode & stat.S_IWOTH:
        return "all users"
    if not status.st_mode & stat.S_IWGRP or status.st_uid == _ROOT:
        return ""
    return "" if _is_private(status.st_gid, status.st_uid) else f"group {_group(status.st_gid)}"


def _is_private(group: int, user: int) -> bool:
    """Return whether the group has the user's name and no other members."""
    try:
        entry, name = grp.getgrgid(group), pwd.getpwuid(user).pw_name
    except KeyError:
        return group == user
    return entry.gr_name == name and set(entry.gr_mem) <= {name}


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
