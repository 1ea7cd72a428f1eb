"""The choice among the protocols of dask's processes, from what was measured. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

FILE = "transport.json"
"""File in the cluster's folder with the `Choice`."""
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

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Measured:
        """Return an object from its JSON."""
        problem = str(value.get("problem") or "")
        return cls(_rate(value.get("within")), _rate(value.get("between")), problem)

    def text(self) -> str:
        """Return ``107 GB/s within a job, 2.4 GB/s between jobs``."""
        if self.problem:
            return "does not work"
        parts = ((self.within, "within a job"), (self.between, "between jobs"))
        known = [f"{rate:.3g} GB/s {where}" for rate, where in parts if rate is not None]
        return ", ".join(known) or "works"


def _rate(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


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
        """Return an object from its JSON; gpujobs 0.1 wrote only the first two keys."""
        measured = value.get("measured") or {}
        return cls(
            str(value.get("scheme") or ""),
            str(value.get("reason") or ""),
            {name: Measured.parse(found) for name, found in measured.items()},
            value.get("environ", {}),
            str(value.get("remark") or ""),
        )

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
