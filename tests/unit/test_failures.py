"""Bounded submission: failures in a row, and the pauses between them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpujobs.deploy.group import MOST_FAILURES, PAUSES, Failures


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock: its only item is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now


def test_three_failures_for_each_missing_job() -> None:
    failures = Failures()
    assert not failures.exhausted(missing=5, alive=0)
    failures.failed(MOST_FAILURES * 2 - 1)
    assert not failures.exhausted(missing=2, alive=8)
    failures.failed()
    assert failures.exhausted(missing=2, alive=8)
    assert not failures.exhausted(missing=3, alive=7)


def test_a_cluster_of_which_nothing_is_left_stops_sooner() -> None:
    failures = Failures()
    failures.failed(MOST_FAILURES)
    assert failures.exhausted(missing=100, alive=0)


def test_the_pauses_grow_and_end_with_a_success(clock: list[float]) -> None:
    failures = Failures()
    lengths = []
    for _ in range(len(PAUSES) + 2):
        failures.failed(10)  # a whole array at once is one round
        start = clock[0]
        while failures.pausing():
            clock[0] += 1.0
        lengths.append(clock[0] - start)
    assert lengths == [*PAUSES, PAUSES[-1], PAUSES[-1]]
    failures.failed()
    failures.succeeded()
    assert not failures.pausing() and not failures.exhausted(missing=1, alive=0)


def test_a_batch_scheduler_that_is_away_is_no_failure(clock: list[float]) -> None:
    failures = Failures()
    for _ in range(20):
        failures.postpone()
    assert failures.pausing() and not failures.exhausted(missing=1, alive=0)


def test_the_last_refusal_is_kept() -> None:
    failures = Failures()
    error = ValueError("no more jobs")
    failures.failed(error=error)
    assert failures.error is error
    failures.failed()
    assert failures.error is None  # jobs have failed since, which is the newer reason
