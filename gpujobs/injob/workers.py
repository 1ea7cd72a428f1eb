"""The supervisor of a job with workers only: it notices a lost head, and retires its workers."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from .children import ManagedProcess
from .events import EventReader
from .folder import (
    EXIT_STOPPED,
    EndKind,
    Folder,
    JsonObject,
    head_folder,
    heartbeat_file,
    modified_at,
    owner_file,
)
from .job import SCALE, Job, JobExit, failure, over, worker_names
from .jobevents import job_facts
from .log import append_output_to, log
from .names import (
    DRAIN,
    JUDGE,
    MACHINE,
    MACHINES,
    OWNER,
    PROTOCOL,
    RECORD,
    RUN,
    VERDICT,
    VISIBLE,
    job_file,
)
from .network import Reach, dask_config, gpus_of_machines, is_reachable, node_name, reach
from .options import RetireOptions, SuperviseOptions
from .presets import for_scheduling
from .rank import job_log, node_file, report_lost
from .transport import cluster_ucx_settings

if TYPE_CHECKING:
    from distributed import Client


# -- notice a dask scheduler that is gone, and jobs that will not come -----------------------------
# A worker that is still starting searches for the dask scheduler for its `death_timeout`, and so
# does a worker that its nanny has restarted. Until then it would hold its GPU for nothing.

_INTERVAL = 20.0
_ATTEMPTS = 3
"""Failed connections in a row after which the dask scheduler is gone."""
_QUERY_INTERVAL = float(os.environ.get("GPUJOBS_QUERY_SECONDS", "60"))
"""Seconds between two queries about the jobs of a cluster."""
_SECOND_QUERY = min(22, _QUERY_INTERVAL)
"""The same while a job has just disappeared: one that never started has ended after the 20 s of
`judge.NEVER_STARTED_TIMEOUT`, another one after the 60 s of `judge.UNLISTED_TIMEOUT`."""
_FIRST_QUERY = min(15, _QUERY_INTERVAL)
_VERDICT_INTERVAL = 2.0
_REASONS_SHOWN = 3
_SILENCE_TIMEOUT = 60.0
"""Seconds without a sign of life after which its process may be dead, or only stopped."""


def silence(folder: Path, sign: str, job: int) -> float:
    """Return the age of the file ``sign`` in seconds, by the file server's clock.

    Infinity if it is missing. ``job``: this one, which has a file for the clock.
    """
    clock = folder / job_file(job, "now")
    try:
        clock.touch()
        return modified_at(clock) - modified_at(folder / sign)
    except OSError:
        return float("inf")


class SchedulerWatch:
    """Watches the dask scheduler of a cluster from a job of workers."""

    def __init__(self, folder: Path, job: int, attempt: int) -> None:
        self._folder, self._job, self._attempt = folder, job, attempt
        self._time = time.monotonic()
        self._failed = 0

    def is_gone(self, address: str, environ: Mapping[str, str], *, registered: bool) -> bool:
        """Return whether the dask scheduler is gone; call this again and again.

        ``registered``: all workers of the job are registered. They notice most ends themselves, so
        that only a silent owner is a reason to connect. An owner that is stopped still has its
        port: connections succeed, but nothing answers.
        """
        if time.monotonic() - self._time < _INTERVAL:
            return False
        self._time = time.monotonic()
        # The owner: the head, or else the client with the dask scheduler.
        has_head = (self._folder / head_folder(self._attempt)).is_dir()
        sign = heartbeat_file(self._attempt) if has_head else "lease"
        alive = registered and silence(self._folder, sign, self._job) <= _SILENCE_TIMEOUT
        self._failed += 1
        if alive or reach(address, environ) is not Reach.NOTHING:
            self._failed = 0
        return self._failed >= _ATTEMPTS


def cannot_start(gone: Mapping[str, str]) -> str:
    """Return that `run` cannot start, for the reasons of the jobs that do not come."""
    reasons = list(gone.values())
    more = len(reasons) - _REASONS_SHOWN
    shown = reasons[:_REASONS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return f"{RUN} cannot start: {'; '.join(shown)}"


class JobsWatch:
    """Asks about the other jobs of the cluster while workers are missing.

    `judge.pyz` asks, in a process of its own: it needs seconds if the batch scheduler is away.
    """

    def __init__(
        self, options: SuperviseOptions, environ: Mapping[str, str], events: EventReader
    ) -> None:
        """``events``: the reader of this process for those of the dask scheduler."""
        self._options, self._environ, self._events = options, environ, events
        self._folder = Folder(options.folder)
        now = self._began = time.monotonic()
        # If several jobs wait for a head, they do not all ask at once.
        self._delay = options.job % _FIRST_QUERY
        self._next_query = now + _FIRST_QUERY + self._delay
        self._next_look = now
        self._judge: ManagedProcess | None = None

    def verdict(self) -> JsonObject:
        """Return the last verdict, {} if it is not yet due to look again; call this often."""
        now = time.monotonic()
        if now < self._next_look:
            return {}
        self._next_look = now + _VERDICT_INTERVAL
        verdict = {} if self._is_of_before(now) else self._folder.read(VERDICT)
        interval = _SECOND_QUERY if verdict.get("undecided") else _QUERY_INTERVAL
        self._next_query = min(self._next_query, now + interval + self._delay)
        if now >= self._next_query and self._workers_are_missing():
            self._ask(interval)
        return verdict

    def _is_of_before(self, now: float) -> bool:
        """Return whether the verdict may be about the attempt before."""
        if self._options.attempt == 1:
            return False
        return silence(self._folder.path, VERDICT, self._options.job) > now - self._began

    def _workers_are_missing(self) -> bool:
        groups = self._folder.read(RECORD).get("groups", [])
        wanted: int = sum(group["workers"] for group in groups)
        return len(self._events.read().connected) < wanted

    def _ask(self, interval: float) -> None:
        """Start to ask, unless another process has asked within the interval."""
        path, job = self._folder.path, self._options.job
        age = silence(path, VERDICT, job)
        if age < interval or (self._judge is not None and self._judge.running):
            return
        self._next_query = time.monotonic() + _QUERY_INTERVAL
        argv = [sys.executable, str(path / JUDGE), str(path)]
        if self._options.ask_outside:
            argv.append(str(path / f"ask-{job}"))
        self._judge = ManagedProcess("judge", argv, job_log(self._options), self._environ)


# -- retire workers: let them leave, in what time is left ------------------------------------------
_CONNECT_TIMEOUT = 60.0
_LOOK_INTERVAL = 0.5
_LONGEST_FOR_DATA = 30.0
"""Seconds for workers to transfer their data; until then, their tasks may end. At most half."""


def retire(options: RetireOptions) -> int:
    """Let workers leave; return 0 if that took at most ``timeout`` seconds, else 1.

    Return 1 at once if the dask scheduler does not have them any more.
    """
    from distributed import Client

    wanted, deadline = set(options.workers), time.monotonic() + options.timeout
    limit = options.timeout - min(_LONGEST_FOR_DATA, options.timeout / 2)
    with Client(timeout=min(options.timeout, _CONNECT_TIMEOUT)) as client:
        if wanted.isdisjoint(_connected(client)):
            return 1
        drain = getattr(client.scheduler, DRAIN)
        client.sync(drain, names=list(wanted), limit=limit, why="its job ends")
        while time.monotonic() < deadline:
            if wanted.isdisjoint(_connected(client)):
                return 0
            time.sleep(_LOOK_INTERVAL)
    return 1


def _connected(client: Client) -> set[str]:
    """Return the names of all workers."""
    # Client.scheduler_info returns an attribute that a periodic callback replaces at any moment.
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return {str(worker["name"]) for worker in workers.values()}


# -- a job with workers only -----------------------------------------------------------------------
_POLL_INTERVAL = 2.0
_POLL_INTERVAL_AT_START = 1.0
_START_SECONDS = 60
_REACH_TIMEOUT = 30
"""Seconds for which a job tries to reach the dask scheduler."""
_HEARTBEAT_TIMEOUT = 120
"""Seconds without a heartbeat after which the head is dead; NFS may show a file 60 s late."""
_END_OF_HEAD_TIMEOUT = 8
"""Seconds that a head which is ending needs to write why."""
_RETIRE_TIMEOUT = 20.0
"""Seconds to transfer data to other workers, if there is no walltime to count from."""
_RETIRE_WALLTIME_TIMEOUT = 60.0
_EXIT_TIMEOUT = 5.0
"""Seconds in which a worker exits that has left."""
_WALLTIME_RESERVE = 5


class Workers(Job):
    """A job with workers only."""

    def __init__(self, options: SuperviseOptions) -> None:
        super().__init__(options)
        self._watch = SchedulerWatch(self.folder.path, options.job, options.attempt)

    def work(self) -> NoReturn:
        """Find the dask scheduler, start the workers, and supervise them."""
        address = self._find_scheduler()
        self.environ["DASK_SCHEDULER_ADDRESS"] = address
        self.start_workers()
        while True:
            starting = time.monotonic() - self.began < _START_SECONDS
            self.pause(_POLL_INTERVAL_AT_START if starting else _POLL_INTERVAL)
            self.check_end()
            self.check_stop()
            self.check_workers()
            if all(process.exit_code == 0 for process in self.worker_processes):
                self._workers_exited(address)
            if self._watch.is_gone(address, self.environ, registered=self.all_registered):
                raise self.scheduler_gone(address)

    def check_stop(self) -> None:
        """Release the workers and exit if the batch scheduler or the walltime requires it."""
        if self.stop_reason or self.walltime.nearly_over():
            self._retire()

    # -- start -------------------------------------------------------------------------------------
    def _find_scheduler(self) -> str:
        """Return the address of the dask scheduler, once it can be reached."""
        address = self._wait_for_address()
        scheme = urlsplit(address).scheme
        self.environ.update(dask_config(self.folder.path, scheme))
        self.environ[PROTOCOL] = scheme
        if scheme == "ucxx":
            self.environ.update(cluster_ucx_settings(self.options, self.environ))
        began = time.monotonic()
        while (found := reach(address, self.environ)) is not Reach.ANSWERS:
            self.pause(1.0)
            self.check_end()
            busy = found is Reach.CONNECTS
            limit = self.options.start_timeout if busy else _REACH_TIMEOUT
            if time.monotonic() - began > limit:
                raise failure(f"{self.name}: {self._unreachable_message(address, busy)}")
            address = self.scheduler_address() or address
        return address

    def _wait_for_address(self) -> str:
        limit = self.options.start_timeout
        jobs = JobsWatch(self.options, self.environ, self._events)
        head, heartbeat = head_folder(self.options.attempt), heartbeat_file(self.options.attempt)
        while (address := self.scheduler_address()) is None:
            self.pause(0.5)
            self.check_end()
            if self.stop_reason:
                raise JobExit(0)
            if not self.options.scheduler and head not in self.folder.names():
                # The head may still be in the queue, in a job of another kind.
                self._check_heads(jobs)
                continue
            if time.monotonic() - self.began <= limit:
                continue
            if silence(self.folder.path, heartbeat, self.options.job) >= _HEARTBEAT_TIMEOUT:
                reason = f"{self.name} on {node_name()}: no head after {limit} s"
                raise failure(reason, again=True)
        return address

    def _check_heads(self, jobs: JobsWatch) -> None:
        """Exit if no job that may be the head will come. A client that owns it submits another."""
        verdict = {} if self.options.client_owns else jobs.verdict()
        if not verdict.get("head", True):
            raise failure(cannot_start(verdict["gone"]), again=True)

    def _unreachable_message(self, address: str, busy: bool) -> str:
        host = self.folder.read(owner_file(self.options.attempt)).get("node") or "its host"
        if busy:
            return f"the dask scheduler at {address} on {host} accepts connections, but is silent"
        hint = "set `network.interface`"
        if self.options.client_owns:
            hint = 'set `interface` or scheduler="job"'
        return (
            f"compute node {node_name()} cannot reach the dask scheduler at {address} on {host}; "
            f"{hint}"
        )

    # -- end ---------------------------------------------------------------------------------------
    def _workers_exited(self, address: str) -> NoReturn:
        """All exited with 0: retired by a client, at the end of their lifetime, or orphaned."""
        self.wait_for_end_of_head()
        of_node = self.options.node is not None  # the supervisor of its job decides
        if of_node or is_reachable(address, self.environ):
            log("the workers of this job were released")
            raise JobExit(0)
        raise self.scheduler_gone(address)

    def scheduler_gone(self, address: str) -> JobExit:
        """Return the exit after the head is gone; its batch script may have noted a signal."""
        head = self.folder.read(owner_file(self.options.attempt)).get("job")
        if head is not None and job_facts(self.folder, head).signalled:
            reason = "the head's job was stopped: it received a signal of the batch scheduler"
            return JobExit(EXIT_STOPPED, EndKind.CANCELLED, reason, again=True)
        reason = f"{self.name} on {node_name()}: the dask scheduler at {address} is gone"
        if head is None and (owner := self.folder.read(OWNER)):
            reason += f", with process {owner['pid']} on {owner['host']}, which owned the cluster"
        return failure(reason, again=True)

    def worker_failure(self, process: ManagedProcess) -> JobExit:
        """Return the exit after the workers failed, perhaps because the head is lost."""
        address = self.scheduler_address()
        if self.options.has_next_attempt and address and not is_reachable(address, self.environ):
            return self.scheduler_gone(address)
        return super().worker_failure(process)

    def wait_for_end_of_head(self) -> None:
        """If the head is ending, wait until it has written why."""
        deadline = time.monotonic() + _END_OF_HEAD_TIMEOUT
        while time.monotonic() < deadline:
            self.check_end()
            address = self.scheduler_address()
            if address is not None and is_reachable(address, self.environ):
                return
            self.pause(0.5)

    def _retire(self) -> NoReturn:
        """Transfer the data of the workers to others, and exit."""
        registered = self.dask().connected
        names = [name for name in worker_names(self.options) if name in registered]
        reason = self.stop_reason or "the walltime is nearly over"
        log(f"stopping ({reason}): {', '.join(names) or 'no worker is registered'}")
        if names and self.stop_reason == SCALE:
            self._leave(names)
        if names and any(process.running for process in self.worker_processes):
            self._transfer_data(names)
        # If the batch scheduler cancelled this job, its exit code may be the only sign of that.
        cancelled = self.stop_reason.startswith("SIG") and not self.walltime.explains_signal()
        raise JobExit(EXIT_STOPPED if cancelled else 0)

    def _leave(self, names: list[str]) -> None:
        """Let the workers end their tasks, however long these take, until the job must stop."""
        helper = self._start_retire(names, self.walltime.workers_lifetime())
        while (
            self._retires(helper) and self.stop_reason == SCALE and not self.walltime.nearly_over()
        ):
            time.sleep(0.25)
        for process in self.worker_processes:
            process.wait(_EXIT_TIMEOUT if helper.exit_code == 0 else 0.5)
        helper.kill()

    def _start_retire(self, names: list[str], seconds: float) -> ManagedProcess:
        argv = [sys.executable, str(self.folder.archive), "retire"]
        argv += [f"--timeout={seconds}", f"--workers={','.join(names)}"]
        environ = for_scheduling(self.environ)
        return ManagedProcess("retire", argv, job_log(self.options), environ)

    def _retires(self, helper: ManagedProcess) -> bool:
        """Return whether workers are about to leave, and the cluster has not ended."""
        return (
            helper.running
            and any(process.running for process in self.worker_processes)
            and {"ended", over(self.options.attempt)}.isdisjoint(self.folder.names())
        )

    def _transfer_data(self, names: list[str]) -> None:
        timeout = self._retire_timeout()
        deadline = time.monotonic() + timeout
        helper = self._start_retire(names, timeout)
        while self._retires(helper) and time.monotonic() < deadline:
            time.sleep(0.25)
        retired = helper.exit_code == 0
        for process in self.worker_processes:
            process.wait(max(0.5, deadline - time.monotonic()) if retired else 0.5)
        helper.kill()

    def _retire_timeout(self) -> float:
        if not self.walltime.explains_signal():
            return _RETIRE_TIMEOUT
        return max(5.0, min(_RETIRE_WALLTIME_TIMEOUT, self.walltime.left() - _WALLTIME_RESERVE))


# -- one node of an allocation ---------------------------------------------------------------------
_NUMBERS = ("PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables in which a launcher may number the processes that it starts."""
_STOP_TIMEOUT = 30.0
"""Seconds in which the supervisor of the job ends it after a signal."""
_CONNECTION_TIMEOUT = 5.0
"""The same after the end of ssh, and then for the end of the workers."""


def claim_node(folder: Folder, options: SuperviseOptions) -> int:
    """Return the number of this node in its job, by the launcher's number, else the first free one.

    Raises LookupError if the launcher has started more than one process for each node.
    """
    own = node_name()
    given = next((os.environ[name] for name in _NUMBERS if name in os.environ), "")
    order = sorted(range(options.nodes), key=lambda node: str(node) != given)
    first = options.job * options.nodes
    claimed = (n for n in order if folder.create(node_file(first + n), json.dumps({"node": own})))
    number = next(claimed, None)
    others = [n for n in order if n != number]
    if number is None or own in (folder.read(node_file(first + n)).get("node") for n in others):
        raise LookupError(f"the launcher has started two processes on {own}, not one on each node")
    return number


class Node(Workers):
    """The workers of one node of an allocation. The supervisor of the job decides what follows."""

    role = "workers of a node"

    def __init__(self, options: SuperviseOptions) -> None:
        if machine := os.environ.get(MACHINE):
            os.environ[VISIBLE] = ",".join(gpus_of_machines(os.environ[MACHINES])[machine])
        attempt = int(os.environ.get("GPUJOBS_ATTEMPT", "1"))
        folder, problem, node = Folder(options.folder), "", 0
        try:
            node = claim_node(folder, options)
        except LookupError as error:
            problem = f"{error} (`node_launcher`, or `mpi`, of the site)"
        super().__init__(replace(options, node=node, attempt=attempt, client_owns=True))
        self._problem = problem
        self._stop_at = float("inf")
        append_output_to(job_log(self.options))

    def work(self) -> NoReturn:
        """Start the workers of this node, and supervise them."""
        if self._problem:
            raise failure(self._problem)
        if MACHINE in os.environ:
            threading.Thread(target=self._end_with_connection, daemon=True).start()
        super().work()

    def _end_with_connection(self) -> None:
        """Exit when ssh is gone, which closes stdin, and signals nothing."""
        while os.read(sys.stdin.fileno(), 1):
            pass
        self._stop_at = min(self._stop_at, time.monotonic() + _CONNECTION_TIMEOUT)
        time.sleep(2 * _CONNECTION_TIMEOUT)
        for process in self.worker_processes:  # this process hangs, as in a folder that is gone
            process.kill()
        os._exit(EXIT_STOPPED)

    def check_end(self) -> None:
        """Exit also a while after a signal, or after the end of ssh."""
        if time.monotonic() > self._stop_at:
            raise JobExit(EXIT_STOPPED)
        super().check_end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Leave the end to the supervisor of the job, which moves data and stops `run` first."""
        self._stop_at = min(self._stop_at, time.monotonic() + _STOP_TIMEOUT)

    def check_stop(self) -> None:
        """Do nothing: `check_end` stops this node."""

    def scheduler_gone(self, address: str) -> JobExit:
        """Return the exit: the job ends."""
        return JobExit(EXIT_STOPPED, None, f"the dask scheduler at {address} is gone")

    def _exit(self, job_exit: JobExit) -> int:
        number, reason, code = self.options.number, job_exit.reason, job_exit.exit_code
        if reason:
            log(reason)
        if job_exit.kind is not None:
            report_lost(self.options, number, reason, code)
        elif not code:
            (self.folder.path / node_file(number)).unlink(missing_ok=True)
        self.stop()
        return code


def run_node(options: SuperviseOptions) -> int:
    """Supervise the workers of one node of an allocation; return the exit code."""
    return Node(options).run()
