"""Start processes on all nodes of a job: the launcher, and the environment of what it starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from .folder import EXIT_FAILED, Folder
from .names import ENVIRONMENT, NODE, RANK_SCRIPT, RUN, job_file
from .network import job_nodes
from .options import LaunchOptions, SuperviseOptions
from .process import ManagedProcess


def job_log(options: SuperviseOptions) -> Path:
    """Return the log of a job, or of one of its nodes."""
    node = "" if options.node is None else f"-node-{options.node}"
    return Folder(options.folder).logs / f"job-{options.job}{node}.log"


# -- the nodes of an allocation --------------------------------------------------------------------
def node_file(number: int) -> str:
    """Return the file that says which node of an allocation has this number, through all jobs."""
    return job_file(number, "node")


def lost_file(number: int) -> str:
    """Return the file that says why a node of an allocation is lost."""
    return job_file(number, "lost")


def report_lost(
    folder: Folder, number: int, node: str, reason: str, exit_code: int = EXIT_FAILED
) -> None:
    """Write why a node of an allocation is lost, unless that is known."""
    lost = {"node": node, "reason": reason, "exit_code": exit_code}
    folder.create(lost_file(number), json.dumps(lost))


def start_launcher(options: SuperviseOptions, environ: Mapping[str, str]) -> list[ManagedProcess]:
    """Start the nodes of a job, or the user's script in all ranks, with its output to `run.log`.

    A launcher with the name of a node starts one: there is one for each node. Agents like ssh and
    qrsh give their words to a shell: what they start is in the script. Raises LookupError if the
    nodes are not known.
    """
    folder, words = Folder(options.folder), options.workers
    if options.run_on == "ranks":
        write_rank_script(options, environ)
        return [ManagedProcess(RUN, words, folder.logs / "run.log", environ)]
    for number in options.node_numbers:  # of a job that the batch scheduler started again
        for name in (node_file(number), lost_file(number)):
            (folder.path / name).unlink(missing_ok=True)
    title, log = f"the launcher ({Path(words[0]).name})", job_log(options)
    # The PATH of a job of PBS may lack its commands; that of the shell that submitted it has them.
    path = os.pathsep.join(environ.get(name, "") for name in ("PATH", "PBS_O_PATH"))
    words = (shutil.which(words[0], path=path) or words[0], *words[1:])
    if not any(NODE in word for word in words):
        write_rank_script(options, environ)
        return [ManagedProcess(title, words, log, environ)]
    end = next(n for n, word in enumerate(words, 1) if word.endswith(f".{RANK_SCRIPT}"))
    write_rank_script(options, environ, words[end:])
    return [
        ManagedProcess(
            f"{title} of {node}", [w.replace(NODE, node) for w in words[:end]], log, environ
        )
        for node in job_nodes(environ)
    ]


# -- the environment of processes on other nodes ---------------------------------------------------
_NEEDED = re.compile(r"(DASK|GPUJOBS|UCX)_.*|PYTHONPATH|LD_LIBRARY_PATH")
"""Variables that ranks get even if nothing has changed them."""
_LOCAL = re.compile(
    # of this node or this shell
    r"GPUJOBS_HOST|CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|NVIDIA_VISIBLE_DEVICES|TMPDIR|HOST(NAME)?"
    r"|PWD|OLDPWD|SHLVL|_|DISPLAY|XDG_RUNTIME_DIR|(BASH|SSH)_.*"
    # of the batch scheduler, or of a launcher, which forwards its own
    r"|(SLURM|SLURMD|LSB|LSF|LS|PBS|SGE|PMI|PMIX|PRTE|OMPI|OPAL|HYDRA|HYDI)_.*"
)
"""Variables that ranks only get if the profile sets them."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""An exported function has another name."""


def write_rank_script(
    options: SuperviseOptions, environ: Mapping[str, str], command: Sequence[str] = ()
) -> None:
    """Write the script that runs ``command``, else its arguments, in the environment of the job.

    A shell sets the variables, because the interpreter itself may need ``LD_LIBRARY_PATH``, and
    ``exec`` keeps the descriptors that the launcher passes to MPI.
    """
    folder = Path(options.folder)
    before = _before_setup(folder / job_file(options.job, ENVIRONMENT))
    changes = rank_changes(before, environ, options.rank_env)
    lines = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in sorted(changes.items())
    ]
    text = "\n".join([*lines, f"exec {shlex.join(command)}" if command else 'exec "$@"', ""])
    path = folder / job_file(options.job, RANK_SCRIPT)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def rank_changes(
    before: Mapping[str, str] | None, after: Mapping[str, str], named: Iterable[str]
) -> dict[str, str | None]:
    """Return the variables that ranks need, with None for those to be removed.

    ``before`` and ``after`` are the environments of the job before and after its setup, ``named``
    the variables that the profile sets.
    """
    before = after if before is None else before
    wanted = {name for name in after if _NEEDED.fullmatch(name)}
    wanted |= {name for name in {*before, *after} if before.get(name) != after.get(name)}
    wanted = {name for name in wanted if _NAME.fullmatch(name) and not _LOCAL.fullmatch(name)}
    return {name: after.get(name) for name in wanted.union(named)}


def _before_setup(path: Path) -> dict[str, str] | None:
    """Return the environment that the script of the job saved, and remove the file."""
    try:
        text = path.read_bytes().decode(errors="surrogateescape")
        path.unlink()
    except OSError:
        return None
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


# -- start the MPI launcher outside of the container -----------------------------------------------
# The image has neither the launcher nor the batch scheduler's commands. Files of the cluster's
# folder connect this process with `gpujobs_launch` of the batch script.


START, STOP, EXIT = "launch-start", "launch-stop", "launch-exit"
_POLL_INTERVAL = 0.2


def launch(options: LaunchOptions) -> int:
    """Let the batch script start MPI, and stop it on SIGTERM. Return the launcher's exit code."""
    folder = Folder(options.folder)
    start, end, code = (job_file(options.job, ending) for ending in (START, STOP, EXIT))

    def stop(number: int, frame: FrameType | None) -> None:
        (folder.path / end).touch()

    signal.signal(signal.SIGTERM, stop)
    (folder.path / start).touch()
    while not (exit_code := folder.read_text(code)):
        time.sleep(_POLL_INTERVAL)
    return int(exit_code)
