"""The head's choice of the protocol: by a trial in its job, or by one of the last day."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from .folder import KEPT, Folder
from .gpus import driver_version, gpu_models, hidden_gpus, job_devices, with_first
from .log import log, reason_in
from .names import CERTIFICATE
from .network import node_name, tls_files
from .options import SuperviseOptions
from .process import ManagedProcess
from .transport import FILE, Choice, Measured, choose, ucx_settings
from .trial import PEER

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
        self._hidden = hidden_gpus() if options.gpus else 0
        self._settings, self._remark = _settings(options, environ, self._hidden)
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
        self.folder.write(FILE, choice.json())
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
            devices = job_devices(source, count, environ, explicit=True) or []
            environ["CUDA_VISIBLE_DEVICES"] = with_first(devices, gpu)
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
            why = reason_in(process.log) or reason_in(self._log("peer")) or "no answer"
            found["incomplete"] = why
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
            return Measured(problem=f"{name} does not work on {node_name()}: {problem}")
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
            "models": gpu_models(),
            "hidden": bool(self._hidden),
            "driver": driver_version(),
            "ucx": {name: self.environ[name] for name in self.environ if name.startswith("UCX_")},
            "versions": _versions(),
            "python": sys.executable,
            "one job": self.options.single_job,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _kept(self, key: str) -> dict[str, Measured]:
        """Return the rates of the last day; {} if a second job may complete them now."""
        entry = self._root.read(KEPT).get(key) or {}
        if time.time() - entry.get("time", 0.0) > _KEPT_SECONDS:
            return {}
        measured = {name: Measured.parse(one) for name, one in entry["measured"].items()}
        complete = all(one.between is not None for one in measured.values())
        return measured if complete or not self._others_run() else {}

    def _keep(self, key: str, measured: Mapping[str, Measured]) -> None:
        """Keep the rates; not those of a trial that failed, since the cause may pass."""
        if any(one.problem for one in measured.values()):
            return
        now = time.time()
        entries = {
            name: entry
            for name, entry in self._root.read(KEPT).items()
            if now - entry["time"] < _KEPT_SECONDS
        }
        entries[key] = {"time": now, "measured": {n: vars(one) for n, one in measured.items()}}
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
        environ = {**environ, **tls_files(folder)}
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
    if not options.gpus or PEER not in names or CLAIM in names or FILE in names:
        return None
    if not folder.create(CLAIM, str(options.job)):
        return None
    environ = {**environ, **_settings(options, environ, hidden_gpus())[0]}
    path = folder.logs / "trial-between.log"
    return start_trial(options, environ, f"--result={BETWEEN}", path)


def cluster_ucx_settings(
    options: SuperviseOptions, environ: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the settings of UCX for a job with workers: those of the head, if it chose them."""
    folder = Folder(options.folder)
    chosen = Choice.parse(folder.read(FILE)).environ if (folder.path / "head").is_dir() else None
    return _settings(options, environ, hidden_gpus())[0] if chosen is None else chosen


def _settings(
    options: SuperviseOptions, environ: Mapping[str, str], hidden: int
) -> tuple[dict[str, str], str]:
    """Return the settings of UCX for this job, and a remark.

    A cluster that has one job now may get more, unless it is an MPI allocation or has `requeue`.
    """
    if options.single_job:
        return {}, ""
    return ucx_settings(environ, hidden)


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
    found = {}
    for package in _PACKAGES:
        for name in (package, f"{package}-cu12", f"{package}-cu13"):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return found
