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
    limits = [_limit_of_set(rules, queue, user, gpu) for rules in sets]
    known = [limit for limit in limits if limit is not None]
    return {"": min(known)} if known else {}


def _limit_lines(block: str) -> list[str]:
    return re.findall(r"^\s*limit\s+(.*)$", block, re.M)


def _rule(line: str) -> QuotaRule:
    """Return the rule of ``users {*} queues gpu.q to gpu=4,slots=8``."""
    where, _, what = f" {line}".rpartition(" to ")
    filters = re.findall(r"\b(users|projects|pes|queues|hosts)\s+(\{[^}]*\}|\S+)", where)
    return QuotaRule(dict(filters), dict(re.findall(r"([\w.-]+)=([^,\s]+)", what)))


def _limit_of_set(rules: Sequence[QuotaRule], queue: str, user: str, gpu: str) -> int | None:
    for rule in rules:
        if not _matches(rule, "queues", queue) or not _matches(rule, "users", user):
            continue
        number = rule.limits.get(gpu, "")
        of_one_user = "{" in rule.filters.get("users", "") or rule.filters.get("users") == user
        understood = set(rule.filters) <= {"users", "queues"} and number.isdigit()
        return int(number) if of_one_user and understood else None
    return None


def _matches(rule: QuotaRule, name: str, value: str) -> bool:
    """Return whether a filter of the rule has ``value``; a rule without the filter has all."""
    words = rule.filters.get(name, "*").strip("{}").replace(" ", "").split(",")
    if any(fnmatchcase(value, word[1:]) for word in words if word.startswith("!")):
        return False
    return any(fnmatchcase(value, word) for word in words if not word.startswith("!"))
