"""The words of the cluster classes: keywords of dask-jobqueue, dask-cuda and others.

Each is a key of a profile, or a note, or it is refused with the name of its replacement.
"""

from __future__ import annotations

import math
import numbers
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..clusters.cgroups import available_memory
from ..config.fields import count, positive, sequence
from ..config.hints import unknown_keyword
from ..config.model import key_names, keys_of
from ..config.profile import Profile, Workers
from ..config.synonyms import WORDS
from ..planning.workeroptions import CUDA
from .jobnumbers import PER_JOB, Setting, dask_size

Reader = Callable[[Any], Iterable[Setting]]
"""Returns the settings of the value of a keyword. Raises ValueError."""

DIRECTIVES = ("directives", "job_extra_directives", "job_extra")
"""Lines for the batch scheduler, of which those that mean keys of the profile are translated."""
SKIPS = ("job_directives_skip", "header_skip")
EXTRA_ARGS = ("worker_extra_args", "extra")
LIFETIME = ("lifetime", "lifetime_stagger", "lifetime_restart")
"""Options of `dask worker` that scripts set to the walltime."""
PARAMETERS = (
    "site", "n_workers", "log_directory", "scheduler", "scheduler_options", "soonest",
    "asynchronous", "loop", "silence_logs", "quiet", "host",
)  # fmt: skip
"""Parameters of the classes that are not part of the profile."""

# -- values of keywords, converted to keys of the profile ------------------------------------------
_LISTS = ("preload",)
"""Options of `dask worker` that may be given several times."""
_EXPANDED = ("local_directory",)
"""Options in which the job expands variables."""


def plain(value: Any) -> Any:
    """Return lists, mappings, paths and numbers of other libraries as Python's own."""
    if isinstance(value, str | bool | bytes):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value


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
    if isinstance(value, float) and value > 0:
        value = math.ceil(value)
    if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()):
        return f"{value}s"
    return value


def device_size(value: Any) -> Any:
    """Return a size as dask reads it, or a fraction of a GPU's memory."""
    is_fraction = isinstance(value, int | float) and value <= 1
    is_number = isinstance(value, str) and re.fullmatch(r"[\d.]+", value)
    return value if is_fraction or is_number else dask_size(value)


def python_path(value: Any) -> Any:
    """Return an interpreter. Raises ValueError for a command of several words."""
    if isinstance(value, str) and len(value.split()) > 1 and not Path(value).exists():
        raise ValueError(
            f"{value!r} is a command: jobs start their workers themselves. A launcher or a "
            "container in front of Python is a script of yours, such as python='/home/me/python.sh'"
        )
    return value


def protocol_settings(scheme: Any) -> list[Setting]:
    """Return the settings of a protocol of dask, such as ``tls://``."""
    encrypted = {"tls": "tcp", "wss": "ws"}
    name = str(scheme).removesuffix("://")
    if name not in encrypted:
        return [(("network", "protocol"), name)]
    protocol = (("network", "protocol"), encrypted[name])
    return [protocol, (("network", "encryption"), True)]


def environment_settings(value: Any) -> Iterator[Setting]:
    """Yield the settings of an environment: the name of one of the site, or its keys."""
    keys = value if isinstance(value, Mapping) else {"name": value}
    for key, item in keys.items():
        yield ("environment", key), item


def worker_settings(options: Any) -> Iterator[Setting]:
    """Yield options of workers: those that are keys of the profile under their own names."""
    fields = set(keys_of(Workers)) - {"options"}
    given = dict(options)
    for key in sorted(given, key=lambda key: key not in fields):
        yield (("workers", key) if key in fields else ("workers", "options", key)), given[key]


def gpus_settings(value: Any) -> list[Setting]:
    """Return the setting of `gpus_per_job`; 0: jobs of CPU workers."""
    return [(("gpus",), 0)] if count(value) == 0 else [(("gpus_per_job",), value)]


def memory_limit_settings(value: Any) -> Iterator[Setting]:
    """Yield the host memory of a worker: bytes, a fraction of this machine's, or a text."""
    if value == "auto":
        return
    if isinstance(value, float) and value <= 1:
        value = int(value * available_memory())
    if value == 0:
        raise ValueError("0 (no limit) is not supported; leave it out")
    yield ("workers", "memory"), dask_size(value)


def ucx_settings(name: str, value: Any) -> Iterator[Setting]:
    """Yield the settings of a transport of UCX, which needs ucxx."""
    yield ("workers", name), value
    if value is True:
        yield ("network", "protocol"), "ucxx"


def worker_command_settings(command: Any) -> list[Setting]:
    """Return the setting of the module that starts workers: dask-cuda's starts one on each GPU."""
    words = str(command).split()
    if words and words[0].startswith("dask_cuda"):
        return [(("workers", "worker_class"), "cuda")]
    if words and words[0].startswith("distributed.cli.dask_worker"):
        return [(("workers", "worker_class"), "nanny")]
    raise ValueError(f"{command!r} is neither 'dask_cuda.cli' nor 'distributed.cli.dask_worker'")


_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "directives": directives,
    "environment.python": python_path,
    "environment.setup": prologue,
    "memory_per_job": dask_size,
    "workers.death_timeout": seconds,
    "workers.gpus_per_worker": positive,
    "workers.memory": dask_size,
    "workers.workers_per_gpu": positive,
    **dict.fromkeys(("workers.device_memory_limit", "workers.rmm_pool_size"), device_size),
    "workers.rmm_maximum_pool_size": device_size,
    "workers.rmm_release_threshold": device_size,
}
"""How values in dask's spelling are converted, by the key that they are of."""


def to(key: str) -> Reader:
    """Return the reader of a keyword that means ``key``."""
    loc, convert = tuple(key.split(".")), _CONVERTED.get(key, plain)
    return lambda value: [(loc, convert(value))]


def words(*names: str) -> dict[str, Reader]:
    """Return the readers of words of other programs that mean keys."""
    return {name: to(WORDS[name]) for name in names}


def parts(*keys: str) -> dict[str, Reader]:
    """Return the readers of keywords that are called as the last part of their key."""
    return {key.rpartition(".")[2]: to(key) for key in keys}


WORKER_OPTIONS: dict[str, Reader] = {
    **words("nthreads", "memory_limit"),
    **parts("network.interface", "workers.death_timeout"),
    "protocol": protocol_settings,
}
"""Options of `dask worker` that are keys of the profile under another name."""


def extra_args_settings(value: Any) -> Iterator[Setting]:
    """Yield the settings of words of dask's command line. Raises ValueError.

    A word may have several parts, as in ``["--resources GPU=2", "--lifetime", "1h"]``.
    """
    for name, option in _options(_split(value)).items():
        read = WORKER_OPTIONS.get(name)
        yield from read(option) if read else worker_settings({name: option})


def _split(value: Any) -> list[str]:
    text = " ".join(str(word) for word in sequence(value))
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"cannot be split into words: {str(error).lower()}") from None


def _options(words: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _pairs(words):
        if "$" in str(value) and name not in _EXPANDED:
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


# -- the keywords of each class --------------------------------------------------------------------
class Noted(NamedTuple):
    """A keyword that is accepted and has no effect; ``text`` says why."""

    text: str


class Vocabulary(dict[str, "Reader | Noted | str"]):
    """The keywords of a class in addition to the keys of a profile.

    The value is a function that returns settings, `Noted`, or a text: the keyword has no meaning
    here, and the text names its replacement.
    """

    def known(self) -> list[str]:
        """Return all keywords that are not refused."""
        return [name for name in {**dict.fromkeys(keys_of(Profile)), **self} if self.takes(name)]

    def takes(self, name: str) -> bool:
        """Return whether a keyword, or a key of the profile, has a meaning."""
        return not isinstance(self.get(name), str | Noted)

    def suggestion(self, name: str) -> str:
        """Return a hint for an unknown keyword."""
        keys = [
            key
            for key in key_names(Profile)
            if self.takes(key.partition(".")[0]) and not key.startswith("groups.")
        ]
        refused = {word: hint for word, hint in self.items() if isinstance(hint, str)}
        return unknown_keyword(name, [*self.known(), *PARAMETERS], refused, keys)

    def settings(self, name: str, value: Any) -> Iterable[Setting]:
        """Return the settings of a keyword that is not refused. Raises ValueError."""
        read = self.get(name)
        if callable(read):
            return read(value)
        if isinstance(value, Mapping) and value:
            return [((name, key), item) for key, item in value.items()]
        return [((name,), value)]


JOBQUEUE = Vocabulary(
    {
        **words("project", "job_name", "job_cpu", "ncpus", "job_mem", "mem"),
        **words("worker_memory", "worker_threads", "worker_gpu"),
        **words("job_extra_directives", "job_extra", "job_script_prologue", "env_extra"),
        **parts("environment.container", "environment.python", "network.interface"),
        **parts("workers.local_directory", "workers.worker_class", "workers.death_timeout"),
        **parts("workers.gpus_per_worker", "workers.workers_per_gpu", "workers.mps"),
        **dict.fromkeys(("environment", "software"), environment_settings),
        "gpus_per_job": gpus_settings,
        "protocol": protocol_settings,
        "worker_options": worker_settings,
        "worker_extra_args": extra_args_settings,
        "extra": extra_args_settings,
        **dict.fromkeys((*PER_JOB, *SKIPS), lambda value: ()),
        "resource_spec": lambda value: (),
        **{name: Noted(f"not used: {WORDS[name]}") for name in ("shebang", "use_stdin")},
        **{name: WORDS[name] for name in ("shared_temp_directory", "lsf_units")},
        "security": "use network={'encryption': …}: each cluster makes its own certificate",
        "nanny": "use worker_class",
        "worker_command": worker_command_settings,
        "dashboard_address": "use scheduler_options={'dashboard_address': …}",
        "scheduler_cls": "use scheduler_options",
        "job_cls": "use site",
        "gpus": "use n_workers: each worker has one GPU; GPUs of one job: gpus_per_job",
        "run": "use `gpujobs submit`, which runs a command in the cluster",
        "idle_timeout": "use scheduler_options={'idle_timeout': …}",
        "client_timeout": "leave it out: the cluster ends with the Python process that owns it",
        "after": "use `gpujobs submit --after`",
        "prefer": "use soonest=True",
        "requeue": "leave it out: a job close to its walltime gets a successor",
        "walltime_exit": "leave it out: it is for `run` of `gpujobs submit`",
        "start_workers": "use wait_for_workers",
    }
)
"""Of dask-jobqueue, with the same meaning here."""

LOCAL = Vocabulary(
    {
        **{name: word for name, word in JOBQUEUE.items() if name != "dashboard_address"},
        **parts(*(f"workers.{name}" for name in CUDA)),
        **words("threads_per_worker", "rmm_allocator_external_lib_list"),
        "enable_tcp_over_ucx": partial(ucx_settings, "enable_tcp_over_ucx"),
        "enable_infiniband": partial(ucx_settings, "enable_infiniband"),
        "enable_nvlink": partial(ucx_settings, "enable_nvlink"),
        "memory_limit": memory_limit_settings,
        "blocked_handlers": "use scheduler_kwargs={'blocked_handlers': …}",
        "ip": "use host",
        "processes": "leave it out: every worker is a process",
        "service_kwargs": "use scheduler_kwargs={'service_kwargs': …}",
    }
)
"""Of LocalCUDACluster and dask-jobqueue."""
