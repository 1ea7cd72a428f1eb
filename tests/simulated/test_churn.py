"""Hours of random churn in seconds: the rules of elasticity hold at every step (see `support.churn`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gpujobs.deploy.group import MOST_FAILURES

from ..support.churn import GROUPS, churn
from ..support.elastic import SimulatedCluster, simulate, slurm_of

FAST = 8
"""How many seeds of each are in `make test`."""
MANY_SEEDS = int(os.environ.get("GPUJOBS_SEEDS", "50"))
"""How many are in `make slow`; `make seeds` runs 1,000."""
PART = 25
"""Seeds of one of its tests."""
HOURS = 0.5
"""Simulated hours of churn of each of its seeds: about 0.4 s."""


@pytest.mark.parametrize("seed", range(FAST))
def test_rules_of_elasticity_hold_under_churn(tmp_path: Path, seed: int) -> None:
    churn(tmp_path, seed)


@pytest.mark.parametrize("seed", range(FAST))
def test_rules_of_elasticity_hold_for_each_group_under_churn(tmp_path: Path, seed: int) -> None:
    """Of GPU workers and of CPU workers: each keeps its own target or adapts, with the same rules."""
    churn(tmp_path, seed, groups=tuple(GROUPS))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", [("",), tuple(GROUPS)], ids=["one", "groups"])
@pytest.mark.parametrize("first", range(0, MANY_SEEDS, PART))
def test_rules_of_elasticity_hold_for_many_seeds(
    tmp_path: Path, first: int, groups: tuple[str, ...]
) -> None:
    for seed in range(first, first + PART):
        churn(folder_of(tmp_path, seed), seed, HOURS, groups)


def folder_of(parent: Path, seed: int) -> Path:
    """Make and return the folder of one seed."""
    folder = parent / str(seed)
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("adapts", [True, False])
def test_jobs_that_always_fail_are_submitted_a_few_times(tmp_path: Path, adapts: bool) -> None:
    slurm = slurm_of(tmp_path, demand=lambda group: 16, broken=[""])

    async def play() -> None:
        cluster = SimulatedCluster(tmp_path, slurm)
        if adapts:
            cluster.adapt(minimum=0, maximum=16)
        else:
            await cluster.scale_to(8)
        await asyncio.sleep(2 * 3600)
        assert cluster.pool.errors
        cluster.stop()

    simulate(slurm, play)
    assert 8 <= len(slurm.jobs) <= 8 * (1 + MOST_FAILURES)
    assert not slurm.alive
