"""CUDA's Multi-Process Service (MPS): on each node a daemon for the workers of the job."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .children import STOP_DASK, KeptDaemon, ManagedProcess, run_command
from .gpus import device_handle, uuid_of
from .log import error_in
from .names import MPS, VISIBLE, is_slice

if TYPE_CHECKING:
    from .options import MpsOptions

_COMMAND = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_USUAL_PIPES = "/tmp/nvidia-mps"  # noqa: S108 - CUDA's own, if the variable is not set
_CONTROL = "control"
"""The daemon's pipe, or socket, in the folder of `_PIPES`."""
_READY = "ready"
"""File in the folder of the service: its GPUs. The daemon takes connections."""
_ROOTS = ("/tmp", os.environ.get("TMPDIR", "/tmp"))  # noqa: S108 - mkdtemp makes a folder in it
_PREFIX = "gpujobs-mps-"
_LONGEST_SOCKET = 107
"""Bytes of the path of a Unix socket."""
_LONGEST_NAME = 50
"""Bytes of a path below a root: `_PREFIX`, eight characters, and a file of the daemon."""
_START_TIMEOUT = 30.0
_QUIT_TIMEOUT = 1.0
_STOP_TIMEOUT = 5.0
_INTERVAL, _INTERVAL_AT_START = 0.5, 0.1


class MpsError(Exception):
    """The service cannot be started, for this reason."""


# -- in the supervisor -----------------------------------------------------------------------------
def shared(environ: Mapping[str, str], percentage: int) -> dict[str, str]:
    """Return ``environ`` of workers that share GPUs through MPS.

    ``percentage``: of the threads of a GPU, for each of them; 0: no limit.
    """
    limit = {_PERCENTAGE: str(percentage)} if percentage else {}
    return {**environ, MPS: "1", **limit}


def is_provided(environ: Mapping[str, str]) -> bool:
    """Return whether the batch scheduler, or `setup`, has started the service for this job.

    They set one of CUDA's variables. Only a daemon, and a folder, of this user or of root counts:
    any user can make a folder in /tmp.
    """
    if _PIPES not in environ and _PERCENTAGE not in environ:
        return False
    control = Path(environ.get(_PIPES, _USUAL_PIPES)) / _CONTROL
    with contextlib.suppress(OSError):
        # Who owns the folder, or a link, may lead it to another daemon at any time.
        owners = {
            look().st_uid
            for place in (control.parent, control)
            for look in (place.lstat, place.stat)
        }
        return owners <= {0, os.getuid()} and _is_live(control)
    return False


def _is_live(control: Path) -> bool:
    """Return whether a process listens at the daemon's socket or pipe. Raises OSError."""
    if stat.S_ISFIFO(control.lstat().st_mode):  # without a reader that is an error
        os.close(os.open(control, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
        return True
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):  # driver 580 has the first one
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as client:
            client.connect(str(control))
            return True
    return False


def private_folder(roots: Iterable[str] = ()) -> Path:
    """Return a new folder that only this user can enter, with a short path. Raises MpsError.

    ``roots``: where it may be; default: `_ROOTS`.
    """
    problem = "no short path for its sockets"
    for root in roots or _ROOTS:
        if len(os.fsencode(root)) + _LONGEST_NAME > _LONGEST_SOCKET:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        except OSError as error:
            problem = str(error)
    raise MpsError(f"MPS has no folder: {problem}")


class MpsService:
    """The service of this job on this node.

    Its daemon ends with this process: another one keeps it, which also asks NVML, as that can hang.
    """

    def __init__(
        self, archive: Path, devices: Sequence[str], log: Path, environ: Mapping[str, str]
    ) -> None:
        """Start it for the GPUs ``devices``, and wait until it is ready. Raises MpsError."""
        self._folder = private_folder()
        argv = [sys.executable, str(archive), "mps"]
        argv += [f"--folder={self._folder}", f"--devices={','.join(devices)}"]
        self._keeper = ManagedProcess("MPS", argv, log, environ, STOP_DASK)
        atexit.register(self.stop)
        self.environ = folders(self._folder)
        """Variables of its workers."""
        self.devices = self._wait()
        """Its GPUs, as its workers must name them."""

    def _wait(self) -> list[str]:
        deadline = time.monotonic() + _START_TIMEOUT
        ready = self._folder / _READY
        while not ready.exists():
            problem = self.problem()
            if time.monotonic() > deadline:
                problem = problem or f"MPS did not start within {_START_TIMEOUT:.0f} s"
            if problem:
                self.stop()
                raise MpsError(problem)
            time.sleep(_INTERVAL_AT_START)
        return [str(device) for device in json.loads(ready.read_text(encoding="utf-8"))]

    def problem(self) -> str:
        """Return why it has ended; "" while it runs."""
        return "" if self._keeper.running else self._keeper.exit_message()

    def stop(self) -> None:
        """End it. Its workers have ended."""
        self._keeper.terminate()
        self._keeper.wait(_STOP_TIMEOUT)
        self._keeper.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def folders(folder: Path) -> dict[str, str]:
    """Return the variables with the folders of a daemon and its workers."""
    return {_PIPES: str(folder), _LOGS: str(folder)}


# -- the process that keeps the daemon -------------------------------------------------------------
def keep_mps(options: MpsOptions) -> int:
    """Run the daemon until the supervisor is gone, or asks for the end; return an exit code."""
    folder = Path(options.folder)
    try:
        devices = named_gpus(options.devices)
        os.environ.update({**folders(folder), VISIBLE: ",".join(devices)})
        log = folder / "daemon.log"
        daemon = KeptDaemon([_COMMAND, "-f"], log)
    except (LookupError, OSError) as error:
        return _fail(str(error))
    try:
        ready = False
        while daemon.wanted and daemon.exit_code is None:
            if not ready and _answers(folder / _CONTROL):
                ready = True
                _write_ready(folder, devices)
            time.sleep(_INTERVAL if ready else _INTERVAL_AT_START)
        if daemon.exit_code is not None and daemon.wanted:
            logs = (error_in(path) for path in (log, folder / "control.log"))
            reason = next(filter(None, logs), "it has written no reason")
            return _fail(f"exit code {daemon.exit_code}: {reason}")
        return 0
    finally:
        run_command([_COMMAND], _QUIT_TIMEOUT, text="quit\n")
        daemon.end(_QUIT_TIMEOUT)
        shutil.rmtree(folder, ignore_errors=True)


def _fail(reason: str) -> int:
    print(f"cannot run nvidia-cuda-mps-control: {reason}", file=sys.stderr, flush=True)
    return 1


def named_gpus(devices: Sequence[str]) -> list[str]:
    """Return the UUIDs of GPUs: beneath a daemon that has only these, indices count from 0.

    Raises LookupError if they are not known, or if one daemon cannot have them.
    """
    try:
        names = [uuid_of(device_handle(device)) for device in devices]
    except Exception as error:  # no pynvml, no driver, or one of NVML's many errors
        if list(devices) == [str(index) for index in range(len(devices))]:
            return list(devices)  # which remain the same beneath the daemon
        listed, problem = ",".join(devices), f"{type(error).__name__}: {error}"
        raise LookupError(f"the UUIDs of GPUs {listed} are not known ({problem})") from None
    if len(names) > 1 and any(map(is_slice, names)):
        raise LookupError("a daemon can have one MIG slice only: set `gpus_per_job: 1`")
    return names


def _write_ready(folder: Path, devices: Sequence[str]) -> None:
    """Write the file for the supervisor."""
    new = folder / f"{_READY}.new"
    new.write_text(json.dumps(list(devices)), encoding="utf-8")
    new.replace(folder / _READY)


def _answers(control: Path) -> bool:
    with contextlib.suppress(OSError):
        return _is_live(control)
    return False
