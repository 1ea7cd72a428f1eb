"""The oldest and the newest supported release of distributed: the contract, a cluster in Python, a cluster in jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support import environments
from ..support.cli import ROOT
from ..support.processes import processes_with, until
from .test_distributions import environment_of_the_sdist

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OLDEST = "2024.12.0"

CLUSTER = """
import time
import gpujobs

if __name__ == "__main__":
    options = {"dashboard_address": ":0"}
    with gpujobs.GPULocalCluster(gpus_per_job=0, n_workers=1, worker_memory="512MiB", quiet=True, scheduler_options=options) as cluster:
        cluster.wait_for_workers(1)
        client = cluster.get_client()
        assert client.submit(sum, [1, 2, 3]).result() == 6
        cluster.scale(2)
        cluster.wait_for_workers(2)
        cluster.adapt(minimum=0, maximum=2, interval="500ms", hold="2s")
        client.gather(client.map(lambda n: time.sleep(0.1), range(20), pure=False))
        while cluster.observed:
            time.sleep(0.5)
        try:
            cluster.scale(-1)
        except ValueError:
            pass
        client.close()
        print(cluster.jobs)
    print("all is well")
"""


@pytest.fixture(scope="module", params=[OLDEST, "newest"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with gpujobs and one release of distributed; the newest one is that of the sdist."""
    if request.param == "newest":
        return environment_of_the_sdist(tmp_path_factory) / "bin" / "python"
    return oldest(tmp_path_factory)


def oldest(factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a virtual environment with gpujobs, as a wheel, and the oldest release."""
    wheel = str(environments.distributions(factory)["wheel"])
    packages = [f"distributed=={OLDEST}", f"dask=={OLDEST}", "numpy", wheel]
    name, make = f"release-{OLDEST}", environments.install
    return environments.once(factory, name, lambda path: make(path, *packages)) / "bin" / "python"


@pytest.fixture(scope="module")
def pytest_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pytest: it brings no package into the environments."""

    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", folder]
        subprocess.run([*pip, "pytest", "pytest-timeout"], check=True)

    return environments.once(tmp_path_factory, "pytest-alone", install)


def test_the_contract_holds_with_the_oldest_and_newest_releases(
    python: Path, pytest_alone: Path
) -> None:
    test = ROOT / "tests" / "unit" / "test_contract.py"
    subprocess.run(
        [python, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", test],
        check=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(pytest_alone)},
    )


def test_a_python_cluster_runs_with_the_oldest_and_newest_releases(
    python: Path, tmp_path: Path
) -> None:
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "GPUJOBS_SITE": "local"}
    done = subprocess.run(
        [python, script], capture_output=True, text=True, env=env, cwd=tmp_path, check=False
    )
    assert "all is well" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_quickstart_runs_with_the_oldest_release(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the newest one, `make demo` runs it, in test_distributions.py."""
    python = oldest(tmp_path_factory)
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [python.parent / "gpujobs", "submit", ROOT / "examples" / "quickstart.yaml", "--wait"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "they agree with the eigenvalues" in done.stderr
    until(lambda: not processes_with(done.stdout.strip()), 10)
