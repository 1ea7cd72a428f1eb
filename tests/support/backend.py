"""The interface of a running batch scheduler for end-to-end tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from gpujobs.schedulers import get_scheduler

from .cli import NVML, QUIET_DASK
from .processes import pause, until
from .slurm import PrivateSlurm

FAKE_GPUS = f"export PYTHONPATH={NVML} DASK_CUDA_TEST_SINGLE_GPU=1 DASK_ROOT_CONFIG={QUIET_DASK}"
"""For jobs: a user of a batch scheduler may have another home there, without a configuration of dask."""


class Backend(ABC):
    """A running batch scheduler with 4 GPUs a node."""

    name: str
    nodes: int = 4
    gpus_per_node: int = 4
    fake_gpus = True
    same_host = True
    """The jobs' processes are those of this host."""
    can_pause = True
    """Tests may let it not answer for a while."""
    scheduler_options: Mapping[str, Any] = MappingProxyType({})
    """Of a dask scheduler that the batch scheduler's nodes can reach."""

    @property
    def hold(self) -> str:
        """The directive of a job that waits until it is released; skips the test without one."""
        found = get_scheduler(self.name).hold
        if not found:
            pytest.skip(f"the class of {self.name} has no `hold`")
        return found

    def templates(self) -> Path | None:
        """Return the folder with templates of the site file, if it has one."""
        return None

    @abstractmethod
    def env(self) -> dict[str, str]:
        """Return the variables that a user needs."""

    @abstractmethod
    def site(self) -> dict[str, Any]:
        """Return a site file for it."""

    def usual_site(self, description: str, **own: Any) -> dict[str, Any]:
        """Return a site file with the queues of the tests, and keys of its ``own``."""
        shape = {"gpus_per_node": 4, "cpus_per_node": 16, "memory_per_node": "16GiB"}
        return {
            "description": description,
            "scheduler": self.name,
            "setup": FAKE_GPUS,
            "poll": "1s",
            "queues": {
                "main": {**shape, "max_walltime": "2d"},
                "short": {**shape, "max_walltime": "10m"},
                "cpu": {"name": "main", "cpus_per_node": 16, "memory_per_node": "16GiB"},
            },
            "defaults": {"walltime": "10m"},
            **own,
        }

    @abstractmethod
    def queue(self) -> list[str]:
        """Return a line for every job that has not ended, its name in it."""

    @abstractmethod
    def clean(self) -> None:
        """Remove all jobs."""

    @abstractmethod
    def pause(self, seconds: float) -> None:
        """Make the batch scheduler unresponsive for a while."""

    @abstractmethod
    def kill_job(self, job: str) -> None:
        """Cancel a job without gpujobs; ``job`` is the id as `gpujobs status` shows it."""

    def wait_empty(self, seconds: float, name: str = "") -> float:
        """Wait until no job with ``name`` in it is left; return how long that took."""
        left: list[str] = []

        def empty() -> bool:
            left[:] = [line for line in self.queue() if name in line]
            return not left

        try:
            return until(empty, seconds)
        except AssertionError as error:
            raise AssertionError(f"in the queue: {', '.join(left)}: {error}") from None


def nvml_path(backend: Backend) -> str:
    """Return the folder of the stand-in for NVML."""
    return str(backend.site()["setup"]).split("PYTHONPATH=")[1].split()[0]


class SlurmBackend(Backend):
    """A real Slurm."""

    name = "slurm"

    def __init__(self, slurm: PrivateSlurm) -> None:
        self.slurm = slurm
        self.nodes = slurm.nodes

    def env(self) -> dict[str, str]:
        return self.slurm.env

    def site(self) -> dict[str, Any]:
        return self.usual_site("a private Slurm of the tests")

    def queue(self) -> list[str]:
        return self.slurm.queue()

    def clean(self) -> None:
        self.slurm.cancel_all()

    def pause(self, seconds: float) -> None:
        pause(self.slurm.controller, seconds)

    def kill_job(self, job: str) -> None:
        self.slurm.command("scancel", job)
