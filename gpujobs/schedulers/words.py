"""Directives of users as keys of a profile: ``--gres=gpu:4`` is ``gpus_per_job: 4``, and so on.

Each batch scheduler has a table of its options, `Scheduler.option_keys`, with the readers of this
module. A reader returns the settings that a value means; {}: the value is written anyway; None: no
key means it, so that the directive stays one. It raises `NotHere` for a value that a job cannot
have.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..text import exact_size_text, walltime_text
from .formats import clock_seconds, integer, memory_bytes

if TYPE_CHECKING:
    from typing import TypeAlias

Settings: TypeAlias = Mapping[str, "str | int"]
"""Values of keys of a profile."""
Reader: TypeAlias = "Callable[[str], Settings | None]"
OptionValue: TypeAlias = tuple[str, str]
"""An option in the spelling of `Scheduler.options`, and its value."""


class NotHere(ValueError):
    """A value that no job of gpujobs can have; ``hint`` is the cure."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Meaning:
    """The keys that a directive means."""

    settings: Settings
    rest: str = ""
    """The part of the directive that no key means; "" if there is none."""

    def __str__(self) -> str:
        return ", ".join(f"{key}: {value}" for key, value in self.settings.items())


def option_groups(line: str) -> list[list[str]]:
    """Return the options of a directive, each with the words of its value."""
    found: list[list[str]] = []
    for word in shlex.split(line):
        if re.match("--?[A-Za-z]", word):
            found.append([word])
        elif found:
            found[-1].append(word)
        else:
            raise ValueError(f"{word} is not an option")
    return found


def meaning(
    line: str,
    keys: Mapping[str, Reader],
    split: Callable[[Sequence[str]], Iterable[OptionValue]],
    join: Callable[[str, str], str],
) -> Meaning:
    """Return the keys that the directive ``line`` means, by the table ``keys``.

    ``split`` returns the options of one of `option_groups`, ``join`` the text of an option. Raises
    NotHere for a value that no job can have, ValueError if the line cannot be parsed.
    """
    settings: dict[str, str | int] = {}
    rest, understood = [], False
    for option, value in [pair for group in option_groups(line) for pair in split(group)]:
        read = keys.get(option)
        found = read(value) if read else None
        if found is None:
            rest.append(join(option, value))
            continue
        understood = True
        settings.update({key: text for key, text in found.items() if key != REST})
        if left := found.get(REST):
            rest.append(join(option, str(left)))
    return Meaning(settings, " ".join(rest) if understood else line)


REST = ""
"""In settings: the part of the value that no key means."""


# -- readers ---------------------------------------------------------------------------------------
def to(key: str) -> Reader:
    """Return the reader of an option whose value, one plain word, is that of ``key``."""
    return lambda value: {key: value} if re.fullmatch(r"[\w.@+-]+", value) else None


def number(key: str) -> Reader:
    """Return the reader of an option whose value is a whole number, that of ``key``."""

    def read(value: str) -> Settings | None:
        found = integer(value)
        return {key: found} if found else None

    return read


def only(expected: str, message: str, hint: str = "") -> Reader:
    """Return the reader of an option that is always written with the value ``expected``."""

    def read(value: str) -> Settings:
        if not re.fullmatch(expected, value):
            raise NotHere(message, hint)
        return {}

    return read


def walltime(seconds: Callable[[str], int | None]) -> Reader:
    """Return the reader of a walltime, which ``seconds`` reads."""

    def read(value: str) -> Settings | None:
        found = seconds(value)
        return {"walltime": walltime_text(found)} if found else None

    return read


def memory(value: str) -> Settings | None:
    """Read the memory of a job, with its unit, as ``64gb``."""
    found = memory_bytes(value)
    return {"memory_per_job": exact_size_text(found)} if found else None


def gpus(value: str) -> Settings | None:
    """Read ``4``, ``a100:4`` or ``a100``: GPUs of a job, and their type."""
    name, _, text = value.rpartition(":")
    found = integer(text)
    if found is None:  # only a type
        name, found = value.rstrip(":"), 1
    if "," in value or ":" in name:
        raise NotHere(f"{value} has several types of GPUs", "gpus_per_job: …, and one gpu_type")
    if not re.fullmatch(r"[\w.-]*", name):
        return None
    return {"gpus_per_job": found, **({"gpu_type": name} if name else {})}


NO_LOGS = NotHere(
    "the logs of jobs are in a folder of the cluster",
    "`gpujobs logs` shows them; in Python, log_directory='FOLDER' moves them",
)


def logs(value: str) -> Settings:
    """Refuse a file for the output of jobs."""
    raise NO_LOGS


def one_node(value: str) -> Settings:
    """Read the number of nodes, which gpujobs writes itself."""
    if value in ("1", "1-1"):
        return {}
    message = "the number of nodes follows from that of the GPUs"
    raise NotHere(message, "gpus_per_job: …, the GPUs of one job; layout: allocation for one job")


STARTED_AGAIN = "a job that is started again has lost its dask scheduler"
one_task = only("1", "a job has one task on each node, which sees all of the node's GPUs")


# -- chunks of PBS and Torque ----------------------------------------------------------------------
_CHUNK: Mapping[str, Reader] = {
    **dict.fromkeys(("ncpus", "ppn"), number("cpus_per_job")),
    **dict.fromkeys(("ngpus", "gpus"), number("gpus_per_job")),
    **dict.fromkeys(("gpu_type", "gputype", "gpu_model"), to("gpu_type")),
    "mem": memory,
    "mpiprocs": only(r"\d+", ""),
    "ompthreads": only(r"\d+", ""),
    **dict.fromkeys(("shared", "default"), only("", "")),  # the mode of Torque's GPUs
}


def chunk(value: str) -> Settings:
    """Read PBS's ``select=1:ncpus=8:ngpus=1:mem=4gb`` or Torque's ``nodes=1:ppn=8:gpus=1``."""
    first, *parts = value.split(":")
    if "=" in first:
        first, parts = "1", [first, *parts]
    found: dict[str, str | int] = dict(one_node(first))
    for part in parts:
        name, _, text = part.partition("=")
        read = _CHUNK.get(name)
        settings = read(text) if read else None
        if settings is None:
            message = f"{part} has no key: jobs have the request of the site"
            raise NotHere(message, "`request` of the site file has the lines that request nodes")
        found.update(settings)
    return found


# -- walltimes -------------------------------------------------------------------------------------
def slurm_seconds(text: str) -> int | None:
    """Return a walltime of Slurm: ``60`` and ``60:00`` are minutes, ``1-12`` days and hours."""
    return clock_seconds(f"{text}:00" if re.fullmatch(r"\d+", text) else text)


def lsf_seconds(text: str) -> int | None:
    """Return a walltime of LSF: ``90`` are minutes, ``4:00`` hours and minutes."""
    found = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    return (60 * int(found[1] or 0) + int(found[2])) * 60 if found else None
