"""The cluster classes. Importing this imports dask, distributed and dask_jobqueue."""

from __future__ import annotations

from .owner import GPUJobQueueCluster

__all__ = ["CLASSES", "GPUJobQueueCluster", "GPULSFCluster", "GPULocalCluster", "GPUSLURMCluster"]


class GPUSLURMCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on a site with Slurm."""

    batch_schedulers = ("slurm",)


class GPULSFCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on a site with LSF."""

    batch_schedulers = ("lsf",)


class GPULocalCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on this machine, without a batch scheduler."""

    batch_schedulers = ("local",)


CLASSES: dict[str, type[GPUJobQueueCluster]] = {
    "slurm": GPUSLURMCluster,
    "lsf": GPULSFCluster,
    "local": GPULocalCluster,
}
"""Which class a site's batch scheduler picks."""
