"""Listeners in a range of ports: those that the site's firewall opens between its nodes.

Dask takes any port that is free, and has no range for all of its processes. Here a listener that
may have any port gets one of the range. Listeners on the loopback interface are not limited.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from .names import LOOPBACK

VARIABLE = "GPUJOBS_PORTS"
"""Set in jobs whose ports are limited: the first and the last one, as ``8000-8100``."""


def limit_if_wanted() -> None:
    """Limit the ports of the listeners of this process, if those of its job are limited."""
    if text := os.environ.get(VARIABLE):
        limit(port_range(text))


def port_range(text: str) -> range:
    """Return the ports of ``8000-8100``."""
    first, last = map(int, text.split("-"))
    return range(first, last + 1)


def limit(ports: range) -> None:
    """Limit the ports of tornado's listeners, which all protocols but ucxx use, and of ucxx."""
    from tornado import netutil, tcpserver

    if isinstance(netutil.bind_sockets, functools.partial):
        return  # already limited
    limited = functools.partial(_bind_sockets, netutil.bind_sockets, ports)
    for module in (netutil, tcpserver):  # the second one has a reference of its own
        vars(module)["bind_sockets"] = limited
    _limit_ucxx(ports)


def first_free(ports: range, host: str = "") -> int:
    """Return a port of the range that nothing listens on now. Raises OSError if there is none."""
    for port in _shuffled(ports):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise _none_free(ports)


def _shuffled(ports: range) -> Iterator[int]:
    """Yield the ports in random order: many processes start at the same time."""
    yield from random.sample(ports, len(ports))


def _none_free(ports: range) -> OSError:
    message = f"no port is free of {ports[0]}-{ports[-1]} (`network.ports` of the site)"
    return OSError(errno.EADDRINUSE, message)


def _bind_sockets(
    bind: Callable[..., list[socket.socket]],
    ports: range,
    port: int,
    address: str | None = None,
    *arguments: Any,
    **options: Any,
) -> list[socket.socket]:
    if port or address == LOOPBACK:
        return bind(port, address, *arguments, **options)
    for chosen in _shuffled(ports):
        try:
            return bind(chosen, address, *arguments, **options)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise _none_free(ports)


def _limit_ucxx(ports: range) -> None:
    from distributed.comm.registry import backends, get_backend

    try:
        kind: Any = type(get_backend("ucxx"))
    except ValueError:  # not installed
        return

    class LimitedBackend(kind):  # type: ignore[misc]
        """Backend whose listeners have ports of the range."""

        def get_listener(self, *args: Any, **kwargs: Any) -> Any:
            """Return a listener that chooses its port when it starts."""
            listener = super().get_listener(*args, **kwargs)
            if getattr(listener, "_input_port", None) == 0:
                listener.start = functools.partial(_start, listener, listener.start, ports)
            return listener

    backends["ucxx"] = LimitedBackend()


async def _start(listener: Any, start: Callable[[], Awaitable[None]], ports: range) -> None:
    for port in _shuffled(ports):
        listener._input_port = port
        try:
            return await start()
        except Exception as error:
            if "Busy" not in type(error).__name__:  # UCXXBusyError
                raise
    raise _none_free(ports)
