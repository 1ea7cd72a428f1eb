"""The options of a worker, as command lines have them and as Python has them.

`dask cuda worker` and `dask worker` take the first, dask-mpi's ``--worker-options`` takes the second, as JSON.
"""

from __future__ import annotations

from typing import Any

from ..config.profile import Workers
from .diagnostics import Diagnostics

# Options of dask-cuda 26.x by name, and the pair of switches of those that are yes or no.
CUDA = {
    "device_memory_limit": None,
    "enable_cudf_spill": ("--enable-cudf-spill", "--disable-cudf-spill"),
    "cudf_spill_stats": None,
    "rmm_pool_size": None,
    "rmm_maximum_pool_size": None,
    "rmm_managed_memory": ("--rmm-managed-memory", "--no-rmm-managed-memory"),
    "rmm_async": ("--rmm-async", "--no-rmm-async"),
    "rmm_release_threshold": None,
    "rmm_log_directory": None,
    "rmm_track_allocations": ("--rmm-track-allocations", "--no-rmm-track-allocations"),
    "set_rmm_allocator_for_libs": None,
    "pre_import": None,
    "worker_port": None,
    "enable_tcp_over_ucx": ("--enable-tcp-over-ucx", "--disable-tcp-over-ucx"),
    "enable_infiniband": ("--enable-infiniband", "--disable-infiniband"),
    "enable_nvlink": ("--enable-nvlink", "--disable-nvlink"),
    "enable_rdmacm": ("--enable-rdmacm", "--disable-rdmacm"),
}
_PLAIN_TOO = ("worker_port",)  # `dask worker` has these as well


def words(workers: Workers) -> list[str]:
    """Return the options that the profile sets, as words of a command line."""
    found = []
    for name, switches in CUDA.items():
        value = getattr(workers, name)
        if value is None:
            continue
        if switches:
            found.append(switches[0] if value else switches[1])
        else:
            found.append(f"--{name.replace('_', '-')}={_text(value)}")
    for name, value in workers.options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True or value is False:
            found.append(option if value else option.replace("--", "--no-", 1))
        else:
            found += [
                f"{option}={_text(item)}"
                for item in (value if isinstance(value, list) else [value])
            ]
    return [*found, *(f"--preload={name}" for name in workers.preload)]


def keywords(workers: Workers, cuda: bool) -> dict[str, Any]:
    """Return the same options as keywords of the worker's class, for dask-mpi, which takes them as JSON."""
    renamed = {"set_rmm_allocator_for_libs": "rmm_allocator_external_lib_list"}
    found: dict[str, Any] = {"dashboard": False, "death_timeout": workers.death_timeout or 60}
    if text := resources(workers, True):
        # CUDAWorker takes the text of the command line, Worker a mapping.
        pairs = (item.split("=") for item in text.split())
        found["resources"] = text if cuda else {name: float(amount) for name, amount in pairs}
    for name in CUDA:
        value = getattr(workers, name)
        if value is not None:
            found[renamed.get(name, name)] = list(value) if isinstance(value, tuple) else value
    if workers.preload:
        found["preload"] = list(workers.preload)
    return {**found, **workers.options}


def resources(workers: Workers, gpus: bool) -> str:
    """Return ``GPU=1`` or what the profile says instead, as the command line has it."""
    wanted = workers.resources if workers.resources is not None else ({"GPU": 1.0} if gpus else {})
    return " ".join(f"{name}={value:g}" for name, value in wanted.items())


def check(diagnostics: Diagnostics, gpus: bool) -> None:
    """Report options that this kind of worker does not have, and those that exclude each other."""
    workers = diagnostics.spec.profile.workers
    cuda = gpus and workers.worker_class == "cuda"
    for name in CUDA:
        if getattr(workers, name) is not None and not cuda and name not in _PLAIN_TOO:
            what = "`worker_class: nanny`" if gpus else "CPU workers"
            diagnostics.profile(
                f"`workers.{name}` is an option of CUDA workers, not of {what}", "workers", name
            )
    conflicts = (
        (
            workers.enable_nvlink and workers.rmm_managed_memory,
            "rmm_managed_memory",
            "NVLink does not work with managed memory",
        ),
        (
            workers.rmm_async and workers.rmm_managed_memory,
            "rmm_async",
            "rmm_async excludes rmm_managed_memory",
        ),
        (
            workers.rmm_release_threshold and not workers.rmm_async,
            "rmm_release_threshold",
            "needs `rmm_async: true`",
        ),
        (
            workers.rmm_maximum_pool_size and not (workers.rmm_pool_size or workers.rmm_async),
            "rmm_maximum_pool_size",
            "needs `rmm_pool_size`",
        ),
        (
            workers.enable_rdmacm and workers.enable_infiniband is False,
            "enable_rdmacm",
            "needs InfiniBand",
        ),
    )
    for clash, name, message in conflicts:
        if clash:
            diagnostics.profile(f"`workers.{name}`: {message}", "workers", name)


def _text(value: Any) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)
