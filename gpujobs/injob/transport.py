"""The protocol of dask's processes: by kept rates, else the first of the site that works."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import gpus, network
from .children import ManagedProcess
from .folder import RATES, TRANSPORT, Folder, head_folder
from .log import log, reason_in
from .names import VISIBLE

if TYPE_CHECKING:
    from .options import SuperviseOptions

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
    """What was measured of one protocol. Rates of GPU memory are in GB/s; none if it was not."""

    within: float | None = None
    """Between two GPUs of a job, or two processes on its only GPU."""
    between: float | None = None
    """Between GPUs of two jobs."""
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
    kind: str = ""
    """For which kind of node rates are kept; see `node_kind`."""

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


# -- the head's choice -----------------------------------------------------------------------------
_PACKAGES = ("distributed", "distributed-ucxx", "ucxx", "libucx", "rmm")
_CHECK_TIMEOUT = 60.0
"""Seconds for the process that tries ucxx. UCX can hang so that it does not end by itself."""


class HeadsChoice:
    """The protocol of the cluster, which is open while another process tries ucxx."""

    def __init__(self, options: SuperviseOptions, environ: Mapping[str, str]) -> None:
        """Choose by kept rates; without any for ucxx, start to try it."""
        self._options = options
        self._folder = Folder(options.folder)
        self._measured: dict[str, Measured] = {}
        self._trial: ManagedProcess | None = None
        self._kind = ""
        self._settings: Mapping[str, str] = {}
        self._remark = ""
        if "ucxx" in options.schemes:
            hidden = _hidden_gpus(options) if options.gpus else 0
            self._settings, self._remark = ucx_settings(environ, hidden)
            self._kind = node_kind(options.interface, environ)
            self._measured = rates_of(self._folder.read(RATES), self._kind)
        self.likely = self._choose()
        """The choice, or what it is if ucxx works."""
        if self.likely.scheme == "ucxx" and "ucxx" not in self._measured:
            self._trial = self._start_trial({**environ, **self._settings})
            self._deadline = time.monotonic() + _CHECK_TIMEOUT

    @property
    def is_open(self) -> bool:
        """Whether ucxx is still tried."""
        return self._trial is not None

    def _choose(self) -> Choice:
        scheme, reason = choose(self._options.schemes, self._measured, self._options.n_workers)
        choice = Choice(scheme, reason, self._measured, kind=self._kind)
        if scheme == "ucxx":
            own = self._settings if self._options.gpus else None
            choice = replace(choice, environ=own, remark=self._remark)
        return choice

    def _start_trial(self, environ: Mapping[str, str]) -> ManagedProcess | None:
        options = self._options
        argv = [sys.executable, str(self._folder.archive), "try-ucxx"]
        if options.interface:
            argv.append(f"--interface={options.interface}")
        if options.gpus:
            try:
                source, count = options.visible_devices, options.gpus
                devices = gpus.job_devices(source, count, environ, explicit=True) or []
            except LookupError:  # the start of the workers will report it
                self._measured = {**self._measured, "ucxx": Measured()}
                return None
            environ = {**environ, VISIBLE: ",".join(devices)}
            argv.append("--gpu")
        return ManagedProcess("the check of ucxx", argv, self._trial_log, environ)

    @property
    def _trial_log(self) -> Path:
        return self._folder.logs / "try-ucxx.log"

    def settle(self, pause: Callable[[float], None]) -> Choice:
        """Return the choice, also in `transport.json`; ``scheme``: "" if no protocol works.

        Without that file there is nothing to say but the protocol, which is in dask's address.
        ``pause`` waits for some seconds, and keeps the job alive.
        """
        if self._trial is not None:
            self._measured = {**self._measured, "ucxx": self._tried(self._trial, pause)}
            self._trial = None
        choice = self._choose()
        for text in filter(None, (choice.text(), choice.reason, choice.remark)):
            log(text)
        if choice != Choice(choice.scheme):
            self._folder.write(TRANSPORT, choice.json())
        return choice

    def _tried(self, trial: ManagedProcess, pause: Callable[[float], None]) -> Measured:
        """Return whether ucxx works here, without measuring it."""
        try:
            while trial.running and time.monotonic() < self._deadline:
                pause(0.05)
            if trial.exit_code == 0:
                return Measured()
        finally:
            trial.kill()
        reason = reason_in(self._trial_log) or "no answer"
        return Measured(problem=f"ucxx does not work on {network.node_name()}: {reason}")


def node_kind(interface: str | None, environ: Mapping[str, str]) -> str:
    """Return all that measured rates depend on, as JSON: GPUs of the node, versions, settings."""
    facts = {
        "gpus": Counter(gpus.gpu_models()),
        "driver": gpus.driver_version(),
        "versions": _versions(),
        "interface": interface,
        "ucx": {name: environ[name] for name in environ if name.startswith("UCX_")},
    }
    return json.dumps(facts, sort_keys=True)


def _versions() -> dict[str, str]:
    """Return the versions of all packages that take part, by name."""
    from importlib import metadata

    found = {}
    for package in _PACKAGES:
        for name in (package, f"{package}-cu12", f"{package}-cu13"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
    return found


def rates_of(entries: Mapping[str, Any], kind: str) -> dict[str, Measured]:
    """Return the rates that are kept for a kind of node, by protocol; ``entries``: of the file."""
    measured = entries.get(kind, {}).get("measured", {})
    return {name: Measured(**one) for name, one in measured.items()}


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
