"""The limits of a site: of one job in a queue, and of all jobs of one user.

gpujobs does not count the user's other jobs: it checks each cluster by itself, and the batch
scheduler enforces the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..config.site import Site
from ..config.sitequeue import Queue
from ..text import number_text, plural, walltime_text


# -- the limits of one job in a queue --------------------------------------------------------------
@dataclass(frozen=True)
class Job:
    """The numbers of one job that have limits; the walltime is in seconds, None: not known."""

    nodes: int
    gpus: int
    walltime: int | None

    @property
    def node_hours(self) -> float | None:
        """Its nodes times hours."""
        return self.walltime and self.nodes * self.walltime / 3600


@dataclass(frozen=True)
class Limit:
    """The most, the least (`min_…`), or all that a queue allows of one number of a job."""

    key: str
    """Key of the queue."""
    number: str
    """Attribute of `Job`."""
    words: str
    """Message for jobs beyond the limit."""
    label: str = ""
    """Name of the number in the output of `gpujobs plan`, which shows limits that have one."""

    @property
    def profile_key(self) -> str:
        """The key of a profile that determines the number."""
        if self.number in ("gpus", "nodes"):
            return "gpus"
        return "walltime"

    def is_broken(self, queue: Queue, job: Job) -> bool:
        """Return whether ``job`` is beyond the limit of ``queue``."""
        limit, number = getattr(queue, self.key), getattr(job, self.number)
        if not limit or not number:
            return False
        if isinstance(limit, tuple):
            return number not in limit
        if self.key.startswith("min"):
            return bool(number < limit)
        return bool(number > limit)

    def message(self, queue: Queue, job: Job) -> str:
        """Return why the queue does not allow ``job``."""
        return self.words.format(
            self._shown(getattr(queue, self.key)),
            gpus=plural(job.gpus, "GPU"),
            nodes=plural(job.nodes, "node"),
            walltime=walltime_text(job.walltime or 0),
        )

    def text(self, queue: Queue, job: Job) -> str:
        """Return the number and the limit as text, "" if one of them is not known."""
        limit, number = getattr(queue, self.key), getattr(job, self.number)
        if not self.label or not limit or number is None:
            return ""
        return f"{self.label} {self._shown(round(number, 2))} <= {self._shown(limit)}"

    def _shown(self, value: float | tuple[int, ...]) -> str:
        if isinstance(value, tuple):
            return ", ".join(map(str, value))
        if self.number == "walltime":
            return walltime_text(int(value))
        return number_text(value)


LIMITS = (
    Limit("max_walltime", "walltime", "walltime {walltime} is more than its {}", "walltime"),
    Limit("min_walltime", "walltime", "walltime {walltime} is less than its {}"),
    Limit("max_gpus", "gpus", "jobs of {gpus}; it allows {} a job", "GPUs of a job"),
    Limit("min_gpus", "gpus", "jobs of {gpus}; it requires {} a job"),
    Limit("gpus_per_job", "gpus", "jobs of {gpus}; it allows jobs of {}"),
    Limit("max_nodes", "nodes", "jobs of {nodes}; it allows {}", "nodes of a job"),
    Limit("min_nodes", "nodes", "jobs of {nodes}; it requires {}"),
    Limit(
        "max_node_hours",
        "node_hours",
        "jobs of {nodes} for {walltime}; it allows {} node-hours",
        "node-hours of a job",
    ),
)
"""In the order in which they are checked."""


def broken_limit(queue: Queue, job: Job) -> Limit | None:
    """Return the first limit of ``queue`` that ``job`` is beyond."""
    return next((limit for limit in LIMITS if limit.is_broken(queue, job)), None)


def limit_texts(queue: Queue, job: Job) -> list[str]:
    """Return the limits of a queue that `gpujobs plan` shows, each with the number of ``job``."""
    return [text for limit in LIMITS if (text := limit.text(queue, job))]


# -- the limits of all jobs of one user ------------------------------------------------------------
@dataclass(frozen=True)
class QueuedJobs:
    """Equal jobs in one queue."""

    queue: str
    """The queue's key in the site file; "" in records of an older gpujobs."""
    jobs: int
    gpus: int = 0
    """GPUs of each job."""


@dataclass(frozen=True)
class JobLimit:
    """The most jobs, or GPUs, that one user may have in a queue or at the whole site."""

    limit: int
    key: tuple[str, ...]
    """Location in the site file, such as ``("queues", "gpu", "max_jobs")``."""
    others: int = 0
    """Jobs or GPUs that the limit counts in addition to those of the jobs given to `exceeded`."""
    gpus: int = 0
    """GPUs of each job, if the limit is one of GPUs."""

    def message(self, jobs: int) -> str:
        """Return the error for ``jobs`` jobs."""
        return f"{plural(self.counted(jobs), 'GPU' if self.gpus else 'job')}; {self.rule}"

    def counted(self, jobs: int) -> int:
        """Return the jobs or GPUs that the limit counts if there are ``jobs`` jobs."""
        return jobs * (self.gpus or 1) + self.others

    @property
    def most_jobs(self) -> int:
        """The most jobs within the limit."""
        return max(0, self.limit - self.others) // (self.gpus or 1)

    @property
    def of_queue(self) -> bool:
        """Whether it is a limit of one queue, not of the whole site."""
        return len(self.key) > 1

    @property
    def rule(self) -> str:
        """Return the limit in words, without a number of jobs."""
        place = "queue" if self.of_queue else "site"
        most = plural(self.limit, "GPU") if self.gpus else str(self.limit)
        return f"the {place} allows {most} of one user (`{self.key[-1]}`)"


def job_limits(
    site: Site, queue_key: str, gpus: int, others: Sequence[QueuedJobs] = ()
) -> list[JobLimit]:
    """Return the limits of jobs with ``gpus`` GPUs each in the queue ``queue_key`` of the site.

    ``others``: the cluster's jobs of other groups and the head's own. Each limit counts those to
    which it applies: entries of the same `name` are one queue of the batch scheduler.
    """
    limits = []
    queue, name = site.queues[queue_key], site.queue_name(queue_key)
    jobs_here, gpus_here = _total(other for other in others if _is_in(site, other, name))
    if queue.max_jobs:
        place = ("queues", queue_key, "max_jobs")
        limits.append(JobLimit(queue.max_jobs, place, jobs_here))
    if queue.max_gpus_per_user and gpus:
        place = ("queues", queue_key, "max_gpus_per_user")
        limits.append(JobLimit(queue.max_gpus_per_user, place, gpus_here, gpus))
    if site.max_queued_jobs:
        jobs, _ = _total(others)
        limits.append(JobLimit(site.max_queued_jobs, ("max_queued_jobs",), jobs))
    return limits


def _total(several: Iterable[QueuedJobs]) -> tuple[int, int]:
    """Return the number of all jobs, and of their GPUs."""
    jobs = gpus = 0
    for one in several:
        jobs += one.jobs
        gpus += one.jobs * one.gpus
    return jobs, gpus


def _is_in(site: Site, jobs: QueuedJobs, name: str) -> bool:
    """Return whether ``jobs`` are in the batch scheduler's queue ``name``."""
    return jobs.queue in site.queues and site.queue_name(jobs.queue) == name


def exceeded(limits: Iterable[JobLimit], jobs: int) -> JobLimit | None:
    """Return the first limit that ``jobs`` jobs exceed."""
    return next((limit for limit in limits if limit.counted(jobs) > limit.limit), None)


def most_allowed(limits: Iterable[JobLimit]) -> int | None:
    """Return the most jobs within all limits; None if there is no limit."""
    return min((limit.most_jobs for limit in limits), default=None)
