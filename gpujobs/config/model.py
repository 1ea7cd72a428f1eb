"""Models: the keys that a file may have, declared once for reading and for the JSON Schema.

::

    @dataclass(frozen=True, kw_only=True)
    class Container(Model):
        '''Run in a container image.'''

        image: str = required(TEXT, "path or address")
        cpus: int = optional(POSITIVE, "CPUs", default=1)
        memory: int | None = optional(SIZE, "host memory")  # null is allowed, too
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, Literal, TypeAlias, TypeVar, cast, overload

from ..errors import InputError, Position, Problem
from ..text import alternatives, walltime_text
from . import fields, hints
from .document import PYTHON, Document, Loc

# -- kinds of values: how the value of a key is read, and how JSON Schema describes it -------------
# A kind reads a value and everything inside it. If parts are invalid it raises one InputError
# with the problems of all of them, each at its position.

T = TypeVar("T")
L = TypeVar("L", bound=str)
Schema: TypeAlias = Mapping[str, object]
"""JSON Schema."""
_STRING: Schema = {"type": "string"}

_STARTS_AS_VERB = ("must", "has ", "needs", "cannot")


class ValueErrorInside(ValueError):
    """An invalid value at the place ``loc`` inside the one that is checked."""

    def __init__(self, message: str, *loc: str | int) -> None:
        super().__init__(message)
        self.loc = loc


@dataclass(frozen=True)
class Place:
    """A place in a document that is being read."""

    document: Document
    key_names: Callable[[], Sequence[str]]
    """Dotted names of all keys that the file may have, for suggestions."""
    loc: Loc = ()

    def __str__(self) -> str:
        """Return the place as text: ``queues.gpu.request[0]``."""
        text = ""
        for step in self.loc:
            text += f"[{step}]" if isinstance(step, int) else f".{step}"
        return text.removeprefix(".")

    def inside(self, step: str | int) -> Place:
        """Return the place of the key or the list index ``step``."""
        return replace(self, loc=(*self.loc, step))

    def error(self, cause: ValueError, hint: str = "") -> InputError:
        """Return ``cause`` as an error at this place."""
        if isinstance(cause, ValueErrorInside) and cause.loc:
            place = replace(self, loc=(*self.loc, *cause.loc))
            found = cause.__cause__  # it may know its place in the text
            return place.error(found if isinstance(found, ValueError) else ValueError(str(cause)))
        message = str(cause)
        separator = " " if message.startswith(_STARTS_AS_VERB) else ": "
        position = self.document.position(self.loc)
        offset = getattr(cause, "offset", 0)
        if offset and self.document.find(self.loc):
            quotes = int(position.text[position.column - 1 : position.column] in ("'", '"'))
            position = replace(position, column=position.column + offset + quotes, width=1)
        return InputError(Problem(f"`{self}`{separator}{message}", position, hint=hint))

    def missing_error(self) -> InputError:
        """Return an error for a key that is required here and is not written."""
        position = self.document.position(self.loc[:-1])
        if not position.line:
            position = Position(self.document.source)
        return InputError(Problem(f"`{self}` is required", position))


class Errors:
    """Collects the problems of several parts, so that all of them are reported at once."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Keep the problems of the InputError of one part, and go on."""
        try:
            yield
        except InputError as error:
            self.problems += error.problems

    def check(self) -> None:
        """Raise InputError with all problems, if there are any."""
        if self.problems:
            raise InputError(self.problems)


class Kind(ABC, Generic[T]):
    """How the value of a key is read."""

    @abstractmethod
    def read(self, value: object, place: Place) -> T:
        """Return the typed value; InputError with the problems of all its parts."""

    @abstractmethod
    def schema(self, definitions: dict[str, Schema]) -> Schema:
        """Return the JSON Schema of a value; named parts of it are added to ``definitions``."""

    def key_names(self) -> Iterator[str]:
        """Yield the dotted names of the keys that may stand inside a value."""
        return iter(())


@dataclass(frozen=True)
class Scalar(Kind[T]):
    """A value that one function reads; the function raises ValueError."""

    parse: Callable[[object], T]
    json_schema: Schema

    def read(self, value: object, place: Place) -> T:
        try:
            return self.parse(value)
        except ValueError as error:
            raise place.error(error) from None

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        return self.json_schema


@dataclass(frozen=True)
class Items(Kind[tuple[T, ...]]):
    """A list of items of one kind. ``split`` makes the list, for example from a string."""

    item: Kind[T]
    split: Callable[[object], Sequence[object]] = fields.sequence
    text_too: bool = False
    """One string is allowed, too."""
    one_too: bool = False
    """One item without a list is allowed, too."""
    extendable: bool = False
    """``{append: [...]}`` is allowed, too; `layers` replaces it by a list."""

    def read(self, value: object, place: Place) -> tuple[T, ...]:
        try:
            parts = self.split(value)
        except ValueError as error:
            raise place.error(error) from None
        errors = Errors()
        items = []
        for index, part in enumerate(parts):
            with errors.collect():
                items.append(self.item.read(part, place.inside(index)))
        errors.check()
        return tuple(items)

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        array: Schema = {"type": "array", "items": self.item.schema(definitions)}
        forms: list[Schema] = [{"type": "string"}] if self.text_too else []
        forms += [self.item.schema(definitions)] if self.one_too else []
        forms.append(array)
        if self.extendable:
            append: Schema = {"properties": {"append": array}, "required": ["append"]}
            forms.append({"type": "object", **append, "additionalProperties": False})
        return {"anyOf": forms} if len(forms) > 1 else array

    def key_names(self) -> Iterator[str]:
        return self.item.key_names()


@dataclass(frozen=True)
class Table(Kind[dict[str, T]]):
    """A mapping with names of the user's choice."""

    name: Kind[str]
    value: Kind[T]
    empty: str = ""
    """Error message for an empty table, if it must not be empty."""
    from_text: Callable[[object], object] | None = None
    """Makes a mapping of a string, if one is allowed, too; raises ValueError."""
    removable: bool = False
    """null is allowed as a value; it is removed before the table is read (see `layers`)."""

    def read(self, value: object, place: Place) -> dict[str, T]:
        errors = Errors()
        names: list[str] = []
        values: list[T] = []
        for name, item in self._mapping(value, place).items():
            inside = place.inside(name)
            with errors.collect():
                names.append(self.name.read(name, inside))
            with errors.collect():
                values.append(self.value.read(item, inside))
        errors.check()
        return dict(zip(names, values, strict=True))

    def _mapping(self, value: object, place: Place) -> Mapping[str, object]:
        if self.from_text:
            try:
                value = self.from_text(value)
            except ValueError as error:
                raise place.error(error) from None
        if not isinstance(value, Mapping):
            raise place.error(ValueError("must be a mapping of keys"))
        if self.empty and not value:
            raise place.error(ValueError(self.empty))
        return value

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        value = self.value.schema(definitions)
        if self.removable:
            value = {"anyOf": [value, {"type": "null"}]}
        schema = {
            "type": "object",
            "propertyNames": self.name.schema(definitions),
            "additionalProperties": value,
        }
        if self.from_text:
            return {"anyOf": [{"type": "string"}, schema]}
        return {**schema, "minProperties": 1} if self.empty else schema

    def key_names(self) -> Iterator[str]:
        return self.value.key_names()


def matching(
    pattern: str, refusal: str, kind: str = "text", schema: Schema = _STRING
) -> Scalar[str]:
    """Return the kind of one line of text; see `fields.matched`."""
    return Scalar(lambda value: fields.matched(value, pattern, refusal, kind), schema)


ANYTHING: Scalar[object] = Scalar(lambda value: value, {})
TEXT = Scalar(fields.printable, {"type": ["string", "number", "boolean"]})
"""Every plain scalar of a YAML file is text."""
NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.@:+/%=-]*"
WORD = matching(
    NAME_PATTERN,
    " is not a valid name (letters, digits and _ . @ : + / % = -)",
    schema={"type": ["string", "number"], "pattern": f"^{NAME_PATTERN}$"},
)
"""A name that is safe on a directive line, where quoting does not protect."""
VARIABLE = Scalar(fields.variable, {"type": "string", "pattern": f"^{fields.VARIABLE}$"})
COUNT = Scalar(fields.count, {"type": "integer", "minimum": 0})
POSITIVE = Scalar(fields.positive, {"type": "integer", "minimum": 1})


def at_most(most: int, least: Literal[0, 1] = 1) -> Scalar[int]:
    """Return the kind of whole numbers from ``least`` to ``most``."""
    read = fields.positive if least else fields.count
    schema = {"type": "integer", "minimum": least, "maximum": most}
    return Scalar(lambda value: read(value, most), schema)


MOST = 100_000
"""GPUs, CPUs or workers of one cluster."""
AMOUNT = at_most(MOST)
EXIT_CODE = at_most(255)
"""Of a program that has not succeeded."""
NUMBER = Scalar(fields.number, {"type": "number", "minimum": 0, "maximum": fields.LARGEST_NUMBER})
FLAG = Scalar(fields.flag, {"type": "boolean"})
SIZE = Scalar(fields.size, {"type": "string", "examples": ["60GiB"]})
DURATION = Scalar(fields.duration, {"type": "string", "examples": ["2h", "02:00:00"]})
TIMEOUT = Scalar(fields.timeout, {"type": ["string", "integer"], "examples": ["30m", 0]})
"""A duration; 0 turns the timeout off."""
SIZE_OR_FRACTION = Scalar(
    fields.size_or_fraction, {"type": ["string", "number"], "examples": ["12GiB", 0.8]}
)
PATTERN = Scalar(fields.regular_expression, {"type": "string", "format": "regex"})
SCRIPT = Scalar(fields.script, {"type": "string"})
DIRECTIVES = Items(Scalar(fields.directive, {"type": "string", "pattern": "^-"}))
"""Lines for the batch scheduler, without their prefix."""
ARGV = Items(TEXT, split=fields.argv, text_too=True)
"""The words of a command."""


def choice(*words: L, synonyms: Mapping[str, L] | None = None) -> Scalar[L]:
    """Return the kind of a value that is one of ``words``, or a synonym of one."""
    known: dict[str, L] = {**{word: word for word in words}, **(synonyms or {})}
    listed = alternatives(words)

    def parse(value: object) -> L:
        if not isinstance(value, str):
            raise ValueError(f"must be {listed}, not {fields.shown(value)}")
        if value not in known:
            raise ValueError(f"{value!r} is not one of {listed}")
        return known[value]

    return Scalar(parse, {"type": "string", "enum": list(known)})


# -- models: the keys that a file may have ---------------------------------------------------------
M = TypeVar("M", bound="Model")

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, kw_only=True)
class Model:
    """A section of a file. Its keys are declared with `optional` and `required`."""

    given: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)
    """Names of the keys that were written."""

    instead_of_required: ClassVar[str] = ""
    """A key that provides the required ones, such as `extends`."""

    def check(self) -> None:
        """Check the keys against each other; ValueError if they do not fit together."""


@dataclass(frozen=True)
class Key:
    """One key of a model."""

    name: str
    kind: Kind[object]
    description: str
    required: bool = False
    default: object = None

    @property
    def nullable(self) -> bool:
        """Whether null may be written, which means the same as leaving the key out."""
        return not self.required and self.default is None

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        """Return the JSON Schema of the value."""
        schema = self.kind.schema(definitions)
        if self.nullable:
            schema = {"anyOf": [schema, {"type": "null"}]}
        schema = {**schema, "description": self.description}
        if self.required:
            return schema
        return {**schema, "default": self._json_default()}

    def _json_default(self) -> object:
        if isinstance(self.default, Model):
            return {}
        if isinstance(self.default, tuple):
            return list(self.default)
        if self.kind is DURATION and isinstance(self.default, int):
            return walltime_text(self.default)
        return self.default


@overload
def optional(kind: Kind[T], description: str) -> T | None: ...
@overload
def optional(kind: Kind[T], description: str, default: T) -> T: ...
def optional(kind: Kind[T], description: str, default: T | None = None) -> T | None:
    """Declare a key that may be left out; null is allowed if there is no ``default``."""
    metadata = {"kind": kind, "description": description, "default": default}
    if isinstance(default, dict):
        return cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def required(kind: Kind[T], description: str) -> T:
    """Declare a key that must be written."""
    metadata = {"kind": kind, "description": description, "required": True}
    return cast(T, dataclasses.field(metadata=metadata))


def keys_of(model: type[Model]) -> dict[str, Key]:
    """Return the keys of ``model`` by name, in the order of their declaration."""
    fields_of_keys = (field for field in dataclasses.fields(model) if field.metadata)
    return {field.name: Key(field.name, **field.metadata) for field in fields_of_keys}


def key_names(model: type[Model]) -> Iterator[str]:
    """Yield the dotted names of all keys of ``model`` and of the models inside it."""
    for name, key in keys_of(model).items():
        yield name
        for inner in key.kind.key_names():
            yield f"{name}.{inner}"


@dataclass(frozen=True)
class Section(Kind[M]):
    """A mapping with the keys of a model."""

    model: type[M]
    text_key: str = ""
    """One text is allowed, too: it is the value of this key."""

    def read(self, value: object, place: Place) -> M:
        if self.text_key and isinstance(value, str):
            value = {self.text_key: value}
        if not isinstance(value, Mapping):
            name, python = self.model.__name__, place.document.source == PYTHON
            hint = hints.no_mapping(name, str((*place.loc, "")[-2]), value, python=python)
            text = f"a {self.text_key}, or " if self.text_key else ""
            raise place.error(ValueError(f"must be {text}a mapping of keys"), hint)
        values = self._read_keys(value, place)
        section = self.model(**values, given=frozenset(values))
        try:
            section.check()
        except ValueError as error:
            raise place.error(error) from None
        return section

    def _read_keys(self, value: Mapping[str, object], place: Place) -> dict[str, object]:
        known = keys_of(self.model)
        errors = Errors()
        values = {}
        for name, item in value.items():
            with errors.collect():
                if name not in known:
                    raise self._unknown_key(place.inside(name), sorted(known))
                values[name] = _read_key(known[name], item, place.inside(name))
        instead = self.model.instead_of_required
        unreadable = instead in value and instead not in values  # it may have provided them
        for name, key in known.items():
            if key.required and name not in value and not unreadable:
                errors.problems += place.inside(name).missing_error().problems
        errors.check()
        return values

    def _unknown_key(self, place: Place, known: Sequence[str]) -> InputError:
        hint = hints.unknown_key(
            str(place.loc[-1]),
            self.model.__name__,
            "".join(f"{step}." for step in place.loc[:-1]),
            known,
            place.key_names(),
            python=place.document.source == PYTHON,
        )
        position = place.document.key_position(place.loc)
        return InputError(Problem(f"unknown key `{place}`", position, hint=hint))

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        name = self.model.__name__
        if name not in definitions:
            definitions[name] = {}  # ends the recursion if a model contains itself
            definitions[name] = _object_schema(self.model, definitions)
        schema = {"$ref": f"#/$defs/{name}"}
        return {"anyOf": [{"type": "string"}, schema]} if self.text_key else schema

    def key_names(self) -> Iterator[str]:
        return key_names(self.model)


def build(model: type[M], document: Document) -> M:
    """Return the ``model`` of ``document``; InputError has all problems, in the file's order."""
    place = Place(document, lambda: list(key_names(model)))
    try:
        return Section(model).read(document.value, place)
    except InputError as error:
        raise InputError(sorted(error.problems, key=_order)) from None


def json_schema(model: type[Model]) -> Schema:
    """Return the JSON Schema of a file that ``model`` describes."""
    definitions: dict[str, Schema] = {}
    schema = _object_schema(model, definitions)
    return {"$schema": DIALECT, **schema, "$defs": definitions}


def _read_key(key: Key, value: object, place: Place) -> object:
    if value is None and key.nullable:
        return None
    return key.kind.read(value, place)


def _order(problem: Problem) -> tuple[str, int, int]:
    position = problem.position or Position("")
    return position.source, position.line, position.column


def _object_schema(model: type[Model], definitions: dict[str, Schema]) -> Schema:
    keys = keys_of(model)
    schema: dict[str, object] = {
        "title": model.__name__,
        "description": model.__doc__,
        "type": "object",
        "additionalProperties": False,
        "properties": {name: key.schema(definitions) for name, key in keys.items()},
    }
    if names := [name for name, key in keys.items() if key.required]:
        schema["required"] = names
        if instead := model.instead_of_required:
            schema["anyOf"] = [{"required": schema.pop("required")}, {"required": [instead]}]
    return schema
