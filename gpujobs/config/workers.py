"""The `workers` section of a profile: the options of every worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..injob.size import WorkerSize
from . import fields
from .document import core_value
from .kinds import (
    AMOUNT,
    COUNT,
    DURATION,
    FLAG,
    NUMBER,
    SIZE,
    SIZE_OR_FRACTION,
    TEXT,
    WORD,
    Items,
    Scalar,
    Table,
    at_most,
    choice,
)
from .model import Model, keys_of, optional

RESERVED_OPTIONS = (
    "name", "scheduler", "scheduler_file", "nworkers", "nthreads", "memory_limit", "resources",
    "preload_argv", "worker_class", "nanny", "local_directory",
    "protocol", "interface", "host", "listen_address", "contact_address",
    "security", "tls_ca_file", "tls_cert", "tls_key",
)  # fmt: skip

WORKER_CLASSES: dict[str, Literal["cuda", "nanny"]] = {
    "dask_cuda.CUDAWorker": "cuda",
    "CUDAWorker": "cuda",
    "distributed.Nanny": "nanny",
    "dask.distributed.Nanny": "nanny",
    "Nanny": "nanny",
}
"""Dask's names of the worker classes."""


def _module(value: object) -> str:
    return fields.printable(value, "a module's name").strip()


def _ports(value: object) -> str:
    text = fields.printable(value, "a port")
    found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    if not found:
        raise ValueError(f"{text!r} is not a port; write it as 8000 or 8000:8100")
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1024 <= first <= last <= 65535:
        raise ValueError(f"{text}: ports are from 1024 to 65535, the smaller one first")
    return text


def _option_name(value: object) -> str:
    text = fields.printable(value, "an option's name")
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", text):
        raise ValueError(f"{text!r} is not an option's name")
    name = text.replace("-", "_")
    if (own := name.removeprefix("no_")) in keys_of(Workers):
        raise ValueError(f"{text} is a key of `workers`: write `workers: {{{own}: …}}`")
    if name in RESERVED_OPTIONS:
        raise ValueError(f"{text} is set by gpujobs")
    return name


def _option_value(value: object) -> object:
    for text in _texts(value):
        fields.printable(text)
    return core_value(value)


def _texts(value: object) -> Iterator[str]:
    """Yield every text in ``value``, names of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _device_limit(value: object) -> str | None:
    """Return the limit of dask-cuda, which has words for its default and for none."""
    if value in ("default", "auto"):
        return None if value == "default" else "0"
    return fields.size_or_fraction(value)


_DEVICE_LIMIT = Scalar(_device_limit, SIZE_OR_FRACTION.json_schema)
_MODULES = Items(Scalar(_module, {"type": "string"}), split=fields.comma_list, text_too=True)
_PORTS = Scalar(_ports, {"type": ["string", "integer"], "pattern": r"^\d+(:\d+)?$"})
_AMOUNTS = Table(WORD, NUMBER, from_text=fields.amounts)
_OPTIONS = Table(Scalar(_option_name, {"type": "string"}), Scalar(_option_value, {}))


@dataclass(frozen=True, kw_only=True)
class Workers(Model):
    """Options of every worker. dask-cuda's own options keep their names."""

    threads: int = optional(
        AMOUNT, "threads of a worker; default: its part of `cpus_per_job`, else 1", default=1
    )
    memory: int | None = optional(SIZE, "host memory of a worker; default: its part of the job's")
    count: int | None = optional(AMOUNT, "number of CPU workers, with `gpus: 0`")
    gpus_per_worker: int = optional(AMOUNT, "GPUs of each worker, which sees no others", default=1)
    workers_per_gpu: int = optional(
        at_most(100), "workers on each GPU, which share its memory and the CPUs", default=1
    )
    resources: dict[str, float] | None = optional(
        _AMOUNTS, "dask resources; default GPU: the worker's number of GPUs, at least 1"
    )
    worker_class: Literal["cuda", "nanny"] = optional(
        choice("cuda", "nanny", synonyms=WORKER_CLASSES),
        "nanny: a plain worker pinned to its GPU",
        default="cuda",
    )
    local_directory: str | None = optional(
        TEXT, "scratch folder; default: the site's node-local one"
    )
    death_timeout: int | None = optional(
        DURATION, "how long a worker tries to reach the dask scheduler at start"
    )
    preload: tuple[str, ...] = optional(
        _MODULES, "modules or files that every worker runs at start", default=()
    )
    # dask-cuda's, by name
    device_memory_limit: str | None = optional(
        _DEVICE_LIMIT, "device memory above which data spills to host"
    )
    enable_cudf_spill: bool | None = optional(FLAG, "cuDF's own spilling instead of dask-cuda's")
    cudf_spill_stats: int | None = optional(COUNT, "level of cuDF's spill statistics")
    rmm_pool_size: str | None = optional(
        SIZE_OR_FRACTION, "RMM pool of each worker: size, or fraction of GPU"
    )
    rmm_maximum_pool_size: str | None = optional(SIZE_OR_FRACTION, "largest size of the pool")
    rmm_managed_memory: bool | None = optional(FLAG, "managed memory; not together with NVLink")
    rmm_async: bool | None = optional(
        FLAG, "RMM's asynchronous allocator; not together with managed memory"
    )
    rmm_release_threshold: str | None = optional(
        SIZE_OR_FRACTION, "with rmm_async: most memory that is kept"
    )
    rmm_log_directory: str | None = optional(TEXT, "folder of RMM's logs")
    rmm_track_allocations: bool | None = optional(FLAG, "track RMM's allocations")
    set_rmm_allocator_for_libs: tuple[str, ...] | None = optional(_MODULES, "cupy, torch")
    pre_import: tuple[str, ...] | None = optional(
        _MODULES, "modules that workers import before they accept tasks"
    )
    worker_port: str | None = optional(_PORTS, "port or first:last")
    enable_tcp_over_ucx: bool | None = optional(
        FLAG, "UCX: leave unset unless a transport is being measured"
    )
    enable_infiniband: bool | None = optional(FLAG, "UCX: as above")
    enable_nvlink: bool | None = optional(FLAG, "UCX: as above")
    enable_rdmacm: bool | None = optional(FLAG, "UCX: as above")
    options: dict[str, object] = optional(_OPTIONS, "any other option of the worker", default={})

    def check(self) -> None:
        """Refuse workers that have several GPUs and share each of them."""
        if self.gpus_per_worker > 1 and self.workers_per_gpu > 1:
            raise ValueError(
                "has `gpus_per_worker` and `workers_per_gpu`, which exclude each other"
            )

    @property
    def size(self) -> WorkerSize:
        """How many GPUs a worker has."""
        return WorkerSize(self.gpus_per_worker, self.workers_per_gpu)

    @property
    def gpu_memory(self) -> str:
        """How RMM allocates GPU memory: one of `injob.options.GPU_MEMORY`."""
        if self.rmm_managed_memory:
            return "managed"
        if self.rmm_async:
            return "async"
        return "pool" if self.rmm_pool_size else "plain"
