"""Placeholders in site files: ``{gpus_per_node}``, ``{memory_per_cpu:MB}``.

They are not Jinja and not ``str.format``: each name of a fixed list is replaced by a number or by
an allow-listed word. The name contains the scope (per node, job, CPU or GPU, always of one job),
and the placeholder contains the unit of a size. A queue's `resources` add
placeholders of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..text import nearest, number_text

RESOURCES = (
    "queue", "account", "gpu_type", "nodes",
    "gpus_per_node", "gpus_per_job", "gpus_per_cpu",
    "cpus_per_node", "cpus_per_job", "cpus_per_gpu",
    "memory_per_node", "memory_per_job", "memory_per_cpu", "memory_per_gpu",
    "gpu_memory", "walltime",
)  # fmt: skip
ACCOUNT = ("account",)
LAUNCH = ("ranks", "nodes", "ranks_per_node")
NODE_LAUNCH = ("node", "nodes", "gpus_per_node", "kill")
WORKERS_LAUNCH = ("nodes", "gpus_per_node", "gpus_per_job", "cpus_per_node", "cpus_per_job")
SCOPES = ("node", "job", "cpu", "gpu")
RESOURCE_NAME = r"[a-z][a-z0-9_]*"

_TOKEN = re.compile(r"\{(?P<name>\w+)(?::(?P<unit>\w+))?\}|[{}]")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_RESOURCE = re.compile(rf"{RESOURCE_NAME}_per_({'|'.join(SCOPES)})")
_UNIT = re.compile(r"([KMGT])(i?B)?")


class Count(int):
    """An amount of a resource that is a number, not a size in bytes."""


class PlaceholderError(ValueError):
    """A brace that is not part of a valid placeholder.

    ``offset`` is its 0-based place in the text.
    """

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


def names(text: str) -> list[str]:
    """Return the names of the placeholders in ``text``, in order."""
    return re.findall(r"\{(\w+)", text)


def memory_units(text: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the bytes of the unit of every memory placeholder in ``text``."""
    for token in _TOKEN.finditer(text):
        if (unit := token["unit"]) and _is_memory(token["name"]):
            yield token["name"], _UNITS[unit[0]]


def unit_error(text: str, scheduler: str, default: str) -> str:
    """Return why a memory placeholder in ``text`` lacks its unit, or "".

    ``mem={memory_per_node:GB}`` would request 13 bytes instead of 13 GB. ``default``: units that
    the batch scheduler ``scheduler`` assumes.
    """
    for token in _TOKEN.finditer(text):
        unit = (token["unit"] or "")[:1]
        if not unit or not _is_memory(token["name"]):
            continue
        found = re.match(r"[KMGT](?![A-Z]{2})", text[token.end() :].upper())
        written = found[0] if found else ""
        if written != unit and (written or unit not in default):
            return (
                f"`{token[0]}{written}` is a number of {unit}B, and {scheduler} would take it in "
                f"another unit: write {token[0]}{unit}"
            )
    return ""


def check(text: str, known: Sequence[str] | None = RESOURCES, *, with_options: bool = False) -> str:
    """Return ``text`` if every brace in it belongs to a placeholder of ``known``.

    Otherwise raise PlaceholderError. Where all RESOURCES are known, those of queues may be, too.
    None: every name without a unit is known. ``with_options``: names of options may be there,
    which `check_options` checks.
    """
    for token in _TOKEN.finditer(text):
        name = token["name"] or ""
        of_queue = known is RESOURCES and _is_of_queue(name)
        if known is None or of_queue or (with_options and _is_of_option(token)):
            _check_token(token, [*RESOURCES, name])
        else:
            _check_token(token, known)
    return text


def check_options(text: str, options: Collection[str]) -> None:
    """Raise PlaceholderError for a name in ``text`` that `check` has left to the site."""
    for token in _TOKEN.finditer(text):
        if _is_of_option(token) and token["name"] not in options:
            _check_token(token, [*RESOURCES, *options])


def without(text: str, name: str) -> str:
    """Return the directive ``text`` without the part that has the placeholder ``name``.

    A part stands between colons or commas, as in ``gpu:{gpu_type}:2``; "" if it is the whole value
    of the option. Other text is returned as it is.
    """
    token = rf"\{{{name}\}}"
    if re.fullmatch(rf"-\S+?[ =]([\"']?)(\w+=|\w+\[[^\]&|]*)?{token}[^\]&|:,\s]*\]?\1", text):
        return ""
    text = re.sub(rf"^(--gpus[\w-]*[ =]|-G ?){token}:", r"\1", text)
    text = re.sub(rf"(?<=[\s:,\"'])\w+={token}[:,]|(?<=[:,]){token}[:,]", "", text)
    return re.sub(rf"[:,](\w+=)?{token}(?=[\s:,\"']|$)", "", text)


def expand(text: str, values: Mapping[str, int | float | str | None]) -> str:
    """Return ``text`` with its placeholders replaced; sizes in ``values`` are bytes.

    Raise LookupError with the placeholder's name if its value is None: the site does not define it.
    """

    def value_of(token: re.Match[str]) -> str:
        _check_token(token, list(values))
        name, unit = token["name"], token["unit"]
        value = values[name]
        if value is None:
            raise LookupError(name)
        if isinstance(value, str):
            return value
        if unit and isinstance(value, Count):
            raise _error(token, " is a number without a unit")
        if not unit and _is_of_queue(name) and not isinstance(value, Count):
            raise _error(token, f" needs a unit, as in {{{name}:GB}}")
        if unit:
            value = int(value) // _UNITS[unit[0]]
            if value == 0:
                raise ValueError(f"{name} is less than 1 {unit}")
        return number_text(value)

    return _TOKEN.sub(value_of, text)


def _check_token(token: re.Match[str], known: Sequence[str]) -> None:
    name, unit = token["name"], token["unit"]
    if name not in known:
        message = f" is not a placeholder; known: {_list(known)}"
        if near := nearest(name or "", known):
            message = f" is not a placeholder; did you mean {_list([near])}? known: {_list(known)}"
        raise _error(token, message)
    if not unit and _is_size(name) and not _is_of_queue(name):
        raise _error(token, f" needs a unit, as in {{{name}:GB}}")
    if unit and not _is_size(name):
        raise _error(token, " cannot have a unit")
    if unit and not _UNIT.fullmatch(unit):
        raise _error(token, ": the unit must be one of KB, MB, GB, TB")


def _error(token: re.Match[str], message: str) -> PlaceholderError:
    return PlaceholderError(token[0] + message, token.start())


def _is_memory(name: str) -> bool:
    return name.startswith("memory")


def _is_of_queue(name: str) -> bool:
    """Return whether a name is that of a queue's resource."""
    known = (*RESOURCES, *LAUNCH, *NODE_LAUNCH)
    return name not in known and _RESOURCE.fullmatch(name) is not None


def _is_of_option(token: re.Match[str]) -> bool:
    """Return whether a placeholder may be the value of an option of the site."""
    name = token["name"] or ""
    known = name in RESOURCES or _is_of_queue(name)
    return not known and not token["unit"] and re.fullmatch(RESOURCE_NAME, name) is not None


def _is_size(name: str) -> bool:
    return _is_of_queue(name) or (name in RESOURCES and "memory" in name)


def _list(known: Sequence[str]) -> str:
    units = {True: ":GB", False: ""}
    return " ".join(f"{{{name}{units[_is_size(name)]}}}" for name in known)
