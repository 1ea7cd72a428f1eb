"""A job that has ended while its cluster goes on costs nobody a question: the record has its end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from gpujobs.clusters.folderstate import FolderReader
from gpujobs.clusters.handle import ClusterHandle
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.clusters.monitor import ClusterMonitor
from gpujobs.clusters.report import ClusterReport, job_json
from gpujobs.errors import GpujobsError
from gpujobs.injob.names import job_file

from ..support.events import write_events
from ..support.filecalls import file_calls
from ..support.jobevents import write_job
from .test_monitor import FakeSlurm, ledger, slurm

__all__ = ["ledger", "slurm"]


@pytest.fixture
def record(ledger: Ledger) -> ClusterRecord:
    """A cluster whose job 0 runs; jobs 1 and 2 have ended, 3 was deleted while it waited."""
    start = time.time() - 200
    path = ledger.folder.parent / "root" / "svd-0001"
    for folder in (path / "jobs", path / "head-1"):
        folder.mkdir(mode=0o700, parents=True)
    for folder in (path, path.parent):
        folder.chmod(0o700)
    (path / "head-1" / "heartbeat").write_text("1\n")
    opened = {"event": "opened", "version": 1, "address": "tls://h:1", "job": 0}
    lines: list[dict[str, Any]] = [opened]
    for job in range(3):
        (path / job_file(job, "claim")).write_text(f"{job + 1}\n")
        write_job(path, job, "script", at=start)
        write_job(path, job, "started", at=start)
        run = {"job": job, "id": str(job + 1), "name": "1-n1-1", "node": "n1", "started": start}
        row = {"address": "tls://h:2", "threads": 1, "memory": 2**30, "run": run}
        worker = {"worker": f"svd-0001-{job}", "at": start + 9}
        lines.append({"event": "connected", **worker, "row": row})
        if job:
            lines.append({"event": "disconnected", **worker})
            write_job(path, job, "failed", reason="of its own")
            write_job(path, job, "left", code=job, at=start + 80)
    write_events(path, *lines)
    found = ClusterRecord(
        id="svd-0001",
        site="here",
        scheduler="slurm",
        folder=str(path),
        created=start,
        groups=(GroupRecord("", workers=4, workers_per_job=1, gpus_per_job=1, walltime=600),),
        run=(),
        encrypted=True,
        submissions=tuple(Submission(str(job + 1), job, 1, time=start) for job in range(4)),
        unlisted={"3": start},
    )
    ledger.add(found)
    return found


def look(ledger: Ledger) -> ClusterReport:
    """Return the report of another process."""
    return ClusterMonitor(ledger.all(), ledger, skip_ended=True).report()


def shown(report: ClusterReport) -> list[Any]:
    return [job_json(job) for job in report.jobs]


def test_jobs_that_have_ended_are_as_their_files_and_accounting_said(
    slurm: FakeSlurm, ledger: Ledger, record: ClusterRecord
) -> None:
    slurm.lists("1||RUNNING")
    (slurm.folder / "sacct").write_text("#!/bin/sh\necho '2|OUT_OF_MEMORY|0:125|n1'\n")
    before = look(ledger)
    assert [job.state for job in before.jobs] == [
        "RUNNING",
        "OUT_OF_MEMORY",
        "FAILED",
        "CANCELLED",
    ]
    assert ledger.get(record.id).ended.keys() == {"1", "2", "3"}
    (slurm.folder / "sacct").write_text("#!/bin/sh\nexit 1\n")
    for job in (1, 2):
        (record.path / job_file(job, "jsonl")).unlink()
        (record.path / job_file(job, "claim")).unlink()
    assert shown(look(ledger)) == shown(before)


def test_jobs_that_have_ended_cost_no_question(
    slurm: FakeSlurm, ledger: Ledger, record: ClusterRecord
) -> None:
    slurm.lists("1||RUNNING")
    look(ledger)
    asked = slurm.folder / "asked"
    (slurm.folder / "sacct").write_text(f"#!/bin/sh\necho $* >> {asked}\n")
    ended = {int(number): job.trace for number, job in ledger.get(record.id).ended.items()}
    reader = FolderReader(record.path)
    calls = file_calls(lambda: reader.read(jobs=range(4), ended=ended))
    assert len(calls) <= 5  # one would have files of three jobs to read
    look(ledger)
    assert not asked.exists()


def test_a_job_that_is_in_the_queue_again_has_not_ended(
    slurm: FakeSlurm, ledger: Ledger, record: ClusterRecord
) -> None:
    slurm.lists("1||RUNNING")
    look(ledger)
    write_job(record.path, 2, "script", run="2-n1-1", at=record.created + 150)
    write_job(record.path, 2, "started", run="2-n1-1", at=record.created + 150)
    slurm.lists("1||RUNNING", "3||RUNNING")
    report = look(ledger)
    assert (report.jobs[2].state, report.jobs[2].began) == ("RUNNING", record.created + 150)
    assert ledger.get(record.id).ended.keys() == {"1", "3"}
    assert look(ledger).jobs[2].state == "RUNNING"


def test_a_cluster_that_has_ended_keeps_its_last_word_only(
    slurm: FakeSlurm, ledger: Ledger, record: ClusterRecord
) -> None:
    slurm.lists("1||RUNNING")
    look(ledger)
    write_job(record.path, 0, "left", code=0)
    (record.path / "ended").write_text(
        json.dumps({"kind": "done", "exit_code": 0, "time": record.created})
    )
    slurm.lists()
    states = [job.state for job in look(ledger).jobs]
    found = ledger.get(record.id)
    assert found.finished and found.last and len(found.last.jobs) == 4 and not found.ended
    assert [job.state for job in look(ledger).jobs] == states


@pytest.mark.parametrize("text", ["--me", "7 8", "$(id)"])
def test_an_ended_job_cannot_smuggle_an_option_into_the_ids(
    slurm: FakeSlurm, ledger: Ledger, record: ClusterRecord, text: str
) -> None:
    slurm.lists("1||RUNNING")
    look(ledger)
    path: Path = ledger.folder / f"{record.id}.json"
    value = json.loads(path.read_text())
    value["ended"]["1"]["files"]["claim"] = text
    path.write_text(json.dumps(value))
    with pytest.raises(GpujobsError, match="is not the id of a job"):
        ledger.get(record.id)


def test_usage_that_is_asked_for_often_is_one_question_to_the_batch_scheduler(
    ledger: Ledger, record: ClusterRecord, slurm: FakeSlurm
) -> None:
    handle = ClusterHandle(record.id, ledger)
    connections = [len(job.connections) for job in handle.usage().jobs]
    asked = len(slurm.calls)
    assert asked and any(connections)
    assert [len(job.connections) for job in handle.usage().jobs] == connections
    assert len(slurm.calls) == asked


@pytest.mark.parametrize("number", ["x", "-1", "01", "2"])
def test_a_record_whose_ended_job_has_another_number_is_refused(
    ledger: Ledger, record: ClusterRecord, slurm: FakeSlurm, number: str
) -> None:
    look(ledger)
    path: Path = ledger.folder / f"{record.id}.json"
    value = json.loads(path.read_text())
    value["ended"] = {number: value["ended"]["1"]}
    path.write_text(json.dumps(value))
    with pytest.raises(GpujobsError, match="`ended` has another number than its job"):
        ledger.get(record.id)
