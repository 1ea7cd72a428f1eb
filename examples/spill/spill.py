"""Compute on an array that is larger than the memory of all workers."""

import argparse

import dask.array as da
import numpy as np
from dask.utils import format_bytes, parse_bytes
from distributed import Client, wait


def to_gpu(block):
    """Copy a block to the GPU, if the process has CuPy and a GPU."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:
        return block
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
        array = array.map_blocks(to_gpu).persist()
        wait(array)  # the whole array exists now: what does not fit in memory is on disk
        print(f"array of {format_bytes(array.nbytes)}")
        mean, squares = da.compute(array.mean(), (array**2).mean())
        print(f"mean {float(mean):.3f}, variance {float(squares - mean**2):.4f} (expected: 1/12)")
        assert np.isclose(float(mean), 0.5, atol=1e-3)


if __name__ == "__main__":
    main()
