"""How many jobs adaptive scaling may request: by the site's limits, and by refusals."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch.system import HOST, System
from ..planning.limits import JobLimit, exceeded, most_allowed
from ..planning.plan import Plan
from ..text import plural

REFUSAL_TIME = 600.0
"""Seconds after a refusal until more jobs are requested than were accepted."""


class Ceiling:
    """The most jobs of one group of workers that can be submitted."""

    def __init__(self, system: System = HOST) -> None:
        self._system = system
        self._accepted = 0
        self._refusal = ""
        self._refused_until = 0.0

    def clamp(
        self, jobs: int, limits: Sequence[JobLimit], devices: tuple[int, str]
    ) -> tuple[int, str]:
        """Return how many of ``jobs`` jobs are possible, and why not all; "" if all are.

        ``limits`` are those of the site, ``devices`` is from `by_devices`.
        """
        by_refusal = (self._accepted, self.refusal)
        for most, reason in (_by_limits(limits, jobs), devices, by_refusal):
            if reason and most < jobs:
                return most, f"{plural(most, 'job')} of {jobs}: {reason}"
        return jobs, ""

    def refused(self, accepted: int, error: Exception) -> None:
        """Note that the batch scheduler accepts no more than ``accepted`` jobs for now."""
        self._accepted = accepted
        self._refusal = " ".join(str(error).split())
        self._refused_until = self._system.monotonic() + REFUSAL_TIME

    def forget(self) -> None:
        """Forget refusals."""
        self._refused_until = 0.0

    @property
    def refusal(self) -> str:
        """Why no more jobs are accepted for now; "" if that is not known to be so."""
        return self._refusal if self._system.monotonic() < self._refused_until else ""


def by_devices(plan: Plan, gpus: int, others: int) -> tuple[int, str]:
    """Return how many jobs of ``gpus`` GPUs this machine allows, and why; "" if any number.

    ``others``: GPUs that jobs of other groups use.
    """
    devices = len(plan.devices)
    if not devices or not gpus:
        return 0, ""
    return (devices - others) // gpus, f"this machine has {plural(devices, 'free GPU')}"


def _by_limits(limits: Sequence[JobLimit], jobs: int) -> tuple[int, str]:
    limit = exceeded(limits, jobs)
    return (most_allowed(limits) or 0, limit.rule) if limit else (jobs, "")
