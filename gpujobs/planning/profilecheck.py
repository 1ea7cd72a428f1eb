"""Checks of a profile that do not depend on a queue."""

from __future__ import annotations

import difflib
import re

from ..schedulers import Scheduler
from ..schedulers.commandnames import all_commands
from .diagnostics import Diagnostics


def check_profile(diagnostics: Diagnostics, scheduler: Scheduler) -> None:
    """Report problems of the profile, and commands of the site that do not exist."""
    pattern, rule = scheduler.name_rule
    name = f"{diagnostics.spec.name}-0000"
    if not re.fullmatch(pattern, name):
        message = f"{scheduler.name} does not allow a job name like {name!r}: {rule}"
        diagnostics.profile_error(message, "name", hint="name: …")
    _check_groups(diagnostics)
    if not scheduler.on_this_machine:
        _check_commands(diagnostics, scheduler)


def _check_commands(diagnostics: Diagnostics, scheduler: Scheduler) -> None:
    known = all_commands(scheduler)
    for name in diagnostics.spec.site.site.commands:
        if name not in known:
            listed = ", ".join(sorted(known))
            message = f"{scheduler.name} has no command {name}; it has {listed}"
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            diagnostics.site_error(message, "commands", name, hint=hint)


def _check_groups(diagnostics: Diagnostics) -> None:
    """Report keys of the profile that contradict `groups`."""
    profile = diagnostics.spec.profile
    wanted = profile.head.group if profile.head else None
    if wanted and wanted not in profile.groups:
        known = ", ".join(profile.groups) or "the profile has no `groups`"
        message = f"there is no group `{wanted}`"
        diagnostics.profile_error(message, "head", "group", hint=f"head: {{group: …}}: {known}")
    if not profile.groups:
        return
    if "gpus" in profile.given:
        message = "`gpus` is a key of each group; with `groups`, the profile itself has none"
        diagnostics.profile_error(message, "gpus")
    if profile.layout == "mpi":
        message = "`layout: mpi` is one job with all workers, which has no `groups`"
        diagnostics.profile_error(message, "groups", hint="layout: workers")
        diagnostics.raise_problems()
