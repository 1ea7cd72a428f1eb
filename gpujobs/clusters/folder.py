"""The cluster's folder, as the login node makes and reads it. What is in it: see `injob`."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import GpujobsError, InputError
from ..injob import archive
from ..injob.names import ARCHIVE
from ..schedulers import JobId
from ..text import clean
from . import tls
from .ledger import private_folder, write_atomically


@dataclass(frozen=True)
class FolderState:
    """What the jobs have left in the folder at one moment."""

    ended: Mapping[str, Any] | None = None
    """exit_code, reason, job."""
    workers: Mapping[str, Any] = field(default_factory=dict)
    """Registered with the dask scheduler, by name: address, threads, gpu."""
    records: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """How jobs ended, by number: exit_code, host, started, ended."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    claims: Mapping[int, JobId] = field(default_factory=dict)
    """Which job of the batch scheduler does the work of each number; see templates/body.sh.j2."""
    head: Mapping[str, Any] | None = None
    """Which job is the head: job, node."""
    address: str | None = None
    """The dask scheduler's."""
    dashboard: int | None = None
    """Port of its dashboard."""
    transport: Mapping[str, Any] = field(default_factory=dict)
    """scheme: what is talked over; reason: why it is not something better."""

    @property
    def scheme(self) -> str:
        """What dask's processes talk over, "" while nobody knows."""
        return str(self.transport.get("scheme") or str(self.address or "").partition("://")[0])

    @property
    def notes(self) -> list[str]:
        """What people should know of how the cluster runs."""
        found = [str(self.transport["reason"])] if self.transport.get("reason") else []
        fast = sorted(
            {
                name
                for worker in self.workers.values()
                for name in (worker.get("gpu") or {}).get("fast", ())
            }
        )
        if fast and self.scheme and self.scheme != "ucxx":
            found.append(
                f"{' and '.join(fast)} seen and left unused: dask talks over {self.scheme}, not ucxx"
            )
        if self.scheme and self.scheme not in ("tls", "wss"):
            found.append(f"not encrypted: dask talks over {self.scheme}")
        return found


def make(folder: Path, *, encrypted: bool, logs: Path | None = None) -> None:
    """Make the folder of a new cluster: 0700, with its certificate and the code that runs in jobs.

    ``logs``: a folder elsewhere, in which a folder of the cluster's name holds its logs.
    """
    private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
        for name in ("jobs", "scripts"):
            (folder / name).mkdir(mode=0o700)
        if logs:
            (logs.absolute() / folder.name).mkdir(mode=0o700, parents=True)
            (folder / "logs").symlink_to(logs.absolute() / folder.name)
        else:
            (folder / "logs").mkdir(mode=0o700)
        tls.write_new(folder / ARCHIVE, archive.build())
        if encrypted:
            tls.make(folder)
    except FileExistsError:
        raise InputError(f"{folder} exists already") from None
    except OSError as error:
        remove(folder)
        raise GpujobsError(
            f"{folder} cannot be used: {error.strerror}", hint="nothing was submitted"
        ) from None


def remove(folder: Path) -> None:
    """Remove the folder of a cluster that came to nothing."""
    shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path) -> FolderState:
    """Return what the jobs have left; nothing of it where the folder is gone."""
    scheduler = _json(folder / "scheduler.json") or {}
    roster = _json(folder / "workers.json") or {}
    records, reasons, claims = {}, {}, {}
    if (folder / "jobs").is_dir():
        for path in (folder / "jobs").iterdir():
            if not path.stem.isdigit():
                continue
            number = int(path.stem)
            if path.suffix == ".json" and (record := _json(path)):
                records[number] = record
            elif path.suffix == ".reason":
                reasons[number] = clean(_text(path))
            elif path.suffix == ".claim" and (text := _text(path)):
                claims[number] = JobId.parse(text)
    return FolderState(
        ended=_ended(folder),
        workers=roster.get("workers", {}),
        records=records,
        reasons=reasons,
        claims=claims,
        head=_json(folder / "head" / "owner"),
        address=scheduler.get("address"),
        dashboard=scheduler.get("services", {}).get("dashboard"),
        transport=_json(folder / "transport.json") or {},
    )


def end(folder: Path, exit_code: int, reason: str) -> None:
    """Say that the cluster has ended, unless somebody said so before. Its jobs leave when they see it."""
    try:
        text = json.dumps(
            {"exit_code": exit_code, "reason": reason, "job": None, "time": time.time()}
        )
        tls.write_new(folder / "ended", text.encode() + b"\n")
    except OSError:
        return


def ask_to_leave(folder: Path, number: int) -> None:
    """Ask the workers of a job that runs to hand their data over and go."""
    write_atomically(folder / f"leave-{number}", "")


def silence(folder: Path) -> float:
    """Return for how many seconds the Python process that owns the cluster has given no sign of life.

    By the clock of the file server (see `injob.written`): this may be another login node.
    """
    now = folder / f"now-{secrets.token_hex(4)}"
    try:
        now.touch(mode=0o600)
        with now.open("rb") as new, (folder / "lease").open("rb") as lease:
            return os.fstat(new.fileno()).st_mtime - os.fstat(lease.fileno()).st_mtime
    except OSError:
        return float("inf")
    finally:
        now.unlink(missing_ok=True)


def write_job_ids(folder: Path, targets: list[str]) -> None:
    """Leave what cancels the cluster's jobs for the head."""
    write_atomically(folder / "job-ids", "".join(f"{target}\n" for target in targets))


def tail(path: Path, lines: int = 10) -> list[str]:
    """Return the last lines of a log for people: at most 64 KiB are read, control characters are left out."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [clean(line) for line in text.splitlines()[-lines:]]


def _ended(folder: Path) -> Mapping[str, Any] | None:
    ended = _json(folder / "ended")
    # The reason may quote a command's last words, with what moves a cursor in them.
    return None if ended is None else {**ended, "reason": clean(str(ended.get("reason") or ""))}


def _text(path: Path) -> str:
    """Return what is in a file; nothing of one that a job that starts again has just removed."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _json(path: Path) -> Any:
    try:
        value = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
