"""Part of the stub of dask."""

import stub

if __name__ == "__main__":
    stub.run_dask_cuda()
