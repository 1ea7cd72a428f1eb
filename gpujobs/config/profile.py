"""The profile: the job that a user wants."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ..injob.names import WorkerSize
from . import fields, model
from .document import Document, core_value

# -- the `workers` section of a profile: the options of every worker -------------------------------
RESERVED_OPTIONS = (
    "name", "scheduler", "scheduler_file", "nworkers", "nthreads", "memory_limit", "resources",
    "preload_argv", "worker_class", "nanny", "local_directory",
    "protocol", "interface", "host", "listen_address", "contact_address",
    "security", "tls_ca_file", "tls_cert", "tls_key",
)  # fmt: skip

WORKER_CLASSES: dict[str, Literal["cuda", "nanny"]] = {
    "dask_cuda.CUDAWorker": "cuda",
    "CUDAWorker": "cuda",
    "distributed.Nanny": "nanny",
    "dask.distributed.Nanny": "nanny",
    "Nanny": "nanny",
}
"""Dask's names of the worker classes."""


def _option_name(value: object) -> str:
    refusal = " is not an option's name"
    text = fields.matched(value, r"[a-z][a-z0-9_-]*", refusal, "an option's name")
    name = text.replace("-", "_")
    if (own := name.removeprefix("no_")) in model.keys_of(Workers):
        raise ValueError(f"{text} is a key of `workers`: write `workers: {{{own}: …}}`")
    if name in RESERVED_OPTIONS:
        raise ValueError(f"{text} is set by gpujobs")
    return name


def _option_value(value: object) -> object:
    for loc, part in Document([value]).parts():
        for text in (loc[-1], part.plain):
            if isinstance(text, str):
                fields.printable(text)
    return core_value(value)


def _device_limit(value: object) -> str | None:
    """Return the limit of dask-cuda, which has words for its default and for none."""
    if value in ("default", "auto"):
        return None if value == "default" else "0"
    return fields.size_or_fraction(value)


_DEVICE_LIMIT = model.Scalar(_device_limit, model.SIZE_OR_FRACTION.json_schema)
_MODULES = model.Items(
    model.Scalar(
        lambda value: fields.printable(value, "a module's name").strip(), {"type": "string"}
    ),
    split=fields.comma_list,
    text_too=True,
)
_PORTS = model.Scalar(
    lambda value: fields.ports(
        value, r"\d{1,5}(:\d{1,5})?", " is not a port; write it as 8000 or 8000:8100"
    ),
    {"type": ["string", "integer"], "pattern": r"^\d+(:\d+)?$"},
)
_AMOUNTS = model.Table(model.WORD, model.NUMBER, from_text=fields.amounts)
_OPTIONS = model.Table(
    model.Scalar(_option_name, {"type": "string"}), model.Scalar(_option_value, {})
)


@dataclass(frozen=True, kw_only=True)
class Workers(model.Model):
    """Options of every worker. dask-cuda's own options keep their names."""

    threads: int = model.optional(
        model.AMOUNT,
        "threads of a worker; default: its part of `cpus_per_job`, else 1, whatever the job has",
        default=1,
    )
    memory: int | None = model.optional(
        model.SIZE,
        "host memory of a worker; default: its part of the job's, if the site states that",
    )
    count: int | None = model.optional(model.AMOUNT, "number of CPU workers, with `gpus: 0`")
    gpus_per_worker: int = model.optional(
        model.AMOUNT, "GPUs of each worker, which sees no others", default=1
    )
    workers_per_gpu: int = model.optional(
        model.at_most(100), "workers on each GPU, which share its memory and the CPUs", default=1
    )
    mps: bool = model.optional(
        model.FLAG,
        "workers of one GPU use it at the same time, through CUDA's MPS, which each job starts",
        default=False,
    )
    mps_thread_percentage: int | None = model.optional(
        model.at_most(100), "with mps: the most of a GPU's threads that a worker uses, in percent"
    )
    resources: dict[str, float] | None = model.optional(
        _AMOUNTS, "dask resources; default GPU: the worker's number of GPUs, at least 1"
    )
    worker_class: Literal["cuda", "nanny"] = model.optional(
        model.choice("cuda", "nanny", synonyms=WORKER_CLASSES),
        "nanny: a plain worker, pinned to its GPU without dask-cuda; dask's names are understood",
        default="cuda",
    )
    local_directory: str | None = model.optional(
        model.TEXT,
        "folder in which workers spill, expanded in the job; default: the site's scratch",
    )
    death_timeout: int | None = model.optional(
        model.DURATION,
        "how long a worker tries to reach the dask scheduler at start; default: `start_timeout`",
    )
    preload: tuple[str, ...] = model.optional(
        _MODULES, "modules or files that every worker runs at start", default=()
    )
    # dask-cuda's, by name
    device_memory_limit: str | None = model.optional(
        _DEVICE_LIMIT, "GPU memory above which data spills to host memory; default: 0.8; 0: never"
    )
    enable_cudf_spill: bool | None = model.optional(
        model.FLAG, "cuDF's own spilling instead of dask-cuda's"
    )
    cudf_spill_stats: int | None = model.optional(model.COUNT, "level of cuDF's spill statistics")
    rmm_pool_size: str | None = model.optional(
        model.SIZE_OR_FRACTION, "RMM pool of each worker: a size, or a part of the GPU"
    )
    rmm_maximum_pool_size: str | None = model.optional(
        model.SIZE_OR_FRACTION, "largest size of the pool; needs rmm_pool_size or rmm_async"
    )
    rmm_managed_memory: bool | None = model.optional(
        model.FLAG, "managed memory, without NVLink; excludes ucxx from `protocol: auto`"
    )
    rmm_async: bool | None = model.optional(
        model.FLAG,
        "RMM's asynchronous allocator, without managed memory; excludes ucxx from `auto`",
    )
    rmm_release_threshold: str | None = model.optional(
        model.SIZE_OR_FRACTION, "with rmm_async: most memory that is kept"
    )
    rmm_log_directory: str | None = model.optional(model.TEXT, "folder of RMM's logs")
    rmm_track_allocations: bool | None = model.optional(model.FLAG, "track RMM's allocations")
    set_rmm_allocator_for_libs: tuple[str, ...] | None = model.optional(
        _MODULES, "libraries that allocate through RMM: cupy, torch"
    )
    pre_import: tuple[str, ...] | None = model.optional(
        _MODULES, "modules that workers import before they accept tasks"
    )
    worker_port: str | None = model.optional(
        _PORTS, "port, or first:last with a port for each worker of a job on a node"
    )
    enable_tcp_over_ucx: bool | None = model.optional(
        model.FLAG, "UCX: leave unset unless a transport is being measured"
    )
    enable_infiniband: bool | None = model.optional(model.FLAG, "UCX: as above")
    enable_nvlink: bool | None = model.optional(model.FLAG, "UCX: as above")
    enable_rdmacm: bool | None = model.optional(model.FLAG, "UCX: as above")
    options: dict[str, object] = model.optional(
        _OPTIONS,
        "any other option of the worker: `pid_file: w.pid` becomes --pid-file=w.pid",
        default={},
    )

    def check(self) -> None:
        """Refuse workers that have several GPUs and share each of them."""
        if self.gpus_per_worker > 1 and self.workers_per_gpu > 1:
            raise ValueError(
                "has `gpus_per_worker` and `workers_per_gpu`, which exclude each other"
            )
        if self.mps and self.workers_per_gpu == 1:
            raise ValueError(
                "has `mps`, for which `workers_per_gpu` must be 2 or more: "
                "one worker has its GPU, or its MIG slice, for itself"
            )
        if self.mps_thread_percentage and not self.mps:
            raise ValueError("has `mps_thread_percentage`, which needs `mps: true`")

    @property
    def has_pool(self) -> bool:
        """Whether RMM takes GPU memory in advance; dask-cuda's value for no pool is 0."""
        return self.rmm_pool_size not in (None, "0")

    @property
    def size(self) -> WorkerSize:
        """How many GPUs a worker has."""
        return WorkerSize(self.gpus_per_worker, self.workers_per_gpu)

    @property
    def gpu_memory(self) -> str:
        """How RMM allocates GPU memory: plain, pool, async or managed."""
        if self.rmm_managed_memory:
            return "managed"
        if self.rmm_async:
            return "async"
        return "pool" if self.rmm_pool_size else "plain"


# -- the profile -----------------------------------------------------------------------------------
NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}"
GROUP_NAME = r"[A-Za-z][A-Za-z0-9_]{0,39}"
"""Without "-", which separates the parts of a worker's name."""
RESERVED_GROUPS = ("n", "jobs", "memory", "cores", "minimum", "maximum", "head", "self")
"""Arguments of `scale` and `adapt`, and the name of the head's own jobs."""


def option_value(value: object) -> str:
    """Return the value of a site's option, which stands in a directive, without quotes."""
    text = fields.printable(value)
    if not text or (found := re.search(r"[\s\"'`$\\#;]", text)):
        shown = repr(found[0]) if text and found else "nothing"
        raise ValueError(f"{text!r} cannot stand in a directive: it has {shown}")
    return text


def _group_name(value: object) -> str:
    refusal = ": up to 40 letters, digits and '_', starting with a letter"
    text = fields.matched(value, GROUP_NAME, refusal)
    if text in RESERVED_GROUPS:
        raise ValueError(f"{text!r} is reserved; use another name for the group")
    return text


def _name(value: object) -> str:
    """Return a name, in which ``_`` becomes ``-``: ids of clusters have none."""
    refusal = ": up to 40 letters, digits and '-', not starting with '-'"
    return fields.matched(value, NAME, refusal).replace("_", "-")


_SEVERAL_LINES = (
    "has several lines, but is one command: put the lines into a file: run: [bash, job.sh]; "
    "`module load` and the like belong to `environment.setup`"
)


def _run(value: object) -> Sequence[object]:
    """Return the words of `run`, which may end with a line break: YAML's `|` adds it."""
    if isinstance(value, str):
        value = _run_word(value.strip())
    return fields.argv(value)


def _run_word(value: object) -> str:
    if isinstance(value, str) and "\n" in value:
        raise ValueError(_SEVERAL_LINES)
    return fields.printable(value)


_RUN = model.Items(model.Scalar(_run_word, model.TEXT.json_schema), split=_run, text_too=True)


def _gpus(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    return model.at_most(model.MOST, 0).parse(value)


Runtime: TypeAlias = Literal[
    "apptainer", "singularity", "pyxis", "charliecloud", "podman", "podman-hpc"
]
RUNTIME: model.Scalar[Runtime] = model.choice(*get_args(Runtime))
Layout: TypeAlias = Literal["workers", "allocation", "mpi"]
LAYOUT: model.Scalar[Layout] = model.choice("workers", "allocation", "mpi")


@dataclass(frozen=True)
class After:
    """A cluster that must have ended before this one starts."""

    cluster: str
    any_end: bool
    """Whether it may have failed."""


def _after(value: object) -> After:
    text = fields.printable(value)
    found = re.fullmatch(r"([A-Za-z0-9-]+)(:ok|:any)?", text)
    if not found:
        raise ValueError(f"{text!r} must be the id of a cluster, ID:ok or ID:any")
    return After(found[1], found[2] == ":any")


AFTER = model.Scalar(_after, {"type": "string", "pattern": "^[A-Za-z0-9-]+(:ok|:any)?$"})


class InDirective(model.Scalar[model.T]):
    """The kind of a key that stands in one directive: `KEY_directive` of the batch scheduler."""


IN_DIRECTIVE = InDirective(model.WORD.parse, model.WORD.json_schema)
NUMBER_IN_DIRECTIVE = InDirective(model.COUNT.parse, model.COUNT.json_schema)
OPTIONS = model.Table(model.WORD, model.Scalar(option_value, {"type": ["string", "number"]}))
_NAME = model.Scalar(_name, {"type": ["string", "number"], "pattern": f"^{NAME}$"})
_GROUP_NAME = model.Scalar(
    _group_name,
    {"type": "string", "pattern": f"^{GROUP_NAME}$", "not": {"enum": list(RESERVED_GROUPS)}},
)
_GPUS = model.Scalar(
    _gpus, {"anyOf": [model.at_most(model.MOST, 0).json_schema, {"const": "auto"}]}
)


@dataclass(frozen=True, kw_only=True)
class Network(model.Model):
    """How dask's processes communicate."""

    protocol: Literal["auto", "tcp", "ucxx", "ws"] = model.optional(
        model.choice("auto", "tcp", "ucxx", "ws", synonyms={"ucx": "ucxx"}),
        "auto: the fastest of the site's protocols that work; ucxx only where the site lists it",
        default="auto",
    )
    encryption: bool | None = model.optional(
        model.FLAG, "TLS between all processes; default: true for tcp and ws; ucxx has none"
    )
    interface: str | None = model.optional(model.WORD, "as `ip link` names it; default: the site's")
    dashboard: Literal["off", "local", "on"] = model.optional(
        model.choice("off", "local", "on"),
        "local: on the loopback interface of its node; on: on all, without password and encryption",
        default="local",
    )


@dataclass(frozen=True, kw_only=True)
class Container(model.Model):
    """Run in a container image."""

    runtime: Runtime | None = model.optional(
        RUNTIME, "program that starts the container; default: the site's"
    )
    image: str = model.required(
        model.TEXT, "name from the site's `containers.images`, path or address"
    )
    args: tuple[str, ...] = model.optional(model.ARGV, "extra arguments of the runtime", default=())


_ENVIRONMENT_NAME = model.matching(
    model.NAME_PATTERN,
    " is not the name of an environment; bash text is `environment: {setup: …}`, "
    "a Python `environment: {python: …}`",
    "a name",
)


@dataclass(frozen=True, kw_only=True)
class Software(model.Model):
    """The software of a job, in an environment of a site and in that of a profile."""

    setup: str = model.optional(
        model.SCRIPT,
        "bash text, run in each job after the site's: module load, source venv/bin/activate",
        default="",
    )
    python: str | None = model.optional(
        model.TEXT,
        "Python of the jobs, with dask, and dask-cuda for GPUs; default: `python3` in a container, "
        "`python` after a setup, else the one that runs gpujobs",
    )
    container: Container | None = model.optional(
        model.Section(Container), "container image in which everything with this python runs"
    )


@dataclass(frozen=True, kw_only=True)
class Environment(Software):
    """How a job prepares its environment."""

    name: str | None = model.optional(
        _ENVIRONMENT_NAME,
        "one of the site's `environments`: its setup comes first, python and container replace its",
    )


@dataclass(frozen=True, kw_only=True)
class Head(model.Model):
    """The job of the dask scheduler and `run`: a separate one, or one of a group."""

    group: str | None = model.optional(
        model.WORD, "the jobs of this group; excludes the other keys"
    )
    queue: str | None = model.optional(model.WORD, "default: the first queue without GPUs")
    account: str | None = model.optional(model.WORD, "default: the profile's")
    cpus: int = model.optional(model.AMOUNT, "CPUs", default=1)
    memory: int | None = model.optional(model.SIZE, "host memory")
    walltime: int | None = model.optional(model.DURATION, "default: the profile's")

    def check(self) -> None:
        """Refuse the shape of a separate job for a job of a group."""
        if self.group and self.given != {"group"}:
            others = ", ".join(sorted(self.given - {"group"}))
            raise ValueError(f"`group` is for jobs of a group, {others} for a separate job")


@dataclass(frozen=True, kw_only=True)
class Group(model.Model):
    """Workers of one kind. A key that is missing has the value of the profile's top level."""

    gpus: int | Literal["auto"] = model.optional(
        _GPUS,
        "number of GPUs, with one worker on each unless `workers` says otherwise; auto (local "
        "site): all free ones, or CPU workers if there are none; 0: CPU workers only",
        default=1,
    )
    gpus_per_job: int | None = model.optional(
        model.AMOUNT,
        "GPUs of one job; default: the largest number that divides `gpus` and fits a node. "
        "GPUs of one job communicate over NVLink; smaller jobs may start sooner",
    )
    cpus_per_job: int | None = model.optional(
        model.AMOUNT,
        "CPUs of one job, divided among its workers; default: the GPUs' share of the node",
    )
    memory_per_job: int | None = model.optional(
        model.SIZE,
        "host memory of one job, divided among its workers; default: the GPUs' share of the node",
    )
    gpu_type: str | None = model.optional(
        model.WORD, "GPU type, as the site names it; any: also where the queue has a default"
    )
    queue: tuple[str, ...] = model.optional(
        model.Items(model.WORD, split=fields.one_or_several, one_too=True),
        "queue entry of the site, or a list; auto: the first that fits",
        default=("auto",),
    )
    account: str | None = model.optional(
        model.WORD, "account, project or bank; ignored where the site has none"
    )
    walltime: int | None = model.optional(
        model.DURATION, "time limit of each job, e.g. 2h or 02:00:00; default: the site's"
    )
    task_time: int | None = model.optional(
        model.DURATION,
        "how long a task takes at most: no worker starts one that its job would cut off; "
        "default: as long as those that were seen",
    )
    start_workers: int | None = model.optional(
        model.AMOUNT,
        "`run` starts when so many workers are connected; default: 1, or all of an allocation",
    )
    workers: Workers = model.optional(model.Section(Workers), "worker options", default=Workers())
    environment: Environment = model.optional(
        model.Section(Environment, text_key="name"),
        "name of an environment of the site; or name, setup, python, container",
        default=Environment(),
    )
    env: dict[str, str] = model.optional(
        model.Table(model.VARIABLE, model.TEXT),
        "environment variables of every process of the cluster, but those that gpujobs sets",
        default={},
    )
    options: dict[str, str] = model.optional(
        OPTIONS,
        "values of the options that the site has, e.g. storage; they replace the site's defaults",
        default={},
    )
    reservation: str | None = model.optional(
        IN_DIRECTIVE, "reservation in the batch scheduler; on PBS the queue of that name"
    )
    directives: tuple[str, ...] = model.optional(
        model.DIRECTIVES,
        "extra directives, without #SBATCH or the like; those that gpujobs writes are refused",
        default=(),
    )


def directive_keys(section: type[model.Model]) -> tuple[str, ...]:
    """Return the keys of ``section`` whose kind is `InDirective`."""
    keys = model.keys_of(section).items()
    return tuple(name for name, key in keys if isinstance(key.kind, InDirective))


DIRECTIVE_KEYS = directive_keys(Group)


@dataclass(frozen=True, kw_only=True)
class Profile(Group):
    """A profile file."""

    site: str | None = model.optional(model.TEXT, "name of a site, or a path to a site file")
    name: str | None = model.optional(_NAME, "part of the job's name; default: the file's stem")
    layout: Layout = model.optional(
        LAYOUT,
        "workers: elastic jobs; allocation: one job with all GPUs; mpi: the same, started by MPI",
        default="workers",
    )
    run: tuple[str, ...] = model.optional(
        _RUN,
        "command that runs once, in the head job, and whose end is that of the cluster; without "
        "one, it stays until its walltime, `gpujobs cancel`, or its end without work",
        default=(),
    )
    run_on: Literal["head", "ranks"] = model.optional(
        model.choice("head", "ranks"),
        "ranks: every MPI rank runs it, and it calls dask_mpi.initialize() or gpujobs.mpi's",
        default="head",
    )
    keep_going: bool = model.optional(
        model.FLAG, "an allocation of several nodes goes on if one of them is lost", default=False
    )
    after: After | None = model.optional(
        AFTER, "a cluster that must have ended before: ID or ID:ok, or ID:any after a failure, too"
    )
    requeue: int = model.optional(
        model.at_most(100, 0),
        "how often the cluster starts again after its walltime, a preemption, or the loss of its "
        "head's node",
        default=0,
    )
    walltime_exit: int | None = model.optional(
        model.EXIT_CODE, "exit code with which run asks to be continued by the next attempt"
    )
    workdir: str | None = model.optional(
        model.TEXT,
        "working directory of run and workers on the compute nodes; default: that of `submit`",
    )
    start_timeout: int = model.optional(
        model.DURATION, "how long a running process may take to register", default=300
    )
    idle_timeout: int | None = model.optional(
        model.TIMEOUT, "the cluster ends after so long without tasks; 0: never"
    )
    client_timeout: int | None = model.optional(
        model.TIMEOUT, "the cluster ends after so long without clients; 0: never"
    )
    network: Network = model.optional(
        model.Section(Network), "protocol, encryption, interface", default=Network()
    )
    head: Head | None = model.optional(
        model.Section(Head), "separate job for the dask scheduler and run"
    )
    groups: dict[str, Group] = model.optional(
        model.Table(_GROUP_NAME, model.Section(Group)), "workers of several kinds", default={}
    )
