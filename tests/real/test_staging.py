"""`environment.staging` of a site: the environment is unpacked once per node of a real Slurm."""

from __future__ import annotations

import io
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpujobs
from gpujobs.errors import JobFailedError

from ..support.jobevents import facts_of
from ..support.owner import backend, site  # noqa: F401
from ..support.processes import patience, until

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]

PYTHON = '#!/bin/sh\nexport STAGED_PYTHON="$0"\nexec {python} "$@"\n'
UNPACK = """
import pathlib, time
with pathlib.Path({marks!r}).open("a") as file:
    file.write("begin\\n")
    file.flush()
    time.sleep(2)  # another job of the node comes meanwhile
    file.write("end\\n")
"""


def write_tarball(home: Path) -> Path:
    """Write a tarball whose Python is this one, and whose `conda-unpack` leaves marks."""
    path = home / "it's an environment.tar.gz"
    files = {
        "bin/python": PYTHON.format(python=sys.executable),
        "bin/conda-unpack": UNPACK.format(marks=str(home / "marks")),
    }
    with tarfile.open(path, "w:gz") as tarball:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o755
            tarball.addfile(entry, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def make(site: Callable[..., str], home: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that makes clusters at a site with a staged environment."""
    made: list[Any] = []

    def cluster(**keywords: Any) -> Any:
        environment = {"staging": str(home / "it's an environment.tar.gz")}
        environment["staging_folder"] = str(home / "scratch")
        found = gpujobs.GPUSLURMCluster(
            site(environment=environment),
            **{"worker_memory": "1GiB", "quiet": True, "gpus_per_job": 0, **keywords},
            scheduler_options={"dashboard_address": ":0"},
        )
        made.append(found)
        return found

    yield cluster
    for found in made:
        found.close()


def environ(dask_worker: Any) -> dict[str, str]:
    import os

    return dict(os.environ)


def test_two_jobs_at_once_unpack_it_once(make: Callable[..., Any], home: Path) -> None:
    write_tarball(home)
    cluster = make()
    cluster.scale(2)
    cluster.wait_for_workers(2, timeout=patience(100))
    with cluster.get_client() as client:
        found = list(client.run(environ).values())
    assert (home / "marks").read_text().split() == ["begin", "end"]
    copies = home / "scratch" / f"gpujobs-environments-{os.getuid()}"
    (copy,) = (path for path in copies.iterdir() if path.is_dir())
    assert stat.S_IMODE(copies.stat().st_mode) == 0o700
    for variables in found:
        assert variables["STAGED_PYTHON"] == f"{copy}/bin/python"
        assert variables["PATH"].split(":")[0] == f"{copy}/bin"
        assert variables["GPUJOBS_ENVIRONMENT"] == str(copy)
    logs = [(cluster.folder / "logs" / f"job-{job}.log").read_text() for job in range(2)]
    assert sum("gpujobs: unpacking " in log for log in logs) == 1
    assert not list((cluster.folder / "jobs").glob("*.staging"))


@pytest.mark.slow
def test_a_later_job_uses_the_copy_and_a_new_tarball_is_unpacked(
    make: Callable[..., Any], home: Path
) -> None:
    tarball = write_tarball(home)
    for number, count in ((0, 1), (1, 1), (2, 2)):
        if number == 2:
            os.utime(tarball, (1, 1))
        cluster = make()
        cluster.scale(1)
        cluster.wait_for_workers(1, timeout=patience(100))
        assert (home / "marks").read_text().count("end") == count
        cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"this is no tarball", "tar: This does not look like a tar archive"),
        (None, "No such file or directory"),
    ],
)
def test_a_broken_tarball_is_reported_in_one_line(
    make: Callable[..., Any], home: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (home / "it's an environment.tar.gz").write_bytes(content)
    cluster = make()
    cluster.scale(1)
    with pytest.raises(JobFailedError) as caught:
        cluster.wait_for_workers(1, timeout=patience(100))
    facts = [facts_of(cluster.folder, job["number"]) for job in cluster.jobs]
    reasons = [one.reason for one in facts if one.reason]
    assert reasons
    for reason in reasons:
        assert "\n" not in reason
        assert f"cannot unpack {home}/it's an environment.tar.gz: " in reason
        assert message in reason
    assert message in str(caught.value)
    copies = home / "scratch" / f"gpujobs-environments-{os.getuid()}"
    assert not list(copies.glob("*/.complete"))


@pytest.mark.slow
def test_a_python_of_the_profile_has_priority(make: Callable[..., Any], home: Path) -> None:
    write_tarball(home)
    cluster = make(python=sys.executable)
    cluster.scale(1)
    cluster.wait_for_workers(1, timeout=patience(100))
    with cluster.get_client() as client:
        (variables,) = client.run(environ).values()
    assert "STAGED_PYTHON" not in variables
    assert not (home / "marks").exists()
    text = (cluster.folder / "scripts").glob("*")
    assert all("gpujobs_stage" not in path.read_text() for path in text)
    until(lambda: cluster.jobs, 10)
