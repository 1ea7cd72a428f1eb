"""`verdict.json`: which jobs of a cluster will not come, for a head that waits for their workers.

`ClusterHandle.wait` writes it; without that `judge.pyz` does, which the head starts. That archive
has the modules that judge a cluster: for Python 3.9, with the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..batch.client import SchedulerClient
from ..errors import GpujobsError, UnusableError
from ..injob.archive import pack
from ..injob.names import JUDGE, RECORD, VERDICT
from ..schedulers import JobId, JobStatus, get_scheduler
from .files import write_atomically
from .folderstate import FolderState, read_state
from .judge import judge, unlisted_since
from .records import ClusterRecord, parse
from .report import ClusterReport

_PACKED = (
    "__init__.py", "errors.py", "text.py", "schedulers/*.py", "batch/__init__.py",
    "batch/client.py", "batch/command.py", "batch/process.py", "batch/system.py", "batch/users.py",
    "clusters/__init__.py", "clusters/clusterstate.py", "clusters/files.py",
    "clusters/folderstate.py", "clusters/judge.py", "clusters/records.py", "clusters/report.py",
    "clusters/verdict.py", "injob/__init__.py", "injob/archive.py", "injob/folder.py",
    "injob/log.py", "injob/names.py", "injob/transport.py", "version.py",
)  # fmt: skip
_MAIN = """\
import sys

from gpujobs.clusters.verdict import main

main(sys.argv[1])
"""
_QUERY_TIMEOUT = 15.0
"""Seconds for which a query waits for a batch scheduler that is away."""


def write_judge(folder: Path) -> None:
    """Write `judge.pyz` into a cluster's folder."""
    package = Path(__file__).parent.parent
    paths = sorted({path for pattern in _PACKED for path in package.glob(pattern)})
    sources = {f"gpujobs/{path.relative_to(package)}": path.read_text("utf-8") for path in paths}
    (folder / JUDGE).write_bytes(pack({"__main__.py": _MAIN, **sources}))


def write_record(record: ClusterRecord) -> None:
    """Write the record for the cluster's jobs, which cannot read the ledger."""
    write_atomically(record.path / RECORD, json.dumps(asdict(record)))


def write_verdict(report: ClusterReport, *, usable: bool = True) -> None:
    """Write which jobs of a cluster will not come, and which workers still may.

    ``usable``: the commands of the batch scheduler can be used in jobs.
    """
    gone = report.gone
    jobs = (job for job in report.current_jobs if job.active and job.number not in gone)
    value = {
        "time": time.time(),
        "gone": gone,
        "possible": [name for job in jobs for name in job.workers],
        "unlisted": report.record.unlisted,
        "usable": usable,
    }
    with contextlib.suppress(GpujobsError):  # a full disk
        write_atomically(report.record.path / VERDICT, json.dumps(value))


def tell_head(report: ClusterReport) -> None:
    """Write the verdict of a process that asks anyway, so that the head need not ask."""
    if report.record.owner == "cluster" and report.folder.head is not None and not report.finished:
        write_verdict(report)


def main(path: str) -> None:
    """Ask about the jobs of the cluster in the folder ``path``, from one of them."""
    folder = Path(path)
    before = _json(folder / VERDICT)
    record = replace(parse(_json(folder / RECORD)), unlisted=before.get("unlisted", {}))
    state, usable = read_state(folder), before.get("usable", True)
    answers: Mapping[JobId, JobStatus] = {}
    if usable:
        try:
            answers = _ask(record, state)
        except UnusableError as error:
            usable = False
            print(f"cannot ask about the jobs of the cluster from here: {error}", file=sys.stderr)
        except GpujobsError as error:
            print(error, file=sys.stderr)
    now = time.time()
    if answers:
        record = replace(record, unlisted=unlisted_since(record, state, answers, now))
    write_verdict(judge(record, state, answers, now=now), usable=usable)


def _ask(record: ClusterRecord, state: FolderState) -> Mapping[JobId, JobStatus]:
    scheduler = get_scheduler(record.scheduler)(record.multi_cluster)
    client = SchedulerClient(scheduler, record.commands, timeout=_QUERY_TIMEOUT)
    jobs = record.current_jobs(state.claims).values()
    return client.status(sorted(set(jobs), key=str), [record.id])


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
