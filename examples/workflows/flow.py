"""A Prefect flow with a step on a cluster of gpujobs."""

import json
import sys
from pathlib import Path

from prefect import flow, task

import gpujobs


@task
def run_on_cluster(profile: str, settings: dict) -> str:
    """Run a profile to its end; raises JobFailedError with the reason. Returns the cluster's id."""
    cluster = gpujobs.submit(profile, settings=settings)
    try:
        cluster.wait()
    except BaseException:  # also if the flow is cancelled
        cluster.cancel()
        raise
    return cluster.id


@flow
def mean(settings: dict) -> float:
    """Compute the mean, and read the result."""
    run_on_cluster("profile.yaml", settings)
    return json.loads(Path("mean.json").read_text())["mean"]


if __name__ == "__main__":
    print(mean(json.loads(sys.argv[1]) if sys.argv[1:] else {}))
