"""The bytes that workers receive from each other: from real workers to the file of the cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from distributed import Client, Nanny, Scheduler, Worker, wait

from gpujobs.clusters.history import read_history
from gpujobs.injob.folder import TRANSFERS
from gpujobs.injob.registry import TransferRecorder, count_transfers

from ..support.processes import patience

SIZE = 1_000_000
Body = Callable[[Client, list[Worker], TransferRecorder], Awaitable[None]]


def with_workers(folder: Path, body: Body) -> None:
    """Run ``body`` with a dask scheduler and three workers in this process."""

    async def main() -> None:
        async with Scheduler(port=0, dashboard_address=":0") as scheduler:
            recorder = TransferRecorder(scheduler, str(folder))
            scheduler.add_plugin(recorder, name="gpujobs-transfers")
            workers = [Worker(scheduler.address, name=f"p-{n}", nthreads=1) for n in range(3)]
            for worker in workers:
                count_transfers(worker)
            await asyncio.gather(*workers)
            async with Client(scheduler.address, asynchronous=True) as client:
                await body(client, workers, recorder)
            for worker in workers:
                await worker.close()
            await scheduler.close()

    asyncio.run(main())


def received(folder: Path) -> dict[str, int]:
    found = read_history(folder).transfers
    assert found is not None
    return {name: sum(one.size for one in samples) for name, samples in found.items()}


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(patience(30)):
        while not condition():
            await asyncio.sleep(0.05)


def test_bytes_of_tasks(tmp_path: Path) -> None:
    async def body(client: Client, workers: list[Worker], _: TransferRecorder) -> None:
        data = client.map(bytes, [SIZE] * 20, workers=["p-0"], pure=False)
        await wait(data)
        # dask forgets all but the last transfers; the sum must not.
        workers[1].transfer_incoming_log.clear()
        assert await client.submit(len, data[0], workers=["p-1"]) == SIZE
        workers[1].transfer_incoming_log.clear()
        for one in data[1:]:
            await client.submit(len, one, workers=["p-1"])
        await eventually(lambda: received(tmp_path).get("p-1", 0) >= 20 * SIZE)
        assert await client.submit(len, data[0], workers=["p-2"]) == SIZE
        await workers[2].heartbeat()
        await workers[2].close()  # its last heartbeat still counts

    with_workers(tmp_path, body)
    found = received(tmp_path)
    assert found.keys() == {"p-1", "p-2"}
    assert 20 * SIZE <= found["p-1"] < 20.1 * SIZE and SIZE <= found["p-2"] < 1.1 * SIZE


def test_few_and_short_lines(tmp_path: Path) -> None:
    async def body(client: Client, _: list[Worker], recorder: TransferRecorder) -> None:
        await client.gather(client.map(bytes, range(10), workers=["p-0"]))
        await asyncio.sleep(2)
        for _ in range(5):
            await recorder._write()

    with_workers(tmp_path, body)
    (first,) = (tmp_path / TRANSFERS).read_text().splitlines()  # nothing was transferred
    assert json.loads(first)["received"] == {}
    assert read_history(tmp_path).transfers == {}


def test_a_full_disk_delays_samples(tmp_path: Path) -> None:
    (tmp_path / TRANSFERS).mkdir()

    async def body(client: Client, workers: list[Worker], recorder: TransferRecorder) -> None:
        data = client.submit(bytes, SIZE, workers=["p-0"])
        await client.submit(len, data, workers=["p-1"])
        await workers[1].heartbeat()
        await recorder._write()
        (tmp_path / TRANSFERS).rmdir()

    with_workers(tmp_path, body)
    assert received(tmp_path)["p-1"] >= SIZE


def test_a_process_of_a_worker_that_starts_again_counts_from_zero(tmp_path: Path) -> None:
    (tmp_path / "preload.py").write_text(
        "from gpujobs.injob.registry import count_transfers\n"
        "def dask_setup(worker): count_transfers(worker)\n"
    )

    async def body(client: Client, _: list[Worker], __: TransferRecorder) -> None:
        address = client.scheduler.address
        async with Nanny(address, name="n-0", preload=[str(tmp_path / "preload.py")]) as nanny:
            data = client.submit(bytes, SIZE, workers=["p-0"])
            for count in (1, 2):
                await client.submit(len, data, workers=["n-0"], pure=False)
                await eventually(lambda: received(tmp_path).get("n-0", 0) >= count * SIZE)  # noqa: B023
                await nanny.restart()

    with_workers(tmp_path, body)
    assert 2 * SIZE <= received(tmp_path)["n-0"] < 2.1 * SIZE


def test_a_folder_of_an_older_gpujobs_has_no_transfers(tmp_path: Path) -> None:
    assert read_history(tmp_path).transfers is None
