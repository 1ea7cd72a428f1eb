"""Compare what gpujobs and dask-jobqueue lose at the walltime of their jobs, on a real Slurm.

Run ``python benchmarks/walltime.py`` at the top of a checkout, with the test extras and Slurm's
packages installed. Both have four jobs of three minutes at a time, and the same 120 tasks of 20
seconds. They run side by side, in two processes. dask-jobqueue has the options that its
documentation names for walltimes: ``--lifetime`` with a stagger, and `adapt`. Printed are:

- ``starts``: of tasks; more than tasks: some were computed again;
- ``lost``: seconds of work that were computed again;
- ``idle``: seconds between the end of the last task of a worker and the end of the worker, of those
  that ended before the program: the median and the most;
- ``workers``: seconds for which workers were connected, in all; those of successors, too, that
  overlap with the jobs before them;
- ``seconds``: of the program.

``--tasks``, ``--task-seconds`` and ``--minutes`` change the sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

JOBS = 4
OPTIONS = {"dashboard_address": ":0", "host": "127.0.0.1"}
EARLY, STAGGER = 1 / 12, 1 / 15
"""Parts of the walltime: 55 minutes of an hour, with a stagger of 4, as dask-jobqueue documents."""
FAILURES = 100
"""Workers with which a task may be lost. With dask's default of 3, the program may fail."""


# -- one of both -----------------------------------------------------------------------------------
def task_of(path: str, seconds: float) -> Callable[[int], int]:
    """Return a task that notes its start and its end: number, worker, time."""

    def work(number: int) -> int:  # local: workers need not import this module
        import json
        import time
        from pathlib import Path

        from distributed import get_worker

        def note(event: str) -> None:
            line = [event, number, get_worker().address, time.time()]  # names come again
            with Path(path).open("a") as file:
                file.write(f"{json.dumps(line)}\n")

        note("start")
        time.sleep(seconds)
        note("end")
        return number * number

    return work


def ours(folder: Path, minutes: int) -> Any:
    import gpujobs

    cluster = gpujobs.GPUSLURMCluster(
        str(folder / "site.yaml"),
        gpus_per_job=0,
        walltime=f"{minutes}m",
        worker_memory="512MiB",
        cpus_per_job=1,
        quiet=True,
        scheduler_options=OPTIONS,
        interface="lo",
    )
    cluster.scale(JOBS)
    return cluster


def theirs(folder: Path, minutes: int) -> Any:
    from dask_jobqueue import SLURMCluster

    walltime = 60 * minutes
    lifetime, stagger = round(walltime * (1 - EARLY)), round(walltime * STAGGER)
    words = ["--lifetime", f"{lifetime}s", "--lifetime-stagger", f"{stagger}s"]
    cluster = SLURMCluster(
        cores=1,
        memory="512MiB",
        processes=1,
        queue="main",
        walltime=f"00:{minutes:02}:00",
        interface="lo",
        python=sys.executable,
        worker_extra_args=words,
        log_directory=str(folder),
        scheduler_options={"dashboard_address": ":0"},
    )
    cluster.adapt(minimum=JOBS, maximum=JOBS)
    return cluster


class Watch(threading.Thread):
    """Notes when each worker was last connected."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.last: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            workers = list(self.cluster.scheduler.workers.values())
            self.last.update({state.address: time.time() for state in workers})
            self.first = {**self.last, **self.first}
            time.sleep(0.2)


def measure(way: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the program in one way; return its figures."""
    path = folder / f"{way}.jsonl"
    make = ours if way == "gpujobs" else theirs
    began = time.time()
    with make(folder, arguments.minutes) as cluster, cluster.get_client() as client:
        watch = Watch(cluster)
        watch.start()
        task = task_of(str(path), arguments.task_seconds)
        futures = client.map(task, range(arguments.tasks), pure=False)
        right = client.gather(futures) == [number**2 for number in range(arguments.tasks)]
        done = time.time()
        watch.stopped = True
    connected = sum(at - watch.first[name] for name, at in watch.last.items())
    found = {**figures(path, watch.last, done), "right": right}
    return {**found, "workers": round(connected), "seconds": round(done - began)}


def figures(path: Path, last: dict[str, float], done: float) -> dict[str, Any]:
    """Return the figures of a program from the lines of its tasks."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    starts = {(number, worker): at for event, number, worker, at in lines if event == "start"}
    ends = {(number, worker): at for event, number, worker, at in lines if event == "end"}
    lost = [last[key[1]] - at for key, at in starts.items() if key not in ends and key[1] in last]
    busy: dict[str, float] = {}
    for (_, worker), at in ends.items():
        busy[worker] = max(at, busy.get(worker, 0.0))
    left = [name for name, at in last.items() if at < done - 5 and name in busy]
    lost_on = {worker for number, worker in starts if (number, worker) not in ends}
    idle = [last[name] - busy[name] for name in left if name not in lost_on]
    return {
        "starts": sum(event == "start" for event, *_ in lines),
        "lost": round(sum(lost)),
        "ended": len(left),
        "idle": round(statistics.median(idle), 1) if idle else None,
        "most": round(max(idle), 1) if idle else None,
    }


# -- both ------------------------------------------------------------------------------------------
def compare(arguments: argparse.Namespace) -> None:
    """Run both at the same time on a private Slurm, and print their figures."""
    from importlib.metadata import version

    from tests.support.slurm import PrivateSlurm

    packages = ("gpujobs", "dask-jobqueue", "distributed")
    print(", ".join(f"{name} {version(name)}" for name in packages), flush=True)
    with (
        tempfile.TemporaryDirectory() as text,
        PrivateSlurm(Path(text) / "slurm").running() as slurm,
    ):
        folder = Path(text)
        (folder / "site.yaml").write_text(
            "description: benchmark\nscheduler: slurm\npoll: 1s\n"
            "queues: {main: {cpus_per_node: 16, memory_per_node: 60GiB}}\n"
        )
        environ = {**os.environ, **slurm.env, "PATH": slurm.path, "HOME": text}
        environ["DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"] = str(FAILURES)
        options = [f"--tasks={arguments.tasks}", f"--task-seconds={arguments.task_seconds}"]
        options.append(f"--minutes={arguments.minutes}")
        running = {}
        for way in ("gpujobs", "dask-jobqueue"):
            argv = [sys.executable, __file__, f"--way={way}", f"--folder={text}", *options]
            running[way] = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
        for way, process in running.items():
            found = json.loads(process.communicate()[0].splitlines()[-1])
            if arguments.keep:
                shutil.copy(folder / f"{way}.jsonl", arguments.keep)
            print(f"{way:14}", "  ".join(f"{key} {value}" for key, value in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=120)
    parser.add_argument("--task-seconds", type=float, default=20.0)
    parser.add_argument("--minutes", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for the lines of the tasks")
    parser.add_argument("--way", choices=["gpujobs", "dask-jobqueue"])
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.way is None:
        compare(arguments)
    else:
        print(json.dumps(measure(arguments.way, arguments.folder, arguments)))


if __name__ == "__main__":
    main()
