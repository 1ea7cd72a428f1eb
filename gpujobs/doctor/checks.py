"""The result of one check of `gpujobs doctor`, and how results are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class CheckState(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One check: its subject, how it ended, the facts it found, and a remedy if one is known."""

    name: str
    state: CheckState
    result: str
    remedy: str = ""


def passed(name: str, result: str) -> Check:
    """Return a check that is ok."""
    return Check(name, CheckState.OK, result)


def warning(name: str, result: str, remedy: str = "") -> Check:
    """Return a check that found a limitation; the site can be used."""
    return Check(name, CheckState.WARNING, result, remedy)


def failed(name: str, result: str, remedy: str = "") -> Check:
    """Return a check that found an error; clusters will not work."""
    return Check(name, CheckState.FAILED, result, remedy)


def any_failed(checks: Sequence[Check]) -> bool:
    """Return whether a check has failed."""
    return any(check.state is CheckState.FAILED for check in checks)


def checks_text(checks: Sequence[Check]) -> str:
    """Return one line for each check, and a second one for its remedy."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{check.state:<7}  {check.name:<{width}}  {check.result}")
        if check.remedy:
            lines.append(f"{'':<7}  {'':<{width}}  -> {check.remedy}")
    return "\n".join(lines)


def checks_json(checks: Sequence[Check]) -> dict[str, object]:
    """Return the checks as JSON."""
    return {"version": 2, "checks": [asdict(check) for check in checks]}
