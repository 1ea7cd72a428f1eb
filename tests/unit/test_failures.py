"""Bounded submission: failures in a row, the pauses between them, and the reason that is given."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpujobs.deploy.group import MOST_FAILURES, PAUSES, REFUSAL_TIME, Failures, Scope, WorkerGroup
from gpujobs.errors import RefusedError

from .support import made_plan


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock: its only item is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now


@pytest.fixture
def group(home: Path) -> WorkerGroup:
    """A group of workers without jobs."""
    return WorkerGroup(made_plan(home, {"gpus": 4}).groups[0])


def pausing(group: WorkerGroup) -> bool:
    return any(halt.jobs == 0 for halt in group.present_halts)


def test_starts_stop_after_three_failures_for_each_missing_job() -> None:
    failures = Failures()
    assert not failures.exhausted(missing=5, alive=0)
    failures.jobs = MOST_FAILURES * 2 - 1
    assert not failures.exhausted(missing=2, alive=8)
    failures.jobs += 1
    assert failures.exhausted(missing=2, alive=8)
    assert not failures.exhausted(missing=3, alive=7)


def test_a_cluster_of_which_nothing_is_left_stops_sooner() -> None:
    assert Failures(MOST_FAILURES).exhausted(missing=100, alive=0)


def test_the_pauses_grow_and_end_with_a_success(group: WorkerGroup, clock: list[float]) -> None:
    lengths = []
    for _ in range(len(PAUSES) + 2):
        group.failed(10)  # a whole array at once is one round
        start = clock[0]
        while pausing(group):
            clock[0] += 1.0
        lengths.append(clock[0] - start)
    assert lengths == [*PAUSES, PAUSES[-1], PAUSES[-1]]
    group.failed()
    assert pausing(group)
    group.succeeded()
    assert not pausing(group) and not group.failures.exhausted(missing=1, alive=0)


def test_a_batch_scheduler_that_is_away_is_no_failure(
    group: WorkerGroup, clock: list[float]
) -> None:
    for _ in range(20):
        group.pause()
    assert pausing(group) and not group.failures.exhausted(missing=1, alive=0)


@pytest.mark.parametrize("refused_last", [True, False])
def test_the_newest_failure_is_the_reason(group: WorkerGroup, refused_last: bool) -> None:
    error = RefusedError("no more jobs")
    group.failed(error=error)
    if refused_last:
        group.stop_submitting([])
        assert [halt.error for halt in group.present_halts if halt.stops] == [error]
    else:
        group.failed()
        assert all(halt.error is None for halt in group.halts.values())


def test_a_refused_number_of_jobs_outlasts_a_success_but_not_ten_minutes(
    group: WorkerGroup, clock: list[float]
) -> None:
    group.halt(Scope.NUMBER, RefusedError("four\n  at most"), 4, REFUSAL_TIME)
    group.failed(error=RefusedError("no"))
    group.failed(error=RefusedError("no"))
    assert [(halt.jobs, halt.text) for halt in group.present_halts] == [
        (0, "no"),
        (4, "four at most"),
    ]
    group.succeeded()
    assert [halt.jobs for halt in group.present_halts] == [4]
    clock[0] += REFUSAL_TIME
    assert not group.present_halts


def test_a_group_that_does_not_adapt_keeps_no_idle_jobs(group: WorkerGroup) -> None:
    group.target = 0
    assert group.workers(present=3) == 0
    group.maximum = 2
    assert group.workers(present=3) == 2 * group.size
    assert group.workers(present=0) == 0
