"""Functions as the ranks of a PyTorch process group, on the workers of a cluster.

Copy this file beside your program. The workers need PyTorch: functions are sent to them by value.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")


class RankError(RuntimeError):
    """The ranks cannot start, or one of them has failed."""


def run_ddp(
    client: Client,
    fn: Callable[..., T],
    *args: object,
    n_workers: int | None = None,
    backend: str | None = None,
    timeout: float = 600.0,
) -> list[T]:
    """Run ``fn(*args)`` on the workers at the same time, as the ranks of a PyTorch process group.

    The ranks are all workers with GPUs, or all workers if there is none with a GPU, or the first
    ``n_workers`` of them. A rank starts when its worker is free. ``fn`` has the variables
    MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK, and an initialized process group:
    ``backend``, by default nccl with GPUs, else gloo. ``timeout``: seconds that a rank waits for
    the others. Returns the results in the order of the ranks.

    Raises RankError if there are too few workers, if PyTorch is missing in them or cannot use their
    GPUs, if a rank fails or if its worker is lost. The workers of all ranks are restarted if a rank
    has failed, because the other ranks would wait for it.
    """
    names, gpus = _workers(client)
    wanted = len(names) if n_workers is None else n_workers
    if not 1 <= wanted <= len(names):
        message = f"run_ddp needs {max(wanted, 1)} workers; only {len(names)} connected"
        raise RankError(f"{message}: call client.wait_for_workers before it")
    names = dict(list(names.items())[:wanted])
    found = _run(client, names, [_Call(_look, gpus and not backend)] * wanted)
    for name, (problem, _) in zip(names.values(), found, strict=True):
        if problem:
            raise RankError(f"worker {name} {problem}")
    backend = backend or ("nccl" if all(cuda for _, cuda in found) else "gloo")
    first = next(iter(names))
    (port,) = _run(client, {first: names[first]}, [_Call(_listen)])
    group = {"MASTER_ADDR": urlsplit(first).hostname, "MASTER_PORT": str(port)}
    group |= {"WORLD_SIZE": str(wanted), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks = [{**group, "RANK": str(rank)} for rank in range(wanted)]
    try:
        return _run(client, names, [_Call(_rank, fn, args, own, backend, timeout) for own in ranks])
    except BaseException:  # also Ctrl-C; a rank may wait in a thread that cannot be stopped
        connected = client.nthreads()
        left = [address for address in names if address in connected]
        client.restart_workers(left, raise_for_error=False)
        raise


def _workers(client: Client) -> tuple[dict[str, str], bool]:
    """Return the names of the workers by address, and whether they are those with GPUs."""
    # Client.scheduler_info returns an attribute that a periodic callback replaces by one without
    # workers, at any moment.
    found = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    gpus = {address: one for address, one in found.items() if one["resources"].get("GPU")}
    names = {address: str(one["name"]) for address, one in (gpus or found).items()}
    order = sorted(names, key=lambda address: (str(urlsplit(address).hostname), names[address]))
    return {address: names[address] for address in order}, bool(gpus)


class _Call:
    """A call that is executed when it is unpickled."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.arguments


def _run(client: Client, names: Mapping[str, str], calls: Sequence[_Call]) -> list[Any]:
    """Run a call on each of the workers; return the results. Raises RankError."""
    import cloudpickle
    from distributed import wait

    run, module = uuid.uuid4().hex[:8], sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        payloads = [cloudpickle.dumps(call) for call in calls]
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    futures = [
        client.submit(pickle.loads, payload, workers=[address], key=f"ddp-{run}-{rank}")
        for rank, (address, payload) in enumerate(zip(names, payloads, strict=True))
    ]
    try:
        while pending := [future for future in futures if future.status != "finished"]:
            with contextlib.suppress(TimeoutError):
                wait(pending, timeout=1, return_when="FIRST_COMPLETED")
            _check(client, names, futures)
        return list(client.gather(futures))
    except BaseException:
        client.cancel(futures)
        raise


def _check(client: Client, names: Mapping[str, str], futures: Sequence[Future]) -> None:
    """Raise RankError if a worker was lost, or else if a rank has failed."""
    failed = [rank for rank, future in enumerate(futures) if future.status == "error"]
    for _ in range(1 + 3 * bool(failed)):  # a lost worker also makes the other ranks fail, at once
        connected = client.nthreads()
        for rank, (address, name) in enumerate(names.items()):
            if address not in connected and futures[rank].status != "finished":
                hint = f"gpujobs logs ID --worker {name}"
                raise RankError(f"rank {rank}: worker {name} was lost ({hint})")
        time.sleep(bool(failed))
    for rank in failed:
        error = futures[rank].exception()
        where = f"rank {rank} of {len(names)} on worker {list(names.values())[rank]}"
        raise RankError(f"{where}: {type(error).__name__}: {error}") from error


# -- in the workers --------------------------------------------------------------------------------
def _look(needs_cuda: bool) -> tuple[str, bool]:
    """Return why PyTorch cannot be used here, and whether it has CUDA."""
    try:
        import torch
    except Exception as error:
        return f"cannot import torch: {error}", False
    if needs_cuda and not torch.cuda.is_available():
        return f"has a GPU that its PyTorch {torch.__version__} cannot use", False
    return "", torch.cuda.is_available()


def _listen() -> int:
    """Start the store of the group in this process, that of rank 0; return its port.

    The port is chosen and taken at once. The rank uses this store, because PyTorch has one store
    per port in a process.
    """
    from distributed import get_worker
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    vars(get_worker())["_ddp_store"] = store  # it listens as long as it is kept
    return int(store.port)


def _rank(
    fn: Callable[..., T], args: Sequence[object], own: dict[str, str], backend: str, timeout: float
) -> T:
    """Run one rank in its worker. If it fails, the worker will be restarted."""
    import psutil
    import torch
    from distributed import get_worker
    from torch import distributed

    host = urlsplit(get_worker().address).hostname
    for interface, addresses in psutil.net_if_addrs().items():
        if host in [address.address for address in addresses]:
            # Else they resolve the name of the node, which may have an address in another network.
            named = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
            own |= {name: named[name] for name in named if name not in os.environ}
    os.environ.update(own)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    result = fn(*args)
    distributed.barrier()  # rank 0 serves the addresses of the others until all are done
    distributed.destroy_process_group()
    vars(get_worker()).pop("_ddp_store", None)
    for name in own:
        del os.environ[name]
    return result
