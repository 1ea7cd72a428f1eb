"""Names of users of this host; `$LOGNAME` may be that of another one."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace

from ..schedulers import JobStatus


def user_name(number: int | None = None) -> str:
    """Return the name of a user, by default of this process; its number if it has no name."""
    number = os.getuid() if number is None else number
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def with_canceller(status: JobStatus) -> JobStatus:
    """Return ``status`` with the name of another user who cancelled the job as its reason."""
    user = status.cancelled_by
    if user is None or user == os.getuid():
        return status
    name = user_name(user)
    return replace(status, reason=f"cancelled by {f'user {name}' if name.isdigit() else name}")
