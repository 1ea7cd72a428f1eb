"""A stand-in for ``pynvml`` on machines without an NVIDIA driver, on which the real CUDAWorker runs.

With this folder first on PYTHONPATH, distributed and dask_cuda see ``FAKE_NVML_GPUS`` (4) idle GPUs of 16 GiB, named ``FAKE_NVML_NAME``. The UUID
of a GPU contains the name of the emulated node, so that two nodes of one host do not seem to share their GPUs. Only
the functions that those two packages and gpujobs call are here. A handle is the device's index.

``FAKE_NVML_MIG`` enables MIG: the number of slices of each GPU, ``-`` for a GPU without MIG, as in ``-,2,1``. A process is
an ordinary user: as documented, it may read the memory of a slice, not of its GPU, and there is no utilisation. With
``FAKE_NVML_SLICES`` it sees these slices only, as in ``1:0,1:1``: those of other jobs are not found. (A guess: NVML's
documentation names the error for a number without slice, and not for one of which the device files cannot be opened.
The parts of the name of a slice, its memory and the ids of its instances are guesses, too.)

As documented, ECC counters and remapped rows are not supported by GPUs without ECC or row remapping, nor on slices, and the
handle of a GPU that has fallen off the bus is an error, while it still counts. ``FAKE_NVML_LOST``: such GPUs, as in ``2,3``.
"""

import os
import socket
import time
from collections import namedtuple
from pathlib import Path

NVML_DEVICE_MIG_DISABLE, NVML_DEVICE_MIG_ENABLE = 0, 1
NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 0, 3
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC = 0, 1

Memory = namedtuple("Memory", "total free used")
Utilization = namedtuple("Utilization", "gpu memory")
Process = namedtuple("Process", "pid usedGpuMemory")
PciInfo = namedtuple("PciInfo", "busId")


class NVMLError(Exception):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    def __str__(self):
        return "GPU is lost"


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_Unknown(NVMLError):
    pass


def _count():
    return int(os.environ.get("FAKE_NVML_GPUS", 4))


SLICES = 7
"""Most slices of a GPU."""


class _Mig(int):
    """The handle of a MIG slice: the index of its GPU, and its number on that."""

    def __new__(cls, gpu, number):
        handle = super().__new__(cls, gpu)
        handle.number = number
        return handle


def _slices(gpu):
    """Return the number of slices; None without MIG."""
    numbers = os.environ.get("FAKE_NVML_MIG", "").split(",")
    own = numbers[gpu] if gpu < len(numbers) else ""
    return int(own) if own.isdigit() else None


def _uuid(handle):
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    if isinstance(handle, _Mig):
        return f"MIG-{node}-0000-0000-{handle.number:04d}-{handle:012d}"
    return f"GPU-{node}-0000-0000-0000-{handle:012d}"


def _old_name(handle):
    """The name of a slice before driver 470, which newer ones accept."""
    return f"MIG-{_uuid(int(handle))}/{handle.number + 1}/0" if isinstance(handle, _Mig) else ""


def _not_with_mig(handle, error):
    if not isinstance(handle, _Mig) and _slices(handle) is not None:
        raise error()


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
    if str(index) in os.environ.get("FAKE_NVML_LOST", "").split(","):
        raise NVMLError_GpuIsLost()
    return int(index)


def nvmlDeviceGetHandleByUUID(uuid):
    uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
    for index in range(_count()):
        for handle in (index, *(_Mig(index, number) for number in range(_slices(index) or 0))):
            if uuid in (_uuid(handle), _old_name(handle)):
                return handle
    raise NVMLError_NotFound(uuid)


def nvmlDeviceGetIndex(handle):
    return handle


def nvmlDeviceGetUUID(handle):
    return _uuid(handle)


def nvmlDeviceGetComputeMode(handle):
    """``FAKE_NVML_EXCLUSIVE``: each GPU is for one process at a time."""
    exclusive = "FAKE_NVML_EXCLUSIVE" in os.environ
    return NVML_COMPUTEMODE_EXCLUSIVE_PROCESS if exclusive else NVML_COMPUTEMODE_DEFAULT


def nvmlDeviceGetName(handle):
    name = os.environ.get("FAKE_NVML_NAME", "Fake GPU")
    return f"{name} MIG 1g.2gb" if isinstance(handle, _Mig) else name


def nvmlDeviceGetMemoryInfo(handle):
    _not_with_mig(handle, NVMLError_NoPermission)
    total = int(os.environ.get("FAKE_NVML_MEMORY", 16 * 2**30))
    if isinstance(handle, _Mig):
        total //= SLICES + 1
    used = total * _busy(handle) // 100
    return Memory(total, total - used, used)


def nvmlDeviceGetUtilizationRates(handle):
    if _slices(handle) is not None:
        raise NVMLError_NotSupported()
    return Utilization(_busy(handle), 0)


def nvmlDeviceGetTotalEnergyConsumption(handle):
    """``FAKE_NVML_WATTS``: the power of each GPU, ``-`` for one without a counter. It counts millijoules since the system's start,
    and from zero again since the moment in the file that ``FAKE_NVML_RELOADED`` names."""
    watts = os.environ.get("FAKE_NVML_WATTS", "").split(",")
    own = watts[handle % len(watts)]
    if isinstance(handle, _Mig) or not own or own == "-":
        raise NVMLError_NotSupported()
    reloaded = Path(os.environ.get("FAKE_NVML_RELOADED", "/nowhere"))
    since = float(reloaded.read_text()) if reloaded.exists() else 0.0
    return int(1000 * float(own) * (time.monotonic() - since))


def nvmlDeviceGetComputeRunningProcesses(handle):
    """FAKE_NVML_BUSY: the GPUs with a process; with ``:self``, it is the one that asks."""
    busy = os.environ.get("FAKE_NVML_BUSY", "").split(",")
    pids = {str(handle): 4242, f"{handle}:self": os.getpid()}
    return [Process(pid, 2**30) for name, pid in pids.items() if name in busy]


def nvmlDeviceGetNvLinkState(handle, link):
    if "FAKE_NVML_NVLINK" not in os.environ:
        raise NVMLError_NotSupported()
    return 1


def _of_gpu(name, handle):
    """The part of a variable with a value for each GPU; NVMLError_NotSupported without it, or on a slice."""
    values = os.environ.get(name, "").split(",")
    if isinstance(handle, _Mig) or handle >= len(values) or not values[handle]:
        raise NVMLError_NotSupported()
    return values[handle]


def nvmlDeviceGetTotalEccErrors(handle, error_type, counter_type):
    """``FAKE_NVML_ECC``: uncorrected errors of each GPU since the driver was loaded; there are more that were corrected."""
    errors = int(_of_gpu("FAKE_NVML_ECC", handle))
    volatile = (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return errors if (error_type, counter_type) == volatile else errors + 100


def nvmlDeviceGetRemappedRows(device):
    """``FAKE_NVML_REMAPPED``: of each GPU, rows after corrected and after uncorrected errors, pending, failed: ``0/2/1/0``."""
    return tuple(map(int, _of_gpu("FAKE_NVML_REMAPPED", device).split("/")))


def nvmlDeviceIsMigDeviceHandle(handle):
    return isinstance(handle, _Mig)


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    return int(handle)


def nvmlDeviceGetMigMode(handle):
    if "FAKE_NVML_MIG" not in os.environ:
        raise NVMLError_NotSupported()
    mode = NVML_DEVICE_MIG_DISABLE if _slices(handle) is None else NVML_DEVICE_MIG_ENABLE
    return [mode, mode]


def nvmlDeviceGetMaxMigDeviceCount(device):
    return 0 if _slices(device) is None else SLICES


def nvmlDeviceGetMigDeviceHandleByIndex(device, index):
    seen = os.environ.get("FAKE_NVML_SLICES")
    if index >= (_slices(device) or 0) or (seen and f"{device}:{index}" not in seen.split(",")):
        raise NVMLError_NotFound()
    return _Mig(device, index)


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
