"""What this machine has, for the `local` site: free GPUs, CPUs, memory."""

from __future__ import annotations

import os
from typing import Any

from ..planning.plan import Machine


def this_machine() -> Machine:
    """Return this machine. Its free GPUs are those of CUDA_VISIBLE_DEVICES, else those without a compute process."""
    import psutil

    free, busy = _gpus()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        gpus=tuple(free), cpus=cpus, memory=int(psutil.virtual_memory().total), busy=busy
    )


def _gpus() -> tuple[list[str], dict[str, str]]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [
            item.strip()
            for item in chosen.split(",")
            if item.strip() not in ("", "-1", "NoDevFiles")
        ], {}
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = {
            str(index): pynvml.nvmlDeviceGetHandleByIndex(index)
            for index in range(pynvml.nvmlDeviceGetCount())
        }
    except Exception:  # no package, no driver, no device: no GPU that CUDA workers could use
        return [], {}
    busy = {index: used for index, handle in handles.items() if (used := _used_by(pynvml, handle))}
    return [index for index in handles if index not in busy], busy


def _used_by(pynvml: Any, handle: Any) -> str:
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return ""
    return ", ".join(f"process {process.pid}" for process in processes)
