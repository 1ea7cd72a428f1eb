"""Blocks that two processes exchange: whether a protocol works, and its rate.

One process sends blocks to those that connect; the other one asks for them, and measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import gpus, network
from .names import CERTIFICATE, KEY, LOOPBACK_INTERFACE
from .transport import ucx_settings

if TYPE_CHECKING:
    from distributed import Worker
    from distributed.comm import Comm, Listener
    from distributed.security import Security

    from .options import TryUcxxOptions

_T = TypeVar("_T")
BLOCK_BYTES = 64 * 2**20
_MOST_BLOCKS = 8
"""Most blocks of a message. Over NVLink a single one takes less time than the message around it."""
_SECONDS = 0.3
"""Time of a message, if it needs no more blocks for that, and of all that count together."""
_CONNECT_TIMEOUT = 10
_TIMEOUT = 40
"""Seconds for all blocks. A transfer that hangs ends here."""


# -- `try-ucxx`: a block that a process sends to itself --------------------------------------------
def try_ucxx(options: TryUcxxOptions) -> None:
    """Send a block through ucxx inside this process; raise an error if it does not arrive."""
    # By default, a process that does nothing else often waits a second for a timer of ucxx.
    os.environ.setdefault("UCXPY_PROGRESS_MODE", "polling")
    if options.interface == LOOPBACK_INTERFACE:
        network.confine("ucxx")
    if options.gpu:
        os.environ.update(gpus.with_named_slices(os.environ))
    network.restrict_listeners()
    asyncio.run(_in_time(_ucxx_round_trip(options)))


async def _ucxx_round_trip(options: TryUcxxOptions) -> None:
    if options.gpu:  # before UCX starts, which asks CUDA for its devices
        gpu_block(2**20)
    listener = await serve(f"ucxx://{network.own_address(options.interface)}:0", bytes(2**20))
    comm = await _connect(listener.contact_address)
    await _receive(comm, 1)
    await comm.close()


async def _in_time(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return await asyncio.wait_for(work, _TIMEOUT)
    except asyncio.TimeoutError:  # another class before Python 3.11
        raise TimeoutError(f"no answer within {_TIMEOUT} s") from None


def gpu_block(size: int) -> Any:
    """Return ``size`` bytes of GPU memory, as workers allocate it. Raises ImportError."""
    try:
        import rmm
    except ImportError:
        import cupy

        return cupy.zeros(size, dtype="u1")
    buffer = rmm.DeviceBuffer(size=size)
    try:
        import cupy
    except ImportError:
        return buffer
    return cupy.asarray(buffer)


# -- between two workers ---------------------------------------------------------------------------
async def serve_from_worker(dask_worker: Worker, protocol: str) -> tuple[str, bool]:
    """Serve blocks of this worker's memory; return the address, and whether they are on a GPU."""
    try:
        block = gpu_block(BLOCK_BYTES)
        on_gpu = True
    except Exception:  # without RMM and CuPy, or without CUDA
        block = bytes(BLOCK_BYTES)
        on_gpu = False
    _set_up(protocol)
    host = dask_worker.address.rpartition("://")[2].rpartition(":")[0]
    listener = await serve(f"{protocol}://{host}:0", block)
    vars(dask_worker)[f"_gpujobs_{protocol}"] = listener  # ucxx stops one that nothing refers to
    return listener.contact_address, on_gpu


async def measured_rate(address: str) -> float:
    """Return the best rate of several messages in GB/s; the latency makes it a lower bound."""
    _set_up(address.partition("://")[0])
    return round(await _in_time(_rate(address)), 3)


def _set_up(protocol: str) -> None:
    """Set up UCX, if this process does not use it yet, as a cluster that uses it does."""
    if protocol == "ucxx":
        os.environ.update(ucx_settings(os.environ, gpus.hidden_gpus())[0])


async def _rate(address: str) -> float:
    comm = await _connect(address)
    seconds = await _receive(comm, 1)  # it does not count: it opens the memory of the other process
    counted: list[float] = []
    rates: list[float] = []
    while sum(counted) < _SECONDS:
        blocks = min(_MOST_BLOCKS, 1 + int(_SECONDS / seconds))
        counted.append(await _receive(comm, blocks))
        seconds = counted[-1] / blocks
        rates.append(blocks * BLOCK_BYTES / 1e9 / counted[-1])
    await comm.close()
    return max(rates)


# -- both ------------------------------------------------------------------------------------------
async def serve(address: str, block: object) -> Listener:
    """Send ``block``, as often as it is asked for, to those that connect to ``address``."""
    from distributed.comm import CommClosedError, listen
    from distributed.protocol.serialize import to_serialize

    async def send(comm: Comm) -> None:
        with contextlib.suppress(CommClosedError):
            while True:
                request: Any = await comm.read()
                blocks = [to_serialize(block) for _ in range(request["count"])]
                await comm.write({"blocks": blocks})

    arguments = _security().get_listen_args("worker")
    return await listen(address, send, deserialize=True, **arguments)


async def _connect(address: str) -> Comm:
    from distributed.comm import connect

    arguments = _security().get_connection_args("worker")
    return await connect(address, timeout=_CONNECT_TIMEOUT, deserialize=True, **arguments)


def _security() -> Security:
    """Return the certificate of the cluster, whose processes may talk without encryption."""
    from distributed.security import Security

    folder = Path(os.environ.get("GPUJOBS_FOLDER", ""))
    if not (folder / CERTIFICATE).exists():  # not if all protocols are without encryption
        return Security(require_encryption=False)
    certificate, key = str(folder / CERTIFICATE), str(folder / KEY)
    return Security(
        require_encryption=False,
        tls_ca_file=certificate,
        tls_worker_cert=certificate,
        tls_worker_key=key,
    )


async def _receive(comm: Comm, blocks: int) -> float:
    """Receive a message with this number of blocks; return how many seconds that took."""
    started = time.perf_counter()
    await comm.write({"count": blocks})
    await comm.read()
    return time.perf_counter() - started
