"""GPULocalCluster: the cluster class for this machine, as dask_cuda.LocalCUDACluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..clusters.machine import this_machine
from ..errors import InputError
from ..injob.size import WorkerSize
from .cluster import GPUJobQueueCluster
from .keywords import document_of
from .localcuda import LOCAL, device_list, options_of_scheduler
from .vocabulary import PARAMETERS


class GPULocalCluster(GPUJobQueueCluster):
    """A `GPUJobQueueCluster` on this machine, without a batch scheduler.

    It starts one worker on every free GPU, and takes the keywords of
    ``dask_cuda.LocalCUDACluster``; docs/python.md has a table of them.

    Parameters
    ----------
    n_workers
        Workers to start with; default, and ``"auto"``: on all GPUs that are free. CPU workers with
        ``gpus_per_job=0``; default then: none.
    CUDA_VISIBLE_DEVICES
        The GPUs to use, even if other processes use them, as ``"0,1"`` or ``[0, 1]``.
    host, scheduler_port, dashboard_address, scheduler_kwargs
        Options of a dask scheduler in this process. Without ``host``, all processes accept
        connections from this machine only. ``dashboard_address=None``: no dashboard.

    Examples
    --------
    >>> cluster = GPULocalCluster(protocol="ucxx", rmm_pool_size=0.8)  # doctest: +SKIP
    """

    batch_schedulers = ("local",)
    default_site = "local"
    vocabulary = LOCAL

    def __init__(
        self,
        site: str | None = None,
        *,
        n_workers: int | Literal["auto"] | None = None,
        CUDA_VISIBLE_DEVICES: Any = None,
        host: str | None = None,
        scheduler_port: int | None = None,
        dashboard_address: str | int | None = "",
        scheduler_options: Mapping[str, Any] | None = None,
        scheduler_kwargs: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        self._devices = device_list(CUDA_VISIBLE_DEVICES)
        if n_workers is None or n_workers == "auto":
            n_workers = _workers_on_free_gpus(self._devices, keywords)
        super().__init__(
            site,
            n_workers=n_workers,
            scheduler_options=options_of_scheduler(
                scheduler_options,
                scheduler_kwargs,
                host=host,
                port=scheduler_port,
                dashboard=False if dashboard_address is None else None,
                dashboard_address=dashboard_address or None,
            ),
            **keywords,
        )


def _workers_on_free_gpus(devices: tuple[str, ...] | None, keywords: Mapping[str, Any]) -> int:
    """Return how many workers fit on the free GPUs, in whole jobs; 0 with CPU workers.

    Raises InputError.
    """
    per_worker = keywords.get("gpus_per_worker", keywords.get("worker_gpu", 1))
    per_job, per_gpu = keywords.get("gpus_per_job", per_worker), keywords.get("workers_per_gpu", 1)
    numbers = per_worker, per_job, per_gpu
    if not all(isinstance(n, int) and n > 0 for n in numbers):  # CPU workers; or refused later
        return 0
    machine = this_machine(devices)
    if not machine.gpus:
        own = {name: value for name, value in keywords.items() if name not in PARAMETERS}
        document_of(own, vocabulary=LOCAL)  # a misspelled keyword is reported first
        busy = ": all are in use" if machine.busy else ""
        message = f"this machine has no free GPU{busy}"
        raise InputError(message, hint="gpus_per_job=0 with n_workers=… starts CPU workers")
    return WorkerSize(per_worker, per_gpu).workers(len(machine.gpus) // per_job * per_job)
