"""`gpujobs --host HOST connect ID`: tunnels to the dask scheduler and to the dashboard."""

from __future__ import annotations

import contextlib
import shlex
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from ..batch import ssh
from ..batch.process import start
from ..clusters.folder import private_folder, write_atomically
from ..errors import UnavailableError
from ..injob.names import LOOPBACK
from ..injob.network import dask_config
from .live import echo, progress

INTERVAL = 3.0
"""Seconds between two looks at the connection."""
_PROTOCOLS = ("tcp", "tls")


def connect(host: ssh.Host, found: Mapping[str, Any], folder: Path, *, stay: bool) -> None:
    """Open tunnels to a cluster, and print the variables with which ``Client()`` uses them.

    ``found``: `connect.endpoint` of the cluster, whose key and certificate are written into the
    private ``folder``. ``stay``: keep the tunnels open until Ctrl-C. Raises UnavailableError.
    """
    address = urlsplit(found["address"])
    if address.scheme not in _PROTOCOLS:
        raise UnavailableError(f"{found['id']} uses {address.scheme}, for which there is no tunnel")
    private_folder(folder)
    for name, content in found["files"].items():
        write_atomically(folder / name, content)
    port, dashboard = free_ports()
    targets = {port: address.netloc}
    variables = {"DASK_SCHEDULER_ADDRESS": f"{address.scheme}://{LOOPBACK}:{port}"}
    variables |= dask_config(folder, address.scheme)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if found["dashboard"]:
        lines.append(f"# dashboard: http://localhost:{dashboard}/status")
        if not found["node"]:
            targets[dashboard] = f"{address.hostname}:{found['dashboard']}"
    if problem := _open(host, targets):
        raise UnavailableError(f"the tunnel cannot be opened: {problem}")
    echo("\n".join(lines))
    if stay:
        progress.write("the tunnel is open until Ctrl-C; the cluster does not end with it")
        with _through_node(host, found, dashboard):
            _keep(host, targets)


def free_ports() -> list[int]:
    """Return two ports of the loopback interface at which nothing listens."""
    with socket.socket() as first, socket.socket() as second:
        for item in (first, second):
            item.bind((LOOPBACK, 0))
        return [item.getsockname()[1] for item in (first, second)]


def _open(host: ssh.Host, targets: Mapping[int, str]) -> str:
    """Open all tunnels; return the first error, or ""."""
    problems = (host.forward(port, address) for port, address in targets.items())
    return next(filter(None, problems), "")


def _keep(host: ssh.Host, targets: Mapping[int, str]) -> NoReturn:
    """Open the tunnels again whenever the connection is lost, until Ctrl-C."""
    try:
        while True:
            time.sleep(INTERVAL)
            if not host.is_open():
                progress.write(f"the connection to {host.name} is lost, and is opened again")
                while not host.connect() or _open(host, targets):
                    time.sleep(INTERVAL)
                progress.write("the tunnel is open again")
    finally:
        for port, address in targets.items():
            host.forward(port, address, cancel=True)


@contextlib.contextmanager
def _through_node(host: ssh.Host, found: Mapping[str, Any], port: int) -> Iterator[None]:
    """Open a tunnel to a dashboard that listens on the loopback interface of a node."""
    if not found["dashboard"] or not found["node"]:
        yield
        return
    login = f"{found['user']}@{found['node']}"
    target = f"{LOOPBACK}:{port}:{LOOPBACK}:{found['dashboard']}"
    through = f"-oProxyCommand={shlex.join(host.argv('-W%h:%p'))}"
    words = ["ssh", "-N", "-oBatchMode=yes", through, f"-L{target}", "--", login]
    process = start(words).process
    try:
        yield
    finally:
        process.terminate()
        process.wait()
