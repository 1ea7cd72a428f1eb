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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar, cast, overload

from ..errors import InputError, Position, Problem
from ..text import walltime_text
from . import hints
from .document import PYTHON, Document
from .kinds import DURATION, Errors, Kind, Place, Schema

T = TypeVar("T")
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
    required: bool
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
    metadata = {"kind": kind, "description": description}
    if isinstance(default, dict):
        return cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata))
    return dataclasses.field(default=default, metadata=metadata)


def required(kind: Kind[T], description: str) -> T:
    """Declare a key that must be written."""
    metadata = {"kind": kind, "description": description}
    return cast(T, dataclasses.field(metadata=metadata))


def keys_of(model: type[Model]) -> dict[str, Key]:
    """Return the keys of ``model`` by name, in the order of their declaration."""
    keys = {}
    for field in dataclasses.fields(model):
        if "kind" not in field.metadata:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        keys[field.name] = Key(
            name=field.name,
            kind=field.metadata["kind"],
            description=field.metadata["description"],
            required=default is dataclasses.MISSING,
            default=default,
        )
    return keys


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

    def read(self, value: object, place: Place) -> M:
        """Return the model."""
        if not isinstance(value, Mapping):
            name, python = self.model.__name__, place.document.source == PYTHON
            hint = hints.no_mapping(name, str((*place.loc, "")[-2]), value, python=python)
            raise place.error(ValueError("must be a mapping of keys"), hint)
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
        return place.key_error(f"unknown key `{place}`", hint)

    def schema(self, definitions: dict[str, Schema]) -> Schema:
        """Return a reference to the model's JSON Schema."""
        name = self.model.__name__
        if name not in definitions:
            definitions[name] = {}  # ends the recursion if a model contains itself
            definitions[name] = _object_schema(self.model, definitions)
        return {"$ref": f"#/$defs/{name}"}

    def key_names(self) -> Iterator[str]:
        """Yield the dotted names of the model's keys."""
        return key_names(self.model)


def build(model: type[M], document: Document) -> M:
    """Return the ``model`` that ``document`` describes.

    InputError has every problem, in the order of the file.
    """
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
        schema |= _required_schema(names, model.instead_of_required)
    return schema


def _required_schema(names: Sequence[str], instead: str) -> Schema:
    if not instead:
        return {"required": names}
    return {"anyOf": [{"required": names}, {"required": [instead]}]}
