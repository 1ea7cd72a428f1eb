"""Sizes and times in messages."""

from __future__ import annotations

import pytest

from gpujobs.text import matches, short_size_text, walltime_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (5400, "1h30m"), (86400, "24h"), (47 * 3600, "47h"), (48 * 3600, "2d"),
        (61 * 3600 + 1, "2d13h1s"), (400 * 86400, "400d"),
    ],
)  # fmt: skip
def test_walltimes_have_days_from_two_days_up(seconds: int, text: str) -> None:
    assert walltime_text(seconds) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (60 * 2**30, "60GiB"), (5500 * 2**20, "5500MiB"), (12342046 * 2**10, "11.8GiB"),
        (12052 * 2**20, "11.8GiB"), (100, "100B"),
    ],
)  # fmt: skip
def test_sizes_have_at_most_one_digit_after_the_point(n_bytes: int, text: str) -> None:
    assert short_size_text(n_bytes) == text


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (r"login\d+\.example\.org", "login12.example.org", True),
        (r"login\d+", "login12.example.org", False),
        ("(login", "login", False),
        ("(a+)+b", "aab", False),  # with some more letters it takes years
        (".*.*.*.*.*.*.*.*", "a" * 60, False),  # and this, minutes
        (".*.*", "a" * 60, True),
    ],
)
def test_a_pattern_that_may_take_long_matches_nothing(pattern: str, text: str, found: bool) -> None:
    assert matches(pattern, text) is found
