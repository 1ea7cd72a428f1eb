"""Measure one start: from the first moment of a job's script to its registered worker.

``python benchmarks/start.py [--rounds N]``, with the python of an installed gpujobs, on this
machine, with one CPU worker. The reference is ``dask scheduler`` and ``dask worker``, started at
the same time; both run in turn, and the medians are compared. Exit code 1 if the aim is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
AIM = 0.9
TIMEOUT = 120.0
PROFILE = "gpus: 0\nworkers: {count: 1, threads: 1}\n"
REGISTERED = """
import os, time
from distributed.diagnostics.plugin import SchedulerPlugin
class Registered(SchedulerPlugin):
    def add_worker(self, scheduler, worker):
        with open("registered.new", "w") as file:
            file.write(str(time.time()))
        os.rename("registered.new", "registered")
def dask_setup(scheduler):
    scheduler.add_plugin(Registered())
"""
"""A preload of the dask scheduler of the reference."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure one start.")
    parser.add_argument("--rounds", type=int, default=9, help="starts of each kind")
    rounds = parser.parse_args().rounds
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    starts: list[dict[str, float]] = []
    bare: list[float] = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as name:
            start = of_gpujobs(Path(name), {**environment, "HOME": name})
        with tempfile.TemporaryDirectory() as name:
            reference = of_dask(Path(name), environment)
        if number:  # the first round fills caches
            starts.append(start)
            bare.append(reference)
    return report(starts, bare)


def of_gpujobs(home: Path, environment: dict[str, str]) -> dict[str, float]:
    """Start a cluster; return its moments in seconds since the first one of its script."""
    program = str(Path(sys.executable).with_name("gpujobs"))
    profile = home / "start.yaml"
    profile.write_text(PROFILE)
    submit = [program, "submit", str(profile), "--site", "local", "--json"]
    done = subprocess.run(submit, check=True, capture_output=True, text=True, env=environment)
    folder = home / ".gpujobs" / json.loads(done.stdout)["cluster"]
    try:
        host_and_process = (folder / "job-ids").read_text().partition("@")[0]
        script = started(int(host_and_process.rpartition(":")[2]))
        events = wait_for(lambda: connected(folder / "workers-1.jsonl"))
        moments = {
            "the head is elected": (folder / "head-1" / "owner").stat().st_mtime,
            "the dask scheduler listens": (folder / "scheduler.json").stat().st_mtime,
            "the worker is registered": events,
        }
        return {name: moment - script for name, moment in moments.items()}
    finally:
        subprocess.run([program, "cancel", "--all"], capture_output=True, env=environment)


def started(process: int) -> float:
    """Return when a process was started, as `time.time` does; to 10 ms."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def connected(path: Path) -> float:
    """Return when the first worker was registered; 0 before."""
    lines = path.read_text().split("\n") if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return next((event["at"] for event in events if event["event"] == "connected"), 0.0)


def of_dask(folder: Path, environment: dict[str, str]) -> float:
    """Start dask's own processes at the same time; return the seconds to the registered worker."""
    (folder / "registered_plugin.py").write_text(REGISTERED)
    dask = [sys.executable, "-m", "dask"]
    preload = ["--preload", "registered_plugin.py"]
    scheduler = ["scheduler", "--scheduler-file", "scheduler.json", "--port", "0", *preload]
    worker = ["worker", "--scheduler-file", "scheduler.json", "--nthreads", "1"]
    began = time.time()
    processes = [
        subprocess.Popen([*dask, *words], cwd=folder, env=environment, stderr=subprocess.DEVNULL)
        for words in (scheduler, worker)
    ]
    try:
        registered = folder / "registered"
        wait_for(registered.exists)
        return float(registered.read_text()) - began
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            process.wait()


def wait_for(condition: Callable[[], T]) -> T:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + TIMEOUT
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise SystemExit("the start took too long")
        time.sleep(0.02)
    return value


def report(starts: list[dict[str, float]], bare: list[float]) -> int:
    """Print the moments and the ratio, and return the exit code."""
    for name in starts[0]:
        print(f"{name:<40}{1000 * statistics.median(start[name] for start in starts):>8.0f} ms")
    reference = statistics.median(bare)
    print(f"{'dask scheduler and dask worker by hand':<40}{1000 * reference:>8.0f} ms")
    ratio = statistics.median(max(start.values()) for start in starts) / reference
    print(f"ratio {ratio:.2f} (aim: at most {AIM})")
    return int(ratio > AIM)


if __name__ == "__main__":
    sys.exit(main())
