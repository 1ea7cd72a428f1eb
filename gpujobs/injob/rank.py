"""One MPI rank of `layout: mpi`: a worker of dask-mpi, or the user's script."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from .folder import EXIT_FAILED, SCRIPT_ENDED, Folder
from .gpus import job_devices
from .initialize import initialize, write_plan
from .log import append_output_to, in_plain_words
from .loopback import confine_if_wanted
from .names import EXTRA_RANKS, NANNY_PRELOAD, PACKAGE, PRELOAD
from .network import node_name
from .options import RankOptions
from .ports import limit_if_wanted
from .transport import FILE
from .usage import start_sampler

if TYPE_CHECKING:
    from mpi4py import MPI

_CLIENT_RANK = 1
"""The rank in which dask_mpi.initialize() returns: it goes on with the user's script."""
_LONGEST_REASON = 500
_NANNY_MODULE = f"{PACKAGE}.size"


def run_rank(options: RankOptions) -> None:
    """Be one rank. If it fails, end all ranks: they would wait for this one until the walltime."""
    folder = Folder(options.folder)
    _prepare(folder)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        _check_size(world, options.size)
        _check_nodes(world, options.nodes)
        if options.script:
            _run_script(options)
        else:
            _run_workers(options, folder.cluster_id, world)
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
        root = _root_cause(error)
        reason = f"{type(root).__name__}: {root}"
        _abort(folder, world, reason, 1 if options.script else EXIT_FAILED)
        raise


def _prepare(folder: Folder) -> None:
    # The archive comes first on the import path, since this program is in it. It is needed there
    # by the processes of workers, but must not hide a module of the user.
    others = [path for path in sys.path if Path(path) != folder.archive]
    sys.path[:] = [*others, str(folder.archive)]
    if folder.read(FILE).get("scheme") == "ucxx":
        # Open MPI may bring an older UCX; a process keeps the first one that it loads.
        with contextlib.suppress(ImportError):
            importlib.import_module("ucxx")
    confine_if_wanted()  # the nannies are in this process
    limit_if_wanted()


def _check_size(world: MPI.Comm, size: int) -> None:
    found = world.Get_size()
    if found != size:
        raise RuntimeError(
            f"MPI's world has {found} ranks, but {size} were started: mpi4py's MPI library is not "
            "the launcher's (`mpi.command` of the site)"
        )


def _check_nodes(world: MPI.Comm, nodes: int) -> None:
    found = len(set(world.allgather(node_name())))
    if found != nodes:
        raise RuntimeError(f"the launcher sees {found} of {nodes} nodes (`mpi` of the site)")


def _rank_on_node(world: MPI.Comm) -> tuple[int, bool]:
    """Return the rank's number among the ranks of its node, and whether that is the first node.

    By the names of the nodes: emulated nodes of one host share memory, which MPI would ask.
    """
    nodes, rank = world.allgather(node_name()), world.Get_rank()
    return nodes[:rank].count(nodes[rank]), nodes[rank] == nodes[0]


def _take_gpus(options: RankOptions, place: int) -> None:
    """Take the GPUs of the rank at ``place`` among the ranks with GPUs of its node.

    The first of these ranks starts the sampler of all GPUs.
    """
    size, source = options.worker_size, options.visible_devices
    explicit = options.on_node > 1 or not size.usual
    devices = job_devices(source, options.node_gpus, os.environ, explicit=explicit)
    if place == 0 and options.node_gpus:
        sampled = devices or [str(index) for index in range(options.node_gpus)]
        start_sampler(options.folder, sampled, os.environ)
    if devices is None:
        return
    of_node = size.devices(devices)
    workers = len(of_node) // options.on_node
    os.environ.update(size.environ(of_node[place * workers : (place + 1) * workers]))
    import dask

    dask.config.set({NANNY_PRELOAD: [*dask.config.get(NANNY_PRELOAD, []), _NANNY_MODULE]})


# -- workers ---------------------------------------------------------------------------------------
def _run_workers(options: RankOptions, cluster_id: str, world: MPI.Comm) -> None:
    place, _ = _rank_on_node(world)
    _take_gpus(options, place)
    module, *arguments = options.command
    at = arguments.index("--worker-options") + 1
    worker = json.loads(arguments[at])
    worker["preload"] = [*worker.get("preload", []), PRELOAD]
    arguments[at] = json.dumps(worker)
    sys.argv = [module, *arguments, "--name", cluster_id]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# -- the user's script in all ranks ----------------------------------------------------------------
def _run_script(options: RankOptions) -> None:
    """Run the script, whose `dask_mpi.initialize` is ours.

    The dask scheduler and the client are two more ranks on the first node. A launcher starts the
    same number of ranks on each node, so each other node has two that are not needed.
    """
    import dask_mpi
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    place, on_first_node = _rank_on_node(world)
    needed = on_first_node or place >= EXTRA_RANKS
    used = world.Split(0 if needed else MPI.UNDEFINED, world.Get_rank())
    if not needed:
        return
    vars(MPI)["COMM_WORLD"] = used  # dask-mpi takes its ranks from there
    rank = used.Get_rank()
    os.environ["GPUJOBS_RANK"] = str(rank - EXTRA_RANKS)
    if rank != _CLIENT_RANK:
        log = f"job-{os.environ['GPUJOBS_JOB']}.log"
        append_output_to(Folder(options.folder).logs / log)
    if place >= EXTRA_RANKS:
        _take_gpus(options, place - EXTRA_RANKS)
    dask_mpi.initialize = initialize
    write_plan(options)
    script = options.command[0]
    sys.argv = list(options.command)
    sys.path.insert(0, str(Path(script).parent))
    if rank == _CLIENT_RANK:  # after dask-mpi's function, which closes the dask scheduler
        atexit.register(Folder(options.folder).create, SCRIPT_ENDED, "")
    runpy.run_path(script, run_name="__main__")


# -- errors ----------------------------------------------------------------------------------------
def _root_cause(error: BaseException) -> BaseException:
    """Dask's "Nanny failed to start" does not name the reason; its cause does."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _abort(folder: Folder, world: MPI.Comm, reason: str, exit_code: int) -> None:
    """Write the reason, and end all ranks."""
    reason = in_plain_words(reason)[:_LONGEST_REASON]
    reason = f"rank {world.Get_rank()} on {node_name()}: {reason}"
    # Only the first error counts: the others may follow from it.
    folder.create("rank-error", json.dumps({"exit_code": exit_code, "reason": reason}))
    sys.stdout.flush()
    sys.stderr.flush()
    world.Abort(1)
