"""The output of `gpujobs plan`, as text and as JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..config.document import effective_text
from ..config.profile import Workers
from ..config.spec import ClusterSpec
from ..injob.demand import RULES
from ..injob.names import HEAD, WorkerSize
from ..planning.containers import Container
from ..planning.limits import Job, job_limits, limit_texts
from ..planning.plan import JobGroup, Plan
from ..planning.workeroptions import DEVICE_MEMORY_LIMIT, with_shares
from ..text import (
    alternatives,
    charges_text,
    measured_size_text,
    note_text,
    plural,
    short_size_text,
    size_text,
    walltime_text,
    wrapped,
)

if TYPE_CHECKING:
    from ..clusters.ledger import ClusterRecord

# -- how `gpujobs plan` describes the use of GPU memory --------------------------------------------
OFF = "0"
"""dask-cuda's value for no limit."""


def memory_text(plan: Plan, group: JobGroup) -> str:
    """Return spilling and RMM's settings of each worker, in bytes if the site states its memory."""
    workers = with_shares(group.profile.workers)
    if not group.gpus or workers.worker_class != "cuda":
        return "no GPU memory is managed"
    return ", ".join(_parts(workers, plan.site.queues[group.queue_key].gpu_memory))


def _parts(workers: Workers, total: int | None) -> Iterator[str]:
    if total:
        yield f"GPU {size_text(total)}"
    yield _spilling(workers, total)
    if workers.has_pool:
        yield _pool(workers, total)
    elif workers.rmm_async:
        yield "RMM's asynchronous allocator"
    if workers.rmm_managed_memory:
        yield "managed memory"


def _spilling(workers: Workers, total: int | None) -> str:
    if workers.enable_cudf_spill:
        return "cuDF spills by itself"
    limit = workers.device_memory_limit or DEVICE_MEMORY_LIMIT
    if limit == OFF:
        return "no spilling to host"
    return f"spills to host above {_amount(limit, total)}"


def _pool(workers: Workers, total: int | None) -> str:
    kind = "asynchronous" if workers.rmm_async else "pool"
    text = f"RMM {kind} of {_amount(str(workers.rmm_pool_size), total)}"
    if workers.rmm_maximum_pool_size not in (None, OFF):
        text += f", at most {_amount(workers.rmm_maximum_pool_size, total)}"
    return text


def _amount(value: str, total: int | None) -> str:
    """Return a fraction or a number of bytes, as dask-cuda takes it, as text."""
    if "." not in value:
        return size_text(int(value))
    part = f"{float(value):.0%} of the GPU's memory"
    if not total:
        return part
    return f"{measured_size_text(int(total * float(value)))} ({part})"


# -- a plan as human-readable text and as JSON -----------------------------------------------------
SHOWN_NAMES = 8
"""Names of workers that are printed; of more, the first four and the last."""

_ISOLATION = (
    "over ucxx, the rate between two jobs on a node depends on whether the site isolates the GPUs "
    "of jobs from each other; `gpujobs doctor --run` measures it"
)
_PROTOCOLS = {"tls": "tcp, encrypted (TLS)", "wss": "ws, encrypted (TLS)"}
_WORKER_CLASSES = {"cuda": "CUDAWorker", "nanny": "plain worker pinned to its GPU"}


def plan_text(plan: Plan, cluster_id: str, columns: int | None = None) -> str:
    """Return the plan as names and values, with its notes below; ``columns``: see `wrapped`."""
    rows = [
        ("cluster", f"{cluster_id} on site {plan.site_name} ({plan.scheduler.name})"),
        *(_jobs_row(jobs) for jobs in plan.all_jobs),
        ("submitted with", _distinct(" ".join(jobs.submit_arguments) for jobs in plan.all_jobs)),
        ("account", _distinct(jobs.account or "" for jobs in plan.all_jobs)),
        ("GPUs", _gpus_text(plan)),
        *(("charge", f"at most {text}") for text in charges_text(plan.charges)),
        *(row for group in plan.groups for row in _group_rows(plan, group, cluster_id)),
        ("dask scheduler", _head_text(plan)),
        ("network", _transport_text(plan)),
        *_software_rows("environment", plan, lambda jobs: jobs.profile.environment.name or ""),
        *_software_rows("container", plan, lambda jobs: str(jobs.container or "")),
        *_software_rows("python", plan, lambda jobs: jobs.python),
        ("run", _run_text(plan)),
        ("limits", _limits_text(plan)),
    ]
    stated = [row for row in rows if all(row)]
    width = max(len(name) for name, _ in stated)
    lines = [wrapped(f"{name:<{width}}  {value}", columns, width + 2) for name, value in stated]
    lines += map(note_text, _notes(plan))
    return "\n".join(lines)


def origins_text(spec: ClusterSpec, plan: Plan) -> str:
    """Return the values of the profile, and of the site and the queues, with their positions."""
    site = spec.site.document.without("defaults", "queue_defaults")
    queues = site.section("queues")
    used = queues.having({jobs.queue_key: queues.items[jobs.queue_key] for jobs in plan.all_jobs})
    site = site.having({**site.items, "queues": used})
    profile = f"# the profile\n{effective_text(spec.document)}"
    return f"{profile}\n# site {plan.site_name}\n{effective_text(site)}"


def plan_json(plan: Plan, cluster_id: str) -> dict[str, object]:
    """Return the plan as JSON; memory in bytes, times in seconds."""
    return {
        "version": 1,
        "cluster": cluster_id,
        "site": plan.site_name,
        "scheduler": plan.scheduler.name,
        "gpus": plan.gpus,
        "charges": plan.charges,
        "workers": plan.n_workers,
        "worker_names": plan.worker_names(cluster_id),
        "jobs": [_jobs_json(jobs) for jobs in plan.all_jobs],
        **_workers_json(plan, cluster_id),
        "head": "own job" if plan.head else "first job",
        "layout": plan.layout.name,
        "protocols": list(plan.transport.protocols),
        "encrypted": plan.transport.encrypted,
        "interface": plan.transport.interface,
        "environment": plan.groups[0].profile.environment.name,
        "container": _container_json(plan.groups[0].container),
        "python": plan.groups[0].python,
        "run": list(plan.profile.run),
        "start_workers": plan.start_workers,
        "notes": _notes(plan),
    }


def _workers_json(plan: Plan, cluster_id: str) -> dict[str, object]:
    """Return the keys of workers: null beside `groups`, each of which has its own."""
    keys = ("worker_threads", "worker_memory", "worker_class", "gpus_per_worker", "workers_per_gpu")
    groups = [_group_json(plan, group, cluster_id) for group in plan.groups]
    if plan.profile.groups:
        return {"groups": groups, **dict.fromkeys(keys)}
    return {key: groups[0][key] for key in keys}


def submitted_json(plan: Mapping[str, object], record: ClusterRecord) -> dict[str, object]:
    """Return the plan (see `plan_json`) of a cluster that was submitted, and its submissions."""
    submissions = [
        {"id": submission.id, "first": submission.first, "count": submission.count}
        for submission in record.submissions
    ]
    return {**plan, "folder": record.folder, "submissions": submissions}


def _group_json(plan: Plan, group: JobGroup, cluster_id: str) -> dict[str, object]:
    shape = group.shape
    return {
        "name": group.group,
        "gpus": group.gpus,
        "workers": group.n_workers,
        "worker_names": plan.worker_names(cluster_id, group),
        "worker_threads": shape.worker_threads,
        "worker_memory": shape.worker_memory,
        **_worker_kind_json(group),
        "environment": group.profile.environment.name,
        "container": _container_json(group.container),
        "python": group.python,
        "start_workers": plan.start_groups.get(group.group),
    }


def _worker_kind_json(group: JobGroup) -> dict[str, object]:
    if not group.gpus:
        return {"worker_class": "nanny", "gpus_per_worker": 0, "workers_per_gpu": 0}
    workers = group.profile.workers
    return {
        "worker_class": workers.worker_class,
        "gpus_per_worker": workers.gpus_per_worker,
        "workers_per_gpu": workers.workers_per_gpu,
    }


def _jobs_json(jobs: JobGroup) -> dict[str, object]:
    shape = jobs.shape
    return {
        "group": jobs.group,
        "count": shape.jobs,
        "queue": jobs.queue,
        "nodes": shape.nodes,
        "gpus": shape.gpus,
        "cpus": shape.cpus,
        "memory": shape.memory,
        "walltime": jobs.walltime,
        "container": _container_json(jobs.container),
        "python": jobs.python,
        "directives": list(jobs.lines),
        "submit_arguments": list(jobs.submit_arguments),
    }


def _distinct(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, texts)))


def _software_rows(
    name: str, plan: Plan, text_of: Callable[[JobGroup], str]
) -> Iterator[tuple[str, str]]:
    """Yield one row if all jobs have the same text, which may be "", else a row for each group."""
    texts = [(_label(jobs), text_of(jobs)) for jobs in plan.all_jobs]
    _, first = texts[0]
    if all(text == first for _, text in texts):
        texts = [("", first)]
    for label, text in texts:
        if label or text:
            yield f"{label}{name}", text or "none"


def _container_json(container: Container | None) -> dict[str, str] | None:
    if container is None:
        return None
    return {"runtime": container.runtime.name, "image": container.image}


def _jobs_row(jobs: JobGroup) -> tuple[str, str]:
    shape = jobs.shape
    name = "head" if jobs.group == HEAD else f"{_label(jobs)}jobs"
    return name, f"{shape.jobs} x ({', '.join(_request(jobs))}) in queue {jobs.queue}"


def _request(jobs: JobGroup) -> Iterator[str]:
    shape = jobs.shape
    yield plural(shape.nodes, "node")
    yield plural(shape.gpus, "GPU") if shape.gpus else "no GPU"
    if shape.cpus:
        yield plural(shape.cpus, "CPU")
    if shape.memory:
        yield short_size_text(shape.memory)
    yield walltime_text(jobs.walltime) if jobs.walltime else "no walltime"


def _gpus_text(plan: Plan) -> str:
    if not plan.gpus:
        return "none: CPU workers"
    sizes = Counter[WorkerSize]()
    for group in plan.groups:
        sizes[group.profile.workers.size] += group.n_workers if group.gpus else 0
    texts = [_size_text(size, workers) for size, workers in sizes.items() if workers]
    return f"{plan.gpus} requested, {', '.join(texts)}"


def _size_text(size: WorkerSize, workers: int) -> str:
    if size.usual:
        return f"{workers} with a worker of {'its' if workers == 1 else 'their'} own"
    if size.gpus > 1:
        return f"{plural(workers, 'worker')} with {size.gpus} of them each"
    return f"{workers} workers, {size.per_gpu} on each"


def _label(group: JobGroup) -> str:
    return f"{group.group}: " if group.group else ""


def _group_rows(plan: Plan, group: JobGroup, cluster_id: str) -> Iterator[tuple[str, str]]:
    label, names = _label(group), plan.worker_names(cluster_id, group)
    if len(names) > SHOWN_NAMES:
        names = [*names[:4], "…", names[-1]]
    yield f"{label}workers", f"{group.n_workers}: {', '.join(names)}"
    yield f"{label}each worker", _worker_text(group)
    yield f"{label}memory plan", memory_text(plan, group)


def _head_text(plan: Plan) -> str:
    if plan.head is None and plan.profile.groups:
        groups = [group.group for group in plan.groups if plan.may_be_head(group)]
        return f"in the job that starts first, of group {' or '.join(groups)}"
    layout = plan.layout_of(plan.groups[0])
    return layout.head_text(plan.groups[0].shape, plan.head is not None)


def _worker_text(group: JobGroup) -> str:
    workers, shape = group.profile.workers, group.shape
    kind, limit = "CPU worker", "no memory limit of its own"
    if group.gpus:
        kind = _WORKER_CLASSES[workers.worker_class]
        if workers.gpus_per_worker > 1:
            kind += f", {workers.gpus_per_worker} GPUs"
        elif workers.workers_per_gpu > 1:
            kind += f", 1/{workers.workers_per_gpu} of a GPU"
            if workers.mps:
                kind += " through MPS"
    if shape.worker_memory:
        limit = f"memory limit {short_size_text(shape.worker_memory)}"
    return f"{kind}, {plural(shape.worker_threads, 'thread')}, {limit}"


def _transport_text(plan: Plan) -> str:
    """Return protocols, encryption and network interface."""
    protocols = [
        _PROTOCOLS.get(name, f"{name}, not encrypted") for name in plan.transport.protocols
    ]
    choice = ", else ".join(protocols)
    if "ucxx" in plan.transport.protocols and len(protocols) > 1:
        choice += ": the fastest one that works"
    return f"{choice}; interface: {_interface_text(plan)}"


def _interface_text(plan: Plan) -> str:
    default = "this machine only" if plan.site.one_machine else "chosen in the job"
    return _distinct(plan.transport_of(jobs).interface or default for jobs in plan.all_jobs)


def _run_text(plan: Plan) -> str:
    if not plan.profile.run:
        return _ends_text(plan)
    command = shlex.join(plan.profile.run)
    wanted = "the first worker" if plan.start_workers == 1 else f"{plan.start_workers} workers"
    wanted += "".join(f", {number} of group {name}" for name, number in plan.start_groups.items())
    launcher = next((jobs.run_launcher[0] for jobs in plan.all_jobs if jobs.run_launcher), "")
    through = f" through {launcher}" if launcher else ""
    return f"{command} (in {plan.workdir}, starts{through} with {wanted})"


def _ends_text(plan: Plan) -> str:
    """Return what ends a cluster without a command, whichever comes first."""
    ends = [f"it is {RULES[rule]} for too long" for rule in plan.lifetime.end_after]
    if any(jobs.walltime for jobs in plan.all_jobs):
        ends.append("its walltime is over")
    ends.append("`gpujobs cancel` is called")
    return f"no command: the cluster runs until {alternatives(ends)}"


def _limits_text(plan: Plan) -> str:
    texts: dict[str, None] = {}
    for jobs in plan.all_jobs:
        job = Job(jobs.shape.nodes, jobs.shape.gpus, jobs.walltime)
        queue = plan.site.queues[jobs.queue_key]
        texts.update(dict.fromkeys(limit_texts(queue, job)))
        texts.update(dict.fromkeys(_limits_of_user(plan, jobs)))
    if plan.site.max_queued_jobs:
        total = sum(jobs.shape.jobs for jobs in plan.all_jobs)
        texts[f"queued jobs {total} <= {plan.site.max_queued_jobs}"] = None
    return ", ".join(texts) or "the site states none"


def _limits_of_user(plan: Plan, jobs: JobGroup) -> Iterator[str]:
    """Yield the limits of all jobs of the plan in the queue of ``jobs``."""
    others = [group.queued for group in plan.all_jobs if group is not jobs]
    for limit in job_limits(plan.site, jobs.queue_key, jobs.shape.gpus, others):
        if limit.of_queue:
            counted = "GPUs of one user" if limit.gpus else "jobs"
            yield f"{counted} {limit.counted(jobs.shape.jobs)} <= {limit.limit}"


def _notes(plan: Plan) -> list[str]:
    """Return the notes of the plan, and one if rates between its jobs depend on the isolation."""
    several = plan.jobs_with_workers > 1 and any(_shares_nodes(plan, jobs) for jobs in plan.groups)
    if several and "ucxx" in plan.transport.protocols:
        return [*plan.notes, _ISOLATION]
    return list(plan.notes)


def _shares_nodes(plan: Plan, jobs: JobGroup) -> bool:
    """Return whether other jobs may have GPUs of the same nodes."""
    queue = plan.site.queues[jobs.queue_key]
    if plan.scheduler.on_this_machine or queue.exclusive or not jobs.shape.gpus:
        return False
    return jobs.shape.gpus_per_node < (queue.gpus_per_node or 0)
