"""Nested values that keep the position of every value and of every key; their YAML 1.2 files.

Only the parser of ruamel.yaml is used, since its constructor turns ``0123`` into 123 and ``12.10``
into 12.1: scalars stay text, and the models define their types. Anchors, aliases, tags, merge keys
and several documents are refused: a job description does not need them, and each of them lets a
small file expand into something large or surprising.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TypeAlias

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError

from ..errors import InputError, Position, Problem
from ..text import control_character

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


# -- read a file -----------------------------------------------------------------------------------
MAX_BYTES = 256 * 1024
MAX_DEPTH = 20

Value: TypeAlias = "str | list[Value] | dict[str, Value] | None"

_NULLS = ("", "~", "null", "Null", "NULL")


def read(path: Path) -> Document:
    """Read the mapping in the file ``path``; InputError has every invalid place."""
    try:
        # The size is not queried first: a pipe has none, and /dev/zero does not end.
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES // 1024} KiB; not a file for gpujobs")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise InputError(Problem("not UTF-8 text", Position(str(path), line, column))) from None
    return parse(text, str(path))


def parse(text: str, source: str) -> Document:
    """Parse the mapping in ``text``; error messages call it ``source``."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    reader = _Reader(text, source)
    value = reader.document()
    if value is None or value == "":
        raise InputError(Problem("is empty; a mapping of keys was expected", Position(source)))
    if not isinstance(value, dict):
        raise InputError(Problem("must be a mapping of keys at the top", reader.positions[()]))
    return Document(value, reader.positions, reader.keys, source)


def parse_value(text: str, source: str) -> Value:
    """Parse one value, as in ``--set key=VALUE``."""
    return _Reader(text, source).document()


@dataclass
class _OpenNode:
    """A mapping or list whose end has not been read."""

    value: list[Value] | dict[str, Value]
    loc: Loc
    key: str | None = None
    """In a mapping: the key whose value comes next."""

    @property
    def expects_key(self) -> bool:
        return isinstance(self.value, dict) and self.key is None

    def next_loc(self) -> Loc:
        """Return the place of the value that comes next."""
        if isinstance(self.value, list):
            return (*self.loc, len(self.value))
        return (*self.loc, str(self.key))

    def add(self, value: Value) -> None:
        """Add the value that comes next."""
        if isinstance(self.value, list):
            self.value.append(value)
        else:
            self.value[str(self.key)] = value
            self.key = None


class _Reader:
    """Builds the value in one pass over the parser's events; without recursion, so that the depth
    of the nesting is not limited by Python's stack."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines = text.split("\n")
        self.text = text
        self.positions: dict[Loc, Position] = {}
        self.keys: dict[Loc, Position] = {}
        self.problems: list[Problem] = []
        self.documents = 0
        self.root: Value = None
        self.open_nodes: list[_OpenNode] = []

    def document(self) -> Value:
        """Return the one document of the text; InputError if it is not valid."""
        self._check_characters()
        try:
            self._build(YAML(typ="safe", pure=True).parse(self.text))
        except MarkedYAMLError as error:
            if "'\\t'" in str(error.problem):
                message = "a tab; YAML is indented with spaces only"
            else:
                context = f" ({error.context})" if error.context else ""
                message = f"{error.problem}{context}"
            self._refuse(f"not valid YAML: {message}", self._mark(error))
        except YAMLError as error:
            self._refuse(f"not valid YAML: {error}", None)
        if self.problems:
            raise InputError(self.problems)
        return self.root

    def _mark(self, error: MarkedYAMLError) -> StreamMark | None:
        """Return the place of a syntax error; the end of the file is not a helpful one."""
        mark: StreamMark | None = error.problem_mark or error.context_mark
        if mark is not None and mark.line >= len(self.text.splitlines()):
            mark = error.context_mark or mark
        return mark

    def _check_characters(self) -> None:
        for number, line in enumerate(self.lines, 1):
            if found := control_character(line.replace("\t", " ")):
                position = Position(self.source, number, line.index(found) + 1, line)
                raise InputError(Problem(f"has a control character ({found!r})", position))

    def _build(self, parsed: Iterable[events.Event]) -> None:
        for event in parsed:
            if isinstance(event, events.DocumentStartEvent):
                self._start_document(event)
            elif isinstance(event, events.CollectionEndEvent):
                self.open_nodes.pop()
            elif isinstance(event, events.NodeEvent):
                self._check_node(event)
                self._add_node(event)

    def _start_document(self, event: events.Event) -> None:
        self.documents += 1
        if self.documents > 1:
            message = "a second document starts here; a file must have one"
            self._refuse(message, event.start_mark)

    def _check_node(self, event: events.NodeEvent) -> None:
        tag = getattr(event, "tag", None)
        if isinstance(event, events.AliasEvent) or event.anchor:
            self._refuse("anchors and aliases (& and *) are not supported", event.start_mark)
        if tag is not None and str(tag) != "!":
            self._refuse(f"tags ({tag}) are not supported", event.start_mark)
        if len(self.open_nodes) > MAX_DEPTH:
            self._refuse(f"nested more than {MAX_DEPTH} deep", event.start_mark)

    def _add_node(self, event: events.NodeEvent) -> None:
        parent = self.open_nodes[-1] if self.open_nodes else None
        if parent is not None and parent.expects_key:
            self._add_key(parent, event)
            return
        value = _empty_value(event)
        loc = parent.next_loc() if parent is not None else ()
        # The parser places an empty value at the next line.
        empty = isinstance(event, events.ScalarEvent) and not event.value and event.style is None
        self.positions[loc] = (
            self.keys[loc] if empty and loc in self.keys else self._position(event)
        )
        if parent is not None:
            parent.add(value)
        else:
            self.root = value
        if isinstance(value, list | dict):
            self.open_nodes.append(_OpenNode(value, loc))

    def _add_key(self, mapping: _OpenNode, event: events.NodeEvent) -> None:
        if not isinstance(event, events.ScalarEvent):
            self._refuse("a key must be text", event.start_mark)
        name = str(event.value)
        if name == "<<":
            message = "merge keys (<<) are not supported; in a site file use `extends`"
            self._refuse(message, event.start_mark)
        place = self._position(event)
        loc = (*mapping.loc, name)
        if name in mapping.value:
            first = self.keys[loc]
            message = f"`{name}` is defined twice, first in line {first.line}"
            self.problems.append(Problem(message, place, related=first))
        self.keys[loc] = place
        mapping.key = name

    def _position(self, event: events.Event) -> Position:
        start, end = event.start_mark, event.end_mark
        width = end.column - start.column if end.line == start.line else 1
        return self._place(start, max(1, width))

    def _place(self, mark: StreamMark, width: int = 1) -> Position:
        line = self.lines[mark.line] if mark.line < len(self.lines) else ""
        return Position(self.source, mark.line + 1, mark.column + 1, line, width)

    def _refuse(self, message: str, mark: StreamMark | None) -> NoReturn:
        place = self._place(mark) if mark else Position(self.source)
        raise InputError([*self.problems, Problem(message, place)])


def _empty_value(event: events.NodeEvent) -> Value:
    """Return the value of a scalar, or the list or mapping that the next events fill."""
    if isinstance(event, events.ScalarEvent):
        return _scalar(event)
    if isinstance(event, events.MappingStartEvent):
        return {}
    return []


def _scalar(event: events.ScalarEvent) -> str | None:
    text = str(event.value)
    if event.style is not None:
        # JSON, which is valid YAML, writes characters beyond 16 bits as two escapes.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if text in _NULLS:
        return None
    return Plain(text)


# -- a document as YAML, with the file and the line of each value in a comment ---------------------
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
        first, *others = _scalar_text(value, inner)
        yield f"{start} {first}  # {origin}"
        yield from others


def _scalar_text(value: object, indent: str) -> list[str]:
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
