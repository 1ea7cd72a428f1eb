"""A mapping of nested values that keeps the position of every value and of every key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ..errors import Position

Loc: TypeAlias = tuple[str | int, ...]
"""The keys and list indices that lead to a value."""
PYTHON = "keywords"
"""The source of a document that is made of keywords in Python."""


class Plain(str):
    """A YAML scalar without quotes, whose type may still be resolved (see `core_value`)."""

    __slots__ = ()


@dataclass(frozen=True)
class Document:
    """Nested dicts, lists and scalars, with the position of every value and of every key.

    From a YAML file all scalars are text or None; from Python they have their own types.
    """

    value: Mapping[str, object]
    positions: dict[Loc, Position] = field(default_factory=dict)
    keys: dict[Loc, Position] = field(default_factory=dict)
    source: str = ""

    def value_at(self, loc: Loc) -> object:
        """Return the value at ``loc``, which are keys of mappings; None if there is none."""
        value: object = self.value
        for key in loc:
            value = value.get(str(key)) if isinstance(value, Mapping) else None
        return value

    def position(self, loc: Loc) -> Position:
        """Return the position of the value at ``loc``, or of the nearest value around it."""
        while loc and loc not in self.positions:
            loc = loc[:-1]
        return self.positions.get(loc, Position(self.source))

    def key_position(self, loc: Loc) -> Position:
        """Return the position of the key at ``loc``, or of the nearest value around it."""
        return self.keys.get(loc) or self.position(loc)

    def section(self, key: str) -> Document:
        """Return the mapping under ``key`` as a document; it is empty if there is none."""
        value = self.value.get(key)
        return Document(
            value if isinstance(value, Mapping) else {},
            positions=_below(self.positions, key),
            keys=_below(self.keys, key),
            source=self.source,
        )

    def without(self, *keys: str) -> Document:
        """Return this document without the values under ``keys``."""
        value = {key: item for key, item in self.value.items() if key not in keys}
        return replace(self, value=value)

    def over(self, lower: Document) -> Document:
        """Return this document laid over ``lower``.

        Mappings are merged key by key; lists and scalars replace those of ``lower``.
        """
        replaced: set[Loc] = set()
        value = _merge(self.value, lower.value, (), replaced)
        # A value without a position must not get that of the mapping around it in `lower`.
        own = {loc: self.position(loc) for loc in replaced} | self.positions
        return Document(
            value,
            positions=_without(lower.positions, replaced) | own,
            keys=_without(lower.keys, replaced) | self.keys,
            source=self.source,
        )


def core_value(value: object) -> object:
    """Resolve plain scalars by YAML 1.2's core schema (true, null, 1, 0.5).

    For options whose type is not declared.
    """
    if isinstance(value, dict):
        return {key: core_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [core_value(item) for item in value]
    if not isinstance(value, Plain):
        return value
    if value in ("true", "false"):
        return value == "true"
    if re.fullmatch(r"-?(0|[1-9]\d*)", value):
        return int(value)
    if re.fullmatch(r"-?(0|[1-9]\d*)\.\d+([eE][+-]?\d+)?", value):
        return float(value)
    return str(value)


def _below(places: Mapping[Loc, Position], key: str) -> dict[Loc, Position]:
    return {loc[1:]: place for loc, place in places.items() if loc[:1] == (key,)}


def _without(places: Mapping[Loc, Position], replaced: set[Loc]) -> dict[Loc, Position]:
    def is_replaced(loc: Loc) -> bool:
        return any(loc[:length] in replaced for length in range(1, len(loc) + 1))

    return {loc: place for loc, place in places.items() if not is_replaced(loc)}


def _merge(
    upper: Mapping[str, object], lower: Mapping[str, object], loc: Loc, replaced: set[Loc]
) -> dict[str, object]:
    """Return both merged; add the places whose values of ``lower`` are lost to ``replaced``."""
    merged = dict(lower)
    for key, item in upper.items():
        below = lower.get(key)
        here = (*loc, key)
        if isinstance(item, Mapping) and isinstance(below, Mapping):
            merged[key] = _merge(item, below, here, replaced)
        else:
            merged[key] = item
            replaced.add(here)
    return merged
