"""Scale up and down on a private real Slurm: gpujobs, dask-jobqueue and one bare array, in turn, as ratios.

Run from the top of a checkout, with the test extras and Slurm installed: ``python benchmarks/scaling.py``. Machines are
noisy: what is printed are ratios of medians of one run, and counts of processes, which are exact.

Aims: 200 pending workers in at most 3 times a bare array's time and one submission; connected never slower than
dask-jobqueue; 10,000 workers rendered and submitted (to commands that do nothing) in under 2 s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.slurm import PrivateSlurm

ROUNDS = 3
OPTIONS = {"dashboard_address": ":0", "host": "127.0.0.1"}


class Bench:
    """A private Slurm whose commands are counted."""

    def __init__(self, folder: Path, slurm: PrivateSlurm) -> None:
        self.slurm, self.calls = slurm, folder / "calls"
        self.site = folder / "site.yaml"
        self.site.write_text(
            "description: benchmark\nscheduler: slurm\npoll: 1s\n"
            "queues: {main: {cpus_per_node: 16, memory_per_node: 60GiB}}\n"
        )
        wrappers = folder / "bin"
        wrappers.mkdir()
        for name in ("sbatch", "squeue", "scancel"):
            real = shutil.which(name, path=slurm.path)
            (wrappers / name).write_text(
                f'#!/bin/sh\necho {name} >> {self.calls}\nexec {real} "$@"\n'
            )
            (wrappers / name).chmod(0o755)
        os.environ.update({**slurm.env, "PATH": f"{wrappers}:{slurm.path}", "HOME": str(folder)})

    def count(self) -> int:
        return len(self.calls.read_text().split()) if self.calls.exists() else 0

    def jobs(self) -> int:
        return len(self.slurm.queue())

    def wait_jobs(self, number: int) -> None:
        while self.jobs() != number:
            time.sleep(0.05)


def ratio(
    runs: list[tuple[float, float, int]], base: list[tuple[float, float, int]], column: int
) -> float:
    return statistics.median(run[column] for run in runs) / statistics.median(
        run[column] for run in base
    )


def cpu() -> float:
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in use)


def measured(bench: Bench, work: Callable[[], None]) -> tuple[float, float, int]:
    """Return wall seconds, CPU seconds of this process and its children, and batch-scheduler processes."""
    calls, used, started = bench.count(), cpu(), time.perf_counter()
    work()
    return time.perf_counter() - started, cpu() - used, bench.count() - calls


@contextlib.contextmanager
def ours(bench: Bench, hold: bool) -> Iterator[object]:
    import gpujobs

    directives = ["--hold"] if hold else []
    cluster = gpujobs.GPUSLURMCluster(
        str(bench.site), gpus_per_job=0, walltime="30m", worker_memory="512MiB", directives=directives, quiet=True,
        scheduler_options=OPTIONS, interface="lo",
    )  # fmt: skip
    try:
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def theirs(bench: Bench, hold: bool) -> Iterator[object]:
    from dask_jobqueue import SLURMCluster

    cluster = SLURMCluster(
        cores=1, memory="512MiB", processes=1, queue="main", walltime="00:30:00", interface="lo",
        python=sys.executable, job_extra_directives=["--hold"] if hold else [], log_directory=str(bench.site.parent),
        scheduler_options={"dashboard_address": ":0"},
    )  # fmt: skip
    try:
        yield cluster
    finally:
        cluster.close()


def pending(bench: Bench, number: int) -> dict[str, list[tuple[float, float, int]]]:
    """Return, for each way, what asking for ``number`` jobs that wait and for none again costs."""
    found: dict[str, list[tuple[float, float, int]]] = {}

    def note(name: str, work: Callable[[], None]) -> None:
        found.setdefault(name, []).append(measured(bench, work))

    bare_ids: list[str] = []

    def bare() -> None:
        command = [
            "sbatch",
            "--parsable",
            "--hold",
            f"--array=0-{number - 1}",
            "--mem=100",
            "--wrap",
            "sleep 1",
        ]
        bare_ids.append(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        )

    for _ in range(ROUNDS):
        note("bare up", bare)
        note("bare down", lambda: subprocess.run(["scancel", bare_ids[-1]], check=True))
        bench.wait_jobs(0)
        with ours(bench, hold=True) as cluster:
            note("gpujobs up", lambda: cluster.scale(number))
            bench.wait_jobs(number)
            note("gpujobs down", lambda: cluster.scale(0))
            bench.wait_jobs(0)
        with theirs(bench, hold=True) as cluster:

            def up() -> None:
                cluster.scale(number)
                while (
                    sum(
                        getattr(worker, "job_id", None) is not None
                        for worker in cluster.workers.values()
                    )
                    < number
                ):
                    time.sleep(0.005)

            def down() -> None:
                cluster.scale(0)
                while cluster.workers:
                    time.sleep(0.005)

            note("dask-jobqueue up", up)
            bench.wait_jobs(number)
            note("dask-jobqueue down", down)
            bench.wait_jobs(0)
    return found


def connected(bench: Bench, number: int) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, way in (("gpujobs", ours), ("dask-jobqueue", theirs)):
            with way(bench, hold=False) as cluster:
                started = time.perf_counter()
                cluster.scale(number)
                cluster.wait_for_workers(number, timeout=120)
                found.setdefault(name, []).append(time.perf_counter() - started)
            bench.wait_jobs(0)
    return {name: statistics.median(values) for name, values in found.items()}


def status_round(bench: Bench) -> None:
    """Print what one look at 1,000 waiting jobs costs, and how often an idle cluster asks."""
    import asyncio

    with ours(bench, hold=True) as cluster:
        cluster.scale(1000)
        bench.wait_jobs(1000)
        cluster._pool.next_poll = float("inf")
        time.sleep(2)

        async def look() -> None:
            cluster._pool.next_poll = 0.0
            await cluster._pool.look(frozenset(), asyncio.Lock())

        runs = [measured(bench, lambda: asyncio.run(look())) for _ in range(ROUNDS)]
        command = ["squeue", "-h", "-o", "%F"]
        bare = [
            measured(bench, lambda: subprocess.run(command, capture_output=True))
            for _ in range(ROUNDS)
        ]
        ratio = statistics.median(run[0] for run in runs) / statistics.median(
            run[0] for run in bare
        )
        print(f"one look at 1,000 jobs: {runs[0][2]} call, {ratio:.1f} x one bare squeue")
        cluster._pool.look_soon()
        time.sleep(30)
        before = bench.count()
        time.sleep(60)
        print(f"an idle cluster asked {bench.count() - before} times in a minute (poll: 1 s)")


def ten_thousand(folder: Path) -> None:
    """Print how long one submission of 10,000 workers takes with commands that do nothing."""
    fake = folder / "fake"
    fake.mkdir()
    (fake / "sbatch").write_text("#!/bin/sh\ncat > /dev/null\necho 1\n")
    (fake / "scontrol").write_text("#!/bin/sh\necho 'MaxArraySize = 20001'\n")
    for path in fake.iterdir():
        path.chmod(0o755)
    site = folder / "huge.yaml"
    site.write_text("description: x\nscheduler: slurm\nqueues: {main: {gpus_per_node: 4}}\n")
    profile = folder / "huge-profile.yaml"
    profile.write_text("gpus: 10000\ngpus_per_job: 1\nwalltime: 1h\n")
    gpujobs = str(Path(sys.executable).parent / "gpujobs")
    env = {**os.environ, "PATH": f"{fake}:{os.environ['PATH']}"}
    for name, command in (("render", "render"), ("submit", "submit")):
        started = time.perf_counter()
        subprocess.run(
            [gpujobs, command, str(profile), "--site", str(site)],
            capture_output=True,
            check=True,
            env=env,
        )
        print(
            f"{name} of 10,000 workers: {'under' if time.perf_counter() - started < 2 else 'OVER'} 2 s"
        )


def main() -> None:
    logging.disable(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory() as name,
        PrivateSlurm(Path(name) / "slurm").running() as slurm,
    ):
        bench = Bench(Path(name), slurm)
        print(f"{'':<26}{'time':>22}{'CPU':>12}{'processes':>12}")
        print(f"{'':<26}{'x bare array':>22}{'x bare':>12}")
        for number in (8, 32, 200):
            found = pending(bench, number)
            for direction in ("up", "down"):
                base = found[f"bare {direction}"]
                for way in ("gpujobs", "dask-jobqueue"):
                    runs = found[f"{way} {direction}"]
                    wall, used = (ratio(runs, base, n) for n in (0, 1))
                    label = f"{way} scale({number if direction == 'up' else 0})"
                    processes = int(statistics.median(run[2] for run in runs))
                    print(f"{label:<26}{wall:>22.1f}{used:>12.1f}{processes:>12}")
        times = connected(bench, 8)
        print(
            f"8 workers connected: gpujobs takes {times['gpujobs'] / times['dask-jobqueue']:.2f} x dask-jobqueue's time"
        )
        status_round(bench)
        ten_thousand(Path(name))


if __name__ == "__main__":
    main()
