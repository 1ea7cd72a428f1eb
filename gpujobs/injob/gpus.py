"""GPUs: which ones a job has, which one a worker has, and how busy they are."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile
from pathlib import Path
from typing import Any

from .folder import Binding, Gpu, RegisteredWorker, all_gpus
from .names import MPS, VISIBLE, WorkerSize, named, ranges
from .network import node_name

_INFINIBAND = "/sys/class/infiniband"
_DRIVER = Path("/proc/driver/nvidia")
_DEVICES = Path("/dev")
_SYSTEM = Path("/sys")
_WORD = 64  # bits in NVML's masks of CPUs
_NO_DEVICE = ("NoDevFiles", "-1")


# -- of a job --------------------------------------------------------------------------------------
def job_devices(
    source: str, count: int, environ: Mapping[str, str], *, explicit: bool, step: bool = False
) -> list[str] | None:
    """Return the ``count`` GPUs of this job on this node, as entries for CUDA_VISIBLE_DEVICES.

    ``source`` is `visible_devices` of the site. None: all of the node, and nothing lists them; with
    ``explicit`` they are listed then, too. Raises LookupError if their number is not ``count``.
    ``step``: the process is in a step of the job, which may have fewer GPUs than the job has.
    """
    try:
        devices = visible_devices(source, environ)
    except LookupError:
        # Some sites isolate GPUs without setting the variable: the driver shows only the job's own.
        if source != "scheduler" or _gpus_of_driver() != count:
            raise
        return first_devices(count)
    if devices is None:
        return first_devices(count) if explicit else None
    if len(devices) != count:
        listed = ",".join(devices) or environ.get(VISIBLE) or "none"
        if step and len(devices) < count:  # Slurm 26.05.0 to .2; the node is not to blame
            message = f"the launcher's step has {len(devices)} of the job's {count} GPUs ({listed})"
            raise LookupError(f"{message} (`node_launcher`, or `mpi`, of the site)")
        raise LookupError(f"{count} GPUs were requested, but {len(devices)} assigned ({listed})")
    if beyond := _beyond(devices):
        raise LookupError(beyond)
    return devices


def _beyond(devices: Iterable[str]) -> str:
    """Return which index in ``devices`` is above those of the node; "" if none is, or not known.

    The driver's list of GPUs has also those that the job cannot open, but not their slices.
    """
    number = len(gpu_models(_DRIVER))
    if not number or any(_DRIVER.glob("capabilities/gpu*/mig/gi*")):
        return ""
    wrong = (device for device in devices if device.isdigit() and int(device) >= number)
    return "".join(f"there is no GPU {device}: the node has {number}" for device in [*wrong][:1])


def listed_devices(text: str) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES that name a GPU; Slurm writes NoDevFiles for none.

    CUDA ignores all entries behind one that names none.
    """
    names = (name for name in map(str.strip, text.split(",")) if name)
    return list(takewhile(lambda name: name not in _NO_DEVICE, names))


def visible_devices(source: str, environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that are listed for this job, in the order of the list.

    ``source`` is one of scheduler, exclusive, variable:NAME, file:NAME. An entry is an index, a
    GPU- uuid or a MIG- uuid. None: all of the node. Raises LookupError if the list is missing.
    """
    kind, _, name = source.partition(":")
    if kind == "file":
        return _devices_in_file(name, environ)
    if kind == "variable":
        return _devices_in_variable(name, environ)
    listed = environ.get(VISIBLE)
    if listed is not None:
        return listed_devices(listed)
    if kind == "scheduler":
        raise LookupError(
            f"{VISIBLE} is not set: the job has no GPU, or a prologue or `setup` unsets it"
        )
    return None


def _devices_in_file(name: str, environ: Mapping[str, str]) -> list[str]:
    """Torque lists the GPUs of all nodes of the job in a file: one line `node1-gpu0` for each."""
    path = environ.get(name)
    if not path or not Path(path).is_file():
        raise LookupError(f"${name} names no file, but the site says that it lists the job's GPUs")
    pairs = [line.rpartition("-") for line in Path(path).read_text(encoding="utf-8").split()]
    here = node_name().partition(".")[0]
    own = [device for node, _, device in pairs if node.partition(".")[0] == here]
    return [device.removeprefix("gpu") for device in own or [pair[2] for pair in pairs]]


def _devices_in_variable(name: str, environ: Mapping[str, str]) -> list[str]:
    items = environ.get(name, "").replace(",", " ").split()
    if not items:
        raise LookupError(f"${name} is empty, but the site says that it lists the job's GPUs")
    # `gpu3` and `cuda:3` mean device 3; a uuid stays as it is.
    prefix = re.compile(r"(?!GPU-|MIG-)[a-z_:-]*")
    return [prefix.sub("", item, count=1) for item in items]


def first_devices(count: int) -> list[str]:
    """Return the indices of a node's first GPUs."""
    return [str(index) for index in range(count)]


def _gpus_of_driver() -> int:
    """Return how many GPUs the driver shows here; 0 without a driver, or without pynvml."""
    with contextlib.suppress(Exception):  # NVML has many errors, and each means the same here
        return len(visible_to_nvml())
    return 0


def nvml() -> Any:
    """Return NVML, initialised; every function that calls it may raise one of its many errors."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml


# -- MIG: GPUs that are divided into slices --------------------------------------------------------
# CUDA shows a process one slice at most, and no whole GPU beside it. An index of a batch scheduler
# counts slices and whole GPUs, in the order of their GPUs; NVML, and so dask-cuda, counts GPUs.


def visible_to_nvml() -> list[str]:
    """Return the GPUs that this process may use: indices, or UUIDs if MIG is enabled on one.

    The slices of a GPU are in its place. NVML hides those of other jobs, if they are isolated.
    """
    slices = [_slices(index) for index in range(nvml().nvmlDeviceGetCount())]
    if slices.count(None) == len(slices):
        return first_devices(len(slices))
    whole = ([_uuid(index)] if own is None else own for index, own in enumerate(slices))
    return sum(whole, [])  # noqa: RUF017 - of a few GPUs


def _slices(index: int) -> list[str] | None:
    """Return the UUIDs of the slices of a GPU; None if MIG is not enabled on it."""
    api, found = nvml(), []
    with contextlib.suppress(Exception):  # NVML has many errors: MIG is not supported
        gpu = api.nvmlDeviceGetHandleByIndex(index)
        if api.nvmlDeviceGetMigMode(gpu)[0] == api.NVML_DEVICE_MIG_ENABLE:
            for number in range(api.nvmlDeviceGetMaxMigDeviceCount(gpu)):
                with contextlib.suppress(Exception):  # there is none, or it is of another job
                    found.append(uuid_of(api.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)))
            return found
    return None


def _uuid(index: int) -> str:
    with contextlib.suppress(Exception):  # the GPU is lost; others are not
        return uuid_of(nvml().nvmlDeviceGetHandleByIndex(index))
    return str(index)


def with_named_slices(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process of workers in which no index stands for a MIG slice.

    Nothing without MIG. Raises LookupError if there is no such slice, or a worker has several.
    """
    if not any(map(str.isdigit, environ.get(VISIBLE, "0").split(","))):
        return {}
    try:
        known = visible_to_nvml()
    except Exception:  # NVML has many errors, and the workers will report this one
        return {}
    if all(map(str.isdigit, known)) and (known or VISIBLE not in environ):
        return {}
    return WorkerSize.of(environ).with_names(environ, known)


def let_dask_cuda_measure_slices(*, load: bool = False) -> None:
    """Have dask-cuda (26.10) take the memory of a slice for that of its worker.

    It asks NVML for that of the whole GPU, which users may not read. ``load``: import it first.
    """
    if "MIG-" not in os.environ.get(VISIBLE, ""):
        return
    if load:
        with contextlib.suppress(ImportError):  # dask's command reports it
            importlib.import_module("dask_cuda")
    functions = ("get_device_total_memory", "has_device_memory_resource")
    for name in [name for name in sys.modules if name.startswith("dask_cuda.")]:
        own = vars(sys.modules[name])
        own.update(dict.fromkeys(own.keys() & functions, _memory_of))


def _memory_of(device: object = 0) -> int:
    """Return the memory of a UUID, or of the entry of CUDA_VISIBLE_DEVICES at an index."""
    name = named(str(device), os.environ[VISIBLE].split(","))
    return memory_of(device_handle(name))


# -- of the node -----------------------------------------------------------------------------------
def hidden_gpus(proc: Path = _DRIVER, dev: Path = _DEVICES) -> int:
    """Return how many GPUs of this node this job cannot open: the batch scheduler isolates them."""
    minors = _information(proc, "Device Minor")
    return sum(not _can_open(dev / f"nvidia{minor}") for minor in minors)


def gpu_models(proc: Path = _DRIVER) -> list[str]:
    """Return the models of all GPUs of this node, also of those that the job cannot open."""
    return sorted(_information(proc, "Model"))


def driver_version(proc: Path = _DRIVER) -> str:
    """Return the driver's description of its version; "" without a driver."""
    with contextlib.suppress(OSError):
        return (proc / "version").read_text(encoding="utf-8")
    return ""


def _information(proc: Path, key: str) -> list[str]:
    """Return the values of ``key`` in the driver's description of each GPU."""
    found = []
    for path in sorted(proc.glob("gpus/*/information")):
        with contextlib.suppress(OSError):
            lines = [line.partition(":") for line in path.read_text(encoding="utf-8").splitlines()]
            found += [value.strip() for name, _, value in lines if name.strip() == key]
    return found


def _can_open(device: Path) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
        return True
    return False


# -- of a worker -----------------------------------------------------------------------------------
def worker_gpu() -> Gpu:
    """Return the GPU of this process, which is the first of CUDA_VISIBLE_DEVICES.

    A worker of several GPUs has the next ones, too.
    """
    size = WorkerSize.of(os.environ)
    devices = [name.strip() for name in os.environ.get(VISIBLE, "").split(",")][: size.gpus]
    gpu, *others = [_gpu(device) for device in devices]
    if others:
        gpu["others"] = others
    if size.per_gpu > 1:
        gpu["sharing"] = size.per_gpu
        if MPS in os.environ:
            gpu["mps"] = True
    return gpu


def _gpu(device: str) -> Gpu:
    gpu: Gpu = {"node": node_name(), "uuid": None, "model": None, "memory": None}
    if not device:
        return gpu
    if device.startswith(("GPU-", "MIG-")):  # an index is no identity: isolated jobs count from 0
        gpu["uuid"] = device
    gpu["fast"] = fast_network()
    try:
        handle = device_handle(device)
        gpu["uuid"] = uuid_of(handle)
        gpu["model"] = nvml_text(nvml().nvmlDeviceGetName(handle))
        gpu["memory"] = memory_of(handle)
        if _has_nvlink(handle):
            gpu["fast"] = [*gpu["fast"], "NVLink"]
    except Exception as error:  # an error of NVML must not stop the worker
        gpu["error"] = f"{type(error).__name__}: {error}"
    return gpu


def device_handle(device: str) -> object:
    """Return NVML's handle of a GPU or a slice: an index, a GPU- uuid or a MIG- uuid."""
    device = named(device, visible_to_nvml())
    if device.isdigit():
        return nvml().nvmlDeviceGetHandleByIndex(int(device))
    return nvml().nvmlDeviceGetHandleByUUID(device.encode())


def whole_gpu(device: str) -> object:
    """Return NVML's handle of a GPU, also by a slice of it."""
    api, handle = nvml(), device_handle(device)
    with contextlib.suppress(Exception):  # an NVML without MIG
        if api.nvmlDeviceIsMigDeviceHandle(handle):
            return api.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return handle


def is_shareable(device: str) -> bool:
    """Return whether several processes may use a GPU at a time; False if that is not known."""
    with contextlib.suppress(Exception):  # NVML has many errors, and each means the same here
        api = nvml()
        mode = api.nvmlDeviceGetComputeMode(whole_gpu(device))
        return bool(mode == api.NVML_COMPUTEMODE_DEFAULT)
    return False


def uuid_of(handle: object) -> str:
    """Return the UUID of a GPU or a slice, by NVML's handle."""
    return nvml_text(nvml().nvmlDeviceGetUUID(handle))


def memory_of(handle: object) -> int:
    """Return the memory of a GPU or a slice in bytes, by NVML's handle."""
    return int(nvml().nvmlDeviceGetMemoryInfo(handle).total)


def gpus_with_nvlink(devices: Iterable[str]) -> int:
    """Return how many of these GPUs (index or UUID) have NVLink; 0 without a driver."""
    with contextlib.suppress(Exception):  # NVML has many errors, and each means the same here
        return sum(_has_nvlink(device_handle(device)) for device in devices)
    return 0


def supports(driver: str, needed: str) -> bool:
    """Return whether a driver for CUDA ``driver`` runs programs for CUDA ``needed``.

    A version without a minor one, 13, needs no certain one: within a major version, a driver runs
    newer programs, too.
    """
    parts = [int(part) for part in needed.split(".")]
    return [int(part) for part in driver.split(".")][: len(parts)] >= parts


def check_driver(needed: str) -> None:
    """Raise LookupError if the driver of this node is too old for CUDA ``needed``; "": none is."""
    found = 0
    if needed:
        with contextlib.suppress(Exception):  # the workers report a missing NVML
            found = int(nvml().nvmlSystemGetCudaDriverVersion_v2())
    driver = f"{found // 1000}.{found % 1000 // 10}"
    if found and not supports(driver, needed):
        raise LookupError(f"the driver supports CUDA {driver}; the environment needs {needed}")


def fast_network() -> list[str]:
    """Return ["InfiniBand"] if this node has it, else []."""
    return ["InfiniBand"] * any(Path(_INFINIBAND).glob("*"))


def _has_nvlink(handle: object) -> bool:
    with contextlib.suppress(Exception):  # no NVLink, or an NVML without this function
        return bool(nvml().nvmlDeviceGetNvLinkState(handle, 0))
    return False


def nvml_text(value: bytes | str) -> str:
    """Return a text of NVML, which old versions of pynvml return as bytes."""
    return value.decode() if isinstance(value, bytes) else value


# -- the CPUs of a worker --------------------------------------------------------------------------
# dask-cuda (26.10) binds its n-th worker near GPU 2n, whether these CPUs are the job's or not, and
# only its main thread. Plain workers are not bound at all.


def near_cpus(
    gpus: Sequence[AbstractSet[int] | None],
    others: Iterable[AbstractSet[int] | None],
    allowed: AbstractSet[int],
    threads: int,
) -> tuple[AbstractSet[int], str]:
    """Return the CPUs for a worker, and why these are not only CPUs near its GPUs.

    ``gpus``: those near each of its GPUs, None if not known. ``others``: the same of the first GPU
    of all workers of the job on this node. ``allowed``: of the job. ``threads``: of each worker.
    """
    if not gpus or None in gpus:
        return allowed, ""
    near = {cpu for cpus in gpus for cpu in cpus or ()} & allowed
    if not near:
        return allowed, "no CPU of the job is near the GPU"
    threads *= max(1, sum(not near.isdisjoint(cpus or ()) for cpus in others))
    if len(near) < min(threads, len(allowed)):
        return allowed, f"few CPUs of the job are near the GPU: {len(near)} for {threads} threads"
    return near, ""


def choose_cpus(threads: int) -> tuple[AbstractSet[int], Binding]:
    """Return the CPUs for this process, a worker with ``threads``, and their description."""
    size, allowed = WorkerSize.of(os.environ), os.sched_getaffinity(0)
    devices = [name for name in os.environ.get(VISIBLE, "").split(",")[: size.gpus] if name]
    firsts = size.firsts(os.environ) if devices else []
    places = {device: _place(device) for device in {*devices, *firsts}}
    gpus, others = ([places[device][0] for device in names] for names in (devices, firsts))
    cpus, reason = near_cpus(gpus, others, allowed, threads)
    return cpus, {
        "cpus": ranges(cpus),
        "cores": len({_core(cpu) for cpu in cpus}),
        "nodes": ranges(_nodes(cpus)),
        "gpu_nodes": ranges({node for device in devices for node in places[device][1]}),
        "reason": reason,
    }


def bind(cpus: AbstractSet[int]) -> None:
    """Let all threads of this process run on ``cpus`` only; new ones inherit that."""
    for thread in map(int, os.listdir("/proc/self/task")):  # noqa: PTH208 - only names
        with contextlib.suppress(OSError):  # it has ended
            if not os.sched_getaffinity(thread) <= cpus:
                os.sched_setaffinity(thread, cpus)


def _place(device: str) -> tuple[set[int] | None, set[int]]:
    """Return the CPUs near a GPU, None if they are not known, and its NUMA nodes."""
    try:
        api, handle = nvml(), whole_gpu(device)  # a slice has no place
        words = os.sysconf("SC_NPROCESSORS_CONF") // _WORD + 1
        masks = enumerate(api.nvmlDeviceGetCpuAffinity(handle, words))
        cpus = {n * _WORD + bit for n, mask in masks for bit in range(_WORD) if mask >> bit & 1}
        # None: in a cpuset, NVML leaves out all other CPUs.
        nodes = _nodes(cpus) if cpus else _bus_node(api.nvmlDeviceGetPciInfo(handle).busId)
    except Exception:  # NVML has many errors, and each means the same here
        return None, set()
    return (cpus if cpus or nodes else None), nodes


def _bus_node(bus: bytes | str) -> set[int]:
    """Return the NUMA node of a device such as ``00000000:1A:00.0``. Raises OSError."""
    domain, _, rest = nvml_text(bus).lower().partition(":")
    path = _SYSTEM / f"bus/pci/devices/{int(domain, 16):04x}:{rest}/numa_node"
    return {int(path.read_text(encoding="utf-8"))} - {-1}


def _nodes(cpus: AbstractSet[int]) -> set[int]:
    paths = _SYSTEM.glob("devices/system/node/node[0-9]*/cpu[0-9]*")
    return {int(path.parent.name[4:]) for path in paths if int(path.name[3:]) in cpus}


def _core(cpu: int) -> str:
    path = _SYSTEM / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return str(cpu)


# -- of all workers --------------------------------------------------------------------------------
def binding_messages(workers: Mapping[str, RegisteredWorker]) -> list[str]:
    """Return why workers do not run near their GPUs only, and whether some share one core."""
    messages, cores = set(), Counter[str]()
    for worker in workers.values():
        binding, gpu = worker.get("binding") or Binding(), worker.get("gpu") or Gpu()
        if reason := binding.get("reason"):
            nodes, gpu_nodes = binding.get("nodes") or "?", binding.get("gpu_nodes") or "?"
            messages.add(f"{reason} (workers on NUMA node {nodes}, their GPUs on {gpu_nodes})")
        if binding.get("cores") == 1:
            cores[f"CPU {binding.get('cpus')} of {gpu.get('node')}"] += 1
    shared = sorted(core for core, sharing in cores.items() if sharing > 1)
    return [*sorted(messages), *(f"several workers share one core: {core}" for core in shared[:1])]


def shared_gpu_message(workers: Mapping[str, RegisteredWorker]) -> str:
    """Return a sentence about the first workers that share a GPU and must not; "" if none do."""
    known: dict[tuple[str, str | None], dict[str, int]] = {}
    for name, worker in sorted(workers.items()):
        for gpu in all_gpus(worker.get("gpu")):
            owners = known.setdefault((gpu["node"], gpu["uuid"]), {})
            owners[name] = gpu.get("sharing", 1)
            most = min(owners.values())
            if len(owners) > most:
                listed = f"{', '.join([*owners][:-1])} and {name}"
                message = f"workers {listed} share GPU {gpu['uuid']} on {gpu['node']}"
                return f"{message}, which is for {most}" if most > 1 else message
    return ""
