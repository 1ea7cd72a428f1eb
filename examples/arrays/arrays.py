"""Time reductions, a transposed sum and a tall-skinny SVD, with CuPy on GPU workers."""

import argparse
import time

import dask.array as da
import numpy as np
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


def timed(name, value):
    """Compute a value, and print how long it took."""
    started = time.perf_counter()
    (result,) = da.compute(value)
    print(f"{name}: {time.perf_counter() - started:.2f} s", flush=True)
    return np.asarray(result.get() if hasattr(result, "get") else result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the tall matrix")
    parser.add_argument("--side", type=int, default=8_000, help="of the matrix that is transposed")
    options = parser.parse_args()

    with Client() as client:
        gpu = all(client.run(on_gpu).values())
        random = da.random.default_rng(0)
        tall = random.normal(size=(options.rows, 50), chunks=(options.rows // 16, 50))
        square = random.random((options.side,) * 2, chunks=options.side // 8)
        if gpu:
            tall, square = tall.map_blocks(to_gpu), square.map_blocks(to_gpu)
        wait(client.persist([tall, square]))
        protocol = client.scheduler.address.partition(":")[0]
        kind = "CuPy" if gpu else "NumPy (no CuPy or no GPU in the workers)"
        print(f"{len(client.nthreads())} workers, {protocol}, {kind}")
        mean = timed("mean", tall.mean())
        total = timed("sum of x + x.T", (square + square.T).sum())
        singular = timed("tall-skinny SVD", da.linalg.svd(tall)[1])
    assert abs(mean) < 0.01 and np.isclose(total, options.side**2, rtol=0.01)
    assert np.allclose(singular, options.rows**0.5, rtol=0.05)


if __name__ == "__main__":
    main()
