"""Connect to a cluster from outside its jobs, and read the activity of its workers."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..batch.client import user_name
from ..errors import GpujobsError, JobFailedError, UnavailableError
from ..injob.names import CERTIFICATE, KEY, LOOPBACK, UCX_WARNINGS, is_encrypted
from ..injob.network import dask_config
from .clusterfolder import check_folder
from .folderstate import FolderState, read_state
from .ledger import ClusterRecord, Ledger
from .monitor import report_on
from .report import ClusterReport, ended_message

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security


@dataclass(frozen=True)
class Connection:
    """How this process connects to the dask scheduler of a cluster."""

    address: str
    security: Security | None
    dashboard: str
    """Link to the dashboard; "" if there is none."""
    folder: Path
    """A folder of this machine with the key and the certificate."""
    workers_per_job: Mapping[str, int]
    """By group."""
    close: Callable[[], None] = lambda: None
    """Closes the tunnel to it, if there is one."""


def connection_to(record: ClusterRecord) -> Connection:
    """Return the connection to a cluster. Raises GpujobsError if its dask scheduler does not run.

    That of a process that may use ucxx is prepared for it.
    """
    state = read_state(record.path)
    address = address_of(record, state)
    silence_ucx(urlsplit(address).scheme)
    return Connection(
        address=address,
        security=security_of(record, state),
        dashboard=_dashboard_link(record, state) or "",
        folder=record.path,
        workers_per_job={group.name: group.workers_per_job for group in record.groups},
    )


def connect(cluster: str, **options: object) -> Client:
    """Return a dask Client of the cluster with this id. ``options`` go to the Client.

    Raises NoSuchClusterError, and GpujobsError if its dask scheduler does not run (yet, or any
    more).
    """
    to = connection_to(Ledger().get(cluster))
    client = _client_class(to.dashboard or None)
    return client(to.address, security=to.security, **options)


def _client_class(link: str | None) -> type[Client]:
    """Return dask's Client with this link to the dashboard: dask takes that of the node."""
    from distributed import Client as DaskClient

    class Client(DaskClient):  # type: ignore[misc]
        dashboard_link = link

    return Client


def _dashboard_link(record: ClusterRecord, state: FolderState) -> str | None:
    """Return the link to the dashboard; None if it is off.

    One on a loopback interface is reached through the tunnel that `gpujobs connect` prints.
    """
    from distributed.utils import format_dashboard_link

    if not state.dask.dashboard or record.dashboard == "off":
        return None
    host = LOOPBACK
    if record.dashboard != "local" and state.head is not None and state.dask.address:
        host = urlsplit(state.dask.address).hostname or LOOPBACK
    return str(format_dashboard_link(host, state.dask.dashboard))


def silence_ucx(*protocols: str) -> None:
    """If this process will use ucxx, disable UCX's warning about a variable that ucxx itself sets.

    Jobs have the same setting, see `injob.job`.
    """
    if "ucxx" in protocols:
        os.environ.setdefault(UCX_WARNINGS, "n")


def security_of(record: ClusterRecord, state: FolderState) -> Security | None:
    """Return distributed's Security for the cluster, None if its traffic is not encrypted."""
    if not record.encrypted or (state.dask.address is not None and not state.encrypted):
        return None
    return security_in(record.path)


def security_in(folder: Path) -> Security:
    """Return distributed's Security with the key and the certificate in ``folder``."""
    from distributed.security import Security

    certificate = str(folder / CERTIFICATE)
    files = {"cert": certificate, "key": str(folder / KEY)}
    options = {
        f"tls_{role}_{kind}": path
        for role in ("scheduler", "worker", "client")
        for kind, path in files.items()
    }
    return Security(require_encryption=True, tls_ca_file=certificate, **options)


def address_of(record: ClusterRecord, state: FolderState) -> str:
    """Return the dask scheduler's address, or raise an error that says why there is none."""
    check_folder(record.path)
    if state.ended is not None:
        raise JobFailedError(ended_message(record.id, state.ended.reason))
    if state.dask.address is None or record.finished:
        ledger = Ledger()
        report = report_on(ledger.get(record.argument), ledger)
        if report.finished:
            raise JobFailedError(ended_message(record.id, report.reason))
        message = f"the dask scheduler of {record.id} has not started yet"
        message = next(iter(state.damaged), message)
        raise GpujobsError(message, hint=f"gpujobs status {record.argument}")
    return state.dask.address


def instructions(record: ClusterRecord) -> str:
    """Return two lines of Python, the dashboard's link and the ssh tunnel to it."""
    state = read_state(record.path)
    host = urlsplit(address_of(record, state)).hostname
    lines = ["import gpujobs", f'client = gpujobs.connect("{record.argument}")']
    if (port := state.dask.dashboard) and record.dashboard != "off":
        lines += ["", *_dashboard_lines(record, state, host or "", port)]
    return "\n".join(lines)


def endpoint(record: ClusterRecord) -> dict[str, object]:
    """Return, for another computer, where a cluster is, with the content of its key."""
    state = read_state(record.path)
    address = address_of(record, state)
    host, node = urlsplit(address).hostname, dashboard_node(record, state)
    names = (CERTIFICATE, KEY) if is_encrypted(urlsplit(address).scheme) else ()
    return {
        "id": record.id,
        "address": address,
        "files": {name: (record.path / name).read_text(encoding="utf-8") for name in names},
        "dashboard": state.dask.dashboard if record.dashboard != "off" else None,
        "node": "" if host == LOOPBACK else node,
        "user": user_name(),
        "groups": {group.name: group.workers_per_job for group in record.groups},
    }


def dashboard_node(record: ClusterRecord, state: FolderState) -> str:
    """Return the node on whose loopback interface the dashboard listens; "" if not in a job."""
    if state.head is None or record.dashboard != "local":
        return ""
    return state.job(state.head).facts.node or ""


def _dashboard_lines(record: ClusterRecord, state: FolderState, host: str, port: int) -> list[str]:
    user = user_name()
    login = f"{user}@{socket.getfqdn()}"
    name = "dashboard"
    if not find_spec("bokeh"):  # a plain install: the jobs may have another Python
        name = "dashboard, if the Python of the jobs has bokeh"
    node = dashboard_node(record, state)
    if not node or host == LOOPBACK:
        # That of a dask scheduler in a Python process listens on the loopback interface only.
        host = LOOPBACK if state.head is None else host
        first = f"# {name}: http://{host}:{port}/status, or from your own computer:"
        tunnel = f"{port}:{host}:{port} {login}"
    else:
        first = f"# {name}: only from {node} itself; from your own computer:"
        tunnel = f"{port}:{LOOPBACK}:{port} -J {login} {user}@{node}"
    return [first, f"#   ssh -N -L {tunnel}", f"#   http://localhost:{port}/status"]


def environment_lines(record: ClusterRecord) -> str:
    """Return export lines with which ``Client()`` connects without arguments."""
    address = address_of(record, read_state(record.path))
    variables = {"DASK_SCHEDULER_ADDRESS": address}
    variables.update(dask_config(record.path, urlsplit(address).scheme))
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


# -- the tasks, CPU and memory of running workers --------------------------------------------------
_TIMEOUT = 5.0
"""Seconds for one answer."""


@dataclass(frozen=True)
class WorkerActivity:
    """The tasks, and the use of the host, of one worker."""

    executing: int
    waiting: int
    """Tasks that were sent to the worker and do not run yet."""
    memory: int
    """Bytes of the host's memory."""
    memory_limit: int
    """Bytes; 0: no limit."""
    cpu: float
    """Percent of one core."""


def read_activities(cluster: ClusterReport) -> dict[str, WorkerActivity]:
    """Return the activity of each worker of a cluster, by its name.

    This is not a client of dask: it does not keep a cluster without work from its end. Raises
    GpujobsError if the dask scheduler does not run, or cannot be reached from here.
    """
    import asyncio

    address = address_of(cluster.record, cluster.folder)
    silence_ucx(urlsplit(address).scheme)
    try:
        security = security_of(cluster.record, cluster.folder)
        identity = asyncio.run(_identity(address, security))
    except (OSError, TimeoutError) as error:
        raise UnavailableError(f"no answer from the dask scheduler at {address}") from error
    except ImportError as error:  # on the login node of `--host`
        raise UnavailableError(f"{error.name} is not installed here") from error
    workers: Mapping[str, Mapping[str, Any]] = identity["workers"]
    return {str(worker["name"]): _activity(worker) for worker in workers.values()}


async def _identity(address: str, security: Security | None) -> dict[str, Any]:
    import asyncio

    from distributed.core import rpc

    options = security.get_connection_args("client") if security else {}
    async with asyncio.timeout(_TIMEOUT), rpc(address, connection_args=options) as scheduler:
        found: dict[str, Any] = await scheduler.identity()
        return found


def _activity(worker: Mapping[str, Any]) -> WorkerActivity:
    metrics = worker.get("metrics", {})
    tasks = metrics.get("task_counts", {})
    return WorkerActivity(
        executing=sum(tasks.get(state, 0) for state in ("executing", "long-running")),
        waiting=sum(tasks.get(state, 0) for state in ("ready", "constrained", "waiting", "fetch")),
        memory=int(metrics.get("memory", 0)),
        memory_limit=int(worker.get("memory_limit") or 0),
        cpu=float(metrics.get("cpu", 0.0)),
    )
