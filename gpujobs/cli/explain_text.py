"""The output of `gpujobs explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..config.origins import BUILT_IN, KeyOrigins, Origin
from ..errors import Position
from ..planning.explain import Limit, Value


@dataclass(frozen=True)
class Explanation:
    """A key of a profile: its values, the one of the plan, and its limits."""

    origins: KeyOrigins
    used: dict[str, Value]
    """By group of workers, "" without groups."""
    limits: Sequence[Limit]
    added: Sequence[Origin] = ()
    """Values of the site that apply in addition."""

    @property
    def set_by(self) -> Origin | None:
        """The origin of the value that counts."""
        return next(iter(self.origins.origins), None)


def explanation_text(explained: Explanation) -> str:
    """Return the value in a line, then names and texts."""
    origin = explained.set_by
    value = _shown(origin.value) if origin else "not set"
    rows = list(_rows(explained))
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join([f"{explained.origins.key} = {value}", *lines])


def explanation_json(explained: Explanation) -> dict[str, object]:
    """Return the explanation as JSON."""
    origins = [_origin_json(origin) for origin in explained.origins.origins]
    set_by = next(iter(origins), None)
    return {
        "version": 1,
        "key": explained.origins.key,
        "value": set_by and set_by["value"],
        "set_by": set_by,
        "overrode": origins[1:],
        "added": [_origin_json(origin) for origin in explained.added],
        "used": explained.used or None,
        "limits": [
            {"limit": limit.name, "value": limit.value, **_place_json(limit.position)}
            for limit in explained.limits
        ],
        "description": explained.origins.description,
    }


def _rows(explained: Explanation) -> Iterator[tuple[str, str]]:
    first, *others = explained.origins.origins or (None,)
    for group, value in explained.used.items():
        yield f"used, group {group}" if group else "used", _shown(value)
    if first:
        yield "set by", _place(first)
    for origin in filter(None, others):
        if origin.kind != BUILT_IN or origin.value is not None:
            yield "overrides", f"{_shown(origin.value)}, {_place(origin)}"
    for origin in explained.added:
        text = "; ".join(_shown(origin.value).splitlines())
        yield "added", f"{text}, {_place(origin)}"
    for limit in explained.limits:
        yield "limit", f"{limit.name} {_shown(limit.value)}: {limit.position}"
    if explained.origins.description:
        yield "meaning", explained.origins.description


def _place(origin: Origin) -> str:
    if origin.kind == BUILT_IN:
        return "the built-in default"
    if origin.site_key:
        return f"{origin.site_key} of the site: {origin.position}"
    return f"{origin.kind}: {origin.position}"


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) or "none"
    return str(value)


def _origin_json(origin: Origin) -> dict[str, object]:
    place = _place_json(origin.position)
    site_key = origin.site_key or None
    return {"value": origin.value, "kind": origin.kind, **place, "site_key": site_key}


def _place_json(position: Position) -> dict[str, object]:
    return {"source": position.source, "line": position.line or None}
