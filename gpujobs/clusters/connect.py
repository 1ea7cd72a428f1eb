"""How to connect to a cluster from outside its jobs."""

from __future__ import annotations

import getpass
import shlex
import socket
from typing import Any
from urllib.parse import urlsplit

from ..errors import GpujobsError, JobFailedError
from ..injob.network import dask_config
from . import folder, tls
from .ledger import ClusterRecord, Ledger


def connect(cluster: str, **options: Any) -> Any:
    """Return a dask Client of the cluster with this id. ``options`` go to the Client.

    Raises NoSuchClusterError, and GpujobsError where its dask scheduler is not there (yet, or any more).
    """
    from distributed import Client

    record = Ledger().get(cluster)
    address = address_of(record)
    return Client(address, security=security(record), **options)


def security(record: ClusterRecord) -> Any:
    """Return distributed's Security for the cluster, None where it is not encrypted."""
    address = folder.read(record.path).address
    if not record.encrypted or (
        address is not None and urlsplit(address).scheme not in ("tls", "wss")
    ):
        return None
    from distributed.security import Security

    certificate, key = str(record.path / tls.CERTIFICATE), str(record.path / tls.KEY)
    roles = {
        f"tls_{role}_{what}": path
        for role in ("scheduler", "worker", "client")
        for what, path in (("cert", certificate), ("key", key))
    }
    return Security(require_encryption=True, tls_ca_file=certificate, **roles)


def address_of(record: ClusterRecord) -> str:
    """Return the dask scheduler's address, or raise an error that says why there is none."""
    facts = folder.read(record.path)
    if facts.ended is not None:
        raise JobFailedError(
            f"{record.id} has ended: {facts.ended.get('reason') or 'run: is done'}"
        )
    if facts.address is None:
        raise GpujobsError(
            f"the dask scheduler of {record.id} has not started yet",
            hint=f"gpujobs status {record.id}",
        )
    return facts.address


def text(record: ClusterRecord) -> str:
    """Return the two lines of Python, the dashboard's link and the tunnel to it."""
    address = address_of(record)
    facts = folder.read(record.path)
    lines = ["import gpujobs", f'client = gpujobs.connect("{record.id}")']
    if facts.dashboard:
        host = urlsplit(address).hostname
        lines += [
            "",
            f"# dashboard: http://{host}:{facts.dashboard}/status, or from your own computer:",
            f"#   ssh -N -L {facts.dashboard}:{host}:{facts.dashboard} {getpass.getuser()}@{socket.getfqdn()}",
            f"#   http://localhost:{facts.dashboard}/status",
        ]
    return "\n".join(lines)


def environment_lines(record: ClusterRecord) -> str:
    """Return export lines with which ``Client()`` connects without arguments."""
    variables = {"DASK_SCHEDULER_ADDRESS": address_of(record)}
    protocol = urlsplit(variables["DASK_SCHEDULER_ADDRESS"]).scheme
    variables.update(dask_config(record.path, protocol))
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())
