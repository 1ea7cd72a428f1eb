"""The choice among the protocols of dask's processes: by a trial, or by rates of the last day."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import gpus, network
from .folder import KEPT, TRANSPORT, Folder, JsonObject, head_folder
from .log import log, reason_in
from .names import CERTIFICATE, LOOPBACK_INTERFACE
from .process import ManagedProcess

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.comm import Comm, Listener

    from .options import SuperviseOptions, TrialOptions, TryUcxxOptions

ISOLATED_UCX = {
    "UCX_TLS": "^sm",
    "UCX_TCP_TX_SEG_SIZE": "1M",
    "UCX_TCP_RX_SEG_SIZE": "1M",
}
"""Settings of UCX for jobs that cannot open each other's GPUs on a node.

UCX would take shared memory between such jobs, and then transfers of GPU memory hang or are slower
than tcp. NVLink within a job and InfiniBand are not affected. Each setting without the others hangs
(measured with UCX 1.21).
"""
_SIMILAR = 0.9
"""A protocol is preferred to a later one that is not faster than by this factor."""


@dataclass(frozen=True)
class Measured:
    """What a trial of one protocol found. Rates of GPU memory are in GB/s."""

    within: float | None = None
    """Between two GPUs of a job, or two processes on its only GPU."""
    between: float | None = None
    """Between GPUs of two jobs; None if no second job ran at that time."""
    problem: str = ""
    """Why it does not work; "" if it does."""

    def text(self) -> str:
        """Return ``107 GB/s within a job, 2.4 GB/s between jobs``."""
        if self.problem:
            return "does not work"
        parts = ((self.within, "within a job"), (self.between, "between jobs"))
        known = [f"{rate:.3g} GB/s {where}" for rate, where in parts if rate is not None]
        return ", ".join(known) or "works"


@dataclass(frozen=True)
class Choice:
    """The contents of `transport.json`."""

    scheme: str = ""
    """The protocol that all processes use; "" while it is not known."""
    reason: str = ""
    """Why it is not the first of the site."""
    measured: Mapping[str, Measured] = field(default_factory=dict)
    """By protocol."""
    environ: Mapping[str, str] | None = field(default_factory=dict)
    """Settings of UCX for dask's processes. None: the head has no GPU, each other job chooses."""
    remark: str = ""
    """About these settings, for the user."""

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Choice:
        """Return an object from its JSON, in which keys may be missing."""
        measured = {name: Measured(**one) for name, one in value.get("measured", {}).items()}
        return cls(**{**value, "measured": measured})

    def json(self) -> dict[str, Any]:
        """Return the object as JSON."""
        return asdict(self)

    def text(self) -> str:
        """Return the measured rates of all protocols, the chosen one first; "" without any."""
        order = sorted(self.measured, key=lambda name: name != self.scheme)
        return "; ".join(f"{name}: {self.measured[name].text()}" for name in order)


def choose(
    protocols: Sequence[str], measured: Mapping[str, Measured], workers: int
) -> tuple[str, str]:
    """Return the fastest protocol that works, and why it is not the first one, or "".

    ``protocols`` are in the order of the site, ``workers`` those of a job. A protocol that was not
    tried works. Returns ("", reason) if none does.
    """
    found = {name: measured.get(name, Measured()) for name in protocols}
    usable = {name: one for name, one in found.items() if not one.problem}
    remarks = [one.problem for one in found.values() if one.problem]
    chosen = _fastest(usable, workers) if usable else ""
    first = next(iter(usable), "")
    if chosen != first:
        remarks.append(f"{chosen} is faster here than {first}")
    return chosen, "; ".join(remarks)


def _fastest(measured: Mapping[str, Measured], workers: int) -> str:
    """Return the fastest protocol; the first of similar ones, or if its rate is not known."""
    chosen, *others = measured
    best = _score(measured[chosen], workers)
    for name in others:
        score = _score(measured[name], workers)
        if score is not None and best is not None and best < _SIMILAR * score:
            chosen, best = name, score
    return chosen


def _score(measured: Measured, workers: int) -> float | None:
    """Return the rate of a computation in which each worker exchanges data with all others.

    Within a job and between jobs it has about as much to move: the harmonic mean. A job of one
    worker has no transfers within.
    """
    within, between = measured.within, measured.between
    if between is None or within is None:
        return within if between is None else between
    return between if workers < 2 else 2 / (1 / within + 1 / between)


def ucx_settings(environ: Mapping[str, str], hidden_gpus: int) -> tuple[dict[str, str], str]:
    """Return the settings of UCX for a cluster of several jobs, and a remark for the user.

    ``environ`` is the job's: the user's own settings win. ``hidden_gpus``: how many GPUs of the
    node the job cannot open.
    """
    if not hidden_gpus:
        return {}, ""
    own = sorted(name for name in ISOLATED_UCX if name in environ)
    if own:
        names = ", ".join(f"{name}={environ[name]}" for name in own)
        return {}, f"jobs are isolated from each other's GPUs; UCX keeps your {names}"
    return dict(ISOLATED_UCX), ""


# -- `trial`: two processes that measure the rates of GPU memory -----------------------------------
# One process, the peer, sends blocks to those that connect. The other one measures.

PEER = "trial-peer.json"
"""File with the addresses of the peer, by protocol."""
BLOCK_BYTES = 64 * 2**20
_MOST_BLOCKS = 8
"""Most blocks of a message. Over NVLink a single one takes less time than the message around it."""
_SECONDS = 0.3
"""Time of a message, if it needs no more blocks for that, and of all that count together."""
_CONNECT_TIMEOUT = 10
_UCXX_TIMEOUT = 40
_POOL_BYTES = 2**30
_POLL_INTERVAL = 0.05


def trial(options: TrialOptions) -> None:
    """Be the peer until this process is killed; or measure, and write the result."""
    import asyncio

    _confine(options.interface)
    if options.gpus:
        os.environ.update(gpus.with_named_slices(os.environ))
    network.restrict_listeners()
    folder = Folder(options.folder)
    asyncio.run(_measure(folder, options) if options.result else _serve(folder, options))


def _confine(interface: str | None) -> None:
    if interface == LOOPBACK_INTERFACE:
        for protocol in ("ucxx", "ws", "wss"):
            network.confine(protocol)


def _block(options: TrialOptions, size: int) -> Any:
    """Return ``size`` bytes of the memory that workers use. Raises ImportError without RMM."""
    if not options.gpus:
        return bytes(size)
    import rmm

    if options.memory == "async":
        rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())
    elif options.memory != "plain":
        pool = options.memory == "pool"
        initial = _POOL_BYTES if pool else None
        managed = options.memory == "managed"
        rmm.reinitialize(pool_allocator=pool, managed_memory=managed, initial_pool_size=initial)
    buffer = rmm.DeviceBuffer(size=size)
    try:
        import cupy
    except ImportError:
        return buffer
    return cupy.asarray(buffer)


async def serve(address: str, block: object) -> Listener:
    """Send ``block``, as often as it is asked for, to those that connect to ``address``."""
    from distributed.comm import CommClosedError, listen
    from distributed.protocol.serialize import to_serialize
    from distributed.security import Security

    async def send(comm: Comm) -> None:
        with contextlib.suppress(CommClosedError):
            while True:
                request: Any = await comm.read()
                await comm.write({"blocks": [to_serialize(block)] * request["count"]})

    arguments = Security(require_encryption=False).get_listen_args("worker")
    return await listen(address, send, deserialize=True, **arguments)


async def _serve(folder: Folder, options: TrialOptions) -> None:
    import asyncio

    block = _block(options, BLOCK_BYTES)
    found: dict[str, dict[str, str]] = {"addresses": {}, "problems": {}}
    listeners = []  # ucxx stops one that nothing refers to
    for protocol in options.protocols:
        try:
            host = network.own_address(options.interface)
            listener = await serve(f"{protocol}://{host}:0", block)
            listeners.append(listener)
            found["addresses"][protocol] = listener.contact_address
        except Exception as error:  # each protocol has errors of its own
            found["problems"][protocol] = _message(error)
    folder.write(PEER, found)
    await asyncio.Event().wait()


async def _measure(folder: Folder, options: TrialOptions) -> None:
    import asyncio

    _block(options, 1)  # before UCX starts, which asks CUDA for its devices
    await network.initialise_ucx()
    while not (peer := folder.read(PEER)):
        await asyncio.sleep(_POLL_INTERVAL)
    results = {name: {"problem": problem} for name, problem in peer["problems"].items()}
    # The last one of the site is tcp, which does not hang.
    for protocol, address in reversed(list(peer["addresses"].items())):
        try:
            results[protocol] = {"rate": await measured_rate(address)}
        except Exception as error:  # each protocol has errors of its own
            log(f"{address}: {_message(error)}")
            results[protocol] = {"problem": _message(error)}
        folder.write(options.result, results)
    folder.write(options.result, {**results, "complete": True})


async def measured_rate(address: str) -> float:
    """Return the best rate of several messages in GB/s; the latency makes it a lower bound."""
    comm = await _connect(address)
    seconds = await _receive(comm, 1)  # it does not count: it opens the memory of the other process
    counted: list[float] = []
    rates: list[float] = []
    while sum(counted) < _SECONDS:
        blocks = min(_MOST_BLOCKS, 1 + int(_SECONDS / seconds))
        counted.append(await _receive(comm, blocks))
        seconds = counted[-1] / blocks
        rates.append(blocks * BLOCK_BYTES / 1e9 / counted[-1])
    await comm.close()
    return round(max(rates), 3)


async def _connect(address: str) -> Comm:
    from distributed.comm import connect
    from distributed.security import Security

    arguments = Security(require_encryption=False).get_connection_args("worker")
    return await connect(address, timeout=_CONNECT_TIMEOUT, deserialize=True, **arguments)


async def _receive(comm: Comm, blocks: int) -> float:
    """Receive a message with this number of blocks; return how many seconds that took."""
    started = time.perf_counter()
    await comm.write({"count": blocks})
    await comm.read()
    return time.perf_counter() - started


async def serve_from_worker(dask_worker: Worker) -> tuple[str, bool]:
    """Serve blocks of this worker's memory; return the address, and whether they are on a GPU."""
    try:
        import cupy

        block = cupy.zeros(BLOCK_BYTES, dtype="u1")
    except Exception:  # without CuPy or CUDA: host memory
        block = bytes(BLOCK_BYTES)
    listener = await serve(f"{dask_worker.address.rpartition(':')[0]}:0", block)
    vars(dask_worker)["_gpujobs_listener"] = listener
    return listener.contact_address, not isinstance(block, bytes)


def try_ucxx(options: TryUcxxOptions) -> None:
    """Send a block through ucxx inside this process; raise an error if it does not arrive."""
    import asyncio

    _confine(options.interface)
    asyncio.run(asyncio.wait_for(_ucxx_round_trip(options.interface), _UCXX_TIMEOUT))


async def _ucxx_round_trip(interface: str | None) -> None:
    listener = await serve(f"ucxx://{network.own_address(interface)}:0", bytes(2**20))
    comm = await _connect(listener.contact_address)
    await _receive(comm, 1)
    await comm.close()


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__


# -- the head's choice: by a trial, or by the rates of the last day --------------------------------
CLAIM = "trial-claim"
"""File of the job that measures the rate between two jobs."""
BETWEEN = "trial-between.json"
_WITHIN = "trial-within.json"
_KEPT_SECONDS = 24 * 3600
_WITHIN_TIMEOUT = 60.0
"""Seconds for both processes to start and to measure. A transfer that hangs ends here."""
_CLAIM_TIMEOUT = 5.0
"""Seconds for a second job to take part."""
_BETWEEN_TIMEOUT = 40.0
_PROGRESS_MODE = "UCXPY_PROGRESS_MODE"
"""How ucxx notices the end of a transfer. By default, a trial often waits a second for a timer.
Dask's processes do not: with ucxx, their event loops never sleep."""
_PACKAGES = ("distributed", "distributed-ucxx", "ucxx", "libucx", "rmm")


class TransportChoice:
    """Chooses the protocol of the cluster. ``pause`` waits for some seconds, and keeps alive."""

    def __init__(
        self, options: SuperviseOptions, environ: Mapping[str, str], pause: Callable[[float], None]
    ) -> None:
        self.options = options
        self.folder = Folder(options.folder)
        self._root = Folder(str(self.folder.path.parent))
        self._pause = pause
        self._hidden = _hidden_gpus(options) if options.gpus else 0
        self._settings, self._remark = ucx_settings(environ, self._hidden)
        self.environ = {**environ, **self._settings}

    def make(self) -> Choice:
        """Return the choice, which is also in `transport.json`; ``scheme`` is "" if none works."""
        protocols = self.options.schemes
        if "ucxx" not in protocols:
            return self._write(Choice(protocols[0]))
        key = self._key()
        measured = self._kept(key)
        if not measured:
            measured = self._measure()
            self._keep(key, measured)
        scheme, reason = choose(protocols, measured, self.options.n_workers)
        if scheme != "ucxx":
            return self._write(Choice(scheme, reason, measured))
        settings = self._settings if self.options.gpus else None
        return self._write(Choice(scheme, reason, measured, settings, self._remark))

    def _write(self, choice: Choice) -> Choice:
        for text in filter(None, (choice.text(), choice.reason, choice.remark)):
            log(text)
        self.folder.write(TRANSPORT, choice.json())
        return choice

    # -- trial -------------------------------------------------------------------------------------
    def _measure(self) -> dict[str, Measured]:
        """Measure within this job and, if a second one runs, between the two."""
        try:
            peer = self._start("peer", 0, f"--protocols={','.join(self.options.schemes)}")
            process = self._start("within", 1, f"--result={_WITHIN}")
        except LookupError as error:  # the start of the workers will report it, too
            return {name: Measured(problem=str(error)) for name in self.options.schemes}
        try:
            within = self._wait(process, peer)
            between = {} if self.options.single_job else self._wait_for_second_job(peer)
        finally:
            peer.kill()
        return {name: self._combine(name, within, between) for name in self.options.schemes}

    def _start(self, name: str, gpu: int, word: str) -> ManagedProcess:
        """Start a process on a GPU of this job. Raises LookupError if their number is wrong."""
        environ = dict(self.environ)
        if self.options.gpus:
            source, count = self.options.visible_devices, self.options.gpus
            devices = gpus.job_devices(source, count, environ, explicit=True) or []
            environ["CUDA_VISIBLE_DEVICES"] = gpus.with_first(devices, gpu)
        return start_trial(self.options, environ, word, self._log(name))

    def _log(self, name: str) -> Path:
        return self.folder.logs / f"trial-{name}.log"

    def _wait(self, process: ManagedProcess, peer: ManagedProcess) -> dict[str, Any]:
        deadline = time.monotonic() + _WITHIN_TIMEOUT
        while process.running and peer.running and time.monotonic() < deadline:
            self._pause(0.1)
        process.kill()
        found = self.folder.read(_WITHIN)
        if not found.get("complete"):
            reasons = map(reason_in, (process.log, self._log("peer")))
            found["incomplete"] = next(filter(None, reasons), "no answer")
        return found

    def _wait_for_second_job(self, peer: ManagedProcess) -> dict[str, Any]:
        """Return what a second job has measured; {} if none has begun to."""
        deadline = time.monotonic() + _CLAIM_TIMEOUT
        while peer.running and CLAIM not in self.folder.names():
            if time.monotonic() > deadline or not self._others_run():
                return {}
            self._pause(0.1)
        deadline = time.monotonic() + _BETWEEN_TIMEOUT
        while peer.running and time.monotonic() < deadline:
            found = self.folder.read(BETWEEN)
            if found.get("complete"):
                return found
            self._pause(0.1)
        return {**self.folder.read(BETWEEN), "incomplete": "no answer between jobs"}

    def _others_run(self) -> bool:
        started = (self.folder.path / "jobs").glob("*.started")
        return any(path.stem != str(self.options.job) for path in started)

    def _combine(
        self, name: str, within: Mapping[str, Any], between: Mapping[str, Any]
    ) -> Measured:
        rates = [_result(name, found) for found in (within, between)]
        problem = rates[0].problem or rates[1].problem
        if problem:
            return Measured(problem=f"{name} does not work on {network.node_name()}: {problem}")
        if not self.options.gpus:  # rates of host memory are no basis for a choice
            return Measured()
        return Measured(rates[0].within, rates[1].within)

    # -- kept rates --------------------------------------------------------------------------------
    def _key(self) -> str:
        """Return a digest of all that the rates depend on."""
        facts = {
            "protocols": self.options.schemes,
            "interface": self.options.interface,
            "gpus": self.options.gpus,
            "memory": self.options.gpu_memory,
            "models": gpus.gpu_models(),
            "hidden": bool(self._hidden),
            "driver": gpus.driver_version(),
            "ucx": {name: self.environ[name] for name in self.environ if name.startswith("UCX_")},
            "versions": _versions(),
            "python": sys.executable,
            "one job": self.options.single_job,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _kept(self, key: str) -> dict[str, Measured]:
        """Return the rates of the last day; {} if a second job may complete them now."""
        entry = self._entries().get(key)
        if entry is None:
            return {}
        measured = {name: Measured(**one) for name, one in entry["measured"].items()}
        complete = all(one.between is not None for one in measured.values())
        return measured if complete or not self._others_run() else {}

    def _entries(self) -> JsonObject:
        """Return the entries of the last day, by key."""
        oldest = time.time() - _KEPT_SECONDS
        entries = self._root.read(KEPT).items()
        return {key: entry for key, entry in entries if entry["time"] >= oldest}

    def _keep(self, key: str, measured: Mapping[str, Measured]) -> None:
        """Keep the rates; not those of a trial that failed, since the cause may pass."""
        if any(one.problem for one in measured.values()):
            return
        rates = {name: vars(one) for name, one in measured.items()}
        entries = {**self._entries(), key: {"time": time.time(), "measured": rates}}
        try:
            self._root.write(KEPT, entries)
        except OSError as error:
            log(f"cannot keep the measured rates: {error}")


def start_trial(
    options: SuperviseOptions, environ: Mapping[str, str], word: str, path: Path
) -> ManagedProcess:
    """Start one of the two processes of a trial, which talk with encryption and without."""
    folder = Path(options.folder)
    environ = {_PROGRESS_MODE: "polling", **environ}
    if (folder / CERTIFICATE).exists():  # not if all protocols are without encryption
        environ = {**environ, **network.tls_files(folder)}
    argv = [sys.executable, str(Folder(options.folder).archive), "trial"]
    argv += [f"--folder={options.folder}", f"--gpus={options.gpus}"]
    argv += [f"--memory={options.gpu_memory}", word]
    if options.interface:
        argv.append(f"--interface={options.interface}")
    return ManagedProcess("the trial of the transport", argv, path, environ)


def take_part(options: SuperviseOptions, environ: Mapping[str, str]) -> ManagedProcess | None:
    """Measure between the head's job and this one, if it is the first that can."""
    folder = Folder(options.folder)
    names = folder.names()
    if not options.gpus or PEER not in names or CLAIM in names or TRANSPORT in names:
        return None
    if not folder.create(CLAIM, str(options.job)):
        return None
    environ = {**environ, **ucx_settings(environ, _hidden_gpus(options))[0]}
    path = folder.logs / "trial-between.log"
    return start_trial(options, environ, f"--result={BETWEEN}", path)


def cluster_ucx_settings(
    options: SuperviseOptions, environ: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the settings of UCX for a job with workers: those of the head, if it chose them."""
    folder = Folder(options.folder)
    if (folder.path / head_folder(options.attempt)).is_dir():
        chosen = Choice.parse(folder.read(TRANSPORT)).environ
        if chosen is not None:
            return chosen
    return ucx_settings(environ, _hidden_gpus(options))[0]


def _hidden_gpus(options: SuperviseOptions) -> int:
    """Return how many GPUs of this node another job of the cluster may have.

    A cluster that has one job now may get more, unless it has `requeue`; an allocation gets them on
    other nodes.
    """
    return 0 if options.single_job else gpus.hidden_gpus()


def _result(name: str, found: Mapping[str, Any]) -> Measured:
    """Return the result of one measurement as a rate ``within``."""
    if not found:
        return Measured()
    result = found.get(name, {})
    if not result and name == "ucxx":  # a trial that ended or hung says nothing about the others
        result = {"problem": found["incomplete"]}
    return Measured(within=result.get("rate"), problem=result.get("problem", ""))


def _versions() -> dict[str, str]:
    """Return the versions of all packages that take part, by name."""
    from importlib import metadata

    found = {}
    for package in _PACKAGES:
        for name in (package, f"{package}-cu12", f"{package}-cu13"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
    return found
