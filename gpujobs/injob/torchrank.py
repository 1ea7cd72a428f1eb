"""The ranks of `gpujobs.torch.run_ddp`, in the workers.

These functions are sent by value: the workers' environment may have no gpujobs.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """A process group, whose rank 0 listens at ``host`` and ``port``."""

    size: int
    host: str
    port: int
    backend: str
    timeout: float


def look() -> tuple[str, bool, bool]:
    """Return the version of PyTorch or why it cannot be imported, whether it is there, and CUDA."""
    try:
        import torch
    except Exception as error:
        return str(error), False, False
    return str(torch.__version__), True, torch.cuda.is_available()


def listen() -> int:
    """Start the store of the group in this process, that of rank 0; return its port.

    The port is chosen and taken at once: nothing else can take it before the ranks start. The
    rank uses this store, because PyTorch has one store per port in a process.
    """
    from distributed import get_worker
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    vars(get_worker())["_gpujobs_store"] = store  # it listens as long as it is kept
    return int(store.port)


def _interface(host: str) -> str:
    """Return the network interface of this node that has the address ``host``, or ""."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if host in [address.address for address in addresses]:
            return str(name)
    return ""


def _variables(group: Group, rank: int, own_host: str) -> dict[str, str]:
    """Return the variables of a rank, those of torchrun with one process on each node."""
    variables = {
        "MASTER_ADDR": group.host,
        "MASTER_PORT": str(group.port),
        "RANK": str(rank),
        "WORLD_SIZE": str(group.size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    if interface := _interface(own_host):
        # Else they resolve the name of the node, which may have an address in another network.
        own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        variables.update({name: own[name] for name in own if name not in os.environ})
    return variables


def run_rank(fn: Callable[..., T], args: tuple[object, ...], group: Group, rank: int) -> T:
    """Run one rank in its worker. If it fails, the worker will be restarted."""
    import torch
    from distributed import get_worker
    from torch import distributed

    variables = _variables(group, rank, urlsplit(get_worker().address).hostname or "")
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    timeout = datetime.timedelta(seconds=group.timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    distributed.init_process_group(group.backend, timeout=timeout)
    result = fn(*args)
    distributed.barrier()  # rank 0 serves the addresses of the others until all are done
    distributed.destroy_process_group()
    vars(get_worker()).pop("_gpujobs_store", None)
    for name in variables:
        del os.environ[name]
    os.environ.update(before)
    return result
