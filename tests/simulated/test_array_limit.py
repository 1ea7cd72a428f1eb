"""A batch scheduler whose arrays may have three jobs: a larger cluster is several arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import fresh_folder, make_cli
from ..support.cli import Cli
from ..support.fakes import FakeBackend, PbsBackend, TorqueBackend


@pytest.fixture(scope="module", params=[PbsBackend, TorqueBackend])
def backend(shared_folder: Path, request: pytest.FixtureRequest) -> Iterator[FakeBackend]:
    with request.param(fresh_folder(shared_folder, "pbs"), max_array_size=3).running() as running:
        yield running


@pytest.fixture
def cli(backend: FakeBackend, home: Path) -> Cli:
    return make_cli(backend, home, "root" if os.geteuid() == 0 else "ordinary")


def sizes(backend: FakeBackend) -> dict[int, int]:
    """Return the number of jobs of each submission."""
    ids = [job["id"] for job in backend.jobs() if job["state"] != "done"]
    return {number: ids.count(number) for number in ids}


def test_a_large_cluster_is_several_arrays(cli: Cli, backend: FakeBackend) -> None:
    cluster = cli.submit({"gpus": 8, "gpus_per_job": 1, "directives": ["-h"]})
    assert sorted(sizes(backend).values()) == [2, 3, 3]
    assert {job["state"] for job in cli.status(cluster)["jobs"]} == {"PENDING"}
    done = cli("scale", cluster, "12")
    assert done.returncode == 0, done.stderr
    assert sorted(sizes(backend).values()) == [1, 2, 3, 3, 3]
    done = cli("scale", cluster, "4")  # members of two arrays, whole arrays and a lone job
    assert done.returncode == 0, done.stderr
    assert len(backend.queue()) == 4
    assert cli("cancel", cluster).returncode == 0
    assert not backend.queue()


PYTHON = """
import gpujobs

with gpujobs.GPUPBSCluster(
    gpus_per_job=1, directives=["-h"], scheduler_options={"dashboard_address": ":0"}
) as cluster:
    cluster.scale(7)
    while len(cluster.jobs) < 7:
        pass
    ids = [job["id"].partition("[")[0] for job in cluster.jobs]
    print(sorted(ids.count(number) for number in set(ids)))
"""


def test_a_python_cluster_scales_over_several_arrays(cli: Cli, backend: FakeBackend) -> None:
    done = cli.python_run(PYTHON)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1, 3, 3]\n"
    assert not backend.queue()
