"""How long a cluster lives: its end without work, and its attempts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..injob.idle import RULES
from ..schedulers import Scheduler
from ..text import plural, walltime_text
from .diagnostics import Diagnostics
from .shape import JobGroup

DEFAULT = 1800
"""Seconds without tasks and clients after which a cluster without `run` ends."""


@dataclass(frozen=True)
class Lifetime:
    """How long a cluster lives."""

    end_after: Mapping[str, int] = field(default_factory=dict)
    """When a cluster without work ends: seconds by rule (see `injob.idle`)."""
    attempts: int = 1
    """How often the cluster starts at most (`requeue`)."""


def plan_lifetime(
    diagnostics: Diagnostics,
    scheduler: Scheduler,
    groups: Iterable[JobGroup | None],
    owned: bool,
) -> Lifetime:
    """Return the lifetime of a cluster of these jobs; if a process owns it, that decides."""
    if owned:
        return Lifetime()
    planned = [group for group in groups if group]
    jobs = sum(group.shape.jobs for group in planned)
    walltime = max((group.walltime or 0 for group in planned), default=0)
    return Lifetime(_end_after(diagnostics, walltime), _attempts(diagnostics, scheduler, jobs))


def _end_after(diagnostics: Diagnostics, walltime: int) -> dict[str, int]:
    """Return when a cluster without work ends: seconds by rule (see `injob.idle`).

    `idle_timeout` and `client_timeout` act each by itself. Without both of them, a cluster without
    `run` ends after `DEFAULT` seconds without tasks and clients, or the site's limit, unless its
    ``walltime`` (seconds; 0: none) ends it before.
    """
    profile = diagnostics.spec.profile
    most = None if profile.run else diagnostics.spec.site.site.max_idle_timeout
    given = {"idle": profile.idle_timeout, "client": profile.client_timeout}
    for name, seconds in given.items():
        _check_limit(diagnostics, f"{name}_timeout", seconds, most)
    rules = {name: seconds for name, seconds in given.items() if seconds}
    if not profile.run and set(given.values()) == {None}:
        rules = {"unused": min(DEFAULT, most or DEFAULT)}
        if 0 < walltime <= rules["unused"]:
            return {}
    for name, seconds in rules.items():
        diagnostics.note(_note(name, seconds, can_turn_off=not most))
    return rules


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


def _note(name: str, seconds: int, *, can_turn_off: bool) -> str:
    text = f"the cluster ends after {_duration(seconds)} {RULES[name]}"
    if name == "unused" and can_turn_off:
        text += "; `idle_timeout: 0` turns this off"
    return text


def _duration(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    if rest or minutes > 120:
        return walltime_text(seconds)
    return "1 minute" if minutes == 1 else f"{minutes} minutes"
