"""Names of jobs and workers."""

from __future__ import annotations

HEAD = "head"
"""Group of the dask scheduler's own job."""


def job_worker_names(cluster: str, number: int, workers: int, ranks: int = 0) -> list[str]:
    """Return the names of the workers of job ``number``: with several of a process, dask-cuda appends which.

    ``ranks``: of an MPI allocation; its workers are named after their ranks.
    """
    if ranks:
        names = [f"{cluster}-{rank}" for rank in range(ranks)]
        gpus = workers // ranks
        return names if gpus == 1 else [f"{name}-{gpu}" for name in names for gpu in range(gpus)]
    name = f"{cluster}-{number}"
    return [name] if workers == 1 else [f"{name}-{gpu}" for gpu in range(workers)]
