"""The order in which the processes of the test run get the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..conftest import waiting_first


class Item:
    """A test, as far as `waiting_first` knows it."""

    def __init__(self, number: int, waits: bool, path: str = "tests/unit/test_a.py") -> None:
        self.number, self.waits, self.path = number, waits, Path(path)

    def get_closest_marker(self, name: str) -> object:
        return (self.waits and name == "waits") or None


@pytest.mark.parametrize("processes", [2, 3, 6])
@pytest.mark.parametrize("total", [5, 23, 60])
def test_tests_that_wait_begin_in_every_second_process(total: int, processes: int) -> None:
    items: list[Any] = [Item(n, waits=n % 6 == 5) for n in range(total)]
    found: list[Any] = waiting_first(items, processes)
    assert sorted(item.number for item in found) == list(range(total))
    begins = []
    for number in range(processes):  # as `--dist worksteal` shares them out
        size = len(found) // (processes - number)
        part, found = found[:size], found[size:]
        waits = [item.waits for item in part]
        assert waits == sorted(waits, reverse=True)
        begins.append(sum(waits))
    assert begins[1::2] == [0] * (processes // 2)
    assert max(begins[::2]) - min(begins[::2]) <= 1


def test_each_process_begins_with_files_of_real_clusters() -> None:
    real = [Item(n, False, f"tests/real/test_{n // 4}.py") for n in range(24)]
    items: list[Any] = [*real, *(Item(n, waits=False) for n in range(24, 90))]
    found: list[Any] = waiting_first(items, 3)
    assert sorted(item.number for item in found) == list(range(90))
    for part in (found[:30], found[30:60], found[60:]):
        folders = [item.path.parent.name for item in part]
        assert folders == ["real"] * 8 + ["unit"] * 22
        assert len({item.path for item in part[:8]}) == 2  # whole files, which share what they boot
