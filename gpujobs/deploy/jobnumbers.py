"""Dask-jobqueue's numbers of one job, which are converted together: cores, memory, processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dask.utils import parse_bytes

from ..config.document import Loc
from ..config.fields import count, positive
from ..config.fields import size as n_bytes
from ..injob.names import WorkerSize
from ..text import exact_size_text, plural

PER_JOB = ("cores", "memory", "processes")
Setting = tuple[Loc, Any]
"""A key of the profile and its value."""


def dask_size(value: Any) -> Any:
    """Return a size as dask reads it: a number is bytes, and GB is 10^9 bytes.

    Other text is returned as it is, which a profile's key then refuses.
    """
    if isinstance(value, bool):
        return value
    try:
        return exact_size_text(parse_bytes(value))
    except (ValueError, TypeError):
        return value


@dataclass(frozen=True)
class JobNumbers:
    """The keywords of one job, ``given`` by name; ``size`` is that of the workers.

    `cores` and `memory` are requested for the job and divided among its workers. If ``given`` also
    has what to request (`job_cpu`, `job_mem`, or in `resource_spec`), they are only divided.
    Methods raise ValueError.
    """

    given: Mapping[str, Any]
    size: WorkerSize

    def settings(self) -> Iterator[tuple[str, Setting]]:
        """Yield the settings, each with its keyword."""
        given = self.given
        workers = self._workers()
        if self._gpus is None and "processes" in given:
            yield "processes", (("gpus_per_job",), self.size.gpus_of(workers))
        elif self._gpus and workers > self.size.workers(self._gpus):
            yield "processes", (("workers", "workers_per_gpu"), workers // self._gpus)
        if "cores" in given:
            if {"job_cpu", "ncpus"} & given.keys():
                yield "cores", (("workers", "threads"), max(1, positive(given["cores"]) // workers))
            else:
                yield "cores", (("cpus_per_job",), given["cores"])
        if "memory" in given:
            memory = dask_size(given["memory"])
            if {"job_mem", "mem"} & given.keys():
                yield "memory", (("workers", "memory"), f"{n_bytes(memory) // workers}B")
            else:
                yield "memory", (("memory_per_job",), memory)

    def notes(self) -> Iterator[str]:
        """Yield in which way a job differs from the one of dask-jobqueue for the same keywords."""
        given, gpus = self.given, self._gpus
        if "processes" in given and gpus != 0:
            yield from self._notes_of_workers(positive(given["processes"]), gpus)
            return
        sizes = {"gpus_per_job", "gpus_per_worker", "workers_per_gpu", "groups"}
        cores = given.get("cores") or 1
        if positive(cores) > 1 and not sizes & given.keys():
            yield (
                f"cores={cores}: a job has one GPU, and one worker with these cores; dask-jobqueue "
                "starts several. processes=… or gpus_per_job=… is the number of workers"
            )

    def _notes_of_workers(self, processes: int, gpus: int | None) -> Iterator[str]:
        if gpus is None:
            if processes > 1:
                of_job = self.size.gpus_of(processes)
                yield f"processes={processes}: a job has {plural(of_job, 'GPU')}, as no line says"
        elif self.size.usual and processes > gpus:
            per_gpu = processes // gpus
            yield f"processes={processes} on {plural(gpus, 'GPU')}: {per_gpu} workers share a GPU"
        elif self.size.usual and processes < gpus:
            yield (
                f"processes={processes} on {gpus} GPUs: one worker for each GPU; "
                f"gpus_per_worker={gpus // processes} gives a worker several"
            )

    @property
    def _gpus(self) -> int | None:
        """GPUs of a job; None if no keyword and no directive says."""
        found = self.given.get("gpus_per_job")
        return None if found is None else count(found)

    def _workers(self) -> int:
        """Return the number of workers of a job."""
        gpus, size = self._gpus, self.size
        processes = self.given.get("processes")
        processes = None if processes is None else positive(processes)
        if gpus == 0:
            if processes not in (None, 1):
                raise ValueError(f"processes is {processes}, but a job of CPU workers has one")
            return 1
        if gpus is None:
            if processes and processes % size.per_gpu:
                raise ValueError(f"processes is {processes}, but there are {_size_text(size)}")
            return processes or size.per_gpu
        expected = size.workers(gpus)
        if processes in (None, expected) or (size.usual and processes < gpus):
            return expected
        if size.usual and processes % gpus == 0:
            return processes
        raise ValueError(
            f"processes is {processes}, but gpus_per_job is {gpus}, {_size_text(size)}"
        )


def _size_text(size: WorkerSize) -> str:
    if size.usual:
        return "which is no whole number of workers per GPU"
    return f"{size.gpus} GPUs per worker" if size.gpus > 1 else f"{size.per_gpu} workers per GPU"
