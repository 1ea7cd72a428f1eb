"""Clean tables and aggregate them: Parquet files in and out, cuDF on GPU workers."""

import argparse
from pathlib import Path

import dask
import dask.dataframe as dd
from distributed import Client

MISSING = """the workers cannot import cudf: {reason}
This example waits for NVIDIA GPUs and RAPIDS: pip install 'dask-cudf-cu12' or 'dask-cudf-cu13' in
the environment of the jobs. On CPU workers it runs with --backend pandas."""


def cudf_problem() -> str:
    """Return why this process cannot use cuDF, or ""."""
    try:
        import dask_cudf  # noqa: F401
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=["cudf", "pandas"], default="cudf")
    parser.add_argument("--folder", type=Path, default=Path("tables"))
    options = parser.parse_args()

    with Client() as client, dask.config.set({"dataframe.backend": options.backend}):
        client.wait_for_workers(1)
        problems = client.run(cudf_problem) if options.backend == "cudf" else {}
        if reason := next(filter(None, problems.values()), ""):
            raise SystemExit(MISSING.format(reason=reason))
        raw, result = str(options.folder / "raw"), str(options.folder / "by-name")
        # A table of random sales; a real program starts with the next step.
        dask.datasets.timeseries(start="2000-01-01", end="2000-01-11", freq="10s").to_parquet(raw)

        sales = dd.read_parquet(raw)
        sales = sales[(sales["x"] > -0.9) & (sales["y"] > 0)]
        sales = sales.assign(price=sales["x"] * sales["y"])
        table = sales.groupby("name").agg({"price": ["mean", "count"], "id": "max"}, split_out=2)
        table.columns = ["mean_price", "count", "last_id"]
        table.to_parquet(result)
        found = dd.read_parquet(result)
        names, rows = dask.compute(found.shape[0], found["count"].sum())
    print(f"{int(rows)} of 86400 rows are left, with {int(names)} names, in {result}")


if __name__ == "__main__":
    main()
