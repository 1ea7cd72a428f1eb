"""Distributed data parallel training (DDP) with PyTorch on the workers of a cluster.

The workers need PyTorch and no gpujobs: functions are sent to them by value. This process needs no
PyTorch.
"""

from __future__ import annotations

import datetime
import os
import pickle
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from .errors import GpujobsError, JobFailedError

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["run_ddp"]

T = TypeVar("T")


def run_ddp(
    client: Client,
    fn: Callable[..., T],
    *args: object,
    n_workers: int | None = None,
    backend: str | None = None,
    timeout: float = 600.0,
) -> list[T]:
    """Run ``fn(*args)`` on the workers at the same time, as the ranks of a PyTorch process group.

    Each worker is one rank. The ranks are all workers with GPUs, or all workers if there is none
    with a GPU, or the first ``n_workers`` of them; those of one node have consecutive ranks. A rank
    starts when its worker is free. Returns the results in the order of the ranks.

    ``fn`` has the variables MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK, and an
    initialized process group: ``backend``, by default nccl with GPUs, else gloo. LOCAL_RANK is the
    number of the rank's GPU among those that its process sees. It is always 0, because each
    worker sees its own GPU first. ``timeout``: seconds that a rank waits for the others.

    PyTorch's own traffic is not encrypted, and its ports are not those of the site's
    ``network.ports``.

    Raises GpujobsError if there are too few workers, or if PyTorch is missing in them or cannot use
    their GPUs; JobFailedError if a rank fails or its worker is lost. The workers of all ranks are
    restarted then, because the other ranks would wait for the lost one. Dask computes again the
    results that they held.
    """
    workers = _workers(client)
    wanted = len(workers) if n_workers is None else n_workers
    if not 1 <= wanted <= len(workers):
        message = f"run_ddp needs {max(wanted, 1)} workers; {len(workers)} are connected"
        raise GpujobsError(message, hint=f"client.wait_for_workers({max(wanted, 1)}) before it")
    workers = workers[:wanted]
    backend = _backend(client, workers, backend)
    (port,) = _call(client, workers[:1], _Call(_listen))
    group = {
        "MASTER_ADDR": workers[0].host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(workers)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    ranks = [{**group, "RANK": str(rank)} for rank in range(len(workers))]
    calls = [_Call(_rank, fn, args, variables, backend, timeout) for variables in ranks]
    futures = _start(client, workers, calls)
    try:
        return _collect(client, workers, futures)
    except BaseException:  # also Ctrl-C; a rank may wait in a thread that cannot be stopped
        client.cancel(futures)
        connected = client.nthreads()
        left = [worker.address for worker in workers if worker.address in connected]
        client.restart_workers(left, raise_for_error=False)
        raise


class _Worker(NamedTuple):
    host: str
    order: tuple[object, ...]
    """Of the numbers in the name: svd-7f3a-2 is before svd-7f3a-10."""
    address: str
    name: str
    gpus: float


def _workers(client: Client) -> list[_Worker]:
    """Return the workers with GPUs, or all if there are none, in the order of the ranks."""
    # Client.scheduler_info returns an attribute that a periodic callback replaces by one without
    # workers, at any moment.
    found = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    workers = []
    for address, worker in found.items():
        name, host = str(worker["name"]), urlsplit(address).hostname or ""
        order = tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))
        workers.append(_Worker(host, order, address, name, worker["resources"].get("GPU", 0)))
    return sorted([worker for worker in workers if worker.gpus] or workers)


def _backend(client: Client, workers: Sequence[_Worker], wanted: str | None) -> str:
    """Return ``wanted``, else nccl with GPUs, else gloo. Raises GpujobsError if it cannot work."""
    found = _call(client, workers, _Call(_look))
    for worker, (version, problem, cuda) in zip(workers, found, strict=True):
        if problem:
            message = f"worker {worker.name} cannot import torch: {problem}"
            raise GpujobsError(message, hint="install PyTorch in the environment of the jobs")
        if worker.gpus and not cuda and not wanted:
            message = f"worker {worker.name} has a GPU that its PyTorch {version} cannot use"
            hint = "install PyTorch with CUDA in the jobs' environment, or use backend='gloo'"
            raise GpujobsError(message, hint=hint)
    return wanted or ("nccl" if all(cuda for _, _, cuda in found) else "gloo")


class _Call:
    """A call that is executed when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.arguments


def _start(client: Client, workers: Iterable[_Worker], calls: Iterable[_Call]) -> list[Future]:
    """Start one call on each of the workers; the functions of this module are sent by value."""
    import cloudpickle

    run = uuid.uuid4().hex[:8]
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        payloads = [cloudpickle.dumps(call) for call in calls]
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    return [
        client.submit(pickle.loads, payload, workers=[worker.address], key=f"ddp-{run}-{rank}")
        for rank, (worker, payload) in enumerate(zip(workers, payloads, strict=True))
    ]


def _call(client: Client, workers: Sequence[_Worker], call: _Call) -> list[Any]:
    """Return the results of the same call on each of the workers."""
    return _collect(client, workers, _start(client, workers, [call] * len(workers)))


def _collect(client: Client, workers: Sequence[_Worker], futures: Sequence[Future]) -> list[Any]:
    """Wait for all ranks; return their results. Raises JobFailedError at the first that fails."""
    from distributed import wait

    def check_connected() -> None:  # dask would wait for a lost worker
        connected = client.nthreads()
        for rank in pending:
            if workers[rank].address not in connected:
                message = f"rank {rank}: worker {workers[rank].name} was lost"
                hint = f"gpujobs logs ID --worker {workers[rank].name}"
                raise JobFailedError(message, hint=hint)

    pending = dict(enumerate(futures))
    while pending:
        try:
            wait(list(pending.values()), timeout=1, return_when="FIRST_COMPLETED")
        except TimeoutError:
            check_connected()
        for rank in [rank for rank, future in pending.items() if future.done()]:
            if error := futures[rank].exception():
                for _ in range(3):  # a lost worker also makes the other ranks fail, at once
                    check_connected()
                    time.sleep(1)
                where = f"rank {rank} of {len(workers)} on worker {workers[rank].name}"
                raise JobFailedError(f"{where}: {type(error).__name__}: {error}") from error
            del pending[rank]
    return list(client.gather(list(futures)))


# -- in the workers --------------------------------------------------------------------------------
def _look() -> tuple[str, str, bool]:
    """Return the version of PyTorch, why it cannot be imported, and whether it has CUDA."""
    try:
        import torch
    except Exception as error:
        return "", str(error), False
    return str(torch.__version__), "", torch.cuda.is_available()


def _listen() -> int:
    """Start the store of the group in this process, that of rank 0; return its port.

    The port is chosen and taken at once: nothing else can take it before the ranks start. The
    rank uses this store, because PyTorch has one store per port in a process.
    """
    from distributed import get_worker
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    vars(get_worker())["_gpujobs_store"] = store  # it listens as long as it is kept
    return int(store.port)


def _rank(
    fn: Callable[..., T],
    args: tuple[object, ...],
    variables: dict[str, str],
    backend: str,
    timeout: float,
) -> T:
    """Run one rank in its worker. If it fails, the worker will be restarted."""
    import psutil
    import torch
    from distributed import get_worker
    from torch import distributed

    own = urlsplit(get_worker().address).hostname
    for interface, addresses in psutil.net_if_addrs().items():
        if own in [address.address for address in addresses]:
            # Else they resolve the name of the node, which may have an address in another network.
            names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
            variables |= {name: names[name] for name in names if name not in os.environ}
    before = dict(os.environ)
    os.environ.update(variables)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    result = fn(*args)
    distributed.barrier()  # rank 0 serves the addresses of the others until all are done
    distributed.destroy_process_group()
    vars(get_worker()).pop("_gpujobs_store", None)
    for name in variables:
        del os.environ[name]
    os.environ.update({name: before[name] for name in variables if name in before})
    return result
