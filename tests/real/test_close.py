"""`close` of a cluster that a Python process owns is quick and prints nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import slow_variant, unavailable
from ..support import mpi
from ..support.owner import backend, site  # noqa: F401
from ..support.processes import NO_TIMEOUT, run, until
from ..support.screen import Screen

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]

MOST_IMPORTS = 4
"""How much longer than `import distributed`, which takes 0.8 s on a machine that is not busy: 3 s."""

PROGRAM = """
import asyncio, contextlib, subprocess, sys, time
import gpujobs
from distributed import Client

keywords, workers = KEYWORDS, WORKERS

def report(seconds):
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import distributed"], check=True)
    print("closed after", f"{seconds:.2f} s, import: {time.monotonic() - started:.2f} s", flush=True)

def blocking(clients):
    cluster = gpujobs.CLASS(**keywords)
    SCALE
    opened = [Client(cluster) for _ in range(clients)]
    cluster.wait_for_workers(workers)
    assert all(client.submit(sum, [1, 2]).result() == 3 for client in opened)
    started = time.monotonic()
    cluster.close()
    report(time.monotonic() - started)

async def busy(client):
    while client.status == "running":
        client.submit(abs, 1, pure=False)
        await asyncio.sleep(0)

async def awaited(clients):
    cluster = await gpujobs.CLASS(asynchronous=True, **keywords)
    await cluster.scale(workers)
    opened = [await Client(cluster, asynchronous=True) for _ in range(clients)]
    await cluster.wait_for_workers(workers)
    for client in opened:
        assert await client.submit(sum, [1, 2]) == 3
    sending = [asyncio.ensure_future(busy(client)) for client in opened]
    started = time.monotonic()
    await cluster.close()
    await asyncio.gather(*sending)
    report(time.monotonic() - started)

if __name__ == "__main__":
    for clients in (0, 2):
        MODE
        time.sleep(2)  # for what comes late
"""
"""Closes a cluster without clients and one with two."""

PREP = {"gpus": 0, "queue": "cpu", "workers": {"threads": 1}}
SCALES = {
    "groups": "cluster.scale(gpu=2, prep=1)",
    "adapt": "cluster.adapt(minimum=1, maximum=2)",
    "layout": "pass",  # its allocation is made at once
}


@pytest.mark.parametrize(
    ("keywords", "workers"),
    [
        ({}, 1),
        slow_variant({"scheduler": "job"}, 1),
        slow_variant({"groups": {"gpu": {"gpus_per_job": 2}, "prep": PREP}}, 3),
        slow_variant({"adapt": True}, 1),
        slow_variant({"asynchronous": True}, 1),
        slow_variant({"asynchronous": True, "scheduler": "job"}, 1),
        slow_variant({"layout": "mpi", "n_workers": 4}, 4),
        slow_variant({"layout": "mpi", "n_workers": 4, "scheduler": "job"}, 4),
        slow_variant({"gpus_per_job": 0}, 2),
    ],
    ids=["local", "job", "groups", "adapt", "asynchronous", "asynchronous-job", "mpi", "mpi-job", "GPULocalCluster"],
)  # fmt: skip
def test_close_is_quick_and_silent(
    site: Callable[..., str],
    home: Path,
    keywords: dict[str, object],
    workers: int,
) -> None:
    if "layout" in keywords and (why := mpi.missing()):
        unavailable("slurm", why)
    keywords = {"worker_memory": "1GiB", "quiet": True, **keywords}
    name, mode = "GPUSLURMCluster", "blocking(clients)"
    if keywords.pop("asynchronous", False):
        mode = "asyncio.run(awaited(clients))"
    scale = next((SCALES[name] for name in SCALES if name in keywords), "cluster.scale(workers)")
    keywords.pop("adapt", None)
    if keywords.get("scheduler") != "job":
        keywords["scheduler_options"] = {"dashboard_address": ":0"}
    if "gpus_per_job" in keywords:
        name = "GPULocalCluster"
    else:
        keywords["site"] = site(mpi=mpi.LAUNCHERS["mpirun"])
    replaced = {"KEYWORDS": repr(keywords), "WORKERS": str(workers), "CLASS": name, "SCALE": scale, "MODE": mode}  # fmt: skip
    text = PROGRAM
    for word, value in replaced.items():
        text = text.replace(word, value)
    script = home / "closes.py"
    script.write_text(text)
    screen = Screen(sys.executable, str(script), cwd=home)
    try:
        until(lambda: screen.read() is not None and screen.process.poll() is not None, 180)
        lines = screen.read().splitlines()
    finally:
        screen.close()
    print(lines)
    assert all(line.startswith("closed after") for line in lines) and len(lines) == 2, lines
    times = [(float(line.split()[2]), float(line.split()[5])) for line in lines]
    assert max(close for close, _ in times) < NO_TIMEOUT
    assert min(close / usual for close, usual in times) < MOST_IMPORTS, lines


SLOW_CLIENT = """
import gpujobs

if __name__ == "__main__":
    cluster = gpujobs.GPULocalCluster(gpus_per_job=0, dashboard_address=None)
    client = cluster.get_client()
    cluster.close()
    print(client.status)
"""
TEARDOWN = """
import asyncio
async def dask_teardown(client):
    await asyncio.sleep(3)
"""


def test_a_client_that_closes_slowly_is_not_left_half_closed(home: Path) -> None:
    """With many workers it takes seconds, and a half-closed one waits for a minute at the exit."""
    preload = home / "slow.py"
    preload.write_text(TEARDOWN)
    (home / "program.py").write_text(SLOW_CLIENT)
    own = {"HOME": str(home), "DASK_DISTRIBUTED__CLIENT__PRELOAD": str(preload)}
    done = run([sys.executable, "program.py"], env={**os.environ, **own}, cwd=home)
    assert (done.stdout, done.stderr) == ("closed\n", "")
