"""The fixture of modules whose tests are about Slurm, or need only one batch scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..conftest import nothing_left
from .backend import SlurmBackend


@pytest.fixture(params=["slurm"])
def backend(slurm_backend: SlurmBackend) -> Iterator[SlurmBackend]:
    """The real Slurm; nothing is left in it after a test."""
    yield slurm_backend
    nothing_left(slurm_backend)
