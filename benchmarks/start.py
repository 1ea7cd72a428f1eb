"""Measure one start: from the first moment of a job's script to its registered worker.

``python benchmarks/start.py [--rounds N]``, with the python of an installed gpujobs, on this
machine, with one CPU worker. The reference is ``dask scheduler`` and ``dask worker``, started at
the same time; both run in turn, and the medians are compared. Exit code 1 if the aim is missed.

``--gpu``: with one worker of dask-cuda on a GPU, in turn over TLS and over ucxx, without and with
rates that `gpujobs doctor --run` has kept. The references are ``dask scheduler`` and
``dask cuda worker`` over tcp and over ucxx, and there is no aim. ``--fake``: the same over TLS and
tcp only, without a GPU; its figures have no meaning. ``--output FILE``: all starts as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.mps import site_on_fakes

T = TypeVar("T")
AIM = 0.9
TIMEOUT = 120.0
CPU: dict[str, Any] = {"gpus": 0, "workers": {"count": 1, "threads": 1}}
SITE = {"description": "this machine", "scheduler": "local", "queues": {"local": {}}}
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


Start = dict[str, float]
"""The moments of a start, in seconds since its first one."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure one start.")
    parser.add_argument("--rounds", type=int, default=9, help="starts of each kind")
    parser.add_argument("--gpu", action="store_true", help="with a worker on a GPU")
    parser.add_argument("--fake", action="store_true", help="with a worker on a fake of a GPU")
    parser.add_argument("--output", type=Path, help="file for all starts as JSON")
    options = parser.parse_args()
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as name:
        home, on_gpu = Path(name), options.gpu or options.fake
        ways = of_gpu(home, environment, options.fake) if on_gpu else of_cpu(home, environment)
        starts: dict[str, list[Start]] = {way: [] for way in ways}
        for number in range(options.rounds + 1):
            for way, start in ways.items():
                moments = start()
                if number:  # the first round fills caches
                    starts[way].append(moments)
                print(f"{way}: {max(moments.values()):.2f} s", file=sys.stderr, flush=True)
                if options.output:
                    options.output.write_text(json.dumps(starts, indent=1) + "\n")
    return report(starts, with_aim=not on_gpu)


# -- the ways to start -----------------------------------------------------------------------------
OURS, BY_HAND = "gpujobs", "dask scheduler and dask worker by hand"
Ways = dict[str, Callable[[], Start]]


def of_cpu(home: Path, environment: dict[str, str]) -> Ways:
    """Return the starts of a CPU worker."""
    worker = ["worker", "--nthreads", "1"]
    return {
        OURS: lambda: of_gpujobs(home, environment, CPU),
        BY_HAND: lambda: of_dask(home, environment, worker, "tcp"),
    }


def of_gpu(home: Path, environment: dict[str, str], fake: bool) -> Ways:
    """Return the starts of a worker on a GPU."""
    kept, path = home / "kept", home / "site.yaml"
    kept.mkdir()
    site = {**SITE, "network": {"protocols": ["ucxx", "tcp"]}}
    if fake:
        site = site_on_fakes(home)
        environment.update(os.environ)
    path.write_text(json.dumps(site))
    auto = {"site": str(path), "gpus": 1}
    tls = {**auto, "network": {"protocol": "tcp"}}
    worker = ["cuda", "worker", "--nthreads", "1"]
    by_hand = "dask scheduler and dask cuda worker"
    ways: Ways = {
        "gpujobs, TLS": lambda: of_gpujobs(home, environment, tls),
        f"{by_hand}, tcp": lambda: of_dask(home, environment, worker, "tcp"),
    }
    if not fake:  # a user who has run `doctor --run` has rates in a ledger
        doctor = [program(), "doctor", "--run", "--site", str(path)]
        doctor += ["--set", "gpus=1", "--set", "workers.workers_per_gpu=2"]  # rates need two
        subprocess.run(doctor, env={**environment, "HOME": str(kept)}, stdout=sys.stderr)
        ways |= {
            "gpujobs, ucxx": lambda: of_gpujobs(home, environment, auto),
            "gpujobs, ucxx with kept rates": lambda: of_gpujobs(kept, environment, auto),
            f"{by_hand}, ucxx": lambda: of_dask(home, environment, worker, "ucxx"),
        }
    return ways


def program() -> str:
    """Return the command of gpujobs."""
    return str(Path(sys.executable).with_name("gpujobs"))


def of_gpujobs(home: Path, environment: dict[str, str], settings: dict[str, Any]) -> Start:
    """Start a cluster; return its moments in seconds since the first one of its script."""
    environment = {**environment, "HOME": str(home)}
    profile = home / "start.yaml"
    profile.write_text(json.dumps({"site": "local", **settings}))
    submit = [program(), "submit", str(profile), "--json"]
    began = time.time()
    done = subprocess.run(submit, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    folder = home / ".gpujobs" / json.loads(done.stdout)["cluster"]
    try:
        host_and_process = (folder / "job-ids").read_text().partition("@")[0]
        pid = int(host_and_process.rpartition(":")[2])
        script = started(pid)
        registered = wait_for(lambda: connected(folder / "workers-1.jsonl"))
        moments = {
            "gpujobs submit begins": began,
            "the script begins": script,
            **of_processes(pid),
            "the head is elected": (folder / "head-1" / "owner").stat().st_mtime,
            "the dask scheduler listens": (folder / "scheduler.json").stat().st_mtime,
            "the worker is registered": registered,
        }
        if (choice := folder / "transport.json").exists():  # not if there is only one protocol
            moments["the protocol is chosen"] = choice.stat().st_mtime
        return {name: moment - script for name, moment in moments.items()}
    finally:
        subprocess.run([program(), "cancel", "--all"], capture_output=True, env=environment)


def of_processes(script: int) -> dict[str, float]:
    """Return when the processes of a job were started, by its script: the newest of each kind."""
    ages = ancestors(script)
    kinds = {
        "supervise": "the supervisor is started",
        "scheduler": "the process of the dask scheduler is started",
        "workers": "the process of the nannies is started",
    }
    found: dict[str, float] = {}
    for pid, above in ages.items():
        with contextlib.suppress(OSError, IndexError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            moment, kind = started(pid), words[2]
            if not words[1].endswith("injob.pyz") or kind not in kinds:
                continue
            # The process of the nannies forks a server, and that one forks the workers.
            below = sum(one in above for one in nannies(ages))
            name = kinds[kind] if below == 0 else "the worker is forked"
            if below != 1:
                found[name] = max(found.get(name, moment), moment)
    return found


def nannies(ages: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the processes with the command of the nannies."""
    found = set()
    for pid in ages:
        with contextlib.suppress(OSError, IndexError):
            if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[2] == "workers":
                found.add(pid)
    return found


def ancestors(root: int) -> dict[int, list[int]]:
    """Return the processes below ``root``, each with those above it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {}
    for pid in parents:
        above = [pid]
        while above[-1] in parents:
            above.append(parents[above[-1]])
        if root in above[1:]:
            found[pid] = above[1 : above.index(root)]
    return found


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


def of_dask(
    folder: Path, environment: dict[str, str], worker: Sequence[str], protocol: str
) -> Start:
    """Start dask's own processes at the same time; return when the worker is registered."""
    registered, file = folder / "registered", folder / "scheduler.json"
    for path in (registered, file):
        path.unlink(missing_ok=True)
    (folder / "registered_plugin.py").write_text(REGISTERED)
    dask, known = [sys.executable, "-m", "dask"], ["--scheduler-file", str(file)]
    scheduler = ["scheduler", "--port", "0", "--preload", "registered_plugin.py"]
    scheduler += ["--protocol", protocol, "--interface", "lo"]
    own = ["--interface", "lo", *(["--protocol", protocol] if "cuda" not in worker else [])]
    began = time.time()
    processes = [
        subprocess.Popen(
            [*dask, *words, *known], cwd=folder, env=environment, stderr=subprocess.DEVNULL
        )
        for words in (scheduler, [*worker, *own])
    ]
    try:
        wait_for(registered.exists)
        return {"the worker is registered": float(registered.read_text()) - began}
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], T]) -> T:
    """Return the first true value of ``condition``."""
    deadline = time.monotonic() + TIMEOUT
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise SystemExit("the start took too long")
        time.sleep(0.02)
    return value


def report(starts: dict[str, list[Start]], *, with_aim: bool) -> int:
    """Print the moments and the ratios to the last way, and return the exit code."""
    ends = {}
    for way, runs in starts.items():
        print(f"{way}, {len(runs)} starts:")
        medians = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in runs[0]}
        for name, moment in sorted(medians.items(), key=lambda item: item[1]):
            print(f"  {name:<50}{1000 * moment:>8.0f} ms")
        ends[way] = statistics.median(max(run.values()) for run in runs)
    if not with_aim:
        return 0
    ratio = ends[OURS] / ends[BY_HAND]
    print(f"ratio {ratio:.2f} (aim: at most {AIM})")
    return int(ratio > AIM)


if __name__ == "__main__":
    sys.exit(main())
