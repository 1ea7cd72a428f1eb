"""The table of a cluster's jobs, and how it is displayed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpujobs.clusters.folderstate import FolderState
from gpujobs.clusters.report import JobPhase, JobReport, WorkerGpu, job_cells, job_counts, job_json
from gpujobs.deploy.display import JobTable
from gpujobs.deploy.elastic import LONGEST_HOLD, SHORTEST_HOLD, JobAdaptive
from gpujobs.deploy.group import WorkerGroup, count_ends
from gpujobs.deploy.pooljobs import (
    START_UP,
    STEADY,
    Away,
    Drained,
    EndsTasks,
    PoolJob,
    PoolJobs,
    Running,
    RunsOut,
    Starting,
    Stays,
    Waiting,
)
from gpujobs.schedulers import JobId, JobState

JOB = JobReport(0, JobId("7", 0), JobPhase.WAITING, JobState.PENDING, workers=("svd-0", "svd-1"))


def test_the_table_of_jobs_is_a_list_and_a_text() -> None:
    waiting = replace(JOB, reason="Priority", expected_start="2026-01-01T10:00:00")
    assert job_counts([waiting], reasons=True) == "1 WAITING (Priority)"
    assert "Priority, starts 2026-01-01T10:00:00" in repr(JobTable([waiting]))
    assert JobTable([waiting]) == [job_json(waiting)]
    assert repr(JobTable()) == "no jobs"


@pytest.mark.parametrize(
    ("phase", "state", "facts", "word", "in_json"),
    [
        ("WAITING", "PENDING", {}, "WAITING", "PENDING"),
        ("WAITING", "UNKNOWN", {"unseen": True}, "WAITING", "SUBMITTED"),
        ("STARTING", "RUNNING", {}, "STARTING", "STARTING"),
        ("RUNNING", "RUNNING", {}, "RUNNING", "RUNNING"),
        ("AWAY", "RUNNING", {}, "AWAY", "LOST"),
        ("AWAY", "SUSPENDED", {}, "AWAY", "SUSPENDED"),
        ("LEAVING", "RUNNING", {}, "LEAVING", "LEAVING"),
        ("ENDED", "TIMEOUT", {}, "TIMEOUT", "ENDED"),
        ("ENDED", "NODE_FAIL", {"in_vain": True}, "NODE_FAIL", "FAILED"),
        ("ENDED", "COMPLETED", {"in_vain": True}, "FAILED", "FAILED"),
        ("ENDED", "COMPLETED", {}, "COMPLETED", "ENDED"),
    ],
)
def test_the_state_of_a_job_is_one_word_everywhere(
    phase: str, state: str, facts: dict[str, bool], word: str, in_json: str
) -> None:
    job = replace(JOB, phase=JobPhase(phase), state=JobState(state), **facts)
    assert (job_cells(job)[2], job_counts([job])) == (word, f"1 {word}")
    assert word in repr(JobTable([job])) and job_json(job)["phase"] == in_json
    assert ("suspended" in job_cells(job)[-1]) is (state == "SUSPENDED")


def test_the_table_of_jobs_shows_their_gpus() -> None:
    gpu = WorkerGpu("svd-0", "node1", "GPU-1", "A100", 2**34)
    table = JobTable([replace(JOB, gpus=(gpu,), connected=("svd-0",))])
    assert "1 A100" in repr(table) and "1/2" in repr(table) and "1 A100" in table._repr_html_()


def test_html_is_escaped() -> None:
    assert "<script>" not in JobTable([replace(JOB, reason="<script>")])._repr_html_()


def test_a_job_of_the_pool_remembers_the_times_of_its_phases() -> None:
    job = PoolJob(JOB, 0.0)
    assert not job.update(JOB, 1.0) and job.phase == Waiting()
    assert job.update(replace(JOB, phase=JobPhase.STARTING), 2.0) and job.phase == Starting(2.0)
    assert job.update(replace(JOB, phase=JobPhase.RUNNING), 3.0) and job.phase == Running(2.0, 3.0)
    assert job.update(replace(JOB, phase=JobPhase.AWAY), 4.0) and job.phase == Away(2.0, 3.0, 4.0)
    assert not job.update(replace(JOB, phase=JobPhase.AWAY), 5.0) and job.away(5.0) == 1.0
    assert job.update(replace(JOB, phase=JobPhase.RUNNING), 6.0) and job.phase == Running(2.0, 3.0)
    job.update(replace(JOB, phase=JobPhase.AWAY), 7.0)
    job.update(JOB, 8.0)  # requeued
    assert job.phase == Waiting(again=True) and job.queued == 8.0


def test_a_suspended_job_is_not_away() -> None:
    job = PoolJob(JOB, 0.0)
    for now, phase in enumerate(("RUNNING", "AWAY")):
        job.update(replace(JOB, phase=JobPhase(phase), state=JobState.RUNNING), float(now))
    job.update(replace(JOB, phase=JobPhase.AWAY, state=JobState.SUSPENDED), 2.0)
    assert job.away(1000.0) == 0.0 and job.phase == Running(0.0, 0.0)


def test_the_end_of_a_job_whose_workers_are_away_is_no_success() -> None:
    job = PoolJob(JOB, 0.0)
    for now, phase in ((1.0, "RUNNING"), (2.0, "AWAY")):
        job.update(replace(JOB, phase=JobPhase(phase), state=JobState.RUNNING), now)
    job.update(replace(JOB, phase=JobPhase.ENDED, state=JobState.NODE_FAIL), 50.0)
    assert not job.steady(50.0)  # its workers were there for a second


def test_workers_of_a_requeued_job_start_again() -> None:
    job = PoolJob(JOB, 0.0)
    lost = replace(JOB, phase=JobPhase.AWAY, state=JobState.RUNNING)
    for phase in (JobPhase.RUNNING, JobPhase.WAITING):
        job.update(replace(JOB, phase=phase), 1.0)
    job.update(lost, 2.0)  # its workers were connected before, and are not now
    assert job.report.phase is JobPhase.STARTING and job.phase == Starting(2.0, again=True)
    job.update(replace(JOB, phase=JobPhase.RUNNING), 3.0)
    job.update(lost, 4.0)
    assert job.report.phase is JobPhase.AWAY and job.phase == Away(2.0, 3.0, 4.0)


def test_workers_of_a_requeued_job_have_a_limited_time_to_start() -> None:
    job = PoolJob(JOB, 0.0)
    lost = replace(JOB, phase=JobPhase.AWAY, state=JobState.RUNNING)
    for now, report in ((1.0, replace(JOB, phase=JobPhase.RUNNING)), (2.0, JOB), (3.0, lost)):
        job.update(report, now, 300.0)
    job.update(lost, 303.0, 300.0)
    assert job.report.phase is JobPhase.STARTING
    job.update(lost, 304.0, 300.0)  # they have come and gone between two looks
    assert job.report.phase is JobPhase.AWAY and job.phase == Away(3.0, None, 304.0)


def test_a_requeue_that_nobody_saw_starts_the_job_again() -> None:
    """The job was never seen waiting: it has another start than before."""
    running = replace(JOB, phase=JobPhase.RUNNING, state=JobState.RUNNING, began=1.7e9)
    job = PoolJob(JOB, 0.0)
    job.update(running, 10.0)
    job.way_out = RunsOut()
    job.update(replace(running, phase=JobPhase.AWAY), 20.0)
    job.update(replace(running, phase=JobPhase.AWAY, began=1.7e9 + 30), 50.0)
    assert job.report.phase is JobPhase.STARTING and job.started == 50.0
    assert job.way_out == Stays()  # it has its whole walltime again
    job.update(replace(running, phase=JobPhase.RUNNING, began=1.7e9 + 30), 60.0)
    job.update(replace(running, phase=JobPhase.RUNNING, began=None), 70.0)  # it could not be read
    job.update(replace(running, phase=JobPhase.RUNNING, began=1.7e9 + 30), 80.0)
    assert job.phase == Running(50.0, 60.0)


def test_a_start_has_succeeded_if_the_workers_stay() -> None:
    job = PoolJob(JOB, 0.0)
    job.update(replace(JOB, phase=JobPhase.RUNNING), 10.0)
    assert not job.steady(10.0 + STEADY - 1) and job.steady(10.0 + STEADY)
    job.update(replace(JOB, phase=JobPhase.AWAY), 20.0)
    assert not job.steady(1000.0)  # the time for which it is lost does not count


def test_a_job_has_the_attributes_of_a_worker_of_dask() -> None:
    assert PoolJob(JOB, 0.0).status.name == "running" and PoolJob(JOB, 0.0).job_id == JOB.id
    for phase in JobPhase:
        assert PoolJob(replace(JOB, phase=phase), 0.0).status


def jobs(*phases: JobPhase, walltime: int | None = None) -> PoolJobs:
    found = PoolJobs({"": walltime})
    for number, phase in enumerate(phases):
        report = replace(JOB, number=number, phase=phase, workers=(f"svd-{number}",))
        found.add(PoolJob(report, queued=0.0))
    return found


def test_jobs_that_leave_count_no_more_and_come_last() -> None:
    found = jobs(JobPhase.RUNNING, JobPhase.RUNNING)
    found.finish(found.active[0], JobPhase.LEAVING, "removed")
    assert [job.report.number for job in found.counting()] == [1]
    assert found.leaving_workers() == {"svd-0"}
    running = replace(JOB, number=0, phase=JobPhase.LEAVING, state=JobState.RUNNING)
    latest = found.latest([running])
    assert [(job.number, job.phase) for job in latest] == [(1, "RUNNING"), (0, "LEAVING")]
    assert latest[1].reason == "removed"


@pytest.mark.parametrize(("state", "failures"), [(JobState.CANCELLED, 1), (JobState.COMPLETED, 0)])
def test_a_cancelled_job_whose_workers_were_leaving_has_failed(
    state: JobState, failures: int
) -> None:
    """Jobs that are cancelled again and again are given up."""
    report = replace(JOB, phase=JobPhase.ENDED, state=state)
    job = PoolJob(report, queued=0.0, way_out=Drained())
    group = WorkerGroup(SimpleNamespace(group=report.group))  # type: ignore[arg-type]
    count_ends({report.group: group}, [], [job], 1.0)
    assert group.failures.jobs == failures


def test_a_job_that_was_taken_back_counts_at_the_next_report() -> None:
    """The dask scheduler's last answer, that its workers leave, was of before."""
    found = jobs(JobPhase.RUNNING)
    running = replace(
        JOB, phase=JobPhase.RUNNING, state=JobState.RUNNING,
        workers=("svd-0",), connected=("svd-0",),
    )  # fmt: skip
    report = SimpleNamespace(jobs=[running], folder=FolderState())
    found.update(report, 1.0)  # type: ignore[arg-type]
    job = found.active[0]
    found.release(job, JobPhase.LEAVING, "removed", EndsTasks())
    found.drained = frozenset({"svd-0", "svd-1"})
    found.take_back(job)
    found.update(report, 2.0)  # type: ignore[arg-type]
    assert found.counting() == [job]
    assert found.drained == {"svd-1"}


def test_a_requeued_job_has_waited_since_it_was_requeued() -> None:
    found = jobs(JobPhase.WAITING, walltime=36000)
    running = replace(JOB, phase=JobPhase.RUNNING, state=JobState.RUNNING, workers=("svd-0",))
    waiting = replace(running, phase=JobPhase.WAITING, state=JobState.PENDING)
    for now, report in ((1.0, running), (5000.0, waiting), (5030.0, running)):
        found.update(SimpleNamespace(jobs=[report], folder=FolderState()), now)  # type: ignore[arg-type]
    assert found.longest_wait == 30.0  # its first run is no waiting time
    assert found.lead("", 5030.0) == START_UP + 1.0  # nor is that after a requeue usual


def test_idle_jobs_are_kept_as_long_as_a_job_has_waited() -> None:
    found = jobs(JobPhase.WAITING)
    cluster = SimpleNamespace(_pool=SimpleNamespace(jobs=found))
    adaptive = JobAdaptive(cluster, interval=0)
    assert adaptive.hold == SHORTEST_HOLD
    report = replace(JOB, phase=JobPhase.STARTING, state=JobState.RUNNING)
    found.update(SimpleNamespace(jobs=[report], folder=FolderState()), 600.0)  # type: ignore[arg-type]
    assert adaptive.hold == 600.0
    found.longest_wait = 1e6
    assert adaptive.hold == LONGEST_HOLD
    assert JobAdaptive(cluster, interval=0, hold="5m").hold == 300.0
