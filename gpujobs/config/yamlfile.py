"""Read YAML 1.2 and keep, for every value, where it stood.

ruamel.yaml's constructor turns ``0123`` into 123 and ``12.10`` into 12.1, so only its parser is used: scalars stay
the text that was written, and the models decide what it means. What a job description has no use for (anchors,
aliases, tags, merge keys, several documents) is refused: each has been used to make a small file mean something big.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError, Position, Problem
from ..text import control_character

MAX_BYTES = 256 * 1024
MAX_DEPTH = 20

Loc = tuple[str | int, ...]


class Plain(str):
    """A scalar written without quotes, whose type the reader may still resolve (see `core_value`)."""

    __slots__ = ()


@dataclass(frozen=True)
class Document:
    """Nested dicts, lists and text, with the position of every value and of every key."""

    value: dict[str, Any]
    positions: dict[Loc, Position] = field(default_factory=dict)
    keys: dict[Loc, Position] = field(default_factory=dict)
    source: str = ""

    def position(self, loc: Loc) -> Position:
        """Return where ``loc`` was written, or the nearest thing around it that was written."""
        while loc and loc not in self.positions:
            loc = loc[:-1]
        return self.positions.get(loc, Position(self.source))

    def at(self, *loc: str | int) -> Document:
        """Return the mapping at ``loc`` as a document of its own."""
        value: Any = self.value
        for step in loc:
            value = value.get(step, {}) if isinstance(value, dict) else value[step]
        n = len(loc)

        def cut(places: dict[Loc, Position]) -> dict[Loc, Position]:
            return {path[n:]: place for path, place in places.items() if path[:n] == loc}

        return Document(value, cut(self.positions), cut(self.keys), self.source)

    def over(self, below: Document) -> Document:
        """Return this document laid over ``below``: mappings merge key by key, lists and scalars replace."""
        value, positions, keys = dict(below.value), dict(below.positions), dict(below.keys)

        def lay(top: dict[str, Any], into: dict[str, Any], loc: Loc) -> None:
            for key, item in top.items():
                here = (*loc, key)
                if isinstance(item, dict) and isinstance(into.get(key), dict):
                    into[key] = dict(into[key])
                    lay(item, into[key], here)
                else:
                    for places in (positions, keys):
                        for gone in [path for path in places if path[: len(here)] == here]:
                            del places[gone]
                    into[key] = item

        lay(self.value, value, ())
        return Document(value, positions | self.positions, keys | self.keys, self.source)


def read(path: Path) -> Document:
    """Read the mapping in the file ``path``; InputError with all places where something is wrong."""
    try:
        with path.open(
            "rb"
        ) as file:  # not asked for its size first: a pipe has none, and /dev/zero no end
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise InputError(
                f"{path}: larger than {MAX_BYTES // 1024} KiB; this is not a file for gpujobs"
            )
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise InputError(Problem("not UTF-8 text", Position(str(path), line, column))) from None
    return parse(text, str(path))


def parse(text: str, source: str) -> Document:
    """Parse the mapping in ``text``. ``source`` is what errors call it."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    reader = _Reader(text, source)
    value = reader.document()
    if value is None or value == "":
        raise InputError(Problem("is empty; a mapping of keys was expected", Position(source)))
    if not isinstance(value, dict):
        raise InputError(Problem("must be a mapping of keys at the top", reader.positions[()]))
    return Document(value, reader.positions, reader.keys, source)


def parse_value(text: str, source: str) -> Document:
    """Parse one value as ``--set key=VALUE`` has it; it stands under the key ``"value"``."""
    reader = _Reader(text, source)
    value = reader.document()
    return Document({"value": value}, {("value",): Position(source)}, {}, source)


def core_value(value: Any) -> Any:
    """Resolve plain scalars by YAML 1.2's core schema (true, null, 1, 0.5), for options whose type nobody declared."""
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


class _Reader:
    """One pass over the parser's events; no recursion, so no nesting is deep enough to hurt."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines = text.split("\n")
        self.text = text
        self.positions: dict[Loc, Position] = {}
        self.keys: dict[Loc, Position] = {}
        self.problems: list[Problem] = []

    def document(self) -> Any:
        self._check_characters()
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError, YAMLError

        try:
            value = self._build(YAML(typ="safe", pure=True).parse(self.text))
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            if mark is not None and mark.line >= len(
                self.text.splitlines()
            ):  # the end of the file tells nothing
                mark = error.context_mark or mark
            context = f" ({error.context})" if error.context else ""
            self._refuse(f"not valid YAML: {error.problem}{context}", mark)
        except YAMLError as error:
            self._refuse(f"not valid YAML: {error}", None)
        if self.problems:
            raise InputError(self.problems)
        return value

    def _check_characters(self) -> None:
        for number, line in enumerate(self.lines, 1):
            if found := control_character(line.replace("\t", " ")):
                position = Position(self.source, number, line.index(found) + 1, line)
                raise InputError(Problem(f"has a control character ({found!r})", position))

    def _build(self, events: Iterator[Any]) -> Any:
        # Frames of what is open: [container, its loc, the key that waits for its value].
        stack: list[list[Any]] = []
        root: Any = None
        documents = 0
        for event in events:
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    self._refuse(
                        "a second document starts here; one file describes one thing",
                        event.start_mark,
                    )
            elif kind in ("MappingEndEvent", "SequenceEndEvent"):
                stack.pop()
            elif kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent", "AliasEvent"):
                self._check_event(event, kind, len(stack))
                loc = self._loc(stack, event, kind)
                if loc is None:  # the event was a key
                    continue
                value: Any = {"MappingStartEvent": dict, "SequenceStartEvent": list}.get(
                    kind, lambda: None
                )()
                if kind == "ScalarEvent":
                    value = _scalar(event)
                self.positions[loc] = self._position(event)
                root = self._put(stack, value) if stack else value
                if kind != "ScalarEvent":
                    stack.append([value, loc, None])
        return root

    def _check_event(self, event: Any, kind: str, depth: int) -> None:
        if kind == "AliasEvent" or event.anchor:
            self._refuse(
                "anchors and aliases (& and *) are not used in these files", event.start_mark
            )
        if event.tag is not None and str(event.tag) != "!":
            self._refuse(f"tags ({event.tag}) are not used in these files", event.start_mark)
        if depth > MAX_DEPTH:
            self._refuse(f"nested more than {MAX_DEPTH} deep", event.start_mark)

    def _loc(self, stack: list[list[Any]], event: Any, kind: str) -> Loc | None:
        if not stack:
            return ()
        container, loc, key = stack[-1]
        if isinstance(container, list):
            return (*loc, len(container))
        if key is not None:
            return (*loc, key)
        if kind != "ScalarEvent":
            self._refuse("a key must be a word", event.start_mark)
        name = str(event.value)
        if name == "<<":
            self._refuse(
                "merge keys (<<) are not used in these files; a site file has `extends`",
                event.start_mark,
            )
        place = self._position(event)
        if name in container:
            first = self.keys[(*loc, name)]
            self.problems.append(
                Problem(
                    f"`{name}` is given twice, first in line {first.line}", place, related=first
                )
            )
        self.keys[(*loc, name)] = place
        stack[-1][2] = name
        return None

    def _put(self, stack: list[list[Any]], value: Any) -> Any:
        frame = stack[-1]
        if isinstance(frame[0], list):
            frame[0].append(value)
        else:
            frame[0][frame[2]] = value
            frame[2] = None
        return stack[0][0]

    def _position(self, event: Any) -> Position:
        start, end = event.start_mark, event.end_mark
        width = end.column - start.column if end.line == start.line else 1
        return self._place(start.line, start.column, max(1, width))

    def _place(self, line: int, column: int, width: int = 1) -> Position:
        return Position(
            self.source,
            line + 1,
            column + 1,
            self.lines[line] if line < len(self.lines) else "",
            width,
        )

    def _refuse(self, message: str, mark: Any) -> None:
        place = self._place(mark.line, mark.column) if mark else Position(self.source)
        raise InputError([*self.problems, Problem(message, place)])


def _scalar(event: Any) -> str | None:
    if event.style is None:
        return None if event.value in ("", "~", "null", "Null", "NULL") else Plain(event.value)
    # JSON, which is YAML, writes what is beyond 16 bits as two escapes.
    return str(event.value).encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
