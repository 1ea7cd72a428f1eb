"""A stand-in for dask in jobs: workers register with a dask scheduler, and there are no tasks.

A cluster of it costs a tenth of the CPU. It is for tests about the life of jobs: their submission, failures, signals
and ends. Like dask's processes, those of the stub write the events of the workers, restart a worker that dies,
and can retire workers. It has no clients, but for `distributed.Client` as far as a job uses it itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpujobs_injob.children import defer_signals
from gpujobs_injob.events import VERSION, events_file
from gpujobs_injob.folder import Folder
from gpujobs_injob.gpus import bind, choose_cpus, worker_gpu
from gpujobs_injob.names import PROTOCOL, RUN_OF_JOB, VISIBLE, is_encrypted, worker_devices

_TLS = "DASK_DISTRIBUTED__COMM__TLS__"
_PR_SET_PDEATHSIG = 1
_RESTART_INTERVAL = 0.2


def options_of(argv: list[str]) -> argparse.Namespace:
    """Return the options of dask's commands that the stub has; it ignores all others."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--name", default="worker")
    parser.add_argument("--nthreads", type=int, default=1)
    parser.add_argument("--nworkers", type=int, default=0)
    parser.add_argument("--memory-limit", default="0MiB")
    parser.add_argument("--protocol", default="")
    parser.add_argument("--host", default="")
    parser.add_argument("--scheduler-file", required=True)
    return parser.parse_known_args(argv)[0]


def with_tls(connection: socket.socket, role: str) -> socket.socket:
    """Return the connection with the cluster's certificate on both sides, or as it is without encryption."""
    if not is_encrypted(os.environ[PROTOCOL]):
        return connection
    listens = role == "SCHEDULER"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if listens else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(os.environ[f"{_TLS}CA_FILE"])
    context.load_cert_chain(os.environ[f"{_TLS}{role}__CERT"], os.environ[f"{_TLS}{role}__KEY"])
    return context.wrap_socket(connection, server_side=listens)


def connect(address: str, role: str) -> socket.socket:
    """Connect to the dask scheduler."""
    parts = urlsplit(address)
    return with_tls(socket.create_connection((parts.hostname, parts.port)), role)


def own_address() -> str:
    """Return the address of this node that other nodes reach, as dask chooses it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as item:
        item.connect(("8.8.8.8", 80))
        return str(item.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


# -- the dask scheduler ------------------------------------------------------------------------------------------
class Scheduler:
    """Keeps the workers that are connected, in the files of the cluster's folder."""

    def __init__(self, protocol: str, host: str, path: Path) -> None:
        self._folder = Folder(os.environ["GPUJOBS_FOLDER"])
        self._lock = threading.RLock()
        self._workers: dict[str, dict[str, Any]] = {}
        self._connections: dict[str, socket.socket] = {}
        self._closed = False
        self._path = path
        self._file = events_file(int(os.environ["GPUJOBS_ATTEMPT"]))
        self._listener = socket.create_server((host, 0))
        self.address = f"{protocol}://{host}:{self._listener.getsockname()[1]}"
        self._folder.write(path.name, {"type": "Scheduler", "address": self.address, "workers": {}})
        job = json.loads(os.environ["GPUJOBS_RUN_OF_JOB"])["job"]
        self._event("opened", version=VERSION, address=self.address, job=job)

    def serve(self) -> None:
        """Accept connections until the process ends."""
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Close the workers and remove the file with the address, as dask does when its scheduler ends."""
        with self._lock:
            self._event("closed")
            self._closed = True
            self._ask(list(self._connections))
        self._path.unlink(missing_ok=True)

    def _talk(self, connection: socket.socket) -> None:
        name = ""
        with contextlib.suppress(OSError, ValueError):
            connection = with_tls(connection, "SCHEDULER")
            for line in connection.makefile("r", encoding="utf-8"):
                message = json.loads(line)
                if "worker" in message:
                    name = message["name"]
                    self._add(name, message["worker"], connection)
                elif "retire" in message:
                    with self._lock:
                        for one in message["retire"]:
                            self._event("left", worker=one)
                        self._ask(message["retire"])
                connection.sendall(f"{json.dumps(sorted(self._workers))}\n".encode())
        if name:
            self._remove(name)

    def _ask(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                self._connections[name].sendall(b'"close"\n')

    def _add(self, name: str, worker: dict[str, Any], connection: socket.socket) -> None:
        with self._lock:
            self._workers[name], self._connections[name] = worker, connection
            self._event("connected", worker=name, row=worker)

    def _remove(self, name: str) -> None:
        with self._lock:
            del self._workers[name], self._connections[name]
            if not self._closed:
                self._event("disconnected", worker=name)

    def _event(self, event: str, **more: object) -> None:
        line = {"event": event, "at": round(time.time(), 2), **more}
        self._folder.append(self._file, [json.dumps(line)])


def run_scheduler() -> None:
    """Run `distributed.cli.dask_scheduler`."""
    options = options_of(sys.argv[1:])
    protocol, host = options.protocol.partition(":")[0], options.host or own_address()
    scheduler = Scheduler(protocol, host, Path(options.scheduler_file))

    def stop(*_: object) -> None:
        scheduler.close()
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    defer_signals()
    print(f"the stub of the dask scheduler is at {scheduler.address}", flush=True)
    scheduler.serve()


# -- workers -----------------------------------------------------------------------------------------------------
def run_nannies(names: list[str], devices: list[str], options: argparse.Namespace) -> None:
    """Fork the workers; fork one again that dies, and exit when all have been closed."""

    def stop(*_: object) -> None:
        for pid in workers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)

    workers: dict[int, int] = {}
    signal.signal(signal.SIGTERM, stop)
    defer_signals()
    for number in range(len(names)):
        workers[_fork(names[number], devices[number], options)] = number
    while workers:
        pid, status = os.wait()
        if pid not in workers:
            continue
        number = workers.pop(pid)
        if status:
            time.sleep(_RESTART_INTERVAL)
            workers[_fork(names[number], devices[number], options)] = number


def _fork(name: str, devices: str, options: argparse.Namespace) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        defer_signals()
        os.environ.update({VISIBLE: devices, **worker_devices(name, os.environ)})
        work(name, options)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def work(name: str, options: argparse.Namespace) -> None:
    """Be a worker until it is closed."""
    file = Path(options.scheduler_file)
    while not file.exists():
        time.sleep(0.1)
    connection = connect(json.loads(file.read_text())["address"], "WORKER")
    number, unit = options.memory_limit[:-3], options.memory_limit[-3:]
    memory = int(number) << {"MiB": 20, "GiB": 30}[unit]
    own = f"{os.environ[PROTOCOL]}://{own_address()}:{os.getpid()}"
    cpus, binding = choose_cpus(options.nthreads)
    bind(cpus)
    row = {
        "address": own,
        "threads": options.nthreads,
        "gpu": worker_gpu(),
        "binding": binding,
        "memory": memory,
        "run": json.loads(os.environ.get(RUN_OF_JOB, "null")),
    }
    connection.sendall(f"{json.dumps({'name': name, 'worker': row})}\n".encode())
    with contextlib.suppress(OSError):
        for line in connection.makefile("r", encoding="utf-8"):
            if json.loads(line) == "close":
                break
    os._exit(0)


def run_dask_cuda() -> None:
    """Run `dask_cuda.cli`: a worker for each visible GPU."""
    options = options_of(sys.argv[1:])
    devices = os.environ[VISIBLE].split(",")
    import pynvml

    pynvml.nvmlInit()
    pynvml.nvmlDeviceGetHandleByIndex(0)  # for the memory of the GPU
    names = [f"{options.name}-{n}" for n in range(len(devices))] if devices[1:] else [options.name]
    # As dask-cuda does: each worker sees its own GPU first, and the others for NVLink.
    shown = [",".join(devices[n:] + devices[:n]) for n in range(len(devices))]
    run_nannies(names, shown, options)


def run_dask_worker() -> None:
    """Run `distributed.cli.dask_worker`."""
    options = options_of(sys.argv[1:])
    number = options.nworkers or 1
    names = [f"{options.name}-{n}" for n in range(number)] if options.nworkers else [options.name]
    run_nannies(names, [os.environ.get(VISIBLE, "")] * number, options)


# -- what a job itself needs ---------------------------------------------------------------------------------------
class Client:
    """`distributed.Client`, as `injob.pyz retire` uses it."""

    class scheduler:
        """Of `Client.sync`."""

        identity = None
        gpujobs_drain = "drain"

    def __init__(self, timeout: float) -> None:
        address = os.environ["DASK_SCHEDULER_ADDRESS"]
        self._connection = connect(address, "CLIENT")
        self._connection.settimeout(timeout)
        self._lines = self._connection.makefile("r", encoding="utf-8")

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def _send(self, message: object) -> list[str]:
        self._connection.sendall(f"{json.dumps(message)}\n".encode())
        names: list[str] = json.loads(self._lines.readline())
        return names

    def sync(self, function: object, **arguments: Any) -> dict[str, Any]:
        """Return the workers that are connected; with "drain", close some if others could take their data."""
        connected = self._send({})
        if function == "drain" and not set(connected) <= set(arguments["names"]):
            self._send({"retire": arguments["names"]})
        return {"workers": {name: {"name": name} for name in connected}}
