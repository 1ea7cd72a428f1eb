"""Processes that initialise UCX for workers before their nannies can start these."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import forkserver, popen_forkserver, reduction, spawn
from multiprocessing.process import BaseProcess
from typing import Any

from .children import end_with_parent
from .gpus import is_shareable
from .names import VISIBLE
from .network import initialise_driver, initialise_ucx

_SETTINGS = ("UCX", "CUDA")
"""Beginnings of the variables by which UCX and CUDA are initialised."""


class _Waiting:
    """The first task of such a process, before that of a worker; it is pickled like that.

    Its only inherited descriptor is a socket, through which it gets those of the worker.
    """

    def __init__(self, environ: Mapping[str, str], *, cuda: bool) -> None:
        self._environ = dict(environ)
        self._cuda = cuda

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Initialise UCX, wait for the worker, and be it; return the exit code."""
        end_with_parent()
        os.close(parent_sentinel)
        os.environ.update(self._environ)
        # UCX uses the GPU, which the check of ucxx may have for itself.
        if all(map(is_shareable, self._environ[VISIBLE].split(","))):
            self._initialise()
        (descriptor,) = forkserver.get_inherited_fds() or []
        with socket.socket(fileno=descriptor) as nanny:
            try:
                data, *inherited = reduction.recvfds(nanny, forkserver.MAXFDS_TO_SEND)
            except EOFError:  # no nanny wants it
                return 0
        vars(forkserver)["_forkserver"]._inherited_fds = inherited
        return spawn._main(data, os.dup(data))

    def _initialise(self) -> None:
        initialise_driver()
        if self._cuda:  # with the settings that dask-cuda gives its workers
            importlib.import_module("dask_cuda.initialize").initialize(create_cuda_context=False)
        initialise_ucx()


class _Process:
    """A process of the forked server that waits for its worker, as its nanny sees it."""

    def __init__(self, environ: Mapping[str, str], *, cuda: bool) -> None:
        self.settings = _settings(environ)
        self._worker, other = socket.socketpair()
        with other:
            self._status, data = forkserver.connect_to_new_process([other.fileno()])
        with os.fdopen(data, "wb") as file:
            reduction.dump({}, file)  # the settings of Python, which come with the worker
            reduction.dump(_Waiting(environ, cuda=cuda), file)

    def take_over(self, descriptors: Sequence[int]) -> tuple[int, int]:
        """Be the worker with these descriptors; return two as `connect_to_new_process` does.

        Raises OSError if it has ended.
        """
        read, write = os.pipe()
        try:
            with self._worker:
                reduction.sendfds(self._worker, [read, *descriptors])
        except OSError:
            os.close(write)
            os.close(self._status)
            raise
        finally:
            os.close(read)
        return self._status, write

    def end(self) -> None:
        """Let it exit without a worker."""
        self._worker.close()
        os.close(self._status)


class PreparedProcesses:
    """Processes for the workers that the nannies of this process start first.

    A worker that is started again is forked as usual.
    """

    def __init__(self) -> None:
        self._waiting: list[_Process] = []
        self._lock = threading.Lock()
        """Of `_waiting`: dask starts each worker in a thread."""
        self._starting = threading.local()
        """The settings of the worker that this thread starts."""

    def fork(self, environs: Iterable[Mapping[str, str]], *, cuda: bool) -> None:
        """Fork one for each of these environments; ``cuda``: they are dask-cuda's workers."""
        self._waiting = [_Process(environ, cuda=cuda) for environ in environs]
        popen: Any = popen_forkserver.Popen
        launch, self._connect = popen._launch, forkserver.connect_to_new_process
        starting = self._starting

        def launch_worker(process: popen_forkserver.Popen, worker: BaseProcess) -> None:
            starting.settings = _settings(worker_environ(worker))
            launch(process, worker)

        popen._launch = launch_worker
        vars(forkserver)["connect_to_new_process"] = self._connect_to_process

    def end(self) -> None:
        """Let those exit that have no worker."""
        with self._lock:
            while self._waiting:
                self._waiting.pop().end()

    def _connect_to_process(self, descriptors: Sequence[int]) -> tuple[int, int]:
        """Replace `connect_to_new_process`: take a process that waits, if there is one."""
        process = self._take(getattr(self._starting, "settings", {}))
        if process is not None:
            with contextlib.suppress(OSError):  # it has ended
                return process.take_over(descriptors)
        return self._connect(descriptors)

    def _take(self, settings: Mapping[str, str]) -> _Process | None:
        with self._lock:
            for process in self._waiting:
                if process.settings == settings:
                    self._waiting.remove(process)
                    return process
        self.end()  # they are for workers of other settings than expected, or of an earlier start
        return None


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of UCX and CUDA that a worker with ``environ`` does not share with us.

    `import ucxx` sets variables, too, as it does in the process that waits.
    """
    own = {name: value for name, value in environ.items() if os.environ.get(name) != value}
    return {name: value for name, value in own.items() if name.startswith(_SETTINGS)}


def worker_environ(process: BaseProcess) -> Mapping[str, str]:
    """Return the variables that a nanny gives to its worker, whose process this is."""
    target = vars(process)["_args"][0]
    found: Mapping[str, str] = target.keywords["env"]
    return found
