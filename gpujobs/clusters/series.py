"""Shorter time series: charts and JSON need few points of samples of days."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from .history import Received, Sample

MOST_POINTS = 250
"""Points of a line: more are not visible, and a job of days has thousands of samples."""

T = TypeVar("T")


def shorter_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return at most `MOST_POINTS` means of successive samples of a GPU."""
    return [
        Sample(
            time=some[-1].time,
            seconds=sum(one.seconds for one in some),
            busy=_mean(some, lambda sample: sample.busy),
            used=_rounded(_mean(some, lambda sample: sample.used)),
        )
        for some in _parts(samples)
    ]


def shorter_transfers(samples: Sequence[Received]) -> list[Received]:
    """Return at most `MOST_POINTS` sums of successive transfers, with the times between them."""
    return [
        Received(
            time=some[-1].time,
            seconds=some[-1].time - some[0].time + some[0].seconds,
            size=sum(one.size for one in some),
        )
        for some in _parts(samples)
    ]


def busy_fraction(samples: Sequence[Sample]) -> float | None:
    """Return which part of the time a GPU was busy; None if that is not known."""
    percent = _mean(samples, lambda sample: sample.busy)
    return None if percent is None else percent / 100


def _mean(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """Return the mean, weighted by the times for which the samples stand; None without values."""
    pairs = [(one.seconds, found) for one in samples if (found := value(one)) is not None]
    total = sum(seconds for seconds, _ in pairs)
    if not total:
        return None
    return sum(seconds * found for seconds, found in pairs) / total


def _rounded(number: float | None) -> int | None:
    return None if number is None else round(number)


def _parts(samples: Sequence[T]) -> Iterator[Sequence[T]]:
    size = max(1, -(-len(samples) // MOST_POINTS))
    for first in range(0, len(samples), size):
        yield samples[first : first + size]
