"""Churn of many CPU workers on a private Slurm: jobs are cancelled and requeued, nodes fail, the
controller is killed and started again, while tasks run.

``python benchmarks/churn.py [--workers 200] [--per-job 1] [--minutes 10] [--pause 5] [--seed 0]``
It fails if a task has a wrong result, the target is not met at the end, or a job is left.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.slurm_churn import churn, counted_commands, environment, slurm_for_churn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--per-job", type=int, default=1, help="workers of a job")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--pause", type=float, default=5, help="mean seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # dask reports each result that was lost with its worker
    with (
        tempfile.TemporaryDirectory() as name,
        slurm_for_churn(Path(name) / "slurm").running() as slurm,
        environment(counted_commands(Path(name), slurm)),
    ):
        seconds = 60 * options.minutes
        found = churn(
            Path(name),
            slurm,
            options.workers,
            seconds,
            options.pause,
            options.seed,
            options.per_job,
        )
    minutes = found.seconds / 60
    print(f"{found.workers} workers, {found.per_job} in each job, for {minutes:.1f} minutes")
    print("faults:", ", ".join(f"{kind} {number}" for kind, number in sorted(found.faults.items())))
    print(f"jobs submitted: {found.submitted}")
    print(f"tasks, each with its right result: {found.tasks}")
    print(f"all workers connected {found.recovery:.0f} s after the last fault")
    for name, number in sorted(found.calls.items()):
        print(f"{name}: {number} calls, {number / minutes:.1f} per minute")


if __name__ == "__main__":
    main()
