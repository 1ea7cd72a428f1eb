"""A document as YAML, with the file and the line of each value in a comment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from .document import Document, Loc, Plain

_PLAIN_KEY = re.compile(r"[A-Za-z_][\w.+-]*")
_INDENT = "  "


def effective_text(document: Document) -> str:
    """Return ``document`` as YAML that can be read again, with the origin of each value."""
    return "\n".join(_mapping(document, document.value, (), "")) + "\n"


def _mapping(
    document: Document, value: Mapping[str, object], loc: Loc, indent: str
) -> Iterator[str]:
    for key, item in value.items():
        shown = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
        yield from _item(document, f"{indent}{shown}:", item, (*loc, key), indent)


def _item(document: Document, start: str, value: object, loc: Loc, indent: str) -> Iterator[str]:
    """Yield the lines of a value after ``start``, which is its key or the dash of a list."""
    inner = indent + _INDENT
    if isinstance(value, Mapping) and value:
        yield start
        yield from _mapping(document, value, loc, inner)
    elif isinstance(value, list) and value:
        yield start
        for number, item in enumerate(value):
            yield from _item(document, f"{inner}-", item, (*loc, number), inner)
    else:
        position = document.position(loc)
        origin = f"{position.source}:{position.line}" if position.line else position.source
        first, *others = _scalar(value, inner)
        yield f"{start} {first}  # {origin}"
        yield from others


def _scalar(value: object, indent: str) -> list[str]:
    """Return the lines of a scalar, or of an empty mapping or list."""
    if isinstance(value, Plain):
        return [str(value)]
    if not isinstance(value, str) or "\n" not in value:
        return [json.dumps(value, ensure_ascii=False)]
    body = value.removesuffix("\n")
    lines = body.split("\n")
    if (
        body.endswith("\n")
        or lines[0][:1] in ("", " ")
        or not value.replace("\n", "").isprintable()
    ):
        return [json.dumps(value)]
    chomping = "" if value.endswith("\n") else "-"
    return [
        f"|{chomping}",
        *(f"{indent}{line}".rstrip() if not line else f"{indent}{line}" for line in lines),
    ]
