"""Train gradient-boosted trees with XGBoost on all workers, on their GPUs if they have any."""

import argparse

import dask.array as da
from distributed import Client
from xgboost import dask as xgboost

COLUMNS = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--workers", type=int, default=1, help="number of workers to wait for")
    options = parser.parse_args()

    with Client() as client:
        client.wait_for_workers(options.workers)
        workers = client.run(lambda dask_worker: dask_worker.state.total_resources.get("GPU", 0))
        device = "cuda" if all(workers.values()) else "cpu"

        random = da.random.default_rng(0)  # a real program reads its tables
        x = random.standard_normal((options.rows, COLUMNS), chunks=(options.rows // 16, COLUMNS))
        y = (x[:, 0] + 2 * x[:, 1] * x[:, 2] > 0).astype("int8")
        x, y = client.persist([x, y])
        table = xgboost.DaskQuantileDMatrix(client, x, y)
        parameters = {
            "objective": "binary:logistic",
            "eval_metric": "logloss",
            "tree_method": "hist",
            "device": device,
            "verbosity": 1,
        }
        # Each worker has the part of the table that it holds, and one tree is built by all.
        model = xgboost.train(
            client,
            parameters,
            table,
            num_boost_round=options.rounds,
            evals=[(table, "train")],
            verbose_eval=False,
        )
        losses = model["history"]["train"]["logloss"]
        predicted = xgboost.predict(client, model, x) > 0.5
        accuracy = float((predicted == y).mean().compute())
    print(f"trained on {len(workers)} workers, device {device}")
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end; accuracy {accuracy:.3f}")
    assert accuracy > 0.9


if __name__ == "__main__":
    main()
