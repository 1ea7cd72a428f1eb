"""Programs that import their own modules: workers find them in the folder of the program, wherever it is started."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..conftest import make_cli, nothing_left, unavailable
from ..support import mpi
from ..support.backend import Backend, SlurmBackend
from ..support.cli import Cli, text_of
from ..support.processes import patience, run

MAIN = """
from distributed import Client
from helper import cube

if __name__ == "__main__":
    with Client() as client:
        client.wait_for_workers(2)
        print(client.gather(client.map(cube, range(4))))
"""
HELPER = """
def cube(x):
    import colorsys  # of the standard library, not the one beside this module
    return x**3
"""
FOUND = "[0, 1, 8, 27]\n"
OWNER = MAIN.replace("distributed import Client", "gpujobs import GPUSLURMCluster").replace(
    "with Client() as client:",
    "with GPUSLURMCluster(n_workers=2) as cluster:\n        client = cluster.get_client()",
)
LOST = """
import sys
from distributed import wait
from gpujobs import GPUSLURMCluster
from helper import cube

if __name__ == "__main__":
    with GPUSLURMCluster(n_workers=1, scheduler="local") as cluster:
        client = cluster.get_client()
        futures = client.map(cube, range(40))
        wait(futures, timeout=float(sys.argv[1]))
        later = client.submit(cube, 41).exception(timeout=float(sys.argv[1]))
        for error in (*{type(future.exception()): future.exception() for future in futures}.values(), later):
            print(type(error).__name__, error)
"""


def write_program(cli: Cli, text: str) -> Path:
    """Write a program with a module of its own into a folder."""
    folder = cli.work / "app"
    folder.mkdir()
    (folder / "main.py").write_text(text)
    (folder / "helper.py").write_text(HELPER)
    return folder


def run_owner(cli: Cli, text: str, mode: int = 0o775) -> subprocess.CompletedProcess[str]:
    """Run a program that owns its cluster."""
    folder = write_program(cli, text)
    folder.chmod(mode)
    argv = [cli.python, "app/main.py", str(patience(60))]
    return run(argv, env=cli.env, user=cli.user, timeout=180, cwd=cli.work)


@pytest.mark.conformance
def test_workers_of_run_import_modules_beside_the_script(cli: Cli, backend: Backend) -> None:
    folder = write_program(cli, MAIN)
    (folder / "colorsys.py").write_text("raise RuntimeError('it hides the one of the library')\n")
    profile = {"gpus": 2, "run": ["python", "app/main.py"]}
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 0, done.stderr
    assert f"workers also import modules from {folder}, the folder of app/main.py" in done.stderr
    assert cli("logs", done.stdout.strip()).stdout == FOUND


@pytest.mark.slurm
def test_workers_of_an_owner_import_modules_beside_its_script(
    slurm_backend: SlurmBackend, home: Path
) -> None:
    done = run_owner(make_cli(slurm_backend, home, "ordinary"), OWNER)
    assert done.stdout.endswith(FOUND), done.stdout + done.stderr
    nothing_left(slurm_backend)


@pytest.mark.slow
@pytest.mark.slurm
def test_a_folder_that_others_can_write_is_said_and_no_client_waits(
    slurm_backend: SlurmBackend, home: Path
) -> None:
    cli = make_cli(slurm_backend, home, "ordinary")
    done = run_owner(cli, LOST, 0o777)
    folder = cli.work / "app"
    assert f"{folder} is writable by all users; `workdir` or PYTHONPATH may name it" in done.stdout
    assert "jobs in a row ended soon after their workers had connected" in done.stderr
    *_, last = [line for line in done.stdout.splitlines() if line.startswith("JobFailedError ")]
    assert "COMPLETED: ModuleNotFoundError: No module named 'helper' (workers import from" in last
    assert "TimeoutError" not in done.stdout + done.stderr
    nothing_left(slurm_backend)


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("run_on", ["head", "ranks"])
def test_ranks_import_modules_beside_the_script(
    slurm_backend: SlurmBackend, home: Path, run_on: str
) -> None:
    if why := mpi.missing():
        unavailable("slurm", why)
    cli = make_cli(slurm_backend, home, "ordinary")
    site = slurm_backend.site() | {"mpi": mpi.LAUNCHERS["mpirun"]}
    (cli.home / "sites" / "here.yaml").write_text(text_of(site))
    profile: dict[str, Any] = {"gpus": 2, "layout": "mpi", "run": ["python", "app/main.py"]}
    text = MAIN
    if run_on == "ranks":
        profile |= {"run_on": "ranks", "run": ["app/main.py"]}
        start = "import dask_mpi\n    dask_mpi.initialize()\n    with Client() as client"
        text = MAIN.replace("with Client() as client", start)
    write_program(cli, text)
    cluster = cli.submit(profile, "--wait")
    assert cli("logs", cluster).stdout == FOUND
    nothing_left(slurm_backend)
