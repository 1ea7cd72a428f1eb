"""The records of clusters with very many jobs."""

from __future__ import annotations

import time
from dataclasses import replace

from gpujobs.cli.usage_text import usage_text
from gpujobs.clusters.folderstate import FolderState
from gpujobs.clusters.history import History
from gpujobs.clusters.judge import judge
from gpujobs.clusters.targets import Targets
from gpujobs.clusters.usage import make_usage
from gpujobs.deploy.pooljobs import PoolJob, PoolJobs

from .report_data import RECORD, START


def report_time(jobs: int) -> float:
    """Return the CPU time of a report of a cluster of ``jobs`` jobs."""
    (group,) = RECORD.groups
    submission = replace(RECORD.submissions[0], count=jobs)
    groups = (replace(group, workers=jobs, workers_per_job=1),)
    record = replace(RECORD, groups=groups, submissions=(submission,))
    began = time.process_time()
    report = judge(record, FolderState(), {}, now=START + 60)
    usage_text(make_usage(report, History(), Targets(), START + 60))
    return time.process_time() - began


def test_the_time_of_a_report_grows_as_the_jobs() -> None:
    """Eight times the jobs take much less than 64 times the time."""
    assert report_time(4000) < 24 * min(report_time(500) for _ in range(2))


def poll_time(jobs: int) -> float:
    """Return the CPU time in which the owner of ``jobs`` jobs takes over a report on them."""
    (group,) = RECORD.groups
    submission = replace(RECORD.submissions[0], count=jobs)
    groups = (replace(group, workers=jobs, workers_per_job=1),)
    record = replace(RECORD, groups=groups, submissions=(submission,))
    pool = PoolJobs({"": 3600})
    report = judge(record, FolderState(), {}, now=START + 60)
    for job in report.jobs:
        pool.add(PoolJob(job, 0.0))
    times = []
    for now in range(1, 6):
        began = time.process_time()
        pool.update(report, now)
        times.append(time.process_time() - began)
    return min(times)


def test_the_time_of_the_owners_poll_grows_as_the_jobs() -> None:
    """Four times the jobs take much less than 16 times the time."""
    assert poll_time(4000) < 6 * poll_time(1000)
