"""Jobs, nodes and the controller of a real Slurm are lost while tasks run: the cluster meets its target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import fresh_folder, unavailable
from ..support import slurm as slurm_support
from ..support.slurm import PrivateSlurm
from ..support.slurm_churn import ROUND, churn, counted_commands, environment, slurm_for_churn

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

WORKERS = 16
MOST_CALLS = 3.0
"""Commands of the batch scheduler per second; with ``poll: 1s``, `squeue` is at most one of them."""


@pytest.fixture
def slurm(shared_folder: Path) -> Iterator[PrivateSlurm]:
    if why := slurm_support.missing():
        unavailable("slurm", why)
    with slurm_for_churn(fresh_folder(shared_folder, "slurm")).running() as running:
        yield running


@pytest.mark.waits
@pytest.mark.timeout(600)
def test_jobs_reach_the_target_under_churn_with_few_commands(
    slurm: PrivateSlurm, home: Path
) -> None:
    """`churn` itself checks the results of the tasks, the target at the end, and that no job is left."""
    with environment(counted_commands(home, slurm)):
        found = churn(home, slurm, WORKERS, seconds=20, pause=3)
    print(found)
    assert all(found.faults[kind] >= number for kind, number in ROUND.items())
    assert found.submitted >= WORKERS + found.faults["cancel"]
    assert found.calls.total() < MOST_CALLS * found.seconds
