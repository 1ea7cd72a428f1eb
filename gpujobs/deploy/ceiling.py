"""How many jobs adaptive scaling may request: by the site's limits, and by refusals."""

from __future__ import annotations

import time

from ..clusters.scale import limits_of
from ..planning.limits import exceeded, most_allowed
from ..planning.plan import Plan
from ..text import plural

REFUSAL_TIME = 600.0
"""Seconds after a refusal until more jobs are requested than were accepted."""


class Ceiling:
    """The most jobs of one cluster that can be submitted."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._accepted = 0
        self._refusal = ""
        self._refused_until = 0.0

    def clamp(self, jobs: int) -> tuple[int, str]:
        """Return how many of ``jobs`` jobs are possible, and why not all; "" if all are."""
        for most, reason in (self._by_limits(jobs), self._by_devices(), self._by_refusal()):
            if reason and most < jobs:
                return most, f"{plural(most, 'job')} of {jobs}: {reason}"
        return jobs, ""

    def refused(self, accepted: int, error: Exception) -> None:
        """Note that the batch scheduler accepts no more than ``accepted`` jobs for now."""
        self._accepted = accepted
        self._refusal = " ".join(str(error).split())
        self._refused_until = time.monotonic() + REFUSAL_TIME

    def forget(self) -> None:
        """Forget refusals."""
        self._refused_until = 0.0

    def _by_limits(self, jobs: int) -> tuple[int, str]:
        limits = limits_of(self._plan)
        limit = exceeded(limits, jobs)
        return (most_allowed(limits) or 0, limit.rule) if limit else (jobs, "")

    def _by_devices(self) -> tuple[int, str]:
        devices, gpus = len(self._plan.devices), self._plan.workers.shape.gpus
        if not devices or not gpus:
            return 0, ""
        return devices // gpus, f"this machine has {plural(devices, 'free GPU')}"

    def _by_refusal(self) -> tuple[int, str]:
        if time.monotonic() >= self._refused_until:
            return 0, ""
        return self._accepted, self._refusal
