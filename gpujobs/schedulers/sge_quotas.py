"""Grid Engine's resource quotas: the most GPUs of one user in a queue, from ``qconf -srqs``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class QuotaRule:
    """One line ``limit`` of a resource quota set."""

    filters: Mapping[str, str]
    """``users``, ``queues``, …: patterns as they are written, such as ``{*}`` or ``a,!b``."""
    limits: Mapping[str, str]

    def applies(self, queue: str, user: str) -> bool:
        """Return whether the rule is for jobs of ``user`` in the queue."""
        return self._has("queues", queue) and self._has("users", user)

    def limit_of_user(self, user: str, resource: str) -> int | None:
        """Return the most that one user may have of a resource; None: no limit, or not known."""
        users, number = self.filters.get("users", ""), self.limits.get(resource, "")
        of_one_user = "{" in users or users == user
        known = number.isdigit() and set(self.filters) <= {"users", "queues"}
        return int(number) if of_one_user and known else None

    def _has(self, name: str, value: str) -> bool:
        """Return whether a filter has ``value``; a rule without the filter has all."""
        words = self.filters.get(name, "*").strip("{}").replace(" ", "").split(",")
        if any(fnmatchcase(value, word[1:]) for word in words if word.startswith("!")):
            return False
        return any(fnmatchcase(value, word) for word in words if not word.startswith("!"))


def quota_sets(stdout: str) -> list[list[QuotaRule]]:
    """Return the rules of each enabled set, in their order."""
    blocks = re.findall(r"^\{(.*?)^\}", re.sub(r"\\\n\s*", " ", stdout), re.M | re.S)
    enabled = [
        block for block in blocks if re.search(r"^\s*enabled\s+true\s*$", block, re.M | re.I)
    ]
    return [[_rule(line) for line in _limit_lines(block)] for block in enabled]


def gpus_of_user(
    sets: Sequence[Sequence[QuotaRule]], queue: str, user: str, gpu: str
) -> dict[str, int]:
    """Return the most GPUs of ``user`` in the queue as ``{"": number}``; {} if there is no limit.

    ``gpu`` is the resource that counts GPUs. In each set the first rule that matches applies.
    """
    first = [next((rule for rule in rules if rule.applies(queue, user)), None) for rules in sets]
    limits = [rule.limit_of_user(user, gpu) for rule in first if rule]
    known = [limit for limit in limits if limit is not None]
    return {"": min(known)} if known else {}


def _limit_lines(block: str) -> list[str]:
    return re.findall(r"^\s*limit\s+(.*)$", block, re.M)


def _rule(line: str) -> QuotaRule:
    """Return the rule of ``users {*} queues gpu.q to gpu=4,slots=8``."""
    where, _, what = f" {line}".rpartition(" to ")
    filters = re.findall(r"\b(users|projects|pes|queues|hosts)\s+(\{[^}]*\}|\S+)", where)
    return QuotaRule(dict(filters), dict(re.findall(r"([\w.-]+)=([^,\s]+)", what)))
