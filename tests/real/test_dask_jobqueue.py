"""The examples of dask-jobqueue's documentation, and its attributes, on batch schedulers with one large node.

Slurm and Grid Engine are real, PBS and LSF are fakes, which execute the jobs.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import dask.config
import pytest
import yaml

from gpujobs.deploy import GPUJobQueueCluster
from gpujobs.deploy.cluster import class_for
from gpujobs.errors import InputError

from ..conftest import fresh_folder, nothing_left, unavailable
from ..support import sge, slurm
from ..support.backend import FAKE_GPUS, Backend, SlurmBackend
from ..support.cli import text_of
from ..support.dask_jobqueue import EXAMPLES, Example
from ..support.fake_lsf import LsfBackend
from ..support.fakes import FakeBackend, PbsBackend
from ..support.migrating import names
from ..support.processes import patience

pytestmark = pytest.mark.filterwarnings("default")

CPUS, GPUS, MEMORY = 64, 28, 600
"""Of the node; the memory is in GiB."""
NODE = {"gpus_per_node": GPUS, "cpus_per_node": CPUS, "memory_per_node": f"{MEMORY}GiB"}
RUN = ("Slurm-deployment", "PBS-class")
"""Examples in `make test`, where the first one runs; the others are in `make slow`."""
MANY = 12
"""Workers of one job that are too many to run on a small test machine."""


# -- the batch schedulers ----------------------------------------------------------------------------
@contextlib.contextmanager
def slurm_backend(folder: Path) -> Iterator[Backend]:
    """Boot a Slurm with the features and licenses that the examples need."""
    if why := slurm.missing():
        unavailable("slurm", why)
    private = slurm.PrivateSlurm(
        folder, nodes=1, gpus=GPUS, cpus=CPUS, memory=MEMORY * 1024,
        extra="Licenses=project:10\n", features="haswell,geyser",
    )  # fmt: skip
    with private.running() as running:
        yield SlurmBackend(running)


@contextlib.contextmanager
def sge_backend(folder: Path) -> Iterator[Backend]:
    """Boot a Grid Engine with the project that the examples need."""
    if why := sge.missing():
        unavailable("sge", why)
    with sge.PrivateSge(folder, nodes=1, gpus=GPUS, cpus=CPUS).running() as running:
        project = folder / "project"
        project.write_text("name myproj\noticket 0\nfshare 0\nacl NONE\nxacl NONE\n")
        running.command("qconf", "-Aprj", str(project))
        yield sge.SgeBackend(running)


def fake_backend(kind: type[FakeBackend], folder: Path) -> AbstractContextManager[Backend]:
    return kind(folder, nodes=["node1"], slots=CPUS, gpus=GPUS).running()


BOOT: dict[str, Callable[[Path], AbstractContextManager[Backend]]] = {
    "slurm": slurm_backend,
    "sge": sge_backend,
    "pbs": functools.partial(fake_backend, PbsBackend),
    "lsf": functools.partial(fake_backend, LsfBackend),
}


@pytest.fixture(scope="module")
def boot(shared_folder: Path) -> Iterator[Callable[[str], Backend]]:
    """Return a function that boots a batch scheduler with one large node, once."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(
            lambda kind: stack.enter_context(BOOT[kind](fresh_folder(shared_folder, kind)))
        )


@pytest.fixture
def large(boot: Callable[[str], Backend], example: Example) -> Backend:
    """The batch scheduler of an example, with one large node."""
    return boot(example.kind.lower())


@pytest.fixture
def site(large: Backend, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A site file of it, whose queue `held` never starts a job; nothing is left at the end."""
    for name, value in {**large.env(), "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    monkeypatch.setattr(dask.config, "paths", [str(home)])
    monkeypatch.setattr(dask.config.collect, "__defaults__", ([str(home)], None))
    held = {**NODE, "name": "main", "directives": [large.hold]}
    path = home / "large.yaml"
    setup = f"{FAKE_GPUS} FAKE_NVML_GPUS={GPUS}"
    queues = {"main": NODE, "held": held}
    path.write_text(text_of(large.site() | {"setup": setup, "queues": queues}))
    yield str(path)
    nothing_left(large)


def requested(large: Backend, job: str) -> tuple[int, int, int]:
    """Return CPUs, GPUs and seconds of walltime of the only job, as the batch scheduler has them."""
    if isinstance(large, FakeBackend):
        (found,) = (item for item in large.jobs() if item["state"] != "done")
        return found["needs"]["slots"], found["needs"]["gpus"], found["walltime"]
    if isinstance(large, sge.SgeBackend):
        text = large.sge.command("qstat", "-j", job)
        numbers = (r"smp range:\s+(\d+)", r"gpu=(\d+)", r"h_rt=(\d+)")
        cpus, gpus, seconds = (int(re.findall(number, text)[0]) for number in numbers)
        return cpus, gpus, seconds
    assert isinstance(large, SlurmBackend)
    text = large.slurm.command("scontrol", "show", "job", job)
    cpus, gpus = (
        int(re.findall(p, text)[0]) for p in (r"NumCPUs=(\d+)", r"TresPerNode=\S*gpu:(\d+)")
    )
    return cpus, gpus, seconds_of(re.findall(r"TimeLimit=(\S+)", text)[0])


def seconds_of(text: str) -> int:
    """Return the seconds of HH:MM:SS, D-HH:MM:SS, or LSF's HH:MM."""
    days, _, rest = text.rpartition("-")
    hours, minutes, seconds = f"{rest}:0".split(":")[:3]
    return ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)


def cpus_of(given: Mapping[str, Any]) -> int | None:
    """Return the CPUs of a job; a `resource_spec` says what to request, whatever `cores` is."""
    spec = given.get("resource_spec") or given.get("resource-spec") or ""
    found = re.search(r"ncpus=(\d+)", spec)
    return int(found[1]) if found else given.get("cores")


# -- the examples -----------------------------------------------------------------------------------
@contextlib.contextmanager
def cluster(example: Example, site: str, large: Backend, queue: str) -> Iterator[Any]:
    """Make the cluster of an example, with the names of this machine."""
    keywords, configuration = example.on(queue=queue, interface="lo")
    section = {"jobqueue": {large.name: configuration}}
    Path("jobqueue.yaml").write_text(yaml.safe_dump(section))
    options = {"dashboard_address": ":0", **large.scheduler_options}
    if large.name == "sge":  # it has no m_mem_free
        keywords.pop("resource_spec", None)
    if "job_script_prologue" in keywords:  # which selects the Python, see docs/migrating.md
        keywords["python"] = sys.executable
    keywords = {"queue": queue, "scheduler_options": options, "quiet": True, **keywords}
    with (
        dask.config.set(section),
        class_for(large.name, GPUJobQueueCluster)(site=site, **keywords) as made,
    ):
        yield made


def accepted(example: Example) -> Example:
    """Return an example without the lines that are refused."""
    return example.without(*example.refused)


def workers_of(example: Example) -> int:
    """Return the number of workers of a job."""
    return int({**example.configuration, **example.keywords}.get("processes", 1))


def on_its_own(
    *examples: Example, quick: Callable[[Example], bool] = lambda _: True
) -> pytest.MarkDecorator:
    """Run a test for each of the examples, on its batch scheduler."""
    rows = []
    for example in examples:
        kind = example.kind.lower()
        marks = [getattr(pytest.mark, kind)] if kind in ("slurm", "sge") else []
        marks += [] if quick(example) else [pytest.mark.slow]
        rows.append(pytest.param(example, marks=marks, id=str(example)))
    return pytest.mark.parametrize("example", rows)


@on_its_own(
    *(example for example in EXAMPLES if example.refused),
    quick=lambda example: str(example) == "Slurm-cori",
)
def test_every_refused_line_is_named(large: Backend, site: str, example: Example) -> None:
    named: set[str] = set()
    line = rf"^(?:keyword |dask configuration jobqueue\.{large.name}\.)([\w-]+): "
    while named < set(example.refused):  # those that are left are named by the next message
        with (
            pytest.raises(InputError) as caught,
            cluster(example.without(*named), site, large, "held"),
        ):
            pass
        found = set(re.findall(line, str(caught.value), re.M))
        assert found and found <= set(example.refused), str(caught.value)
        named |= found
    assert large.queue() == []


@on_its_own(*(example for example in EXAMPLES if example.name == "cori"))
def test_slurm_refuses_the_directive_that_is_refused_before(
    large: Backend, home: Path, example: Example
) -> None:
    assert isinstance(large, SlurmBackend)
    lines = [f"#SBATCH {line}" for line in example.configuration["job-extra"]]
    script = home / "job.sh"
    script.write_text("\n".join(["#!/bin/sh", "#SBATCH --hold", *lines, ""]))
    assert "SCRATCH," in large.slurm.attempt("sbatch", str(script)).stderr


@on_its_own(*EXAMPLES, quick=lambda example: str(example) in RUN)
def test_the_batch_scheduler_gets_what_an_example_requests(
    large: Backend, site: str, example: Example
) -> None:
    given = {**accepted(example).configuration, **accepted(example).keywords}
    with cluster(accepted(example), site, large, "held") as made:
        made.scale(jobs=1)
        (job,) = large.queue()
        assert made.id in job
        cpus, gpus, seconds = requested(large, made.jobs[0]["id"])
    assert gpus == given.get("processes", 1)
    assert cpus == (cpus_of(given) or cpus)
    assert seconds == seconds_of(given.get("walltime", "00:10:00"))


@on_its_own(
    *(example for example in EXAMPLES if workers_of(example) <= MANY),
    quick=lambda example: str(example) == RUN[0],
)
def test_an_example_of_dask_jobqueue_runs(large: Backend, site: str, example: Example) -> None:
    with cluster(accepted(example), site, large, "main") as made:
        made.scale(jobs=1)
        made.wait_for_workers(workers_of(example), timeout=patience(120))
        with made.get_client() as client:
            assert client.submit(sum, [1, 2]).result() == 3


@on_its_own(*(example for example in EXAMPLES if example.name == "resources"))
def test_every_attribute_of_an_example_works(large: Backend, site: str, example: Example) -> None:
    with cluster(example, site, large, "main") as made:
        made.scale(jobs=1)
        client = made.get_client()
        made.wait_for_workers(1, timeout=patience(120))
        assert client.submit(sum, [1, 2], resources={"ssdGB": 100, "GPU": 2}).result() == 3
        (worker,) = made.scheduler_info["workers"].values()
        assert (worker["nthreads"], worker["memory_limit"]) == (
            2,
            7630 * 2**20,
        )  # 8 GB, as dask reads it, in whole MiB
        check_attributes(made)
        client.close()


def check_attributes(made: Any) -> None:
    for name, row in names("dask-jobqueue attributes").items():
        if row.here == "refused":
            with pytest.raises(AttributeError, match=f"{name} has no meaning here"):
                getattr(made, name)
        else:
            getattr(made, name)
    assert made.scheduler_address.startswith("tls://") and made.dashboard_link
    assert made.job_header in made.job_script()
    assert made.name == made.job_name == made.id
    assert made.observed == made.requested == made.plan
    assert {"Scheduler", "job-0"} < set(made.get_logs())
