"""Samples of how busy the GPUs of a job are, appended to a file in the cluster's folder.

They are taken in a process of their own: NVML can hang if a GPU fails, and neither the supervisor
nor the workers may wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, TypedDict

from .folder import Folder
from .gpus import device_handle, nvml_text
from .names import ARCHIVE
from .network import node_name
from .options import UsageOptions
from .process import ManagedProcess

FOLDER = "usage"
"""Folder in the cluster's folder, with a file ``JOB-NODE.jsonl`` for each job and node."""
_SHORTEST, _LONGEST = 1.0, 15.0
"""Bounds of the interval on the first day, in seconds."""
_DAY = 86400.0


def interval(age: float) -> float:
    """Return the seconds until the next sample of a job that has been sampled for ``age`` seconds.

    A minute has 60 samples, a day less than 6,000. After that the interval grows with the age, so
    that a day of a long job adds ever fewer lines.
    """
    first_day = min(max(_SHORTEST, age / 60), _LONGEST)
    return max(first_day, age * _LONGEST / _DAY)


def start_sampler(
    folder: str, devices: Sequence[str], environ: Mapping[str, str]
) -> ManagedProcess | None:
    """Start to sample ``devices`` (index or UUID). None if that fails, which hurts no job.

    The process ends with this one, at the latest.
    """
    argv = [sys.executable, str(Path(folder) / ARCHIVE), "usage", f"--devices={','.join(devices)}"]
    try:
        sampler = ManagedProcess("usage", argv, Path(os.devnull), environ)
    except OSError:
        return None
    atexit.register(sampler.kill)
    return sampler


class SampledGpu(TypedDict):
    """A GPU in the first line of a file of samples. ``memory`` is in bytes."""

    uuid: str
    memory: int


class UsageLine(TypedDict, total=False):
    """A line of a file of samples: its GPUs, or why there are none, or a sample."""

    gpus: list[SampledGpu]
    error: str
    time: float
    seconds: float
    busy: list[Optional[float]]
    used: list[Optional[int]]


def sample_usage(options: UsageOptions) -> int:
    """Append samples of the GPUs until the parent process is gone; return an exit code.

    The first line has the GPUs or the error of NVML. Each other line is a sample: `time`, the
    `seconds` before it for which it stands, and by GPU `busy` in percent and `used` in bytes; null
    if NVML does not know it, as for a MIG slice.
    """
    parent, started = os.getppid(), time.monotonic()
    name = f"{FOLDER}/{options.job}-{node_name()}.jsonl"
    folder = Folder(options.folder)
    with contextlib.suppress(OSError):
        (folder.path / FOLDER).mkdir(mode=0o700, exist_ok=True)
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [device_handle(pynvml, device) for device in options.devices]
        gpus = [_description(pynvml, handle) for handle in handles]
    except Exception as error:  # no pynvml, no driver, or one of NVML's many errors
        _append(folder, name, {"error": f"{type(error).__name__}: {error}", "time": time.time()})
        return 1
    _append(folder, name, {"gpus": gpus, "time": time.time()})
    before = time.monotonic()
    while os.getppid() == parent:
        pause = interval(time.monotonic() - started)
        time.sleep(pause)
        now = time.monotonic()
        # After a suspension, the sample stands for the time since it only.
        seconds = min(now - before, 2 * pause)
        before = now
        _append(folder, name, _sample_all(pynvml, handles, seconds))
    return 0


def _sample_all(nvml: ModuleType, handles: Sequence[object], seconds: float) -> dict[str, Any]:
    samples = [_sample(nvml, handle) for handle in handles]
    return {
        "time": round(time.time(), 1),
        "seconds": round(seconds, 1),
        "busy": [busy for busy, _ in samples],
        "used": [used for _, used in samples],
    }


def _append(folder: Folder, name: str, line: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next sample may find room
        folder.append(name, [json.dumps(line)])


def _description(nvml: ModuleType, handle: object) -> dict[str, Any]:
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return {"uuid": nvml_text(nvml.nvmlDeviceGetUUID(handle)), "memory": memory}


def _sample(nvml: ModuleType, handle: object) -> tuple[int | None, int | None]:
    busy = used = None
    with contextlib.suppress(Exception):
        busy = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(Exception):
        used = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    return busy, used
