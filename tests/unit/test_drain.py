"""Workers of plain dask leave while tasks run: none of these starts twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("distributed")

from distributed.core import Status

from gpujobs.injob import drain
from gpujobs.injob.configuration import WALLTIME
from gpujobs.injob.names import UNDRAIN

from ..support.draining import drained, own_name, run, work, work_until_stop

pytestmark = pytest.mark.filterwarnings("default")
"""On a busy machine dask warns that its files are slow."""

SECONDS = 0.4
"""Duration of a task."""


@pytest.mark.parametrize("saturation", [1.1, float("inf")])
def test_three_of_four_busy_workers_leave_and_each_task_starts_once(
    tmp_path: Path, saturation: float
) -> None:
    async def story() -> None:
        async with drained(
            tmp_path, config={"distributed.scheduler.worker-saturation": saturation}
        ) as it:
            futures = it.client.map(work, range(60), folder=str(tmp_path), seconds=SECONDS)
            for name in range(3):
                await it.until(lambda: it.state(name).processing, "tasks of a worker")  # noqa: B023
                await it.client.scheduler.gpujobs_drain(names=[str(name)], why="a test")
                await asyncio.sleep(SECONDS / 2)
            await it.left(0, 1, 2)
            assert await it.client.gather(futures) == list(range(60))
            assert len(it.starts()) == it.starts().total() == 60
            assert [event for _, event, _ in it.events].count("left") == 3
            assert not any(more.get("lost") for _, _, more in it.events)

    run(story)


def test_a_worker_that_stays_after_all_takes_tasks_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 1) as it:
            first = it.client.map(work, range(2), folder=str(tmp_path), seconds=3 * SECONDS)
            await it.until(lambda: it.starts().total() == 2, "the first tasks")
            await it.client.scheduler.gpujobs_drain(names=["0"])
            futures = it.client.map(work, range(2, 8), folder=str(tmp_path), seconds=0)
            assert await it.client.gather(first) == [0, 1]  # nobody takes its data: it is drained
            assert it.starts().total() == 2
            assert await it.client.scheduler.gpujobs_undrain(names=["0"]) == ["0"]
            assert await it.client.gather(futures) == list(range(2, 8))
            assert it.starts().total() == 8

    run(story)


def test_the_only_worker_stays_until_another_one_takes_its_data(tmp_path: Path) -> None:
    """`retire_workers` returns nothing, and is repeated; nothing is computed again."""

    async def story() -> None:
        async with drained(tmp_path, 1) as it:
            futures = it.client.map(work, range(8), folder=str(tmp_path), seconds=SECONDS)
            await it.until(lambda: it.starts().total() == 2, "the first tasks")
            it.drain.drain(it.state(0), "a test")
            await it.until(lambda: not it.state(0).processing, "the end of its tasks")
            await asyncio.sleep(1.5)
            assert it.state(0).status is Status.closing_gracefully
            await it.start_worker("new")
            assert await it.client.gather(futures) == list(range(8))
            await it.left(0)
            assert it.starts().total() == 8

    run(story)


def test_tasks_with_resources_that_have_not_started_go_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 3, resources={"GPU": 1}) as it:
            options = {"folder": str(tmp_path), "seconds": SECONDS, "resources": {"GPU": 1}}
            futures = it.client.map(work, range(12), **options)
            await it.until(lambda: it.starts().total() >= 3, "the first tasks")
            for name in range(2):
                it.drain.drain(it.state(name), "a test")
            assert await it.client.gather(futures) == list(range(12))
            assert it.starts().total() == 12

    run(story)


def parent(folder: str, number: int) -> int:
    """Wait for children, as tasks do that submit tasks."""
    from distributed import worker_client

    work(f"parent-{number}", folder, 0)
    with worker_client() as client:
        names = [f"{number}-{child}" for child in range(4)]
        found = client.gather(client.map(work, names, folder=folder, seconds=SECONDS))
    return len(found)


def test_tasks_that_wait_for_others_end_where_they_run(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 2) as it:
            futures = it.client.map(lambda n: parent(str(tmp_path), n), range(6))
            await it.until(lambda: it.starts().total() >= 8, "the first children")
            it.drain.drain(it.state(0), "a test")
            assert await it.client.gather(futures) == [4] * 6
            assert it.starts().total() == len(it.starts()) == 30

    run(story)


def test_what_still_runs_at_the_limit_is_lost_and_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 2, 1) as it:
            future = it.client.submit(work, "long", str(tmp_path), 4, key="long-1", workers=it.address(0), allow_other_workers=True)  # fmt: skip
            await it.until(lambda: it.starts().total() == 1, "the task")
            await it.until(lambda: it.state(0).executing, "a heartbeat with it")
            it.drain.drain(it.state(0), "a test", limit=0.5)
            await it.left(0)
            left = next(more for _, event, more in it.events if event == "left")
            assert left["lost"].keys() == {"long"} and left["lost"]["long"] > 0
            assert "0 left (a test) with a task: long had run for" in it.told[-1]
            assert await future == "long"
            assert it.starts()["long"] == 2

    run(story)


# -- pitfalls --------------------------------------------------------------------------------------
def rechunked(folder: Path, seconds: float, rows: int = 12) -> Any:
    """Return an array that a p2p shuffle makes of ``rows`` blocks; each notes its start."""
    import dask
    import dask.array

    def block(block_info: Any = None) -> Any:
        import numpy

        number = block_info[None]["chunk-location"][0]
        work(f"block-{number}", str(folder), seconds)
        return numpy.ones((20, 20 * rows))

    with dask.config.set({"array.rechunk.method": "p2p", "optimization.fuse.active": False}):
        array = dask.array.map_blocks(
            block, chunks=((20,) * rows, (20 * rows,)), dtype=float, meta=None
        )
        return array.rechunk((20 * rows, 20))


def active(it: Any) -> bool:
    return bool(it.scheduler.plugins["shuffle"].active_shuffles)


def test_a_worker_leaves_a_shuffle_when_it_is_over(tmp_path: Path) -> None:
    pytest.importorskip("dask.array")

    async def story() -> None:
        async with drained(tmp_path, 3, 1) as it:
            future = it.client.compute(rechunked(tmp_path, 0.2).sum())
            await it.until(lambda: active(it) and it.starts().total() >= 4, "a shuffle")
            it.drain.drain(it.state(0), "a test")
            assert it.state(0).status is Status.running
            assert await future == 20 * 20 * 12 * 12
            await it.left(0)
            assert it.starts().total() == 12

    run(story)


def test_a_shuffle_that_begins_uses_workers_that_stay(tmp_path: Path) -> None:
    pytest.importorskip("dask.array")

    async def story() -> None:
        async with drained(tmp_path, 3, 1) as it:
            hold = it.client.submit(
                work_until_stop, "hold", str(tmp_path), workers=it.address(0), pure=False
            )
            await it.until(lambda: it.starts().total() == 1, "the first task")
            it.drain.drain(it.state(0), "a test")
            total = await it.client.compute(rechunked(tmp_path, 0).sum())
            assert total == 20 * 20 * 12 * 12
            assert not hold.done()  # the shuffle did not wait for it
            (tmp_path / "stop").touch()
            await hold
            assert it.starts().total() == 13

    run(story)


def test_a_shuffle_of_an_older_graph_uses_workers_that_stay(tmp_path: Path) -> None:
    """It is submitted before the drain, and begins after it."""
    pytest.importorskip("dask.array")

    async def story() -> None:
        async with drained(tmp_path, 3, 2) as it:
            hold = it.client.submit(
                work_until_stop, "hold", str(tmp_path), workers=it.address(0), pure=False
            )
            future = it.client.compute(rechunked(tmp_path, 1).sum())
            await it.until(lambda: it.starts().total() >= 3, "the first tasks")
            assert not active(it)
            it.drain.drain(it.state(0), "a test")
            assert await future == 20 * 20 * 12 * 12
            assert not hold.done()
            (tmp_path / "stop").touch()
            await hold
            assert it.starts().total() == 13

    run(story)


class Counter:
    """An actor."""

    def __init__(self) -> None:
        self.n = 0

    def increment(self) -> int:
        self.n += 1
        return self.n


def test_an_actor_goes_on_where_it_is_and_that_is_said(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 2) as it:
            actor = await it.client.submit(Counter, actor=True, workers=it.address(0))
            it.drain.drain(it.state(0), "a test")
            await it.until(lambda: it.told, "a message")
            assert it.told == [
                "0 holds an actor: it gets no more tasks, but stays until its job ends"
            ]
            names = it.client.map(lambda _: own_name(), range(4), pure=False)
            assert set(await it.client.gather(names)) == {"1"}
            assert await actor.increment() == 1

    run(story)


def test_tasks_that_may_run_on_no_other_worker_are_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 2, 1) as it:
            options = {"folder": str(tmp_path), "seconds": SECONDS, "workers": it.address(0)}
            futures = it.client.map(work, range(4), **options)
            await it.until(lambda: it.starts().total() == 1, "the first task")
            it.drain.drain(it.state(0), "a test")
            await it.left(0)
            assert it.told == ["0 leaves, and 3 tasks work may run on no other worker"]
            assert it.starts().total() == 1
            await it.client.cancel(futures)

    run(story)


def test_a_worker_of_the_same_job_comes_back_drained(tmp_path: Path) -> None:
    """As after a restart by its nanny: another address, the same name and job."""

    async def story() -> None:
        async with drained(tmp_path, 1) as it:
            old = await it.start_worker("name")
            hold = it.client.submit(work, 0, str(tmp_path), 2, workers=it.address("name"), allow_other_workers=True)  # fmt: skip
            await it.until(lambda: it.starts().total() == 1, "the task")
            it.drain.drain(it.state("name"), "a test")
            await old.close()
            new = await it.start_worker("name", nthreads=1)
            assert it.drain.leaving() == [it.scheduler.workers[new.address]]
            assert it.scheduler.workers[new.address] not in it.scheduler.running
            await it.left("name")
            await hold

    run(story)


def test_a_worker_of_another_run_of_the_job_comes_back_as_usual(tmp_path: Path) -> None:
    """The batch scheduler has requeued the job."""

    async def story() -> None:
        async with drained(tmp_path, 1) as it:
            await it.start_worker("name")
            it.drain.drain(it.state("name"), "a test")
            await it.left("name")
            again = await it.start_worker("name", began=2.0)
            assert it.drain.leaving() == []
            state = it.scheduler.workers[again.address]
            await it.until(lambda: state in it.scheduler.running, "the worker")
            assert it.drain.leaving() == []

    run(story)


def test_a_worker_that_cannot_answer_leaves_when_its_tasks_have_ended(tmp_path: Path) -> None:
    """A worker that the user has started, without our preload."""
    from distributed import Worker

    async def story() -> None:
        async with drained(tmp_path, 2, 1, worker_class=Worker) as it:
            futures = it.client.map(work, range(8), folder=str(tmp_path), seconds=SECONDS)
            await it.until(lambda: it.starts().total() >= 2, "the first tasks")
            it.drain.drain(it.state(0), "a test")
            assert await it.client.gather(futures) == list(range(8))
            await it.left(0)
            assert it.starts().total() == 8

    run(story)


def test_a_call_that_comes_too_late_does_not_keep_a_worker(tmp_path: Path) -> None:
    async def story() -> None:
        async with drained(tmp_path, 2) as it:
            state = it.state(0)
            it.drain.drain(state, "a test")
            await it.left(0)
            assert not it.drain.undrain(state)
            call = getattr(it.client.scheduler, UNDRAIN)
            assert await call(names=["0", "nobody"]) == []

    run(story)


@pytest.mark.parametrize(("why", "closes"), [("scale", True), (WALLTIME, False)])
def test_data_that_no_other_worker_takes_keep_no_worker_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, closes: bool
) -> None:
    """Before a walltime, a successor may still take them."""
    monkeypatch.setattr(drain, "DATA_TIMEOUT", 0.5)

    async def story() -> None:
        async with drained(tmp_path, 1, 1) as it:
            held = it.client.submit(work, "held", str(tmp_path), 0)
            await held
            it.drain.drain(it.state(0), why)
            if closes:
                await it.left(0)
            else:
                await asyncio.sleep(2)
                assert len(it.scheduler.workers) == 1

    run(story)
