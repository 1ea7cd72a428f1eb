"""The limits on numbers of jobs, checked in one place: queue.max_jobs and site.max_queued_jobs.

Both are limits of one user. gpujobs does not count the user's other jobs: it checks each cluster by
itself, and the batch scheduler enforces the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..config.site import Site
from ..text import plural

NO_OTHERS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class JobLimit:
    """The most jobs that one user may have, in a queue or at the whole site."""

    limit: int
    key: tuple[str, ...]
    """Location in the site file, such as ``("queues", "gpu", "max_jobs")``."""
    other_jobs: int = 0
    """Jobs that the limit counts in addition to those given to `exceeded`."""

    def message(self, jobs: int) -> str:
        """Return the error for ``jobs`` jobs."""
        return f"{plural(jobs + self.other_jobs, 'job')}; {self.rule}"

    @property
    def rule(self) -> str:
        """Return the limit in words, without a number of jobs."""
        place = "site" if len(self.key) == 1 else "queue"
        return f"the {place} allows {self.limit} of one user (`{self.key[-1]}`)"


def job_limits(
    site: Site, queue_key: str, others: Mapping[str, int] = NO_OTHERS
) -> tuple[JobLimit, ...]:
    """Return the limits of jobs in the queue ``queue_key`` of the site file.

    ``others``: the cluster's jobs of other groups and the head's own, by queue. Each limit counts
    those to which it applies.
    """
    limits = []
    if max_jobs := site.queues[queue_key].max_jobs:
        other_jobs = others.get(queue_key, 0)
        limits.append(JobLimit(max_jobs, ("queues", queue_key, "max_jobs"), other_jobs))
    if site.max_queued_jobs:
        other_jobs = sum(others.values())
        limits.append(JobLimit(site.max_queued_jobs, ("max_queued_jobs",), other_jobs))
    return tuple(limits)


def exceeded(limits: Iterable[JobLimit], jobs: int) -> JobLimit | None:
    """Return the first limit that ``jobs`` jobs exceed."""
    return next((limit for limit in limits if jobs + limit.other_jobs > limit.limit), None)


def most_allowed(limits: Iterable[JobLimit]) -> int | None:
    """Return the most jobs within all limits; None if there is no limit."""
    return min((max(0, limit.limit - limit.other_jobs) for limit in limits), default=None)
