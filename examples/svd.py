"""Compute an array reduction and a tall-skinny SVD on all workers, and compare them with NumPy.

Inside `run:` of a profile, ``Client()`` needs no arguments.
"""

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

    with Client() as client:
        client.wait_for_workers(options.workers)
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        gpus = [w["name"] for w in workers if w["resources"].get("GPU")]
        cpu_workers = len(workers) - len(gpus)
        print(f"{len(workers)} workers: {len(gpus)} CUDA workers, {cpu_workers} CPU workers")

        random = da.random.default_rng(42)
        x = random.normal(
            size=(options.rows, options.columns), chunks=(options.rows // 16, options.columns)
        )
        if all(client.run(on_gpu).values()):
            print("the array is on the GPUs (CuPy)")
            x = x.map_blocks(to_gpu)

        started = time.perf_counter()
        mean, gram = da.compute(x.mean(), x.T @ x)
        seconds = time.perf_counter() - started
        print(f"reduction: mean {float(mean):+.6f} of {x.size:,} numbers in {seconds:.2f} s")

        started = time.perf_counter()
        _, singular, _ = da.linalg.svd(x)
        found = np.asarray([float(value) for value in singular.compute()])
        print(f"tall-skinny SVD in {time.perf_counter() - started:.2f} s; singular values:")
        print(np.array2string(found, precision=4, max_line_width=100))

        gram = np.asarray([[float(value) for value in row] for row in gram])
        expected = np.sqrt(np.linalg.eigvalsh(gram))[::-1]
        assert np.allclose(found, expected), f"wrong: {expected} were expected"
        print("they agree with the eigenvalues of the Gram matrix")


if __name__ == "__main__":
    main()
