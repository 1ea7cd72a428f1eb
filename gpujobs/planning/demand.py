"""How many GPUs, or how many CPU workers, the profile asks for."""

from __future__ import annotations

from dataclasses import dataclass

from .diagnostics import Diagnostics
from .machine import Machine

MOST_AUTO_CPU_WORKERS = 4
"""CPU workers for `gpus: auto` on a machine without free GPUs."""


@dataclass(frozen=True)
class Demand:
    """``gpus`` GPUs with a worker each; if it is 0, ``cpu_workers`` CPU workers."""

    gpus: int
    cpu_workers: int


def find_demand(diagnostics: Diagnostics, machine: Machine | None) -> Demand:
    """Return the demand of the profile; ``machine`` is this machine if the site is local.

    Raises InputError if it cannot be determined, or if this machine has too few free GPUs.
    """
    profile = diagnostics.spec.profile
    if profile.gpus == "auto":
        return _automatic(diagnostics, machine)
    gpus, count = int(profile.gpus), profile.workers.count
    if gpus and count:
        message = "`workers.count` is for CPU workers; there is one worker per GPU"
        diagnostics.profile_error(message, "workers", "count", hint="gpus: 0")
    if machine:
        _check_free(diagnostics, machine, gpus)
    return Demand(gpus, count or 1)


def _automatic(diagnostics: Diagnostics, machine: Machine | None) -> Demand:
    profile = diagnostics.spec.profile
    workers = profile.workers
    if machine is None:
        message = "`gpus: auto` is for the local site; give the number of GPUs"
        diagnostics.profile_error(message, "gpus")
        diagnostics.raise_problems()
        return Demand(0, 0)  # not reached
    free = len(machine.gpus)
    if free:
        diagnostics.note(f"gpus: auto: {free} free GPUs on this machine, one worker each")
        return Demand(free, 0)
    reason = "all GPUs are in use" if machine.busy else "no NVIDIA GPU on this machine"
    diagnostics.note(f"gpus: auto: {reason}, so CPU workers")
    cpus = profile.cpus_per_job or workers.threads
    most = max(1, min(MOST_AUTO_CPU_WORKERS, machine.cpus // cpus))
    return Demand(0, workers.count or most)


def _check_free(diagnostics: Diagnostics, machine: Machine, gpus: int) -> None:
    free = len(machine.gpus)
    if gpus <= free:
        return
    busy = "".join(f"; GPU {gpu} is used by {user}" for gpu, user in machine.busy.items())
    message = f"{gpus} GPUs wanted, {free} free on this machine{busy}"
    hint = "gpus: auto takes the free ones, else CPU workers"
    diagnostics.profile_error(message, "gpus", hint=hint)
    diagnostics.raise_problems()
