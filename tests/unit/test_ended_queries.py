"""A look at the dask scheduler that is ended when its answer arrives."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.core import Status

from gpujobs.deploy.daskscheduler import DaskControl

QUERIES = {
    "running_workers": lambda control: control.running_workers(()),
    "give_up": lambda control: control.give_up(None),
    "undrain": lambda control: control.undrain(["svd-0"]),
    "drained": lambda control: control.drained(),
    "close_scheduler": lambda control: control.close_scheduler(),
}


class Answers:
    """Answers every call with ``answer``, when it has been set."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        async def call(**arguments: Any) -> Any:
            return await self._answer

        return call


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_that_is_cancelled_as_its_answer_arrives_ends(query: str) -> None:
    """Else a look that `close` has ended goes on, and reports that the cluster has ended."""

    async def story(steps: int) -> None:
        answer = asyncio.get_running_loop().create_future()
        cluster = SimpleNamespace(
            scheduler_comm=Answers(answer),
            status=Status.running,
            observed=frozenset(),
            _watch_worker_status_comm=SimpleNamespace(closed=lambda: False),
        )
        asked = asyncio.create_task(QUERIES[query](DaskControl(cluster)))  # type: ignore[no-untyped-call]
        await asyncio.sleep(0.01)
        answer.set_result({"workers": {}, "names": [], "task_time": 0.0})
        for _ in range(steps):
            await asyncio.sleep(0)
        if asked.done():
            assert steps
        else:
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    for steps in range(4):
        asyncio.run(story(steps))
