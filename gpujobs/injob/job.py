"""The supervisor of a job: the part that heads and jobs of workers share, and its attempts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from .children import STOP_DASK, ManagedProcess, is_process, visible_process, with_archive
from .configuration import LIFE, life_variable
from .events import DaskWorkers, EventReader, events_file
from .folder import (
    EXIT_FAILED,
    EXIT_STOPPED,
    SCRIPT_ENDED,
    TRANSPORT,
    Ended,
    EndKind,
    Folder,
    RegisteredWorker,
)
from .gpuerrors import gpu_errors
from .gpus import check_driver, job_devices, shared_gpu_message
from .jobevents import (
    JobReader,
    LostNode,
    append_event,
    event_files,
    job_events,
    lost_nodes,
    run_name,
)
from .log import Walltime, launcher_reason, log, nodes_seen, with_reason
from .mps import MpsError, MpsService, is_provided, shared
from .names import NOTE, UCX_WARNINGS, group_prefix, job_name, job_worker_names
from .network import node_name
from .options import SuperviseOptions
from .presets import preset
from .rank import job_log, node_file, report_lost, start_launcher
from .sampler import SamplingThread, start_sampler


# -- the workers of a job: their names, and how long they live -------------------------------------
def worker_names(options: SuperviseOptions) -> list[str]:
    """Return the names of the workers of a job."""
    cluster_id = Folder(options.folder).cluster_id
    return job_worker_names(
        cluster_id, options.number, options.n_workers, options.ranks, options.group
    )


def enough_workers(options: SuperviseOptions, registered: Iterable[str]) -> bool:
    """Return whether `run` may start with the workers of these names."""
    names, cluster_id = list(registered), Folder(options.folder).cluster_id
    for item in options.start_groups:
        group, _, number = item.partition("=")
        prefix = group_prefix(cluster_id, group)
        if sum(name.startswith(prefix) for name in names) < int(number):
            return False
    return len(names) >= options.start_workers


def life(options: SuperviseOptions, walltime: Walltime, *, endless: bool) -> dict[str, str]:
    """Return the variable by which the dask scheduler knows when the workers of a job must leave.

    ``endless``: they are beside the dask scheduler, which ends with them.
    """
    left = float("inf") if endless else walltime.workers_lifetime()
    return {LIFE: life_variable(options.started, time.time() + left, options.task_time)}


# -- attempts of a cluster with `requeue` ----------------------------------------------------------
# The jobs of all attempts are submitted at once. Those of each attempt wait until all jobs of the
# one before have ended, and exit at once if the cluster itself has ended. Each attempt has a head
# and a file of events of its own.

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""Signals that end a job. LSF sends the first one to all of its processes."""
STOPPED_CODES = (None, 0, *(128 + number for number in _STOPS))
"""Exit codes of a `run` that was stopped, and that the next attempt continues; None: it runs."""

_OF_HEAD = (TRANSPORT, NOTE, SCRIPT_ENDED, "rank-error")
"""Files of the head and its own processes."""


def over(attempt: int) -> str:
    """Return the name of the file whose presence means that ``attempt`` has ended."""
    return f"over-{attempt}"


def end_attempt(folder: Folder, attempt: int, reason: str) -> None:
    """End an attempt: each of its jobs exits when it finds the file."""
    folder.create(over(attempt), f"{reason}\n")


def last_attempt_text(options: SuperviseOptions) -> str:
    """Return that no attempt follows, for the reason of an end; "" without `requeue`."""
    if options.attempts == 1 or options.has_next_attempt:
        return ""
    return f", in the last of {options.attempts} attempts (`requeue`)"


def clear_for_head(folder: Folder) -> None:
    """Remove the files that the head of the attempt before has left for its own processes."""
    for name in _OF_HEAD:
        (folder.path / name).unlink(missing_ok=True)


# -- the supervisor of a job -----------------------------------------------------------------------
FOLDER_TIMEOUT = 120
"""Seconds for which the cluster's folder may be missing: a file server may be away for a while."""
_WRITE_TIMEOUT = 1.0
"""Seconds after which a file of one line has been written."""
_STOP_TIMEOUT = 3
"""Seconds that a process has between SIGTERM and SIGKILL."""
_RANKS_EXIT_TIMEOUT = 30
"""Seconds that the ranks have to exit when the script is over."""
SCALE = "scale"
"""Why a job leaves that is no longer wanted."""
_NAMES_SHOWN = 4
_NODE_TIMEOUT = 60.0
"""Seconds without any worker after which a node of an allocation is lost."""
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


@dataclass(eq=False)
class JobExit(Exception):
    """The job exits. ``kind`` is why the cluster ends with it; None if the cluster goes on.

    ``again``: the next attempt continues, if there is one.
    """

    exit_code: int
    kind: EndKind | None = None
    reason: str = ""
    again: bool = False


def failure(reason: str, exit_code: int = EXIT_FAILED, *, again: bool = False) -> JobExit:
    """Return the exit of a job that fails."""
    return JobExit(exit_code, EndKind.FAILED, reason, again=again)


class Job:
    """One job. Subclasses do its `work`, which ends by a `JobExit`."""

    is_head = False
    role = "workers"
    """For the log of the job."""

    def __init__(self, options: SuperviseOptions) -> None:
        self.options = options
        self.folder = Folder(options.folder)
        self._events = EventReader(self.folder.path / events_file(options.attempt))
        self.name = job_name(self.folder.cluster_id, options.number, options.group)
        self.walltime = Walltime(options.started, options.walltime, options.warning)
        self.stop_reason = ""
        """A signal of the batch scheduler, or "scale"; "" while the job may run."""
        self.worker_processes: list[ManagedProcess] = []
        self._sampler: ManagedProcess | SamplingThread | None = None
        self._mps: MpsService | None = None
        # ucxx sets a variable that UCX does not use, and every process would warn of it.
        self.environ = {UCX_WARNINGS: "n", **os.environ}
        if options.python_folder:
            path = self.environ.get("PATH", os.defpath)
            self.environ["PATH"] = f"{options.python_folder}:{path}"
        self.began = self._folder_seen = time.monotonic()
        self.all_registered = False
        self._seen: dict[int, float] = {}
        """When each node of an allocation last had a worker."""
        self._registered: Mapping[str, RegisteredWorker] | None = None
        self._with_workers: set[int] = set()
        """Nodes that have a worker in `_registered`."""
        self._nodes: dict[str, JobReader] = {}
        """Readers of the events of nodes, by the name of the node."""
        self._lost: set[int] = set()
        """Nodes of an allocation that are lost."""
        self._script_ended = 0.0
        """When the script in all ranks was first seen to be over; 0: not yet."""
        self._parent = os.getppid()
        self._batch_script = visible_process(options.batch_script)

    # -- life --------------------------------------------------------------------------------------
    def run(self) -> int:
        """Do the job's work; return its exit code."""
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        try:
            self._check_batch_script()  # it may have been killed before this process was ready
            self.check_end()
            log(f"job {self.options.job} on {node_name()}: {self.role}")
            self.work()
        except JobExit as job_exit:
            return self._exit(job_exit)

    def work(self) -> NoReturn:
        """Do the work of this kind of job until it ends. Raises JobExit."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop the processes of this job."""
        for process in self.worker_processes:
            process.terminate()
        self.wait_for_workers()

    def wait_for_workers(self) -> None:
        """Wait a moment for workers that were asked to exit, then kill them."""
        for process in self.worker_processes:
            process.wait(_STOP_TIMEOUT)
            process.kill()
        if self._sampler is not None:
            self._sampler.kill()
        if self._mps is not None:
            self._mps.stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop_reason in ("", SCALE):  # which has all the time of the job
            self.stop_reason = signal.Signals(number).name

    def _exit(self, job_exit: JobExit) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if job_exit.reason:
            log(job_exit.reason)
            name = job_events(self.options.job)
            append_event(self.folder, name, "failed", reason=job_exit.reason)
        if job_exit.again and self.options.has_next_attempt and "ended" not in self.folder.names():
            end_attempt(self.folder, self.options.attempt, job_exit.reason)
            self.stop()
            return 0
        # If a client owns the cluster, it decides what follows when a job of workers fails.
        if job_exit.kind is not None and (self.is_head or not self.options.client_owns):
            ended = Ended(job_exit.kind, job_exit.exit_code, job_exit.reason, self.options.job)
            self.folder.end(ended)
        self.stop()
        return job_exit.exit_code

    # -- workers -----------------------------------------------------------------------------------
    def start_workers(self) -> None:
        """Start the workers of this job, and the sampler of a job of one node."""
        if not self.options.workers:
            return
        # Workers beside `run` end with it: they do its last tasks near the walltime.
        environ = self.environ
        if self.options.node is None or LIFE not in environ:  # else the job has set it
            environ = {**environ, **life(self.options, self.walltime, endless=self.is_head)}
        try:
            if self.options.ranks:  # each node, or rank, takes its GPUs by itself
                self.worker_processes = start_launcher(self.options, environ)
            else:
                self._start_nannies(environ)
        except LookupError as error:  # of GPUs, their driver, or the nodes
            raise self.gpu_failure(f"{self.name} on {node_name()}: {error}") from None

    def _start_nannies(self, environ: Mapping[str, str]) -> None:
        """Start the process of all nannies of the job, and the sampler."""
        options, words, devices = self.options, self.options.workers, None
        environ = preset(with_archive(environ, self.folder.archive))
        if options.gpus:
            check_driver(options.cuda)
            explicit = options.each_gpu or not options.worker_size.usual
            source = options.visible_devices
            step = options.node is not None
            devices = job_devices(source, options.gpus, environ, explicit=explicit, step=step)
        if devices is not None and options.mps:
            environ = shared(environ, options.mps_thread_percentage)
            devices = self._start_mps(devices, environ)
        if devices is not None:
            own = options.worker_size.devices(devices)
            environ.update(options.worker_size.environ(own))
            if options.each_gpu and len(own) > 1:  # else dask appends "-0" to the name
                words = (*words, f"--nworkers={len(own)}")
        title, argv = f"worker {self.name} on {node_name()}", [*words, "--name", self.name]
        self.worker_processes = [ManagedProcess(title, argv, job_log(options), environ, STOP_DASK)]
        if options.gpus:
            self._sampler = start_sampler(options.folder, devices, options.gpus, self.environ)
        else:
            self._sampler = SamplingThread(options.folder, options.job)

    def _start_mps(self, devices: list[str], environ: dict[str, str]) -> list[str]:
        """Start CUDA's MPS for workers of this environment; return the names of their GPUs."""
        if is_provided(environ):
            log("the job has MPS already")
            return devices
        try:
            self._mps = MpsService(self.folder.archive, devices, job_log(self.options), environ)
        except MpsError as error:
            raise failure(f"{self.name} on {node_name()}: {error}") from None
        environ.update(self._mps.environ)
        return self._mps.devices

    def check_workers(self) -> None:
        """Exit if a worker is dead, not registered in time, or shares its GPU."""
        if self._mps is not None and (problem := self._mps.problem()):
            raise self.gpu_failure(problem)
        failed = [process for process in self.worker_processes if process.exit_code]
        going_on = self.options.keep_going and any(p.running for p in self.worker_processes)
        if failed and not going_on:
            self.wait_for_end_of_head()
            if self.stop_reason:  # by a signal to all processes of the job
                return
            raise self.worker_failure(failed[0])
        registered = self.dask().connected
        if registered is not self._registered:
            self._check_new(registered)
        if self.worker_processes and not self.all_registered:
            self._check_registered(set(registered))
        self._check_nodes()

    def _check_new(self, registered: Mapping[str, RegisteredWorker]) -> None:
        """Look at all workers once after each change."""
        if not self.options.client_owns and (message := shared_gpu_message(registered)):
            raise failure(message)
        prefixes = {n: job_name(self.folder.cluster_id, n) for n in self.options.node_numbers}
        self._with_workers = {
            number
            for number, prefix in prefixes.items()
            if any(f"{name}-".startswith(f"{prefix}-") for name in registered)
        }
        self._registered = registered

    def _check_nodes(self) -> None:
        """Note nodes that have lost their workers: not every launcher reports a lost node."""
        now = time.monotonic()
        for number in self.options.node_numbers:
            if number in self._with_workers:
                self._seen[number] = now
            elif now - self._seen.get(number, now) > _NODE_TIMEOUT:
                self._seen[number] = float("inf")
                # A node that has released its workers has removed the file.
                if node := self.folder.read(node_file(number)).get("node"):
                    name = job_name(self.folder.cluster_id, number)
                    report_lost(self.options, number, f"{name} on {node}: workers are gone")

    def node_lost(self, reason: str) -> None:
        """Go on without a node."""
        log(reason)

    def _check_registered(self, registered: set[str]) -> None:
        expected = worker_names(self.options)
        missing = [name for name in expected if name not in registered]
        if missing and self._lost:  # of a node that is lost, without which the others go on
            return
        if missing:
            self._check_start_timeout(missing)
            return
        self.all_registered = True
        unexpected = registered.difference(expected)
        if self.options.run_on == "ranks" and unexpected:
            raise failure(f"unexpected workers: {', '.join(sorted(unexpected))}")

    def _check_start_timeout(self, missing: list[str]) -> None:
        limit = self.options.start_timeout
        if time.monotonic() - self.began <= limit:
            return
        files = [self.folder.path / node_file(n) for n in self.options.node_numbers]
        started = sum(path.exists() for path in files)
        if started < len(files):
            raise failure(
                f"{self.worker_processes[0].name} has started {started} of {self.options.nodes} "
                f"nodes within {limit} s (`node_launcher`, or `mpi`, of the site)"
            )
        names = missing[:_NAMES_SHOWN]
        if len(missing) > _NAMES_SHOWN:
            names.append("…")
        raise self.gpu_failure(
            f"{', '.join(names)} did not register with the dask scheduler within {limit} s"
        )

    def worker_failure(self, process: ManagedProcess) -> JobExit:
        """Return the exit after a worker or a launcher failed; a node or rank may have said why."""
        if error := self.folder.read("rank-error"):
            return failure(error["reason"], error["exit_code"])
        if lost := list(self._lost_nodes().values()):
            return failure(lost[0].reason, lost[0].exit_code)
        if self.options.ranks:
            return failure(self._launcher_message(process))
        return self.gpu_failure(process.exit_message())

    def gpu_failure(self, reason: str) -> JobExit:
        """Return the exit after the workers failed, with what speaks against the GPUs."""
        age = time.monotonic() - self.began
        if errors := gpu_errors(self.options, self.environ, age):
            reason = f"{reason} ({errors})"
        return failure(reason)

    def _launcher_message(self, launcher: ManagedProcess) -> str:
        options = self.options
        reason = launcher_reason(launcher.log, launcher.log_offset)
        message = f"{launcher.name} ended (exit code {launcher.exit_code})"
        seen = nodes_seen(launcher.log, launcher.log_offset, options.ranks_per_node)
        if seen is not None and seen < options.nodes:
            message = f"the launcher sees {seen} of {options.nodes} nodes (`mpi` of the site)"
        return with_reason(message, reason)

    def wait_for_end_of_head(self) -> None:
        """If the head is ending, wait until it has written why."""

    # -- the cluster -------------------------------------------------------------------------------
    def dask(self) -> DaskWorkers:
        """Return the workers of the dask scheduler of this attempt."""
        return self._events.read()

    def scheduler_address(self) -> str | None:
        """Return the dask scheduler's address, once it has one."""
        return self.dask().address

    def check_end(self) -> None:
        """Exit if the cluster has ended; note a request that this job's workers exit."""
        names = self.folder.names()
        self._check_folder(bool(names))
        if f"leave-{self.options.job}" in names and not self.is_head:
            self.stop_reason = self.stop_reason or SCALE
        if self.options.node_numbers:
            self._check_lost()
        if "rank-error" in names and self.worker_processes:
            launcher = self.worker_processes[0]
            launcher.wait(_STOP_TIMEOUT)  # if it hangs in its abort, it is killed with the job
            raise self.worker_failure(launcher)
        if SCRIPT_ENDED in names:
            self._check_script_end()
        if over(self.options.attempt) in names:
            log(f"attempt {self.options.attempt} has ended")
            raise JobExit(0)
        if "ended" in names:
            value = self.folder.read("ended")
            if not value:  # bash is still writing it
                time.sleep(_WRITE_TIMEOUT)
                value = self.folder.read("ended")
            ended = Ended.parse(value)
            log(f"the cluster has ended: {ended.reason or 'run: is done'}")
            raise self.end_with_cluster(ended)

    def _check_lost(self) -> None:
        """Exit if a node of this job is lost, unless the others go on."""
        for number, lost in self._lost_nodes().items():
            if number in self._lost:
                continue
            if not self.options.keep_going:
                raise failure(lost.reason, lost.exit_code)
            self._lost.add(number)
            self.node_lost(lost.reason)

    def _lost_nodes(self) -> dict[int, LostNode]:
        """Return the nodes of this job that are lost, by their numbers through all jobs."""
        jobs = self.folder.path / "jobs"
        for job, node, name in event_files(Folder(str(jobs)).names()):
            if job == self.options.job and node:
                self._nodes.setdefault(node, JobReader(jobs / name)).read()
        facts = (reader.state for reader in self._nodes.values())
        return lost_nodes(run_name(), facts)

    def _check_script_end(self) -> None:
        """Exit if the script in all ranks is over, but a worker was still starting.

        That worker waits for a dask scheduler that is gone, and the launcher waits for its rank.
        """
        self._script_ended = self._script_ended or time.monotonic()
        late = time.monotonic() - self._script_ended > _RANKS_EXIT_TIMEOUT
        if late and not self.all_registered:
            log("run is over; the workers that were still starting are stopped")
            raise JobExit(0, EndKind.DONE)

    def end_with_cluster(self, ended: Ended) -> JobExit:
        """Return the exit of this job after the cluster has ended."""
        return JobExit(0)

    def _check_folder(self, found: bool) -> None:
        if found:
            self._folder_seen = time.monotonic()
        elif time.monotonic() - self._folder_seen > FOLDER_TIMEOUT:
            raise failure(f"{self.folder.path} has been missing for {FOLDER_TIMEOUT} s")

    def pause(self, seconds: float) -> None:
        """Wait; return early if the job must stop."""
        deadline = time.monotonic() + seconds
        while not self.stop_reason and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(0.25, left))
            self._check_batch_script()
        if self.stop_reason:
            time.sleep(0.05)

    def _check_batch_script(self) -> None:
        """Exit if the batch script is gone: without cgroups, only that is killed with a job.

        The GPUs may already belong to another job. Without its head, a cluster cannot go on.
        """
        script = self._batch_script
        if os.getppid() != self._parent or (script and not is_process(script)):
            kind = EndKind.FAILED if self.is_head else None
            reason = f"{self.name}: its batch script was killed"
            raise JobExit(EXIT_STOPPED, kind, reason, again=self.is_head)
