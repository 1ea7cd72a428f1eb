"""Read tables on CPU workers, and fit a model of each on a GPU worker.

A task with a resource runs only on workers that have it: see profile.yaml.
"""

import collections

import dask
import numpy as np
from distributed import Client, get_worker

TABLES = 16


def array_module():
    """Return CuPy if this process has it and a GPU, else NumPy."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        return cupy
    except Exception:
        return np


@dask.delayed
def read(number):
    """Make a table of measurements; a real program reads a file."""
    random = np.random.default_rng(number)
    x = random.standard_normal((20_000, 8))
    y = x @ np.arange(8.0) + random.standard_normal(20_000)
    return get_worker().name, x, y


@dask.delayed
def fit(table):
    """Return the names of the workers of both steps, and the coefficients."""
    reader, x, y = table
    xp = array_module()
    coefficients = xp.linalg.lstsq(xp.asarray(x), xp.asarray(y), rcond=None)[0].round(1).tolist()
    return reader, f"{get_worker().name} with {xp.__name__}", coefficients


def main() -> None:
    with Client() as client:
        with dask.annotate(resources={"MEMORY": 1}):
            tables = [read(number) for number in range(TABLES)]
        with dask.annotate(resources={"GPU": 1}):
            models = [fit(table) for table in tables]
        # Annotations are lost if the graph is optimized.
        results = dask.compute(models, scheduler=client, optimize_graph=False)[0]
    for step, names in (("read", [r for r, _, _ in results]), ("fit", [f for _, f, _ in results])):
        for name, count in sorted(collections.Counter(names).items()):
            print(f"{step}: {count} on {name}")
    mean = np.mean([coefficients for _, _, coefficients in results], axis=0)
    print("coefficients:", *mean.round(1))


if __name__ == "__main__":
    main()
