"""Measure inside a cluster: `run:` of the profiles of run.py, or ``--reference``, dask-cuda alone.

Writes one JSON file, again after each measurement, so that a failure loses nothing. Every
repetition has new data under new keys, because dask keeps copies of moved data. The duration of a
transfer is from the transfer log of the receiving worker; the client's clock would add a few
milliseconds for two tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTED = time.time()
WARM_UPS = 2
REPETITIONS, SECONDS = (3, 61), 4.0
"""Least and most repetitions; none begins after these seconds. Short ones are repeated more.

One that takes longer is not repeated, and has one warm-up.
"""
SMALL_SECONDS = 0.5
"""Instead of SECONDS for small arrays."""
FULL = {
    "transfer": 125_000_000,
    "square": 40_000,
    "block": 10_000,
    "rows": 4_000_000,
    "columns": 200,
}
SMALL = {"transfer": 500_000, "square": 800, "block": 200, "rows": 8_000, "columns": 20}
"""Lengths in numbers of 8 bytes. FULL: 1 GB; 12.8 GB in 16 blocks; 6.4 GB in 8 blocks."""


class Bench:
    """A cluster with at least two workers, and the measurements on it."""

    def __init__(self, client: Any, module: str, sizes: dict[str, int]) -> None:
        import importlib

        self.client, self.module, self.sizes = client, module, sizes
        self.xp = importlib.import_module(module)
        names = client.run(lambda dask_worker: str(dask_worker.name))
        self.workers = sorted(names, key=names.__getitem__)

    def transfer(self) -> dict[str, float]:
        """Move an array from the first worker to the second one, which may be in the same job."""
        return self._move(*self.workers[:2])

    def far(self) -> dict[str, float]:
        """Move an array from the first worker to the last one, which is in the last job."""
        return self._move(self.workers[0], self.workers[-1])

    def _move(self, source: str, target: str) -> dict[str, float]:
        """``seconds`` is from the receiver's log, ``wall`` from the client's clock."""
        array = self.client.submit(
            filled, self.module, [self.sizes["transfer"]], workers=[source], pure=False
        )
        wait(array)
        started = time.perf_counter()
        self.client.submit(last, array, workers=[target], pure=False).result()
        wall = time.perf_counter() - started
        log = self.client.run(incoming, workers=[target])[target]
        size = 8 * self.sizes["transfer"]
        seconds = log[1] - log[0] if log and log[2] >= size else wall
        return {
            "seconds": seconds,
            "wall": wall,
            "GB/s": size / seconds / 1e9,
            "GB/s by wall": size / wall / 1e9,
        }

    def transpose(self) -> dict[str, float]:
        """``(y + y.T).sum()`` of a square matrix."""
        length = self.sizes["square"]
        y = self._filled((length, length), (self.sizes["block"],) * 2)
        started = time.perf_counter()
        total = float((y + y.T).sum().compute())
        seconds = time.perf_counter() - started
        assert math.isclose(total, length**2, rel_tol=0.02), total
        return {"seconds": seconds}

    def svd(self) -> dict[str, float]:
        """Singular values and vectors of a tall matrix."""
        import dask
        import dask.array as da

        rows, columns = self.sizes["rows"], self.sizes["columns"]
        x = self._filled((rows, columns), (rows // 8, columns))
        started = time.perf_counter()
        u, s, v = dask.persist(*da.linalg.svd(x))
        wait([u, s, v])
        self.client.run(synchronize, self.module)
        seconds = time.perf_counter() - started
        # Of uniform random numbers: their mean, 1/2, times the root of their number.
        largest = float(s[0].compute())
        assert math.isclose(largest, math.sqrt(rows * columns) / 2, rel_tol=0.02), largest
        return {"seconds": seconds}

    def _filled(self, shape: tuple[int, int], blocks: tuple[int, int]) -> Any:
        import dask.array as da

        chunks = da.core.normalize_chunks(blocks, shape)
        meta, name = self.xp.empty((0, 0)), f"fill-{uuid.uuid4().hex}"
        made = da.map_blocks(
            block, self.module, chunks=chunks, dtype="f8", meta=meta, name=name
        ).persist()
        wait(made)
        return made


# -- on the workers --------------------------------------------------------------------------------
def filled(module: str, shape: Any) -> Any:
    """Return a new array of random numbers, after CuPy's asynchronous kernels have finished."""
    import importlib

    array = importlib.import_module(module).random.random(tuple(shape))
    last(array)
    return array


def block(module: str, block_info: Any = None) -> Any:
    return filled(module, block_info[None]["chunk-shape"])


def last(array: Any) -> float:
    return float(array.reshape(-1)[-1])


def synchronize(module: str) -> None:
    if module == "cupy":
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


def incoming(dask_worker: Any) -> Any:
    """Start, stop and bytes of the newest message that this worker received."""
    log = dask_worker.transfer_incoming_log
    return [log[-1][name] for name in ("start", "stop", "total")] if log else None


def can_open(paths: list[str]) -> list[str]:
    """Return the device files of ``paths`` that this process can open."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_RDONLY))
            found.append(path)
    return found


# -- the program -----------------------------------------------------------------------------------
def wait(futures: Any) -> None:
    """Wait; raise the error of a task that failed."""
    from distributed import wait as until_done

    done = until_done(futures)
    for future in done.done:
        if future.status == "error":
            future.result()


@contextlib.contextmanager
def reference(module: str, workers: int) -> Iterator[Any]:
    """Start a hand-written cluster, without gpujobs; without GPUs it uses the CPU."""
    if module == "cupy":
        from dask_cuda import LocalCUDACluster

        cluster = LocalCUDACluster(protocol="ucxx", memory_limit="30GiB", dashboard_address=":0")
    else:
        from distributed import LocalCluster

        cluster = LocalCluster(
            n_workers=workers, threads_per_worker=1, protocol="tcp", dashboard_address=":0"
        )
    with cluster, cluster.get_client() as client:
        yield client


@contextlib.contextmanager
def connect(scheduler_file: str | None) -> Iterator[Any]:
    """Connect to a cluster; without a file, to the one in which this program is `run:`."""
    from distributed import Client

    with Client(scheduler_file=scheduler_file) as client:
        yield client


def measure(bench: Bench, name: str) -> dict[str, Any]:
    """Repeat one measurement; return all runs and the medians, or the error."""
    try:
        limit = SECONDS if bench.sizes is FULL else SMALL_SECONDS
        runs: list[dict[str, float]] = []
        for n in range(WARM_UPS + REPETITIONS[1]):
            began = time.monotonic()
            if n == WARM_UPS:
                started = began
            if n >= WARM_UPS + REPETITIONS[0] and began - started > limit:
                break
            runs.append(getattr(bench, name)())
            if n and time.monotonic() - began > SECONDS:
                break
        del runs[: min(WARM_UPS, len(runs) - 1)]
    except Exception:
        return {"error": traceback.format_exc()[-3000:]}
    return {"runs": runs, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument(
        "--module", choices=["cupy", "numpy"], default="cupy", help="numpy: small arrays"
    )
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--scheduler-file", help="of a cluster that this program is not `run:` of")
    parser.add_argument("--start-only", action="store_true", help="only until workers connect")
    parser.add_argument("--devices", nargs="*", default=[], help="device files of the GPUs")
    options = parser.parse_args()
    found: dict[str, Any] = {"started": STARTED}

    def keep() -> None:
        temporary = options.output.with_suffix(".new")
        temporary.write_text(json.dumps(found))
        temporary.replace(options.output)

    keep()
    with (
        reference(options.module, options.workers)
        if options.reference
        else connect(options.scheduler_file) as client
    ):
        client.wait_for_workers(options.workers, timeout=60)
        found["connected"] = time.time()
        bench = Bench(client, options.module, FULL if options.module == "cupy" else SMALL)
        found["scheme"] = client.scheduler.address.split(":")[0]
        found["workers"] = len(bench.workers)
        found["can_open"] = sorted(
            len(paths) for paths in client.run(can_open, options.devices).values()
        )
        keep()
        names = ["transfer", *(["far"] if options.workers > 2 else []), "transpose", "svd"]
        for name in () if options.start_only else names:
            found[name] = measure(bench, name)
            keep()
            print(name, json.dumps(found[name]), flush=True)


if __name__ == "__main__":
    main()
