"""The phases of a job of a Python cluster, and how its table shows them."""

from __future__ import annotations

from gpujobs.deploy.job import Job, JobTable, Phase, counts, gpus_of
from gpujobs.schedulers import JobId, JobState, JobStatus

BOTH = frozenset({"svd-0", "svd-1"})


def job() -> Job:
    return Job(0, JobId("7", 0), ("svd-0", "svd-1"))


def test_phases_in_order() -> None:
    made, seen = job(), []

    def look(names: frozenset[str], now: float) -> None:
        made.look(names, now)
        seen.append(made.phase)

    look(frozenset(), 0.0)
    made.asked, made.status = (
        True,
        JobStatus(JobState.PENDING, reason="Priority", starts="2026-01-01T10:00:00"),
    )
    look(frozenset(), 1.0)
    assert counts([made]) == "1 PENDING (Priority)"
    assert "Priority, starts 2026-01-01T10:00:00" in repr(JobTable([made.row()]))
    made.status = JobStatus(JobState.RUNNING, node="node1")
    look(frozenset(), 2.0)
    look(frozenset({"svd-0", "of another job"}), 3.0)
    look(BOTH, 4.0)
    assert made.ever_connected and made.lost_since is None and made.running_since == 2.0
    look(frozenset({"svd-0"}), 5.0)
    look(frozenset(), 6.0)
    assert made.lost_since == 5.0
    look(BOTH, 7.0)
    assert made.lost_since is None
    expected = "SUBMITTED PENDING STARTING STARTING RUNNING LOST LOST RUNNING"
    assert [phase.value for phase in seen] == expected.split()


def test_what_is_over_stays_over() -> None:
    for phase in (Phase.FAILED, Phase.ENDED):
        made = job()
        made.phase = phase
        assert not made.look(BOTH, 1.0)
        assert made.phase is phase


def test_workers_that_are_there_before_the_batch_scheduler_says_so() -> None:
    made = job()
    assert made.look(BOTH, 1.0)
    assert made.phase is Phase.RUNNING and made.running_since == 1.0


def test_gpus_of_workers() -> None:
    gpu = {"node": "node1", "uuid": "GPU-1", "model": "A100", "memory": 2**34}
    workers = {
        "svd-0": {"gpu": gpu},
        "svd-1": {"gpu": None},
        "cpu-0": {"gpu": {"node": "node1", "uuid": None}},
    }
    assert gpus_of(("svd-0", "svd-1", "cpu-0", "gone"), workers) == ({"worker": "svd-0", **gpu},)
    made = job()
    made.gpus = gpus_of(made.workers, workers)
    table = JobTable([made.row()])
    assert table[0]["gpus"][0]["memory"] == 2**34
    assert "1 A100" in repr(table) and "1 A100" in table._repr_html_()
    assert repr(JobTable()) == "no jobs"


def test_html_is_escaped() -> None:
    made = job()
    made.reason = "<script>"
    assert "<script>" not in JobTable([made.row()])._repr_html_()
