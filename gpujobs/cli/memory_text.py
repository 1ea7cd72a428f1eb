"""How `gpujobs plan` describes the use of GPU memory."""

from __future__ import annotations

from collections.abc import Iterator

from ..config.workers import Workers
from ..planning.plan import JobGroup, Plan
from ..planning.workeroptions import DEVICE_MEMORY_LIMIT, with_shares
from ..text import measured_size_text, size_text

OFF = "0"
"""dask-cuda's value for no limit and for no pool."""


def memory_text(plan: Plan, group: JobGroup) -> str:
    """Return spilling and RMM's settings of each worker, in bytes if the site states its memory."""
    workers = with_shares(group.profile.workers)
    if not group.gpus or workers.worker_class != "cuda":
        return "no GPU memory is managed"
    return ", ".join(_parts(workers, plan.site.queues[group.queue_key].gpu_memory))


def _parts(workers: Workers, total: int | None) -> Iterator[str]:
    if total:
        yield f"GPU {size_text(total)}"
    if workers.enable_cudf_spill:
        yield "cuDF spills by itself"
    else:
        limit = workers.device_memory_limit or DEVICE_MEMORY_LIMIT
        yield (
            "no spilling to host"
            if limit == OFF
            else f"spills to host above {_amount(limit, total)}"
        )
    if workers.rmm_pool_size not in (None, OFF):
        yield _pool(workers, total)
    elif workers.rmm_async:
        yield "RMM's asynchronous allocator"
    if workers.rmm_managed_memory:
        yield "managed memory"


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
