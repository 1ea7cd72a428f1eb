"""The profile: what a user writes to say what is wanted."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, field_validator

from .fields import (
    Argv,
    Count,
    Duration,
    Flag,
    Number,
    Positive,
    Size,
    SizeOrFraction,
    Text,
    Variable,
    Word,
    count,
    printable,
)
from .model import Model
from .site import Directives, Script
from .yamlfile import core_value

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")
RESERVED_GROUPS = ("n", "jobs", "memory", "cores", "minimum", "maximum")
RESERVED_OPTIONS = (
    "name", "scheduler_file", "nthreads", "memory_limit", "resources", "preload_argv", "security", "worker_class",
    "protocol", "interface", "host", "listen_address", "contact_address", "nworkers", "nanny", "tls_ca_file",
    "tls_cert", "tls_key", "local_directory", "scheduler",
)  # fmt: skip


def _name(value: Any) -> str:
    text = printable(value)
    if not NAME.fullmatch(text) or len(text) > 40:
        raise ValueError(f"{text!r}: up to 40 letters, digits and '-', not starting with '-'")
    return text


def _gpus(value: Any) -> int | str:
    return "auto" if value == "auto" else count(value)


def _option(name: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise ValueError(f"{name!r} is not an option's name")
    plain = name.replace("-", "_")
    if plain in RESERVED_OPTIONS:
        raise ValueError(f"{name} is set by gpujobs")
    return plain


def _check_texts(value: Any) -> None:
    if isinstance(value, dict | list | tuple):
        for item in [*value.values(), *value] if isinstance(value, dict) else value:
            _check_texts(item)
    elif isinstance(value, str):
        printable(value)


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list, as in [cudf, cupy]")
    return tuple(printable(item, "a module's name").strip() for item in value)


_WORDS = WithJsonSchema({"type": "array", "items": {"type": "string"}})
Name = Annotated[
    str, BeforeValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{NAME.pattern}$"})
]
Gpus = Annotated[
    int | Literal["auto"],
    BeforeValidator(_gpus),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"const": "auto"}]}),
]
Words = Annotated[tuple[str, ...], BeforeValidator(_words), _WORDS]


class Workers(Model):
    """Options of every worker. dask-cuda's own options keep their names."""

    threads: Positive = Field(1, description="threads of a worker")
    memory: Size | None = Field(
        None, description="host memory of a worker; default: the GPU's share of the node"
    )
    count: Positive | None = Field(None, description="CPU workers wanted, with `gpus: 0`")
    resources: dict[Word, Number] | None = Field(
        None, description="dask resources; default GPU: 1 on GPU workers"
    )
    worker_class: Literal["cuda", "nanny"] = Field(
        "cuda", description="nanny: a plain worker pinned to its GPU"
    )
    local_directory: Text | None = Field(
        None, description="scratch folder; default: the site's node-local one"
    )
    death_timeout: Duration | None = Field(
        None, description="how long a worker looks for the dask scheduler at start"
    )
    preload: Words = Field((), description="modules or files that every worker runs at start")
    # dask-cuda's, by name
    device_memory_limit: SizeOrFraction | None = Field(
        None, description="device memory above which data spills to host"
    )
    enable_cudf_spill: Flag | None = Field(
        None, description="cuDF's own spilling instead of dask-cuda's"
    )
    cudf_spill_stats: Count | None = Field(None, description="level of cuDF's spill statistics")
    rmm_pool_size: SizeOrFraction | None = Field(
        None, description="RMM pool of each worker: size, or fraction of GPU"
    )
    rmm_maximum_pool_size: SizeOrFraction | None = Field(
        None, description="largest size of the pool"
    )
    rmm_managed_memory: Flag | None = Field(
        None, description="managed memory; not together with NVLink"
    )
    rmm_async: Flag | None = Field(
        None, description="RMM's asynchronous allocator; not together with managed memory"
    )
    rmm_release_threshold: SizeOrFraction | None = Field(
        None, description="with rmm_async: memory kept at most"
    )
    rmm_log_directory: Text | None = Field(None, description="folder of RMM's logs")
    rmm_track_allocations: Flag | None = Field(None, description="track RMM's allocations")
    set_rmm_allocator_for_libs: Words | None = Field(None, description="cupy, torch")
    pre_import: Words | None = Field(
        None, description="modules that workers import before they take work"
    )
    worker_port: (
        Annotated[str, BeforeValidator(printable), Field(pattern=r"^\d+(:\d+)?$")] | None
    ) = Field(None, description="port or first:last")
    enable_tcp_over_ucx: Flag | None = Field(
        None, description="UCX: leave unset unless a transport is being measured"
    )
    enable_infiniband: Flag | None = Field(None, description="UCX: as above")
    enable_nvlink: Flag | None = Field(None, description="UCX: as above")
    enable_rdmacm: Flag | None = Field(None, description="UCX: as above")
    options: dict[Annotated[str, AfterValidator(_option)], Any] = Field(
        {}, description="any other option of the worker"
    )

    @field_validator("options", mode="after")
    @classmethod
    def _resolve(cls, value: dict[str, Any]) -> dict[str, Any]:
        _check_texts(value)
        return {name: core_value(item) for name, item in value.items()}


class Network(Model):
    """What dask's processes talk over."""

    protocol: Literal["auto", "tcp", "ucxx", "ws"] = Field(
        "auto", description="auto: the site's best that works"
    )
    encryption: Flag | None = Field(
        None, description="TLS between all processes; default: true for tcp and ws"
    )
    interface: Word | None = Field(None, description="as `ip link` names it; default: the site's")


class Container(Model):
    """Run in a container image."""

    runtime: Literal["apptainer", "pyxis"] = Field(description="what starts it")
    image: Text = Field(description="path or address")
    args: Argv = Field((), description="further arguments")


class Environment(Model):
    """What must happen before Python works."""

    setup: Script = Field("", description="bash text, run after the site's")
    python: Text | None = Field(
        None, description="the jobs' python; default: `python` after a setup, else this one"
    )
    container: Container | None = Field(None, description="run in a container image")


class Head(Model):
    """A job of its own for the dask scheduler and `run`."""

    queue: Word | None = Field(None, description="default: the first queue without GPUs")
    cpus: Positive = Field(1, description="CPUs")
    memory: Size | None = Field(None, description="host memory")
    walltime: Duration | None = Field(None, description="default: the profile's")


class Group(Model):
    """Workers of one kind."""

    gpus: Gpus = Field(1, description="workers wanted")
    gpus_per_job: Count | None = Field(None, description="GPUs of one job")
    gpu_type: Word | None = Field(None, description="kind of GPU")
    queue: Word | None = Field(None, description="queue entry of the site")
    account: Word | None = Field(None, description="account")
    walltime: Duration | None = Field(None, description="walltime")
    workers: Workers = Field(Workers(), description="worker options")
    directives: Directives = Field((), description="further lines")


class Profile(Model):
    """A profile file."""

    site: Text | None = Field(None, description="name of a site, or a path to a site file")
    name: Name | None = Field(None, description="part of the job's name; default: the file's stem")
    layout: Literal["workers", "mpi"] = Field(
        "workers", description="elastic jobs, or one allocation at once"
    )
    gpus: Gpus = Field(
        1, description="workers wanted = GPUs; auto: all free ones (local); 0: CPU workers"
    )
    gpus_per_job: Positive | None = Field(
        None, description="GPUs of one job; default: as many as divide evenly"
    )
    gpu_type: Word | None = Field(None, description="kind of GPU, as the site names it")
    queue: Word = Field("auto", description="queue entry of the site; auto: the first that fits")
    walltime: Duration | None = Field(None, description="e.g. 2h or 02:00:00; default: the site's")
    account: Word | None = Field(None, description="account, where the site has one")
    run: Argv = Field(
        (), description="command that runs in the cluster; none: it stays until walltime or cancel"
    )
    run_on: Literal["head", "ranks"] = Field(
        "head",
        description="ranks: every MPI rank runs it, and it calls dask_mpi.initialize() or gpujobs.mpi's",
    )
    workdir: Text | None = Field(
        None, description="where run starts; default: where submit was called"
    )
    start_workers: Positive | None = Field(
        None, description="run begins when so many workers are there"
    )
    start_timeout: Duration = Field(
        300, description="how long a living process may take to register"
    )
    workers: Workers = Field(Workers(), description="worker options")
    network: Network = Field(Network(), description="protocol, encryption, interface")
    environment: Environment = Field(Environment(), description="setup, python, container")
    env: dict[Variable, Text] = Field({}, description="variables of every process of the cluster")
    directives: Directives = Field((), description="further lines for the batch scheduler")
    head: Head | None = Field(None, description="own job for the dask scheduler and run")
    groups: dict[Name, Group] = Field({}, description="workers of several kinds")
