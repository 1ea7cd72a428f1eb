"""Start the workers of a job: one process with their nannies, or an MPI launcher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from .folder import Folder
from .gpus import job_devices
from .names import RUN, group_prefix, job_name, job_worker_names
from .network import node_name
from .options import SuperviseOptions
from .process import STOP_DASK, ManagedProcess, with_archive
from .rankenvironment import write_rank_script
from .usage import start_sampler
from .walltime import Walltime
from .workerenviron import preset

_LIFETIME = "DASK_DISTRIBUTED__WORKER__LIFETIME__"
_LONGEST_STAGGER = 60
"""Seconds over which dask spreads the exits of workers."""


def worker_names(options: SuperviseOptions) -> list[str]:
    """Return the names of the workers of a job."""
    cluster_id = Folder(options.folder).cluster_id
    return job_worker_names(
        cluster_id, options.job, options.n_workers, options.ranks, options.group
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


def lifetime(walltime: Walltime, environ: Mapping[str, str]) -> dict[str, str]:
    """Return dask's configuration with which workers exit before the walltime.

    Nothing if ``environ`` has a lifetime of its own.
    """
    if walltime.left() == float("inf") or f"{_LIFETIME}DURATION" in environ:
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
        explicit = options.each_gpu or not options.worker_size.usual
        devices = job_devices(source, count, environ, explicit=explicit)
    return [_start_nannies(options, devices, environ)]


def sampler(options: SuperviseOptions, environ: Mapping[str, str]) -> ManagedProcess | None:
    """Start to sample the GPUs of a job. The ranks of MPI do that on each of their nodes."""
    if not options.gpus or not options.workers or options.ranks:
        return None
    devices = job_devices(options.visible_devices, options.gpus, environ, explicit=True)
    return start_sampler(options.folder, devices or [], environ)


def _start_launcher(options: SuperviseOptions, environ: Mapping[str, str]) -> ManagedProcess:
    """Start the ranks: workers, or the user's script, with output to the log of `run`."""
    folder = Folder(options.folder)
    write_rank_script(folder, environ, options.rank_env)
    if options.run_on == "ranks":
        return ManagedProcess(RUN, options.workers, folder.logs / "run.log", environ)
    return ManagedProcess("the MPI launcher", options.workers, job_log(options), environ)


def _start_nannies(
    options: SuperviseOptions, devices: list[str] | None, environ: Mapping[str, str]
) -> ManagedProcess:
    """Start the process of all nannies of the job."""
    environ = preset(with_archive(environ, Folder(options.folder).archive))
    words = options.workers
    if devices is not None:
        own = options.worker_size.devices(devices)
        environ.update(options.worker_size.environ(own))
        if options.each_gpu and len(own) > 1:  # else dask appends "-0" to the name
            words = (*words, f"--nworkers={len(own)}")
    name = job_name(Folder(options.folder).cluster_id, options.job, options.group)
    title = f"worker {name} on {node_name()}"
    argv = [*words, "--name", name]
    return ManagedProcess(title, argv, job_log(options), environ, STOP_DASK)


def job_log(options: SuperviseOptions) -> Path:
    """Return the log of a job."""
    return Folder(options.folder).logs / f"job-{options.job}.log"
