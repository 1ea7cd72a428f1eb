"""What runs inside a job beyond dask's own commands. Standard library and distributed only; Python 3.9 and newer.

This one file is copied into the cluster's folder at submit, because the job's environment need not have gpujobs.
It is used in these ways:

- ``python injob.py supervise …`` is the parent of everything in a job: it decides who is the head, starts the dask
  scheduler, the workers and the user's command, watches them, and ends the cluster when one of them fails;
- ``python -m mpi4py injob.py rank …`` is one rank of an MPI allocation (`layout: mpi`): it checks that MPI and its
  launcher agree, takes its GPUs, and becomes dask-mpi or the user's script;
- ``python injob.py retire …`` moves the data of workers that must leave to others;
- ``python injob.py try-ucxx`` ends with 0 where ucxx works;
- ``--preload injob.py`` in a worker tells which GPU it has, in the dask scheduler it writes down who is there.

The protocol of the cluster's folder (every write is atomic, every file small)::

    head/         made by the job that starts first: mkdir succeeds once, on NFS too. owner: which job; beat: its clock
    transport.json   what dask's processes talk over, and why it is not something better
    scheduler.json   dask's scheduler file
    workers.json     who is registered, written by the dask scheduler (see Roster)
    ended            made once: exit_code and reason. Who finds it leaves
    jobs/N.json      how job N ended, written by its bash; N.reason: why, in words; N.claim: which job it is
    job-ids          what cancels the jobs that still wait
    leave-N          asks the workers of job N to go
    rank-error       what the first MPI rank that failed said of it: exit_code and reason
    ranks.json       environment of the ranks; not every launcher of MPI hands it over to other nodes
    lease            touched by a client that owns the cluster; when it grows old, the head ends
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FAILED = 70  # EX_SOFTWARE: something of ours, not the user's command, ended the cluster
ASKED = 143  # 128 + SIGTERM: the batch scheduler wanted the job to go
REACH = 30  # seconds that a worker's job tries to reach the dask scheduler
SILENCE = 120  # seconds without a beat after which the head is taken for dead; NFS may show a beat 60 s late


# -- the cluster's folder ------------------------------------------------------------------------------------
class Folder:
    """The cluster's folder, as its jobs see it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def write(self, name: str, value: Any) -> None:
        """Replace the file ``name`` atomically."""
        temporary = self.path / f"{name}.{os.urandom(6).hex()}"
        temporary.write_text(json.dumps(value) + "\n")
        temporary.replace(self.path / name)

    def read(self, name: str) -> Any:
        """Return what is in the file ``name``; None if it is not there or half written."""
        try:
            return json.loads((self.path / name).read_text(errors="replace"))
        except (OSError, ValueError):
            return None

    def names(self) -> set[str]:
        """Return what is there; a listing, since NFS remembers for a minute that a name was not."""
        try:
            return set(os.listdir(self.path))  # noqa: PTH208 - names, not Paths
        except OSError:
            return set()

    def end(self, exit_code: int, reason: str, job: int) -> bool:
        """Say that the cluster has ended; False if somebody said so before."""
        temporary = self.path / f"ended.{os.urandom(6).hex()}"
        text = json.dumps(
            {"exit_code": exit_code, "reason": reason, "job": job, "time": time.time()}
        )
        try:
            temporary.write_text(text + "\n")
            os.link(temporary, self.path / "ended")
        except FileExistsError:
            return False
        except OSError as error:
            say(f"cannot write {self.path / 'ended'}: {error}")
            return False
        finally:
            if temporary.exists():
                temporary.unlink()
        return True

    def registered(self) -> dict[str, Any]:
        """Return the workers that the dask scheduler knows, by name."""
        roster = self.read("workers.json")
        return roster["workers"] if isinstance(roster, dict) else {}


def written(path: Path) -> float:
    """Return when a file was written, by the clock of the file server: those of two nodes may differ by minutes.

    It is opened for that, since NFS remembers for a minute how a file looked. OSError where there is none.
    """
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def say(text: str) -> None:
    """Write one line to the job's log."""
    print(f"{time.strftime('%H:%M:%S')} gpujobs: {text}", file=sys.stderr, flush=True)


def last_line(path: Path) -> str:
    """Return the last line of a log that says something, at most 300 characters."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").replace("\0", "").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if any(map(str.isalnum, line))), "")


def node() -> str:
    """Return the name of this node, as the batch scheduler has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# -- GPUs ----------------------------------------------------------------------------------------------------
def visible_devices(source: str, environ: Any) -> list[str] | None:
    """Return this job's GPUs as entries for CUDA_VISIBLE_DEVICES; None where nothing says it (all of the node).

    ``source`` is what the site says: scheduler, exclusive, variable:NAME, file:NAME. An entry is an index, a GPU-
    uuid or a MIG- uuid. A list may be in any order, and is kept in it.
    """
    kind, _, name = source.partition(":")
    if kind == "file":  # Torque: one line `node1-gpu0` per GPU, for all nodes of the job
        path = environ.get(name)
        if not path or not Path(path).is_file():
            raise LookupError(
                f"${name} names no file, but the site says that it lists the job's GPUs"
            )
        lines = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
        here = node().split(".")[0]
        mine = [line for line in lines if line.rsplit("-", 1)[0].split(".")[0] == here] or lines
        return [line.rsplit("-", 1)[-1].removeprefix("gpu") for line in mine]
    if kind == "variable":
        text = environ.get(name, "")
        if not text.strip():
            raise LookupError(f"${name} is empty, but the site says that it lists the job's GPUs")
        items = text.replace(",", " ").split()
        return [
            item
            if item.startswith(("GPU-", "MIG-"))
            else item.lstrip("abcdefghijklmnopqrstuvwxyz_-:")
            for item in items
        ]
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None and kind == "scheduler":
        raise LookupError("the batch scheduler gave no GPU: CUDA_VISIBLE_DEVICES is not set")
    return None if listed is None else [item.strip() for item in listed.split(",") if item.strip()]


def own_devices(source: str, count: int, environ: Any, name_them: bool) -> list[str] | None:
    """Return the ``count`` GPUs that this job has on this node; LookupError where it has another number of them.

    None: all of the node, which nobody lists; with ``name_them`` they are listed all the same.
    """
    try:
        devices = visible_devices(source, environ)
    except LookupError:
        # Some sites fence the others off and set no variable: what the driver shows is then what was asked for.
        if source != "scheduler" or _gpus_of_node() != count:
            raise
        devices = [str(index) for index in range(count)]
    if devices is None:
        return [str(index) for index in range(count)] if name_them else None
    if len(devices) != count:
        raise LookupError(
            f"{count} GPUs were asked for, {len(devices)} were given ({','.join(devices) or 'none'})"
        )
    return devices


def _gpus_of_node() -> int:
    """Return how many GPUs the driver shows here; 0 where it cannot be asked."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except Exception:  # no driver, or no package to ask it with
        return 0


def identity() -> dict[str, Any]:
    """Return which GPU this process has: node, uuid, model, memory in bytes; uuid None without a GPU."""
    me: dict[str, Any] = {"node": node(), "uuid": None, "model": None, "memory": None}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if not first:
        return me
    me["uuid"] = first
    me["fast"] = fast_network()
    try:
        import pynvml

        pynvml.nvmlInit()
        if first.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(first))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(first.encode())
        me["uuid"] = _text(pynvml.nvmlDeviceGetUUID(handle))
        me["model"] = _text(pynvml.nvmlDeviceGetName(handle))
        me["memory"] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        if _has_nvlink(pynvml, handle):
            me["fast"] = [*me["fast"], "NVLink"]
    except Exception as error:  # whatever NVML dislikes is not this worker's end
        me["error"] = f"{type(error).__name__}: {error}"
    return me


def fast_network() -> list[str]:
    """Return ["InfiniBand"] where this node has it."""
    try:
        return ["InfiniBand"] if os.listdir("/sys/class/infiniband") else []  # noqa: PTH208 - names, not Paths
    except OSError:
        return []


def _has_nvlink(pynvml: Any, handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(handle, 0))
    except Exception:  # no NVLink, or an NVML that does not know the question
        return False


def duplicate(workers: dict[str, Any]) -> str:
    """Return a sentence on two workers that share a GPU, or ``""``."""
    seen: dict[tuple[str, str], str] = {}
    for name, worker in sorted(workers.items()):
        gpu = worker.get("gpu") or {}
        if not gpu.get("uuid"):
            continue
        key = (gpu["node"], gpu["uuid"])
        if key in seen:
            return f"workers {seen[key]} and {name} share GPU {gpu['uuid']} on {gpu['node']}"
        seen[key] = name
    return ""


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# -- preload -------------------------------------------------------------------------------------------------
async def dask_setup(server: Any) -> None:
    """Called by dask in every worker and in the dask scheduler that was started with ``--preload injob.py``."""
    if hasattr(server, "startup_information"):
        me = identity()

        async def gpujobs(worker: Any) -> dict[str, Any]:
            return me

        server.startup_information["gpujobs"] = gpujobs
    elif hasattr(server, "add_plugin"):
        folder = Folder(os.environ["GPUJOBS_FOLDER"])
        server.add_plugin(roster(server, str(folder.path)), name="gpujobs")
        if "scheduler.json" not in folder.names():  # dask_mpi.initialize() writes none
            folder.write("scheduler.json", server.identity())


def roster(scheduler: Any, path: str) -> Any:
    """Return a scheduler plugin that keeps ``workers.json`` in the cluster's folder at ``path``."""
    import asyncio

    from distributed.diagnostics.plugin import SchedulerPlugin

    folder = Folder(path)

    class Roster(SchedulerPlugin):  # type: ignore[misc]
        """Writes who is registered, at most every quarter of a second, and not on the event loop."""

        waiting = False

        def add_worker(self, scheduler: Any, worker: str) -> None:
            self.changed()

        def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
            self.changed()

        def changed(self) -> None:
            if not self.waiting:
                self.waiting = True
                asyncio.get_running_loop().call_later(
                    0.25, lambda: asyncio.ensure_future(self.write())
                )

        async def write(self) -> None:
            self.waiting = False
            workers = {
                str(state.name): _worker(state) for state in list(scheduler.workers.values())
            }
            value = {"version": 1, "time": time.time(), "workers": workers}
            try:
                await asyncio.get_running_loop().run_in_executor(
                    None, folder.write, "workers.json", value
                )
            except OSError as error:
                say(f"cannot write workers.json: {error}")
            except RuntimeError:  # this process is ending
                return

    return Roster()


def _worker(state: Any) -> dict[str, Any]:
    return {"address": state.address, "threads": state.nthreads, "gpu": state.extra.get("gpujobs")}


# -- what is talked over -----------------------------------------------------------------------------------
def dask_config(folder: Path, scheme: str) -> dict[str, str]:
    """Return dask's configuration, as environment variables, for processes that talk over ``scheme``."""
    if scheme not in ("tls", "wss"):
        return {}
    comm, certificate = "DASK_DISTRIBUTED__COMM__", str(folder / "tls-cert.pem")
    found = {f"{comm}REQUIRE_ENCRYPTION": "True", f"{comm}TLS__CA_FILE": certificate}
    for role in ("SCHEDULER", "WORKER", "CLIENT"):
        found[f"{comm}TLS__{role}__CERT"] = certificate
        found[f"{comm}TLS__{role}__KEY"] = str(folder / "tls-key.pem")
    return found


def try_ucxx(interface: str | None) -> int:
    """Move an array through ucxx inside this process; 0 if that worked."""
    import asyncio

    from distributed.comm import connect, listen
    from distributed.protocol.serialize import to_serialize
    from distributed.utils import get_ip, get_ip_interface

    async def go() -> bool:
        async def answer(comm: Any) -> None:
            await comm.write(await comm.read())

        host = get_ip_interface(interface) if interface else get_ip()
        async with listen(f"ucxx://{host}:0", answer, deserialize=True) as listener:
            comm = await connect(listener.contact_address, timeout=20)
            data = bytes(range(256)) * 4096
            await comm.write({"data": to_serialize(data)})
            same = bytes((await comm.read())["data"]) == data
            await comm.close()
            return same

    return 0 if asyncio.run(asyncio.wait_for(go(), 40)) else 1


# -- retire --------------------------------------------------------------------------------------------------
def retire(names: list[str], patience: float) -> int:
    """Move the data of the workers ``names`` to others and close them; 0 if that took at most ``patience`` seconds."""
    from distributed import Client

    deadline = time.monotonic() + patience
    with Client(timeout=patience) as client:
        # Without another worker to take the data the dask scheduler does nothing and says so with an empty answer.
        while time.monotonic() < deadline:
            if client.retire_workers(names=names, close_workers=True):
                return 0
            time.sleep(1)
    return 1


# -- supervise -----------------------------------------------------------------------------------------------
class Child:
    """A process of the job, in a process group of its own: signals for the job's group pass it by."""

    def __init__(self, what: str, argv: list[str], log: Path, environ: dict[str, str]) -> None:
        self.what, self.log = what, log
        with log.open("ab") as output:
            try:
                self.process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environ,
                    preexec_fn=_as_child,
                )
            except OSError as error:
                output.write(f"gpujobs: cannot start {argv[0]}: {error.strerror}\n".encode())
                self.process = subprocess.Popen(["/bin/sh", "-c", "exit 127"])

    @property
    def code(self) -> int | None:
        """Exit code, 128 + n for signal n; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def why(self) -> str:
        """Return how it ended, with the last line that it wrote."""
        said = last_line(self.log)
        return f"{self.what} ended (exit code {self.code})" + (f": {said}" if said else "")

    def signal(self, number: int) -> None:
        """Send a signal to the process and its children."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; False if it has not within ``seconds``."""
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.code is not None

    def end(self) -> None:
        """Kill it and what it left behind in its process group."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _as_child() -> None:
    """In a process group of its own, and not to outlive the supervisor, whatever ends that."""
    os.setpgrp()
    for number in (
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):  # Grid Engine warns all of a job, which would die of it
        signal.signal(number, signal.SIG_IGN)
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG; Linux only
    except (OSError, AttributeError):
        pass


class End(Exception):
    """The job's work is over. ``reason`` is None where the job goes and the cluster stays."""

    def __init__(self, exit_code: int, reason: str | None = None) -> None:
        super().__init__(reason)
        self.exit_code, self.reason = exit_code, reason


class Job:
    """One job, as its supervisor sees it: what heads and workers share."""

    is_head = False

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = Folder(options.folder)
        self.logs = self.folder.path / "logs"
        self.cluster = self.folder.path.name
        self.name = f"{self.cluster}-{options.job}"
        self.asked = ""
        self.workers: list[Child] = []
        self.started = self.folder_seen = time.monotonic()
        # Told once by the clock on the wall, which may be set while the job runs.
        self.walltime_ends = self.started + options.started + options.walltime - time.time()
        self.registered = False  # all workers of this job have been there once
        self.environ = dict(os.environ)

    # -- life ------------------------------------------------------------------------------------------------
    def run(self) -> int:
        """Do the job's work; return its exit code."""
        for number in (
            signal.SIGTERM,
            signal.SIGUSR1,
            signal.SIGUSR2,
            signal.SIGINT,
            signal.SIGHUP,
        ):
            signal.signal(number, self._on_signal)
        try:
            self.look_for_end()
            say(f"job {self.options.job} on {node()}: {'the head' if self.is_head else 'workers'}")
            self.work()
        except End as end:
            return self._leave(end)
        raise AssertionError("unreachable")

    def work(self) -> None:
        """Do the work of this kind of job until it ends, which is an `End`."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop the processes of this job."""
        for child in self.workers:
            child.signal(signal.SIGTERM)
        self.wait_for_workers()

    def wait_for_workers(self) -> None:
        """Give workers that were told to go a moment, then end them."""
        for child in self.workers:
            child.wait(3)
            child.end()

    def _on_signal(self, number: int, frame: Any) -> None:
        self.asked = self.asked or signal.Signals(number).name

    def _leave(self, end: End) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if end.reason:
            say(end.reason)
            with contextlib.suppress(OSError):
                (self.folder.path / "jobs" / f"{self.options.job}.reason").write_text(
                    f"{end.reason}\n"
                )
        # A worker job of a cluster that a client owns fails for itself: the client decides what then.
        if end.reason is not None and (self.is_head or not self.options.client_owns):
            self.folder.end(end.exit_code, end.reason, self.options.job)
        self.stop()
        return end.exit_code

    # -- workers ---------------------------------------------------------------------------------------------
    def start_workers(self) -> None:
        """Start the workers of this job: dask-cuda's one process, or one per GPU, or the launcher of MPI."""
        options, environ = self.options, dict(self.environ)
        if not options.workers:
            return
        if options.walltime:
            left = max(10, int(self.time_left() - options.warning))
            environ["DASK_DISTRIBUTED__WORKER__LIFETIME__DURATION"] = f"{left} s"
            environ["DASK_DISTRIBUTED__WORKER__LIFETIME__STAGGER"] = f"{min(60, left // 10)} s"
        if options.ranks:  # each rank takes its GPUs by itself
            self.folder.write(
                "ranks.json",
                {name: value for name, value in environ.items() if _is_for_ranks(name)},
            )
            self._start_launcher(environ)
            return
        devices = self._devices(environ)
        if devices is not None:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if not options.each_gpu or not devices:
            self._start_worker(f"worker {self.name} on {node()}", self.name, environ)
            return
        for i, name in enumerate(
            self.names()
        ):  # its own GPU first, the others visible: NVLink works between them
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[i:] + devices[:i])
            self._start_worker(f"worker {name} on {node()}", name, environ)

    def _devices(self, environ: dict[str, str]) -> list[str] | None:
        if not self.options.gpus:
            return None
        try:
            return own_devices(
                self.options.visible_devices, self.options.gpus, environ, self.options.each_gpu
            )
        except LookupError as error:
            raise End(FAILED, f"{self.name} on {node()}: {error}") from None

    def _start_launcher(self, environ: dict[str, str]) -> None:
        """Start the ranks: workers, or the user's script, whose output is that of `run`."""
        script = self.options.run_on == "ranks"
        argv = self.options.workers if script else [*self.options.workers, "--name", self.cluster]
        log = "run.log" if script else f"job-{self.options.job}.log"
        self.workers.append(
            Child("run:" if script else "the MPI launcher", argv, self.logs / log, environ)
        )

    def _start_worker(self, what: str, name: str, environ: dict[str, str]) -> None:
        argv = [*self.options.workers, "--name", name]
        self.workers.append(
            Child(what, argv, self.logs / f"job-{self.options.job}.log", dict(environ))
        )

    def names(self) -> list[str]:
        """Return the names of this job's workers."""
        gpus, ranks = self.options.gpus, self.options.ranks
        if ranks:
            return rank_names(self.cluster, ranks, gpus // ranks)
        return [self.name] if gpus < 2 else [f"{self.name}-{i}" for i in range(gpus)]

    def look_at_workers(self) -> None:
        """End the job if one of its workers is dead, missing for too long, or not alone on its GPU."""
        for child in self.workers:
            if child.code:
                self.scheduler_may_be_gone()
                raise self.child_failed(child)
        registered = self.folder.registered()
        if not self.options.client_owns and (shared := duplicate(registered)):
            raise End(FAILED, shared)
        if self.registered or not self.workers:
            return
        missing = [name for name in self.names() if name not in registered]
        if missing and time.monotonic() - self.started > self.options.start_timeout:
            shown = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
            limit = self.options.start_timeout
            raise End(FAILED, f"{shown} did not register with the dask scheduler within {limit} s")
        if not missing:
            self.registered = True
            unexpected = sorted(set(registered) - set(self.names())) if self.options.ranks else []
            if unexpected:
                raise End(FAILED, f"workers that nobody planned: {', '.join(unexpected)}")

    def child_failed(self, child: Child) -> End:
        """Return the end of a job whose worker process or MPI launcher failed; a rank may have said why."""
        said = self.folder.read("rank-error")
        if isinstance(said, dict):
            return End(said["exit_code"], said["reason"])
        return End(FAILED, child.why())

    def scheduler_may_be_gone(self) -> None:
        """Give the head, if it is ending, the time to say why."""

    # -- clock and small things ----------------------------------------------------------------------------------
    def time_left(self) -> float:
        """Seconds until the walltime; endless without one."""
        if not self.options.walltime:
            return float("inf")
        return float(self.walltime_ends - time.monotonic())

    def time_is_up(self) -> bool:
        """Tell whether the walltime is nearly over."""
        return self.time_left() < float(self.options.warning)

    def address(self) -> str | None:
        """Return the dask scheduler's address, once it has one."""
        value = self.folder.read("scheduler.json")
        return value.get("address") if isinstance(value, dict) else None

    def look_for_end(self) -> None:
        """Leave if somebody said that the cluster has ended."""
        names = self.folder.names()
        if names:
            self.folder_seen = time.monotonic()
        elif time.monotonic() - self.folder_seen > SILENCE:
            raise End(FAILED, f"{self.folder.path} has not been there for {SILENCE} s")
        if f"leave-{self.options.job}" in names and not self.is_head:
            self.asked = self.asked or "scale"
        if "rank-error" in names and self.workers:
            self.workers[0].wait(3)  # a launcher that hangs in its abort goes with the job
            raise self.child_failed(self.workers[0])
        if "ended" in names:
            ended = self.folder.read("ended") or {}
            say(f"the cluster has ended: {ended.get('reason') or 'run: is done'}")
            raise End(int(ended.get("exit_code", FAILED)) if self.is_head else 0)

    def pause(self, seconds: float) -> None:
        """Wait, but not when the batch scheduler wants something."""
        deadline = time.monotonic() + seconds
        while not self.asked and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.25, left))
        if self.asked:
            time.sleep(0.05)


class Head(Job):
    """The job with the dask scheduler, the user's command, and mostly workers of its own."""

    is_head = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.scheduler: Child | None = None
        self.command: Child | None = None
        self.beat_time = 0.0
        self.lease_time = 0.0

    def work(self) -> None:
        """Start everything, then watch it."""
        (self.folder.path / "scheduler.json").unlink(missing_ok=True)
        self._beat()
        self._check_interface()
        scheme = self._choose_scheme(self.options.schemes.split(","))
        self.environ.update(dask_config(self.folder.path, scheme))
        if self.options.run_on == "ranks":
            return self._ranks(scheme)
        scheduler = self._start_scheduler(scheme)
        self.start_workers()
        while True:
            self.pause(0.25)
            self._beat()
            # Some batch schedulers signal all processes of a job: then the command's end is no news.
            if self.command is not None and self.command.code is not None and not self.asked:
                self._command_ended(self.command, scheduler)
            if self.asked or self.time_is_up():
                self._asked_to_leave()
            if scheduler.code is not None:
                self._scheduler_ended(scheduler)
            self.look_for_end()
            self.look_at_workers()
            self._look_at_lease()
            enough = len(self.folder.registered()) >= self.options.start_workers
            if self.command is None and self.options.run and enough:
                say(f"run: starts with {len(self.folder.registered())} workers")
                self.command = Child("run:", self.options.run, self.logs / "run.log", self.environ)

    def _ranks(self, scheme: str) -> None:
        """The user's script in all ranks: dask-mpi makes rank 0 the dask scheduler and rank 1 the client."""
        preload = json.dumps([str(self.folder.path / "injob.py")])
        self.environ.update(DASK_DISTRIBUTED__SCHEDULER__PRELOAD=preload, GPUJOBS_SCHEME=scheme)
        self.start_workers()
        launcher = self.command = self.workers[0]
        while launcher.code is None:
            self.pause(0.25)
            self._beat()
            if self.asked or self.time_is_up():
                self._asked_to_leave()
            self.look_for_end()
            self._look_at_lease()
            if launcher.code is None:
                self.look_at_workers()
        if launcher.code:
            raise self.child_failed(launcher)
        raise End(0, "")

    def stop(self) -> None:
        """The dask scheduler sends its workers home; both told at once would wait for each other."""
        if self.command is not None and self.command.code is None:
            self.command.signal(signal.SIGTERM)
            self.command.wait(2)
        if self.scheduler is not None:
            self.scheduler.signal(signal.SIGTERM)
        self.wait_for_workers()
        for child in (self.command, self.scheduler):
            if child is not None:
                child.wait(0.5)
                child.end()
        self._cancel_waiting()

    def _cancel_waiting(self) -> None:
        """Cancel what still waits in the queue. Where that cannot be done from a node, waiting jobs find ``ended``."""
        try:
            ids = (self.folder.path / "job-ids").read_text().split()
        except OSError:
            return
        if ids and self.options.cancel:
            argv = [*self.options.cancel.split(), *ids]
            try:
                subprocess.run(argv, timeout=20, capture_output=True, check=False)
            except (OSError, subprocess.SubprocessError) as error:
                say(
                    f"waiting jobs were not cancelled from here ({error}); they leave when they start"
                )

    # -- start -----------------------------------------------------------------------------------------------
    def _check_interface(self) -> None:
        wanted = self.options.interface
        there = [name for _, name in socket.if_nameindex()]
        if wanted and wanted not in there:
            raise End(
                FAILED,
                f"{node()} has no interface {wanted}; it has {', '.join(there)} (`network.interface`)",
            )

    def _choose_scheme(self, schemes: list[str]) -> str:
        """Return the first of the site's protocols that works here, and write it down for everybody."""
        reasons: list[str] = []
        for scheme in schemes:
            why = self._ucxx_fails() if scheme == "ucxx" else ""
            if not why:
                self.folder.write(
                    "transport.json", {"scheme": scheme, "reason": "; ".join(reasons)}
                )
                return scheme
            say(why)
            reasons.append(why)
        raise End(FAILED, "; ".join(reasons))

    def _ucxx_fails(self) -> str:
        log = self.logs / "ucxx.log"
        interface = ["--interface", self.options.interface] if self.options.interface else []
        attempt = Child(
            "ucxx", [sys.executable, __file__, "try-ucxx", *interface], log, self.environ
        )
        deadline = time.monotonic() + 60
        while attempt.code is None and time.monotonic() < deadline and not self.asked:
            self.pause(0.1)
            self._beat()
        code = attempt.code
        attempt.end()
        return (
            "" if code == 0 else f"ucxx does not work on {node()}: {last_line(log) or 'no answer'}"
        )

    def _start_scheduler(self, scheme: str) -> Child:
        log = self.logs / "scheduler.log"
        argv = [*self.options.scheduler, f"--protocol={scheme}"]
        scheduler = self.scheduler = Child("the dask scheduler", argv, log, self.environ)
        while (address := self.address()) is None:
            self.pause(0.1)
            if scheduler.code is not None:
                raise End(FAILED, scheduler.why())
            if self.asked:
                raise End(ASKED, f"stopped while the dask scheduler was starting ({self.asked})")
            if time.monotonic() - self.started > self.options.start_timeout:
                raise End(
                    FAILED,
                    f"the dask scheduler did not start within {self.options.start_timeout} s",
                )
            self.look_for_end()
        self.environ["DASK_SCHEDULER_ADDRESS"] = address
        say(f"the dask scheduler is at {address}")
        return scheduler

    # -- ends ------------------------------------------------------------------------------------------------
    def _command_ended(self, command: Child, scheduler: Child) -> None:
        code = command.code or 0
        if code and scheduler.wait(0.5) and scheduler.code:
            raise End(
                FAILED, scheduler.why()
            )  # the end of the dask scheduler was the end of the command
        said = last_line(command.log) if code else ""
        raise End(
            code,
            f"run: ended with exit code {code}" + (f": {said}" if said else "") if code else "",
        )

    def _scheduler_ended(self, scheduler: Child) -> None:
        if scheduler.code != 0:
            raise End(FAILED, scheduler.why())
        if self.command is None:
            raise End(0, "a client shut the dask scheduler down")
        # The command called client.shutdown() and may have more to do.
        while self.command.code is None and not self.asked and not self.time_is_up():
            self.pause(0.25)
        self._command_ended(self.command, scheduler)

    def _asked_to_leave(self) -> None:
        why = (
            "the walltime is nearly over"
            if self.time_is_up()
            else f"asked by the batch scheduler ({self.asked})"
        )
        if self.command is None:
            raise End(ASKED, f"the head's job was stopped: {why}")
        # Near the walltime the command has what is left; after a cancel, what the batch scheduler gives.
        grace = min(60.0, max(5.0, self.time_left() - 15)) if self.time_is_up() else 10.0
        say(f"{why}: run: has {grace:.0f} s to finish")
        self.command.signal(signal.SIGTERM)
        if self.command.wait(grace) and self.command.code == 0:
            raise End(0, "")
        code = self.command.code
        ended = f"; run: ended with exit code {code}" if code else ""
        raise End(ASKED, f"the head's job was stopped: {why}{ended}")

    def _look_at_lease(self) -> None:
        if not self.options.lease or time.monotonic() - self.lease_time < 2:
            return
        self.lease_time = time.monotonic()
        try:
            age = written(self.folder.path / "head" / "beat") - written(self.folder.path / "lease")
        except OSError:
            age = time.monotonic() - self.started
        if age > self.options.lease:
            raise End(FAILED, f"the client that owns this cluster has been silent for {age:.0f} s")

    def _beat(self) -> None:
        if time.monotonic() - self.beat_time > 10:
            self.beat_time = time.monotonic()
            try:
                self.folder.write("head/beat", time.time())
            except OSError as error:
                say(f"cannot write to {self.folder.path}: {error}")


class Workers(Job):
    """A job with workers only."""

    def work(self) -> None:
        """Find the dask scheduler, start the workers, then watch them."""
        address = self._find_scheduler()
        self.environ["DASK_SCHEDULER_ADDRESS"] = address
        self.start_workers()
        while True:
            self.pause(1.0 if time.monotonic() - self.started < 60 else 2.0)
            self.look_for_end()
            if self.asked or self.time_is_up():
                self._retire()
            self.look_at_workers()
            if all(child.code == 0 for child in self.workers):
                self._released(address)

    def _find_scheduler(self) -> str:
        """Wait for the head's scheduler file, then for its door."""
        while (address := self.address()) is None:
            self.pause(0.5)
            self.look_for_end()
            if self.asked:
                raise End(0)
            if (
                time.monotonic() - self.started > self.options.start_timeout
                and not self._head_lives()
            ):
                raise End(
                    FAILED, f"{self.name} on {node()}: no head after {self.options.start_timeout} s"
                )
        self.environ.update(dask_config(self.folder.path, urlsplit(address).scheme))
        deadline = time.monotonic() + REACH
        while not reachable(address, self.environ):
            self.pause(1.0)
            self.look_for_end()
            if time.monotonic() > deadline:
                where = (self.folder.read("head/owner") or {}).get("node") or "its host"
                how = (
                    'set `interface` or scheduler="job"'
                    if self.options.client_owns
                    else "set `network.interface`"
                )
                what = (
                    f"compute node {node()} cannot reach the dask scheduler at {address} on {where}"
                )
                raise End(FAILED, f"{self.name}: {what}; {how}")
            address = self.address() or address
        return address

    def _head_lives(self) -> bool:
        now = self.folder.path / "jobs" / f"{self.options.job}.now"
        try:
            now.touch()
            return written(now) - written(self.folder.path / "head" / "beat") < SILENCE
        except OSError:
            return False

    def _released(self, address: str) -> None:
        """All workers ended with exit code 0: retired by a client, at the end of their lifetime, or orphaned."""
        self.scheduler_may_be_gone()
        if self.options.client_owns or reachable(address, self.environ):
            say("the workers of this job were released")
            raise End(0)
        raise End(FAILED, f"{self.name} on {node()}: the dask scheduler at {address} is gone")

    def scheduler_may_be_gone(self) -> None:
        """Give the head, if it is ending, the time to say why."""
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            self.look_for_end()
            address = self.address()
            if address is not None and reachable(address, self.environ):
                return
            self.pause(0.5)

    def _retire(self) -> None:
        patience = max(5.0, min(60.0, self.time_left() - 5)) if self.time_is_up() else 20.0
        registered = self.folder.registered()
        names = [name for name in self.names() if name in registered]
        say(
            f"leaving ({self.asked or 'the walltime is nearly over'}): {', '.join(names) or 'no worker is registered'}"
        )
        if names:
            argv = [sys.executable, __file__, "retire", "--patience", str(patience), *names]
            helper = Child(
                "retire", argv, self.logs / f"job-{self.options.job}.log", dict(self.environ)
            )
            deadline = time.monotonic() + patience
            while (
                helper.code is None
                and time.monotonic() < deadline
                and "ended" not in self.folder.names()
            ):
                time.sleep(0.25)
            for child in self.workers:
                child.wait(max(0.5, deadline - time.monotonic()) if helper.code == 0 else 0.5)
            helper.end()
        # Who cancels a job need not tell anybody but the job. Slurm's warning of the walltime may be a minute early.
        cancelled = self.asked.startswith("SIG") and self.time_left() > self.options.warning + 60
        raise End(ASKED if cancelled else 0)


def supervise(options: argparse.Namespace) -> int:
    """Be the head, if this is the first job to start and may be; else a job of workers. Return the exit code."""
    if not options.scheduler:
        return Workers(options).run()
    folder = Folder(options.folder)
    try:
        (folder.path / "head").mkdir()
    except FileExistsError:
        owner = folder.read("head/owner") or {}
        if owner.get("job") != options.job and options.workers:
            return Workers(options).run()
        # The batch scheduler started the head again: its dask scheduler's state and `run` are lost.
        folder.end(
            FAILED,
            f"the batch scheduler started the head's job again, on {node()}; submit again",
            options.job,
        )
        return Head(options).run()
    folder.write("head/owner", {"job": options.job, "node": node(), "time": time.time()})
    return Head(options).run()


def reachable(address: str, environ: dict[str, str]) -> bool:
    """Tell whether something listens at ``address``; with the cluster's certificate, so that it does not complain."""
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout=5) as door:
            if parts.scheme in ("tls", "wss"):
                with _tls_context(environ).wrap_socket(door):
                    pass
    except ssl.SSLError as error:
        say(f"{address} answers, but not with this cluster's certificate: {error}")
    except (OSError, TypeError):
        return False
    return True


def _tls_context(environ: dict[str, str]) -> ssl.SSLContext:
    variable = "DASK_DISTRIBUTED__COMM__TLS__"
    context = ssl.create_default_context(cafile=environ[f"{variable}CA_FILE"])
    context.check_hostname = False
    context.load_cert_chain(environ[f"{variable}WORKER__CERT"], environ[f"{variable}WORKER__KEY"])
    return context


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line. What follows --scheduler, --workers and --run is a command each, --run's the last."""
    groups: dict[str, list[str]] = {"options": [], "scheduler": [], "workers": [], "run": []}
    current = "options"
    for word in argv:
        if current != "run" and word in ("--scheduler", "--workers", "--run"):
            current = word[2:]
        else:
            groups[current].append(word)
    parser = argparse.ArgumentParser(prog="injob.py")
    parser.add_argument("what", choices=["supervise"])
    parser.add_argument(
        "--folder", default=os.environ.get("GPUJOBS_FOLDER"), help="the cluster's folder"
    )
    parser.add_argument(
        "--job", type=int, default=os.environ.get("GPUJOBS_JOB"), help="number of this job"
    )
    parser.add_argument(
        "--started", type=float, default=time.time(), help="when the job started (epoch)"
    )
    parser.add_argument("--walltime", type=int, default=0, help="seconds; 0: none")
    parser.add_argument(
        "--warning", type=int, default=60, help="seconds before the walltime at which to leave"
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of this job")
    parser.add_argument("--visible-devices", default="scheduler", help="who says which")
    parser.add_argument(
        "--each-gpu", action="store_true", help="start the worker command once per GPU"
    )
    parser.add_argument(
        "--ranks", type=int, default=0, help="the worker command starts so many MPI ranks with GPUs"
    )
    parser.add_argument(
        "--run-on", choices=["head", "ranks"], default="head", help="ranks: they are the command"
    )
    parser.add_argument("--schemes", default="tls", help="what to talk over, best first")
    parser.add_argument("--interface", default=None, help="network interface")
    parser.add_argument(
        "--start-workers", type=int, default=1, help="run begins when so many are there"
    )
    parser.add_argument(
        "--start-timeout",
        type=int,
        default=300,
        help="seconds a living process may take to register",
    )
    parser.add_argument(
        "--cancel", default="", help="command that cancels waiting jobs; their ids are appended"
    )
    parser.add_argument(
        "--lease", type=int, default=0, help="seconds of silence after which the owner is gone"
    )
    parser.add_argument(
        "--client-owns", action="store_true", help="a failed job is the client's business"
    )
    options = parser.parse_args(groups.pop("options"))
    for name, command in groups.items():
        setattr(options, name, command)
    return options


# -- ranks of MPI --------------------------------------------------------------------------------------------
EXTRA = 2
"""Ranks that dask_mpi.initialize() takes for the dask scheduler and for the client."""
CLIENT = 1
"""The rank that goes on with the user's script."""


def rank_names(cluster: str, ranks: int, gpus: int) -> list[str]:
    """Return the names of the workers of ``ranks`` ranks with ``gpus`` GPUs each."""
    if gpus == 1:
        return [f"{cluster}-{rank}" for rank in range(ranks)]
    return [f"{cluster}-{rank}-{gpu}" for rank in range(ranks) for gpu in range(gpus)]


def _is_for_ranks(name: str) -> bool:
    """Not every launcher hands the environment over to other nodes; what a rank cannot do without is kept for it."""
    return name.startswith(("DASK_", "GPUJOBS_", "UCX_")) and name != "GPUJOBS_HOST"


def rank(argv: list[str]) -> None:
    """Be one rank: ``rank --folder=F --size=N --gpus=G … -- MODULE_OR_SCRIPT ARGUMENTS``."""
    parser = argparse.ArgumentParser(prog="injob.py rank")
    parser.add_argument("--folder", required=True)
    parser.add_argument(
        "--size", type=int, required=True, help="ranks that the launcher was asked for"
    )
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of each rank")
    parser.add_argument("--on-node", type=int, default=1, help="ranks of one node that have GPUs")
    parser.add_argument("--visible-devices", default="scheduler")
    parser.add_argument(
        "--script",
        action="store_true",
        help="a user's script; its dask_mpi.initialize() uses these:",
    )
    parser.add_argument("--worker-class")
    parser.add_argument("--nthreads", type=int)
    parser.add_argument("--memory-limit", default="auto")
    parser.add_argument("--local-directory")
    parser.add_argument("--interface")
    parser.add_argument("--worker-options", type=json.loads)
    split = argv.index("--")
    options, command = parser.parse_args(argv[:split]), argv[split + 1 :]
    folder = Folder(options.folder)
    for name, value in (folder.read("ranks.json") or {}).items():
        os.environ.setdefault(name, value)
    if (folder.read("transport.json") or {}).get("scheme") == "ucxx":
        # Open MPI may bring an older UCX, and of each library a process takes the one that came first.
        with contextlib.suppress(ImportError):
            importlib.import_module("ucxx")
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        if world.Get_size() != options.size:
            raise RuntimeError(
                f"MPI's world has {world.Get_size()} ranks, but {options.size} were started: mpi4py's MPI library is "
                "not the launcher's (`mpi.command` of the site)"
            )
        _be_rank(options, command, MPI, world)
    except SystemExit as end:
        if end.code not in (None, 0):
            code = end.code if isinstance(end.code, int) else 1
            _rank_failed(
                folder, world, f"exit code {code}" if code is end.code else str(end.code), code
            )
        raise
    except BaseException as error:
        import traceback

        traceback.print_exc()
        while error.__cause__ is not None:  # "Nanny failed to start" does not say why
            error = error.__cause__
        _rank_failed(
            folder, world, f"{type(error).__name__}: {error}", 1 if options.script else FAILED
        )
        raise


def _be_rank(options: argparse.Namespace, command: list[str], MPI: Any, world: Any) -> None:
    import runpy

    nodes, me = world.allgather(node()), world.Get_rank()
    # Emulated nodes of one host share memory, so that MPI itself could not tell them apart.
    local = nodes[:me].count(nodes[me])
    if options.script:
        # The dask scheduler and the client are two more ranks of the first node. A launcher puts as many ranks on each
        # node, so the other nodes have two that are not needed.
        needed = nodes[me] == nodes[0] or local >= EXTRA
        ours = world.Split(0 if needed else MPI.UNDEFINED, me)
        if not needed:
            return
        MPI.COMM_WORLD = ours
        local -= EXTRA
        os.environ["GPUJOBS_RANK"] = str(ours.Get_rank() - EXTRA)
        if ours.Get_rank() != CLIENT:
            _log_to(Path(options.folder) / "logs" / f"job-{os.environ['GPUJOBS_JOB']}.log")
    if local >= 0:
        devices = own_devices(
            options.visible_devices, options.gpus * options.on_node, os.environ, options.on_node > 1
        )
        if devices is not None:
            first = local * options.gpus
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])
    sys.argv = command
    if options.script:
        import dask_mpi

        names = (
            "worker_class",
            "nthreads",
            "memory_limit",
            "local_directory",
            "interface",
            "worker_options",
        )
        planned = {name: getattr(options, name) for name in names}
        os.environ["GPUJOBS_INITIALIZE"] = json.dumps(planned)
        dask_mpi.initialize = initialize
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
        return
    at = command.index("--worker-options") + 1
    worker = json.loads(command[at])
    worker["preload"] = [*worker.get("preload", []), str(Path(options.folder) / "injob.py")]
    sys.argv = [*command[:at], json.dumps(worker), *command[at + 1 :]]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _log_to(path: Path) -> None:
    """Write what this process says to the end of a log, so that the output of `run` is the client's alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def initialize(*arguments: Any, **keywords: Any) -> Any:
    """`dask_mpi.initialize` with what the profile says: protocol, worker options, names, one worker per GPU.

    In the ranks of a job with ``run_on: ranks`` it also is what scripts find as ``dask_mpi.initialize``. Elsewhere it
    is dask-mpi's own. Raises ValueError for what would contradict the plan of the job.
    """
    import inspect

    real = importlib.import_module("dask_mpi.initialize").initialize
    planned = json.loads(os.environ.get("GPUJOBS_INITIALIZE", "{}"))
    if not planned:
        return real(*arguments, **keywords)
    if not _guarded(sys._getframe()):
        # A worker starts its process by importing the script again, which would start workers again, and hang.
        raise RuntimeError('the script needs `if __name__ == "__main__":` around what it does')
    given = dict(inspect.signature(real).bind_partial(*arguments, **keywords).arguments)
    own = dict(given.pop("worker_options", None) or {})
    if "name" in own:
        raise ValueError("worker_options: `name` is given by gpujobs")
    if given.get("worker_class", planned["worker_class"]) != planned["worker_class"]:
        raise ValueError(
            f"worker_class is {given['worker_class']}, but the profile plans {planned['worker_class']}"
        )
    options = {**planned["worker_options"], **own}
    options["name"] = f"{os.environ['GPUJOBS_CLUSTER']}-{os.environ['GPUJOBS_RANK']}"
    options["preload"] = [
        *options.get("preload", []),
        str(Path(os.environ["GPUJOBS_FOLDER"]) / "injob.py"),
    ]
    usual = {**planned, "protocol": os.environ["GPUJOBS_SCHEME"], "dashboard_address": ":0"}
    return real(**{**usual, **given, "worker_options": options})


def _guarded(frame: Any) -> bool:
    """Tell whether the script, a caller of ``frame``, stands at a line under ``if __name__ == "__main__":``."""
    import ast

    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != (
        "<module>",
        "__main__",
    ):
        frame = frame.f_back
    if frame is None or not Path(frame.f_code.co_filename).is_file():
        return True
    tree, line = ast.parse(Path(frame.f_code.co_filename).read_bytes()), frame.f_lineno
    around = [
        i
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and i.lineno <= line <= (i.end_lineno or 0)
    ]
    names = [part.id for i in around for part in ast.walk(i.test) if isinstance(part, ast.Name)]
    return "__name__" in names


def _rank_failed(folder: Folder, world: Any, why: str, exit_code: int) -> None:
    """Say why once, and end all ranks: the others would wait for this one until the walltime."""
    _write_rank_error(folder, exit_code, f"rank {world.Get_rank()} on {node()}: {why[:500]}")
    sys.stdout.flush()
    sys.stderr.flush()
    world.Abort(1)


def _write_rank_error(folder: Folder, exit_code: int, reason: str) -> None:
    """The first one counts: what it says may be why the others failed."""
    with contextlib.suppress(OSError):
        descriptor = os.open(
            folder.path / "rank-error", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
        with os.fdopen(descriptor, "w") as file:
            json.dump({"exit_code": exit_code, "reason": reason}, file)


def main(argv: list[str]) -> int:
    """Run one of the commands; return its exit code."""
    if argv[:1] == ["retire"]:
        return retire(argv[3:], float(argv[2]))
    if argv[:1] == ["try-ucxx"]:
        return try_ucxx(argv[2] if len(argv) > 2 else None)
    if argv[:1] == ["rank"]:
        rank(argv[1:])
        return 0
    return supervise(parse(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
