"""A start, a `scale` or a `close` of a Python cluster that is interrupted leaves no job, and can be closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed.core import Status

import gpujobs
from gpujobs.clusters.ledger import Ledger
from gpujobs.deploy.cluster import GPUJobQueueCluster

from ..support.processes import patience, until
from ..support.transcripts import SQUEUE_FOUND_HEADER, SQUEUE_HEADER

OPTIONS: dict[str, Any] = {
    "scheduler_options": {"host": "127.0.0.1"}, "network": {"dashboard": "off"}, "quiet": True, "gpus_per_job": 1,
}  # fmt: skip
COMMANDS = {
    "sbatch": """name=$(sed -n 's/^#SBATCH --job-name=//p')
        touch submits
        while [ -e waits ]; do sleep 0.2; done
        [ ! -e interrupts ] || { kill -INT $PPID; sleep 1; }
        [ ! -e refuses ] || { echo "sbatch: error: Invalid account" >&2; exit 1; }
        echo "$name" > queue/1; echo 1""",
    "squeue": f"""case "$*" in *%K*) printf '%s' '{SQUEUE_HEADER}' ;; *) printf '%s' '{SQUEUE_FOUND_HEADER}' ;; esac
        for job in queue/*; do
            [ -e "$job" ] || continue
            case "$*" in *%K*) echo "1|N/A|PENDING||N/A|Priority|$(cat $job)" ;; *) echo "1|$(cat $job)" ;; esac
        done""",
    "scancel": "rm -f queue/1",
}


@pytest.fixture
def queue(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The queue of a batch scheduler that starts no job: a folder with a file for each."""
    programs = home / "bin"
    for folder in (programs, home / "queue"):
        folder.mkdir()
    for name in ("sacct", "sinfo", "scontrol", *COMMANDS):
        (programs / name).write_text(f"#!/bin/bash\ncd {home}\n{COMMANDS.get(name, ':')}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return home / "queue"


def jobs(queue: Path) -> list[str]:
    return [path.read_text().strip() for path in queue.iterdir()]


@pytest.mark.parametrize(
    "options", [{"scheduler": "job"}, {**OPTIONS, "n_workers": 1}], ids=["job", "local"]
)
def test_a_start_that_runs_out_of_time_is_closed(queue: Path, options: dict[str, Any]) -> None:
    started: list[GPUJobQueueCluster] = []

    async def story() -> None:
        cluster = gpujobs.GPUSLURMCluster(
            "./s.yaml", **{"gpus_per_job": 1, "quiet": True, **options}, asynchronous=True
        )
        started.append(cluster)
        limit = asyncio.timeout(patience(60))
        (queue.parent / "waits").touch()
        with pytest.raises(TimeoutError):
            async with limit:
                starting = asyncio.ensure_future(_enter(cluster))
                await asyncio.to_thread(until, (queue.parent / "submits").exists, 30)
                limit.reschedule(0)
                await starting
        (queue.parent / "waits").unlink()

    async def _enter(cluster: GPUJobQueueCluster) -> None:
        async with cluster:
            raise AssertionError("it has started")

    asyncio.run(story())
    (cluster,) = started
    until(lambda: Ledger().get(cluster.id).submissions, 30, "the record of the job")
    until(lambda: not jobs(queue), 30, "the cancel of the job")
    assert (cluster.folder / "ended").exists()
    assert cluster.status == Status.closed and not cluster._lease.is_running()


@pytest.mark.parametrize("steps", [0, 1, 3, 10, 30, 100])
def test_a_close_goes_on_when_who_waits_for_it_is_cancelled(queue: Path, steps: int) -> None:
    async def story() -> None:
        cluster = await gpujobs.GPUSLURMCluster("./s.yaml", asynchronous=True, **OPTIONS)
        await cluster.scale(1)
        assert jobs(queue) == [cluster.id]
        closing = asyncio.ensure_future(cluster._close())
        for _ in range(steps):
            await asyncio.sleep(0)
        closing.cancel()
        # Dask may try for 30 s to connect to what it has closed.
        async with asyncio.timeout(patience(10)):
            await cluster.close()
        assert cluster.status == Status.closed
        await asyncio.to_thread(until, lambda: not jobs(queue), 30)

    asyncio.run(story())


def test_jobs_are_cancelled_while_all_threads_of_the_program_are_busy(queue: Path) -> None:
    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        cluster = await gpujobs.GPUSLURMCluster("./s.yaml", asynchronous=True, **OPTIONS)
        await cluster.scale(1)
        goes_on = threading.Event()
        blocked = asyncio.ensure_future(asyncio.to_thread(goes_on.wait, patience(60)))
        closing = asyncio.ensure_future(cluster._close())
        while jobs(queue):
            await asyncio.sleep(0.1)
        goes_on.set()
        assert await blocked
        await closing

    asyncio.run(story())


def make(queue: Path) -> None:
    gpujobs.GPUSLURMCluster("./s.yaml", n_workers=1, **OPTIONS)


def scale(queue: Path) -> None:
    (queue.parent / "interrupts").rename(queue.parent / "later")
    with gpujobs.GPUSLURMCluster("./s.yaml", **OPTIONS) as cluster:
        (queue.parent / "later").rename(queue.parent / "interrupts")
        cluster.scale(1)


@pytest.mark.parametrize("action", [make, scale])
def test_ctrl_c_while_a_job_is_submitted_leaves_no_job(
    queue: Path, action: Callable[[Path], None]
) -> None:
    """The batch scheduler accepts it a second later: it is known, and is cancelled then."""
    (queue.parent / "interrupts").touch()
    with pytest.raises(KeyboardInterrupt):
        action(queue)
    (record,) = Ledger().all()
    until(lambda: Ledger().get(record.id).submissions, 30, "the record of the job")
    until(lambda: not jobs(queue), 30, "the cancel of the job")
    assert (record.path / "ended").exists()


def test_ctrl_c_before_a_job_is_refused_leaves_a_record_that_is_finished(queue: Path) -> None:
    for name in ("interrupts", "refuses"):
        (queue.parent / name).touch()
    with pytest.raises(KeyboardInterrupt):
        make(queue)
    until(lambda: all(record.finished for record in Ledger().all()), 30, "the end of the record")
