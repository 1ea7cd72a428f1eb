"""Processes that a job starts, and their CPU time and memory."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType

from .log import reason_in, with_reason
from .names import IGNORED_SIGNALS

STOP_DASK = signal.SIGHUP
"""Ends dask's processes, which leave the signals of the batch scheduler to the supervisor."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_OF_BATCH_SCHEDULER = (signal.SIGTERM, signal.SIGINT)
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a batch scheduler, or of the user, to processes that would die of them."""
_TICKS = os.sysconf("SC_CLK_TCK")
_FIRST_TIME = 11
"""Of the four CPU times in `stat`, behind the command: own and of children that have exited."""
_MEMORY_COST = 0.003
"""Most part of a core's time for which memory is measured."""


class ManagedProcess:
    """A process of the job, with its output in a log.

    It has a process group of its own, so that signals to the job's group do not reach it.
    """

    def __init__(
        self,
        name: str,
        argv: Iterable[str],
        log: Path,
        environ: Mapping[str, str],
        stop: signal.Signals = signal.SIGTERM,
        *,
        open_stdin: bool = False,
    ) -> None:
        """``stop``: the signal that asks it to exit. ``open_stdin``: it ends with this process."""
        self.name = name
        self.log = log
        self._stop = stop
        argv = list(argv)
        with log.open("ab") as output:
            self.log_offset = output.tell()
            """Where the output of this process begins."""
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE if open_stdin else subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environ,
                    preexec_fn=functools.partial(_isolate, _ignored(environ)),
                )
            except OSError as error:
                output.write(f"gpujobs: cannot start {argv[0]}: {error.strerror}\n".encode())
                self._process = subprocess.Popen(["/bin/sh", "-c", "exit 127"])

    @property
    def exit_code(self) -> int | None:
        """Exit code, 128 + n after signal n; None while it runs."""
        code = self._process.poll()
        if code is None or code >= 0:
            return code
        return 128 - code

    @property
    def running(self) -> bool:
        """Whether it has not exited yet."""
        return self.exit_code is None

    def exit_message(self) -> str:
        """Return how it ended, with the reason in its log."""
        reason = reason_in(self.log, self.exit_code, offset=self.log_offset)
        return with_reason(f"{self.name} ended (exit code {self.exit_code})", reason)

    def close_stdin(self) -> None:
        """End the standard input of a process with ``open_stdin``."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def terminate(self) -> None:
        """Ask the process and its children to exit."""
        if self.running:
            self._signal_group(self._stop)

    def wait(self, seconds: float) -> bool:
        """Wait until it has exited; return False if it has not within ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.running

    def kill(self) -> None:
        """Kill it, and any processes of its group that it left behind."""
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, number)


def _ignored(environ: Mapping[str, str]) -> list[signal.Signals]:
    """Return the signals that the batch scheduler of the job sends to all of its processes."""
    return [signal.Signals[f"SIG{name}"] for name in environ.get(IGNORED_SIGNALS, "").split()]


def _isolate(ignored: Iterable[signal.Signals]) -> None:
    """Runs in the new process before its program starts."""
    os.setpgrp()
    # Bash lets the supervisor, which runs in the background, and all its children ignore SIGQUIT.
    for number in (signal.SIGQUIT, *_WARNINGS):
        signal.signal(number, signal.SIG_DFL)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()  # the supervisor, even if that is killed


def end_with_parent() -> None:
    """Let this process be killed when its parent has ended; on Linux only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Set a property of this process; on Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def defer_signals() -> None:
    """Let this process of dask, but not its children, ignore the signals of the batch scheduler.

    Slurm and others send them to all processes of a job. The supervisor, which gets them too, first
    retires the workers, and gives `run` its time. Call this when dask has installed its handlers:
    they react to `STOP_DASK` then.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is _ignore:
        return
    for number in (*_OF_BATCH_SCHEDULER, *_WARNINGS):
        if signal.getsignal(number) is not signal.SIG_IGN:  # which its children inherit
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)
    _restore_signals_in_forks()
    if callable(handler):
        signal.signal(STOP_DASK, lambda _, frame: handler(signal.SIGTERM, frame))
    else:
        signal.signal(STOP_DASK, signal.SIG_DFL)


def restore_signals() -> None:
    """Let signals end this process, which is a fork of one of dask's processes."""
    for number in (*_OF_BATCH_SCHEDULER, STOP_DASK):
        signal.signal(number, signal.SIG_DFL)
    for number in _WARNINGS:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, signal.SIG_DFL)


@functools.cache
def _restore_signals_in_forks() -> None:
    """Register `restore_signals` once: forks inherit it, and may defer signals themselves."""
    os.register_at_fork(
        before=_block_signals, after_in_parent=_unblock_signals, after_in_child=restore_signals
    )
    os.register_at_fork(after_in_child=_unblock_signals)


_masks = threading.local()


def _block_signals() -> None:
    """Keep a signal that ends a new fork until that has restored its reaction to it."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_BATCH_SCHEDULER)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, a handler is not inherited by the programs that a task starts."""


# -- a daemon, and the process that keeps it -------------------------------------------------------
class KeptDaemon:
    """A daemon in the process group of this process, which ends it whatever happens.

    This process, its keeper, is a child of the supervisor and outlives that for a moment: a daemon
    that only dies with its parent would leave its own children behind.
    """

    def __init__(self, argv: list[str], log: Path) -> None:
        """Raises OSError if it cannot be started."""
        self._parent = os.getppid()  # before this process may outlive it
        _prctl(_PR_SET_PDEATHSIG, 0)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the daemon's children become those of this process
        self._asked = False
        signal.signal(STOP_DASK, self._on_stop)
        for number in (*_OF_BATCH_SCHEDULER, *_WARNINGS):
            signal.signal(number, signal.SIG_IGN)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_leave_signals_to_keeper,
            )

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    @property
    def wanted(self) -> bool:
        """Whether the supervisor is alive, and has not asked for the end."""
        return os.getppid() == self._parent and not self._asked

    def end(self, seconds: float) -> None:
        """Kill it and all that it has started, unless it exits by itself within ``seconds``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        self._process.wait()
        while children := _children():
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _children() -> list[int]:
    """Return the children of this thread, also those that it has adopted."""
    with contextlib.suppress(OSError):  # of an unusual kernel
        text = Path("/proc/thread-self/children").read_text(encoding="ascii")
        return list(map(int, text.split()))
    return []


def _leave_signals_to_keeper() -> None:
    """Runs in the new process: signals to its group must not end it before its users."""
    for number in (STOP_DASK, *_OF_BATCH_SCHEDULER, *_WARNINGS):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def run_command(argv: list[str], timeout: float, folder: Path | None = None, text: str = "") -> str:
    """Run a command to its end, whatever its exit code; return why that was not possible, or "".

    ``text``: its input.
    """
    try:
        subprocess.run(
            argv,
            input=text.encode(),
            timeout=timeout,
            capture_output=True,
            check=False,
            cwd=folder,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""


def is_process(pid: int) -> bool:
    """Return whether a process of this user has the number ``pid``; False for 0."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return pid > 0


def visible_process(text: str) -> int:
    """Return the process of ``PID@NAMESPACE``, 0 if it is invisible here.

    A container may have a namespace of process ids of its own.
    """
    pid, _, namespace = text.partition("@")
    try:
        own = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return 0
    return int(pid) if namespace == own else 0


def with_archive(environ: Mapping[str, str], archive: Path) -> dict[str, str]:
    """Return ``environ`` for a process of dask, which imports its preload from the archive.

    The archive comes last: it never hides a module of the user. `run` does not get it.
    """
    path, own = environ.get("PYTHONPATH"), _without_colon(archive)
    return {**environ, "PYTHONPATH": f"{path}:{own}" if path else own}


@functools.cache
def _without_colon(archive: Path) -> str:
    """Return a path of the archive that can be in PYTHONPATH, where a colon separates paths."""
    if ":" not in str(archive):
        return str(archive)
    folder = tempfile.mkdtemp(prefix="gpujobs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return shutil.copy(archive, folder)


# -- CPU time and memory ---------------------------------------------------------------------------
class HostMeter:
    """Measures the processes of a job: those of its session, and what has its marks.

    The marks are its folder and its number in the environment. So it finds its processes under any
    launcher, and also those whose parent has exited. A host may have many jobs, and each of them a
    meter: of the session of another job, one process is looked at, once.
    """

    def __init__(
        self,
        folder: str,
        job: int,
        proc: Path = Path("/proc"),
        session_of: Callable[[int], int] = os.getsid,
        supervisor: int | None = None,
    ) -> None:
        """``supervisor``: its process; by default the parent of this one."""
        self._marks = {f"GPUJOBS_FOLDER={folder}".encode(), f"GPUJOBS_JOB={job}".encode()}
        self._proc = proc
        self._session_of = session_of
        self._session = self._session_at(os.getpid())
        self._known: dict[str, bool] = {}
        """Whether a process belongs to the job, by its id."""
        self._sessions: dict[int, bool] = {}
        """The same of all processes of a session. One in which jobs were started is not here."""
        supervisor = supervisor or os.getppid()
        # It began with the batch script, or the process of a launcher.
        if self._session in (supervisor, self._parent_of(supervisor)):
            self._sessions[self._session] = True
        self._memory, self._due = 0, 0.0
        self._before = sum(self._cpu_seconds(pid) for pid in self._members())

    def measure(self) -> tuple[float, int]:
        """Return the CPU seconds since the last call, and the memory in bytes.

        The kernel walks through all pages for the memory: that of an earlier call is returned if it
        would take too much time.
        """
        members = self._members()
        total = sum(map(self._cpu_seconds, members))
        seconds, self._before = max(0.0, total - self._before), total
        if time.monotonic() >= self._due:
            started = time.process_time()
            self._memory = sum(map(self._resident, members))
            self._due = time.monotonic() + (time.process_time() - started) / _MEMORY_COST
        return seconds, self._memory

    def _members(self) -> list[str]:
        pids = [name for name in os.listdir(self._proc) if name.isdecimal()]  # noqa: PTH208 - only names
        kept = {*map(int, pids), self._session}  # another one may get the number of one that ended
        self._sessions = {one: own for one, own in self._sessions.items() if one in kept}
        self._known = {pid: self._is_known(pid) for pid in pids}
        return [pid for pid, own in self._known.items() if own]

    def _is_known(self, pid: str) -> bool:
        if pid in self._known:
            return self._known[pid]
        session = self._session_at(int(pid))
        if session in self._sessions:
            return self._sessions[session]
        own = self._marks <= set(self._read(pid, "environ").split(b"\0"))
        if session != self._session:
            self._sessions[session] = own
        return own

    def _session_at(self, pid: int) -> int:
        """Return the session of a process; 0 if it has exited. Kernel threads have that, too."""
        with contextlib.suppress(OSError):
            return self._session_of(pid)
        return 0

    def _parent_of(self, pid: int) -> int:
        fields = self._read(str(pid), "stat").rpartition(b")")[2].split()
        return int(fields[1]) if fields[1:] else 0

    def _cpu_seconds(self, pid: str) -> float:
        fields = self._read(pid, "stat").rpartition(b")")[2].split()
        return sum(map(int, fields[_FIRST_TIME : _FIRST_TIME + 4])) / _TICKS

    def _resident(self, pid: str) -> int:
        """Return the memory of a process without mapped files; of shared pages only its share."""
        sizes = self._sizes(pid, "smaps_rollup") or self._sizes(pid, "status")
        files = sizes.get(b"Pss_File:", sizes.get(b"RssFile:", 0))
        return (sizes.get(b"Pss:", sizes.get(b"VmRSS:", 0)) - files) * 1024

    def _sizes(self, pid: str, name: str) -> dict[bytes, int]:
        lines = (line.split() for line in self._read(pid, name).splitlines())
        return {words[0]: int(words[1]) for words in lines if words[2:] == [b"kB"]}

    def _read(self, pid: str, name: str) -> bytes:
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            return (self._proc / pid / name).read_bytes()
        return b""
