"""Start the workers of a job: dask-cuda's one process, one per GPU, or an MPI launcher."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .folder import Folder
from .gpus import job_devices
from .names import job_worker_names
from .network import node_name
from .options import SuperviseOptions
from .process import ManagedProcess, with_archive
from .walltime import Walltime

_LIFETIME = "DASK_DISTRIBUTED__WORKER__LIFETIME__"
_LONGEST_STAGGER = 60
"""Seconds over which dask spreads the exits of workers."""
_RANKS_NEED = ("DASK_", "GPUJOBS_", "UCX_")
"""Prefixes of the variables that ranks on other nodes need."""


def worker_names(options: SuperviseOptions) -> list[str]:
    """Return the names of the workers of a job."""
    cluster_id = Folder(options.folder).cluster_id
    return job_worker_names(cluster_id, options.job, max(1, options.gpus), options.ranks)


def lifetime(walltime: Walltime) -> dict[str, str]:
    """Return dask's configuration with which workers exit before the walltime."""
    if walltime.left() == float("inf"):
        return {}
    seconds = walltime.workers_lifetime()
    stagger = min(_LONGEST_STAGGER, seconds // 10)
    return {f"{_LIFETIME}DURATION": f"{seconds} s", f"{_LIFETIME}STAGGER": f"{stagger} s"}


def start_workers(options: SuperviseOptions, environ: Mapping[str, str]) -> list[ManagedProcess]:
    """Start the worker processes. Raises LookupError if the job's number of GPUs is wrong."""
    if not options.workers:
        return []
    if options.ranks:  # each rank takes its GPUs by itself
        return [_start_launcher(options, environ)]
    devices = None
    if options.gpus:
        source, count = options.visible_devices, options.gpus
        devices = job_devices(source, count, environ, explicit=options.each_gpu)
    if options.each_gpu and devices:
        return _start_one_per_gpu(options, devices, environ)
    name = f"{Folder(options.folder).cluster_id}-{options.job}"
    return [_start_worker(options, name, devices, environ)]


def _start_launcher(options: SuperviseOptions, environ: Mapping[str, str]) -> ManagedProcess:
    """Start the ranks: workers, or the user's script, with output to the log of `run`."""
    folder = Folder(options.folder)
    kept = {name: value for name, value in environ.items() if name.startswith(_RANKS_NEED)}
    kept.pop("GPUJOBS_HOST", None)  # of this node
    folder.write("ranks.json", kept)
    if options.run_on == "ranks":
        return ManagedProcess("run:", options.workers, folder.logs / "run.log", environ)
    argv = [*options.workers, "--name", folder.cluster_id]
    return ManagedProcess("the MPI launcher", argv, job_log(options), environ)


def _start_one_per_gpu(
    options: SuperviseOptions, devices: list[str], environ: Mapping[str, str]
) -> list[ManagedProcess]:
    """Its own GPU comes first for each worker; the others stay visible, for NVLink among them."""
    return [
        _start_worker(options, name, devices[index:] + devices[:index], environ)
        for index, name in enumerate(worker_names(options))
    ]


def _start_worker(
    options: SuperviseOptions, name: str, devices: list[str] | None, environ: Mapping[str, str]
) -> ManagedProcess:
    environ = with_archive(environ, Folder(options.folder).archive)
    if devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    title = f"worker {name} on {node_name()}"
    return ManagedProcess(title, [*options.workers, "--name", name], job_log(options), environ)


def job_log(options: SuperviseOptions) -> Path:
    """Return the log of a job."""
    return Folder(options.folder).logs / f"job-{options.job}.log"
