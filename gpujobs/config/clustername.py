"""The name of the batch scheduler's cluster on this host, which may select a site.

It is read from a configuration file. A command of the batch scheduler could delay each start of
gpujobs, until a time-out where its server does not answer.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..schedulers import get_scheduler


def cluster_name(scheduler: str) -> str:
    """Return the name of the cluster of a batch scheduler; "" if it is not known."""
    inventory = get_scheduler(scheduler).inventory
    if inventory is None:
        return ""
    for path in inventory.configuration_files(os.environ):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if name := inventory.cluster_name(text):
            return name
    return ""
