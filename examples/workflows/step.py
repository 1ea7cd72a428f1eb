"""One step of a workflow: compute the mean of a random array, and write it as JSON."""

import argparse
import json
from pathlib import Path

import dask.array as da
from distributed import Client


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    with Client():
        x = da.random.default_rng(0).random((20_000, 500), chunks=(2_000, 500))
        mean = float(x.mean().compute())
    options.output.write_text(json.dumps({"mean": round(mean, 3)}))


if __name__ == "__main__":
    main()
