"""Workers of a Python process's cluster reach their walltime while tasks run, on real batch schedulers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..support.backend import Backend, SlurmBackend
from ..support.processes import patience, until
from .test_python_everywhere import make  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

KEPT = 12
"""Results of a megabyte that stay on the workers."""
SECONDS = 3.0
"""Duration of a task that runs while its worker retires, on a machine that is not busy."""


class Program:
    """Tasks that note each of their executions in a file of ``folder``: their name and their worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def task(self, name: str, seconds: float) -> Callable[[], bytes]:
        """Return a task of this name; its result is different each time that it is computed."""
        path = str(self.folder / name)

        def work() -> bytes:  # local: the workers need not import this module
            import os
            import time
            from pathlib import Path

            from distributed import get_worker

            with Path(path).open("a") as file:
                file.write(f"{get_worker().name}\n")
            time.sleep(seconds)
            return path.encode() + os.urandom(10**6)

        return work

    def executions(self, name: str) -> list[str]:
        """Return the worker of each execution of a task."""
        return (self.folder / name).read_text().split()

    def is_result(self, name: str, result: bytes) -> bool:
        """Return whether a result is one of this task."""
        path = str(self.folder / name).encode()
        return result.startswith(path) and len(result) == len(path) + 10**6


def times(backend: SlurmBackend, job: str) -> dict[str, float]:
    """Return when a job was submitted and when it ended, in epoch seconds, as Slurm reports it."""
    text = backend.slurm.command("scontrol", "show", "job", job)
    found = re.findall(r"\b(SubmitTime|EndTime)=(\S+)", text)
    return {name: time.mktime(time.strptime(value, "%Y-%m-%dT%H:%M:%S")) for name, value in found}


@pytest.mark.waits
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("backend", "walltime"),
    [("slurm", 61), ("sge", 120)],
    indirect=["backend"],
    ids=["slurm", "sge"],
)
def test_workers_retire_while_tasks_run(
    make: Callable[..., Any],
    backend: Backend,
    home: Path,
    walltime: int,
) -> None:
    """No result is computed again, and no task starts twice: a worker ends its tasks before it leaves.

    The third job starts later, so that there is a worker that takes the data even if the machine is
    busy.
    """
    # They leave a tenth of it before. Slurm itself counts two minutes of 61 s, so that workers that
    # start slowly have more time; Grid Engine counts seconds.
    walltime, seconds = round(patience(walltime)), patience(SECONDS)
    cluster = make(gpus_per_job=1, walltime=f"{walltime}s")
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(60))
    program = Program(home / "executions")
    with cluster.get_client() as client:
        kept = {
            name: client.submit(program.task(name, 0.0), key=name)
            for name in (f"kept-{n}" for n in range(KEPT))
        }
        before = client.gather(kept)
        running: dict[str, Any] = {}
        overlaps: set[int] = set()

        def ended(count: int) -> bool:
            """Keep two tasks for each worker; return whether the first jobs have ended."""
            waiting = sum(not future.done() for future in running.values())
            for number in range(len(running), len(running) + 6 - waiting):
                name = f"running-{number}"
                running[name] = client.submit(program.task(name, seconds), key=name)
            jobs = {job["number"]: job["phase"] for job in cluster.jobs}
            overlaps.update(n for n in jobs if jobs.get(n - 3, "ENDED") != "ENDED")
            return all(jobs.get(n) == "ENDED" for n in range(count))

        started = time.monotonic()
        until(lambda: ended(0) and time.monotonic() - started > 12, 60, "some tasks")
        cluster.scale(3)
        until(lambda: ended(3), walltime + 90, "the end of the first jobs", every=1.0)
        assert client.gather(kept) == before
        results = client.gather(running)  # KilledWorker would be raised here
    assert all(program.is_result(name, result) for name, result in results.items())
    assert {name: len(program.executions(name)) for name in kept} == dict.fromkeys(kept, 1)
    assert {name: len(program.executions(name)) for name in running} == dict.fromkeys(running, 1)
    assert overlaps >= {3, 4, 5}  # each successor comes before its predecessor has ended
    if not isinstance(backend, SlurmBackend):
        return
    jobs = sorted(cluster.jobs, key=lambda job: job["number"])
    for first, successor in zip(jobs[:3], jobs[3:6], strict=True):
        assert (
            times(backend, successor["id"])["SubmitTime"] < times(backend, first["id"])["EndTime"]
        )
