"""Names of jobs and workers."""

from __future__ import annotations

HEAD = "head"
"""Group of the dask scheduler's own job."""


def rank_worker_names(cluster: str, ranks: int, gpus: int) -> list[str]:
    """Return the names of the workers of ``ranks`` MPI ranks with ``gpus`` GPUs each."""
    if gpus == 1:
        return [f"{cluster}-{rank}" for rank in range(ranks)]
    return [f"{cluster}-{rank}-{gpu}" for rank in range(ranks) for gpu in range(gpus)]


def job_worker_names(cluster: str, number: int, workers: int) -> list[str]:
    """Return the names of the workers of job ``number``: with several, dask-cuda appends which."""
    name = f"{cluster}-{number}"
    return [name] if workers == 1 else [f"{name}-{gpu}" for gpu in range(workers)]
