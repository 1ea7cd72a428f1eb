"""The head: the job with the dask scheduler, the user's command and mostly workers of its own."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NoReturn

from .certificate import make_certificate
from .children import STOP_DASK, ManagedProcess, run_command, with_archive
from .demand import END_AFTER
from .folder import EXIT_STOPPED, Ended, EndKind, heartbeat_file, modified_at
from .job import STOPPED_CODES, Job, JobExit, enough_workers, failure, last_attempt_text, over
from .log import failed_node, log, reason_in, with_reason
from .memory import over_memory_message, paused_message, with_memory
from .names import CERTIFICATE, NOTE, PREPARES, PROTOCOL, RUN, is_encrypted
from .network import dask_config, interface_problem, node_name
from .options import SuperviseOptions
from .presets import for_scheduling
from .transport import Choice, HeadsChoice
from .workers import JobsWatch, cannot_start

_POLL_INTERVAL = 0.25
_POLL_INTERVAL_AT_START = 0.05
_START_SECONDS = 60
"""Seconds in which workers that do not wait in a queue register."""
_HEARTBEAT_INTERVAL = 10
_MEMORY_INTERVAL = 3
"""Seconds between two looks at workers that lack memory."""
_LEASE_INTERVAL = 2
"""Seconds between two looks at the owner's lease."""
_CANCEL_TIMEOUT = 20
_SCHEDULER_EXIT_TIMEOUT = 0.5
"""Seconds by which the end of the dask scheduler may follow that of the command, its victim."""
_RUN_CANCEL_TIMEOUT = 10.0
"""Seconds for `run` to exit after a cancel: batch schedulers kill the job after about 30."""
_SIGNAL_TIMEOUT = 1.0
"""Seconds in which a batch scheduler that signals all processes of a job has done so."""
_CANCEL_SIGNAL_TIMEOUT = 3.0
"""The same after `gpujobs cancel` has written that the cluster ends; then it cancels the job."""
_WITNESS = ("sleep", "2147483647")
"""A process that gets SIGTERM from the batch scheduler only."""
_CLIENT_TIMEOUT = 1.0
"""Seconds until the dask scheduler has written that a client was connected."""
_CURE = "Client() connects to them"
NO_CLIENT = f"{RUN} connected no client, so its workers had no task; {_CURE}"
"""The reason of a cluster that is done without having been used."""
_NO_CLIENT_SECONDS = float(os.environ.get("GPUJOBS_NO_CLIENT_SECONDS", "300"))
"""Seconds without a client after which `run` may wait for another dask scheduler."""
_CLIENTS_INTERVAL = 5.0
"""Seconds between two looks at the clients."""
_WALLTIME_RESERVE = 15
"""Seconds of the walltime that are kept to stop the rest of the job."""


class Head(Job):
    """The head's job."""

    is_head = True
    role = "the head"

    def __init__(self, options: SuperviseOptions) -> None:
        super().__init__(options)
        self.scheduler: ManagedProcess | None = None
        self.command: ManagedProcess | None = None
        self._witness: ManagedProcess | None = None
        self._asked_to_exit = False
        self._heartbeat_time = 0.0
        self._memory_time = 0.0
        self._lease_time = 0.0
        self._reported: dict[str, int] = {}
        """How often each worker had been restarted when `run` was last informed."""
        self._client_time = self._clients_time = 0.0
        """When a client was last connected, or `run` started, and when that was last looked up."""
        self._paused: set[str] = set()
        """Workers of which `run` was informed that they are paused."""
        self._gone: set[str] = set()
        """Why jobs do not come, as far as `run` was informed."""

    def work(self) -> NoReturn:
        """Start the dask scheduler, the workers and `run`, and supervise them."""
        (self.folder.path / "scheduler.json").unlink(missing_ok=True)
        self._heartbeat()
        if problem := interface_problem(self.options.interface):
            raise failure(problem)
        self._check_certificate()
        self.environ["GPUJOBS_ATTEMPT"] = str(self.options.attempt)
        if self.options.end_after:
            self.environ[END_AFTER] = self.options.end_after
        choice = HeadsChoice(self.options, self.environ)
        if self.options.run_on == "ranks":
            self._use(self._settled(choice))
            self._run_in_ranks()
        scheduler = self._start_scheduler(choice)
        watch = JobsWatch(self.options, self.environ, self._events)
        while True:
            self._pause()
            self._heartbeat()
            # Some batch schedulers signal all processes of a job, which may end the command first.
            if self.command is not None and not self.command.running and not self.stop_reason:
                self._command_ended(self.command, scheduler)
            self._check_stop()
            self._check_idle()
            if not scheduler.running:
                self._scheduler_ended(scheduler)
            self.check_end()
            self.check_workers()
            self._check_lease()
            self._start_command()
            self._check_clients()
            self._check_jobs(watch)

    def _pause(self) -> None:
        """Wait; while `run` waits for the first workers, not longer than until one registers."""
        waits = self.command is None and self.options.run
        if not waits or time.monotonic() - self.began > _START_SECONDS:
            self.pause(_POLL_INTERVAL)
            return
        until, known = time.monotonic() + _POLL_INTERVAL, len(self.dask().connected)
        while len(self.dask().connected) == known and time.monotonic() < until:
            self.pause(_POLL_INTERVAL_AT_START)

    def _run_in_ranks(self) -> NoReturn:
        """`run` is in all ranks: dask-mpi makes rank 0 the dask scheduler and rank 1 the client."""
        self._note_attempt()
        self.start_workers()
        launcher = self.command = self.worker_processes[0]
        self._client_time = time.monotonic()
        self._start_witness()
        while launcher.running:
            self.pause(_POLL_INTERVAL)
            self._heartbeat()
            self._check_stop()
            self._check_idle()
            self.check_end()
            self._check_lease()
            self._check_clients()
            if launcher.running:
                self.check_workers()
        self._check_walltime_exit(launcher.exit_code)
        if launcher.exit_code:
            raise self.worker_failure(launcher)
        raise JobExit(0, EndKind.DONE)

    def stop(self) -> None:
        """Stop all processes; the dask scheduler closes the workers, which must not stop before."""
        if self.command is not None:
            self._ask_to_exit(self.command, 0)
            self.command.wait(2)
        self._report_memory()
        if self.scheduler is not None:
            self.scheduler.terminate()
        self.wait_for_workers()
        for process in (self.command, self.scheduler):
            if process is not None:
                process.wait(0.5)
                process.kill()
        if self._witness is not None:
            self._witness.kill()
            self._witness.wait(0.5)
        self._cancel_waiting_jobs()

    def _cancel_waiting_jobs(self) -> None:
        """If this fails, or is not possible from a node, waiting jobs find ``ended`` later."""
        name = f"job-ids-{self.options.attempt}"  # of this attempt, else of the whole cluster
        if over(self.options.attempt) not in self.folder.names():
            name = "job-ids"
        ids = self.folder.read_text(name).split()
        if not ids or not self.options.cancel:
            return
        problem = run_command([*self.options.cancel.split(), *ids], _CANCEL_TIMEOUT)
        if problem:
            log(f"cannot cancel the waiting jobs from here ({problem}); they exit when they start")

    # -- start -------------------------------------------------------------------------------------
    def _check_certificate(self) -> None:
        """Make the certificate of a job folder, which has none before."""
        folder = self.folder.path
        if any(map(is_encrypted, self.options.schemes)) and not (folder / CERTIFICATE).exists():
            try:
                make_certificate(folder)
            except (LookupError, OSError) as error:
                raise failure(str(error)) from None

    def _settled(self, choice: HeadsChoice) -> Choice:
        def pause(seconds: float) -> None:
            self.pause(seconds)
            self._heartbeat()
            self.check_end()
            if self.stop_reason:
                raise self._stopped(self._stop_message())

        settled = choice.settle(pause)
        if not settled.scheme:
            raise failure(settled.reason)
        return settled

    def _use(self, choice: Choice) -> None:
        """Take over the protocol and its settings."""
        self.environ.update(choice.environ or {})
        self.environ.update(dask_config(self.folder.path, choice.scheme))
        self.environ[PROTOCOL] = choice.scheme

    def _start_scheduler(self, choice: HeadsChoice) -> ManagedProcess:
        """Start the dask scheduler and the workers; return when it has an address."""
        if choice.is_open:
            scheduler = self._launch_prepared(choice)
        else:
            scheduler = self._launch(self._settled(choice))
        while (address := self.scheduler_address()) is None:
            self.pause(0.1)
            self._check_starting(scheduler)
            self.check_end()
        self.environ["DASK_SCHEDULER_ADDRESS"] = address
        log(f"the dask scheduler is at {address}")
        if self.options.ranks:
            self.start_workers()
        return scheduler

    def _launch_prepared(self, choice: HeadsChoice) -> ManagedProcess:
        """Let dask's processes prepare for ucxx while it is tried, as both take seconds.

        The dask scheduler does not listen before: no process learns of a protocol that is not used.
        """
        before = dict(self.environ)
        scheduler = self._launch(choice.likely, prepares=True)
        settled = self._settled(choice)
        if settled.scheme == choice.likely.scheme:
            scheduler.close_stdin()
            return scheduler
        for process in (scheduler, *self.worker_processes):
            process.kill()
        self.wait_for_workers()
        self.environ = before
        return self._launch(settled)

    def _launch(self, choice: Choice, *, prepares: bool = False) -> ManagedProcess:
        """Start the dask scheduler, which ``prepares`` or listens at once, and the workers."""
        self._use(choice)
        argv = [*self.options.scheduler, f"--protocol={choice.scheme}"]
        environ = for_scheduling(with_archive(self.environ, self.folder.archive))
        if prepares:
            environ[PREPARES] = "1"
        path = self.folder.logs / "scheduler.log"
        title = f"the dask scheduler on {node_name()}"
        scheduler = ManagedProcess(title, argv, path, environ, STOP_DASK, open_stdin=prepares)
        self.scheduler = scheduler
        if not self.options.ranks:  # they import dask meanwhile, and find the address in a file;
            self.start_workers()  # on other nodes, NFS could show the file half a minute late
        return scheduler

    def _check_starting(self, scheduler: ManagedProcess) -> None:
        if not scheduler.running:
            raise failure(scheduler.exit_message())
        if self.stop_reason:
            raise self._stopped(f"{self._stop_message()} while the dask scheduler was starting")
        limit = self.options.start_timeout
        if time.monotonic() - self.began > limit:
            raise failure(f"the dask scheduler did not start within {limit} s")

    def _start_command(self) -> None:
        """Start `run` once enough workers are registered."""
        if self.command is not None or not self.options.run:
            return
        registered = self.dask().connected
        if enough_workers(self.options, registered):
            number = len(registered)
            workers = "1 worker is" if number == 1 else f"{number} workers are"
            log(f"{workers} connected: `run` starts")
            self._note_attempt()
            path = self.folder.logs / "run.log"
            self.command = ManagedProcess(RUN, self.options.run, path, self.environ)
            self._client_time = time.monotonic()
            self._start_witness()

    def _note_attempt(self) -> None:
        """Divide the log of `run` between the attempts."""
        if self.options.attempt > 1:
            self._tell_run(
                f"{RUN} starts again ({self.options.attempt} of {self.options.attempts} attempts)"
            )

    def _start_witness(self) -> None:
        self._witness = ManagedProcess("the witness", _WITNESS, Path(os.devnull), self.environ)

    def _check_jobs(self, watch: JobsWatch) -> None:
        """Report jobs that will not come; exit if `run` waits for their workers."""
        if self.options.client_owns:  # who replaces them
            return
        verdict = watch.verdict()
        gone = verdict.get("gone", {})
        for reason in set(gone.values()) - self._gone:
            self._gone.add(reason)
            log(reason)
            self._tell_run(reason)
        if self.command is not None or not self.options.run or not verdict:
            return
        possible = {*self.dask().connected, *verdict["possible"]}
        if gone and not enough_workers(self.options, possible):
            raise failure(cannot_start(gone), again=True)
        if not verdict["asked"] and self.walltime.left() < self.options.walltime / 2:
            reason = "the other jobs have not come in half of the walltime, and the batch scheduler"
            raise failure(f"{RUN} cannot start: {reason} cannot be asked about them from a job")

    # -- ends --------------------------------------------------------------------------------------
    def _command_ended(self, command: ManagedProcess, scheduler: ManagedProcess) -> NoReturn:
        code = command.exit_code
        if not code:
            raise JobExit(0, EndKind.DONE, "" if self._had_client() else NO_CLIENT)
        self._check_walltime_exit(code)
        if scheduler.wait(_SCHEDULER_EXIT_TIMEOUT) and scheduler.exit_code:
            raise failure(scheduler.exit_message())
        reason = reason_in(command.log, code, offset=command.log_offset)
        reason = with_reason(f"run: ended with exit code {code}", reason)
        raise failure(with_memory(reason, self.dask().over_memory), code)

    def worker_failure(self, process: ManagedProcess) -> JobExit:
        """Return the exit after a worker or a rank failed; the client is in one with `ranks`."""
        found = super().worker_failure(process)
        found.reason = with_memory(found.reason, self.dask().over_memory)
        return found

    def _had_client(self) -> bool:
        """Return whether `run` used the workers; the dask scheduler writes that a moment later."""
        deadline = time.monotonic() + _CLIENT_TIMEOUT
        while not self.dask().had_client:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _check_walltime_exit(self, code: int | None) -> None:
        """Exit if `run` asks to be continued by the next attempt."""
        if code and code == self.options.walltime_exit:
            reason = f"run: asks to be continued (exit code {code})"
            reason += last_attempt_text(self.options)
            raise JobExit(code, EndKind.WALLTIME, reason, again=True)

    def _scheduler_ended(self, scheduler: ManagedProcess) -> NoReturn:
        if scheduler.exit_code != 0:
            raise failure(scheduler.exit_message())
        self._check_idle()
        if self.command is None:
            raise JobExit(0, EndKind.SHUTDOWN, "a client shut the dask scheduler down")
        # The command called client.shutdown() and may have more to do.
        while self.command.running:
            self.pause(_POLL_INTERVAL)
            self._check_stop()
        self._command_ended(self.command, scheduler)

    def _check_idle(self) -> None:
        """Exit if the dask scheduler asks for it; `run` has not succeeded then."""
        if reason := self.dask().idle_reason:
            code = EXIT_STOPPED if self.command is not None else 0
            raise JobExit(code, EndKind.IDLE, reason)

    def _check_stop(self) -> None:
        """Stop `run` and exit if the batch scheduler or the walltime requires it."""
        if not self.stop_reason and not self.walltime.nearly_over():
            return
        reason = self._stop_message()
        if self.command is None:
            raise self._stopped(reason)
        self._stop_command(self.command, reason)

    def _stop_command(self, command: ManagedProcess, reason: str) -> NoReturn:
        """Give `run` some time to exit: near the walltime the rest of it, else a few seconds."""
        seconds = _RUN_CANCEL_TIMEOUT
        if self.walltime.explains_signal():
            seconds = max(5.0, self.walltime.left() - _WALLTIME_RESERVE)
        log(f"{reason}: run: has {seconds:.0f} s to finish")
        self._ask_to_exit(command, _SIGNAL_TIMEOUT)
        command.wait(seconds)
        code = command.exit_code
        self._check_walltime_exit(code)
        if code == 0 and self.options.attempts == 1:
            raise JobExit(0, EndKind.DONE)
        if self.options.attempts > 1 and code not in STOPPED_CODES:
            raise failure(f"{reason}; run: ended with exit code {code}", code or EXIT_STOPPED)
        raise self._stopped(f"{reason}; run: ended with exit code {code}" if code else reason)

    def end_with_cluster(self, ended: Ended) -> JobExit:
        """After a cancel, `run` has as long to exit as after a signal of the batch scheduler."""
        if ended.kind is EndKind.CANCELLED and self.command is not None:
            self._ask_to_exit(self.command, _CANCEL_SIGNAL_TIMEOUT)
            self.command.wait(_RUN_CANCEL_TIMEOUT)
        return JobExit(ended.exit_code)

    def _ask_to_exit(self, command: ManagedProcess, seconds: float) -> None:
        """Send SIGTERM to `run`, but only once: a second one may disturb it while it saves.

        The batch scheduler may have sent one to all processes of the job, or do so within
        ``seconds``.
        """
        if self._asked_to_exit or not command.running:
            return
        self._asked_to_exit = True
        witness = self._witness
        if witness is None or not witness.wait(seconds) or witness.exit_code != EXIT_STOPPED:
            command.terminate()

    def _stopped(self, reason: str) -> JobExit:
        near = self.walltime.explains_signal()
        kind = EndKind.WALLTIME if near else EndKind.CANCELLED
        if not near and (failed := self._failed_node()):
            kind, reason = EndKind.FAILED, f"{failed}; {reason}"
        reason = with_memory(f"the head's job was stopped: {reason}", self.dask().over_memory)
        reason += last_attempt_text(self.options)
        return JobExit(EXIT_STOPPED, kind, reason, again=True)

    def _failed_node(self) -> str:
        """Return which node of this job has failed, as Slurm tells the launcher when it signals."""
        deadline, found = time.monotonic() + _SIGNAL_TIMEOUT, ""
        while self.options.nodes > 1 and time.monotonic() < deadline and not found:
            if not self.worker_processes or "ended" in self.folder.names():
                break
            time.sleep(0.1)
            launcher = self.worker_processes[0]
            found = failed_node(launcher.log, launcher.log_offset)
        return found

    def _stop_message(self) -> str:
        ended = Ended.parse(self.folder.read("ended"))
        if ended.kind is EndKind.CANCELLED:
            return ended.reason
        near = self.walltime.explains_signal()
        return "the walltime is nearly over" if near else f"it received {self.stop_reason}"

    # -- signs of life -----------------------------------------------------------------------------
    def _heartbeat(self) -> None:
        """Write the head's sign of life, for jobs that wait for the dask scheduler."""
        now = time.monotonic()
        if now - self._memory_time > _MEMORY_INTERVAL:
            self._memory_time = now
            self._report_memory()
        if now - self._heartbeat_time <= _HEARTBEAT_INTERVAL:
            return
        self._heartbeat_time = now
        try:
            self.folder.write(heartbeat_file(self.options.attempt), time.time())
        except OSError as error:
            log(f"cannot write to {self.folder.path}: {error}")

    def _report_memory(self) -> None:
        """Write to the log of `run` if a worker is paused, or restarts again and again."""
        if self.command is None:
            return
        for name, worker in self.dask().over_memory.items():
            if "paused" in worker and name not in self._paused:
                self._paused.add(name)
                self._tell_run(paused_message(name, worker))
            restarts = worker["restarts"]
            if restarts and restarts >= 2 * self._reported.get(name, 0):
                self._reported[name] = restarts
                self._tell_run(over_memory_message(name, worker))

    def _check_clients(self) -> None:
        """Note that `run` has no client: if it waits for another dask scheduler, it never ends."""
        now, note = time.monotonic(), self.folder.path / NOTE
        if self.command is None or now - self._clients_time < _CLIENTS_INTERVAL:
            return
        self._clients_time = now
        if self.dask().clients != 0:
            self._client_time = now
            note.unlink(missing_ok=True)
        elif now - self._client_time > _NO_CLIENT_SECONDS and not note.exists():
            minutes = f"{_NO_CLIENT_SECONDS / 60:g} min"
            text = f"{RUN} has had no client for {minutes}, so its workers have no task; {_CURE}"
            self._tell_run(text)
            with contextlib.suppress(OSError):
                note.write_text(f"{text}\n", encoding="utf-8")

    def _tell_run(self, text: str) -> None:
        """Write a line to the log of `run`."""
        log = self.folder.logs / "run.log"
        with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write(f"gpujobs: {text}\n")

    def node_lost(self, reason: str) -> None:
        """Report a node without which the cluster goes on."""
        super().node_lost(reason)
        self._tell_run(reason)

    def _check_lease(self) -> None:
        """Exit if the client that owns the cluster has not renewed its lease."""
        now = time.monotonic()
        if not self.options.lease or now - self._lease_time < _LEASE_INTERVAL:
            return
        self._lease_time = now
        folder = self.folder.path
        try:
            now_there = modified_at(folder / heartbeat_file(self.options.attempt))
            age = now_there - modified_at(folder / "lease")
        except OSError:
            age = now - self.began
        if age > self.options.lease:
            raise failure(f"the client that owns this cluster has been silent for {age:.0f} s")
