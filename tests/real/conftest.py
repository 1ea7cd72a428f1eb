"""What all tests of real clusters share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def garbage_is_that_of_its_test() -> Iterator[None]:
    """Find the connections that dask leaves to the garbage collector if it gives up while it connects.

    Their warnings are no errors here, but they would be in the test that runs when they are found.
    """
    yield
    gc.collect()
