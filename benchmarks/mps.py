"""Rates of processes that share a GPU, with and without CUDA's MPS; needs torch, and a free GPU.

Eight processes have a context on the GPU; one, two, four or eight of them multiply a matrix with
itself, and wait for each product. Also prints the GPU's mean power, by the energy counter of NVML.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pynvml

PROCESSES = 8
SECONDS = 2.0
EARLY = 0.2
"""Seconds before the common start at which the processes are told."""
KERNELS = ("tiny", "small", "large")
WORK = f"""
import sys, time, torch

def square(size, kind):
    return torch.randn(size, size, device="cuda", dtype=kind)

matrices = {{
    "tiny": square(256, torch.float32),
    "small": square(1024, torch.float32),
    "large": square(8192, torch.bfloat16),
}}
for matrix in matrices.values():
    matrix @ matrix
torch.cuda.synchronize()
print("ready", flush=True)
for line in sys.stdin:
    kind, start = line.split()
    matrix, start, count = matrices[kind], float(start), 0
    while time.time() < start:
        pass
    while time.time() < start + {SECONDS}:
        matrix @ matrix
        torch.cuda.synchronize()
        count += 1
    print(count, flush=True)
"""


def measure(name: str, environ: Mapping[str, str]) -> None:
    """Print rates and power of all kernels and numbers of processes."""
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    argv = [sys.executable, "-c", WORK]
    workers = [
        subprocess.Popen(argv, env=environ, stdin=-1, stdout=-1, text=True)
        for _ in range(PROCESSES)
    ]
    try:
        for worker in workers:
            assert worker.stdout and worker.stdout.readline() == "ready\n"
        for kind in KERNELS:
            for number in (1, 2, 4, 8):
                start = time.time() + EARLY
                before = pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
                rate = sum(_counts(workers[:number], kind, start)) / SECONDS
                joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - before) / 1000
                watts = joules / (time.time() - start + EARLY)
                print(f"{name:8} {kind:6} {number} {rate:8.0f}/s {watts:4.0f} W", flush=True)
    finally:
        for worker in workers:
            worker.kill()


def _counts(workers: list[subprocess.Popen[str]], kind: str, start: float) -> Iterator[int]:
    for worker in workers:
        assert worker.stdin
        worker.stdin.write(f"{kind} {start}\n")
        worker.stdin.flush()
    for worker in workers:
        assert worker.stdout
        yield int(worker.stdout.readline())


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """Run the daemon; yield the environment of its clients."""
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environ = {**os.environ, **own}
        argv = ["nvidia-cuda-mps-control", "-f"]
        daemon = subprocess.Popen(argv, env=environ, stdout=-3, stderr=-3)
        time.sleep(2)
        try:
            yield environ
        finally:
            subprocess.run(argv[:1], input=b"quit\n", env=environ, check=True)
            daemon.wait()


if __name__ == "__main__":
    pynvml.nvmlInit()
    measure("without", os.environ)
    with mps() as environ:
        measure("with MPS", environ)
