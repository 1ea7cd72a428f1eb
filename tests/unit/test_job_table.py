"""The table of a cluster's jobs, and how it is displayed."""

from __future__ import annotations

from dataclasses import replace

from gpujobs.clusters.report import JobPhase, JobReport, WorkerGpu, job_json
from gpujobs.deploy.job import PoolJob
from gpujobs.deploy.table import JobTable, phase_counts
from gpujobs.schedulers import JobId, JobState

JOB = JobReport(0, JobId("7", 0), JobPhase.PENDING, JobState.PENDING, workers=("svd-0", "svd-1"))


def test_table() -> None:
    waiting = replace(JOB, reason="Priority", starts="2026-01-01T10:00:00")
    assert phase_counts([waiting]) == "1 PENDING (Priority)"
    assert "Priority, starts 2026-01-01T10:00:00" in repr(JobTable.of([waiting]))
    assert JobTable.of([waiting]) == [job_json(waiting)]
    assert repr(JobTable()) == "no jobs"


def test_gpus() -> None:
    gpu = WorkerGpu("svd-0", "node1", "GPU-1", "A100", 2**34)
    table = JobTable.of([replace(JOB, gpus=(gpu,), connected=("svd-0",))])
    assert "1 A100" in repr(table) and "1/2" in repr(table) and "1 A100" in table._repr_html_()


def test_html_is_escaped() -> None:
    assert "<script>" not in JobTable.of([replace(JOB, reason="<script>")])._repr_html_()


def test_times_of_a_job_of_the_pool() -> None:
    job = PoolJob(JOB)
    assert not job.update(JOB, 1.0) and job.running_since is None
    assert job.update(replace(JOB, phase=JobPhase.STARTING), 2.0)
    assert job.update(replace(JOB, phase=JobPhase.RUNNING), 3.0) and job.running_since == 2.0
    assert job.update(replace(JOB, phase=JobPhase.LOST), 4.0) and job.lost_since == 4.0
    assert not job.update(replace(JOB, phase=JobPhase.LOST), 5.0) and job.lost_since == 4.0
    assert job.update(replace(JOB, phase=JobPhase.RUNNING), 6.0) and job.lost_since is None
    job.update(replace(JOB, phase=JobPhase.LOST), 7.0)
    job.update(JOB, 8.0)  # requeued
    assert job.lost_since is None and job.running_since is None
