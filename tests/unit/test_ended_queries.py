"""Queries of the dask scheduler: one that is ended when its answer arrives, and what an answer may change."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.comm import CommClosedError
from distributed.core import Status

from gpujobs.deploy.daskscheduler import DaskControl

QUERIES = {
    "running_workers": lambda control: control.running_workers(()),
    "give_up": lambda control: control.give_up(None),
    "undrain": lambda control: control.undrain(["svd-0"]),
    "drained": lambda control: control.drained(),
    "load": lambda control: control.load(),
    "close_scheduler": lambda control: control.close_scheduler(),
}


class Answers:
    """Answers every call with ``answer``, when it has been set; with ``ucxx`` as dask's comms over ucxx do."""

    def __init__(self, answer: asyncio.Future[Any], *, ucxx: bool = False) -> None:
        self._answer, self._ucxx = answer, ucxx

    def __getattr__(self, name: str) -> Any:
        async def call(**arguments: Any) -> Any:
            try:
                return await self._answer
            except asyncio.CancelledError:
                if self._ucxx:
                    raise CommClosedError("connection closed by the other side") from None
                raise

        return call


@pytest.mark.parametrize("ucxx", [False, True], ids=["tls", "ucxx"])
@pytest.mark.parametrize("query", QUERIES)
def test_a_query_that_is_cancelled_as_its_answer_arrives_ends(query: str, ucxx: bool) -> None:
    """Else a look that `close` has ended goes on, and reports that the cluster has ended."""

    async def story(steps: int) -> None:
        answer = asyncio.get_running_loop().create_future()
        cluster = SimpleNamespace(
            scheduler_comm=Answers(answer, ucxx=ucxx),
            status=Status.running,
            observed=frozenset(),
            scheduler_info={"workers": {}},
            _watch_worker_status_comm=SimpleNamespace(closed=lambda: False),
        )
        asked = asyncio.create_task(QUERIES[query](DaskControl(cluster)))  # type: ignore[no-untyped-call]
        await asyncio.sleep(0.01)
        if steps == 4:  # without an answer
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            return
        answer.set_result({"workers": {}, "names": [], "task_time": 0.0} if query != "load" else {})
        for _ in range(steps):
            await asyncio.sleep(0)
        if asked.done():
            assert steps
        else:
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        assert cluster.status == Status.running  # else the next `close` waits for this one

    for steps in range(5):
        asyncio.run(story(steps))


def test_an_answer_does_not_replace_what_messages_of_workers_change() -> None:
    """Dask's task that reads these messages ends if a removed worker is missing: then all workers seem lost."""

    async def story() -> int:
        answer = asyncio.get_running_loop().create_future()
        workers = {number: {"name": f"svd-{number}", "status": "running"} for number in range(4)}
        workers[3]["status"] = "paused"
        answer.set_result({"workers": workers})
        known = {"workers": {number: workers[number] for number in (0, 1, 3)}}
        cluster = SimpleNamespace(
            scheduler_comm=Answers(answer),
            scheduler_info=known,
            observed={"svd-0", "svd-1", "svd-3"},
            _watch_worker_status_comm=SimpleNamespace(closed=lambda: False),
        )
        found = await DaskControl(cluster).running_workers({"svd-1"})  # type: ignore[arg-type]
        assert cluster.scheduler_info is known and set(known["workers"]) == {0, 1, 3}
        return found

    assert asyncio.run(story()) == 1


def test_the_load_is_unknown_while_the_dask_scheduler_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A suspended one never answers; `scale` must not wait for it with the lock of all scaling."""

    async def story() -> object:
        monkeypatch.setattr("gpujobs.deploy.daskscheduler.QUERY_TIMEOUT", 0.01)
        silent = Answers(asyncio.get_running_loop().create_future())
        cluster = SimpleNamespace(scheduler_comm=silent, scheduler_info={"workers": {}})
        return await DaskControl(cluster).load()  # type: ignore[arg-type]

    assert asyncio.run(story()) is None
