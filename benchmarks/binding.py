"""Rates of copies between host and GPU, by the CPUs on which the workers of a node run.

Run ``python benchmarks/binding.py`` at the top of a checkout, on a machine with several GPUs, CuPy
and dask-cuda. Each GPU has one process, as it has one worker, and all copy at the same time. In
each round they run on

- ``all``: all CPUs of this program;
- ``near``: those that gpujobs chooses;
- ``dask-cuda``: those that dask-cuda chooses;
- ``far``: those that are not near, if there are any.

A process is bound before it initialises CUDA and touches memory. The figures are sums over the
GPUs in GB/s, medians of the rounds, and their ratio to ``all``. ``taskset -c`` in front gives the
program fewer CPUs. ``--fake`` runs the same steps without GPUs; its figures have no meaning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpujobs.injob.gpus import bind, choose_cpus
from gpujobs.injob.names import VISIBLE

NVML = Path(__file__).parents[1] / "tests" / "fakes" / "nvml"
SECONDS = 0.5
"""For which each kind of copy is repeated."""
KINDS = ("pinned to GPU", "pageable to GPU", "GPU to pinned")


# -- one process with one GPU ----------------------------------------------------------------------
def work(cpus: set[int], size: int, fake: bool) -> None:
    """Bind this process, prepare, and copy when a line arrives on the standard input."""
    bind(cpus)
    copies = fake_copies(size) if fake else gpu_copies(size)
    print(json.dumps(sorted(os.sched_getaffinity(0))), flush=True)
    sys.stdin.readline()
    print(json.dumps({kind: rate(copies[kind], size) for kind in KINDS}), flush=True)


def gpu_copies(size: int) -> dict[str, Callable[[], Any]]:
    """Return functions that copy ``size`` bytes and wait for the end."""
    import cupy
    import cupyx
    import numpy

    pinned, pageable = cupyx.empty_pinned(size, "u1"), numpy.empty(size, "u1")
    pinned[:], pageable[:] = 1, 1  # the kernel takes memory near this CPU now
    device, stream = cupy.zeros(size, "u1"), cupy.cuda.get_current_stream()

    def to_gpu(host: Any) -> None:
        device.set(host)
        stream.synchronize()

    def to_host() -> None:
        device.get(out=pinned)
        stream.synchronize()

    copies = (lambda: to_gpu(pinned), lambda: to_gpu(pageable), to_host)
    return dict(zip(KINDS, copies, strict=True))


def fake_copies(size: int) -> dict[str, Callable[[], Any]]:
    """Return functions that copy ``size`` bytes in host memory."""
    import numpy

    source, target = numpy.ones(size, "u1"), numpy.ones(size, "u1")
    return dict.fromkeys(KINDS, lambda: numpy.copyto(target, source))


def rate(copy: Callable[[], Any], size: int) -> float:
    """Return the median rate of repeated copies in GB/s."""
    copy()
    seconds: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(seconds) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - started)
    return size / statistics.median(seconds) / 1e9


# -- the CPUs of each process ----------------------------------------------------------------------
def settings(devices: list[str]) -> dict[str, list[set[int]]]:
    """Return the CPUs of each GPU's process, by the name of the setting."""
    allowed = os.sched_getaffinity(0)
    near, described = [], []
    for number in range(len(devices)):
        os.environ[VISIBLE] = ",".join(devices[number:] + devices[:number])
        cpus, binding = choose_cpus(1)
        near.append(set(cpus))
        described.append(binding)
        print(f"GPU {devices[number]}: {json.dumps(binding)}", flush=True)
    found = {"all": [set(allowed)] * len(devices), "near": near, "dask-cuda": of_dask_cuda(devices)}
    if all(binding["gpu_nodes"] for binding in described) and all(allowed - cpus for cpus in near):
        found["far"] = [allowed - cpus for cpus in near]
    else:
        print("all CPUs are near a GPU, or their places are not known: no row `far`")
    return {name: cpus for name, cpus in found.items() if all(cpus)}


def of_dask_cuda(devices: list[str]) -> list[set[int]]:
    """Return the CPUs that its CUDAWorker chooses; the kernel leaves out those of no cpuset."""
    from dask_cuda.utils import cuda_visible_devices, get_cpu_affinity, nvml_device_index

    os.environ[VISIBLE] = ",".join(devices)
    places = [nvml_device_index(n, cuda_visible_devices(n, devices)) for n in range(len(devices))]
    return [set(get_cpu_affinity(place)) for place in places]


def seen_from(cpus: set[int], devices: list[str]) -> str:
    """Return how a process that may run on ``cpus`` only describes its place near the first GPU."""
    code = (
        f"import os; os.sched_setaffinity(0, {cpus}); from gpujobs.injob.gpus import choose_cpus; "
        "import json; print(json.dumps(choose_cpus(1)[1]))"
    )
    env = {**os.environ, VISIBLE: ",".join(devices)}
    root = Path(__file__).parents[1]
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


# -- all processes of a node -----------------------------------------------------------------------
def measure(devices: list[str], cpus: list[set[int]], options: argparse.Namespace) -> Any:
    """Return the sum of the rates of all GPUs, which copy at the same time, by kind."""
    processes = []
    for number in range(len(devices)):
        argv = [sys.executable, __file__, "--cpus", *map(str, sorted(cpus[number]))]
        argv += ["--size", str(options.size), *(["--fake"] if options.fake else [])]
        env = {**os.environ, VISIBLE: devices[number]}
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, text=True))
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    rates = [json.loads(process.communicate()[0]) for process in processes]
    return {kind: sum(found[kind] for found in rates) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", type=int, default=2**28, help="bytes of a copy")
    parser.add_argument("--devices", help="like CUDA_VISIBLE_DEVICES; default: all GPUs")
    parser.add_argument("--fake", action="store_true", help="two emulated GPUs, host memory only")
    parser.add_argument("--cpus", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fake:
        sys.path.insert(0, str(NVML))
        os.environ.update({"PYTHONPATH": str(NVML), "FAKE_NVML_GPUS": "2"})
    if options.cpus:
        work(set(options.cpus), options.size, options.fake)
        return
    import pynvml

    pynvml.nvmlInit()
    count = range(pynvml.nvmlDeviceGetCount())
    devices = options.devices.split(",") if options.devices else [str(number) for number in count]
    rows = settings(devices)
    if "far" in rows:
        print(f"GPU {devices[0]} from far CPUs: {seen_from(rows['far'][0], devices)}")
    rounds: dict[str, list[Any]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, cpus in rows.items():
            rounds[name].append(measure(devices, cpus, options))
            print(name, json.dumps(rounds[name][-1]), flush=True)
    print(f"\n| CPUs | {' | '.join(KINDS)} |\n|---|{'---|' * len(KINDS)}")
    for name in rows:
        cells = []
        for kind in KINDS:
            own, every = (
                statistics.median(found[kind] for found in rounds[one]) for one in (name, "all")
            )
            cells.append(f"{own / every:.2f} ({own:.1f} GB/s)")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
