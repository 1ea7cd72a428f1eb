"""Compute on an array that is larger than the memory of all workers."""

import argparse

import dask.array as da
import numpy as np
from dask.utils import format_bytes, parse_bytes
from distributed import Client, wait


def on_gpu() -> bool:
    """Return whether this process has CuPy and a GPU."""
    try:
        import cupy
    except ImportError:
        return False
    return cupy.is_available()


def to_gpu(block):
    """Copy a block to the GPU of its worker; with CuPy in this process, cupy.asarray does it."""
    import cupy

    return cupy.asarray(block)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="4GiB", help="size of the array")
    options = parser.parse_args()

    columns = 1000
    rows = parse_bytes(options.size) // (8 * columns)
    with Client() as client:
        client.wait_for_workers(1)
        array = da.random.default_rng(0).random((rows, columns), chunks=(2000, columns))
        gpu = all(client.run(on_gpu).values())
        if gpu:
            array = array.map_blocks(to_gpu)
        array = array.persist()
        wait(array)  # the whole array exists now: what does not fit in memory is on disk
        kind = "CuPy" if gpu else "NumPy (no CuPy or no GPU in the workers)"
        print(f"array of {format_bytes(array.nbytes)}, {kind}")
        mean, squares = da.compute(array.mean(), (array**2).mean())
        print(f"mean {float(mean):.3f}, variance {float(squares - mean**2):.4f} (expected: 1/12)")
        assert np.isclose(float(mean), 0.5, atol=1e-3)


if __name__ == "__main__":
    main()
