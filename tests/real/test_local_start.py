"""`GPULocalCluster` waits for its first workers, as LocalCUDACluster does; the other classes do not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import gpujobs
from gpujobs.errors import JobFailedError

from ..conftest import slow_variant
from ..support.processes import processes_with, until

OPTIONS: dict[str, Any] = {"gpus_per_job": 0, "quiet": True, "network": {"dashboard": "off"}}
BROKEN = {"setup": "exit 7"}
SLOW = {"setup": "sleep 1000"}


def workers_of(cluster: gpujobs.GPULocalCluster) -> int:
    return len(cluster.scheduler.workers)


def test_its_workers_are_there_when_it_is_made(home: Path) -> None:
    with gpujobs.GPULocalCluster(n_workers=2, **OPTIONS) as cluster:
        assert workers_of(cluster) == 2


def test_an_asynchronous_one_has_its_workers_when_it_was_awaited(home: Path) -> None:
    async def started() -> int:
        async with gpujobs.GPULocalCluster(n_workers=1, asynchronous=True, **OPTIONS) as cluster:
            return workers_of(cluster)

    assert asyncio.run(started()) == 1


def test_one_without_first_workers_does_not_wait(home: Path) -> None:
    with gpujobs.GPULocalCluster(n_workers=0, environment=SLOW, **OPTIONS) as cluster:
        cluster.scale(1)
        assert workers_of(cluster) == 0


async def awaited(keywords: dict[str, Any]) -> None:
    await gpujobs.GPULocalCluster(asynchronous=True, **keywords)


def made(keywords: dict[str, Any], asynchronous: bool) -> None:
    if asynchronous:
        asyncio.run(awaited(keywords))
    else:
        gpujobs.GPULocalCluster(**keywords)


@pytest.mark.parametrize("asynchronous", [False, slow_variant(True)])
def test_workers_that_fail_are_an_error_and_nothing_is_left(home: Path, asynchronous: bool) -> None:
    keywords = {**OPTIONS, "n_workers": 1, "name": "broken", "environment": BROKEN}
    with pytest.raises(JobFailedError, match="jobs in a row ended before their workers connected"):
        made(keywords, asynchronous)
    until(lambda: not processes_with("broken-"), 30)


@pytest.mark.parametrize("asynchronous", [False, slow_variant(True)])
def test_workers_that_take_too_long_are_an_error_and_nothing_is_left(
    home: Path, asynchronous: bool
) -> None:
    keywords = {**OPTIONS, "n_workers": 1, "name": "slow", "environment": SLOW}
    with pytest.raises(TimeoutError, match="0 of 1 worker after 2 s"):
        made({**keywords, "start_timeout": "2s"}, asynchronous)
    until(lambda: not processes_with("slow-"), 30)
