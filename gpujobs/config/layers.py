"""Inheritance in site files: a file extends another one, a queue is like another one.

Mappings are merged key by key, lists and scalars are replaced. ``{append: [...]}`` in the place of
a list extends the list that would be replaced, and null in the place of a queue removes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeGuard

from ..errors import InputError, Position, Problem
from .document import Document, Loc

_BUILT_IN = ("request", "cpu_request")
"""Lists of the batch scheduler if the site has none, so that nothing can be appended to them."""


def over(upper: Document, lower: Document) -> Document:
    """Return the site file ``upper`` laid over ``lower``, which it extends.

    InputError if it removes a queue that is not there.
    """
    merged = _extended(upper, lower).over(lower)
    queues = dict(_mapping(merged.value.get("queues")))
    for name, queue in _mapping(upper.value.get("queues")).items():
        if queue is not None:
            continue
        if name not in _mapping(lower.value.get("queues")):
            position = upper.key_position(("queues", name))
            raise InputError(Problem(f"there is no queue `{name}` that can be removed", position))
        del queues[name]
    if len(queues) < len(_mapping(merged.value.get("queues"))):
        return replace(merged, value={**merged.value, "queues": queues})
    return merged


def resolved(site: Document) -> Document:
    """Return the document of a site with all keys in each queue that it inherits.

    InputError if a queue is like one that does not exist, or like itself.
    """
    if "like" in _mapping(site.value.get("queue_defaults")):
        position = site.key_position(("queue_defaults", "like"))
        raise InputError(Problem("`like` is a key of a queue, not of `queue_defaults`", position))
    queues = {
        name: _queue(site, name, ())
        for name, queue in _mapping(site.value.get("queues")).items()
        if isinstance(queue, Mapping)
    }
    site = _complete(site)
    for name, queue in queues.items():
        site = _with_part(site, ("queues", name), _complete(_extended(queue, site)))
    return site


def _queue(site: Document, name: str, upper: tuple[str, ...]) -> Document:
    """Return the queue ``name`` with the keys that it inherits; ``upper`` are like it."""
    own = site.section("queues").section(name)
    like = own.value.get("like")
    if not isinstance(like, str):
        defaults = site.section("queue_defaults")
        return _extended(own, defaults).over(defaults)
    position, names = own.position(("like",)), (*upper, name)
    if like in names:
        message = f"`like` forms a cycle: {' → '.join((*names, like))}"
        raise InputError(Problem(message, position))
    if not isinstance(_mapping(site.value.get("queues")).get(like), Mapping):
        known = ", ".join(_mapping(site.value.get("queues")))
        message = f"there is no queue `{like}` in this site; it has {known}"
        raise InputError(Problem(message, position))
    lower = _queue(site, like, names)
    return _extended(own, lower).over(lower)


def _extended(upper: Document, lower: Document) -> Document:
    """Return ``upper`` with whole lists in the place of those that extend lists of ``lower``."""
    for loc in list(_appended(upper.value)):
        below = lower.value_at(loc)
        if _is_append(below):
            upper = _joined(upper, loc, lower, (*loc, "append"), inside=("append",))
        elif isinstance(below, list):
            upper = _joined(upper, loc, lower, loc)
    return upper


def _complete(document: Document) -> Document:
    """Return ``document`` with whole lists in the place of those that extend nothing."""
    for loc in list(_appended(document.value)):
        if loc[0] == "queues":
            continue  # each queue is completed by itself
        if loc[-1] in _BUILT_IN:
            position = document.position(loc)
            message = f"`{loc[-1]}` has nothing to extend: the site has no `{loc[-1]}`"
            raise InputError(Problem(message, position, hint="write the whole list"))
        document = _joined(document, loc, Document({}), ())
    return document


def _joined(upper: Document, loc: Loc, lower: Document, at: Loc, inside: Loc = ()) -> Document:
    """Return ``upper`` with the items of ``lower`` at ``at`` before those it appends at ``loc``.

    ``inside``: steps from ``loc`` to the new list.
    """
    first = _items(lower, at) if at else []
    own = _items(upper, (*loc, "append"))
    positions: dict[Loc, Position] = {(): upper.position(loc)}
    for n in range(len(first)):
        positions[(*inside, n)] = lower.position((*at, n))
    for n in range(len(own)):
        positions[(*inside, len(first) + n)] = upper.position((*loc, "append", n))
    value: object = [*first, *own]
    for step in reversed(inside):
        value = {step: value}
    return _with_value(upper, loc, value, positions)


def _with_part(whole: Document, loc: Loc, part: Document) -> Document:
    """Return ``whole`` with the document ``part`` in the place ``loc``."""
    positions = {(): whole.position(loc), **part.positions}
    keys = {(*loc, *inside): place for inside, place in part.keys.items()}
    whole = _with_value(whole, loc, part.value, positions)
    return replace(whole, keys={**whole.keys, **keys})


def _with_value(
    whole: Document, loc: Loc, value: object, positions: Mapping[Loc, Position]
) -> Document:
    kept = {at: place for at, place in whole.positions.items() if at[: len(loc)] != loc}
    placed = {(*loc, *inside): place for inside, place in positions.items()}
    return replace(whole, value=_set(whole.value, loc, value), positions={**kept, **placed})


def _set(mapping: Mapping[str, object], loc: Loc, value: object) -> dict[str, object]:
    first, *rest = loc
    inner = _set(_mapping(mapping.get(str(first))), tuple(rest), value) if rest else value
    return {**mapping, str(first): inner}


def _appended(mapping: Mapping[str, object], loc: Loc = ()) -> Iterator[Loc]:
    """Yield the places of the lists that extend others."""
    for key, value in mapping.items():
        if _is_append(value):
            yield (*loc, key)
        elif isinstance(value, Mapping):
            yield from _appended(value, (*loc, key))


def _is_append(value: object) -> TypeGuard[Mapping[str, list[object]]]:
    if not isinstance(value, Mapping) or list(value) != ["append"]:
        return False
    return isinstance(value["append"], list)


def _items(document: Document, loc: Loc) -> list[object]:
    items = document.value_at(loc)
    return items if isinstance(items, list) else []


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
