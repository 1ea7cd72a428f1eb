"""The cluster classes. Importing this imports dask, distributed and dask_jobqueue."""

from __future__ import annotations

from .owner import GPUJobQueueCluster

__all__ = ["CLASSES", "GPUJobQueueCluster", "GPULocalCluster", "GPUSGECluster", "GPUSLURMCluster"]


class GPUSLURMCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on a site with Slurm."""

    batch_schedulers = ("slurm",)


class GPUSGECluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on a site with Grid Engine."""

    batch_schedulers = ("sge",)


class GPULocalCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on this machine, without a batch scheduler."""

    batch_schedulers = ("local",)
    default_site = "local"


CLASSES: dict[str, type[GPUJobQueueCluster]] = {
    name: cls for cls in (GPUSLURMCluster, GPUSGECluster, GPULocalCluster) for name in cls.batch_schedulers
}
"""Which class a site's batch scheduler picks."""
