"""Names that the client and the jobs of a cluster must compute alike."""

from __future__ import annotations

HEAD = "head"
"""Group of a job that has only the dask scheduler and `run`."""
ARCHIVE = "injob.pyz"
"""File in the cluster's folder: this package, as its jobs import it."""
PACKAGE = "gpujobs_injob"
"""Name of this package in the archive. A plain `injob` could hide a module of the user."""
PRELOAD = f"{PACKAGE}.preload"
"""Module that dask's processes preload."""
EXTRA_RANKS = 2
"""Ranks without GPUs if the user's script runs in all ranks: dask scheduler and client."""


def job_worker_names(cluster_id: str, number: int, workers: int, ranks: int = 0) -> list[str]:
    """Return the names of the workers of job ``number``.

    ``workers``: how many the job has; dask-cuda appends the number of the GPU if these are several.
    ``ranks``: MPI ranks with GPUs; with them, the workers are named after their ranks.
    """
    if ranks:
        processes = [f"{cluster_id}-{rank}" for rank in range(ranks)]
        workers //= ranks
    else:
        processes = [f"{cluster_id}-{number}"]
    if workers < 2:
        return processes
    return [f"{process}-{gpu}" for process in processes for gpu in range(workers)]
