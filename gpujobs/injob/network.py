"""Network: this node, addresses that answer, encryption, ucxx."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import ssl
import threading
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from .log import log
from .names import CERTIFICATE, KEY, is_encrypted

_COMM = "DASK_DISTRIBUTED__COMM__"
_CONNECT_TIMEOUT = 5
_DRIVER = (("libcuda.so.1", "cuInit"), ("libnvidia-ml.so.1", "nvmlInitWithFlags"))
"""The function of each library of the NVIDIA driver that initialises it; its argument is 0."""


def node_name() -> str:
    """Return the name of this node, as the batch scheduler has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(interface: str | None) -> str:
    """Return this node's address on an interface; without one, that of its default route."""
    from distributed.utils import get_ip, get_ip_interface

    return str(get_ip_interface(interface) if interface else get_ip())


def dask_config(folder: Path, protocol: str) -> dict[str, str]:
    """Return dask's configuration for processes with this protocol, as environment variables."""
    if not is_encrypted(protocol):
        return {}
    return {f"{_COMM}REQUIRE_ENCRYPTION": "True", **tls_files(folder)}


def tls_files(folder: Path) -> dict[str, str]:
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


async def initialise_ucx() -> None:
    """Initialise UCX in this process. With several GPUs, that takes seconds.

    Else distributed does it when it listens or connects. That also reports why it is not possible.
    """
    with contextlib.suppress(Exception):
        importlib.import_module("distributed_ucxx.ucxx").init_once()


def interface_problem(wanted: str | None) -> str:
    """Return that this node lacks the network interface ``wanted``, or ""."""
    names = [name for _, name in socket.if_nameindex()]
    if not wanted or wanted in names:
        return ""
    there = ", ".join(names)
    return f"{node_name()} has no interface {wanted}; it has {there} (`network.interface`)"
