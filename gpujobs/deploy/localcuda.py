"""The keywords of dask_cuda.LocalCUDACluster, for clusters on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..config.fields import comma_list
from ..errors import InputError
from ..planning.workeroptions import CUDA
from .conversions import Setting, memory
from .options import check_mapping
from .vocabulary import JOBQUEUE, Vocabulary

DEVICE_SIZES = (
    "device_memory_limit",
    "rmm_pool_size",
    "rmm_maximum_pool_size",
    "rmm_release_threshold",
)
"""Options of workers that dask-cuda also takes as a number of bytes."""
UCX_TRANSPORTS = ("enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink")
"""Options of workers that need ucxx."""


def device_list(value: object) -> tuple[str, ...] | None:
    """Return the GPUs of the keyword CUDA_VISIBLE_DEVICES. Raises InputError."""
    if value is None:
        return None
    items = comma_list(value) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items:
        message = f"CUDA_VISIBLE_DEVICES: {value!r} is not a list of GPUs"
        raise InputError(message, hint="CUDA_VISIBLE_DEVICES='0,1' or [0, 1]")
    devices = tuple(str(item).strip() for item in items)
    if len(set(devices)) < len(devices):
        raise InputError(f"CUDA_VISIBLE_DEVICES: {value!r} names a GPU twice")
    return devices


def options_of_scheduler(
    options: Mapping[str, Any] | None,
    kwargs: Mapping[str, Any] | None,
    **own: object,
) -> dict[str, Any]:
    """Return the options of the dask scheduler from keywords; ``own`` is by name, None: not given.

    Raises InputError if two keywords set the same option, or one is not a mapping.
    """
    for place, value in (("scheduler_options", options), ("scheduler_kwargs", kwargs)):
        check_mapping(place, {} if value is None else value)
    found: dict[str, Any] = dict(options or {})
    given = {name: value for name, value in own.items() if value is not None}
    for name, value in [*(kwargs or {}).items(), *given.items()]:
        if found.setdefault(name, value) != value:
            raise InputError(f"keyword {name}: scheduler_options or scheduler_kwargs sets it, too")
    return found


def _device_size(value: Any) -> Any:
    """Return a size of device memory: a whole number is in bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        return f"{value}B"
    return value


def _memory_limit(value: Any) -> Iterator[Setting]:
    """Yield the host memory of a worker: bytes, a fraction of this machine's, or a text."""
    if value == "auto":
        return
    if isinstance(value, float) and value <= 1:
        import psutil

        value = int(value * psutil.virtual_memory().total)
    if value == 0:
        raise ValueError("0 is no limit, which is not possible here; leave it out")
    yield ("workers", "memory"), memory(int(value) if isinstance(value, float) else value)


def _ucx_transport(name: str, value: Any) -> Iterator[Setting]:
    yield ("workers", name), value
    if value is True:
        yield ("network", "protocol"), "ucxx"


def _ucx_transports() -> dict[str, Any]:
    return {name: lambda value, name=name: _ucx_transport(name, value) for name in UCX_TRANSPORTS}


_OWN_PARAMETERS = ("host", "dashboard_address")
"""Keywords of dask-jobqueue without a meaning that GPULocalCluster has."""

LOCAL = Vocabulary(
    synonyms={
        **JOBQUEUE.synonyms,
        **{name: ("workers", name) for name in CUDA},
        "threads_per_worker": ("workers", "threads"),
        "rmm_allocator_external_lib_list": ("workers", "set_rmm_allocator_for_libs"),
    },
    converted={
        **JOBQUEUE.converted,
        **{name: (("workers", name), _device_size) for name in DEVICE_SIZES},
    },
    several={
        **JOBQUEUE.several,
        **_ucx_transports(),
        "memory_limit": _memory_limit,
    },
    refused={
        **{name: hint for name, hint in JOBQUEUE.refused.items() if name not in _OWN_PARAMETERS},
        "blocked_handlers": "use scheduler_kwargs={'blocked_handlers': …}",
        "data": "use device_memory_limit and memory_limit: an object cannot be passed to a job",
        "ip": "use host",
        "jit_unspill": "use enable_cudf_spill: dask-cuda has no jit_unspill any more",
        "log_spilling": "use cudf_spill_stats, with enable_cudf_spill",
        "processes": "leave it out: every worker is a process",
        "scheduler_sync_interval": "leave it out: the jobs are watched all the time",
        "service_kwargs": "use scheduler_kwargs={'service_kwargs': …}",
        "services": "leave it out: dask no longer uses it",
        "start": "leave it out: dask no longer uses it",
        "worker_dashboard_address": "leave it out: the workers have no dashboard",
        "worker_services": "leave it out: dask no longer uses it",
    },
)
"""Of LocalCUDACluster and dask-jobqueue."""
