"""The profile: the job that a user wants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from . import fields
from .document import core_value
from .kinds import (
    ARGV,
    COUNT,
    DIRECTIVES,
    DURATION,
    FLAG,
    NUMBER,
    POSITIVE,
    SCRIPT,
    SIZE,
    SIZE_OR_FRACTION,
    TEXT,
    VARIABLE,
    WORD,
    Items,
    Scalar,
    Table,
    choice,
)
from .model import Model, Section, optional, required

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
LONGEST_NAME = 40
RESERVED_GROUPS = ("n", "jobs", "memory", "cores", "minimum", "maximum")
RESERVED_OPTIONS = (
    "name", "scheduler", "scheduler_file", "nworkers", "nthreads", "memory_limit", "resources",
    "preload_argv", "worker_class", "nanny", "local_directory",
    "protocol", "interface", "host", "listen_address", "contact_address",
    "security", "tls_ca_file", "tls_cert", "tls_key",
)  # fmt: skip


def _name(value: object) -> str:
    text = fields.printable(value)
    if not NAME.fullmatch(text) or len(text) > LONGEST_NAME:
        raise ValueError(f"{text!r}: up to 40 letters, digits and '-', not starting with '-'")
    return text


def _gpus(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    return fields.count(value)


def _module(value: object) -> str:
    return fields.printable(value, "a module's name").strip()


def _ports(value: object) -> str:
    text = fields.printable(value, "a port")
    if not re.fullmatch(r"\d+(:\d+)?", text):
        raise ValueError(f"{text!r} is not a port; write it as 8000 or 8000:8100")
    return text


def _option_name(value: object) -> str:
    text = fields.printable(value, "an option's name")
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", text):
        raise ValueError(f"{text!r} is not an option's name")
    name = text.replace("-", "_")
    if name in RESERVED_OPTIONS:
        raise ValueError(f"{text} is set by gpujobs")
    return name


def _option_value(value: object) -> object:
    for text in _texts(value):
        fields.printable(text)
    return core_value(value)


def _texts(value: object) -> Iterator[str]:
    """Yield every text in ``value``, names of mappings included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


_NAME = Scalar(_name, {"type": ["string", "number"], "pattern": f"^{NAME.pattern}$"})
_GPUS = Scalar(_gpus, {"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]})
_MODULES = Items(Scalar(_module, {"type": "string"}), split=fields.comma_list, text_too=True)
_PORTS = Scalar(_ports, {"type": ["string", "integer"], "pattern": r"^\d+(:\d+)?$"})
_OPTIONS = Table(Scalar(_option_name, {"type": "string"}), Scalar(_option_value, {}))


@dataclass(frozen=True, kw_only=True)
class Workers(Model):
    """Options of every worker. dask-cuda's own options keep their names."""

    threads: int = optional(
        POSITIVE, "threads of a worker; default: its part of `cpus_per_job`, else 1", default=1
    )
    memory: int | None = optional(SIZE, "host memory of a worker; default: its part of the job's")
    count: int | None = optional(POSITIVE, "number of CPU workers, with `gpus: 0`")
    resources: dict[str, float] | None = optional(
        Table(WORD, NUMBER), "dask resources; default GPU: 1 on GPU workers"
    )
    worker_class: Literal["cuda", "nanny"] = optional(
        choice("cuda", "nanny"), "nanny: a plain worker pinned to its GPU", default="cuda"
    )
    local_directory: str | None = optional(
        TEXT, "scratch folder; default: the site's node-local one"
    )
    death_timeout: int | None = optional(
        DURATION, "how long a worker tries to reach the dask scheduler at start"
    )
    preload: tuple[str, ...] = optional(
        _MODULES, "modules or files that every worker runs at start", default=()
    )
    # dask-cuda's, by name
    device_memory_limit: str | None = optional(
        SIZE_OR_FRACTION, "device memory above which data spills to host"
    )
    enable_cudf_spill: bool | None = optional(FLAG, "cuDF's own spilling instead of dask-cuda's")
    cudf_spill_stats: int | None = optional(COUNT, "level of cuDF's spill statistics")
    rmm_pool_size: str | None = optional(
        SIZE_OR_FRACTION, "RMM pool of each worker: size, or fraction of GPU"
    )
    rmm_maximum_pool_size: str | None = optional(SIZE_OR_FRACTION, "largest size of the pool")
    rmm_managed_memory: bool | None = optional(FLAG, "managed memory; not together with NVLink")
    rmm_async: bool | None = optional(
        FLAG, "RMM's asynchronous allocator; not together with managed memory"
    )
    rmm_release_threshold: str | None = optional(
        SIZE_OR_FRACTION, "with rmm_async: most memory that is kept"
    )
    rmm_log_directory: str | None = optional(TEXT, "folder of RMM's logs")
    rmm_track_allocations: bool | None = optional(FLAG, "track RMM's allocations")
    set_rmm_allocator_for_libs: tuple[str, ...] | None = optional(_MODULES, "cupy, torch")
    pre_import: tuple[str, ...] | None = optional(
        _MODULES, "modules that workers import before they accept tasks"
    )
    worker_port: str | None = optional(_PORTS, "port or first:last")
    enable_tcp_over_ucx: bool | None = optional(
        FLAG, "UCX: leave unset unless a transport is being measured"
    )
    enable_infiniband: bool | None = optional(FLAG, "UCX: as above")
    enable_nvlink: bool | None = optional(FLAG, "UCX: as above")
    enable_rdmacm: bool | None = optional(FLAG, "UCX: as above")
    options: dict[str, object] = optional(_OPTIONS, "any other option of the worker", default={})


@dataclass(frozen=True, kw_only=True)
class Network(Model):
    """How dask's processes communicate."""

    protocol: Literal["auto", "tcp", "ucxx", "ws"] = optional(
        choice("auto", "tcp", "ucxx", "ws"),
        "auto: the first of the site's protocols that works",
        default="auto",
    )
    encryption: bool | None = optional(
        FLAG, "TLS between all processes; default: true for tcp and ws"
    )
    interface: str | None = optional(WORD, "as `ip link` names it; default: the site's")


@dataclass(frozen=True, kw_only=True)
class Container(Model):
    """Run in a container image."""

    runtime: Literal["apptainer", "pyxis"] = required(
        choice("apptainer", "pyxis"), "container runtime"
    )
    image: str = required(TEXT, "path or address")
    args: tuple[str, ...] = optional(ARGV, "extra arguments", default=())


@dataclass(frozen=True, kw_only=True)
class Environment(Model):
    """How a job prepares its environment."""

    setup: str = optional(SCRIPT, "bash text, run after the site's", default="")
    python: str | None = optional(
        TEXT, "the jobs' python; default: `python` after a setup, else this one"
    )
    container: Container | None = optional(Section(Container), "run in a container image")


@dataclass(frozen=True, kw_only=True)
class Head(Model):
    """A separate job for the dask scheduler and `run`."""

    queue: str | None = optional(WORD, "default: the first queue without GPUs")
    cpus: int = optional(POSITIVE, "CPUs", default=1)
    memory: int | None = optional(SIZE, "host memory")
    walltime: int | None = optional(DURATION, "default: the profile's")


@dataclass(frozen=True, kw_only=True)
class Group(Model):
    """Workers of one kind."""

    gpus: int | Literal["auto"] = optional(_GPUS, "number of workers", default=1)
    gpus_per_job: int | None = optional(COUNT, "GPUs of one job")
    gpu_type: str | None = optional(WORD, "GPU type")
    queue: str | None = optional(WORD, "queue entry of the site")
    account: str | None = optional(WORD, "account")
    walltime: int | None = optional(DURATION, "walltime")
    workers: Workers = optional(Section(Workers), "worker options", default=Workers())
    directives: tuple[str, ...] = optional(DIRECTIVES, "extra directives", default=())


@dataclass(frozen=True, kw_only=True)
class Profile(Model):
    """A profile file."""

    site: str | None = optional(TEXT, "name of a site, or a path to a site file")
    name: str | None = optional(_NAME, "part of the job's name; default: the file's stem")
    layout: Literal["workers", "mpi"] = optional(
        choice("workers", "mpi"),
        "workers: elastic jobs; mpi: one allocation of fixed size",
        default="workers",
    )
    gpus: int | Literal["auto"] = optional(
        _GPUS,
        "number of workers, one on each GPU; auto: all free GPUs (local); 0: CPU workers",
        default=1,
    )
    gpus_per_job: int | None = optional(
        POSITIVE, "GPUs of one job; default: as many as divide evenly"
    )
    cpus_per_job: int | None = optional(
        POSITIVE, "CPUs of one job; default: the GPUs' share of the node"
    )
    memory_per_job: int | None = optional(
        SIZE, "host memory of one job; default: the GPUs' share of the node"
    )
    gpu_type: str | None = optional(WORD, "GPU type, as the site names it")
    queue: str = optional(
        WORD, "queue entry of the site; auto: the first that fits", default="auto"
    )
    walltime: int | None = optional(DURATION, "e.g. 2h or 02:00:00; default: the site's")
    account: str | None = optional(WORD, "account, if the site has accounts")
    run: tuple[str, ...] = optional(
        ARGV,
        "command that runs in the cluster; without one it runs until walltime or cancel",
        default=(),
    )
    run_on: Literal["head", "ranks"] = optional(
        choice("head", "ranks"),
        "ranks: every MPI rank runs it, and it calls dask_mpi.initialize() or gpujobs.mpi's",
        default="head",
    )
    workdir: str | None = optional(
        TEXT, "working directory of run; default: the one in which submit was called"
    )
    start_workers: int | None = optional(
        POSITIVE, "number of workers to wait for before run starts"
    )
    start_timeout: int = optional(
        DURATION, "how long an active process may take to register", default=300
    )
    workers: Workers = optional(Section(Workers), "worker options", default=Workers())
    network: Network = optional(
        Section(Network), "protocol, encryption, interface", default=Network()
    )
    environment: Environment = optional(
        Section(Environment), "setup, python, container", default=Environment()
    )
    env: dict[str, str] = optional(
        Table(VARIABLE, TEXT), "environment variables of every process of the cluster", default={}
    )
    directives: tuple[str, ...] = optional(
        DIRECTIVES, "extra directives for the batch scheduler", default=()
    )
    head: Head | None = optional(Section(Head), "separate job for the dask scheduler and run")
    groups: dict[str, Group] = optional(
        Table(_NAME, Section(Group)), "workers of several kinds", default={}
    )
