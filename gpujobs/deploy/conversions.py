"""Values of dask-jobqueue's keywords, converted to keys of the profile."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config.document import Loc
from ..config.fields import count, positive, sequence
from ..config.fields import size as n_bytes
from ..config.model import keys_of
from ..config.profile import Workers
from ..injob.names import WorkerSize

Setting = tuple[Loc, Any]
"""A key of the profile and its value."""

_WORKER_OPTIONS: dict[str, Loc] = {
    "nthreads": ("workers", "threads"),
    "memory_limit": ("workers", "memory"),
    "interface": ("network", "interface"),
}
"""Options of `dask worker` that are keys of the profile under another name."""
_LISTS = ("preload",)
"""Options of `dask worker` that may be given several times."""
_EXPANDED = ("local_directory",)
"""Options in which the job expands variables."""


def directives(value: Any) -> Any:
    """Return directives; dask-jobqueue takes the keys of a mapping, too."""
    if isinstance(value, Mapping) and not any(value.values()):
        return list(value)
    return value


def prologue(value: Any) -> str:
    """Return lines of bash as one text."""
    if isinstance(value, str):
        return value
    return "\n".join(str(line) for line in sequence(value))


def seconds(value: Any) -> Any:
    """Return a time: a number without a unit is in seconds, as in dask."""
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return f"{value}s"
    return value


def memory(value: Any) -> Any:
    """Return a size: a number without a unit is in bytes, as in dask."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value}B"
    return value


def protocol_settings(scheme: str) -> list[Setting]:
    """Return the settings of a protocol of dask, such as ``tls://``."""
    encrypted = {"tls": "tcp", "wss": "ws"}
    name = scheme.removesuffix("://")
    if name not in encrypted:
        return [(("network", "protocol"), name)]
    protocol = (("network", "protocol"), encrypted[name])
    return [protocol, (("network", "encryption"), True)]


def worker_settings(options: Mapping[str, Any]) -> list[Setting]:
    """Return options of workers: those that are keys of the profile under their own names."""
    fields = set(keys_of(Workers)) - {"options"}
    own: list[Setting] = [
        (("workers", key), value) for key, value in options.items() if key in fields
    ]
    others: list[Setting] = [
        (("workers", "options", key), value) for key, value in options.items() if key not in fields
    ]
    return own + others


def extra_args_settings(value: Any) -> Iterator[Setting]:
    """Yield the settings of words of dask's command line. Raises ValueError.

    A word may have several parts, as in ``["--resources GPU=2", "--lifetime", "1h"]``.
    """
    for name, option in _options(_split(value)).items():
        if name in _WORKER_OPTIONS:
            yield _WORKER_OPTIONS[name], option
        elif name == "death_timeout":
            yield ("workers", name), seconds(option)
        elif name == "protocol":
            yield from protocol_settings(str(option))
        else:
            yield from worker_settings({name: option})


def job_settings(given: Mapping[str, Any], size: WorkerSize) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of dask-jobqueue's numbers of one job, each with its keyword.

    ``size`` is that of the workers. `cores` and `memory` are requested for the job and divided
    among its workers. If ``given`` also has what to request (`job_cpu`, `job_mem`), they are only
    divided. Raises ValueError.
    """
    cpu_workers = "gpus_per_job" in given and count(given["gpus_per_job"]) == 0
    workers = _workers_of_job(given, size, cpu_workers)
    if "processes" in given and not cpu_workers:
        yield "processes", (("gpus_per_job",), size.gpus_of(workers))
    if "cores" in given:
        if {"job_cpu", "ncpus"} & given.keys():
            yield "cores", (("workers", "threads"), positive(given["cores"]) // workers)
        else:
            yield "cores", (("cpus_per_job",), given["cores"])
    if "memory" in given:
        if {"job_mem", "mem"} & given.keys():
            yield "memory", (("workers", "memory"), f"{n_bytes(given['memory']) // workers}B")
        else:
            yield "memory", (("memory_per_job",), given["memory"])


def job_notes(given: Mapping[str, Any]) -> list[str]:
    """Return in which way a job differs from the one of dask-jobqueue for the same keywords."""
    sizes = {"processes", "gpus_per_job", "gpus_per_worker", "workers_per_gpu", "groups"}
    cores = given.get("cores") or 1
    if sizes & given.keys() or positive(cores) < 2:
        return []
    return [
        f"cores={cores}: a job has one GPU, and one worker with these cores; dask-jobqueue starts "
        "several. processes=… or gpus_per_job=… is the number of workers"
    ]


def _workers_of_job(given: Mapping[str, Any], size: WorkerSize, cpu_workers: bool) -> int:
    expected, why = None, ""
    if cpu_workers:
        expected, why = 1, "a job of CPU workers has one"
    elif "gpus_per_job" in given:
        gpus = positive(given["gpus_per_job"])
        expected = size.workers(gpus)
        why = f"gpus_per_job is {gpus}, {_size_text(size)}"
    if "processes" not in given:
        return expected or size.per_gpu
    processes = positive(given["processes"])
    if not cpu_workers and processes % size.per_gpu:
        raise ValueError(f"processes is {processes}, but there are {_size_text(size)}")
    if expected is not None and processes != expected:
        raise ValueError(f"processes is {processes}, but {why}")
    return processes


def _size_text(size: WorkerSize) -> str:
    if size.usual:
        return "one worker per GPU"
    return f"{size.gpus} GPUs per worker" if size.gpus > 1 else f"{size.per_gpu} workers per GPU"


def _split(value: Any) -> list[str]:
    text = " ".join(str(word) for word in sequence(value))
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def _options(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _pairs(words):
        if isinstance(value, str) and "$" in value and name not in _EXPANDED:
            raise ValueError(f"{value!r}: variables are not expanded here")
        if name in _LISTS:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise ValueError(f"--{name.replace('_', '-')} is given twice")
        else:
            found[name] = value
    return found


def _pairs(words: Sequence[str]) -> list[tuple[str, str | bool]]:
    pairs: list[tuple[str, str | bool]] = []
    for word in words:
        if word.startswith("--"):
            pairs.append(_option(word))
        elif pairs and pairs[-1][1] is True:
            pairs[-1] = (pairs[-1][0], word)
        else:
            raise ValueError(f"{word!r} does not follow an option")
    return pairs


def _option(word: str) -> tuple[str, str | bool]:
    name, equals, text = word[2:].partition("=")
    name = name.replace("-", "_")
    if equals:
        return name, text
    if name.startswith("no_"):
        return name.removeprefix("no_"), False
    return name, True
