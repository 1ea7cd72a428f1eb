"""`gpujobs cancel` on a PBS that, like the real one, keeps a job that qdel has ended in its queue for long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpujobs.batch.client import SchedulerClient
from gpujobs.clusters import scale
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.schedulers import JobId, JobState

from ..support.fakes import FakeBackend
from ..support.processes import patience, until

pytestmark = pytest.mark.parametrize("backend", ["pbs"], indirect=True)

OBEYS = """
echo '{{"event": "started"}}' >> {folder}/jobs/0.jsonl
until [ -e {folder}/ended ]; do sleep 0.1; done
sleep 2
echo '{{"event": "left", "code": 143}}' >> {folder}/jobs/0.jsonl
exit 143
"""
IGNORES = """echo '{{"event": "started"}}' >> {folder}/jobs/0.jsonl; sleep 600"""


@pytest.fixture
def running(
    batch: SchedulerClient,
    submit_body: Callable[[str, dict[str, Any]], str],
    name: str,
    tmp_path: Path,
) -> Callable[[str], ClusterRecord]:
    """Return a function that starts a cluster of one job with a body of its own."""

    def start(body: str) -> ClusterRecord:
        folder = tmp_path / name
        (folder / "jobs").mkdir(parents=True)
        submission = Submission(submit_body(body.format(folder=folder), {"gpus": 1}), 0, 1)
        until((folder / "jobs" / "0.jsonl").exists, 30, "the job")
        group = GroupRecord("", workers=1, workers_per_job=1, gpus_per_job=1)
        return ClusterRecord(
            name, "here", "pbs", str(folder), 1.0, groups=(group,), submissions=(submission,),
            run=(), encrypted=True,
        )  # fmt: skip

    return start


def test_jobs_that_find_ended_are_not_killed(
    backend: FakeBackend,
    running: Callable[[str], ClusterRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scale, "EXIT_TIMEOUT", patience(60))
    backend.quirk(kill_delay=600)
    record = running(OBEYS)
    scale.cancel(record, Ledger(tmp_path / "state"))
    backend.wait_empty(60, record.id)


def test_a_job_that_does_not_exit_is_killed(
    backend: FakeBackend,
    batch: SchedulerClient,
    running: Callable[[str], ClusterRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scale, "EXIT_TIMEOUT", 0.5)
    record = running(IGNORES)
    scale.cancel(record, Ledger(tmp_path / "state"))
    backend.wait_empty(60, record.id)
    job = JobId(record.submissions[0].id)
    assert batch.status([job], [record.id])[job].state is JobState.CANCELLED
