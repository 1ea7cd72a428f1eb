"""Kinds of values that only site files have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from ..errors import InputError
from ..schedulers import get_scheduler, scheduler_names
from . import fields, model, placeholders
from .profile import Profile, option_value

_DIRECTIVE = {"type": "string", "pattern": "^-"}


def _checked(
    read: Callable[[object], str],
    names: Sequence[str] | None = placeholders.RESOURCES,
    schema: model.Schema = _DIRECTIVE,
    *,
    with_options: bool = False,
) -> model.Scalar[str]:
    """Return the kind of text with placeholders; see `placeholders.check` for the arguments."""

    def parse(value: object) -> str:
        return placeholders.check(read(value), names, with_options=with_options)

    return model.Scalar(parse, schema)


def _submit_argument(value: object) -> str:
    text = fields.directive(value)
    if re.search(r"[\"'\\]", text):
        raise ValueError(f"{text!r} must have no quotes: it is divided into words at spaces")
    return text


def account_directive(value: object) -> str:
    """Return a directive that names the account."""
    text = placeholders.check(fields.printable(value), placeholders.ACCOUNT)
    if not text.startswith("-") or "{account}" not in text:
        raise ValueError("must be a directive such as '-A {account}'")
    return text


def _launcher(names: tuple[str, ...]) -> model.Items[str]:
    """Return the kind of a command line with the placeholders ``names``."""
    word = _checked(fields.printable, names, {"type": "string"})
    return model.Items(word, split=fields.argv, text_too=True)


def _resource(value: object) -> str:
    refusal = " is not a name of a resource (small letters, digits and _)"
    text = fields.matched(value, rf"(?!.*_per_){placeholders.RESOURCE_NAME}", refusal, "a name")
    if text in ("gpus", "cpus", "memory"):
        raise ValueError(f"{text} of a node are `{text}_per_node`")
    return text


def _amount(value: object) -> int:
    """Return a size in bytes, or a whole number as a `Count`."""
    if isinstance(value, int | str) and re.fullmatch(r"\d+", str(value)):
        return placeholders.Count(fields.count(value))
    return fields.size(value)


def _protocols(value: object) -> Sequence[object]:
    protocols = fields.sequence(value)
    if not protocols:
        raise ValueError("needs at least one of tcp, ucxx, ws")
    return protocols


Protocol: TypeAlias = Literal["tcp", "ucxx", "ws"]


def _visible_devices(value: object) -> str:
    """Return one of two words, or KEY:NAME of a mapping with one key."""
    if value in ("scheduler", "exclusive"):
        return str(value)
    for key in ("variable", "file"):
        if isinstance(value, dict) and list(value) == [key]:
            try:
                return f"{key}:{fields.variable_name(value[key])}"
            except ValueError as error:
                raise model.ValueErrorInside(str(error), key) from None
    raise ValueError("must be `scheduler`, `exclusive`, {variable: NAME} or {file: NAME}")


class _Defaults(model.Table[object]):
    """Keys of a profile. They are validated with a profile that uses them, at their position."""

    def schema(self, definitions: dict[str, model.Schema]) -> model.Schema:
        """Return the JSON Schema of a profile."""
        return model.Section(Profile).schema(definitions)


class SchedulerName(model.Kind[str]):
    """The name of a batch scheduler that is registered or can be found."""

    def read(self, value: object, place: model.Place) -> str:
        name = model.WORD.read(value, place)
        try:
            get_scheduler(name)
        except InputError as error:
            raise place.error(error) from None
        return name

    def schema(self, definitions: dict[str, model.Schema]) -> model.Schema:
        return {"type": "string", "enum": scheduler_names()}


def _one_key(name: str) -> model.Schema:
    return {
        "type": "object",
        "properties": {name: VARIABLE_NAME.json_schema},
        "required": [name],
        "additionalProperties": False,
    }


VARIABLE_NAME = model.Scalar(
    fields.variable_name, {"type": "string", "pattern": f"^{fields.VARIABLE}$"}
)
MACHINE = model.matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]*",
    " is not the name of a machine (letters, digits, `.`, `_` and `-`); ssh's configuration has "
    "its user, port and key",
    "a name",
)
SITE_DIRECTIVES = model.Items(_checked(fields.directive, with_options=True), extendable=True)
OPTION_NAME = model.matching(
    rf"(?!({'|'.join(placeholders.RESOURCES)})$){placeholders.RESOURCE_NAME}",
    " is not a name of an option (small letters, digits and _)",
    "a name",
    {"type": "string", "pattern": "^[a-z]"},
)
# `Site.check` finds the placeholder that is the option's own name; planning checks the others.
OPTION_DIRECTIVE = _checked(fields.directive, None)
OPTION_DEFAULT = _checked(option_value, schema={"type": "string"})
SUBMIT_ARGUMENTS = model.Items(_checked(_submit_argument, with_options=True), extendable=True)
CUDA_VERSION = model.Scalar(
    lambda value: fields.matched(value, r"\d+(\.\d+)?", ": write it as 13 or 12.9", "a version"),
    {"type": ["string", "number"], "pattern": r"^\d+(\.\d+)?$"},
)
NOTES = model.Items(model.TEXT, extendable=True)
FOLDER = model.matching(
    r'(?!.*(["`\\]|\$\())[/~$].*',
    " must be an absolute path; it may contain ~, $NAME and ${NAME:-/else}",
    "a path",
)
IMAGE = model.matching(
    r"(/|~/|\$).*|.*(://|#).*",
    " must be an absolute path, or an address such as docker://…",
    "a path or an address",
)
BIND = model.matching(
    r"(/|~/|\$)[^:,\"`\\]*(:/[^:,]*)?",
    " must be an absolute path, or PATH:PATH_IN_THE_CONTAINER; it may contain ~ and $NAME, "
    "but no comma",
    "a path",
)
SHELL = model.matching(
    r"/[\w./-]*bash( (-[elpuvx]+|--login|--noprofile|--norc))?",
    ": the jobs are bash scripts; write /bin/bash or /bin/bash -l",
    "a path",
)
LAUNCHER = _launcher(placeholders.LAUNCH)
NODE_LAUNCHER = _launcher(placeholders.NODE_LAUNCH)
WORKERS_LAUNCHER = _launcher(placeholders.WORKERS_LAUNCH)
PROTOCOLS: model.Items[Protocol] = model.Items(
    model.choice("tcp", "ucxx", "ws", synonyms={"ucx": "ucxx"}), split=_protocols, extendable=True
)
PORTS = model.Scalar(
    lambda value: fields.ports(
        value, r"\d{1,5}-\d{1,5}", " is not a range of ports; write it as 8000-8100"
    ),
    {"type": "string", "pattern": "^[0-9]+-[0-9]+$"},
)
RESOURCES = model.Table(
    model.Scalar(_resource, {"type": "string", "pattern": "^[a-z]"}),
    model.Scalar(_amount, {"type": ["string", "integer"], "examples": ["1600GB", 100]}),
)
DEFAULTS = _Defaults(model.TEXT, model.ANYTHING)
VISIBLE_DEVICES = model.Scalar(
    _visible_devices,
    {"anyOf": [{"enum": ["scheduler", "exclusive"]}, _one_key("variable"), _one_key("file")]},
)
