"""A cluster for each test of a user, made in a fixture of pytest-asyncio: each test has an event loop of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from distributed import Client

import gpujobs

from ..support.owner import backend, site  # noqa: F401
from ..support.processes import patience

pytest_asyncio = pytest.importorskip("pytest_asyncio")

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default"), pytest.mark.asyncio]


@pytest_asyncio.fixture
async def cluster(site: Callable[..., str]) -> AsyncIterator[Any]:
    options = {"dashboard_address": ":0"}
    async with gpujobs.GPUSLURMCluster(
        site(), asynchronous=True, quiet=True, worker_memory="1GiB", scheduler_options=options
    ) as cluster:
        await cluster.scale(1)
        yield cluster


@pytest.mark.parametrize("number", [1, 2])
async def test_each_test_has_a_cluster_of_its_own(cluster: Any, number: int) -> None:
    await cluster.wait_for_workers(1, timeout=patience(60))
    async with Client(cluster, asynchronous=True) as client:
        assert await client.submit(sum, [number, 2]) == number + 2
    assert [job["number"] for job in cluster.jobs] == [0]
