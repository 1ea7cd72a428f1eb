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
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import NoReturn, TypeAlias, cast

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


class Document:
    """A value with its position, and that of its key; its items are documents, too.

    From a YAML file all scalars are text or None; from Python they have their own types.
    """

    def __init__(
        self,
        value: object,
        place: Position | None = None,
        key: Position | None = None,
        *,
        source: str = "",
    ) -> None:
        self.place = place or Position(source)
        self.key = key or self.place
        self.source = source or self.place.source
        self.items: dict[str | int, Document] = {}
        for step, item in _items(value):
            own = item if isinstance(item, Document) else Document(item, self.place)
            self.items[step] = own
        self.is_mapping = isinstance(value, Mapping)
        self._value = value

    @cached_property
    def plain(self) -> object:
        """The value without positions."""
        if self.is_mapping:
            return {step: item.plain for step, item in self.items.items()}
        if isinstance(self._value, list | tuple):
            return [item.plain for item in self.items.values()]
        return self._value

    @property
    def value(self) -> Mapping[str, object]:
        """The mapping without positions; empty if the value is something else."""
        return cast("Mapping[str, object]", self.plain) if self.is_mapping else {}

    def find(self, loc: Loc) -> Document | None:
        """Return the part at ``loc``; None if there is none."""
        part: Document | None = self
        for step in loc:
            part = part and part.items.get(step)
        return part

    def parts(self, loc: Loc = ()) -> Iterator[tuple[Loc, Document]]:
        """Yield all parts, each before its own parts, with their places below ``loc``."""
        for step, item in self.items.items():
            yield (*loc, step), item
            yield from item.parts((*loc, step))

    def value_at(self, loc: Loc) -> object:
        """Return the value at ``loc``; None if there is none."""
        part = self.find(loc)
        return part and part.plain

    def position(self, loc: Loc) -> Position:
        """Return the position of the value at ``loc``, or of the nearest value around it."""
        part = self
        for step in loc:
            if step not in part.items:
                break
            part = part.items[step]
        return part.place

    def key_position(self, loc: Loc) -> Position:
        """Return the position of the key at ``loc``, or of the nearest value around it."""
        part = self.find(loc)
        return part.key if part else self.position(loc)

    def section(self, key: str) -> Document:
        """Return the mapping under ``key``; it is empty if there is none."""
        part = self.items.get(key)
        return part if part and part.is_mapping else Document({}, source=self.source)

    def having(self, items: Mapping[str | int, Document]) -> Document:
        """Return a mapping of ``items`` in the place of this document."""
        return Document(items, self.place, self.key, source=self.source)

    def without(self, *keys: str) -> Document:
        """Return this document without the values under ``keys``."""
        return self.having({key: item for key, item in self.items.items() if key not in keys})

    def over(self, lower: Document) -> Document:
        """Return this document laid over ``lower``.

        Mappings are merged key by key; lists and scalars replace those of ``lower``.
        """
        if not (self.is_mapping and lower.is_mapping):
            return self
        items = dict(lower.items)
        for key, item in self.items.items():
            items[key] = item.over(lower.items.get(key, item))
        first = self
        if not self.place.line and (lower.place.line or not self.place.source):
            first = lower
        return Document(items, first.place, first.key, source=self.source or lower.source)


def _items(value: object) -> Iterable[tuple[str | int, object]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def core_value(value: object) -> object:
    """Resolve plain scalars of undeclared type by YAML 1.2's core schema: true, null, 1, 0.5."""
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


# -- read a file -----------------------------------------------------------------------------------
MAX_BYTES = 256 * 1024
MAX_DEPTH = 20

_NULLS = ("", "~", "null", "Null", "NULL")


def read(path: Path) -> Document:
    """Read the mapping in the file ``path``; InputError has every invalid place."""
    raw = read_bytes(path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise InputError(Problem("not UTF-8 text", Position(str(path), line, column))) from None
    return parse(text, str(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a profile or of a site file. Raises InputError if it is too large."""
    try:
        # The size is not queried first: a pipe has none, and /dev/zero does not end.
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES // 1024} KiB; not a file for gpujobs")
    return raw


@lru_cache(maxsize=256)  # commands read each site file twice, first for its `hosts`; Python, often
def parse(text: str, source: str) -> Document:
    """Parse the mapping in ``text``; error messages call it ``source``."""
    document = _Reader(text.removeprefix("\ufeff").replace("\r\n", "\n"), source).document()
    if document.plain is None or document.plain == "":
        raise InputError(Problem("is empty; a mapping of keys was expected", Position(source)))
    if not document.is_mapping:
        hint = missing_space(document.place.text)
        raise InputError(Problem("must be a mapping of keys at the top", document.place, hint=hint))
    return document


def parse_value(text: str, source: str) -> object:
    """Parse one value, as in ``--set key=VALUE``."""
    return _Reader(text, source).document().plain


class _Reader:
    """Makes a document of the parser's events."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines = text.split("\n")
        self.text = text
        self.problems: list[Problem] = []
        self.events: Iterator[events.NodeEvent] = iter(())

    def document(self) -> Document:
        """Return the one document of the text; InputError if it is not valid."""
        self._check_characters()
        self.events = iter(YAML(typ="safe", pure=True).parse(self.text))
        try:
            root = self._root()
        except MarkedYAMLError as error:
            if "'\\t'" in str(error.problem):
                message = "a tab; YAML is indented with spaces only"
            else:
                context = f" ({error.context})" if error.context else ""
                message = f"{error.problem}{context}"
            self._refuse(f"not valid YAML: {message}", self._mark(error), self._hint(error))
        except YAMLError as error:
            self._refuse(f"not valid YAML: {error}", None)
        if self.problems:
            raise InputError(self.problems)
        return root

    def _hint(self, error: MarkedYAMLError) -> str:
        """Return a hint if a key without a space after its colon may be the cause, else ""."""
        problem = str(error.problem)
        if error.problem_mark is None or not any(words in problem for words in _OF_A_KEY):
            return ""
        before = self.lines[: error.problem_mark.line + 1]
        found = ((number, missing_space(line)) for number, line in enumerate(before, 1))
        return next((f"line {number}: {hint}" for number, hint in found if hint), "")

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

    def _root(self) -> Document:
        root = None
        for event in self.events:
            if root and isinstance(event, events.DocumentStartEvent):
                message = "a second document starts here; a file must have one"
                self._refuse(message, event.start_mark)
            if isinstance(event, events.NodeEvent):
                root = self._node(event, 0)
        return root or Document(None, source=self.source)

    def _check_node(self, event: events.NodeEvent, depth: int) -> None:
        tag = getattr(event, "tag", None)
        if isinstance(event, events.AliasEvent) or event.anchor:
            self._refuse("anchors and aliases (& and *) are not supported", event.start_mark)
        if tag is not None and str(tag) != "!":
            self._refuse(f"tags ({tag}) are not supported", event.start_mark)
        if depth > MAX_DEPTH:
            self._refuse(f"nested more than {MAX_DEPTH} deep", event.start_mark)

    def _node(self, event: events.NodeEvent, depth: int, key: Position | None = None) -> Document:
        """Return the value that starts with ``event``, inside ``depth`` others."""
        self._check_node(event, depth)
        place = self._position(event)
        if isinstance(event, events.MappingStartEvent):
            return Document(self._mapping(depth + 1), place, key)
        if isinstance(event, events.SequenceStartEvent):
            return Document([self._node(one, depth + 1) for one in self._inside()], place, key)
        value = _scalar(cast(events.ScalarEvent, event))
        if key and value is None and event.start_mark.index == event.end_mark.index:
            place = key  # the parser places an empty value at the next line
        return Document(value, place, key)

    def _mapping(self, depth: int) -> dict[str, Document]:
        found: dict[str, Document] = {}
        for event in self._inside():
            self._check_node(event, depth)
            name, place = self._key(event), self._position(event)
            if name in found:
                first = found[name].key
                message = f"`{name}` is defined twice, first in line {first.line}"
                self.problems.append(Problem(message, place, related=first))
            found[name] = self._node(next(self.events), depth, place)
        return found

    def _inside(self) -> Iterator[events.NodeEvent]:
        """Yield the first event of each item of the mapping or list that started last."""
        return takewhile(lambda one: not isinstance(one, events.CollectionEndEvent), self.events)

    def _key(self, event: events.NodeEvent) -> str:
        if not isinstance(event, events.ScalarEvent):
            self._refuse("a key must be text", event.start_mark)
        if event.value == "<<":
            message = "merge keys (<<) are not supported; in a site file use `extends`"
            self._refuse(message, event.start_mark)
        return str(event.value)

    def _position(self, event: events.Event) -> Position:
        start, end = event.start_mark, event.end_mark
        width = end.column - start.column if end.line == start.line else 1
        return self._place(start, max(1, width))

    def _place(self, mark: StreamMark, width: int = 1) -> Position:
        line = self.lines[mark.line] if mark.line < len(self.lines) else ""
        return Position(self.source, mark.line + 1, mark.column + 1, line, width)

    def _refuse(self, message: str, mark: StreamMark | None, hint: str = "") -> NoReturn:
        place = self._place(mark) if mark else Position(self.source)
        raise InputError([*self.problems, Problem(message, place, hint=hint)])


_OF_A_KEY = ("mapping values are not allowed", "could not find expected ':'")
"""Words of ruamel.yaml about a line that is neither a key nor a value."""
_NO_SPACE = re.compile(r"\s*([A-Za-z_]\w*):[^\s:/]")


def missing_space(text: str) -> str:
    """Return a hint if a line of YAML has a key without the space after its colon, else ""."""
    found = _NO_SPACE.match(text)
    return f"a space is missing after `{found[1]}:`" if found else ""


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
    return "\n".join(_mapping(document, "")) + "\n"


def _mapping(document: Document, indent: str) -> Iterator[str]:
    for key in document.value:
        shown = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)
        yield from _item(document.items[key], f"{indent}{shown}:", indent)


def _item(document: Document, start: str, indent: str) -> Iterator[str]:
    """Yield the lines of a value after ``start``, which is its key or the dash of a list."""
    inner = indent + _INDENT
    if not document.items:
        place = document.place
        origin = f"{place.source}:{place.line}" if place.line else place.source
        first, *others = _scalar_text(document.plain, inner)
        yield f"{start} {first}  # {origin}"
        yield from others
        return
    yield start
    if document.is_mapping:
        yield from _mapping(document, inner)
        return
    for item in document.items.values():
        yield from _item(item, f"{inner}-", inner)


def _scalar_text(value: object, indent: str) -> list[str]:
    """Return the lines of a scalar, or of an empty mapping or list."""
    if isinstance(value, Plain) and "\n" not in value:
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
    return [f"|{chomping}", *(line and f"{indent}{line}" for line in lines)]
