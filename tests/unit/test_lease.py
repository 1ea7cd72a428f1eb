"""The sign of life of a Python process that owns a cluster."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpujobs

from ..support.processes import patience


def test_blocking_calls_of_the_program_do_not_delay_the_lease(home: Path) -> None:
    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        options = {"host": "127.0.0.1"}
        cluster = await gpujobs.GPUSLURMCluster(
            "./s.yaml", asynchronous=True, quiet=True, scheduler_options=options, network={"dashboard": "off"}
        )  # fmt: skip
        (cluster.folder / "lease").unlink()
        goes_on = threading.Event()
        blocked = asyncio.ensure_future(asyncio.to_thread(goes_on.wait, patience(60)))
        async with asyncio.timeout(patience(30)):
            await cluster._renew_lease()
        assert (cluster.folder / "lease").exists()
        goes_on.set()
        assert await blocked
        await cluster.close()
        await cluster._renew_lease()  # at the exit of Python it has no thread, and says nothing

    asyncio.run(story())
