"""Names of users of this host."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace

from ..schedulers import JobStatus


def with_canceller(status: JobStatus) -> JobStatus:
    """Return ``status`` with the name of another user who cancelled the job as its reason."""
    user = status.cancelled_by
    if user is None or user == os.getuid():
        return status
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = f"user {user}"
    return replace(status, reason=f"cancelled by {name}")
