"""The order in which the processes of the test run get the tests."""

from __future__ import annotations

from typing import Any

import pytest

from ..conftest import waiting_first


class Item:
    """A test, as far as `waiting_first` knows it."""

    def __init__(self, number: int, waits: bool) -> None:
        self.number, self.waits = number, waits

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
