"""The Python process that owns a cluster: its sign of life, and whether it is gone."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from pathlib import Path

from ..injob import folder as files
from ..injob.folder import Folder
from ..injob.names import OWNER
from ..text import clean
from .clusterfolder import write_atomically

OWNER_TIMEOUT = 60.0
"""Seconds without a new lease after which the owner of a cluster is gone."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STATE, _STARTED = 0, 19
"""Fields of `/proc/PID/stat` behind the name: the state, and the start in ticks since the boot."""
_ENDED = ("Z", "X")
"""States of a process that has ended, and whose parent has not asked for its exit code yet."""


def write_owner(folder: Path) -> None:
    """Write that this process owns the cluster."""
    pid = os.getpid()
    fields = _stat(pid)
    owner = {
        "host": socket.gethostname(),
        "pid": pid,
        "started": int(fields[_STARTED]) if fields else 0,
        "kernel": _kernel() if fields else "",
    }
    write_atomically(folder / OWNER, json.dumps(owner))


def renew_lease(folder: Path) -> None:
    """Write the owner's sign of life."""
    write_atomically(folder / "lease", f"{time.time()}\n")


def has_owner(folder: Path) -> bool:
    """Return whether the process that owns the cluster lives."""
    return not gone_owner(folder) and has_lease(folder)


def has_lease(folder: Path) -> bool:
    """Return whether the owner, on any host, has written its lease lately."""
    return silence(folder) < OWNER_TIMEOUT


def gone_owner(folder: Path) -> str:
    """Return the owner if it is known to be gone: ``process 4711 on HOST``; else "".

    Of a process of another host, or of another container, only the lease tells.
    """
    owner = Folder(str(folder)).read(OWNER)
    if not owner or not owner["kernel"] or owner["kernel"] != _kernel():
        return ""
    fields = _stat(owner["pid"])
    if fields and int(fields[_STARTED]) == owner["started"] and fields[_STATE] not in _ENDED:
        return ""
    return f"process {owner['pid']} on {clean(owner['host'])}"


def silence(folder: Path) -> float:
    """Return how many seconds ago the process that owns the cluster last wrote its lease.

    Both times are those of the file server, since this host may be another login node. Infinity if
    there is no lease.
    """
    try:
        return _now_at(folder) - files.modified_at(folder / "lease")
    except OSError:
        return float("inf")


def _now_at(folder: Path) -> float:
    """Return the time of the file server, or that of this host if nothing can be written there."""
    now = folder / f"now-{secrets.token_hex(4)}"
    try:
        now.touch(mode=0o600)
        written = files.modified_at(now)
        now.unlink()
    except OSError:
        return time.time()
    return written


def _kernel() -> str:
    """Return what two processes with the same numbers of processes have in common; "" without it.

    That is the kernel since its boot, and the namespace, of which a container may have its own.
    """
    try:
        return f"{_BOOT.read_text(encoding='utf-8').strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; [] if there is none, or no `/proc`."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
