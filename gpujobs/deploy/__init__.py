"""The cluster classes. Importing this imports dask, distributed and dask_jobqueue."""

from __future__ import annotations

from .cluster import GPUJobQueueCluster, GPULocalCluster

__all__ = [
    "GPUJobQueueCluster", "GPULSFCluster", "GPULocalCluster", "GPUPBSCluster", "GPUSGECluster",
    "GPUSLURMCluster", "here",
]  # fmt: skip

here = GPUJobQueueCluster.here


class GPUSLURMCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on a site with Slurm."""

    batch_schedulers = ("slurm",)


class GPUPBSCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on a site with OpenPBS, PBS Professional or Torque."""

    batch_schedulers = ("pbs", "torque")


class GPULSFCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on a site with LSF."""

    batch_schedulers = ("lsf",)


class GPUSGECluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on a site with Grid Engine."""

    batch_schedulers = ("sge",)
