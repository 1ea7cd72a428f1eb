"""Measure what it costs to start the workers of a job: file opens, CPU seconds, and time.

Run ``python benchmarks/workers.py [--rounds N]`` at the top of a checkout, with the test extras,
Slurm's packages and strace installed. All clusters run on a private Slurm; GPUs are emulated, and
NVML is a fake. The ways alternate, and their medians are compared.

CPU seconds and file opens are those of all processes of a job, from its first Python process to the
moment at which all workers are connected. They are counted in separate runs, because strace costs
CPU time.

Aims: jobs of 4 and 8 workers need at most half of dask-jobqueue's file opens and CPU seconds;
32 jobs of one worker are connected in at most 0.9 of dask-jobqueue's time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from distributed import LocalCluster, SpecCluster

from tests.support.backend import FAKE_GPUS
from tests.support.slurm import PrivateSlurm

LARGE = ("nvidia", "cuda", "mypy", "pip", "pandas", "bokeh")
"""Packages that CPU workers do not need."""
GPUS = 8
"""Emulated GPUs of each node."""
SETUP = f"{FAKE_GPUS} FAKE_NVML_GPUS={GPUS}"
TICKS = os.sysconf("SC_CLK_TCK")
OPEN = re.compile(rb"\bopen(?:at)?\(")
TRACE = "strace -f -qq -e trace=open,openat -o"


class Cost(NamedTuple):
    """The cost of connecting all workers."""

    seconds: float
    cpu: float
    opens: int


Way = Callable[[str], AbstractContextManager[SpecCluster]]
"""Returns a cluster without workers, whose jobs run this Python."""


class Bench:
    """A private Slurm, its site file, and a Python that counts its file opens."""

    def __init__(self, folder: Path, slurm: PrivateSlurm) -> None:
        self.folder, self.slurm = folder, slurm
        self.traces = folder / "traces"
        self.traces.mkdir()
        shape = "cpus_per_node: 64, memory_per_node: 60GiB"
        self.site = folder / "site.yaml"
        self.site.write_text(
            f"description: benchmark\nscheduler: slurm\npoll: 1s\nsetup: {SETUP}\n"
            f"queues:\n  gpu: {{name: main, gpus_per_node: {GPUS}, {shape}}}\n"
            f"  main: {{{shape}}}\n"
        )
        self.traced = folder / "python"
        self.traced.write_text(
            "#!/bin/bash\n"
            f'[ -z "$TRACED" ] || exec {sys.executable} "$@"\n'
            f'TRACED=1 exec {TRACE} {self.traces}/$$ {sys.executable} "$@"\n'
        )
        self.traced.chmod(0o755)
        os.environ.update({**slurm.env, "HOME": str(folder)})

    def opens(self, folder: str = "") -> int:
        """Return the number of file opens of all traced processes, or those below ``folder``."""
        pattern = re.compile(OPEN.pattern + (rb'[^"]*"' + os.fsencode(folder) if folder else b""))
        return sum(len(pattern.findall(path.read_bytes())) for path in self.traces.iterdir())

    def wait_until_idle(self) -> None:
        """Wait until no job is left."""
        while self.slurm.queue():
            time.sleep(0.1)


def job_cpu(bench: Bench) -> float:
    """Return the CPU seconds of all processes of jobs, and of their children that have exited."""
    found, mark = 0, f"SLURM_CONF={bench.slurm.conf}".encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if not process.name.isdigit():
                continue
            environ = (process / "environ").read_bytes()
            if mark in environ and b"SLURM_JOB_ID=" in environ:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                found += sum(int(ticks) for ticks in fields[11:15])
    return found / TICKS


@contextlib.contextmanager
def ours(bench: Bench, python: str | None, **keywords: Any) -> Iterator[SpecCluster]:
    """A cluster of gpujobs."""
    import gpujobs

    options = {"dashboard_address": ":0", "host": "127.0.0.1"}
    if python:
        keywords["python"] = python
    with gpujobs.GPUSLURMCluster(
        str(bench.site), walltime="30m", worker_memory="512MiB", quiet=True,
        scheduler_options=options, interface="lo", **keywords,
    ) as cluster:  # fmt: skip
        yield cluster


@contextlib.contextmanager
def theirs(bench: Bench, python: str, *, workers: int) -> Iterator[SpecCluster]:
    """A cluster of dask-jobqueue, with this number of workers in each job."""
    from dask_jobqueue import SLURMCluster

    with SLURMCluster(
        cores=workers, processes=workers, memory=f"{workers * 512}MiB", queue="main",
        walltime="00:30:00", interface="lo", python=python, log_directory=str(bench.folder),
        scheduler_options={"dashboard_address": ":0"},
    ) as cluster:  # fmt: skip
        yield cluster


class CudaJob(LocalCluster):  # type: ignore[misc]
    """A cluster with one job: dask-cuda's command, written by hand."""

    command = ""

    def scale(self, number: int) -> None:
        """Submit the job. It ends with its cluster."""
        command = f"{self.command} {self.scheduler_address}"
        options = ["--parsable", f"--gres=gpu:{number}", "--mem=8000", "--output=/dev/null"]
        subprocess.run(["sbatch", *options, "--wrap", command], check=True, capture_output=True)


@contextlib.contextmanager
def dask_cuda(bench: Bench, python: str) -> Iterator[SpecCluster]:
    """A cluster whose workers are those of `dask cuda worker`."""
    words = [python, "-m", "dask_cuda.cli", "--nthreads=1", "--memory-limit=512MiB"]
    words += ["--no-dashboard", f"--local-directory={bench.folder}", "--death-timeout=60"]
    with CudaJob(n_workers=0, dashboard_address=":0", host="127.0.0.1") as cluster:
        cluster.command = f"{SETUP}; {shlex.join(words)}"
        yield cluster


def measured(bench: Bench, way: Way, *, workers: int, traced: bool) -> Cost:
    """Start ``workers`` workers, and return the cost until they are connected."""
    shutil.rmtree(bench.traces)
    bench.traces.mkdir()
    with way(str(bench.traced) if traced else sys.executable) as cluster:
        started = time.perf_counter()
        cluster.scale(workers)
        while len(cluster.scheduler.workers) < workers:
            if time.perf_counter() - started > 300:
                raise TimeoutError(f"{len(cluster.scheduler.workers)} of {workers} workers")
            time.sleep(0.02)
        cost = Cost(time.perf_counter() - started, job_cpu(bench), bench.opens())
    bench.wait_until_idle()
    return cost


def compare(bench: Bench, ways: dict[str, Way], *, workers: int, rounds: int) -> None:
    """Print the costs of all ways, and their ratios to the last one."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            costs[name].append(measured(bench, way, workers=workers, traced=False))
    opens = {
        name: measured(bench, way, workers=workers, traced=True).opens for name, way in ways.items()
    }
    rows = {
        name: (
            statistics.median(cost.seconds for cost in costs[name]),
            statistics.median(cost.cpu for cost in costs[name]),
            opens[name],
        )
        for name in ways
    }
    base = rows[next(reversed(ways))]
    for name, row in rows.items():
        ratios = [value / reference for value, reference in zip(row, base, strict=True)]
        columns = "".join(f"{ratio:>8.2f}" for ratio in ratios)
        each = f"{row[1] / workers:>14.2f}{row[2] / workers:>14.0f}"
        print(f"{name:<44}{columns}{each}", flush=True)


# -- staging ---------------------------------------------------------------------------------------
def print_staging(bench: Bench) -> None:
    """Compare the file opens of four jobs of a node below the shared environment and its copy."""
    shared, copies = bench.folder / "shared", bench.folder / "scratch"
    make_environment(shared / "environment", bench.traces)
    tarball = shared / "environment.tar"
    subprocess.run(["tar", "-cf", tarball, "-C", shared / "environment", "."], check=True)
    site = bench.site.read_text()
    staging = f"environment: {{staging: {tarball}, staging_folder: {copies}}}\n"
    bench.traced.write_text(f'#!/bin/sh\nexec {shared}/environment/bin/python "$@"\n')
    for name, text, python in (
        ("shared environment", site, str(bench.traced)),
        ("unpacked by these jobs", site + staging, None),
        ("unpacked before", site + staging, None),
    ):
        bench.site.write_text(text)
        way = functools.partial(ours, bench, gpus_per_job=0)
        measured(bench, lambda _: way(python), workers=4, traced=True)  # noqa: B023
        shown = [bench.opens(str(folder)) for folder in (shared, copies)]
        print(f"{name:<44}{shown[0]:>8} shared{shown[1]:>8} local", flush=True)


def make_environment(folder: Path, traces: Path) -> None:
    """Copy this Python and its packages, without the large ones, to a relocatable folder."""
    version = f"python3.{sys.version_info.minor}"
    base, library = Path(sys.base_prefix), folder / "lib" / version
    (folder / "bin").mkdir(parents=True)
    shutil.copy(base / "bin" / version, folder / "bin" / "real-python")
    leave_out = shutil.ignore_patterns("site-packages", "test", "config-*")
    shutil.copytree(base / "lib" / version, library, ignore=leave_out)
    for path in base.glob("lib/libpython*"):
        shutil.copy(path, folder / "lib")
    for path in (Path(sys.prefix) / "lib" / version / "site-packages").iterdir():
        if path.is_dir() and not path.name.startswith(LARGE):
            shutil.copytree(path, library / "site-packages" / path.name)
    python = folder / "bin" / "python"
    python.write_text(
        '#!/bin/bash\nroot=$(cd "$(dirname "$0")/.." && pwd)\n'
        "export LD_LIBRARY_PATH=$root/lib PYTHONHOME=$root\n"
        '[ -z "$TRACED" ] || exec "$root/bin/real-python" "$@"\n'
        f'TRACED=1 exec {TRACE} {traces}/$$ "$root/bin/real-python" "$@"\n'
    )
    python.chmod(0o755)


# -- one allocation of several nodes, and as many jobs of an array ---------------------------------
def compare_nodes(folder: Path, nodes: int, rounds: int) -> None:
    """Print the costs of an allocation with a worker on each node, and their ratios to an array."""
    with PrivateSlurm(folder / "slurm", nodes=nodes, gpus=1, cpus=4).running() as slurm:
        bench = Bench(folder, slurm)
        queues = "{main: {gpus_per_node: 1, cpus_per_node: 4, memory_per_node: 4GiB}}"
        bench.site.write_text(
            f"description: benchmark\nscheduler: slurm\nsetup: {SETUP}\nqueues: {queues}\n"
        )
        costs: dict[str, list[Cost]] = {"allocation": [], "workers": []}
        for _ in range(rounds):
            for layout, found in costs.items():
                found.append(submitted(bench, nodes, layout))
                print(layout, found[-1], flush=True)
    rows = [
        [statistics.median(column) for column in zip(*runs, strict=True)] for runs in costs.values()
    ]
    ratios = [value / reference for value, reference in zip(*rows, strict=True) if reference]
    print(f"{nodes} nodes, an allocation: time {ratios[0]:.2f}, CPU {ratios[1]:.2f} of an array's")


def submitted(bench: Bench, nodes: int, layout: str) -> Cost:
    """Submit a cluster with a worker on each node; return the cost until they are connected."""
    from gpujobs.injob.events import EventReader, events_file

    profile = bench.folder / "nodes.yaml"
    profile.write_text(f"layout: {layout}\ngpus: {nodes}\nwalltime: 10m\n")
    command = [str(Path(sys.executable).parent / "gpujobs")]
    started = time.perf_counter()
    words = [*command, "submit", str(profile), "--site", str(bench.site)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    cluster = done.stdout.strip()
    events = EventReader(bench.folder / ".gpujobs" / cluster / events_file(1))
    while len(events.read().connected) < nodes:
        if time.perf_counter() - started > 300:
            raise TimeoutError(f"{len(events.read().connected)} of {nodes} workers")
        time.sleep(0.05)
    cost = Cost(time.perf_counter() - started, job_cpu(bench), 0)
    subprocess.run([*command, "cancel", cluster], capture_output=True, check=True)
    bench.wait_until_idle()
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what starting workers costs.")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each way")
    parser.add_argument("--sizes", default="1,4,8", help="workers of a job")
    parser.add_argument("--jobs", default="16,32", help="numbers of jobs of one worker")
    parser.add_argument("--staging", action="store_true", help="count opens with staging instead")
    parser.add_argument("--nodes", type=int, help="compare an allocation of so many nodes instead")
    options = parser.parse_args()
    if options.nodes:
        with tempfile.TemporaryDirectory() as name:
            return compare_nodes(Path(name), options.nodes, options.rounds)
    logging.disable(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory() as name,
        PrivateSlurm(Path(name) / "slurm", gpus=GPUS, cpus=64).running() as slurm,
    ):
        bench = Bench(Path(name), slurm)
        if options.staging:
            print_staging(bench)
            return
        print(f"{'':<44}{'time':>8}{'CPU':>8}{'opens':>8}{'CPU s/worker':>14}{'opens/worker':>14}")
        for size in map(int, filter(None, options.sizes.split(","))):
            print_sizes(bench, size, options.rounds)
        for number in map(int, filter(None, options.jobs.split(","))):
            print(f"{number} jobs of one worker:")
            ways = {"gpujobs": cpu_jobs(bench), "dask-jobqueue": jobqueue(bench, 1)}
            compare(bench, ways, workers=number, rounds=options.rounds)


def cpu_jobs(bench: Bench) -> Way:
    return functools.partial(ours, bench, gpus_per_job=0)


def jobqueue(bench: Bench, workers: int) -> Way:
    return functools.partial(theirs, bench, workers=workers)


def print_sizes(bench: Bench, size: int, rounds: int) -> None:
    """Compare one job of ``size`` workers."""
    print(f"one job of {size} workers:")
    cuda = functools.partial(ours, bench, gpus_per_job=size)
    ways: dict[str, Way] = {
        "gpujobs, CUDA workers": cuda,
        "dask cuda worker": functools.partial(dask_cuda, bench),
        "gpujobs, plain workers with a GPU": functools.partial(cuda, worker_class="nanny"),
        "gpujobs, CPU workers": cpu_jobs(bench),
        "dask-jobqueue": jobqueue(bench, size),
    }
    if size > 1:
        del ways["gpujobs, CPU workers"]  # a job has one
    compare(bench, ways, workers=size, rounds=rounds)


if __name__ == "__main__":
    main()
