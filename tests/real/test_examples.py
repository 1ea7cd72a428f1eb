"""The examples, on this machine and on Slurm; test_local.py and test_groups.py run the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ..conftest import make_cli, nothing_left, unavailable
from ..support import mpi
from ..support.backend import SlurmBackend
from ..support.cli import ROOT, Cli, text_of
from ..support.processes import until

CPU = ["--set", "gpus=0", "--set", "workers.count=2"]


@pytest.fixture
def local(home: Path) -> Iterator[Cli]:
    made = Cli(home, {"GPUJOBS_SITE": "local"}, None)
    (made.work / "examples").symlink_to(ROOT / "examples")
    yield made
    made("cancel", "--all")


def run_example(cli: Cli, name: str, *words: str) -> str:
    """Submit an example and wait for its end; return the output of `run`."""
    done = cli("submit", f"examples/{name}/profile.yaml", "--wait", *words)
    assert done.returncode == 0, done.stderr
    return cli("logs", done.stdout.strip()).stdout


def write_inputs(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        np.save(folder / f"{number:03}.npy", np.full((64, 4), float(number)))


def test_inference_continues(local: Cli) -> None:
    write_inputs(local.work / "in", 30)
    (local.work / "out").mkdir()
    np.save(local.work / "out" / "007.npy", np.zeros(1))  # of an earlier run
    output = run_example(local, "inference", *CPU)
    assert output.splitlines()[0] == "30 files, 1 of them done before"
    found = {path.name for path in (local.work / "out").glob("*.npy")}
    assert found == {f"{number:03}.npy" for number in range(30)}
    expected = np.linspace(0, 1, 512).reshape(8, 64) @ np.full((64, 4), 5.0)
    assert np.allclose(np.load(local.work / "out" / "005.npy"), expected)
    assert run_example(local, "inference", *CPU).startswith("30 files, 30 of them done before")


BUSY = """
import os, sys, gpujobs
with gpujobs.connect(sys.argv[1]) as client:
    busy = [address for address, tasks in client.processing().items() if tasks]
    print(*client.run(os.getpid, workers=busy).values())
"""
"""Print the pid of the worker that has a task."""


def test_inference_survives_a_killed_worker(local: Cli) -> None:
    write_inputs(local.work / "in", 20)
    blocked = local.work / "in" / "011.npy"
    kept = blocked.rename(local.work / "011.npy")
    os.mkfifo(blocked)  # its task waits
    out = local.work / "out"
    cluster = local("submit", "examples/inference/profile.yaml", *CPU).stdout.strip()
    until(lambda: out.is_dir() and len(list(out.glob("???.npy"))) == 19, 60)
    (pid,) = map(int, local.python_run(BUSY, cluster).stdout.split())
    kept.rename(blocked)
    os.kill(pid, signal.SIGKILL)
    until(lambda: local.status(cluster)["state"] not in ("STARTING", "RUNNING"), 90, every=1)
    assert local.status(cluster)["state"] == "DONE"
    assert (out / "011.npy").exists()


@pytest.mark.slow
def test_an_array_that_is_larger_than_memory(local: Cli) -> None:
    words = [
        *CPU,
        "--set",
        "workers.memory=400MiB",
        "--set",
        "run=[python, examples/spill/spill.py, --size, 1GiB]",
    ]
    output = run_example(local, "spill", *words)
    assert output.splitlines() == [
        "array of 1.00 GiB",
        "mean 0.500, variance 0.0833 (expected: 1/12)",
    ]


@pytest.mark.slurm
def test_a_script_of_dask_mpi(slurm_backend: SlurmBackend, home: Path) -> None:
    if why := mpi.missing():
        unavailable("slurm", why)
    cli = make_cli(slurm_backend, home, "ordinary")
    site = slurm_backend.site() | {"mpi": mpi.LAUNCHERS["mpirun"]}
    (cli.home / "sites" / "here.yaml").write_text(text_of(site))
    (cli.work / "examples").symlink_to(ROOT / "examples")
    assert run_example(cli, "mpi") == "mean 0.500 on 2 workers\n"
    nothing_left(slurm_backend)
