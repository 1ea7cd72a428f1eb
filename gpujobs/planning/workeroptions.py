"""The options of a worker: on a command line, and as keywords of its class.

`dask cuda worker` and `dask worker` take options, dask-mpi's ``--worker-options`` takes keywords as
JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..config.profile import Profile, Workers
from ..injob.names import LOOPBACK
from ..text import number_text, size_text
from .bash import Diagnostics
from .shape import JobShape

HTTP_ADDRESS = f"{LOOPBACK}:0"
"""Where the HTTP server of a worker listens; dask starts it even without a dashboard."""

CUDA = (
    "device_memory_limit", "enable_cudf_spill", "cudf_spill_stats",
    "rmm_pool_size", "rmm_maximum_pool_size", "rmm_managed_memory", "rmm_async",
    "rmm_release_threshold", "rmm_log_directory", "rmm_track_allocations",
    "set_rmm_allocator_for_libs", "pre_import", "worker_port",
    "enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink", "enable_rdmacm",
)  # fmt: skip
"""The options of dask-cuda 26.x by name."""
_ALSO_PLAIN = ("worker_port",)
"""Options that `dask worker` has, too."""
_ONLY_PLAIN = (
    "lifetime", "lifetime_restart", "lifetime_stagger", "nanny", "nanny_port", "nworkers",
    "preload_nanny", "scheduler_sni",
)  # fmt: skip
"""Options of `dask worker` that `dask cuda worker` does not have."""
_COMMAND = ("dashboard", "dashboard_address", "dashboard_prefix", "pid_file")
"""Options of both commands that are neither keys of `workers` nor set by gpujobs."""
_ONLY_CUDA = ("multiprocessing_method",)
_NANNY = (
    "dashboard", "dashboard_address", "executor", "extensions", "heartbeat_interval", "lifetime",
    "lifetime_restart", "lifetime_stagger", "low_level_profiler", "metrics", "port",
    "preload_nanny", "preload_nanny_argv", "profile_cycle_interval", "quiet", "reconnect",
    "scheduler_sni", "services", "silence_logs", "startup_information", "transition_counter_max",
    "validate",
)  # fmt: skip
"""Keywords of Nanny and Worker for `layout: mpi`; CUDAWorker passes them on."""
_OF_CLASS = {
    "cuda": ("pid_file", "dashboard_prefix"),
    "nanny": ("config", "data", "env", "http_prefix", "plugins"),
}
"""Extra keywords, by the worker's class."""
_CUDA_MEMORY = 2**30
"""Bytes of host memory that a CUDA worker needs: importing cupy and cudf takes most of it."""
DEVICE_MEMORY_LIMIT = "0.8"
"""dask-cuda's default: the part of the GPU's memory above which data is spilled to the host."""
_KEYWORDS = {"set_rmm_allocator_for_libs": "rmm_allocator_external_lib_list"}
"""Keywords of CUDAWorker that are not named like the option."""


def words(workers: Workers, gpus: bool) -> list[str]:
    """Return the options as words of a command line, not quoted; ``gpus``: it is a GPU worker."""
    workers = with_shares(workers)
    names = _given(workers, CUDA if gpus else _ALSO_PLAIN)
    values = [*((name, getattr(workers, name)) for name in names), *workers.options.items()]
    others = [word for name, value in values for word in _words(name, value)]
    own = [f"--dashboard-address={HTTP_ADDRESS}"]
    if workers.resources:
        own.append(f"--resources={resources(workers, gpus)}")
    return [*own, *others, *_words("preload", list(workers.preload))]


def default_resources(workers: Workers, gpus: bool) -> list[str]:
    """Return the option of gpujobs for resources that dask's configuration overrides."""
    if workers.resources is not None or not gpus:
        return []
    return [f"--resources={resources(workers, gpus)}"]


def keywords(profile: Profile, cuda: bool) -> dict[str, object]:
    """Return the same options as keywords of the worker's class; ``cuda``: it is CUDAWorker."""
    workers = with_shares(profile.workers)
    found: dict[str, object] = {
        "dashboard": False,
        "dashboard_address": HTTP_ADDRESS,
        "death_timeout": death_timeout(profile),
    }
    if workers.resources:
        # CUDAWorker takes the text of the command line, Worker a mapping.
        found["resources"] = resources(workers, True) if cuda else amounts(workers, True)
    for name in _given(workers, CUDA):
        value = getattr(workers, name)
        found[_KEYWORDS.get(name, name)] = list(value) if isinstance(value, tuple) else value
    if workers.preload:
        found["preload"] = list(workers.preload)
    return {**found, **workers.options}


def resources(workers: Workers, gpus: bool) -> str:
    """Return the text of dask's option for resources."""
    found = amounts(workers, gpus)
    return " ".join(f"{name}={number_text(value)}" for name, value in found.items())


def amounts(workers: Workers, gpus: bool) -> dict[str, float]:
    """Return the resources of a worker; a GPU worker has its GPUs if the profile says nothing.

    A worker that shares a GPU has one, too: a task that asks for a GPU could run on none otherwise.
    """
    if workers.resources is None and gpus:
        return {"GPU": float(workers.gpus_per_worker)}
    return workers.resources or {}


def size_options(workers: Workers) -> list[str]:
    """Return the options of a job and of its ranks for workers that do not have one GPU each."""
    sizes = {
        "--gpus-per-worker": workers.gpus_per_worker,
        "--workers-per-gpu": workers.workers_per_gpu,
    }
    return [f"{option}={number}" for option, number in sizes.items() if number > 1]


def mps_options(workers: Workers) -> list[str]:
    """Return the options of a job whose workers share a GPU through CUDA's MPS."""
    if not workers.mps:
        return []
    if not workers.mps_thread_percentage:
        return ["--mps"]
    return ["--mps", f"--mps-thread-percentage={workers.mps_thread_percentage}"]


def with_shares(workers: Workers) -> Workers:
    """Return the options with fractions of a GPU's memory divided among the workers on it."""
    sharing = workers.workers_per_gpu
    if sharing == 1 or workers.worker_class != "cuda":
        return workers
    limit = workers.device_memory_limit
    if not limit and not workers.enable_cudf_spill:
        limit = DEVICE_MEMORY_LIMIT
    return replace(
        workers,
        device_memory_limit=_part(limit, sharing),
        rmm_pool_size=_part(workers.rmm_pool_size, sharing),
        rmm_maximum_pool_size=_part(workers.rmm_maximum_pool_size, sharing),
        rmm_release_threshold=_part(workers.rmm_release_threshold, sharing),
    )


def _part(value: str | None, parts: int) -> str | None:
    """Return a part of a fraction; a number of bytes is unchanged."""
    if value is None or "." not in value:
        return value
    return f"{float(value) / parts:.6f}".rstrip("0")


def death_timeout(profile: Profile) -> int:
    """Return the seconds that a worker has to start; a nanny counts the imports, too."""
    return profile.workers.death_timeout or profile.start_timeout


def memory_note(workers: Workers, shape: JobShape) -> str:
    """Return that a CUDA worker has too little host memory to import its libraries; "" if not."""
    memory = shape.worker_memory
    if not shape.gpus or workers.worker_class != "cuda" or not memory or memory >= _CUDA_MEMORY:
        return ""
    text = f"each CUDA worker has {size_text(memory)} of host memory"
    return f"{text}: with less than about 1GiB it may pause for ever (`memory_per_job`)"


def memory_limit(shape: JobShape) -> list[str]:
    """Return the option for the host memory of a worker; nothing if not known."""
    if not shape.worker_memory:
        return []
    return [f"--memory-limit={size_text(shape.worker_memory)}"]


def check(diagnostics: Diagnostics, shape: JobShape, gpu_memory: int | None) -> None:
    """Report options that these workers do not have, or that cannot be met together.

    ``gpu_memory``: bytes of a GPU; None: not known.
    """
    workers, gpus = diagnostics.spec.profile.workers, bool(shape.gpus)
    if not gpus:
        _check_plain(diagnostics, "CPU workers")
    elif workers.worker_class != "cuda":
        _check_plain(diagnostics, "`worker_class: nanny`")
    elif diagnostics.spec.profile.layout == "workers":
        _check_cuda(diagnostics)
    _check_known(diagnostics, gpus)
    _check_ports(diagnostics, shape)
    _check_pool(diagnostics, gpu_memory)
    if workers.mps and diagnostics.spec.profile.run_on == "ranks":
        message = "`workers.mps` is for workers that gpujobs starts, not for ranks of the program"
        diagnostics.profile_error(message, "workers", "mps", hint="run_on: head")
    for option, why in _conflicts(workers):
        diagnostics.profile_error(f"`workers.{option}`: {why}", "workers", option)


def _conflicts(workers: Workers) -> Iterator[tuple[str, str]]:
    """Yield the options that cannot be met together with others, and why."""
    if workers.enable_nvlink and workers.rmm_managed_memory:
        yield "rmm_managed_memory", "NVLink does not work with managed memory"
    if workers.rmm_async and workers.rmm_managed_memory:
        yield "rmm_async", "rmm_async excludes rmm_managed_memory"
    if workers.rmm_release_threshold and not workers.rmm_async:
        yield "rmm_release_threshold", "needs `rmm_async: true`"
    if workers.rmm_maximum_pool_size and not (workers.rmm_pool_size or workers.rmm_async):
        yield "rmm_maximum_pool_size", "needs `rmm_pool_size`"
    if workers.enable_rdmacm and workers.enable_infiniband is False:
        yield "enable_rdmacm", "needs InfiniBand"


def _check_plain(diagnostics: Diagnostics, kind: str) -> None:
    profile = diagnostics.spec.profile
    names = [name for name in _given(profile.workers, CUDA) if name not in _ALSO_PLAIN]
    if names and profile.gpus == "auto":
        diagnostics.note(f"{kind} do not use {', '.join(names)}")
        return
    for name in names:
        message = f"`workers.{name}` is an option of CUDA workers, not of {kind}"
        diagnostics.profile_error(message, "workers", name)


def _given(workers: Workers, names: Iterable[str]) -> list[str]:
    return [name for name in names if getattr(workers, name) is not None]


def _check_cuda(diagnostics: Diagnostics) -> None:
    for name in diagnostics.spec.profile.workers.options:
        plain = name.replace("-", "_").removeprefix("no_")
        if plain not in _ONLY_PLAIN:
            continue
        hint = "use `worker_class: nanny`, or leave it out"
        if plain.startswith("lifetime"):
            part = plain.removeprefix("lifetime").strip("_").upper() or "DURATION"
            hint = f"set DASK_DISTRIBUTED__WORKER__LIFETIME__{part} in `env`"
        message = f"{_option(name)} is an option of `dask worker`, not of `dask cuda worker`"
        diagnostics.profile_error(message, "workers", "options", name, hint=hint)


def _check_known(diagnostics: Diagnostics, gpus: bool) -> None:
    """Report other options that the command, or the class, of these workers does not have."""
    profile = diagnostics.spec.profile
    if profile.run_on == "ranks":
        kind = "CUDAWorker" if profile.workers.worker_class == "cuda" else "Nanny"
        known = (*_NANNY, *_OF_CLASS[profile.workers.worker_class])
        names = list(profile.workers.options)
    else:
        cuda = gpus and profile.workers.worker_class == "cuda"
        kind = "`dask cuda worker`" if cuda else "`dask worker`"
        known = (*_COMMAND, *_ONLY_PLAIN, *(_ONLY_CUDA if cuda else ()))
        names = [name.removeprefix("no_") for name in profile.workers.options]
    for name in names:
        if name not in known:
            hint = f"it has {', '.join(sorted({*known} - {*_ONLY_PLAIN}))}"
            if name == "multiprocessing_method":
                hint = "set DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD in `env`"
            message = f"{kind} has no option {name}"
            diagnostics.profile_error(message, "workers", "options", name, hint=hint)


def _check_ports(diagnostics: Diagnostics, shape: JobShape) -> None:
    """Report fewer ports than a job has workers on a node."""
    first, _, last = (diagnostics.spec.profile.workers.worker_port or "").partition(":")
    wanted = shape.workers // shape.nodes
    if first and (there := int(last or first) - int(first) + 1) < wanted:
        message = f"{wanted} workers on a node need {wanted} ports, not {there}"
        hint = f"workers.worker_port: {first}:{int(first) + wanted - 1}"
        diagnostics.profile_error(message, "workers", "worker_port", hint=hint)


def _check_pool(diagnostics: Diagnostics, gpu_memory: int | None) -> None:
    """Report a pool of RMM above its maximum, and pools that a GPU has no memory for."""
    workers, place = diagnostics.spec.profile.workers, ("workers", "rmm_pool_size")
    texts = workers.rmm_pool_size, workers.rmm_maximum_pool_size
    if all(text and "." in text for text in texts):
        pool, most = (float(text or 0) for text in texts)
    else:
        pool, most = (_n_bytes(text, gpu_memory) for text in texts)
    if most and pool > most:
        message = f"`{'.'.join(place)}` is more than `rmm_maximum_pool_size`"
        diagnostics.profile_error(message, *place)
    pools = _n_bytes(texts[0], gpu_memory) * workers.workers_per_gpu
    if workers.workers_per_gpu > 1 and "." in (texts[0] or ""):
        return  # they get their parts of the fraction
    if gpu_memory and pools > gpu_memory and not workers.rmm_managed_memory:
        message = f"pools of {size_text(int(pools))} on a GPU, which has {size_text(gpu_memory)}"
        largest = size_text(gpu_memory // workers.workers_per_gpu // 2**30 * 2**30)
        diagnostics.profile_error(message, *place, hint=f"less than {largest}, or a fraction: 0.8")


def _n_bytes(text: str | None, gpu_memory: int | None) -> float:
    """Return an amount of GPU memory; 0 if there is none, or it is not known."""
    if not text:
        return 0
    return float(text) * (gpu_memory or 0) if "." in text else int(text)


def _words(name: str, value: object) -> list[str]:
    """Return an option as words; one whose value is a list is repeated."""
    option = _option(name)
    if value is False and name in CUDA and name.startswith("enable"):
        return [option.replace("enable", "disable", 1)]
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    items = value if isinstance(value, list) else [value]
    return [f"{option}={_text(item)}" for item in items]


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(item) for item in value)
    return str(value)
