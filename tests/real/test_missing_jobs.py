"""A job of a cluster that never starts, or vanishes: its cluster notices by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ..conftest import nothing_left
from ..support.backend import SlurmBackend
from ..support.cli import Cli
from ..support.processes import until
from ..support.slurm_faults import node_without_launch

PROFILE: dict[str, Any] = {
    "gpus": 2,
    "gpus_per_job": 1,
    "cpus_per_job": 16,
    "start_workers": 2,
    "run": ["true"],
}
"""Two jobs, each with a node of its own."""

pytestmark = pytest.mark.slurm


@pytest.fixture(params=["slurm"])
def backend(slurm_backend: SlurmBackend) -> Iterator[SlurmBackend]:
    yield slurm_backend
    nothing_left(slurm_backend)


def ended(cli: Cli, cluster: str) -> dict[str, Any]:
    """Wait without `gpujobs` until the cluster has ended; return its status."""
    until(
        (cli.home / ".gpujobs" / cluster / "ended").exists, 90, f"the end of {cluster}", every=0.5
    )
    return cli.status(cluster)


def test_node_that_cannot_launch(cli: Cli, backend: SlurmBackend) -> None:
    with node_without_launch(backend.slurm, "node2"):
        cluster = cli.submit(PROFILE)
        status = ended(cli, cluster)
        assert (status["state"], status["exit_code"]) == ("FAILED", 70)
        reason = (
            r"run: cannot start: job 1 did not start: node2: launch failed: its script did not run"
        )
        assert status["reason"] == reason
        backend.wait_empty(15)
