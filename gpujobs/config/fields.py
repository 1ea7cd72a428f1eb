"""Scalar types of the two YAML files: how a written word becomes a number of bytes, seconds, or checked text.

Scalars of YAML arrive as text (``yamlfile`` resolves nothing), keywords of Python as their own types; both go through
the same functions. A function raises ValueError with what is wrong and what would be right.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from ..text import control_character

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtTpP]?)(?:[iI]?[bB])?")
_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.I)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_LONGEST = 10 * 366 * 86400

# What may stand on a directive line, where quoting is no defence. See DIRECTIVE_WORD in `plan`.
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+/%=-]*")


def printable(value: Any, what: str = "text") -> str:
    """Return ``value`` as text of one line, or raise: no control characters, no line or paragraph separators."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be {what}, not {_kind(value)}")
    text = str(value)
    if found := control_character(text):
        raise ValueError(f"has a control character ({found!r}); it must be one line of {what}")
    return text


def word(value: Any) -> str:
    """Return a name that is safe on a directive line: letters, digits and ``_.@:+/%=-``."""
    text = printable(value)
    if not WORD.fullmatch(text):
        raise ValueError(f"{text!r} is not a plain name (letters, digits and _ . @ : + / % = -)")
    return text


def count(value: Any) -> int:
    """Return a whole number of at least 0; ``010``, ``1e3``, ``true`` and ``4.0`` are none."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and re.fullmatch(r"0|[1-9]\d{0,11}", value):
        number = int(value)
    else:
        raise ValueError(
            f"{_show(value)} is not a whole number (0, 1, 2, …; no leading zero, no unit)"
        )
    if number < 0:
        raise ValueError(f"{number} is less than 0")
    return number


def positive(value: Any) -> int:
    """Return a whole number of at least 1."""
    number = count(value)
    if number == 0:
        raise ValueError("must be at least 1")
    return number


def number(value: Any) -> float:
    """Return a finite number of at least 0."""
    if isinstance(value, str) and re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", value):
        value = float(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < float("inf")
    ):
        raise ValueError(f"{_show(value)} is not a number of at least 0")
    return float(value)


def flag(value: Any) -> bool:
    """Return true or false; ``yes``, ``on`` and ``1`` are text, as YAML 1.2 has it."""
    if isinstance(value, bool):
        return value
    if value in ("true", "True", "TRUE"):
        return True
    if value in ("false", "False", "FALSE"):
        return False
    raise ValueError(f"{_show(value)} is neither true nor false")


def size(value: Any) -> int:
    """Return bytes of ``60GiB`` or ``60GB`` (both powers of 1024). A number without a unit is refused."""
    if not isinstance(value, str) or isinstance(value, bool):
        raise ValueError(f"{_show(value)} needs a unit, as in {_plain(value) or 16}GiB or 512MiB")
    found = _SIZE.fullmatch(value.strip())
    if not found:
        raise ValueError(f"{value!r} is not a size; write it as 60GiB, 512MiB or 1.5TiB")
    if found[0] == found[1]:
        raise ValueError(f"{value} needs a unit, as in {value}GiB or {value}MiB")
    n_bytes = int(float(found[1]) * _UNITS[found[2].upper()])
    if not 0 < n_bytes < 2**60:
        raise ValueError(f"{value!r} is {'nothing' if n_bytes == 0 else 'too much'}")
    return n_bytes


def duration(value: Any) -> int:
    """Return seconds of ``2h``, ``1h30m``, ``02:00:00`` or ``1-12:00:00``. A number without a unit is refused."""
    if isinstance(value, timedelta):
        seconds = int(value.total_seconds())
    elif not isinstance(value, str):
        raise ValueError(f"{_show(value)} needs a unit, as in {_plain(value) or 30}m or 02:00:00")
    elif re.fullmatch(r"\d+", value):
        raise ValueError(f"{value} needs a unit: {value}m or {value}h?")
    elif re.fullmatch(r"\d+:\d+", value):
        left, right = value.split(":")
        raise ValueError(f"{value}: minutes or hours? Write {left}m{right}s or {left}:{right}:00")
    elif clock := _CLOCK.fullmatch(value):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        if minutes > 59 or rest > 59:
            raise ValueError(f"{value!r} has more than 59 minutes or seconds")
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif (parts := _PARTS.fullmatch(value)) and value:
        days, hours, minutes, rest = (int(part or 0) for part in parts.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        raise ValueError(f"{value!r} is not a time; write it as 2h, 90m, 1h30m or 02:00:00")
    if not 0 < seconds <= _LONGEST:
        raise ValueError(
            f"{value!r} is {'no time at all' if seconds <= 0 else 'more than ten years'}"
        )
    return seconds


def size_or_fraction(value: Any) -> str:
    """Return what dask-cuda takes for device memory: bytes as a number, or a fraction between 0 and 1, as text."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if isinstance(text, str) and re.fullmatch(r"0?\.\d+|1\.0+|0|1", text):
        return text
    try:
        return str(size(text))
    except ValueError as error:
        raise ValueError(f"{error}, or a fraction of the GPU's memory such as 0.8") from None


def argv(value: Any) -> list[Any]:
    """Return a command's words: a list is taken as it is, a string is split like a shell does and never run by one."""
    if not isinstance(value, str):
        return sequence(value)
    import shlex

    try:
        return shlex.split(printable(value, "a command"))
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def sequence(value: Any) -> list[Any]:
    """Return a list; a lone string is an error, since iterating over its letters never was the wish."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, as in [{_plain(value) or '…'}]")
    return list(value)


def variable(value: Any) -> str:
    """Return the name of an environment variable that a job may set."""
    text = printable(value, "a variable's name")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise ValueError(f"{text!r} is not a variable's name (letters, digits and _)")
    if text in _REFUSED_VARIABLES or text.startswith(("LD_", "BASH_FUNC_", "DYLD_")):
        raise ValueError(
            f"{text} would change how every program starts; set it in `environment.setup` if you must"
        )
    return text


_REFUSED_VARIABLES = {
    "BASH_ENV",
    "ENV",
    "SHELLOPTS",
    "BASHOPTS",
    "IFS",
    "PS4",
    "PROMPT_COMMAND",
    "PYTHONSTARTUP",
}


def _kind(value: Any) -> str:
    names = {
        bool: "true or false",
        dict: "a mapping",
        list: "a list",
        tuple: "a list",
        type(None): "nothing",
    }
    return names.get(type(value), type(value).__name__)


def _show(value: Any) -> str:
    return (
        repr(value)
        if isinstance(value, str | int | float) and not isinstance(value, bool)
        else _kind(value)
    )


def _plain(value: Any) -> str:
    return (
        str(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    )


def _schema(kind: str, **more: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, **more})


Text = Annotated[str, BeforeValidator(printable), _schema("string")]
Word = Annotated[str, BeforeValidator(word), _schema("string", pattern=f"^{WORD.pattern}$")]
Variable = Annotated[
    str, BeforeValidator(variable), _schema("string", pattern="^[A-Za-z_][A-Za-z0-9_]*$")
]
Count = Annotated[int, BeforeValidator(count), _schema("integer", minimum=0)]
Positive = Annotated[int, BeforeValidator(positive), _schema("integer", minimum=1)]
Number = Annotated[float, BeforeValidator(number), _schema("number", minimum=0)]
Flag = Annotated[bool, BeforeValidator(flag), _schema("boolean")]
Size = Annotated[
    int,
    BeforeValidator(size),
    _schema("string", examples=["60GiB"], description="bytes, with a unit"),
]
Duration = Annotated[int, BeforeValidator(duration), _schema("string", examples=["2h", "02:00:00"])]
SizeOrFraction = Annotated[
    str,
    BeforeValidator(size_or_fraction),
    WithJsonSchema({"type": ["string", "number"], "examples": ["12GiB", 0.8]}),
]
Argv = Annotated[
    tuple[Text, ...],
    BeforeValidator(argv),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
