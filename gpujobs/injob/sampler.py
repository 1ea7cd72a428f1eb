"""Samples of the GPUs, CPUs and memory of a job, appended to a file in the cluster's folder.

Those of GPUs are taken in a process of its own: NVML can hang if a GPU fails, and neither the
supervisor nor the workers may wait for it. A job without GPUs needs no process for them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, TypedDict

from .children import HostMeter, ManagedProcess
from .folder import Folder
from .gpus import device_handle, first_devices, memory_of, nvml, uuid_of
from .names import ARCHIVE
from .network import node_name
from .options import UsageOptions

USAGE = "usage"
"""Folder in the cluster's folder, with a file ``JOB-NODE.jsonl`` for each job and node."""
_SHORTEST, _LONGEST = 1.0, 15.0
"""Bounds of the interval on the first day, in seconds."""
_DAY = 86400.0
_FIRST_OF_CPUS = 5.0
"""Seconds until the first sample of a job without GPUs: its workers import dask until then."""


def interval(age: float) -> float:
    """Return the seconds until the next sample of a job that has been sampled for ``age`` seconds.

    A minute has 60 samples, a day less than 6,000. After that the interval grows with the age, so
    that a day of a long job adds ever fewer lines.
    """
    first_day = min(max(_SHORTEST, age / 60), _LONGEST)
    return max(first_day, age * _LONGEST / _DAY)


def start_sampler(
    folder: str, devices: Sequence[str] | None, count: int, environ: Mapping[str, str]
) -> ManagedProcess | None:
    """Start to sample the ``count`` GPUs of `job_devices` on this node, and its CPUs and memory.

    None if that fails, which hurts no job. The process ends with this one, at the latest.
    """
    sampled = ",".join(devices or first_devices(count))
    argv = [sys.executable, str(Path(folder) / ARCHIVE), "usage", f"--devices={sampled}"]
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
    energy: list[Optional[float]]
    cpu: float
    memory: int


def sample_usage(options: UsageOptions) -> int:
    """Append samples of the job until the parent process is gone; return an exit code.

    The first line has the GPUs or the error of NVML. Each other line is a sample: `time`, the
    `seconds` before it for which it stands, and by GPU `busy` in percent, `used` in bytes and
    `energy` in joules; null if NVML does not know it, as for a MIG slice. `cpu` is in seconds,
    `memory` in bytes.
    """
    parent = os.getppid()

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return os.getppid() == parent

    _sample_until_end(options, parent, wait)
    return 0


class SamplingThread:
    """Samples of the CPUs and memory of a job without GPUs, in the process of its supervisor."""

    def __init__(self, folder: str, job: int) -> None:
        """Start to take them."""
        self._end = threading.Event()
        options = UsageOptions(folder, job, devices=())
        arguments = (options, os.getpid(), lambda s: not self._end.wait(s), _FIRST_OF_CPUS)
        target = _sample_until_end
        threading.Thread(target=target, args=arguments, name="samples", daemon=True).start()

    def kill(self) -> None:
        """Take no more."""
        self._end.set()


def _sample_until_end(
    options: UsageOptions, supervisor: int, wait: Callable[[float], bool], first: float = _SHORTEST
) -> None:
    """Append samples while ``wait`` returns whether to take one, after so many seconds.

    ``first``: seconds until the first one.
    """
    started = time.monotonic()
    name = f"{USAGE}/{options.job}-{node_name()}.jsonl"
    folder = Folder(options.folder)
    with contextlib.suppress(OSError):
        (folder.path / USAGE).mkdir(mode=0o700, exist_ok=True)
    handles, header = _open_gpus(options.devices)
    _append(folder, name, {**header, "time": time.time()})
    # Looks at all processes of the node first.
    meter = HostMeter(options.folder, options.job, supervisor=supervisor)
    energy, before = [EnergyMeter(handle) for handle in handles], time.monotonic()
    pause = first
    while wait(pause):
        now = time.monotonic()
        seconds, joules = now - before, [one.measure() for one in energy]
        before = now
        if seconds > 2 * pause:  # after a suspension, it stands for the time since then only
            seconds, joules = 2 * pause, [None for _ in joules]
        cpu, memory = meter.measure()
        line = _sample_all(handles, seconds)
        line |= {"energy": joules, "cpu": round(cpu, 2), "memory": memory}
        _append(folder, name, line)
        pause = interval(time.monotonic() - started)


def _open_gpus(devices: Iterable[str]) -> tuple[list[object], dict[str, Any]]:
    """Return NVML's handles and the GPUs for the first line; none, and the error of NVML."""
    try:
        handles = [device_handle(device) for device in devices]
        gpus = [{"uuid": uuid_of(handle), "memory": memory_of(handle)} for handle in handles]
    except Exception as error:  # no pynvml, no driver, or one of NVML's many errors
        return [], {"error": f"{type(error).__name__}: {error}"}
    return handles, {"gpus": gpus}


def _sample_all(handles: Sequence[object], seconds: float) -> dict[str, Any]:
    samples = [_sample(handle) for handle in handles]
    return {
        "time": round(time.time(), 1),
        "seconds": round(seconds, 1),
        "busy": [busy for busy, _ in samples],
        "used": [used for _, used in samples],
    }


class EnergyMeter:
    """Measures the energy of a GPU by its counter: since Volta, and not of a MIG slice alone."""

    def __init__(self, handle: object) -> None:
        self._handle = handle
        self._before = self._counter()

    def measure(self) -> float | None:
        """Return the joules since the last call; None if they are not known.

        The counter starts again when the driver is loaded.
        """
        before, self._before = self._before, self._counter()
        if before is None or self._before is None or self._before < before:
            return None
        return (self._before - before) / 1000

    def _counter(self) -> int | None:
        """Return millijoules since the driver was loaded."""
        api = nvml()
        with contextlib.suppress(Exception):  # an NVML without MIG
            if api.nvmlDeviceIsMigDeviceHandle(self._handle):
                return None
        with contextlib.suppress(Exception):  # NVML has many errors: it has no counter
            return int(api.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None


def _append(folder: Folder, name: str, line: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next sample may find room
        folder.append(name, [json.dumps(line)])


def _sample(handle: object) -> tuple[int | None, int | None]:
    busy = used = None
    with contextlib.suppress(Exception):
        busy = int(nvml().nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(Exception):
        used = int(nvml().nvmlDeviceGetMemoryInfo(handle).used)
    return busy, used
