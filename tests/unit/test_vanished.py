"""Jobs that neither the queue nor accounting lists: waited for, then given up; and jobs that fail and stay in the queue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpujobs.clusters import monitor as clusters
from gpujobs.clusters.ledger import ClusterRecord, Ledger, Submission
from gpujobs.clusters.report import CANCELLED, GRACE, ClusterReport
from gpujobs.deploy.job import Job
from gpujobs.schedulers import JobId, JobState, JobStatus
from gpujobs.schedulers.base import NOT_LISTED

AWAY = JobStatus(JobState.UNKNOWN, reason="the batch scheduler does not answer")
STUCK = JobStatus(JobState.FAILED, "Eqw", "can't chdir", stuck=True)


class Clock:
    """A cluster of one job in a ledger, and what `look` says of it at some later time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger, self.monkeypatch, self.start = (
            Ledger(folder / "state"),
            monkeypatch,
            time.time(),
        )
        self.folder = folder / "svd-0000"
        (self.folder / "jobs").mkdir(parents=True)
        record = ClusterRecord(
            "svd-0000", "here", "sge", str(self.folder), self.start, 1, 1, 1, 1, 3600, (), True
        )
        self.ledger.add(record)
        self.ledger.submitted("svd-0000", Submission("7", 0, 1))

    def look(self, after: float, status: JobStatus) -> ClusterReport:
        self.monkeypatch.setattr(time, "time", lambda: self.start + after)
        self.monkeypatch.setattr(
            clusters, "ask", lambda records, tell: {JobId("7"): status} if records else {}
        )
        return next(clusters.look([self.ledger.get("svd-0000")], self.ledger, print))

    @property
    def finished(self) -> bool:
        return self.ledger.get("svd-0000").finished


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(tmp_path, monkeypatch)


def states(view: ClusterReport) -> tuple[str, str]:
    return view.state.value, view.jobs[0].state.value


def test_deleted_while_it_waited(clock: Clock) -> None:
    assert states(clock.look(0, JobStatus(JobState.PENDING))) == ("PENDING", "PENDING")
    assert states(clock.look(5, NOT_LISTED)) == ("PENDING", "UNKNOWN")
    assert states(clock.look(4 + GRACE, NOT_LISTED)) == ("PENDING", "UNKNOWN")
    assert not clock.finished
    assert states(clock.look(6 + GRACE, NOT_LISTED)) == ("CANCELLED", "CANCELLED")
    assert clock.finished
    assert (
        "before it started" in clock.look(9 + GRACE, NOT_LISTED).reason
    )  # nobody is asked any more


def test_gone_after_it_had_started(clock: Clock) -> None:
    (clock.folder / "jobs" / "0.claim").write_text("7")
    clock.look(0, NOT_LISTED)
    assert states(clock.look(1 + GRACE, NOT_LISTED)) == ("FAILED", "FAILED")


def test_its_own_record_needs_no_patience(clock: Clock) -> None:
    (clock.folder / "jobs" / "0.json").write_text(
        '{"exit_code": 0, "host": "n1", "started": 1, "ended": 2}'
    )
    assert states(clock.look(0, NOT_LISTED))[1] == "COMPLETED"


@pytest.mark.parametrize("other", [AWAY, JobStatus(JobState.RUNNING)], ids=["away", "listed again"])
def test_only_answers_count(clock: Clock, other: JobStatus) -> None:
    clock.look(0, NOT_LISTED)
    clock.look(5, other)
    assert states(clock.look(6 + GRACE, NOT_LISTED))[1] == "UNKNOWN"  # counted from now on
    assert not clock.finished


def test_what_we_cancelled_is_believed_at_once(clock: Clock) -> None:
    (clock.folder / "ended").write_text(f'{{"exit_code": 143, "reason": "{CANCELLED}"}}')
    assert states(clock.look(0, AWAY)) == ("CANCELLED", "UNKNOWN")
    assert states(clock.look(1, NOT_LISTED)) == ("CANCELLED", "CANCELLED")
    assert clock.finished


def test_what_the_head_cancelled_is_gone_at_once(clock: Clock) -> None:
    (clock.folder / "ended").write_text('{"exit_code": 0, "reason": "", "job": 1}')
    assert states(clock.look(0, NOT_LISTED)) == ("DONE", "CANCELLED")
    (clock.folder / "jobs" / "0.claim").write_text("7")
    assert states(clock.look(0, NOT_LISTED)) == ("DONE", "CANCELLED")  # remembered


def test_a_started_job_of_an_ended_cluster_is_waited_for(clock: Clock) -> None:
    (clock.folder / "ended").write_text('{"exit_code": 0, "reason": "", "job": 1}')
    (clock.folder / "jobs" / "0.claim").write_text("7")
    assert states(clock.look(0, NOT_LISTED)) == ("DONE", "UNKNOWN")


def test_a_failed_job_in_the_queue_is_still_asked_for(clock: Clock) -> None:
    assert states(clock.look(0, STUCK)) == ("FAILED", "FAILED")
    assert not clock.finished  # or `gpujobs cancel` would not remove it


def test_job_of_a_python_process() -> None:
    job = Job(0, JobId("7"), ("svd-0000-0",))
    job.told(NOT_LISTED, 100.0)
    assert job.status.state is JobState.UNKNOWN
    job.told(JobStatus(JobState.PENDING), 130.0)
    job.told(NOT_LISTED, 140.0)
    job.told(NOT_LISTED, 139.0 + GRACE)
    assert job.status.state is JobState.UNKNOWN
    job.told(NOT_LISTED, 141.0 + GRACE)
    assert job.status.state is JobState.CANCELLED
