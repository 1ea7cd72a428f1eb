"""A script of dask-mpi: rank 0 also runs the dask scheduler and `main`, all ranks run workers."""

import dask.array as da
from dask_mpi import initialize
from distributed import Client


def main() -> None:
    with Client() as client:
        client.wait_for_workers(2)
        x = da.random.default_rng(0).random((20_000, 500), chunks=(2_000, 500))
        print(f"mean {float(x.mean().compute()):.3f} on {len(client.ncores())} workers")


if __name__ == "__main__":
    initialize()
    main()
