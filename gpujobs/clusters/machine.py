"""The resources of this machine, for the `local` site: free GPUs, CPUs, memory."""

from __future__ import annotations

import os
from types import ModuleType

from ..batch import localqueue
from ..injob.gpus import device_handle, gpus_with_nvlink, nvml_text
from ..planning.plan import Machine
from .ledger import Ledger

_NO_DEVICE = ("", "-1", "NoDevFiles")


def this_machine(devices: tuple[str, ...] | None = None, used: tuple[str, ...] = ()) -> Machine:
    """Return this machine; ``devices`` are the GPUs to use, even if they are not free.

    ``used``: GPUs of other jobs of the cluster, which are not free. Its free GPUs are those of
    CUDA_VISIBLE_DEVICES, else those without a compute process or a job of this user's clusters.
    """
    import psutil

    free, busy = _gpus() if devices is None else (list(devices), {})
    taken = {_identity(device) for device in used}
    free = [device for device in free if _identity(device) not in taken]
    memory = int(psutil.virtual_memory().total)
    return Machine(
        gpus=tuple(free),
        cpus=_cpus(),
        memory=memory,
        busy=busy,
        nvlink=gpus_with_nvlink(free),
        gpu_memory=_least_memory(free),
        planned=len(used),
    )


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus() -> tuple[list[str], dict[str, str]]:
    """Return the free GPUs, and the busy ones with their users."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        devices = [item.strip() for item in listed.split(",")]
        return [device for device in devices if device not in _NO_DEVICE], {}
    try:
        import pynvml

        pynvml.nvmlInit()
        number = int(pynvml.nvmlDeviceGetCount())
        own = _of_clusters() if number else {}
        users = {
            str(index): _users(pynvml, index) or own.get(_identity(str(index)), "")
            for index in range(number)
        }
    except Exception:  # no package, driver or device: no GPU that CUDA workers could use
        return [], {}
    free = [index for index, processes in users.items() if not processes]
    return free, {index: processes for index, processes in users.items() if processes}


def _of_clusters() -> dict[str, str]:
    """Return the GPUs of jobs of this user's clusters, whose workers may start only now."""
    found: dict[str, str] = {}
    for record in Ledger().all():
        own = () if record.finished else record.submissions
        for one in (submission for submission in own if submission.devices):
            for number, state in zip(one.jobs, localqueue.status(one.id), strict=False):
                if state.endswith(" RUNNING"):
                    devices = map(_identity, one.devices_of(number))
                    found |= dict.fromkeys(devices, f"cluster {record.id}")
    return found


def _identity(device: str) -> str:
    """Return the UUID of a GPU, which CUDA_VISIBLE_DEVICES may name by index or UUID."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return nvml_text(pynvml.nvmlDeviceGetUUID(device_handle(pynvml, device)))
    except Exception:  # NVML has many errors, and each means the same here
        return device


def _least_memory(devices: list[str]) -> int | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [device_handle(pynvml, device) for device in devices]
        return min(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles)
    except Exception:  # NVML has many errors, and each means the same here; or no GPU is free
        return None


def _users(pynvml: ModuleType, index: int) -> str:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return ""
    return ", ".join(f"process {process.pid}" for process in processes)
