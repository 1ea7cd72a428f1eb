"""How one value is read: text becomes bytes, seconds, a number, or checked text.

The values of a YAML file arrive as text (`document` resolves no types), keywords from Python arrive
as their own types; both are read by the same functions. Each returns the typed value, or raises
ValueError with the cause and an example of a valid value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import timedelta

from ..text import control_character, repeats_repeats

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtTpP]?)(?:[iI]?[bB])?")
# Both have the groups days, hours, minutes, seconds.
_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.I)
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_LONGEST_S = 10 * 366 * 86400
_LARGEST_BYTES = 2**60
LARGEST_COUNT = 10**7
LARGEST_NUMBER = 10**18

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"

_REFUSED_VARIABLES = {
    r"BASH_ENV|ENV|SHELLOPTS|BASHOPTS|IFS|PS4|PROMPT_COMMAND|PYTHONSTARTUP"
    r"|LD_.*|BASH_FUNC_.*|DYLD_.*": (
        "would change how every program starts; if you need it, set it in `environment.setup`"
    ),
    r"UID|EUID|PPID|BASH_VERSINFO": "cannot be changed: bash refuses it",
    r"GPUJOBS_.*": "is gpujobs' own: give another name to a variable of your program",
    r"(CUDA|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL": (
        "is set for each worker: `gpus` and `workers.gpus_per_worker` choose how many it has"
    ),
    r"DASK_SCHEDULER_(ADDRESS|FILE)": (
        "is set to the dask scheduler of the cluster; `gpujobs connect` reaches another one"
    ),
    r"DASK_DISTRIBUTED__COMM__(TLS__.*|REQUIRE_ENCRYPTION|DEFAULT_SCHEME)": (
        "is set by gpujobs: use `network.protocol` and `network.encryption`"
    ),
}
"""Regular expressions of names that `env` cannot have, and why."""
_KINDS = {
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    type(None): "nothing",
}


def printable(value: object, kind: str = "text") -> str:
    """Return ``value`` as one line of text without control characters or line separators.

    ``kind`` names the value in the error message.
    """
    if not _is_text_or_number(value):
        raise ValueError(f"must be {kind}, not {_kind(value)}")
    text = str(value)
    if not text.isprintable() and (found := control_character(text)):
        raise ValueError(f"has a control character ({found!r}); it must be one line of {kind}")
    return text


def matched(value: object, pattern: str, refusal: str, kind: str = "text") -> str:
    """Return `printable` text that matches ``pattern``; ``refusal`` ends the message of others."""
    text = printable(value, kind)
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{text!r}{refusal}")
    return text


def ports(value: object, pattern: str, refusal: str) -> str:
    """Return one port, or the first and the last one of a range, as `matched` does."""
    text = matched(value, pattern, refusal, "a port")
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if not 1024 <= numbers[0] <= numbers[-1] <= 65535:
        raise ValueError(f"{text}: ports are from 1024 to 65535, the smaller one first")
    return re.sub(r"\d+", lambda number: str(int(number[0])), text)


def count(value: object, most: int = LARGEST_COUNT) -> int:
    """Return a whole number of at least 0; ``010``, ``1e3``, ``true`` and ``4.0`` are refused."""
    if isinstance(value, str) and re.fullmatch(r"0|[1-9]\d*", value):
        value = int(value[:15])  # one digit more would also be too large
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"{shown(value)} is not a whole number (0, 1, 2, …; no leading zero, no unit)"
        )
    if value < 0:
        raise ValueError(f"{value} is less than 0")
    if value > most:
        raise ValueError(f"must be at most {most}")
    return value


def positive(value: object, most: int = LARGEST_COUNT) -> int:
    """Return a whole number of at least 1."""
    number = count(value, most)
    if number == 0:
        raise ValueError("must be at least 1")
    return number


def number(value: object) -> float:
    """Return a number of at least 0, and at most `LARGEST_NUMBER`."""
    if isinstance(value, str) and re.fullmatch(r"(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", value):
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{shown(value)} is not a number of at least 0")
    if not 0 <= value <= LARGEST_NUMBER:
        raise ValueError(f"{value!r} is not a number from 0 to {LARGEST_NUMBER}")
    return float(value)


def flag(value: object) -> bool:
    """Return true or false; ``yes``, ``on`` and ``1`` are text, as in YAML 1.2."""
    if isinstance(value, bool):
        return value
    if value in ("true", "True", "TRUE"):
        return True
    if value in ("false", "False", "FALSE"):
        return False
    raise ValueError(f"{shown(value)} is neither true nor false")


def size(value: object) -> int:
    """Return bytes: ``60GiB`` and ``60GB`` are the same power of 1024; the unit is required."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} needs a unit, as in {_example(value, '16')}GiB or 512MiB")
    found = _SIZE.fullmatch(value.strip())
    if not found:
        raise ValueError(f"{value!r} is not a size; write it as 60GiB, 512MiB or 1.5TiB")
    if found[0] == found[1]:
        raise ValueError(f"{value} needs a unit, as in {value}GiB or {value}MiB")
    n_bytes = float(found[1]) * _UNITS[found[2].upper()]
    if n_bytes < 1:
        raise ValueError(f"{value!r} is less than one byte; leave it out for the default")
    if n_bytes >= _LARGEST_BYTES:
        raise ValueError(f"{value!r} is too large; the limit is 1024PiB")
    return int(n_bytes)


def size_or_fraction(value: object) -> str:
    """Return device memory as dask-cuda takes it: bytes, or a fraction from 0 to 1, as text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and re.fullmatch(r"0?\.\d+|1\.0+|0|1", value):
        # dask-cuda takes 1 for one byte, and 1.0 for all memory.
        return {0.0: "0", 1.0: "1.0"}.get(float(value), value)
    try:
        return str(size(value))
    except ValueError as error:
        raise ValueError(f"{error}, or a fraction of the GPU's memory such as 0.8") from None


def duration(value: object) -> int:
    """Return seconds of ``2h``, ``1h30m``, ``02:00:00``, ``1-12:00:00`` or a timedelta.

    A number without a unit is refused.
    """
    if isinstance(value, timedelta):
        seconds = int(value.total_seconds())
    elif isinstance(value, str):
        seconds = _seconds(value)
    else:
        raise ValueError(f"{shown(value)} needs a unit, as in {_example(value, '30')}m or 02:00:00")
    if seconds <= 0:
        raise ValueError(f"{value!r} is not longer than 0 seconds")
    if seconds > _LONGEST_S:
        raise ValueError(f"{value!r} is more than ten years")
    return seconds


def timeout(value: object) -> int:
    """Return seconds of a `duration`, or 0, which turns a timeout off."""
    return 0 if value in ("0", 0) and value is not False else duration(value)


def _seconds(text: str) -> int:
    if re.fullmatch("0+", text):
        raise ValueError("must be longer than 0 seconds")
    if re.fullmatch(r"\d+", text):
        raise ValueError(f"{text} needs a unit: {text}m or {text}h?")
    if re.fullmatch(r"\d+:\d+", text):
        left, right = text.split(":")
        raise ValueError(f"{text}: minutes or hours? Write {left}m{right}s or {left}:{right}:00")
    found = _CLOCK.fullmatch(text) or _PARTS.fullmatch(text)
    if not text or not found:
        raise ValueError(f"{text!r} is not a time; write it as 2h, 90m, 1h30m or 02:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    if ":" in text and max(minutes, seconds) > 59:
        raise ValueError(f"{text!r} has more than 59 minutes or seconds")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def argv(value: object) -> Sequence[object]:
    """Return the words of a command: a list as it is, a string split as a shell splits it."""
    if not isinstance(value, str):
        return sequence(value)
    try:
        return shlex.split(printable(value, "a command"))
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def comma_list(value: object) -> Sequence[object]:
    """Return a list as it is, or the parts of a string between commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return sequence(value)


def amounts(value: object) -> object:
    """Return ``GPU=2 MEMORY=10``, as dask writes resources, as a mapping; commas are allowed."""
    if not isinstance(value, str):
        return value
    pairs = [item.partition("=") for item in value.replace(",", " ").split()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(f"{value!r} is not a list of resources; write {{GPU: 2}} or GPU=2")
    return {name: amount for name, _, amount in pairs}


def sequence(value: object) -> list[object]:
    """Return a list; a single string is refused, because its items would be its letters."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, as in [{_quoted(_example(value, '…'))}]")
    return list(value)


def one_or_several(value: object) -> list[object]:
    """Return a list, also of a single value."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise ValueError("must not be empty")
    return values


def variable_name(value: object) -> str:
    """Return the name of an environment variable."""
    refusal = " is not a variable's name (letters, digits and _)"
    return matched(value, VARIABLE, refusal, "a variable's name")


def variable(value: object) -> str:
    """Return the name of an environment variable that a job may set."""
    text = variable_name(value)
    for names, reason in _REFUSED_VARIABLES.items():
        if re.fullmatch(names, text):
            raise ValueError(f"{text} {reason}")
    return text


def regular_expression(value: object) -> str:
    """Return the text of a regular expression that compiles."""
    text = printable(value, "a regular expression")
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from None
    if repeats_repeats(text):
        raise ValueError(
            f"{text!r} repeats a group that itself has repeats or alternatives, which can take "
            "years: write it without one of them, such as [a-z0-9-]+"
        )
    return text


def script(value: object) -> str:
    """Return bash text that ends with a line break, or ``""``."""
    if not isinstance(value, str):
        raise ValueError("must be bash text")
    if not value.strip():
        return ""
    return value.rstrip() + "\n"


def directive(value: object) -> str:
    """Return a directive without its prefix, such as ``--qos=high``."""
    line = printable(value, "a directive").strip()
    if not line.startswith("-"):
        raise ValueError(
            f"{line!r} does not start with '-'; write it without its #SBATCH, #PBS, #BSUB or #$"
        )
    return line


def _is_text_or_number(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def shown(value: object) -> str:
    """Return text and numbers as Python shows them, else the kind of the value."""
    if _is_text_or_number(value):
        return repr(value)
    return _kind(value)


def _example(value: object, default: str) -> str:
    """Return ``value`` for use in an example, or ``default`` if it is not one line of text."""
    if not _is_text_or_number(value) or control_character(str(value)):
        return default
    return str(value) or default


def _quoted(text: str) -> str:
    """Return ``text`` as an item of a list in YAML; braces and the like need quotes there."""
    if re.search(r"[\[\]{},&*#?|<>!%@:`\"']", text):
        return "'" + text.replace("'", "''") + "'"
    return text
