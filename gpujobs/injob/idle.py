"""When a cluster without work ends: rules, and how long each has been true.

A rule is what the dask scheduler must be without, and for how many seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

END_AFTER = "GPUJOBS_END_AFTER"
"""Variable with the rules, for the dask scheduler."""
RULES = {
    "idle": "without tasks",
    "client": "without clients",
    "unused": "without tasks and clients",
    "idle_workers": "without tasks",
}
"""The conditions by name, in words for the user.

``idle_workers``: while workers are connected; a Python process's cluster may have none for hours.
"""
_STEP = 2
"""A process that was stopped, or a busy event loop, counts as so many intervals, not as idle."""


def rules_text(rules: Mapping[str, int]) -> str:
    """Return ``{"idle": 600}`` as an option: ``idle=600``."""
    return ",".join(f"{name}={seconds}" for name, seconds in rules.items())


def parse_rules(text: str) -> dict[str, int]:
    """Return the rules of an option; {} for ""."""
    pairs = (item.partition("=") for item in text.split(",") if item)
    return {name: int(seconds) for name, _, seconds in pairs}


class IdleWatch:
    """How long each of ``rules`` has been true, from observations in regular intervals."""

    def __init__(self, rules: Mapping[str, int]) -> None:
        self._rules = rules
        self.interval = min([5.0, *(seconds / 4 for seconds in rules.values())])
        """Seconds between two observations."""
        self._seconds = dict.fromkeys(rules, 0.0)
        self._last: float | None = None

    def observe(self, now: float, *, tasks: bool, clients: bool, workers: bool = True) -> None:
        """Note whether there are unfinished tasks, clients and workers at ``now``, in seconds."""
        passed = 0.0 if self._last is None else min(now - self._last, _STEP * self.interval)
        self._last = now
        true = {
            "idle": not tasks,
            "client": not clients,
            "unused": not (tasks or clients),
            "idle_workers": workers and not tasks,
        }
        for name in self._rules:
            self._seconds[name] = self._seconds[name] + passed if true[name] else 0.0

    @property
    def next_end(self) -> tuple[float, str] | None:
        """Seconds until the cluster ends if nothing changes, and by which rule.

        None while no rule is true.
        """
        lefts = [
            (self._rules[name] - spent, name) for name, spent in self._seconds.items() if spent
        ]
        return min(lefts, default=None)

    @property
    def reason(self) -> str:
        """Why the cluster ends now, or ""."""
        for name, limit in self._rules.items():
            if self._seconds[name] >= limit:
                return f"the cluster was {RULES[name]} for {limit} s"
        return ""
