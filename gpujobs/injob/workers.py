"""A job with workers only."""

from __future__ import annotations

import sys
import time
from typing import NoReturn
from urllib.parse import urlsplit

from .attempts import over
from .choice import cluster_ucx_settings, take_part
from .folder import EXIT_FAILED, EXIT_STOPPED, HEARTBEAT, EndKind
from .job import Job, JobExit, failure
from .launch import job_log, worker_names
from .log import log
from .names import PROTOCOL
from .network import Reach, dask_config, is_reachable, node_name, reach
from .options import SuperviseOptions
from .process import ManagedProcess
from .watch import JobsWatch, SchedulerWatch, cannot_start

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
_WALLTIME_RESERVE = 5


class Workers(Job):
    """A job with workers only."""

    def __init__(self, options: SuperviseOptions) -> None:
        super().__init__(options)
        self._watch = SchedulerWatch(self.folder.path, options.job)

    def role(self) -> str:
        """Return what this job is, for its log."""
        return "workers"

    def work(self) -> NoReturn:
        """Find the dask scheduler, start the workers, and supervise them."""
        address = self._find_scheduler()
        self.environ["DASK_SCHEDULER_ADDRESS"] = address
        self.start_workers()
        while True:
            self.pause(self._poll_interval())
            self.check_end()
            if self.stop_reason or self.walltime.nearly_over():
                self._retire()
            self.check_workers()
            if all(process.exit_code == 0 for process in self.worker_processes):
                self._workers_exited(address)
            if self._watch.is_gone(address, self.environ, registered=self.all_registered):
                raise self._scheduler_gone(address)

    def _poll_interval(self) -> float:
        starting = time.monotonic() - self.began < _START_SECONDS
        return _POLL_INTERVAL_AT_START if starting else _POLL_INTERVAL

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
        trial: ManagedProcess | None = None
        jobs = JobsWatch(self.options, self.environ)
        while (address := self.scheduler_address()) is None:
            self.pause(0.5)
            self.check_end()
            trial = trial or take_part(self.options, self.environ)
            if self.stop_reason:
                raise JobExit(0)
            if self._head_is_pending():
                self._check_heads(jobs)
                continue
            if time.monotonic() - self.began <= limit:
                continue
            if not self._head_is_alive():
                reason = f"{self.name} on {node_name()}: no head after {limit} s"
                raise JobExit(EXIT_FAILED, EndKind.FAILED, reason, again=True)
        if trial is not None:
            trial.kill()
        return address

    def _check_heads(self, jobs: JobsWatch) -> None:
        """Exit if no job that may be the head will come. A client that owns it submits another."""
        verdict = {} if self.options.client_owns else jobs.verdict()
        if not verdict.get("head", True):
            reason = cannot_start(verdict["gone"])
            raise JobExit(EXIT_FAILED, EndKind.FAILED, reason, again=True)

    def _head_is_pending(self) -> bool:
        """Return whether the head may still be in the queue, in a job of another kind."""
        return not self.options.scheduler and "head" not in self.folder.names()

    def _head_is_alive(self) -> bool:
        return self._watch.silence(HEARTBEAT) < _HEARTBEAT_TIMEOUT

    def _unreachable_message(self, address: str, busy: bool) -> str:
        host = self.folder.read("head/owner").get("node") or "its host"
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
        if self.options.client_owns or is_reachable(address, self.environ):
            log("the workers of this job were released")
            raise JobExit(0)
        raise self._scheduler_gone(address)

    def _scheduler_gone(self, address: str) -> JobExit:
        """Return the exit after the head is gone; its batch script may have noted a signal."""
        head = self.folder.read("head/owner").get("job")
        if (self.folder.path / "jobs" / f"{head}.stopped").exists():
            reason = "the head's job was stopped: it received a signal of the batch scheduler"
            return JobExit(EXIT_STOPPED, EndKind.CANCELLED, reason, again=True)
        reason = f"{self.name} on {node_name()}: the dask scheduler at {address} is gone"
        return JobExit(EXIT_FAILED, EndKind.FAILED, reason, again=True)

    def worker_failure(self, process: ManagedProcess) -> JobExit:
        """Return the exit after the workers failed, perhaps because the head is lost."""
        address = self.scheduler_address()
        if self.has_next_attempt and address and not is_reachable(address, self.environ):
            return self._scheduler_gone(address)
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
        registered = self.folder.registered()
        names = [name for name in worker_names(self.options) if name in registered]
        reason = self.stop_reason or "the walltime is nearly over"
        log(f"stopping ({reason}): {', '.join(names) or 'no worker is registered'}")
        if names:
            self._transfer_data(names)
        # If the batch scheduler cancelled this job, its exit code may be the only sign of that.
        cancelled = self.stop_reason.startswith("SIG") and not self.walltime.explains_signal()
        raise JobExit(EXIT_STOPPED if cancelled else 0)

    def _transfer_data(self, names: list[str]) -> None:
        timeout = self._retire_timeout()
        deadline = time.monotonic() + timeout
        argv = [sys.executable, str(self.folder.archive), "retire"]
        argv += [f"--timeout={timeout}", f"--workers={','.join(names)}"]
        helper = ManagedProcess("retire", argv, job_log(self.options), self.environ)
        while (
            helper.running
            and any(process.running for process in self.worker_processes)
            and time.monotonic() < deadline
            and not self._cluster_ended()
        ):
            time.sleep(0.25)
        retired = helper.exit_code == 0
        for process in self.worker_processes:
            process.wait(max(0.5, deadline - time.monotonic()) if retired else 0.5)
        helper.kill()

    def _retire_timeout(self) -> float:
        if not self.walltime.explains_signal():
            return _RETIRE_TIMEOUT
        return max(5.0, min(_RETIRE_WALLTIME_TIMEOUT, self.walltime.left() - _WALLTIME_RESERVE))

    def _cluster_ended(self) -> bool:
        return not {"ended", over(self.options.attempt)}.isdisjoint(self.folder.names())
