"""The jobs of a cluster that a Python process owns: what is known of each, and how people see them."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..clusters.report import GRACE, vanished
from ..schedulers import JobId, JobState, JobStatus
from ..schedulers.base import NOT_LISTED
from ..text import table


class Phase(StrEnum):
    """Where a job is on its way."""

    SUBMITTED = "SUBMITTED"
    """The batch scheduler took it and has not said more."""
    PENDING = "PENDING"
    STARTING = "STARTING"
    """It runs, and some of its workers have not connected yet."""
    RUNNING = "RUNNING"
    """All its workers are connected."""
    LOST = "LOST"
    """Its workers were connected and are not any more; the batch scheduler has not said why."""
    FAILED = "FAILED"
    ENDED = "ENDED"


@dataclass
class Job:
    """One job. ``workers`` are the names of its workers; times are of the monotonic clock."""

    number: int
    id: JobId
    workers: tuple[str, ...]
    head: bool = False
    devices: tuple[str, ...] = ()
    status: JobStatus = field(default_factory=lambda: JobStatus(JobState.PENDING))
    asked: bool = False
    """The batch scheduler has been asked about it."""
    connected: frozenset[str] = frozenset()
    ever_connected: bool = False
    """All its workers have been there at once."""
    phase: Phase = Phase.SUBMITTED
    reason: str = ""
    tail: tuple[str, ...] = ()
    """The last lines of its log, once it failed."""
    born: float = field(default_factory=time.monotonic)
    running_since: float | None = None
    idle_since: float | None = None
    lost_since: float | None = None
    unlisted_since: float | None = None
    """The batch scheduler has not listed it since."""
    gpus: tuple[dict[str, Any], ...] = ()
    """Which GPU each connected worker has: worker, node, uuid, model, memory in bytes."""
    leaving: bool = False
    """Its walltime is nearly over: it does not count towards the target any more."""

    @property
    def job_id(self) -> str:
        """The batch scheduler's id, for people."""
        return str(self.id)

    def look(self, observed: frozenset[str], now: float) -> bool:
        """Take in which workers are ``observed``; tell whether that changed the job's phase."""
        before = self.phase
        self.connected = observed.intersection(self.workers)
        everyone = len(self.connected) == len(self.workers)
        if everyone or self.status.state is JobState.RUNNING:
            self.running_since = self.running_since or now
        if everyone and self.workers:
            self.ever_connected, self.lost_since = True, None
        if self.phase in (Phase.FAILED, Phase.ENDED):
            return False
        if everyone and (self.workers or self.status.state is JobState.RUNNING):
            self.phase = Phase.RUNNING
        elif self.ever_connected:
            self.phase, self.lost_since = Phase.LOST, self.lost_since or now
        elif self.status.state is JobState.RUNNING or self.connected:
            self.phase = Phase.STARTING
        elif self.asked:
            self.phase = Phase.PENDING
        return self.phase is not before

    def told(self, status: JobStatus, now: float) -> None:
        """Take in what the batch scheduler says; what it has not listed for a while is gone."""
        self.asked = True
        self.unlisted_since = (self.unlisted_since or now) if status == NOT_LISTED else None
        gone = self.unlisted_since is not None and now - self.unlisted_since > GRACE
        self.status = vanished(self.running_since is not None) if gone else status

    def row(self) -> dict[str, Any]:
        """Return the job as a plain dict."""
        return {
            "job": self.number,
            "id": self.job_id,
            "phase": self.phase.value,
            "state": self.status.state.value,
            "reason": self.reason or self.status.reason,
            "starts": self.status.starts,
            "node": self.status.node,
            "workers": list(self.workers),
            "connected": sorted(self.connected),
            "gpus": list(self.gpus),
            "head": self.head,
            "log": list(self.tail),
        }


def gpus_of(names: Iterable[str], workers: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return which GPU each of the workers ``names`` has: worker, node, uuid, model, memory in bytes.

    ``workers`` is what the dask scheduler knows; workers without a GPU are left out.
    """
    found = {name: workers[name].get("gpu") for name in names if name in workers}
    return tuple({"worker": name, **gpu} for name, gpu in found.items() if gpu and gpu.get("uuid"))


class JobTable(list[dict[str, Any]]):
    """A list of dicts that shows itself as a table."""

    _HEADER = ("JOB", "ID", "PHASE", "NODE", "WORKERS", "GPUS", "")

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for job in self:
            workers = f"{len(job['connected'])}/{len(job['workers'])}"
            starts = f"starts {job['starts']}" if job["starts"] else ""
            why = ", ".join(
                part for part in ("head" if job["head"] else "", job["reason"], starts) if part
            )
            models = Counter(gpu["model"] or "?" for gpu in job["gpus"])
            gpus = ", ".join(f"{number} {model}" for model, number in models.items()) or "-"
            rows.append(
                (str(job["job"]), job["id"], job["phase"], job["node"] or "-", workers, gpus, why)
            )
        return rows

    def __repr__(self) -> str:
        return table(self._HEADER, self._rows()) if self else "no jobs"

    def _repr_html_(self) -> str:
        def cells(tag: str, row: Iterable[str]) -> str:
            return (
                "<tr>"
                + "".join(
                    f"<{tag} style='text-align: left'>{html.escape(cell)}</{tag}>" for cell in row
                )
                + "</tr>"
            )

        return f"<table>{cells('th', self._HEADER)}{''.join(cells('td', row) for row in self._rows())}</table>"


def counts(jobs: Iterable[Job]) -> str:
    """Return ``2 RUNNING, 1 PENDING (Resources)``."""
    parts = []
    for phase in Phase:
        found = [job for job in jobs if job.phase is phase]
        reasons = sorted(
            {job.status.reason for job in found if job.status.reason and phase is Phase.PENDING}
        )
        if found:
            parts.append(f"{len(found)} {phase}" + (f" ({', '.join(reasons)})" if reasons else ""))
    return ", ".join(parts)
