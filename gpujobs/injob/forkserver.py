"""One import for all workers of a job: a server of `multiprocessing` that is forked, not started.

The process of the nannies imports dask, and then forks the server before it does anything else.
The server forks the workers. It has one thread, and has never used a GPU: a CUDA context does not
survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, set_forkserver_preload, util
from pathlib import Path
from typing import Any

from .process import STOP_DASK, restore_signals

_DRIVER = ("libcuda.so", "libnvidia-ml.so")
"""Libraries of the NVIDIA driver: CUDA and NVML. Without them, no process can use a GPU."""
_DEVICES = "/dev/nvidia"
"""Device files that CUDA and NVML open when they are initialised."""


def start() -> str:
    """Fork the server from this process; return why that is not safe, or ""."""
    reason = unsafe_to_fork()
    if not reason:
        set_forkserver_preload([])  # all modules are here already
        gc.collect()
        gc.freeze()  # a garbage collection in a worker does not copy the shared pages
        with _forking():
            forkserver.ensure_running()
    return reason


def unsafe_to_fork() -> str:
    """Return why a fork of this process may not start workers, or ""."""
    if not _descriptors():
        return "this system has no /proc"
    if names := [thread.name for thread in threading.enumerate()[1:]]:
        return f"importing dask started threads ({', '.join(names)})"
    if library := driver_library():
        return f"{library} is loaded"
    if device := open_device():
        return f"{device} is open"
    return ""


def driver_library() -> str:
    """Return the name of a library of the NVIDIA driver that this process has loaded, or ""."""
    with contextlib.suppress(OSError), Path("/proc/self/maps").open(encoding="utf-8") as maps:
        for line in maps:
            name = line.rpartition("/")[2].strip()
            if name.startswith(_DRIVER):
                return name
    return ""


def open_device() -> str:
    """Return the device file of a GPU that this process has open, or ""."""
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            target = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if target.startswith(_DEVICES):
                return target
    return ""


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - only names
    except OSError:
        return []


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Have `multiprocessing` fork its helpers, where it would start a new Python."""
    original, helpers = util.spawnv_passfds, vars(util)
    helpers["spawnv_passfds"] = _fork
    # Python 3.11.0: all users of the node could connect to an abstract socket (CVE-2022-42919).
    helpers["abstract_sockets_supported"] = False
    try:
        yield
    finally:
        helpers["spawnv_passfds"] = original


def _fork(path: bytes, args: list[Any], passfds: list[int]) -> int:
    """Run the code of `python -c` in a fork, with only the file descriptors ``passfds``.

    The other ends of their pipes must not stay open: the server ends when they are closed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for descriptor in {*_descriptors()}.difference(passfds, (0, 1, 2)):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        # A signal to the group must end the workers, and leave the nannies their exit codes.
        for number in (signal.SIGTERM, STOP_DASK):
            signal.signal(number, signal.SIG_IGN)
        os.register_at_fork(after_in_child=restore_signals)
        exec(args[-1], {})  # noqa: S102 - text of Python's multiprocessing
        status = 0
    except SystemExit:
        status = 0
    finally:
        os._exit(status)
