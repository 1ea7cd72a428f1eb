"""What people read of clusters: tables, one cluster in full, the line of progress."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ..clusters.report import ClusterReport, ClusterState, JobReport
from ..schedulers import JobState
from ..text import clock_text, plural, size_text, table


# -- status ----------------------------------------------------------------------------------------------------
def status_table(views: Sequence[ClusterReport]) -> str:
    """Return one line a cluster."""
    rows = [
        (
            v.record.id,
            v.record.site,
            v.state,
            f"{v.connected}/{v.record.workers}",
            job_counts(v),
            age(v),
            summary(v),
        )
        for v in views
    ]
    return table(("CLUSTER", "SITE", "STATE", "WORKERS", "JOBS", "AGE", ""), rows)


def status_text(view: ClusterReport, logs: dict[int, list[str]]) -> str:
    """Return one cluster in full; ``logs`` are the last lines of failed jobs."""
    record = view.record
    lines = [
        f"{record.id} on {record.site}: {view.state}"
        + (f": {summary(view)}" if summary(view) else "")
    ]
    lines.append(f"  workers  {view.connected} of {record.workers} connected" + _missing(view))
    if view.exit_code is not None:
        lines.append(f"  exit     {view.exit_code}")
    if record.run:
        import shlex

        lines.append(f"  run      {shlex.join(record.run)}")
    if view.facts.address and not view.over:
        lines.append(f"  dask     {view.facts.address}")
    lines += [f"  note     {note}" for note in (*record.notes, *view.facts.notes)]
    lines.append("")
    rows = [
        (
            job.number,
            job.id,
            job.state,
            job.node or "-",
            ",".join(job.connected) or "-",
            _job_reason(job),
        )
        for job in view.jobs
    ]
    lines.append(table(("JOB", "ID", "STATE", "NODE", "WORKERS", ""), rows))
    gpus = [
        (name, worker["gpu"])
        for name, worker in sorted(view.facts.workers.items())
        if worker.get("gpu")
    ]
    if gpus and not view.over:
        found = [
            (name, gpu["node"], gpu["model"] or "-", gpu["uuid"] or "-", _memory(gpu))
            for name, gpu in gpus
        ]
        lines += ["", table(("WORKER", "NODE", "GPU", "UUID", "MEMORY"), found)]
    for number, tail in logs.items():
        lines += ["", f"last lines of job {number}:", *(f"  | {line}" for line in tail)]
    return "\n".join(lines)


def status_json(view: ClusterReport) -> dict[str, object]:
    """Return one cluster for programs."""
    record = view.record
    return {
        "id": record.id,
        "site": record.site,
        "scheduler": record.scheduler,
        "state": view.state.value,
        "reason": view.reason,
        "exit_code": view.exit_code,
        "workers": {
            "wanted": record.workers,
            "connected": sorted(view.facts.workers) if view.connected else [],
        },
        "gpus": {name: worker.get("gpu") for name, worker in sorted(view.facts.workers.items())},
        "address": view.facts.address,
        "encrypted": view.facts.scheme in ("tls", "wss") if view.facts.scheme else record.encrypted,
        "folder": record.folder,
        "created": record.created,
        "run": list(record.run),
        "notes": [*record.notes, *view.facts.notes],
        "jobs": [
            {
                "number": job.number,
                "id": job.id,
                "state": job.state.value,
                "native": job.native,
                "reason": job.reason,
                "node": job.node,
                "exit_code": job.exit_code,
                "starts": job.starts,
                "head": job.head,
                "expected_workers": list(job.expected),
                "connected_workers": list(job.connected),
            }
            for job in view.jobs
        ],
    }


def summary(view: ClusterReport) -> str:
    """Return why a cluster is in its state, in one line."""
    if view.over and view.active:
        return f"{view.reason or 'run: is done'}; {plural(sum(job.state.active for job in view.jobs), 'job')} still ending"
    if (
        view.state is ClusterState.RUNNING
        and not view.reason
        and view.connected < view.record.workers
    ):
        return f"{view.record.workers - view.connected} missing"
    return view.reason


def job_counts(view: ClusterReport) -> str:
    """Return ``2 RUNNING, 1 PENDING``."""
    states = [job.state for job in view.jobs]
    return (
        ", ".join(f"{states.count(state)} {state}" for state in JobState if state in states) or "-"
    )


def progress(view: ClusterReport, seconds: float) -> str:
    """Return ``6/8 workers, 2 pending (Resources), 00:41``."""
    parts = [
        f"{view.connected}/{view.record.workers} workers",
        view.reason if not view.over else view.state.value,
    ]
    return ", ".join(part for part in (*parts, clock_text(seconds)) if part)


def age(view: ClusterReport) -> str:
    """Return how long ago a cluster was submitted."""
    return clock_text(max(0.0, time.time() - view.record.created))


def when(epoch: float) -> str:
    """Return a time of day, with its date."""
    return datetime.fromtimestamp(epoch).strftime("%Y-%m-%d %H:%M:%S")


def _memory(gpu: Mapping[str, Any]) -> str:
    return size_text(gpu["memory"] // 2**20 * 2**20) if gpu.get("memory") else "-"


def _missing(view: ClusterReport) -> str:
    missing = [name for job in view.jobs for name in job.expected if name not in job.connected]
    if view.over or not missing or not view.connected:
        return ""
    return f"; missing: {', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}"


def _job_reason(job: JobReport) -> str:
    parts = [
        "head" if job.head else "",
        job.reason,
        f"exit code {job.exit_code}" if job.exit_code else "",
    ]
    parts += [
        f"starts {job.starts}" if job.starts else "",
        f"({job.native})" if job.state is JobState.UNKNOWN and job.native else "",
    ]
    return ", ".join(part for part in parts if part)


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line whenever something changed."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.last = ""

    def show(self, text: str) -> None:
        """Show the line."""
        if self.live:  # in one row: the part of a longer line that wrapped would stay
            sys.stderr.write(f"\r\033[K{text[: self._columns() - 1]}")
            sys.stderr.flush()
        elif text.rsplit(", ", 1)[0] != self.last:
            self.last = text.rsplit(", ", 1)[0]
            print(text, file=sys.stderr, flush=True)

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns or 80
        except OSError:
            return 80

    def say(self, text: str) -> None:
        """Write a line that stays, above the live one."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the live line."""
        if self.live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
