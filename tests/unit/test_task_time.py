"""`task_time` of a profile: refused if no worker lives so long, else told to the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.planning.render import render

from .support import error_of, made_plan

JOBS = "gpus: 2\ngpus_per_job: 1\nrun: sleep 9\n"


@pytest.mark.parametrize(
    ("walltime", "task_time", "most"),
    [("10m", "9m", 535), ("1m", "46s", 45), ("1h", "1h", 3535), ("10s", "1s", 0)],
)
def test_a_task_time_that_no_worker_has_is_refused(
    home: Path, walltime: str, task_time: str, most: int
) -> None:
    profile = f"{JOBS}walltime: {walltime}\ntask_time: {task_time}\n"
    error = error_of(home, profile)
    assert f"but a worker has {most} s for its tasks" in error
    assert "svd.yaml:5:12" in error


def test_each_group_has_its_own_task_time(home: Path) -> None:
    text = "walltime: 1h\ngroups: {a: {gpus: 1, task_time: 10m}, b: {gpus: 1, walltime: 5m}}\n"
    made_plan(home, text)
    error = error_of(home, text.replace("walltime: 5m", "walltime: 5m, task_time: 5m"))
    assert "group b: `task_time` is 5m, but a worker has 265 s for its tasks" in error


def test_jobs_know_the_task_time(home: Path) -> None:
    plan = made_plan(home, f"{JOBS}walltime: 1h\ntask_time: 10m\n")
    assert " --task-time=600" in render(plan, "svd-7f3a")[0].text
    plan = made_plan(home, f"{JOBS}walltime: 1h\n")
    assert "--task-time" not in render(plan, "svd-7f3a")[0].text
