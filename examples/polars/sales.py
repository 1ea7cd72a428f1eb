"""Aggregate Parquet files with Polars on all GPU workers: the DaskEngine of cudf-polars."""

import argparse
import random
from pathlib import Path

from distributed import Client

MISSING = """the workers cannot import cudf_polars: {reason}
This example waits for NVIDIA GPUs and RAPIDS: pip install 'cudf-polars-cu12' or
'cudf-polars-cu13' in the environment of the jobs."""


def polars_problem() -> str:
    """Return why this process cannot use the engine, or ""."""
    try:
        import cudf_polars.engine.dask  # noqa: F401
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def aggregate(client: Client, folder: Path) -> None:
    import polars as pl
    from cudf_polars.engine.dask import DaskEngine
    from cudf_polars.engine.hardware_binding import HardwareBindingPolicy

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(8):
        prices = [random.random() for _ in range(100_000)]
        keys = [row % 26 for row in range(len(prices))]
        pl.DataFrame({"key": keys, "price": prices}).write_parquet(folder / f"{number}.parquet")

    sales = pl.scan_parquet(folder / "*.parquet").filter(pl.col("price") > 0.5)
    means = sales.group_by("key").agg(pl.col("price").mean())
    # gpujobs has bound the workers to the CPUs near their GPUs already.
    options = {"hardware_binding": HardwareBindingPolicy(enabled=False)}
    with DaskEngine(dask_client=client, engine_options=options) as engine:
        print(f"{means.collect(engine=engine).height} means on {engine.nranks} GPUs")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("sales"))
    options = parser.parse_args()

    with Client() as client:  # `run` starts when all workers have connected
        if reason := next(filter(None, client.run(polars_problem).values()), ""):
            raise SystemExit(MISSING.format(reason=reason))
        aggregate(client, options.folder)


if __name__ == "__main__":
    main()
