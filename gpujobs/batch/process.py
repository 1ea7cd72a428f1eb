"""The only module that starts processes on this side of the batch scheduler: argv lists, a time limit, no shell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..schedulers import CommandResult

TIMEOUT = 60.0
"""Seconds. sbatch retries for 9 s by itself when its controller is away; LSF's commands wait for ever."""

# What a batch scheduler's commands need. Everything else stays here: with SBATCH_* variables in the way a script would
# not mean what it says, and a job inherits what its submit command sees.
_PASSED = (
    "HOME", "USER", "LOGNAME", "PATH", "SHELL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "KRB5CCNAME", "XDG_RUNTIME_DIR",
    "SLURM_CONF", "SLURM_CLUSTERS", "SGE_ROOT", "SGE_CELL", "SGE_CLUSTER_NAME", "SGE_QMASTER_PORT", "SGE_EXECD_PORT",
    "SGE_ARCH", "PBS_CONF_FILE", "PBS_SERVER", "PBS_EXEC", "PBS_DEFAULT", "PBS_HOME", "LSF_ENVDIR", "LSF_SERVERDIR",
    "LSF_LIBDIR", "LSF_BINDIR", "LSB_CONFDIR",
)  # fmt: skip


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a batch scheduler's commands: an allow-list, and messages in English.

    Not LC_ALL=C, which a job would inherit and print question marks for its letters.
    """
    passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
    language = (
        os.environ.get("LC_ALL")
        or os.environ.get("LC_CTYPE")
        or os.environ.get("LANG")
        or "C.UTF-8"
    )
    english = {"LC_MESSAGES": "C", "LC_NUMERIC": "C", "LC_TIME": "C", "LANGUAGE": "C"}
    return {**passed, "LANG": language, **english, "SLURM_BITSTR_LEN": "0", **(extra or {})}


def run(
    argv: Sequence[str], *, stdin: str = "", timeout: float = TIMEOUT, cwd: Path | None = None
) -> CommandResult:
    """Run a command to its end. A missing command and one that takes over ``timeout`` seconds have no exit code."""
    words = tuple(argv)
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd=cwd,
            start_new_session=True,  # Ctrl-C is for gpujobs, which may have to finish a submission
        )
    except FileNotFoundError:
        return CommandResult(words, None, problem=f"the command {words[0]} was not found")
    except OSError as error:
        return CommandResult(
            words, None, problem=f"the command {words[0]} could not be started: {error.strerror}"
        )
    try:
        stdout, stderr = process.communicate(stdin.encode(), timeout)
        return CommandResult(words, process.returncode, _text(stdout), _text(stderr))
    except subprocess.TimeoutExpired:
        return CommandResult(
            words, None, problem=f"{words[0]} did not answer within {timeout:.0f} s"
        )
    finally:
        if process.returncode is None:  # timed out, or we were interrupted
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def found(command: str) -> bool:
    """Tell whether ``command`` can be run."""
    return shutil.which(command) is not None


def spawn(
    argv: Sequence[str],
    *,
    stdout: Path,
    extra: Mapping[str, str],
    cwd: Path,
    pass_fds: Sequence[int] = (),
) -> int:
    """Start a process that outlives this one, in a session of its own; return its pid."""
    with stdout.open("ab") as output:
        process = subprocess.Popen(
            tuple(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment(extra),
            cwd=cwd,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    process.returncode = 0  # it is nobody's child to wait for
    return process.pid


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace").replace("\r\n", "\n")
