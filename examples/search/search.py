"""Search hyper-parameters with Optuna: each trial has a GPU, or a share of one."""

import argparse

import optuna
from distributed import Client, as_completed
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState


def train(rate, momentum):
    """Return the loss after training; a real program trains its model on the GPU."""
    weights, velocity = [4.0, -3.0], [0.0, 0.0]
    for _ in range(100):
        for n, curvature in enumerate((1.0, 10.0)):
            velocity[n] = momentum * velocity[n] - rate * curvature * weights[n]
            weights[n] += velocity[n]
    return min(weights[0] ** 2 + 10 * weights[1] ** 2, 1e6)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--gpus", type=float, default=1, help="the resource GPU of a trial")
    parser.add_argument("--study", default="study.log", help="a search continues with its file")
    options = parser.parse_args()

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(options.study))
    study = optuna.create_study(study_name="search", storage=storage, load_if_exists=True)
    trials = {}  # of Optuna, by their futures
    with Client() as client:
        workers = client.run(lambda dask_worker: dask_worker.state.total_resources.get("GPU", 0))
        gpus = sum(workers.values())
        resources = {"GPU": options.gpus} if gpus else {}  # a task without its resource waits

        def start():
            trial = study.ask()
            rate = trial.suggest_float("rate", 1e-4, 1, log=True)
            momentum = trial.suggest_float("momentum", 0, 0.99)
            future = client.submit(train, rate, momentum, resources=resources, pure=False)
            trials[future] = trial
            return future

        at_once = int(gpus / options.gpus) or sum(client.nthreads().values())
        kind = "GPU" if gpus else "CPU"
        print(f"{kind} workers: {len(workers)}; trials at a time: {at_once}", flush=True)
        running = as_completed([start() for _ in range(min(at_once, options.trials))])
        for future in running:
            failed = future.status == "error"
            result = {"state": TrialState.FAIL} if failed else {"values": future.result()}
            study.tell(trials[future], **result)
            if len(trials) < options.trials:
                running.add(start())
    print(f"{len(study.trials)} trials, best loss {study.best_value:.2g}: {study.best_params}")


if __name__ == "__main__":
    main()
