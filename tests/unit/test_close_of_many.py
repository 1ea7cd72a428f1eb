"""`close` of a cluster with many workers: they leave at once, not one after another, each with messages to all others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from distributed.comm import connect

import gpujobs

from ..support.processes import patience

METRICS: dict[str, Any] = {
    "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
    "spilled_bytes": {"memory": 0, "disk": 0},
    "digests_total_since_heartbeat": {},
    "task_counts": {},
    **dict.fromkeys(("cpu", "event_loop_interval", "executing", "in_flight", "in_memory"), 0),
    **dict.fromkeys(("managed_bytes", "memory", "ready", "transfer_incoming_count_total"), 0),
}
"""What dask's scheduler reads of a worker's first message."""
FEW, MORE = 8, 32


async def worker(number: int, cluster: gpujobs.GPULocalCluster, ready: asyncio.Queue[int]) -> int:
    """Register as a worker does; leave when the cluster has ended, or when told to. Return the messages about others.

    Workers of real jobs find `ended` one after another.
    """
    address = cluster.scheduler_address
    comm = await connect(address, **cluster.security.get_connection_args("worker"))
    host = address.rpartition(":")[0]
    await comm.write(
        {
            "op": "register-worker", "reply": False, "address": f"{host}:{20000 + number}", "status": "running",
            "nthreads": 1, "name": f"worker-{number}", "now": time.time(), "resources": {}, "memory_limit": 10**9,
            "local_directory": "/tmp", "services": {}, "nanny": None, "pid": 1, "versions": {}, "extra": {},
            "metrics": {**METRICS, "time": time.time()}, "stimulus_id": "register", "server_id": f"worker-{number}",
        },
        serializers=["msgpack"],
    )  # fmt: skip
    assert (await comm.read())["status"] == "OK"
    ready.put_nowait(number)
    leaving = asyncio.ensure_future(leave(number, cluster.folder, comm))
    found = 0
    try:
        while True:
            ops = [message.get("op") for message in await comm.read()]
            found += "remove-worker" in ops
            if "close" in ops:
                break
    except OSError:
        pass
    leaving.cancel()
    comm.abort()
    return found


async def leave(number: int, folder: Path, comm: Any) -> None:
    while not (folder / "ended").exists():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02 * number)
    comm.abort()


async def messages(workers: int) -> int:
    """Close a cluster with workers; return how many times one of them was told that others have left."""
    options: dict[str, Any] = {"gpus_per_job": 0, "quiet": True, "network": {"dashboard": "off"}}
    cluster = await gpujobs.GPULocalCluster(n_workers=0, asynchronous=True, **options)
    ready: asyncio.Queue[int] = asyncio.Queue()
    running = [asyncio.ensure_future(worker(n, cluster, ready)) for n in range(workers)]
    for _ in running:
        await asyncio.wait_for(ready.get(), patience(60))
    await cluster.close()
    return sum(await asyncio.gather(*running))


def test_the_messages_of_workers_that_leave_are_proportional_to_their_number(home: Path) -> None:
    few, more = asyncio.run(messages(FEW)), asyncio.run(messages(MORE))
    assert more <= 6 * max(few, FEW)
