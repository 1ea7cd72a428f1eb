"""How many GPUs a worker has: one, several, or a part of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Nanny

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = "GPUJOBS_WORKER_DEVICES"
"""CUDA_VISIBLE_DEVICES of each worker of a process, separated by semicolons."""
_SIZE = "GPUJOBS_WORKER_SIZE"
"""The size of the workers, as ``GPUS,PER_GPU``."""


@dataclass(frozen=True)
class WorkerSize:
    """``gpus`` GPUs for each worker, or ``per_gpu`` workers on each GPU; one of both is 1."""

    gpus: int = 1
    per_gpu: int = 1

    @property
    def usual(self) -> bool:
        """Whether each worker has one GPU, and each GPU one worker."""
        return self == WorkerSize()

    def workers(self, gpus: int) -> int:
        """Return the number of workers on ``gpus`` GPUs."""
        return gpus // self.gpus * self.per_gpu

    def gpus_of(self, workers: int) -> int:
        """Return the least number of GPUs that have ``workers`` workers."""
        return -(-workers // self.per_gpu) * self.gpus

    def devices(self, devices: Sequence[str]) -> list[str]:
        """Return CUDA_VISIBLE_DEVICES of each worker on these GPUs.

        A worker of several GPUs sees no others: libraries take all that they see. Another worker
        also sees the others, after its own, for NVLink among them.
        """
        firsts = [first for first in range(0, len(devices), self.gpus) for _ in range(self.per_gpu)]
        if self.gpus > 1:
            lists = [devices[first : first + self.gpus] for first in firsts]
        else:
            lists = [[*devices[first:], *devices[:first]] for first in firsts]
        return [",".join(own) for own in lists]

    def environ(self, devices: Sequence[str]) -> dict[str, str]:
        """Return the variables of a process that starts a worker for each of ``devices``.

        ``devices`` are from `WorkerSize.devices`. dask-cuda starts a worker for each entry of
        CUDA_VISIBLE_DEVICES; `worker_devices` then gives the worker its own.
        """
        return {
            VISIBLE: ",".join(own.split(",")[0] for own in devices),
            _DEVICES: ";".join(devices),
            _SIZE: f"{self.gpus},{self.per_gpu}",
        }

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> WorkerSize:
        """Return the size of the workers in this environment."""
        gpus, per_gpu = environ.get(_SIZE, "1,1").split(",")
        return cls(int(gpus), int(per_gpu))


def worker_devices(name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES of a worker; its name ends with its number in the process.

    Nothing if dask-cuda chooses the GPU.
    """
    if _DEVICES not in environ:
        return {}
    devices = environ[_DEVICES].split(";")
    if len(devices) == 1:
        return {VISIBLE: devices[0]}
    return {VISIBLE: devices[int(name.rpartition("-")[2])]}


async def dask_setup(nanny: Nanny) -> None:
    """Give the worker of a nanny its GPUs; dask calls this before it starts the worker."""
    import os

    nanny.env = {**nanny.env, **worker_devices(str(nanny.name), os.environ)}
