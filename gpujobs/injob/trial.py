"""Measure how fast GPU memory moves between two processes, for each protocol.

One process, the peer, sends blocks to those that connect. The other one measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from .folder import Folder
from .log import log
from .network import initialise_ucx, own_address
from .options import TrialOptions
from .ports import limit_if_wanted

if TYPE_CHECKING:
    from distributed.comm import Comm

PEER = "trial-peer.json"
"""File with the addresses of the peer, by protocol."""
BLOCK_BYTES = 64 * 2**20
_MOST_BLOCKS = 8
"""Most blocks of a message. Over NVLink a single one takes less time than the message around it."""
_SECONDS = 0.3
"""Time of a message, if it needs no more blocks for that, and of all that count together."""
_CONNECT_TIMEOUT = 10
_POOL_BYTES = 2**30
_POLL_INTERVAL = 0.05


def trial(options: TrialOptions) -> int:
    """Be the peer until this process is killed; or measure, and write the result."""
    limit_if_wanted()
    folder = Folder(options.folder)
    asyncio.run(_measure(folder, options) if options.result else _serve(folder, options))
    return 0


def _block(options: TrialOptions, size: int) -> Any:
    """Return ``size`` bytes of the memory that workers use. Raises ImportError without RMM."""
    if not options.gpus:
        return bytes(size)
    import rmm

    if options.memory == "async":
        rmm.mr.set_current_device_resource(rmm.mr.CudaAsyncMemoryResource())
    elif options.memory != "plain":
        pool = options.memory == "pool"
        initial = _POOL_BYTES if pool else None
        managed = options.memory == "managed"
        rmm.reinitialize(pool_allocator=pool, managed_memory=managed, initial_pool_size=initial)
    buffer = rmm.DeviceBuffer(size=size)
    try:
        import cupy
    except ImportError:
        return buffer
    return cupy.asarray(buffer)


async def _serve(folder: Folder, options: TrialOptions) -> None:
    from distributed.comm import CommClosedError, listen
    from distributed.protocol.serialize import to_serialize
    from distributed.security import Security

    block = _block(options, BLOCK_BYTES)

    async def send(comm: Comm) -> None:
        with contextlib.suppress(CommClosedError):
            while True:
                request: Any = await comm.read()
                await comm.write({"blocks": [to_serialize(block)] * request["count"]})

    found: dict[str, dict[str, str]] = {"addresses": {}, "problems": {}}
    listeners = []  # ucxx stops one that nothing refers to
    arguments = Security(require_encryption=False).get_listen_args("worker")
    for protocol in options.protocols:
        try:
            address = f"{protocol}://{own_address(options.interface)}:0"
            listener = await listen(address, send, deserialize=True, **arguments)
            listeners.append(listener)
            found["addresses"][protocol] = listener.contact_address
        except Exception as error:  # each protocol has errors of its own
            found["problems"][protocol] = _message(error)
    folder.write(PEER, found)
    await asyncio.Event().wait()


async def _measure(folder: Folder, options: TrialOptions) -> None:
    _block(options, 1)  # before UCX starts, which asks CUDA for its devices
    await initialise_ucx()
    while not (peer := folder.read(PEER)):
        await asyncio.sleep(_POLL_INTERVAL)
    results = {name: {"problem": problem} for name, problem in peer["problems"].items()}
    # The last one of the site is tcp, which does not hang.
    for protocol, address in reversed(list(peer["addresses"].items())):
        try:
            results[protocol] = {"rate": await _rate(address)}
        except Exception as error:  # each protocol has errors of its own
            log(f"{address}: {_message(error)}")
            results[protocol] = {"problem": _message(error)}
        folder.write(options.result, results)
    folder.write(options.result, {**results, "complete": True})


async def _rate(address: str) -> float:
    """Return the best rate of several messages in GB/s; the latency makes it a lower bound."""
    from distributed.comm import connect
    from distributed.security import Security

    arguments = Security(require_encryption=False).get_connection_args("worker")
    comm = await connect(address, timeout=_CONNECT_TIMEOUT, deserialize=True, **arguments)
    seconds = await _receive(comm, 1)  # it does not count: it opens the memory of the other process
    counted: list[float] = []
    rates: list[float] = []
    while sum(counted) < _SECONDS:
        blocks = min(_MOST_BLOCKS, 1 + int(_SECONDS / seconds))
        counted.append(await _receive(comm, blocks))
        seconds = counted[-1] / blocks
        rates.append(blocks * BLOCK_BYTES / 1e9 / counted[-1])
    await comm.close()
    return round(max(rates), 3)


async def _receive(comm: Comm, blocks: int) -> float:
    """Receive a message with this number of blocks; return how many seconds that took."""
    started = time.perf_counter()
    await comm.write({"count": blocks})
    await comm.read()
    return time.perf_counter() - started


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__
