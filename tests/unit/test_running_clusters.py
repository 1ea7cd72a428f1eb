"""`status` of clusters that run costs a file server few questions: each one is a round trip."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.clusters.folderstate import FolderReader
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.injob.names import job_file
from gpujobs.schedulers import JobId

from ..support.events import write_events
from ..support.filecalls import file_calls
from ..support.jobevents import write_job
from ..support.transcripts import SQUEUE_HEADER

CLUSTERS = 200


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """The ledger of clusters that all run, as their Slurm says."""
    commands = tmp_path / "bin"
    commands.mkdir()
    rows = (f"{number}||RUNNING|n1|N/A|None|name\n" for number in range(1, CLUSTERS + 1))
    (tmp_path / "queue").write_text("".join((SQUEUE_HEADER, *rows)))
    (commands / "squeue").write_text(f"#!/bin/sh\nexec cat {tmp_path}/queue\n")
    (commands / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return Ledger()


def add(ledger: Ledger, number: int) -> None:
    """Add a cluster of one job, whose worker is connected."""
    name, now = f"svd-{number:04x}", time.time()
    path = ledger.folder.parent / "root" / name
    for folder in (path / "jobs", path / "logs", path / "head-1"):
        folder.mkdir(mode=0o700, parents=True)
    for folder in (path, path.parent):
        folder.chmod(0o700)
    (path / job_file(0, "claim")).write_text(f"{number}\n")
    write_job(path, 0, "script", at=now)
    write_job(path, 0, "started", at=now)
    (path / "head-1" / "owner").write_text('{"job": 0, "node": "n1"}')
    (path / "head-1" / "heartbeat").write_text("1\n")
    run = {"job": 0, "id": str(number), "name": "1-n1-1", "node": "n1", "started": now}
    row = {"address": "tls://h:2", "threads": 1, "memory": 2**30, "run": run}
    opened = {"event": "opened", "version": 1, "address": "tls://h:1", "job": 0}
    worker = f"{name}-0"
    write_events(path, opened, {"event": "connected", "at": now, "worker": worker, "row": row})
    ledger.add(
        ClusterRecord(
            id=name,
            site="here",
            scheduler="slurm",
            folder=str(path),
            created=now,
            groups=(GroupRecord("", workers=1, workers_per_job=1, gpus_per_job=1, walltime=600),),
            run=("python", "train.py"),
            encrypted=True,
            submissions=(Submission(str(number), 0, 1, time=now),),
        )
    )


def shown(*arguments: str) -> str:
    """Return what `status` prints."""
    result = CliRunner().invoke(main, ["status", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("arguments", [("--all",), ()])
def test_two_hundred_running_clusters_cost_four_calls_each(
    ledger: Ledger, arguments: tuple[str, ...]
) -> None:
    for number in range(1, CLUSTERS + 1):
        add(ledger, number)
    found = json.loads(shown(*arguments, "--json"))["clusters"]
    assert [(one["state"], one["workers"]["connected"]) for one in found] == [
        ("RUNNING", [f"{one['id']}-0"]) for one in found
    ]
    calls = file_calls(lambda: shown(*arguments))
    assert 2 * CLUSTERS <= len(calls) <= 4 * CLUSTERS + 20


def test_files_of_jobs_are_looked_up_while_a_job_has_no_workers(ledger: Ledger) -> None:
    add(ledger, 1)
    record = ledger.all()[0]
    (record.path / "jobs" / "0.claim").unlink()
    assert FolderReader(record.path).read(jobs=[0]).claims == {0: JobId("1")}
    assert FolderReader(record.path).read(jobs=[0, 1]).claims == {}
    assert FolderReader(record.path).read().claims == {}


@pytest.mark.parametrize("told", [True, False])
def test_the_note_of_the_head_is_shown_while_its_workers_are_connected(
    ledger: Ledger, told: bool
) -> None:
    """In the folder itself, or among the files of jobs: there the head of 0.3.0 writes it."""
    add(ledger, 1)
    record = ledger.all()[0]
    events = record.path / "workers-1.jsonl"
    if not told:
        events.write_text(events.read_text().replace(', "job": 0}', "}", 1))
    name = "note" if told else "jobs/0.note"
    (record.path / name).write_text("run: has had no client\n")
    assert "has had no client" in shown(record.id)
