"""Names of workers and sizes in GPUs, which the client and the jobs must compute alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Nanny

RUN = "run:"
"""Name of the command of the cluster; reasons of its end begin with it."""
HEAD = "head"
"""Group of a job that has only the dask scheduler and `run`."""
ARCHIVE = "injob.pyz"
"""File in the cluster's folder: this package, as its jobs import it."""
JUDGE = "judge.pyz"
"""File in the cluster's folder: the judge of clusters, as a job starts it."""
OWNER = "owner"
"""File in the cluster's folder: the Python process that owns it."""
RECORD = "record.json"
"""File in the cluster's folder: its record, for `JUDGE`."""
VERDICT = "verdict.json"
"""File in the cluster's folder: which of its jobs will not come, written by `JUDGE`."""
NOTE = "note"
"""File in the cluster's folder: a note of the head for its user."""
PACKAGE = "gpujobs_injob"
"""Name of this package in the archive. A plain `injob` could hide a module of the user."""
PRELOAD = f"{PACKAGE}.preload"
"""Module that dask's processes preload."""
REGISTRY = f"{PACKAGE}.registry"
"""Module whose `dask_setup` PRELOAD passes on."""
DASHBOARD = f"{PACKAGE}.dashboard"
"""Module that the dask scheduler of a job preloads, if it is to have a dashboard."""
NANNY_PRELOAD = "distributed.nanny.preload"
"""Key of dask's configuration: modules that nannies preload."""
DRAIN, UNDRAIN, DRAINED = "gpujobs_drain", "gpujobs_undrain", "gpujobs_drained"
"""Calls of the dask scheduler: let workers leave, or stay, and which leave; see `drain`."""
LOOPBACK = "127.0.0.1"
"""Address that only processes of the same host reach."""
LOOPBACK_INTERFACE = "lo"
"""Interface of ucxx on this machine; ucxx exists on Linux only."""
ENVIRONMENT = "environment"
"""Ending of a file of a job of several nodes (see `job_file`): its environment before its setup."""
RANK_SCRIPT = "ranks.sh"
"""The same: it starts a process of another node in the environment of the job."""
NODE = "{node}"
"""In a launcher that starts one node: the name of the node."""
MACHINES, MACHINE = "GPUJOBS_MACHINES", "GPUJOBS_MACHINE"
"""Variables of jobs on machines that ssh reaches: GPUs of all as ``ws1:0 ws2:0``; this machine."""
PROTOCOL = "GPUJOBS_PROTOCOL"
"""Variable of jobs with the protocol of dask's processes."""
PREPARES = "GPUJOBS_PREPARES"
"""Variable of a dask scheduler that listens only when its standard input has ended."""
RUN_NAME = "GPUJOBS_RUN"
"""Variable of jobs with the name of their start (see `jobevents`)."""
RUN_OF_JOB = "GPUJOBS_RUN_OF_JOB"
"""Variable of workers with the start of their job, as JSON (see `folder.Run`)."""
MPS = "GPUJOBS_MPS"
"""Variable of workers that share GPUs through CUDA's MPS."""
MODULES = "GPUJOBS_MODULES"
"""Variable of jobs with the folder of the program, if dask's processes import from it, too."""
IGNORED_SIGNALS = "GPUJOBS_IGNORED_SIGNALS"
"""Variable of jobs with the signals that all of their processes get, and must not die of."""
UCX_WARNINGS = "UCX_WARN_UNUSED_ENV_VARS"
"""With ``n``, UCX does not warn of UCX_MEMTYPE_CACHE, which ucxx sets and newer UCX ignores."""
ENCRYPTED = ("tls", "wss")
"""Protocols of dask that are encrypted."""
CERTIFICATE, KEY = "tls-cert.pem", "tls-key.pem"
"""Files in the cluster's folder, if dask's processes may encrypt their traffic."""
JOB_REQUEST = (
    "SLURM_CPUS_PER_GPU", "SLURM_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_GRES",
    "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_TRES_BIND", "SLURM_TRES_PER_TASK",
)  # fmt: skip
"""Variables of a job with what it has requested, which `srun` takes for options of its own.

A step of gpujobs has all GPUs and CPUs of its nodes, however they were requested. Some variables
would give it fewer, such as SLURM_TRES_PER_TASK, and others contradict its options: `srun` refuses
SLURM_NTASKS_PER_GPU beside --ntasks-per-node, and from 26.05 on SLURM_GPUS_PER_NODE beside
--gres=gpu.
"""
EXTRA_RANKS = 2
"""Ranks without GPUs if the user's script runs in all ranks: dask scheduler and client."""


def without_request(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without `JOB_REQUEST`, for the launcher of a step with all resources."""
    return {name: value for name, value in environ.items() if name not in JOB_REQUEST}


def is_encrypted(protocol: str) -> bool:
    """Return whether a protocol of dask, such as ``tls`` or ``tls://``, is encrypted."""
    return protocol.removesuffix("://") in ENCRYPTED


def dashboard_address(dashboard: str) -> str:
    """Return where the HTTP server of the dask scheduler in a job listens.

    ``dashboard`` is the key of the profile. Without a dashboard, dask starts the server, too.
    """
    return ":0" if dashboard == "on" else f"{LOOPBACK}:0"


def job_name(cluster_id: str, number: int, group: str = "") -> str:
    """Return the name of job ``number``, with which the names of its workers start."""
    return f"{group_prefix(cluster_id, group)}{number}"


def job_file(job: object, ending: str) -> str:
    """Return the name of a file of a job, or of a node, in the cluster's folder, by its number."""
    return f"jobs/{job}.{ending}"


def group_prefix(cluster_id: str, group: str) -> str:
    """Return the start of the names of all workers of a group."""
    return f"{cluster_id}-{group}-" if group else f"{cluster_id}-"


def job_worker_names(
    cluster_id: str, number: int, workers: int, ranks: int = 0, group: str = ""
) -> list[str]:
    """Return the names of the workers of job ``number``.

    ``workers``: how many the job has; if these are several, a number is appended to each.
    ``ranks``: nodes, or MPI ranks with GPUs, of each job of an allocation; with them, the workers
    are named after these, which are numbered through all jobs.
    """
    if ranks:
        processes = [f"{cluster_id}-{number * ranks + rank}" for rank in range(ranks)]
        workers //= ranks
    else:
        processes = [job_name(cluster_id, number, group)]
    if workers < 2:
        return processes
    return [f"{process}-{gpu}" for process in processes for gpu in range(workers)]


def ranges(numbers: Iterable[int]) -> str:
    """Return ``{1, 2, 3, 5}`` as ``1-3,5``."""
    known = set(numbers)
    firsts = sorted(known - {number + 1 for number in known})
    lasts = sorted(known - {number - 1 for number in known})
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(firsts, lasts))


# -- how many GPUs a worker has: one, several, or a part of one ------------------------------------
VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = "GPUJOBS_WORKER_DEVICES"
"""CUDA_VISIBLE_DEVICES of each worker of a process, separated by semicolons."""
_SIZE = "GPUJOBS_WORKER_SIZE"
"""The size of the workers, as ``GPUS,PER_GPU``."""


def is_slice(device: str) -> bool:
    """Return whether an entry of CUDA_VISIBLE_DEVICES is the name of a MIG slice."""
    return device.startswith("MIG-")


def named(device: str, known: Sequence[str]) -> str:
    """Return the entry of ``known`` at the index ``device``; a UUID stays as it is."""
    if not device.isdigit():
        return device
    if int(device) < len(known):
        return known[int(device)]
    shown = ", ".join(known) or "none"
    raise LookupError(f"the job has GPU {device}, but NVML shows only these: {shown}")


@dataclass(frozen=True)
class WorkerSize:
    """``gpus`` GPUs for each worker, or ``per_gpu`` workers on each GPU; one of both is 1."""

    gpus: int = 1
    per_gpu: int = 1

    @property
    def usual(self) -> bool:
        """Whether each worker has one GPU, and each GPU one worker."""
        return self == WorkerSize()

    def workers(self, gpus: int) -> int:
        """Return the number of workers on ``gpus`` GPUs."""
        return gpus // self.gpus * self.per_gpu

    def gpus_of(self, workers: int) -> int:
        """Return the least number of GPUs that have ``workers`` workers."""
        return -(-workers // self.per_gpu) * self.gpus

    def devices(self, devices: Sequence[str]) -> list[str]:
        """Return CUDA_VISIBLE_DEVICES of each worker on these GPUs.

        A worker of several GPUs sees no others: libraries take all that they see. Another worker
        also sees the others, after its own, for NVLink among them. CUDA shows a process one MIG
        slice only: raises LookupError if a worker of several GPUs has one.
        """
        firsts = [first for first in range(0, len(devices), self.gpus) for _ in range(self.per_gpu)]
        if self.gpus > 1:
            if slices := [device for device in devices if is_slice(device)]:
                raise LookupError(f"{slices[0]} is a MIG slice: gpus_per_worker must be 1")
            lists = [devices[first : first + self.gpus] for first in firsts]
        else:
            lists = [_seen_by_worker([*devices[first:], *devices[:first]]) for first in firsts]
        return [",".join(own) for own in lists]

    def environ(self, devices: Sequence[str]) -> dict[str, str]:
        """Return the variables of a process that starts a worker for each of ``devices``.

        ``devices`` are from `WorkerSize.devices`. dask-cuda starts a worker for each entry of
        CUDA_VISIBLE_DEVICES; `worker_devices` then gives the worker its own.
        """
        return {
            VISIBLE: ",".join(own.split(",")[0] for own in devices),
            _DEVICES: ";".join(devices),
            _SIZE: f"{self.gpus},{self.per_gpu}",
        }

    def with_names(self, environ: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
        """Return `WorkerSize.environ` of a process with UUIDs, which ``known`` has by index.

        If nothing lists its GPUs, it has all of ``known``.
        """
        all_devices = environ.get(VISIBLE, ",".join(known))
        lists = environ.get(_DEVICES, all_devices).split(";")
        names = dict.fromkeys(named(device, known) for own in lists for device in own.split(","))
        devices = self.devices(list(names))
        return self.environ(devices[: len(lists)] if _DEVICES in environ else devices)

    def firsts(self, environ: Mapping[str, str]) -> list[str]:
        """Return the first GPU of each worker on this node, as a worker of the job knows them."""
        if _DEVICES in environ and (self.gpus > 1 or is_slice(environ.get(VISIBLE, ""))):
            return [own.split(",")[0] for own in environ[_DEVICES].split(";")]
        return environ.get(VISIBLE, "").split(",") * self.per_gpu

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> WorkerSize:
        """Return the size of the workers in this environment."""
        gpus, per_gpu = environ.get(_SIZE, "1,1").split(",")
        return cls(int(gpus), int(per_gpu))


def _seen_by_worker(devices: list[str]) -> list[str]:
    """Return the own GPU of a worker, which is the first, and those that CUDA can show with it."""
    if is_slice(devices[0]):
        return devices[:1]
    return [device for device in devices if not is_slice(device)]


def worker_devices(name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES of a worker; its name ends with its number in the process.

    Nothing if dask-cuda chooses the GPU.
    """
    if _DEVICES not in environ:
        return {}
    devices = environ[_DEVICES].split(";")
    if len(devices) == 1:
        return {VISIBLE: devices[0]}
    return {VISIBLE: devices[int(name.rpartition("-")[2])]}


def devices_of_workers(environ: Mapping[str, str]) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES of each worker that a process in this environment starts.

    Nothing if dask-cuda chooses the GPUs.
    """
    return environ[_DEVICES].split(";") if _DEVICES in environ else []


async def dask_setup(nanny: Nanny) -> None:
    """Give the worker of a nanny its GPUs; dask calls this before it starts the worker."""
    import os

    nanny.env = {**nanny.env, **worker_devices(str(nanny.name), os.environ)}
