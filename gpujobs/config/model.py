"""The base of every model, and the way from a YAML document to a model with all its errors told at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from ..errors import InputError, Position, Problem
from .yamlfile import Document, Loc


class Model(BaseModel):
    """Frozen, and an unknown key is an error."""

    # Only the outermost models are ever built: the others are parts of their schemas.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


M = TypeVar("M", bound=Model)


def build(cls: type[M], document: Document) -> M:
    """Return the ``cls`` that ``document`` describes; InputError with every problem, in the order of the file."""
    try:
        return cls.model_validate(document.value)
    except ValidationError as error:
        problems = [_problem(cls, details, document) for details in error.errors(include_url=False)]
    raise InputError(sorted(problems, key=_place))


def _place(problem: Problem) -> tuple[str, int, int]:
    place = problem.position or Position("")
    return place.source, place.line, place.column


def keys(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of ``cls`` and of the models inside it."""
    for name, info in cls.model_fields.items():
        yield prefix + name
        for inner in (info.annotation, *get_args(info.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from keys(inner, f"{prefix}{name}.")


def suggest(word: str, here: list[str], everywhere: list[str]) -> str:
    """Return "did you mean …?" for the nearest key by its last part: ``here`` first, unless it is right elsewhere."""
    word = word.replace("-", "_")
    for known, likeness in ((everywhere, 1.0), (here, 0.6), (everywhere, 0.6)):
        last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}
        if near := difflib.get_close_matches(word, last, n=1, cutoff=likeness):
            return f"did you mean `{last[near[0]]}`?"
    return ""


def _problem(cls: type[BaseModel], details: ErrorDetails, document: Document) -> Problem:
    loc: Loc = tuple(step for step in details["loc"] if step != "[key]")
    kind, path = details["type"], _path(loc)
    if kind == "extra_forbidden":
        around = _model_at(cls, loc[:-1])
        here = sorted(around.model_fields) if around else []
        inside = "".join(f"{step}." for step in loc[:-1])
        hint = suggest(str(loc[-1]), [inside + key for key in here], list(keys(cls)))
        return Problem(f"unknown key `{path}`", _key(document, loc), hint=hint)
    if kind == "missing":
        place = document.position(loc[:-1])
        return Problem(f"`{path}` is required", place if place.line else Position(document.source))
    position = document.position(loc)
    if kind == "value_error":
        error = details["ctx"]["error"]
        if offset := getattr(error, "offset", 0):  # a place inside the text
            quoted = position.text[position.column - 1 : position.column] in ("'", '"')
            position = replace(position, column=position.column + offset + quoted, width=1)
        return Problem(f"`{path}`{_says(str(error))}", position)
    if kind == "literal_error":
        choices = str(details["ctx"]["expected"])
        return Problem(
            f"`{path}`: {details['input']!r} is not one of {choices.replace(chr(39), '')}", position
        )
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return Problem(f"`{path}` must be a mapping of keys", position)
    return Problem(f"`{path}`: {details['msg'][0].lower()}{details['msg'][1:]}", position)


def _says(message: str) -> str:
    return (
        f" {message}" if message.startswith(("must", "has ", "needs", "cannot")) else f": {message}"
    )


def _path(loc: Loc) -> str:
    text = ""
    for step in loc:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _key(document: Document, loc: Loc) -> Position:
    return document.keys.get(loc) or document.position(loc)


def _model_at(cls: type[BaseModel], loc: Loc) -> type[BaseModel] | None:
    """Return the model whose keys stand at ``loc``."""
    current: Any = cls
    for step in loc:
        if isinstance(current, type) and issubclass(current, BaseModel):
            info = current.model_fields.get(str(step))
            current = info.annotation if info else None
        else:
            current = (get_args(current) or (None,))[
                -1
            ]  # the values of a dict, the items of a tuple
        if type(None) in get_args(current):
            current = get_args(current)[0]
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None
