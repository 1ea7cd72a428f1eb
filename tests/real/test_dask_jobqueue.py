"""The examples of dask-jobqueue's documentation, and its attributes, on a real Slurm with large nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.config
import pytest

import gpujobs
from gpujobs.errors import InputError

from ..conftest import unavailable
from ..support import slurm
from ..support.backend import SlurmBackend
from ..support.cli import ROOT, text_of
from ..support.dask_jobqueue import EXAMPLES, Example

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]

SLURM_EXAMPLES = [
    example for example in EXAMPLES if example.kind == "Slurm" and not example.refused
]
CONFIGURATION = """\
Licenses=project:10
PartitionName=closed Nodes=ALL MaxTime=INFINITE State=DOWN
"""
"""The jobs of the partition wait forever."""
NODE = {"gpus_per_node": 6, "cpus_per_node": 64, "memory_per_node": "600GiB"}


@pytest.fixture(scope="module")
def large(shared_folder: Path) -> Iterator[SlurmBackend]:
    """A Slurm with one node of the size and the features that the examples need."""
    if why := slurm.missing():
        unavailable("slurm", why)
    private = slurm.PrivateSlurm(
        shared_folder / "large", nodes=1, gpus=6, cpus=64, memory=600 * 1024,
        extra=CONFIGURATION, features="haswell,geyser",
    )  # fmt: skip
    with private.running() as running:
        yield SlurmBackend(running)


@pytest.fixture
def site(large: SlurmBackend, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A site file of it; nothing is left in the queue at the end."""
    for name, value in {**large.env(), "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    path = home / "large.yaml"
    path.write_text(text_of(large.site() | {"queues": {"main": NODE, "closed": NODE}}))
    yield str(path)
    try:
        large.wait_empty(20)
    finally:
        large.clean()


def cluster(site: str, example: Example, queue: str) -> Any:
    """Return the cluster of an example, with the names of this machine."""
    keywords, configuration = example.on(queue=queue, interface="lo")
    with dask.config.set({f"jobqueue.slurm.{key}": configuration[key] for key in configuration}):
        return gpujobs.GPUSLURMCluster(
            site=site,
            scheduler_options={"dashboard_address": ":0"},
            quiet=True,
            **{"queue": queue, **keywords},
        )


def test_slurm_refuses_the_directive_that_is_refused_before(
    site: str, large: SlurmBackend, home: Path
) -> None:
    (cori,) = (example for example in EXAMPLES if example.name == "cori")
    with pytest.raises(InputError, match=r"jobqueue.slurm.job-extra.*SCRATCH, is not an option"):
        cluster(site, cori, "closed")
    lines = [f"#SBATCH {line}" for line in cori.configuration["job-extra"]]
    script = home / "job.sh"
    script.write_text("\n".join(["#!/bin/sh", "#SBATCH -p closed", *lines, ""]))
    assert "SCRATCH," in large.slurm.attempt("sbatch", str(script)).stderr


@pytest.mark.parametrize("example", SLURM_EXAMPLES, ids=str)
def test_an_example_is_submitted(site: str, large: SlurmBackend, example: Example) -> None:
    with cluster(site, example, "closed") as made:
        made.scale(jobs=1)
        jobs = large.queue()
        assert len(jobs) == 1 and "PENDING" in jobs[0] and made.id in jobs[0]
        given = {**example.configuration, **example.keywords}
        job = large.slurm.command("scontrol", "show", "job", jobs[0].split()[0])
        assert re.search(rf"NumCPUs={given['cores']}\b", job)
        assert re.search(rf"gres.gpu:{given.get('processes', 1)}\b", job)


def test_an_example_runs_with_every_attribute(site: str) -> None:
    example = next(example for example in SLURM_EXAMPLES if example.name == "resources")
    with cluster(site, example, "main") as made:
        made.scale(jobs=1)
        client = made.get_client()
        made.wait_for_workers(1, timeout=120)
        assert client.submit(sum, [1, 2], resources={"ssdGB": 100, "GPU": 2}).result() == 3
        (worker,) = made.scheduler_info["workers"].values()
        assert (worker["nthreads"], worker["memory_limit"]) == (2, 8 * 2**30)
        check_attributes(made)
        client.close()


def check_attributes(made: Any) -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    found = re.search(r"<!-- dask-jobqueue attributes -->\n((?:\|.*\n)+)", text)
    assert found
    for row in found[1].splitlines()[2:]:
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        for code in re.findall(r"`([^`]+)`", cells[0]):
            name = code.partition("(")[0]
            if cells[1] == "refused":
                with pytest.raises(AttributeError, match=f"{name} has no meaning here"):
                    getattr(made, name)
            else:
                getattr(made, name)
    assert made.scheduler_address.startswith("tls://") and made.dashboard_link
    assert made.job_header in made.job_script()
    assert made.name == made.job_name == made.id
    assert made.observed == made.requested == made.plan
    assert {"Scheduler", "job-0"} < set(made.get_logs())
