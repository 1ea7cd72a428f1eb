"""Estimate pi in many steps, with a checkpoint after each: see profile.yaml.

Near the walltime, it gets SIGTERM, finishes its step and exits with 0. The next attempt continues.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from distributed import Client

POINTS = 1_000_000


def hits(seed, pause):
    """Return how many random points of a square are in its circle; wait ``pause`` seconds."""
    time.sleep(pause)
    x, y = np.random.default_rng(seed).random((2, POINTS))
    return int(np.count_nonzero(x * x + y * y < 1))


def write(path, value):
    """Replace the file at once: a job may be killed while it writes."""
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").replace(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tasks", type=int, default=8, help="tasks of one step")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of each task")
    parser.add_argument("--file", type=Path, default=Path("checkpoint.json"))
    args = parser.parse_args()
    signals = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    state = json.loads(args.file.read_text()) if args.file.exists() else {"step": 0, "hits": 0}
    attempt = os.environ.get("GPUJOBS_ATTEMPT", "1")
    print(f"attempt {attempt} begins with step {state['step']}", flush=True)
    with Client() as client:
        while state["step"] < args.steps:
            first = state["step"] * args.tasks
            tasks = client.map(hits, range(first, first + args.tasks), pause=args.pause)
            state["hits"] += sum(client.gather(tasks))
            state["step"] += 1
            write(args.file, state)
            if signals:
                print(f"attempt {attempt} stops after step {state['step']}", flush=True)
                sys.exit(0)
    points = args.steps * args.tasks * POINTS
    print(f"pi is about {4 * state['hits'] / points:.5f}")


if __name__ == "__main__":
    main()
