"""CPU time of the process that samples the GPUs of a job, with a stand-in for NVML.

``python benchmarks/usage.py --gpus 8 --minutes 16``: the sampler runs as in a job. A line for each
period: number of samples, and CPU time of the sampler as part of one core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpujobs.injob.archive import build
from gpujobs.injob.names import ARCHIVE
from tests.support.cli import NVML

PERIODS = (1.0, 4.0, 10.0)
"""Minutes of the first periods; the interval between samples grows until a quarter of an hour."""


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process until now, from its clock (see clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def samples(folder: Path) -> int:
    """Return the number of samples until now; the first line is a description."""
    texts = [path.read_text() for path in folder.glob("usage/*.jsonl")]
    return len([line for text in texts for line in text.splitlines() if line]) - 1


def measure(folder: Path, gpus: int, minutes: float) -> None:
    """Start a sampler, and print its CPU time in each period."""
    (folder / ARCHIVE).write_bytes(build())
    environ = {**os.environ, "PYTHONPATH": str(NVML), "FAKE_NVML_GPUS": str(gpus)}
    environ |= {"GPUJOBS_FOLDER": str(folder), "GPUJOBS_JOB": "0"}
    devices = ",".join(map(str, range(gpus)))
    process = subprocess.Popen(
        [sys.executable, str(folder / ARCHIVE), "usage", f"--devices={devices}"], env=environ
    )
    try:
        while samples(folder) < 0:
            time.sleep(0.05)
        before, started, taken = cpu_seconds(process.pid), time.monotonic(), 0
        print(f"start: {before:.3f} CPU seconds, {gpus} GPUs", flush=True)
        passed = 0.0
        for period in (*PERIODS, minutes):
            period = min(period, minutes - passed)
            if period <= 0:
                break
            passed += period
            time.sleep(max(0.0, started + passed * 60 - time.monotonic()))
            now, count = cpu_seconds(process.pid), samples(folder)
            spent, number = now - before, count - taken
            before, taken = now, count
            each = spent / max(1, number) * 1000
            print(
                f"until minute {passed:g}: {number} samples, {each:.2f} ms each, "
                f"{spent / (period * 60):.3%} of a core",
                flush=True,
            )
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.gpus, options.minutes)


if __name__ == "__main__":
    main()
