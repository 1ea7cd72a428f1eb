"""A stand-in for ``pynvml`` on machines without an NVIDIA driver, on which the real CUDAWorker runs.

With this folder first on PYTHONPATH, distributed and dask_cuda see ``FAKE_NVML_GPUS`` (4) idle GPUs of 16 GiB, named ``FAKE_NVML_NAME``. The UUID
of a GPU contains the name of the emulated node, so that two nodes of one host do not seem to share their GPUs. Only
the functions that those two packages and gpujobs call are here. A handle is the device's index.
"""

import os
import socket
from collections import namedtuple
from pathlib import Path

NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE = 0, 1

Memory = namedtuple("Memory", "total free used")
Utilization = namedtuple("Utilization", "gpu memory")
Process = namedtuple("Process", "pid usedGpuMemory")
PciInfo = namedtuple("PciInfo", "busId")


class NVMLError(Exception):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_Unknown(NVMLError):
    pass


def _count():
    return int(os.environ.get("FAKE_NVML_GPUS", 4))


class _Mig(int):
    """The handle of a MIG slice: the index of its GPU."""


def _uuid(index):
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    kind = "MIG" if isinstance(index, _Mig) else "GPU"
    return f"{kind}-{node}-0000-0000-0000-{index:012d}"


def _busy(handle):
    """``FAKE_NVML_UTILIZATION``: percent of each GPU, which are also the used part of its memory."""
    percents = os.environ.get("FAKE_NVML_UTILIZATION", "0").split(",")
    return int(percents[handle % len(percents)])


def nvmlInit():
    if calls := os.environ.get("FAKE_NVML_CALLS"):
        with Path(calls).open("a") as file:
            file.write(f"{os.getpid()}\n")
    if _count() == 0:
        raise NVMLError_LibraryNotFound()


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return "000.00"


def nvmlDeviceGetCount():
    return _count()


def nvmlDeviceGetHandleByIndex(index):
    if not 0 <= int(index) < _count():
        raise NVMLError_InvalidArgument(index)
    return int(index)


def nvmlDeviceGetHandleByUUID(uuid):
    uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
    for index in range(_count()):
        for handle in (index, _Mig(index)):
            if uuid == _uuid(handle):
                return handle
    raise NVMLError_NotFound(uuid)


def nvmlDeviceGetIndex(handle):
    return handle


def nvmlDeviceGetUUID(handle):
    return _uuid(handle)


def nvmlDeviceGetName(handle):
    return os.environ.get("FAKE_NVML_NAME", "Fake GPU")


def nvmlDeviceGetMemoryInfo(handle):
    total = int(os.environ.get("FAKE_NVML_MEMORY", 16 * 2**30))
    used = total * _busy(handle) // 100
    return Memory(total, total - used, used)


def nvmlDeviceGetUtilizationRates(handle):
    return Utilization(_busy(handle), 0)


def nvmlDeviceGetComputeRunningProcesses(handle):
    """FAKE_NVML_BUSY: the GPUs with a process; with ``:self``, it is the one that asks."""
    busy = os.environ.get("FAKE_NVML_BUSY", "").split(",")
    pids = {str(handle): 4242, f"{handle}:self": os.getpid()}
    return [Process(pid, 2**30) for name, pid in pids.items() if name in busy]


def nvmlDeviceGetNvLinkState(handle, link):
    if "FAKE_NVML_NVLINK" not in os.environ:
        raise NVMLError_NotSupported()
    return 1


def nvmlDeviceIsMigDeviceHandle(handle):
    return isinstance(handle, _Mig)


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    return int(handle)


def nvmlDeviceGetMigMode(handle):
    raise NVMLError_NotSupported()


def nvmlDeviceGetCpuAffinity(handle, words):
    """``FAKE_NVML_CPUS``: the CPUs near each GPU, as in ``0,1;2,3``; `no` is an error. Else all that this process has."""
    if isinstance(handle, _Mig):
        raise NVMLError_NotSupported()
    near = os.environ.get("FAKE_NVML_CPUS", "").split(";")
    own = near[handle % len(near)]
    if own == "no":
        raise NVMLError_NotSupported()
    cpus = list(map(int, filter(None, own.split(",")))) if any(near) else os.sched_getaffinity(0)
    return [sum(1 << (c % 64) for c in cpus if c // 64 == word) for word in range(words)]


def nvmlDeviceGetPciInfo(handle):
    return PciInfo(f"00000000:{handle:02X}:00.0")


def nvmlSystemGetCudaDriverVersion_v2():
    return 13000
