"""Workers leave when the rest of their job is shorter than the longest task that may start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("distributed")

import dask

from gpujobs.injob import rest as module
from gpujobs.injob.configuration import MARGIN, WALLTIME
from gpujobs.injob.names import DRAINED

from ..support.draining import Drained, drained, run, work

pytestmark = pytest.mark.filterwarnings("default")
"""On a busy machine dask warns that its files are slow."""

LONG = 2.0


def leaving(it: Drained) -> set[str]:
    """Return the names of the workers that leave because of their walltime."""
    return {str(state.name) for state in it.drain.leaving(WALLTIME)}


def test_workers_with_walltimes_lose_no_task(tmp_path: Path) -> None:
    """Three of four end while tasks wait. Each starts once, and the workers have left in time."""

    async def story() -> None:
        async with drained(tmp_path, 1) as it:
            it.rest.install()
            began = time.time()
            ends = {f"job-{n}": began + MARGIN + 3 + 2 * n for n in range(3)}
            for name, end in ends.items():
                await it.start_worker(name, ends=end)
            futures = it.client.map(work, range(40), folder=str(tmp_path), seconds=1)
            await it.left(*ends)
            assert time.time() < ends["job-2"]
            assert await it.client.gather(futures) == list(range(40))
            assert it.starts().total() == 40

    run(story)


def test_a_worker_stays_when_the_long_tasks_are_gone(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 0) as it:
            it.rest.install()
            await it.start_worker("job", nthreads=1, ends=time.time() + 60)
            hold = it.client.submit(work, "hold", str(tmp_path), 4)
            await it.until(lambda: it.starts()["hold"], "a task that runs")
            with dask.annotate(task_time="40s"):
                long = it.client.submit(work, "long", str(tmp_path), 0, key="long-1")
            it.rest._lives[it.state("job").address].ends -= 20
            await it.until(lambda: leaving(it), "the drain")
            await it.client.cancel([long])
            await it.until(lambda: not leaving(it), "the worker to stay")
            assert await it.client.submit(work, "next", str(tmp_path), 0) == "next"
            await hold
            assert it.starts().total() == 2

    run(story)


def test_new_tasks_do_not_start_where_they_would_not_end(tmp_path: Path) -> None:
    """The rule looks before they start: their prefix is known, or they are annotated."""

    async def story() -> None:
        async with drained(tmp_path, 1, 1) as it:
            it.rest.install()
            await it.start_worker("job", ends=time.time() + MARGIN + 20, nthreads=8)
            await it.start_worker("late", ends=time.time() + MARGIN + 60, nthreads=8)
            with dask.annotate(task_time="30s"):
                futures = it.client.map(work, range(4), folder=str(tmp_path), seconds=0.1)
            await it.until(lambda: it.starts().total() >= 1, "the tasks")
            await it.client.gather(futures)
            # 30 s are more than the first one ever has, so it does not wait for them.
            assert it.told == []
            assert (await it.call(DRAINED))["names"] == []
            it.rest._lives[it.state("late").address].ends -= 40
            it.rest.look()
            with dask.annotate(task_time="30s"):
                again = it.client.map(work, range(4, 9), folder=str(tmp_path), seconds=0.1)
            await it.client.gather(again)
            assert ("late", "draining", {"why": WALLTIME}) in it.events

    run(story)


@pytest.mark.parametrize("task_time", [0.0, 30.0])
def test_the_task_time_of_the_profile_counts_before_any_task_has_ended(
    tmp_path: Path, task_time: float
) -> None:
    async def story() -> None:
        async with drained(tmp_path, 1, 1) as it:
            it.rest.install()
            await it.start_worker("job", ends=time.time() + 60, task_time=task_time)
            it.rest._lives[it.state("job").address].ends -= 40
            futures = it.client.map(work, range(9), folder=str(tmp_path), seconds=0.2)
            await it.client.gather(futures)
            left = ("job", "draining", {"why": WALLTIME}) in it.events
            assert left is bool(task_time)

    run(story)


def test_a_task_that_is_longer_than_a_life_drains_no_worker_and_is_named(tmp_path: Path) -> None:
    """Else each new worker would leave at once."""

    async def story() -> None:
        async with drained(tmp_path, 0, 1) as it:
            it.rest.install()
            await it.start_worker("job", ends=time.time() + 60)
            with dask.annotate(task_time="2h"):
                futures = it.client.map(work, range(3), folder=str(tmp_path), seconds=0.1)
            await it.client.gather(futures)
            assert leaving(it) == set()
            assert "tasks work take longer than the " in it.told[0] and len(it.told) == 1
            assert await it.call(DRAINED) == {"names": [], "task_time": 0.0}

    run(story)


def test_a_lifetime_of_the_user_counts_like_a_walltime(tmp_path: Path) -> None:
    """dask would end the worker with its tasks; here it has left before."""

    async def story() -> None:
        async with drained(tmp_path, 1, 2) as it:
            it.rest.install()
            await it.start_worker("job", lifetime=MARGIN + 2.0, ends=time.time() + 3600)
            futures = it.client.map(work, range(20), folder=str(tmp_path), seconds=1)
            await it.left("job")
            assert await it.client.gather(futures) == list(range(20))
            assert it.starts().total() == 20
            assert ("job", "draining", {"why": WALLTIME}) in it.events

    run(story)


def test_a_lifetime_with_restarts_is_left_to_dask(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 1, 2) as it:
            it.rest.install()
            await it.start_worker("job", lifetime=60, lifetime_restart=True)
            assert it.rest._lives == {}

    run(story)


def test_the_last_worker_stays_if_dask_would_fail_the_tasks_that_wait(tmp_path: Path) -> None:
    """With `no-workers-timeout`: a worker that leaves counts as none."""
    config = {"distributed.scheduler.no-workers-timeout": "1s"}

    async def story() -> None:
        async with drained(tmp_path, 0, config=config) as it:
            it.rest.install()
            await it.start_worker("job", ends=time.time() + MARGIN)
            assert leaving(it) == set()
            await it.start_worker("other", ends=time.time() + 60)
            await it.until(lambda: "job" in {name for name, _, _ in it.events}, "the drain")

    run(story)


def test_a_value_that_is_no_time_is_reported_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 1) as it:
            it.rest.install()
            with dask.annotate(task_time="soon"):
                await it.client.submit(work, 1, str(tmp_path), 0)
                await it.client.submit(work, 2, str(tmp_path), 0)
            assert it.told == ["task_time of work: 'soon' is no time"]

    run(story)


def test_a_look_at_many_workers_takes_one_pass() -> None:
    """It needs the longest possible task of each worker: one search in a sorted list."""
    life: Any = module._Life(ends=0.0, longest=100.0, task_time=0.0)
    assert module._needed(life, 5.0, []) == 0.0
    assert module._needed(life, 5.0, [1.0, 95.0, 96.0]) == 95.0
    assert module._needed(life, 5.0, [200.0]) == 0.0
    life.task_time = 50.0
    assert module._needed(life, 5.0, [1.0]) == 50.0
    life.task_time = 99.0  # no worker that is started late waits for ever
    assert module._needed(life, 5.0, [1.0]) == 1.0
