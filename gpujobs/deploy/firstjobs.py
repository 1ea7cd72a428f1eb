"""How many jobs a cluster object starts with."""

from __future__ import annotations

import math

from ..planning.plan import JobGroup, Plan


def first_jobs(plan: Plan, n_workers: int | None) -> dict[str, int]:
    """Return the number of jobs of each group.

    ``n_workers`` is that keyword; None: the plan is that of a profile file, with all its workers.
    By keywords, a group starts with its `gpus` or `workers.count`, if it has one.
    """
    if n_workers is None:
        return {group.group: group.shape.jobs for group in plan.groups}
    return {group.group: _by_keywords(group, n_workers) for group in plan.groups}


def _by_keywords(group: JobGroup, n_workers: int) -> int:
    if not group.group:
        return math.ceil(n_workers / group.shape.workers)
    profile = group.profile
    has_number = profile.workers.count or (profile.gpus and "gpus" in profile.given)
    return group.shape.jobs if has_number else 0
