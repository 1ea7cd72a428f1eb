"""Rates of workers that share a GPU, with and without CUDA's MPS; needs torch, and a free GPU.

``python benchmarks/mps.py [--output FILE]``, with the python of an installed gpujobs. Each way is a
cluster of its own on this machine (`site: local`), whose job has eight workers on one GPU. In it,
one, two, four or eight of them multiply a matrix with itself, and wait for each product. Also
prints the GPU's mean power, by the energy counter of NVML. ``--fake`` runs the same steps without a
GPU, on tests/fakes; its figures have no meaning.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORKERS = 8
NUMBERS = (1, 2, 4, 8)
EARLY = 0.3
"""Seconds before the common start at which the workers are told."""
TIMEOUT = 150.0
SIZES = {
    "256 x 256, float32": (256, "float32"),
    "1024 x 1024, float32": (1024, "float32"),
    "8192 x 8192, bfloat16": (8192, "bfloat16"),
}
WAYS: dict[str, dict[str, Any]] = {
    "in turns": {},
    "with MPS": {"mps": True},
    "with MPS, 25 % each": {"mps": True, "mps_thread_percentage": 25},
}
"""Keys of `workers` in the profile."""
FAKES = Path(__file__).parents[1] / "tests" / "fakes"


# -- on a worker -----------------------------------------------------------------------------------
def prepare(fake: bool) -> None:
    """Make the matrices, and multiply each of them once."""
    products.update({name: product(*size, fake) for name, size in SIZES.items()})


products: dict[str, Callable[[], None]] = {}
"""Of this worker, by the names of `SIZES`: each multiplies and waits for the end."""


def product(size: int, kind: str, fake: bool) -> Callable[[], None]:
    """Return a function that multiplies a matrix with itself, and waits; call it once."""
    if fake:
        return lambda: time.sleep(size / 1e6)
    import torch

    matrix = torch.randn(size, size, device="cuda", dtype=getattr(torch, kind))

    def multiply() -> None:
        matrix @ matrix
        torch.cuda.synchronize()

    multiply()
    return multiply


def rate(name: str, start: float, seconds: float) -> float:
    """Return how many products a second this worker has computed since the time ``start``."""
    multiply, count = products[name], 0
    while time.time() < start:
        pass
    while time.time() < start + seconds:
        multiply()
        count += 1
    return count / seconds


# -- `run` of a cluster ----------------------------------------------------------------------------
def measure(output: Path, seconds: float, fake: bool) -> None:
    """Write rates and power of all matrices and numbers of workers."""
    from distributed import Client

    found = []
    with Client() as client:
        client.wait_for_workers(WORKERS, timeout=60)
        workers = sorted(client.nthreads())
        mps = importlib.import_module("mps")  # this file: workers import it, and keep `products`
        client.gather([client.submit(mps.prepare, fake, workers=[w], pure=False) for w in workers])
        energy = energy_counter(fake)
        for name in SIZES:
            for number in NUMBERS:
                start, before = time.time() + EARLY, energy()
                futures = [
                    client.submit(mps.rate, name, start, seconds, workers=[worker], pure=False)
                    for worker in workers[:number]
                ]
                total = sum(client.gather(futures))
                watts = (energy() - before) / (time.time() - start + EARLY)
                found.append({"matrix": name, "workers": number, "rate": total, "watts": watts})
                print(found[-1], flush=True)
    output.write_text(json.dumps(found))


def energy_counter(fake: bool) -> Callable[[], float]:
    """Return a function that returns the joules of the first GPU since some time."""
    if fake:
        return time.time
    import pynvml

    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu)) / 1000


# -- all clusters ----------------------------------------------------------------------------------
def measured(way: str, options: argparse.Namespace, home: Path) -> list[dict[str, Any]]:
    """Run a cluster with these workers; return what `measure` has written."""
    output, profile = home / f"{len(way)}.json", home / "mps.yaml"
    command = [sys.executable, __file__, "--inside", str(output), "--seconds", str(options.seconds)]
    keys = {"workers_per_gpu": WORKERS, **WAYS[way]}
    settings = {"site": "local", "gpus": 1, "workers": keys, "start_workers": WORKERS}
    if options.fake:
        command.append("--fake")
        site = home / "site.yaml"
        site.write_text(json.dumps(site_on_fakes(home)))
        settings["site"] = str(site)
    profile.write_text(json.dumps({**settings, "run": command}))
    gpujobs = str(Path(sys.executable).with_name("gpujobs"))
    environ = {**os.environ, "HOME": str(home)}
    try:
        submit = [gpujobs, "submit", str(profile), "--wait"]
        subprocess.run(submit, env=environ, check=True, timeout=TIMEOUT, stdout=sys.stderr)
    finally:
        subprocess.run([gpujobs, "cancel", "--all"], env=environ, capture_output=True, timeout=60)
    found: list[dict[str, Any]] = json.loads(output.read_text())
    return found


def site_on_fakes(home: Path) -> dict[str, Any]:
    """Return a site of jobs on this machine with fakes of NVML and of the daemon."""
    variables = {
        "PYTHONPATH": str(FAKES / "nvml"),
        "PATH": f"{FAKES / 'mps'}:{os.environ['PATH']}",
        "FAKE_MPS_FOLDER": str(home),
        "FAKE_NVML_GPUS": "1",
        "DASK_CUDA_TEST_SINGLE_GPU": "1",
    }
    os.environ.update(variables)  # for the plan
    words = (shlex.quote(f"{name}={value}") for name, value in variables.items())
    site = {"description": "fakes", "scheduler": "local", "queues": {"local": {}}}
    return {**site, "setup": f"export {' '.join(words)}"}


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the results as Markdown."""
    head = ["Matrix", "", *(f"{number} workers" for number in NUMBERS)]
    lines = [head, ["---"] * len(head)]
    for name in SIZES:
        for way, rows in found.items():
            own = [row for row in rows if row["matrix"] == name]
            cells = [f"{row['rate']:,.0f}, {row['watts']:.0f} W" for row in own]
            lines.append([name, way, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rates of workers that share a GPU.")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--fake", action="store_true", help="without a GPU")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        measure(options.inside, options.seconds, options.fake)
        return
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            found[way] = measured(way, options, Path(folder))
            if options.output:
                options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
