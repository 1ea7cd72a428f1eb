"""`workers`: the process of a job that runs dask's nannies, whose workers it forks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import (
    active_children,
    forkserver,
    resource_tracker,
    set_forkserver_preload,
    util,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .children import STOP_DASK, defer_signals, end_with_parent, restore_signals
from .configuration import (
    add_defaults,
    collecting_no_garbage,
    preload_options,
    preloads,
    set_import_path,
)
from .gpus import let_dask_cuda_measure_slices, with_named_slices
from .log import log
from .names import (
    NANNY_PRELOAD,
    PACKAGE,
    PRELOAD,
    PROTOCOL,
    REGISTRY,
    VISIBLE,
    devices_of_workers,
    worker_devices,
)
from .network import initialise_ucx, restrict_listeners
from .options import WorkersOptions
from .prepared import PreparedProcesses
from .presets import missing, with_defaults, without_preset

if TYPE_CHECKING:
    from distributed import Nanny


# -- the forked server of the workers --------------------------------------------------------------
# The process of the nannies imports dask, and then forks the server before it does anything else.
# The server forks the workers. It has one thread, and has never used a GPU: a CUDA context does
# not survive a fork.

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
    if threads := [thread.name for thread in threading.enumerate()[1:]]:
        return f"importing dask started threads ({', '.join(threads)})"
    return next(_uses_of_gpus(), "")


def _uses_of_gpus() -> Iterator[str]:
    """Yield which files of the NVIDIA driver this process has loaded or open."""
    with contextlib.suppress(OSError), Path("/proc/self/maps").open(encoding="utf-8") as maps:
        names = (line.rpartition("/")[2].strip() for line in maps)
        yield from (f"{name} is loaded" for name in names if name.startswith(_DRIVER))
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):  # that of the listing
            target = str(Path(f"/proc/self/fd/{descriptor}").readlink())
            if target.startswith(_DEVICES):
                yield f"{target} is open"


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - only names
    except OSError:
        return []


_START = util.spawnv_passfds
"""How `multiprocessing` starts a new Python."""


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Have `multiprocessing` fork its helpers, where it would start a new Python."""
    helpers = vars(util)
    helpers["spawnv_passfds"] = _fork
    # Python 3.11.0: all users of the node could connect to an abstract socket (CVE-2022-42919).
    helpers["abstract_sockets_supported"] = False
    try:
        yield
    finally:
        helpers["spawnv_passfds"] = _START


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
        end_with_parent()  # with workers that initialise UCX, which may hang
        # A signal to the group must end the workers, and leave the nannies their exit codes.
        for number in (signal.SIGTERM, STOP_DASK):
            signal.signal(number, signal.SIG_IGN)
        os.register_at_fork(after_in_child=restore_signals)
        _renew_multiprocessing()
        exec(args[-1], {})  # noqa: S102 - text of Python's multiprocessing
        status = 0
    except SystemExit:
        status = 0
    finally:
        os._exit(status)


def _renew_multiprocessing() -> None:
    """Forget the server that this process was forked to be: tasks of its workers start processes.

    A new Python would know nothing of it. The lock of the server is held during the fork.
    """
    vars(util)["spawnv_passfds"] = _START
    vars(resource_tracker._resource_tracker).update(_fd=None, _pid=None)
    importlib.reload(forkserver)


# -- the process of the nannies --------------------------------------------------------------------
_METHOD = "distributed.worker.multiprocessing-method"
_METHOD_OPTION = "--multiprocessing-method"
_MODULE = f"{PACKAGE}.workerhost"
_PRE_SPAWN = "distributed.nanny.pre-spawn-environ"
_NANNY_ENVIRON = "distributed.nanny.environ"
_ROUTES = "distributed.worker.http.routes"
"""Modules of the pages of a worker's HTTP server."""
_UCX_OPTIONS = ("-tcp-over-ucx", "-infiniband", "-nvlink", "-rdmacm")
"""Ends of dask-cuda's options that choose the transports of UCX."""
_CUDA_COMMAND = "dask_cuda.cli"
_DASK = (
    "distributed", "distributed.http.worker", "tornado.platform.asyncio",
    "multiprocessing.popen_forkserver", "multiprocessing.synchronize", REGISTRY,
)  # fmt: skip
"""Modules that all workers import. Not PRELOAD: each worker is to run it."""
_DASK_CUDA = ("dask_cuda", "dask_cuda.initialize", "dask_cuda.plugins")


def run_workers(options: WorkersOptions) -> None:
    """Run dask's command for workers in this process, as `python -m` does."""
    module, *arguments = options.command
    defer_signals()
    set_import_path()
    forked = _host.prepare(options)
    if sees_gpus(module, os.environ):  # after the fork: it uses NVML
        os.environ.update(with_named_slices(os.environ))
        let_dask_cuda_measure_slices(load=module == _CUDA_COMMAND)
    restrict_listeners()
    if os.environ.get(PROTOCOL) == "ucxx":  # at the same time as the dask scheduler
        if forked:
            _host.prepare_workers(module, arguments)
        initialise_ucx()
    sys.argv = [module, *arguments, *_own_options(module, forked, arguments)]
    try:
        runpy.run_module(module, run_name="__main__")
    finally:  # if a nanny has failed: Python would wait for the workers of the others
        for worker in active_children():
            worker.kill()


def sees_gpus(module: str, environ: Mapping[str, str]) -> bool:
    """Return whether workers of dask's command ``module`` may have GPUs, also those of `nanny`."""
    return module == _CUDA_COMMAND or VISIBLE in environ


def _own_options(module: str, forked: bool, arguments: Sequence[str]) -> list[str]:
    """Return the options of dask's command that hide dask's configuration, with its values."""
    import dask

    options = preload_options("worker", arguments)
    if module != _CUDA_COMMAND:
        return [*options, *(f"--preload-nanny={name}" for name in dask.config.get(NANNY_PRELOAD))]
    return [*options, f"{_METHOD_OPTION}=forkserver"] if forked else options


class _Host:
    """This process, as its nannies need it."""

    def __init__(self) -> None:
        self._at_start = dict(os.environ)
        self._at_fork: dict[str, str] | None = None
        """Environment of the server; None if there is none."""
        self._prepared = PreparedProcesses()

    def prepare(self, options: WorkersOptions) -> bool:
        """Import dask and fork the server; return False if dask is to start the workers."""
        module, *arguments = options.command
        _replace_environ(without_preset(os.environ))
        import dask

        add_defaults(options.resources, options.local_directory)
        dask.config.set({NANNY_PRELOAD: [*dask.config.get(NANNY_PRELOAD, []), _MODULE]})
        chosen = dask.config.get(_METHOD, None)  # by the user: distributed is not imported yet
        if chosen is not None or any(word.startswith(_METHOD_OPTION) for word in arguments):
            return False
        _replace_environ(with_defaults(os.environ, dask.config.get(_PRE_SPAWN, {})))
        _import_for_workers(cuda=module == _CUDA_COMMAND)
        if reason := start():
            log(f"each worker is started, not forked: {reason}")
            return False
        self._at_fork = dict(os.environ)
        dask.config.set({_METHOD: "forkserver"})
        return True

    def prepare_workers(self, module: str, arguments: Sequence[str]) -> None:
        """Fork processes that initialise UCX for the workers, unless the user takes part in it."""
        import dask

        given = any(word.startswith("--preload=") for word in arguments)
        preloaded = given or preloads("worker") != [PRELOAD]
        if preloaded or any(word.endswith(_UCX_OPTIONS) for word in arguments):
            return
        configured = dask.config.get(_NANNY_ENVIRON, {})
        common = {**self._changed(), **{name: str(value) for name, value in configured.items()}}
        devices = devices_of_workers(os.environ)
        environs = [{**common, VISIBLE: own} for own in devices]
        self._prepared.fork(environs, cuda=module == _CUDA_COMMAND)

    def _changed(self) -> dict[str, str]:
        """Return the variables that a fork of the server lacks."""
        at_fork = self._at_fork or {}
        return {name: value for name, value in os.environ.items() if at_fork.get(name) != value}

    def set_up(self, nanny: Nanny) -> None:
        """Give the worker of ``nanny`` its GPUs, and what a fork of the server would lack."""
        from distributed.process import AsyncProcess

        defer_signals()
        # Dask ends a worker that is over its memory limit by SIGTERM, which workers ignore.
        AsyncProcess.terminate = AsyncProcess.kill
        if self._at_fork is not None:
            self._check_environ(nanny)
            nanny.env = {**self._changed(), **nanny.env}
        nanny.env = {**nanny.env, **worker_devices(str(nanny.name), os.environ)}

    def _check_environ(self, nanny: Nanny) -> None:
        import dask

        names = missing(nanny.pre_spawn_env, self._at_start, self._at_fork or {})
        if names:
            log(f"each worker is started, not forked: it needs its own {', '.join(names)}")
            dask.config.set({_METHOD: "spawn"})
            self._prepared.end()


_host = _Host()


async def dask_setup(nanny: Nanny) -> None:
    """Set up a nanny; dask calls this before it starts the worker."""
    _host.set_up(nanny)


def _replace_environ(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def _import(name: str) -> None:
    with contextlib.suppress(ImportError), collecting_no_garbage():
        importlib.import_module(name)  # dask's command reports an error


def _is_of_dask(name: str) -> bool:
    """Return whether a module is dask's: one of the user may need the environment of its worker."""
    return name.startswith("distributed.")


def _import_for_workers(*, cuda: bool) -> None:
    """Import what workers import, in the environment that their libraries need."""
    import dask

    if cuda:  # dask-cuda sets it, too, but later: RAPIDS must not use a GPU when it is imported
        os.environ["RAPIDS_NO_INITIALIZE"] = "True"
    for name in (*_DASK, *(_DASK_CUDA if cuda else ())):
        _import(name)
    for name in filter(_is_of_dask, dask.config.get(_ROUTES, None) or ()):
        _import(name)
    if "numpy" in sys.modules:  # dask gives each worker a seed of its own
        importlib.import_module("numpy.random")
    if os.environ.get(PROTOCOL) == "tls" and "tornado.iostream" in sys.modules:
        asyncio.run(_read_authorities())
    if utils := sys.modules.get("distributed.utils"):
        # Else distributed would import pandas, for a server that it would start.
        vars(utils)["_forkserver_preload_set"] = True


async def _read_authorities() -> None:
    """Read the system's certificates, as tornado does once in each process that accepts TLS."""
    from tornado.iostream import SSLIOStream

    SSLIOStream(socket.socket()).close()
