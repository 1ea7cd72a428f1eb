"""Compare how gpujobs, dask-jobqueue and a bare job array scale up and down on a real Slurm.

Run ``python benchmarks/scaling.py`` at the top of a checkout, with the test extras and Slurm's
packages installed. Machines are noisy: times are printed as ratios of medians of one run; counts of
processes are exact.

Aims: 200 pending workers in at most 3 times the time of a bare array, with one submission; workers
connect at least as fast as with dask-jobqueue; 10,000 workers are rendered and submitted (to
commands that do nothing) in under 2 s.
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

from distributed import SpecCluster

from tests.support.slurm import PrivateSlurm

ROUNDS = 3
Cost = tuple[float, float, int]
"""Wall seconds, CPU seconds, and processes of the batch scheduler's commands."""
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
            script = f'#!/bin/sh\necho {name} >> {self.calls}\nexec {real} "$@"\n'
            (wrappers / name).write_text(script)
            (wrappers / name).chmod(0o755)
        os.environ.update({**slurm.env, "PATH": f"{wrappers}:{slurm.path}", "HOME": str(folder)})

    def count(self) -> int:
        return len(self.calls.read_text().split()) if self.calls.exists() else 0

    def jobs(self) -> int:
        return len(self.slurm.queue())

    def wait_jobs(self, number: int) -> None:
        while self.jobs() != number:
            time.sleep(0.05)


def ratio(runs: list[Cost], base: list[Cost], column: int) -> float:
    medians = [statistics.median(run[column] for run in values) for values in (runs, base)]
    return medians[0] / medians[1]


def cpu() -> float:
    use = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in use)


def measured(bench: Bench, work: Callable[[], object]) -> Cost:
    """Return the cost of ``work``; CPU seconds are of this process and its children."""
    calls, used, started = bench.count(), cpu(), time.perf_counter()
    work()
    return time.perf_counter() - started, cpu() - used, bench.count() - calls


@contextlib.contextmanager
def ours(bench: Bench, hold: bool) -> Iterator[SpecCluster]:
    import gpujobs

    directives = ["--hold"] if hold else []
    cluster = gpujobs.GPUSLURMCluster(
        str(bench.site),
        gpus_per_job=0,
        walltime="30m",
        worker_memory="512MiB",
        directives=directives,
        quiet=True,
        scheduler_options=OPTIONS,
        interface="lo",
    )
    try:
        yield cluster
    finally:
        cluster.close()


@contextlib.contextmanager
def theirs(bench: Bench, hold: bool) -> Iterator[SpecCluster]:
    from dask_jobqueue import SLURMCluster

    cluster = SLURMCluster(
        cores=1,
        memory="512MiB",
        processes=1,
        queue="main",
        walltime="00:30:00",
        interface="lo",
        python=sys.executable,
        job_extra_directives=["--hold"] if hold else [],
        log_directory=str(bench.site.parent),
        scheduler_options={"dashboard_address": ":0"},
    )
    try:
        yield cluster
    finally:
        cluster.close()


def pending(bench: Bench, number: int) -> dict[str, list[Cost]]:
    """Return the costs of scaling to ``number`` pending jobs and back to none, for each way."""
    found: dict[str, list[Cost]] = {}

    def note(name: str, work: Callable[[], object]) -> None:
        found.setdefault(name, []).append(measured(bench, work))

    bare_ids: list[str] = []

    def bare() -> None:
        options = ["--parsable", "--hold", f"--array=0-{number - 1}", "--mem=100"]
        command = ["sbatch", *options, "--wrap", "sleep 1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        bare_ids.append(done.stdout.strip())

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
                while submitted(cluster) < number:
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


def submitted(cluster: SpecCluster) -> int:
    """Return the number of dask-jobqueue's jobs that have an id."""
    ids = [getattr(worker, "job_id", None) for worker in cluster.workers.values()]
    return sum(job is not None for job in ids)


def connected(bench: Bench, number: int) -> dict[str, float]:
    """Return the median seconds until ``number`` workers are connected, for each way."""
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
    """Print the cost of one report on 1,000 pending jobs, and the queries of an idle cluster."""
    from gpujobs.clusters.ledger import Ledger
    from gpujobs.clusters.monitor import ClusterMonitor

    with ours(bench, hold=True) as cluster:
        cluster.scale(1000)
        bench.wait_jobs(1000)
        record, ledger = cluster._pool.record, Ledger()
        cluster._pool.monitor._next_query = float("inf")  # only the reports below query
        time.sleep(2)
        runs = [measured(bench, ClusterMonitor([record], ledger).report) for _ in range(ROUNDS)]
        command = ["squeue", "-h", "-o", "%F"]
        bare = [
            measured(bench, lambda: subprocess.run(command, capture_output=True))
            for _ in range(ROUNDS)
        ]
        times = ratio(runs, bare, 0)
        print(f"one report on 1,000 jobs: {runs[0][2]} query, {times:.1f} x one bare squeue")
        cluster._pool.query_soon()
        time.sleep(30)
        before = bench.count()
        time.sleep(60)
        print(f"queries of an idle cluster in a minute: {bench.count() - before} (poll: 1 s)")


def ten_thousand(folder: Path) -> None:
    """Print whether 10,000 workers are submitted in time, with commands that do nothing."""
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
    for command in ("render", "submit"):
        argv = [gpujobs, command, str(profile), "--site", str(site)]
        started = time.perf_counter()
        subprocess.run(argv, capture_output=True, check=True, env=env)
        result = "under" if time.perf_counter() - started < 2 else "OVER"
        print(f"{command} of 10,000 workers: {result} 2 s")


def print_pending(bench: Bench, number: int) -> None:
    """Print two rows for each direction: gpujobs and dask-jobqueue."""
    found = pending(bench, number)
    for direction, target in (("up", number), ("down", 0)):
        for way in ("gpujobs", "dask-jobqueue"):
            runs, base = found[f"{way} {direction}"], found[f"bare {direction}"]
            processes = int(statistics.median(run[2] for run in runs))
            label = f"{way} scale({target})"
            wall, used = ratio(runs, base, 0), ratio(runs, base, 1)
            print(f"{label:<26}{wall:>22.1f}{used:>12.1f}{processes:>12}")


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
            print_pending(bench, number)
        times = connected(bench, 8)
        slower = times["gpujobs"] / times["dask-jobqueue"]
        print(f"8 workers connected: gpujobs takes {slower:.2f} x dask-jobqueue's time")
        status_round(bench)
        ten_thousand(Path(name))


if __name__ == "__main__":
    main()
