"""What people and programs read of a plan."""

from __future__ import annotations

import shlex

from ..injob.names import HEAD
from ..planning.plan import JobGroup, Plan
from ..text import plural, size_text, walltime_text


def plan_text(plan: Plan, cluster: str) -> str:
    """Return what would be submitted, for people."""
    shape = plan.workers.shape
    working = plan.n_workers if shape.gpus else 0
    names = plan.worker_names(cluster)
    shown = ", ".join(names if len(names) <= 8 else [*names[:4], "…", names[-1]])
    rows = [
        ("cluster", f"{cluster} on site {plan.site_name} ({plan.scheduler.name})"),
        *(("head" if jobs.group == HEAD else "jobs", _jobs_text(jobs)) for jobs in plan.all_jobs),
        (
            "GPUs",
            f"{plan.gpus} asked for, {working} with a worker of their own"
            if shape.gpus
            else "none: CPU workers",
        ),
        ("workers", f"{plan.n_workers}: {shown}"),
        ("each worker", _worker_text(plan)),
        ("memory plan", _memory_text(plan)),
        ("dask scheduler", plan.layout.head_text(shape, plan.head is not None)),
        ("network", transport_text(plan)),
        ("run", _run_text(plan)),
        ("limits", _limits_text(plan)),
    ]
    width = max(len(name) for name, _ in rows)
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
    return text + "".join(f"\nnote: {note}" for note in plan.notes)


def plan_json(plan: Plan, cluster: str) -> dict[str, object]:
    """Return the same for programs. Memory in bytes, times in seconds."""
    shape = plan.workers.shape
    return {
        "version": 1,
        "cluster": cluster,
        "site": plan.site_name,
        "scheduler": plan.scheduler.name,
        "gpus": plan.gpus,
        "workers": plan.n_workers,
        "worker_names": plan.worker_names(cluster),
        "jobs": [
            {
                "group": jobs.group,
                "count": jobs.shape.jobs,
                "queue": jobs.queue,
                "nodes": jobs.shape.nodes,
                "gpus": jobs.shape.gpus,
                "cpus": jobs.shape.cpus,
                "memory": jobs.shape.memory,
                "walltime": jobs.walltime,
                "directives": list(jobs.lines),
            }
            for jobs in plan.all_jobs
        ],
        "worker_threads": plan.profile.workers.threads,
        "worker_memory": shape.worker_memory,
        "worker_class": plan.profile.workers.worker_class if shape.gpus else "nanny",
        "head": "own job" if plan.head else "first job",
        "layout": plan.layout.name,
        "protocols": list(plan.transport.protocols),
        "encrypted": plan.transport.encrypted,
        "interface": plan.transport.interface,
        "run": list(plan.profile.run),
        "start_workers": plan.start_workers,
        "notes": list(plan.notes),
    }


def transport_text(plan: Plan) -> str:
    """Return protocol, encryption and interface in words."""
    transport = plan.transport
    interface = transport.interface or (
        "this machine only" if plan.scheduler.on_this_machine else "found in the job"
    )
    return f"{', else '.join(_protocol_text(name) for name in transport.protocols)}; interface: {interface}"


def _protocol_text(name: str) -> str:
    encrypted = {"tls": "tcp, encrypted (TLS)", "wss": "ws, encrypted (TLS)"}
    return encrypted.get(name, f"{name}, not encrypted")


def _memory_text(plan: Plan) -> str:
    """Return what happens to the memory of each GPU, with sizes where the site knows it."""
    workers, total = plan.profile.workers, plan.site.queues[plan.workers.queue_key].gpu_memory
    if not plan.gpus or workers.worker_class != "cuda":
        return "no GPU memory is managed"

    def amount(value: str) -> str:
        if "." in value or value in ("0", "1"):
            part = f"{float(value):.0%} of the GPU"
            return (
                f"{size_text(int(total * float(value)) // 2**20 * 2**20)} ({part})"
                if total
                else part
            )
        return size_text(int(value))

    parts = [f"GPU {size_text(total)}"] if total else []
    if workers.enable_cudf_spill:
        parts.append("cuDF spills by itself")
    else:
        parts.append(f"spills to host above {amount(workers.device_memory_limit or '0.8')}")
    if workers.rmm_pool_size:
        most = (
            f", at most {amount(workers.rmm_maximum_pool_size)}"
            if workers.rmm_maximum_pool_size
            else ""
        )
        parts.append(
            f"RMM {'asynchronous' if workers.rmm_async else 'pool'} of {amount(workers.rmm_pool_size)}{most}"
        )
    elif workers.rmm_async:
        parts.append("RMM's asynchronous allocator")
    if workers.rmm_managed_memory:
        parts.append("managed memory")
    return ", ".join(parts)


def _jobs_text(jobs: JobGroup) -> str:
    shape = jobs.shape
    parts = [plural(shape.nodes, "node"), plural(shape.gpus, "GPU") if shape.gpus else "no GPU"]
    parts += [f"{shape.cpus} CPUs"] if shape.cpus else []
    parts += [size_text(shape.memory)] if shape.memory else []
    parts += [walltime_text(jobs.walltime)] if jobs.walltime else ["no walltime"]
    return f"{shape.jobs} x ({', '.join(parts)}) in queue {jobs.queue}"


def _worker_text(plan: Plan) -> str:
    workers, memory = plan.profile.workers, plan.workers.shape.worker_memory
    kind = {"cuda": "CUDAWorker", "nanny": "plain worker pinned to its GPU"}[workers.worker_class]
    kind = kind if plan.gpus else "CPU worker"
    limit = f"memory limit {size_text(memory)}" if memory else "no memory limit of its own"
    return f"{kind}, {plural(workers.threads, 'thread')}, {limit}"


def _run_text(plan: Plan) -> str:
    if not plan.profile.run:
        return "nothing: the cluster stays until its walltime or `gpujobs cancel`"
    return f"{shlex.join(plan.profile.run)} (in {plan.workdir}, with {plural(plan.start_workers, 'worker')} or more)"


def _limits_text(plan: Plan) -> str:
    checked = []
    for jobs in plan.all_jobs:
        queue = plan.site.queues[jobs.queue_key]
        if queue.max_walltime and jobs.walltime:
            checked.append(
                f"walltime {walltime_text(jobs.walltime)} <= {walltime_text(queue.max_walltime)}"
            )
        if queue.max_gpus:
            checked.append(f"GPUs of a job {jobs.shape.gpus} <= {queue.max_gpus}")
        if queue.max_nodes:
            checked.append(f"nodes of a job {jobs.shape.nodes} <= {queue.max_nodes}")
        if queue.max_jobs:
            checked.append(f"jobs {jobs.shape.jobs} <= {queue.max_jobs}")
    return ", ".join(dict.fromkeys(checked)) or "the site states none"
