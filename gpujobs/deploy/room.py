"""How many jobs of a group a pool may have: by the limits, refusals, and the maximum of `adapt`."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ..clusters.scale import limits_of
from .ceiling import by_devices
from .group import WorkerGroup
from .pool import JobPool


def possible(pool: JobPool, group: WorkerGroup, jobs: int) -> tuple[int, str]:
    """Return how many of ``jobs`` jobs of a group are possible, and why not all, or ""."""
    most, why_not = _clamped(pool, group, jobs, pool.jobs.numbers())
    return most, f"{group.label}{why_not}" if why_not and group.label not in why_not else why_not


def room(pool: JobPool, group: WorkerGroup) -> int:
    """Return how many more jobs of a group may be submitted now.

    Jobs that leave count until they have ended.
    """
    occupied = pool.jobs.occupied()
    most, _ = _clamped(pool, group, sys.maxsize, occupied)
    if group.maximum is not None:
        most = min(most, group.maximum)
    return most - occupied[group.name]


def _clamped(
    pool: JobPool, group: WorkerGroup, jobs: int, numbers: Mapping[str, int]
) -> tuple[int, str]:
    limits = limits_of(pool.plan, pool.record, group.name, numbers)
    others = len(pool.jobs.devices(but=group.name))
    devices = by_devices(pool.plan, group.jobs.shape.gpus, others)
    return group.ceiling.clamp(jobs, limits, devices)
