"""Compute an array reduction and a tall-skinny SVD on all workers, and compare them with NumPy."""

import argparse
import time

import dask.array as da
import numpy as np
from distributed import Client


def on_gpu() -> bool:
    """Return whether this process has CuPy and a GPU."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:
        return False


def to_gpu(block):
    """Copy a block of the array to the GPU of its worker."""
    import cupy

    return cupy.asarray(block)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1, help="number of workers to wait for")
    options = parser.parse_args()
    with Client() as client:  # no arguments inside `run` of a profile
        client.wait_for_workers(options.workers)
        workers = client.run(lambda dask_worker: dask_worker.state.total_resources.get("GPU", 0))
        cuda = sum(1 for gpus in workers.values() if gpus)
        print(f"{len(workers)} workers: {cuda} CUDA workers, {len(workers) - cuda} CPU workers")

        rows, columns = options.rows, options.columns
        x = da.random.default_rng(42).normal(size=(rows, columns), chunks=(rows // 16, columns))
        gpu = all(client.run(on_gpu).values())
        print("CuPy" if gpu else "NumPy (no CuPy or no GPU in the workers)")
        x = x.map_blocks(to_gpu) if gpu else x

        started = time.perf_counter()
        mean, gram = da.compute(x.mean(), x.T @ x)
        print(f"reduction in {time.perf_counter() - started:.2f} s: mean {float(mean):+.6f}")

        started = time.perf_counter()
        found = np.asarray(da.linalg.svd(x)[1].compute().tolist())
        print(f"tall-skinny SVD in {time.perf_counter() - started:.2f} s; singular values:")
        print(np.array2string(found, precision=4, max_line_width=100))
        expected = np.sqrt(np.linalg.eigvalsh(gram.tolist()))[::-1]
        assert np.allclose(found, expected), f"wrong: {expected} were expected"
        print("they agree with the eigenvalues of the Gram matrix")


if __name__ == "__main__":
    main()
