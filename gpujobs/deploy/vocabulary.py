"""The keywords of the cluster classes: which keys of the profile each one sets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config.document import Loc
from ..config.fields import count, positive
from ..config.hints import unknown_keyword
from ..config.model import key_names, keys_of
from ..config.profile import Profile
from .conversions import (
    Setting,
    directives,
    extra_args_settings,
    memory,
    prologue,
    protocol_settings,
    seconds,
    worker_settings,
)

PER_JOB = ("cores", "memory", "processes")
"""dask-jobqueue's numbers of one job, which are converted together."""
PARAMETERS = (
    "site", "n_workers", "log_directory", "scheduler", "scheduler_options", "prefer",
    "asynchronous", "loop", "silence_logs", "quiet",
)  # fmt: skip
"""Parameters of the classes that are not part of the profile."""


@dataclass(frozen=True)
class Vocabulary:
    """The keywords of a class in addition to the keys of a profile."""

    synonyms: Mapping[str, Loc]
    """Other names of keys."""
    converted: Mapping[str, tuple[Loc, Callable[[Any], Any]]]
    """Other names of keys whose values are written differently."""
    several: Mapping[str, Callable[[Any], Iterable[Setting]]]
    """Keywords that set several keys."""
    refused: Mapping[str, str]
    """Keywords without a meaning here, and their replacements."""
    per_job: tuple[str, ...] = PER_JOB

    def known(self) -> list[str]:
        """Return all keywords that are not refused."""
        profile = (name for name in keys_of(Profile) if name not in self.refused)
        return [*profile, *self.synonyms, *self.converted, *self.several, *self.per_job]

    def suggestion(self, name: str) -> str:
        """Return a hint for an unknown keyword."""
        keys = [key for key in key_names(Profile) if key.partition(".")[0] not in self.refused]
        keys = [key for key in keys if not key.startswith("groups.")]
        return unknown_keyword(name, [*self.known(), *PARAMETERS], self.refused, keys)

    def settings(self, name: str, value: Any) -> Iterable[Setting]:
        """Return the settings of one keyword. Raises ValueError."""
        if name == "gpus_per_job" and count(value) == 0:
            return [(("gpus",), 0)]
        if name in self.several:
            return self.several[name](value)
        if name in self.converted:
            loc, convert = self.converted[name]
            return [(loc, convert(value))]
        if name in self.synonyms:
            return [(self.synonyms[name], value)]
        if isinstance(value, Mapping) and value:
            return [((name, key), item) for key, item in value.items()]
        return [((name,), value)]


JOBQUEUE = Vocabulary(
    synonyms={
        "project": ("account",),
        "job_name": ("name",),
        "job_cpu": ("cpus_per_job",),
        "ncpus": ("cpus_per_job",),
        "local_directory": ("workers", "local_directory"),
        "python": ("environment", "python"),
        "container": ("environment", "container"),
        "interface": ("network", "interface"),
        "worker_memory": ("workers", "memory"),
        "worker_threads": ("workers", "threads"),
        "worker_class": ("workers", "worker_class"),
    },
    converted={
        "job_extra_directives": (("directives",), directives),
        "job_extra": (("directives",), directives),
        "job_script_prologue": (("environment", "setup"), prologue),
        "env_extra": (("environment", "setup"), prologue),
        "death_timeout": (("workers", "death_timeout"), seconds),
        "gpus_per_worker": (("workers", "gpus_per_worker"), positive),
        "worker_gpu": (("workers", "gpus_per_worker"), positive),
        "workers_per_gpu": (("workers", "workers_per_gpu"), positive),
        "job_mem": (("memory_per_job",), memory),
        "mem": (("memory_per_job",), memory),
    },
    several={
        "protocol": lambda value: protocol_settings(str(value)),
        "worker_options": lambda value: worker_settings(dict(value)),
        "worker_extra_args": extra_args_settings,
        "extra": extra_args_settings,
    },
    refused={
        "resource_spec": (
            "leave it out: cores and memory are requested, by `request` of the site file"
        ),
        "header_skip": "use `request` of the site file: a job has its lines and no others",
        "job_directives_skip": "use `request` of the site file: a job has its lines and no others",
        "shebang": "use `shell` of the site file",
        "nanny": "use worker_class",
        "worker_command": "use worker_class",
        "shared_temp_directory": "use `directory` of the site file: it holds the certificates",
        "security": "use network={'encryption': …}: each cluster makes its own certificate",
        "host": "use scheduler_options={'host': …}",
        "dashboard_address": "use scheduler_options={'dashboard_address': …}",
        "scheduler_cls": "use scheduler_options",
        "job_cls": "use site",
        "lsf_units": "use `request` of the site file, which contains the unit",
        "use_stdin": "leave it out: scripts are always passed on standard input",
        "gpus": "use n_workers: each worker has one GPU; GPUs of one job: gpus_per_job",
        "run": "use `gpujobs submit`, which runs a command in the cluster",
        "idle_timeout": "use scheduler_options={'idle_timeout': …}",
        "client_timeout": "leave it out: the cluster ends with the Python process that owns it",
        "after": "use `gpujobs submit --after`",
        "requeue": "leave it out: a job close to its walltime gets a successor",
        "walltime_exit": "leave it out: it is for `run` of `gpujobs submit`",
        "start_workers": "use wait_for_workers",
    },
)
"""Of dask-jobqueue, with the same meaning here."""
