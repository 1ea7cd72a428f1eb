"""Placeholders of site files: ``{gpus_per_node}``, ``{memory_per_cpu:MB}``.

Not Jinja and not ``str.format``: one fixed list of names, each replaced by a number or by an allow-listed word. The
scope is in the name (per node, per job, per CPU, per GPU: always of this one job), the memory unit in the placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

RESOURCES = (
    "queue", "account", "gpu_type", "nodes",
    "gpus_per_node", "gpus_per_job", "gpus_per_cpu",
    "cpus_per_node", "cpus_per_job", "cpus_per_gpu",
    "memory_per_node", "memory_per_job", "memory_per_cpu", "memory_per_gpu",
)  # fmt: skip
ACCOUNT = ("account",)
LAUNCH = ("ranks", "nodes", "ranks_per_node")

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_UNIT = re.compile(r"([KMGT])(i?B)?")


class PlaceholderError(ValueError):
    """A brace that is no placeholder; ``offset`` is its 0-based place in the text."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def names(text: str) -> list[str]:
    """Return the names of the placeholders in ``text``, in order."""
    return re.findall(r"\{(\w+)", text)


def check(text: str, known: Sequence[str] = RESOURCES) -> str:
    """Return ``text`` if every brace in it is a placeholder of ``known``, else raise PlaceholderError."""
    _expand(text, known, None)
    return text


def expand(text: str, values: Mapping[str, int | float | str | None]) -> str:
    """Return ``text`` with its placeholders replaced; memory ``values`` are in bytes.

    LookupError, with the placeholder's name, where a value is None: the site does not say it.
    """
    return _expand(text, list(values), values)


def _expand(
    text: str, known: Sequence[str], values: Mapping[str, int | float | str | None] | None
) -> str:
    parts, end = [], 0
    for brace in re.finditer(r"[{}]", text):
        if brace.start() < end:
            continue
        found = re.compile(r"\{(\w+)(?::(\w+))?\}").match(text, brace.start())
        if not found or found[1] not in known:
            raise PlaceholderError(
                f"{found[0] if found else brace[0]} is no placeholder; known: {_list(known)}",
                brace.start(),
            )
        name, unit = found.groups()
        if name.startswith("memory") != bool(unit):
            wrong = f"needs its unit, as in {{{name}:GB}}" if not unit else "has no unit"
            raise PlaceholderError(f"{found[0]} {wrong}", brace.start())
        if unit and not _UNIT.fullmatch(unit):
            raise PlaceholderError(f"{found[0]}: the unit is one of KB, MB, GB, TB", brace.start())
        parts += [
            text[end : found.start()],
            "" if values is None else _value(values[name], name, unit),
        ]
        end = found.end()
    return "".join([*parts, text[end:]])


def _value(value: int | float | str | None, name: str, unit: str | None) -> str:
    if value is None:
        raise LookupError(name)
    if not unit:
        return f"{value:g}" if isinstance(value, float) else str(value)
    whole = int(value) // _UNITS[unit[0]]
    if whole == 0:
        raise ValueError(f"{name} is less than 1 {unit}")
    return str(whole)


def _list(known: Sequence[str]) -> str:
    return " ".join(
        f"{{{name}:GB}}" if name.startswith("memory") else f"{{{name}}}" for name in known
    )
