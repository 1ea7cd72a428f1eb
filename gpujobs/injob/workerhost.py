"""`workers`: the process of a job that runs dask's nannies. Their workers are forks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import forkserver
from .log import log
from .loopback import confine_if_wanted
from .names import NANNY_PRELOAD, PACKAGE, PROTOCOL, REGISTRY
from .network import initialise_ucx
from .options import WorkersOptions
from .ports import limit_if_wanted
from .process import defer_signals
from .size import worker_devices
from .workerenviron import missing, with_defaults, without_preset

if TYPE_CHECKING:
    from distributed import Nanny

_METHOD = "distributed.worker.multiprocessing-method"
_METHOD_OPTION = "--multiprocessing-method"
_MODULE = f"{PACKAGE}.workerhost"
_PRE_SPAWN = "distributed.nanny.pre-spawn-environ"
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
    _set_import_path()
    forked = _host.prepare(module, arguments)
    limit_if_wanted()
    confine_if_wanted()
    if os.environ.get(PROTOCOL) == "ucxx":  # at the same time as the dask scheduler
        asyncio.run(initialise_ucx())
    arguments += _own_options(module, forked)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__")


def _own_options(module: str, forked: bool) -> list[str]:
    """Return the options of dask's command that hide dask's configuration."""
    if module != _CUDA_COMMAND:
        return [f"--preload-nanny={_MODULE}"]
    return [f"{_METHOD_OPTION}=forkserver"] if forked else []


def _set_import_path() -> None:
    """Import from the working directory first, and from the archive last."""
    archive = sys.path.pop(0)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, "")
    if archive not in sys.path:
        sys.path.append(archive)


class _Host:
    """This process, as its nannies need it."""

    def __init__(self) -> None:
        self._at_start = dict(os.environ)
        self._at_fork: dict[str, str] | None = None
        """Environment of the server; None if there is none."""

    def prepare(self, module: str, arguments: Sequence[str]) -> bool:
        """Import dask and fork the server; return False if dask is to start the workers."""
        _replace_environ(without_preset(os.environ))
        import dask

        dask.config.set({NANNY_PRELOAD: [*dask.config.get(NANNY_PRELOAD, []), _MODULE]})
        chosen = dask.config.get(_METHOD, None)  # by the user: distributed is not imported yet
        if chosen is not None or any(word.startswith(_METHOD_OPTION) for word in arguments):
            return False
        _replace_environ(with_defaults(os.environ, dask.config.get(_PRE_SPAWN, {})))
        _import_for_workers(cuda=module == _CUDA_COMMAND)
        if reason := forkserver.start():
            log(f"each worker is started, not forked: {reason}")
            return False
        self._at_fork = dict(os.environ)
        dask.config.set({_METHOD: "forkserver"})
        return True

    def set_up(self, nanny: Nanny) -> None:
        """Give the worker of ``nanny`` its GPUs, and what a fork of the server would lack."""
        from distributed.process import AsyncProcess

        defer_signals()
        # Dask ends a worker that is over its memory limit by SIGTERM, which workers ignore.
        AsyncProcess.terminate = AsyncProcess.kill
        if self._at_fork is not None:
            self._check_environ(nanny)
            changed = {k: v for k, v in os.environ.items() if self._at_fork.get(k) != v}
            nanny.env = {**changed, **nanny.env}
        nanny.env = {**nanny.env, **worker_devices(str(nanny.name), os.environ)}

    def _check_environ(self, nanny: Nanny) -> None:
        import dask

        names = missing(nanny.pre_spawn_env, self._at_start, self._at_fork or {})
        if names:
            log(f"each worker is started, not forked: it needs its own {', '.join(names)}")
            dask.config.set({_METHOD: "spawn"})


_host = _Host()


async def dask_setup(nanny: Nanny) -> None:
    """Set up a nanny; dask calls this before it starts the worker."""
    _host.set_up(nanny)


def _replace_environ(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def _import_for_workers(*, cuda: bool) -> None:
    """Import what workers import, in the environment that their libraries need."""
    if cuda:  # dask-cuda sets it, too, but later: RAPIDS must not use a GPU when it is imported
        os.environ["RAPIDS_NO_INITIALIZE"] = "True"
    for name in (*_DASK, *(_DASK_CUDA if cuda else ())):
        with contextlib.suppress(ImportError):  # dask's command reports it
            importlib.import_module(name)
    if "numpy" in sys.modules:  # dask gives each worker a seed of its own
        importlib.import_module("numpy.random")
    if utils := sys.modules.get("distributed.utils"):
        # Else distributed would import pandas, for a server that it would start.
        vars(utils)["_forkserver_preload_set"] = True
