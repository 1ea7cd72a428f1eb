"""Distributed data parallel training (DDP) with PyTorch on the workers of a cluster.

The workers need PyTorch and no gpujobs; this process needs no PyTorch.
"""

from __future__ import annotations

import pickle
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from .errors import GpujobsError, JobFailedError
from .injob import torchrank

if TYPE_CHECKING:
    from distributed import Client, Future

__all__ = ["run_ddp"]

T = TypeVar("T")
_INTERVAL = 1.0
"""Seconds between two checks that no worker is lost."""
_CHECKS = 3
"""Checks after a rank has failed: a lost worker also makes the other ranks fail, at once."""


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
    places = _choose(_places(client), n_workers)
    found = _probe(client, places)
    backend = backend or _backend(places, found)
    (port,) = _call(client, "ddp-store", torchrank.listen, places[:1])
    group = torchrank.Group(len(places), places[0].host, port, backend, timeout)
    calls = [(fn, args, group, rank) for rank in range(len(places))]
    futures = _start(client, "ddp", torchrank.run_rank, places, calls)
    try:
        return _collect(client, futures, places)
    except BaseException:  # also Ctrl-C
        _stop(client, futures, places)
        raise


@dataclass(frozen=True)
class _Place:
    """A worker that can be a rank."""

    address: str
    name: str
    gpus: float

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or ""

    @property
    def order(self) -> tuple[object, ...]:
        """Ranks of one node are consecutive; svd-7f3a-2 is before svd-7f3a-10."""
        parts = re.split(r"(\d+)", self.name)
        return self.host, [int(part) if part.isdigit() else part for part in parts]


@dataclass(frozen=True)
class _Found:
    """The environment of a worker."""

    torch: str
    """Version of PyTorch, or the reason why it cannot be imported."""
    imported: bool
    cuda: bool


def _places(client: Client) -> list[_Place]:
    """Return the workers of the cluster: those with GPUs, or all if there are none."""
    # Client.scheduler_info returns an attribute that a periodic callback replaces by one without
    # workers, at any moment.
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    places = [
        _Place(address, str(worker["name"]), worker["resources"].get("GPU", 0))
        for address, worker in workers.items()
    ]
    return [place for place in places if place.gpus] or places


def _choose(places: Sequence[_Place], n_workers: int | None) -> list[_Place]:
    """Return the worker of each rank. Raises GpujobsError."""
    wanted = len(places) if n_workers is None else n_workers
    if wanted < 1 or wanted > len(places):
        message = f"run_ddp needs {max(wanted, 1)} workers; {len(places)} are connected"
        raise GpujobsError(message, hint=f"client.wait_for_workers({max(wanted, 1)}) before it")
    return sorted(places, key=lambda place: place.order)[:wanted]


def _probe(client: Client, places: Sequence[_Place]) -> list[_Found]:
    """Return the environment of each worker. Raises GpujobsError without PyTorch."""
    answers = _call(client, "ddp-probe", torchrank.look, places)
    found = [_Found(*answer) for answer in answers]
    for place, its in zip(places, found, strict=True):
        if not its.imported:
            hint = "install PyTorch in the environment of the jobs"
            raise GpujobsError(f"worker {place.name} cannot import torch: {its.torch}", hint=hint)
    return found


def _backend(places: Sequence[_Place], found: Sequence[_Found]) -> str:
    """Return nccl with GPUs, else gloo. Raises GpujobsError if GPUs would not be used."""
    for place, its in zip(places, found, strict=True):
        if place.gpus and not its.cuda:
            message = f"worker {place.name} has a GPU that its PyTorch {its.torch} cannot use"
            hint = "install PyTorch with CUDA in the jobs' environment, or use backend='gloo'"
            raise GpujobsError(message, hint=hint)
    return "nccl" if all(its.cuda for its in found) else "gloo"


class _Call:
    """A call that is executed when it is unpickled."""

    def __init__(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.function, self.arguments


def _start(
    client: Client,
    name: str,
    function: Callable[..., object],
    places: Sequence[_Place],
    calls: Sequence[tuple[object, ...]],
) -> list[Future]:
    """Call ``function`` on each of the workers, with the arguments of its entry of ``calls``.

    The functions are sent by value: the environment of jobs may have no gpujobs.
    """
    import cloudpickle

    run = uuid.uuid4().hex[:8]
    cloudpickle.register_pickle_by_value(torchrank)
    try:
        payloads = [cloudpickle.dumps(_Call(function, call)) for call in calls]
    finally:
        cloudpickle.unregister_pickle_by_value(torchrank)
    return [
        client.submit(pickle.loads, payload, workers=[place.address], key=f"{name}-{run}-{rank}")
        for rank, (place, payload) in enumerate(zip(places, payloads, strict=True))
    ]


def _call(
    client: Client, name: str, function: Callable[[], T], places: Sequence[_Place]
) -> list[T]:
    """Return the results of ``function()`` on each of the workers."""
    futures = _start(client, name, function, places, [()] * len(places))
    return _collect(client, futures, places)


def _collect(client: Client, futures: Sequence[Future], places: Sequence[_Place]) -> list[T]:
    """Wait for all ranks; return their results. Raises JobFailedError at the first that fails."""
    from distributed import wait

    pending = dict(enumerate(futures))
    while pending:
        try:
            wait(list(pending.values()), timeout=_INTERVAL, return_when="FIRST_COMPLETED")
        except TimeoutError:
            _check_connected(client, {rank: places[rank] for rank in pending})
        ended = {rank: future for rank, future in pending.items() if future.done()}
        for rank, future in ended.items():
            if error := future.exception():
                for _ in range(_CHECKS):
                    _check_connected(client, {rank: places[rank] for rank in pending})
                    time.sleep(_INTERVAL)
                where = f"rank {rank} of {len(places)} on worker {places[rank].name}"
                raise JobFailedError(f"{where}: {type(error).__name__}: {error}") from error
            del pending[rank]
    return list(client.gather(list(futures)))


def _check_connected(client: Client, places: dict[int, _Place]) -> None:
    """Raise JobFailedError if a worker is lost: dask would wait for it."""
    connected = client.nthreads()
    for rank, place in places.items():
        if place.address not in connected:
            message = f"rank {rank}: worker {place.name} was lost"
            raise JobFailedError(message, hint=f"gpujobs logs ID --worker {place.name}")


def _stop(client: Client, futures: Sequence[Future], places: Sequence[_Place]) -> None:
    """Stop the ranks, which may wait for another one in a thread that cannot be stopped."""
    client.cancel(list(futures))
    connected = client.nthreads()
    left = [place.address for place in places if place.address in connected]
    client.restart_workers(left, raise_for_error=False)
