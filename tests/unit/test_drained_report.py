"""`report` and `status` say which jobs left early, what that saved, and which tasks were lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.cli.usage_text import usage_json, usage_text
from gpujobs.clusters.findings import notes
from gpujobs.clusters.folderstate import FolderReader, read_state
from gpujobs.clusters.history import read_history
from gpujobs.injob.configuration import WALLTIME

from ..support.events import write_events
from .report_data import WORKERS, history, usage


def test_the_report_says_how_many_gpu_hours_were_not_used() -> None:
    """Job 1 of two GPUs had 4 h, and left after 1.05 h: it is not a failure that was replaced."""
    past = replace(history(), left=dict.fromkeys(WORKERS[2:4], WALLTIME))
    found = usage(past)
    assert usage_json(found)["drained"] == {"jobs": [1], "gpu_hours": pytest.approx(5.9)}
    assert "drained    5.9 GPU h not used: 1 job left early" in usage_text(found)
    assert found.jobs[1].replaced_by is None


@pytest.mark.parametrize("left", [{}, {WORKERS[2]: WALLTIME}, dict.fromkeys(WORKERS[2:4], "scale")])
def test_other_jobs_are_not_drained(left: dict[str, str]) -> None:
    found = usage(replace(history(), left=left))
    assert usage_json(found)["drained"] == {"jobs": [], "gpu_hours": 0.0}
    assert "drained" not in usage_text(found)


def test_tasks_that_were_cut_off_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "svd-0000"
    folder.mkdir(mode=0o700)
    first = {"event": "left", "at": 1.0, "worker": "a", "lost": {"fit\x1b[1m": 61.7}}
    second = {**first, "at": 2.0, "worker": "b", "lost": {"fit\x1b[1m": 3.0}}
    write_events(folder, {"event": "opened"}, first, second, first)  # a line may come twice
    (note,) = notes(FolderReader(folder).read())
    assert note == (
        "2 tasks fit[1m started again: the job ended when it had run for 62 s; "
        "`task_time` says how long a task takes"
    )


def test_events_say_why_workers_have_left(tmp_path: Path) -> None:
    folder = tmp_path / "svd-0000"
    folder.mkdir(mode=0o700)
    write_events(
        folder,
        {"event": "draining", "at": 1.0, "worker": "a", "why": WALLTIME},
        {"event": "left", "at": 2.0, "worker": "b", "why": WALLTIME, "seconds": 1.0, "lost": {}},
        {"event": "left", "at": 2.0, "worker": "c", "why": 7},
    )
    assert read_history(folder, read_state(folder).jobs).left == {"b": WALLTIME}


def test_a_worker_of_a_requeued_job_has_not_left(tmp_path: Path) -> None:
    folder = tmp_path / "svd-0000"
    folder.mkdir(mode=0o700)
    left = {"event": "left", "at": 1.0, "worker": "b", "why": WALLTIME}
    write_events(folder, left, {"event": "connected", "at": 9.0, "worker": "b", "row": {}})
    assert read_history(folder, read_state(folder).jobs).left == {}
