"""Network: this node, addresses that answer, encryption, ucxx, and where dask listens."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import ipaddress
import os
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .log import log
from .names import (
    CERTIFICATE,
    KEY,
    LOOPBACK,
    LOOPBACK_INTERFACE,
    MACHINES,
    PROTOCOL,
    is_encrypted,
)

if TYPE_CHECKING:
    import ssl

_COMM = "DASK_DISTRIBUTED__COMM__"
_CONNECT_TIMEOUT = 5
_DRIVER = (("libcuda.so.1", "cuInit"), ("libnvidia-ml.so.1", "nvmlInitWithFlags"))
"""The function of each library of the NVIDIA driver that initialises it; its argument is 0."""


def node_name() -> str:
    """Return the name of this node, as the batch scheduler has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def job_nodes(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes as PBS, Torque, Grid Engine and LSF list them; LookupError without one.

    They are the machines of a job without a batch scheduler.
    """
    if machines := environ.get(MACHINES):
        return list(gpus_of_machines(machines))
    text = environ.get("LSB_HOSTS", "").replace(" ", "\n")
    for variable in ("PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE"):
        if path := environ.get(variable):
            with contextlib.suppress(OSError):
                text = Path(path).read_text(encoding="utf-8", errors="replace")
    nodes = [line.split()[0] for line in text.splitlines() if line.split()]
    if not nodes:
        raise LookupError("the batch scheduler does not list the nodes of this job in a file")
    return list(dict.fromkeys(nodes))


def gpus_of_machines(text: str) -> dict[str, list[str]]:
    """Return the GPUs of each machine that the variable `MACHINES` lists, as ``ws1:0 ws2:0``."""
    found: dict[str, list[str]] = {}
    for place in text.split():
        machine, _, gpu = place.partition(":")
        found.setdefault(machine, []).append(gpu)
    return found


def own_address(interface: str | None) -> str:
    """Return this node's address on an interface; without one, that of its default route."""
    from distributed.utils import get_ip, get_ip_interface

    return str(get_ip_interface(interface) if interface else get_ip())


def dask_config(folder: Path, protocol: str) -> dict[str, str]:
    """Return dask's configuration for processes with this protocol, as environment variables."""
    if not is_encrypted(protocol):
        return {}
    return {f"{_COMM}REQUIRE_ENCRYPTION": "True", **_tls_files(folder)}


def _tls_files(folder: Path) -> dict[str, str]:
    """Return dask's configuration of the cluster's certificate, as environment variables."""
    certificate = str(folder / CERTIFICATE)
    variables = {f"{_COMM}TLS__CA_FILE": certificate}
    for role in ("SCHEDULER", "WORKER", "CLIENT"):
        variables[f"{_COMM}TLS__{role}__CERT"] = certificate
        variables[f"{_COMM}TLS__{role}__KEY"] = str(folder / KEY)
    return variables


class Reach(Enum):
    """How far a connection to an address gets."""

    NOTHING = "nothing"
    """No process listens there."""
    CONNECTS = "connects"
    """A process listens, but does not answer: it is busy or stopped."""
    ANSWERS = "answers"


def reach(address: str, environ: Mapping[str, str]) -> Reach:
    """Try to connect to a process of dask at ``address``.

    The connection shows the cluster's certificate, so that the listener logs no error.
    """
    import ssl

    parts = urlsplit(address)
    try:
        connection = socket.create_connection((parts.hostname, parts.port), _CONNECT_TIMEOUT)
    except (OSError, TypeError):
        return Reach.NOTHING
    with connection:
        if not is_encrypted(parts.scheme):
            return Reach.ANSWERS
        try:
            with _tls_context(environ).wrap_socket(connection):
                return Reach.ANSWERS
        except ssl.SSLError as error:
            log(f"{address} answers, but not with this cluster's certificate: {error}")
            return Reach.NOTHING
        except ConnectionError:
            return Reach.NOTHING
        except OSError:
            return Reach.CONNECTS


def is_reachable(address: str, environ: Mapping[str, str]) -> bool:
    """Return whether the process of dask at ``address`` answers."""
    return reach(address, environ) is Reach.ANSWERS


def _tls_context(environ: Mapping[str, str]) -> ssl.SSLContext:
    import ssl

    context = ssl.create_default_context(cafile=environ[f"{_COMM}TLS__CA_FILE"])
    context.check_hostname = False
    certificate = environ[f"{_COMM}TLS__WORKER__CERT"]
    context.load_cert_chain(certificate, environ[f"{_COMM}TLS__WORKER__KEY"])
    return context


def initialise_driver() -> None:
    """Initialise CUDA and NVML in threads, while this process imports UCX, which needs both.

    With several GPUs, each takes half a second. UCX initialises them, too, one after the other.
    """
    for library, function in _DRIVER:
        threading.Thread(target=_call, args=(library, function), daemon=True).start()


def _call(library: str, function: str) -> None:
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # UCX reports what is missing
        getattr(ctypes.CDLL(library), function)(0)


def initialise_ucx() -> None:
    """Initialise UCX in this process. With several GPUs, that takes seconds.

    Else distributed does it when it listens or connects. That also reports why it is not possible.
    """
    import asyncio

    async def initialise() -> None:  # it needs an event loop
        with contextlib.suppress(Exception):
            importlib.import_module("distributed_ucxx.ucxx").init_once()

    asyncio.run(initialise())


def interface_problem(wanted: str | None) -> str:
    """Return that this node lacks the network interface ``wanted``, or ""."""
    names = [name for _, name in socket.if_nameindex()]
    if not wanted or wanted in names:
        return ""
    there = ", ".join(names)
    return f"{node_name()} has no interface {wanted}; it has {there} (`network.interface`)"


# -- listeners in a range of ports: those that the site's firewall opens between its nodes ---------
# Dask takes any port that is free, and has no range for all of its processes. Here a listener that
# may have any port gets one of the range. Listeners on the loopback interface are not limited.

VARIABLE = "GPUJOBS_PORTS"
"""Set in jobs whose ports are limited: the first and the last one, as ``8000-8100``."""


def restrict_listeners() -> None:
    """Limit the ports of this process's listeners, and confine these, as its job wants it."""
    if text := os.environ.get(VARIABLE):
        limit(port_range(text))
    if LOOPBACK_VARIABLE in os.environ:
        confine(os.environ.get(PROTOCOL, ""))


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
    _replace_start("ucxx", functools.partial(_start_in_range, ports))


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


async def _start_in_range(
    ports: range, listener: Any, start: Callable[[], Awaitable[None]]
) -> None:
    if getattr(listener, "_input_port", None) != 0:
        return await start()
    for port in _shuffled(ports):
        listener._input_port = port
        try:
            return await start()
        except Exception as error:
            if "Busy" not in type(error).__name__:  # UCXXBusyError
                raise
    raise _none_free(ports)


def _replace_start(
    protocol: str, start: Callable[[Any, Callable[[], Awaitable[None]]], Awaitable[None]]
) -> None:
    """Start the listeners of a protocol by ``start(listener, listener.start)``."""
    from distributed.comm.registry import backends, get_backend

    try:
        kind: Any = type(get_backend(protocol))
    except ValueError:  # not installed
        return
    known = getattr(kind, "starts", ())
    if start in known:
        return

    class Backend(kind):  # type: ignore[misc]
        """Backend whose listeners are started in another way."""

        starts = (*known, start)

        def get_listener(self, *args: Any, **kwargs: Any) -> Any:
            """Return a listener."""
            listener = super().get_listener(*args, **kwargs)
            listener.start = functools.partial(start, listener, listener.start)
            return listener

    backends[protocol] = Backend()


# -- the end of a listener of tls ------------------------------------------------------------------
class Handshakes:
    """The connections to a listener whose TLS handshakes are under way: they end with it.

    Dask leaves them open. If the other end is gone later, as a process of a job that is cancelled,
    dask wants to log the address of a listener that has none any more, and that error is printed.
    """

    def __init__(self, listener: Any) -> None:
        self._prepare, self._stop = listener._prepare_stream, listener.stop
        self._streams: set[Any] = set()
        self._stopped = False
        listener._prepare_stream, listener.stop = self.prepare, self.stop

    async def prepare(self, stream: Any, address: str) -> Any:
        """Return the stream after its handshake; None if there is none, or no listener any more."""
        prepared = None
        if not self._stopped:  # since the connection was accepted
            self._streams.add(stream)
            try:
                prepared = await self._prepare(stream, address)
            except ValueError:
                if not self._stopped:
                    raise
            finally:
                self._streams.discard(stream)
        if self._stopped:
            stream.close()
            return None
        return prepared

    def stop(self) -> None:
        """Stop the listener, and close the connections."""
        self._stop()
        self._stopped = True
        for stream in tuple(self._streams):
            stream.close()


def end_handshakes_with(listeners: Iterable[Any]) -> None:
    """Let unfinished handshakes end with their listeners; ucxx and ws have none that dask sees."""
    for listener in listeners:
        if hasattr(listener, "_prepare_stream"):
            Handshakes(listener)


# -- listeners on the loopback interface only, also those of ucxx and ws ---------------------------
# distributed-ucxx, and distributed over ws, listen on all interfaces, whatever the host of the
# address, and have no option for it. Whoever reaches such a listener can run code as its user.

LOOPBACK_VARIABLE = "GPUJOBS_LOOPBACK"
"""Set in jobs whose listeners of ucxx or ws are confined. The value is the interface."""
_host: ContextVar[str] = ContextVar("host", default="")
"""Where the listener of ws listens that is starting."""


def on_loopback(address: object) -> bool:
    """Return whether a ``dashboard_address`` of dask is on the loopback interface only.

    It is a text such as ``127.0.0.1:8787``, a port, or several: a list, or a text with commas.
    """
    several = address.split(",") if isinstance(address, str) else address
    items = several if isinstance(several, list) else [several]
    return bool(items) and all(_is_loopback(item) for item in items)


def _is_loopback(address: object) -> bool:
    """Return whether one address has a host, and this is on the loopback interface."""
    if isinstance(address, str):
        address = address.split(":")
    host = str(address[0]) if isinstance(address, (list, tuple)) and address else ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def confine(protocol: str) -> None:
    """Confine the listeners of ``protocol`` at addresses such as 127.0.0.1 in this process."""
    if protocol == "ucxx":
        _replace_start("ucxx", _start_ucxx)
    elif protocol in ("ws", "wss"):
        _use_servers_with_hosts()
        _replace_start(protocol, _start_ws)


def _use_servers_with_hosts() -> None:
    """Let the servers of ws listen at the host of their address."""
    from distributed.comm import ws

    kind: Any = ws.HTTPServer
    if getattr(kind, "confined", False):
        return

    class Server(kind):  # type: ignore[misc]
        """Server that listens at the host of the listener that starts it."""

        confined = True

        def listen(self, port: int, address: str | None = None, **options: Any) -> None:
            """Listen at ``address``, else at the host of the listener."""
            super().listen(port, address or _host.get() or None, **options)

    ws.HTTPServer = Server


async def _start_ws(listener: Any, start: Callable[[], Awaitable[None]]) -> None:
    token = _host.set(listener.ip)
    try:
        await start()
    finally:
        _host.reset(token)


async def _start_ucxx(listener: Any, start: Callable[[], Awaitable[None]]) -> None:
    await start()
    host, port = listener.bound_address[:2]
    if ipaddress.ip_address(host).is_loopback:
        bind_to_loopback(port)


def bind_to_loopback(port: int) -> None:
    """Bind this process's listeners at ``port`` to the loopback interface. Raises RuntimeError."""
    found = False
    for descriptor in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
            if _listens_at(own, port):
                found = True
                _bind(own)
    if not found:
        raise RuntimeError(f"no listener at port {port} to bind to {LOOPBACK_INTERFACE}")


def _bind(listener: socket.socket) -> None:
    try:
        interface = LOOPBACK_INTERFACE.encode()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface)
    except PermissionError:
        message = f"cannot bind ucxx to interface {LOOPBACK_INTERFACE}: that needs Linux 5.7"
        raise RuntimeError(message) from None


def _sockets() -> Iterator[int]:
    """Yield the file descriptors of this process that are sockets."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(path.readlink()).startswith("socket:"):
                yield int(path.name)


def _listens_at(own: socket.socket, port: int) -> bool:
    if own.family not in (socket.AF_INET, socket.AF_INET6) or own.getsockname()[1] != port:
        return False
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
