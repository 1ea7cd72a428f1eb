"""Bounded submission: attempts in a row, pauses between them, and the ceiling of adaptive scaling."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpujobs.deploy.group import MOST_ATTEMPTS, PAUSES, Attempts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock: its only item is the time."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    yield now


def test_three_attempts_for_each_missing_job() -> None:
    attempts = Attempts()
    assert not attempts.exhausted(missing=5, alive=0)
    attempts.failed(MOST_ATTEMPTS * 2 - 1)
    assert not attempts.exhausted(missing=2, alive=8)
    attempts.failed()
    assert attempts.exhausted(missing=2, alive=8)
    assert not attempts.exhausted(missing=3, alive=7)


def test_a_cluster_of_which_nothing_is_left_stops_sooner() -> None:
    attempts = Attempts()
    attempts.failed(MOST_ATTEMPTS)
    assert attempts.exhausted(missing=100, alive=0)


def test_the_pauses_grow_and_end_with_a_success(clock: list[float]) -> None:
    attempts = Attempts()
    lengths = []
    for _ in range(len(PAUSES) + 2):
        attempts.failed(10)  # a whole array at once is one round
        start = clock[0]
        while attempts.pausing():
            clock[0] += 1.0
        lengths.append(clock[0] - start)
    assert lengths == [*PAUSES, PAUSES[-1], PAUSES[-1]]
    attempts.failed()
    attempts.succeeded()
    assert not attempts.pausing() and not attempts.exhausted(missing=1, alive=0)


def test_a_batch_scheduler_that_is_away_is_no_failure(clock: list[float]) -> None:
    attempts = Attempts()
    for _ in range(20):
        attempts.postpone()
    assert attempts.pausing() and not attempts.exhausted(missing=1, alive=0)


def test_the_last_refusal_is_kept() -> None:
    attempts = Attempts()
    error = ValueError("no more jobs")
    attempts.failed(error=error)
    assert attempts.error is error
    attempts.failed()
    assert attempts.error is None  # jobs have failed since, which is the newer reason
