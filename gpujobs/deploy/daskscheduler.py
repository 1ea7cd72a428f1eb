"""The dask scheduler of a cluster that this process owns, and its calls that scaling needs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import distributed
from distributed import Scheduler
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface, SpecCluster

from ..batch import process
from ..clusters import clusterfolder as folders
from ..clusters.folderstate import FolderState
from ..errors import InputError, JobFailedError, Position, Problem
from ..injob.demand import GIVE_UP
from ..injob.folder import EndKind
from ..injob.names import DRAIN, DRAINED, LOOPBACK, UNDRAIN, is_encrypted
from ..injob.network import confine, first_free, on_loopback, port_range
from ..injob.registry import idle_message
from ..planning.plan import Plan
from ..planning.protocols import contact_text, encryption_rule
from ..text import quoted
from .pool import JobPool
from .pooljobs import PoolJob

if TYPE_CHECKING:
    from distributed.security import Security


# -- options of a local dask scheduler that a site with required encryption refuses ----------------
def check_encryption(plan: Plan, options: Mapping[str, Any], place: str) -> None:
    """Raise InputError if an option of ``place`` opens a listener without required encryption."""
    required = plan.transport.encryption_required
    if required is None:
        return
    rule, contact = encryption_rule(plan.site_name), contact_text(plan.site)
    problems = [
        Problem(
            f"{rejected.option}: {rejected.message}: {rule}",
            Position(place),
            hint="; ".join(filter(None, (rejected.hint, contact))),
            related=required,
        )
        for rejected in _REJECTED
        if rejected.option in options and rejected.found(options[rejected.option])
    ]
    if problems:
        raise InputError(problems)


class _Rejected(NamedTuple):
    option: str
    message: str
    hint: str
    found: Callable[[Any], object]
    """Whether a value of the option is rejected."""


def _has_unencrypted(protocols: Any) -> bool:
    """Return whether one of the protocols, a text or a list, is not encrypted. None: it is tls."""
    listed = protocols if isinstance(protocols, list | tuple) else [protocols]
    return any(name and not is_encrypted(str(name)) for name in listed)


_REJECTED = (
    _Rejected(
        "protocol", "it is not encrypted", "leave it out: the protocol is tls", _has_unencrypted
    ),
    _Rejected(
        "security",
        "it would replace the certificate of the cluster",
        "leave it out: each cluster makes its own certificate",
        lambda security: True,
    ),
    _Rejected(
        "dashboard_address",
        "the dashboard is not encrypted",
        "leave it out: the dashboard listens on the loopback interface, "
        "and `gpujobs connect` prints the tunnel to it",
        lambda address: not on_loopback(address),
    ),
    _Rejected(
        "jupyter",
        "Jupyter and a listener for it are not encrypted",
        "leave it out, and start Jupyter on its own",
        bool,
    ),
    _Rejected("services", "services of dask are not encrypted", "leave it out", bool),
)
"""Other options open no listener, or one that is encrypted."""


# -- the protocol ----------------------------------------------------------------------------------
def with_usable_protocols(plan: Plan, *, only_one: bool) -> tuple[Plan, str]:
    """Return ``plan`` with the protocols that work in this process, and why ucxx does not, or "".

    ``only_one``: of the first protocol, since a dask scheduler in this process uses it. Raises
    InputError if no protocol works.
    """
    transport = plan.transport
    reason = _ucxx_problem(transport.interface) if "ucxx" in transport.protocols else ""
    usable = tuple(name for name in transport.protocols if not (reason and name == "ucxx"))
    if not usable:
        raise InputError(reason, hint="network={'protocol': 'auto'}")
    protocols = usable[:1] if only_one else usable
    if len(protocols) == 1 and transport.loopback:
        confine(protocols[0])
    if protocols == ("ucxx",) and transport.loopback:
        os.environ.setdefault("UCX_NET_DEVICES", transport.loopback)
    return replace(plan, transport=replace(transport, protocols=protocols)), reason


def _ucxx_problem(interface: str | None) -> str:
    """Return why ucxx cannot be used in this process, or ""."""
    options = ["--interface", interface] if interface else []
    result = process.run([sys.executable, "-m", "gpujobs.injob", "try-ucxx", *options])
    if result.exit_code == 0:
        return ""
    lines = [line.strip() for line in result.message.splitlines() if line.strip()]
    return f"ucxx does not work on {socket.gethostname()}: {lines[-1][:300]}"


# -- the dask scheduler ----------------------------------------------------------------------------
ADDRESS_INTERVAL = 0.2


def local_scheduler(
    pool: JobPool, security: Security | None, options: dict[str, Any], place: str
) -> dict[str, object]:
    """Return dask's specification of a dask scheduler here; ``options`` win. Raises InputError."""
    plan = pool.plan
    dashboard = plan.profile.network.dashboard
    own: dict[str, object] = {
        "protocol": f"{plan.transport.protocols[0]}://",
        "security": security,
        "dashboard_address": ":8787" if dashboard == "on" else f"{LOOPBACK}:8787",
        "scheduler_file": str(pool.record.path / "scheduler.json"),
    }
    check_encryption(plan, options, place)
    _check_scheduler_file(options, place)
    if plan.site.network.ports:
        own["port"] = first_free(port_range(plan.site.network.ports))
    if dashboard == "off":
        own |= {"dashboard": False, "dashboard_address": f"{LOOPBACK}:0"}
    if "host" not in options and "interface" not in options:
        if plan.transport.interface:
            _check_interface(plan.transport.interface)
            own["interface"] = plan.transport.interface
        elif plan.site.one_machine:
            own["host"] = LOOPBACK
    return {"cls": Scheduler, "options": {**own, **options}}


def _check_scheduler_file(options: Mapping[str, Any], place: str) -> None:
    """Raise InputError if the file with the address would not be the one that the jobs read."""
    if "scheduler_file" in options:
        message = f"{place}: scheduler_file: the jobs read the one in the cluster's folder"
        hint = (
            "Client(cluster); in another process gpujobs.connect(cluster.id); or "
            "Client(scheduler_file=cluster.folder / 'scheduler.json', security=cluster.security)"
        )
        raise InputError(message, hint=hint)


def _check_interface(name: str) -> None:
    """Raise InputError if this host, for example a login node, does not have the interface."""
    here = [interface for _, interface in socket.if_nameindex()]
    if name not in here:
        message = f"this host has no network interface {name}; it has {', '.join(here)}"
        hint = (
            'scheduler="job" runs the dask scheduler in a job, which has it; or name an interface '
            'of this host that compute nodes reach: scheduler_options={"interface": …}'
        )
        raise InputError(message, hint=hint)


class HeadJob(ProcessInterface):  # type: ignore[misc]
    """Submits the head's job and waits for its dask scheduler; for dask it is a process."""

    def __init__(self, pool: JobPool, security: Security | None = None, **kwargs: Any) -> None:
        self.pool = pool
        self.security = security
        super().__init__(**kwargs)

    async def start(self) -> None:
        """Wait for the dask scheduler's address. JobFailedError: its job ended or took too long."""
        state = await self._wait_for_address(await self.pool.submit_head())
        self.address = state.dask.address
        if self.security is not None:  # the job may have chosen ucxx
            self.security.require_encryption = state.encrypted
        self.status = Status.running

    async def _wait_for_address(self, job: PoolJob) -> FolderState:
        pool, lock = self.pool, asyncio.Lock()
        while True:
            ended = await pool.refresh(frozenset(), lock)
            state = pool.folder_state
            if state.dask.address is not None and state.ended is None:
                return state
            if ended or state.ended is not None:
                raise JobFailedError(self._why_ended(job, state))
            # Waiting in the queue is not an error; running without a dask scheduler is.
            now = pool.system.monotonic()
            if now - (job.started or now) > pool.plan.profile.start_timeout:
                message = f"the dask scheduler's job {job.report.id} runs, but has no address yet"
                raise JobFailedError(message)
            await asyncio.sleep(ADDRESS_INTERVAL)

    def _why_ended(self, job: PoolJob, state: FolderState) -> str:
        reason = state.ended.reason if state.ended else ""
        past = (past for past in self.pool.jobs.past if past.number == job.report.number)
        last = next(past, job.report)
        log = folders.tail(self.pool.record.path, "scheduler.log", 5) or last.log
        lines = "\n".join(["", *quoted(log)])
        return f"the dask scheduler's job {job.report.id} ended: {reason or last.reason}{lines}"

    async def close(self) -> None:
        """Do nothing: the cluster cancels all its jobs."""
        self.status = Status.closed


# -- workers, their load, retiring them ------------------------------------------------------------
CLOSE_WORKERS_TIMEOUT = 1.0
"""Seconds for workers to exit when the cluster is closed."""
CLOSE_SCHEDULER_TIMEOUT = 1.5
"""Seconds for a dask scheduler in a job to confirm that it closes."""
CLOSE_CLIENTS_TIMEOUT = 5.0
"""Seconds for clients to close after the dask scheduler."""
END_TIMEOUT = 5.0
"""Seconds within which a cluster whose dask scheduler has closed its connections is seen to end."""
QUERY_TIMEOUT = 5.0
"""Seconds for a dask scheduler to list its workers."""


async def _answer(call: Awaitable[Any], seconds: float) -> Any:
    """Return dask's answer to a call. Raises OSError: it is busy, suspended, or about to end.

    A cancellation ends it in any case; dask's connections over ucxx make an OSError of it.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        async with asyncio.timeout(seconds):
            return await call
    except OSError:
        if task and task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise


class Client(distributed.Client):  # type: ignore[misc]
    """The client of a cluster. It closes when the cluster ends; dask's tries to connect again."""

    async def _reconnect(self) -> None:
        if await self.cluster.is_ending():
            await self._close()
        else:
            await super()._reconnect()


class DaskControl:
    """Queries and changes the workers of a dask cluster; the tests replace it by a simulation."""

    def __init__(self, cluster: SpecCluster) -> None:
        self._cluster = cluster
        self._closing: dict[distributed.Client, asyncio.Future[None]] = {}
        """The clients that are being closed."""

    @property
    def open(self) -> bool:
        """Whether the cluster has not been closed; it may have ended."""
        open_states = (Status.created, Status.starting, Status.running, Status.failed)
        return self._cluster.status in open_states

    @property
    def connected(self) -> frozenset[str] | None:
        """Names of the connected workers; None if the connection to the dask scheduler is lost."""
        comm = self._cluster._watch_worker_status_comm
        if comm is None or comm.closed():
            return None
        return frozenset(self._cluster.observed)

    def adapts(self, group: str) -> bool:
        """Return whether a group of workers scales adaptively."""
        adaptive = self._cluster.adaptives.get(group)
        return adaptive is not None and adaptive.state in ("starting", "running")

    def stop_adapting(self) -> None:
        """Stop all adaptive scaling."""
        for adaptive in self._cluster.adaptives.values():
            adaptive.stop()

    def end_of_scheduler(self) -> tuple[EndKind, str] | None:
        """Return why a dask scheduler in this process has closed; None if it runs."""
        scheduler = self._cluster.scheduler
        closed = self._cluster.status == Status.running and isinstance(scheduler, Scheduler)
        if not closed or scheduler.status not in (Status.closing, Status.closed):
            return None
        if message := idle_message(scheduler):
            return EndKind.IDLE, message
        return EndKind.SHUTDOWN, "a client shut the dask scheduler down"

    async def running_workers(self, leaving: Collection[str]) -> int:
        """Return how many workers are ready for tasks, without those that are ``leaving``.

        Only `connected` ones. The answer does not become the cluster's `scheduler_info`, as dask's
        does: a message of before that a worker was removed would find it missing, and end dask's
        task that reads these messages.
        """
        try:
            info = await _answer(self._cluster.scheduler_comm.identity(), QUERY_TIMEOUT)
        except OSError:  # busy, or about to end
            info = self._cluster.scheduler_info
        workers, connected = info["workers"].values(), self.connected
        running = {worker["name"] for worker in workers if worker["status"] == "running"}
        if connected is not None:
            running &= connected
        return len(running.difference(leaving))

    async def load(self) -> dict[str, int] | None:
        """Return how many tasks each worker has, by name; None: dask does not answer."""
        workers: dict[str, Any] = self._cluster.scheduler_info["workers"]
        try:
            processing = await _answer(self._cluster.scheduler_comm.processing(), QUERY_TIMEOUT)
        except OSError:  # busy, suspended, or about to end
            return None
        return {
            workers[address]["name"]: len(tasks)
            for address, tasks in processing.items()
            if address in workers
        }

    async def give_up(self, error: Exception | None) -> None:
        """Fail what clients wait for with ``error``; None: workers may come again."""
        call = getattr(self._cluster.scheduler_comm, GIVE_UP)
        with contextlib.suppress(OSError):
            pickled = pickle.dumps(error) if error else b""
            await _answer(call(error=pickled), QUERY_TIMEOUT)

    @property
    def running(self) -> bool:
        """Whether the dask scheduler runs, as far as is known."""
        return bool(self._cluster.status == Status.running)

    async def drain(self, names: Collection[str], why: str, limit: float | None) -> bool:
        """Ask workers to end their tasks, transfer their data and leave; return whether they do.

        Tasks may take as long as the jobs of the workers have, or ``limit`` seconds.
        """
        if not self.running:
            return False
        call = getattr(self._cluster.scheduler_comm, DRAIN)
        with contextlib.suppress(Exception):  # the cluster ends: its workers need not transfer data
            await call(names=list(names), limit=limit, why=why)
            return True
        return False

    async def undrain(self, names: Collection[str]) -> frozenset[str]:
        """Let workers stay that `drain` lets leave; return the names of those that do.

        Those whose data already moves leave. None stays if the dask scheduler does not answer.
        """
        with contextlib.suppress(OSError):  # busy, or about to end
            call = getattr(self._cluster.scheduler_comm, UNDRAIN)
            return frozenset(await _answer(call(names=list(names)), QUERY_TIMEOUT))
        return frozenset()

    async def drained(self) -> tuple[frozenset[str], float] | None:
        """Return the names of the workers that leave, and the seconds of the longest task.

        None if the dask scheduler does not answer.
        """
        if self.connected is None:
            return None
        with contextlib.suppress(OSError):  # busy, or about to end
            call = getattr(self._cluster.scheduler_comm, DRAINED)
            found = await _answer(call(), QUERY_TIMEOUT)
            return frozenset(found["names"]), found["task_time"]
        return None

    async def close_clients(self) -> None:
        """Close the clients of the cluster here; dask logs what they send to a closed scheduler.

        With many workers that may take longer than this waits: `finish_clients` does the rest.
        """
        for client in list(distributed.Client._instances):
            own = client.cluster is self._cluster and client.loop is self._cluster.loop
            if own and client.status == "running":  # dask logs the end of one that reconnects
                self._closing[client] = asyncio.ensure_future(client._close(fast=True))
        if self._closing:
            await asyncio.wait(self._closing.values(), timeout=CLOSE_SCHEDULER_TIMEOUT)

    async def finish_clients(self) -> None:
        """Leave no client half closed: it would wait for up to a minute when the process exits."""
        if self._closing:
            await asyncio.wait(self._closing.values(), timeout=CLOSE_CLIENTS_TIMEOUT)
        for client, closing in self._closing.items():
            closing.cancel()
            client.status = "closed"
        await asyncio.gather(*self._closing.values(), return_exceptions=True)
        self._closing.clear()

    async def close_scheduler(self) -> None:
        """Close a dask scheduler in a job, its workers and clients; dask must not connect again."""
        cluster = self._cluster
        cluster.shutdown_scheduler = False
        if cluster.status != Status.running or self.connected is None:
            return
        cluster.status = Status.closing  # so that clients do not try to connect again
        try:
            with contextlib.suppress(OSError):
                await _answer(cluster.scheduler_comm.terminate(), CLOSE_SCHEDULER_TIMEOUT)
        finally:
            cluster.status = Status.running

    async def remove_workers(self) -> None:
        """Let all workers of a local dask scheduler leave at once.

        It tells all others of each worker that leaves. Of workers that leave one after another, the
        number of these messages is the square of theirs.
        """
        scheduler = self._cluster.scheduler
        if isinstance(scheduler, Scheduler):
            for address in list(scheduler.workers):
                await scheduler.remove_worker(
                    address, stimulus_id="gpujobs-close", expected=True, close=True
                )

    async def wait_for_workers_to_exit(self) -> None:
        """Let workers exit before a local dask scheduler, which logs connections that end later."""
        deadline = time.monotonic() + CLOSE_WORKERS_TIMEOUT
        comms = getattr(self._cluster.scheduler, "_comms", {})  # by connection: its kind
        while "register-worker" in comms.values() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    def disconnect(self) -> None:
        """Stop what queries the dask scheduler regularly: it is gone."""
        cluster = self._cluster
        if cluster.status == Status.running:
            cluster.status = Status.failed
        cluster.shutdown_scheduler = False
        self.stop_adapting()
        if cluster._sync_cluster_info_task is not None:
            cluster._sync_cluster_info_task.cancel()

    def log(self, message: str) -> None:
        """Show a line to the user."""
        self._cluster._log(message)
