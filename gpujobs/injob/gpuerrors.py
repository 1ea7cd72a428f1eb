"""What NVML and the kernel report against the GPUs of a job whose workers fail."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from .children import ManagedProcess
from .folder import Folder
from .gpus import nvml, nvml_text, visible_devices, whole_gpu
from .options import GpuErrorsOptions, SuperviseOptions

_TIMEOUT = 10.0
"""Seconds for the process that asks NVML, which can hang if a GPU fails."""
_DRIFT = 120.0
"""Seconds by which the kernel's clock may differ since the node was started."""
_XID = re.compile(
    r"^\[ *([\d.]+)\] NVRM: Xid \((?:PCI:)?([\da-f:]+)[^)]*\): (\d+)", re.IGNORECASE | re.MULTILINE
)
"""Time, PCI address of the GPU and number of a message: see NVIDIA's "Xid Errors"."""


def gpu_errors(options: SuperviseOptions, environ: Mapping[str, str], age: float) -> str:
    """Return what speaks against the GPUs of a job on this node; "" if nothing, or not in time.

    ``age``: seconds since the job started. NVML is asked by a process of its own.
    """
    if not options.gpus or not options.workers or options.ranks:
        return ""
    devices = None
    with contextlib.suppress(LookupError):
        devices = visible_devices(options.visible_devices, environ)
    named = ",".join(devices or map(str, range(options.gpus)))
    argv = [sys.executable, str(Folder(options.folder).archive), "gpu-errors", f"--devices={named}"]
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="gpujobs-") as folder:
        result = Path(folder) / "errors"
        argv += [f"--age={age}", f"--result={result}"]
        _run(argv, Path(os.devnull), environ, _TIMEOUT)
        return result.read_text(encoding="utf-8")
    return ""


def write_gpu_errors(options: GpuErrorsOptions) -> None:
    """Write what `gpu_errors` returns; nothing without a driver or pynvml."""
    try:
        nvml()
    except Exception:  # workers report it
        return
    found, lost, buses = [], [], set()
    for device in options.devices:
        try:
            handle = whole_gpu(device)
            bus = _bus(handle)
        except Exception as error:  # NVML has many errors: this GPU cannot be used
            lost.append(str(error))
            continue
        buses.add(bus)
        found += [f"{problem} at {bus} ({number})" for problem, number in _memory(handle)]
    if lost:
        number = len(options.devices)
        found.insert(0, f"{number - len(lost)} of {number} GPUs visible ({lost[0]})")
        buses.clear()  # those of lost GPUs are not known
    since = time.clock_gettime(time.CLOCK_MONOTONIC) - options.age - _DRIFT
    result, messages = Path(options.result), Path(f"{options.result}-dmesg")
    _run(["dmesg"], messages, os.environ, _TIMEOUT / 2)  # may be forbidden: then there are no Xids
    found += xids(messages.read_text(encoding="utf-8", errors="replace"), since, buses)
    result.write_text("; ".join(dict.fromkeys(found)), encoding="utf-8")


def _bus(handle: object) -> str:
    """Return the PCI address of a GPU as the driver's messages write it: ``0000:1a:00``."""
    bus = nvml_text(nvml().nvmlDeviceGetPciInfo(handle).busId).lower()
    return bus[-12:].rpartition(".")[0]


def _memory(handle: object) -> Iterator[tuple[str, str]]:
    """Yield problems of the memory of a GPU, with numbers; none without ECC."""
    api = nvml()
    with contextlib.suppress(Exception):  # not supported: a GPU without ECC, or with MIG
        kinds = api.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, api.NVML_VOLATILE_ECC
        if errors := api.nvmlDeviceGetTotalEccErrors(handle, *kinds):
            yield "uncorrected ECC errors", str(errors)
    with contextlib.suppress(Exception):
        corrected, uncorrected, pending, failed = api.nvmlDeviceGetRemappedRows(handle)
        words = ["pending"] * bool(pending) + ["failed"] * bool(failed)
        if words:  # else the rows are replaced, and the GPU is in order
            yield "remapped rows", ", ".join([str(corrected + uncorrected), *words])


def _run(argv: list[str], log: Path, environ: Mapping[str, str], timeout: float) -> None:
    process = ManagedProcess(argv[0], argv, log, environ)
    if not process.wait(timeout):
        process.kill()
        process.wait(1.0)  # it does not end while it hangs in the driver


def xids(messages: str, since: float, buses: Collection[str]) -> list[str]:
    """Return the Xid errors in the kernel's messages, each once; of all GPUs if ``buses`` is empty.

    ``since``: seconds since the node was started. Their text has names of programs: it is left out.
    """
    found = _XID.findall(messages)
    late = dict.fromkeys((bus.lower(), number) for at, bus, number in found if float(at) >= since)
    return [f"Xid {number} at {bus}" for bus, number in late if bus in (buses or {bus})]
