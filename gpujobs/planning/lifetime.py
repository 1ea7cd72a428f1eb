"""How long a cluster lives: its end without work, and its attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ..injob.configuration import MARGIN
from ..injob.demand import RULES
from ..schedulers import Scheduler
from ..text import plural, walltime_text
from .bash import Diagnostics
from .shape import JobGroup

DEFAULT = 1800
"""Seconds without tasks and clients after which a cluster without `run` ends."""
_OF_SUBMITTED = ("idle_timeout", "client_timeout", "requeue", "walltime_exit")
"""Keys of a profile that do nothing in a cluster that a Python process owns."""

SHORTEST_WARNING, LONGEST_WARNING = 10, 60
"""Bounds of `warning`, in seconds."""


def warning(walltime: int | None) -> int:
    """Return how many seconds before its walltime a job starts to shut down: a tenth of it."""
    if not walltime:
        return LONGEST_WARNING
    return min(LONGEST_WARNING, max(SHORTEST_WARNING, walltime // 10))


def check_task_time(diagnostics: Diagnostics, walltime: int | None) -> None:
    """Report a `task_time` that is longer than a worker ever lives; ``walltime``: of its job."""
    task_time = diagnostics.spec.profile.task_time
    if not task_time or not walltime:
        return
    most = walltime - warning(walltime) - round(MARGIN)
    if task_time > most:
        shown = walltime_text(task_time)
        message = f"`task_time` is {shown}, but a worker has {max(0, most)} s for its tasks"
        hint = f"a job leaves {warning(walltime)} s before its walltime: ask for a longer one"
        diagnostics.profile_error(message, "task_time", hint=hint)


@dataclass(frozen=True)
class Lifetime:
    """How long a cluster lives."""

    end_after: Mapping[str, int] = field(default_factory=dict)
    """When a cluster without work ends: seconds by rule (see `injob.demand`)."""
    attempts: int = 1
    """How often the cluster starts at most (`requeue`)."""


Replaces: TypeAlias = Literal["owner", "none"]
"""Who replaces the lost jobs of a cluster: the Python process that owns it, or none does.

A cluster that was submitted goes on without them. That of an owner is planned for a number of
workers that changes.
"""


def plan_lifetime(
    diagnostics: Diagnostics,
    scheduler: Scheduler,
    planned: Sequence[JobGroup],
    replaces: Replaces,
) -> Lifetime:
    """Return the lifetime of a cluster of these jobs."""
    jobs = sum(group.shape.jobs for group in planned)
    walltime = max((group.walltime or 0 for group in planned), default=0)
    if replaces == "owner":
        return Lifetime(_end_after_owned(diagnostics, walltime))
    return Lifetime(_end_after(diagnostics, walltime), _attempts(diagnostics, scheduler, jobs))


def _end_after_owned(diagnostics: Diagnostics, walltime: int) -> dict[str, int]:
    """Return when a Python process's cluster without work ends: only the site limits it."""
    profile = diagnostics.spec.profile
    if ignored := [f"`{name}`" for name in _OF_SUBMITTED if getattr(profile, name)]:
        message = "the Python process that owns the cluster decides how long it lives"
        diagnostics.note(f"{', '.join(ignored)}: not used, {message}")
    most = diagnostics.spec.site.site.max_idle_timeout
    if most is None or _ends_before(walltime, most):
        return {}
    diagnostics.note(_note("idle_workers", most, of_site=True))
    return {"idle_workers": most}


def _end_after(diagnostics: Diagnostics, walltime: int) -> dict[str, int]:
    """Return when a cluster without work ends: seconds by rule (see `injob.demand`).

    `idle_timeout` and `client_timeout` act each by itself. Without both of them, a cluster without
    `run` ends after `DEFAULT` seconds without tasks and clients. The site's limit always limits
    the time without tasks, because a notebook that was left open is a client. What the ``walltime``
    (seconds; 0: none) ends before has no such default or limit.
    """
    profile = diagnostics.spec.profile
    given = {"idle": profile.idle_timeout, "client": profile.client_timeout}
    rules = {name: seconds for name, seconds in given.items() if seconds}
    most = None
    if not profile.run:
        most = diagnostics.spec.site.site.max_idle_timeout
        rules = _defaults(set(given.values()) == {None}, most, walltime) | rules
    for name, seconds in given.items():
        _check_limit(diagnostics, f"{name}_timeout", seconds, most)
    for name, seconds in rules.items():
        of_site = most is not None and not given.get(name)
        diagnostics.note(_note(name, seconds, of_site=of_site))
    return rules


def _defaults(unset: bool, most: int | None, walltime: int) -> dict[str, int]:
    """Return the rules of a cluster without `run`; ``unset``: the profile has no timeouts."""
    rules = {}
    if unset and (most is None or most > DEFAULT):
        rules["unused"] = DEFAULT
    if most is not None:
        rules["idle"] = most
    return {name: seconds for name, seconds in rules.items() if not _ends_before(walltime, seconds)}


def _ends_before(walltime: int, seconds: int) -> bool:
    """Return whether the walltime (seconds; 0: none) ends a cluster within so many seconds."""
    return 0 < walltime <= seconds


def _attempts(diagnostics: Diagnostics, scheduler: Scheduler, jobs: int) -> int:
    """Return how often a cluster of ``jobs`` jobs starts at most: 1, and `requeue` times again."""
    profile = diagnostics.spec.profile
    if profile.walltime_exit and not profile.requeue:
        message = "`walltime_exit` asks for another attempt, but there is none"
        diagnostics.profile_error(message, "walltime_exit", hint="requeue: 1")
    if profile.requeue and not scheduler.after_options(["1"]):
        diagnostics.note(f"`requeue` is ignored: {scheduler.name} has no dependencies of jobs")
        return 1
    starts = profile.requeue + 1
    _check_queued(diagnostics, jobs, starts)
    if starts > 1:
        diagnostics.note(f"the jobs of {starts} attempts are submitted at once (`requeue`)")
    return starts


def _check_queued(diagnostics: Diagnostics, jobs: int, starts: int) -> None:
    """Report more queued jobs than the site allows: those of all attempts are submitted at once."""
    most = diagnostics.spec.site.site.max_queued_jobs
    if starts > 1 and most and jobs <= most < jobs * starts:
        queued = f"{plural(jobs, 'job')} of {starts} attempts"
        message = f"{queued}; the site allows {most} of one user (`max_queued_jobs`)"
        place = diagnostics.spec.site_position("max_queued_jobs")
        hint = f"requeue: {most // jobs - 1}"
        diagnostics.profile_error(message, "requeue", hint=hint, related=place)


def _check_limit(diagnostics: Diagnostics, key: str, seconds: int | None, most: int | None) -> None:
    if most is None or seconds is None or 0 < seconds <= most:
        return
    limit = walltime_text(most)
    place = diagnostics.spec.site_position("max_idle_timeout")
    message = f"the site allows at most {limit} (`max_idle_timeout`)"
    diagnostics.profile_error(f"`{key}`: {message}", key, hint=f"{key}: {limit}", related=place)


def _note(name: str, seconds: int, *, of_site: bool) -> str:
    text = f"the cluster ends after {_duration(seconds)} {RULES[name]}"
    if of_site and name != "unused":
        text += " (`max_idle_timeout` of the site)"
    if name == "unused" and not of_site:
        text += "; `idle_timeout: 0` turns this off"
    return text


def _duration(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    if rest or minutes > 120:
        return walltime_text(seconds)
    return "1 minute" if minutes == 1 else f"{minutes} minutes"
