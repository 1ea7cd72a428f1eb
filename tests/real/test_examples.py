"""The examples, on this machine and on Slurm; test_local.py and test_groups.py run the others."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ..conftest import make_cli, need_library, nothing_left, unavailable
from ..support import mpi
from ..support.backend import SlurmBackend
from ..support.cli import NVML, ROOT, Cli, text_of
from ..support.processes import run, until

CPU = ["--set", "gpus=0", "--set", "workers.count=2"]


@pytest.fixture
def local(home: Path) -> Iterator[Cli]:
    made = Cli(home, {"GPUJOBS_SITE": "local"}, None)
    yield made
    made("cancel", "--all")


def enter(cli: Cli, name: str) -> None:
    """Make the folder of an example the working directory of the command line."""
    shutil.copytree(ROOT / "examples" / name, cli.work, dirs_exist_ok=True)


def run_example(cli: Cli, name: str, *words: str) -> str:
    """Submit an example and wait for its end; return the output of `run`."""
    enter(cli, name)
    done = cli("submit", "profile.yaml", "--wait", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}-")
    return cli("logs", done.stdout.strip()).stdout


def with_gpus(cli: Cli, count: int, *fakes: str) -> list[str]:
    """Give this machine fake GPUs; return the options with which the jobs see them, too."""
    gpus = {
        "PYTHONPATH": os.pathsep.join(str(NVML.parent / name) for name in ("nvml", *fakes)),
        "DASK_CUDA_TEST_SINGLE_GPU": "1",
        "FAKE_NVML_GPUS": str(count),
    }
    cli.env.update(gpus)
    return ["--set", f"env={json.dumps(gpus)}", "--set", f"start_workers={count}"]


def write_inputs(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        np.save(folder / f"{number:03}.npy", np.full((64, 4), float(number)))


@pytest.mark.slow
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


@pytest.mark.slow
def test_inference_without_input_fails_with_the_reason(local: Cli) -> None:
    enter(local, "inference")
    done = local("submit", "profile.yaml", "--wait", *CPU)
    assert done.returncode == 5
    assert f"there is no .npy file in {local.work}/in" in done.stderr


BUSY = """
import os, sys, gpujobs
with gpujobs.connect(sys.argv[1]) as client:
    busy = [address for address, tasks in client.processing().items() if tasks]
    print(*client.run(os.getpid, workers=busy).values())
"""
"""Print the pid of the worker that has a task."""


@pytest.mark.slow
def test_inference_survives_a_killed_worker(local: Cli) -> None:
    write_inputs(local.work / "in", 20)
    blocked = local.work / "in" / "011.npy"
    kept = blocked.rename(local.work / "011.npy")
    os.mkfifo(blocked)  # its task waits
    out = local.work / "out"
    enter(local, "inference")
    cluster = local("submit", "profile.yaml", *CPU).stdout.strip()
    until(lambda: out.is_dir() and len(list(out.glob("???.npy"))) == 19, 60)
    (pid,) = map(int, local.python_run(BUSY, cluster).stdout.split())
    kept.rename(blocked)
    os.kill(pid, signal.SIGKILL)
    until(lambda: local.status(cluster)["state"] not in ("STARTING", "RUNNING"), 90, every=1)
    assert local.status(cluster)["state"] == "DONE"
    assert (out / "011.npy").exists()


def bars(output: str) -> list[str]:
    """Return the lines of the progress bar."""
    return [line for line in output.splitlines() if line.startswith("[")]


@pytest.mark.slow
def test_inference_shows_its_progress_in_lines(local: Cli) -> None:
    page = (ROOT / "examples" / "inference" / "README.md").read_text()
    (command,) = re.findall(r"^\$ (.*)$", page, re.M)
    path = f"{Path(sys.executable).parent}:{local.env['PATH']}"
    run(["bash", "-c", command], cwd=local.work, env={**local.env, "PATH": path})
    output = run_example(local, "inference", *CPU)
    assert "\r" not in output and "\x1b" not in output
    found = bars(output)
    assert [line.split("] ")[1] for line in found] == [f"{n}/40 files" for n in range(2, 41, 2)]
    assert found[0].count("#") == 2
    assert found[-1] == f"[{'#' * 40}] 40/40 files"


@pytest.mark.slow
def test_inference_repeats_a_file_that_fails_once(local: Cli) -> None:
    write_inputs(local.work / "in", 5)
    flawed = local.work / "in" / "003.npy"
    kept = flawed.rename(local.work / "003.npy")
    os.mkfifo(flawed)
    enter(local, "inference")
    cluster = local("submit", "profile.yaml", *CPU).stdout.strip()
    with flawed.open("wb"):  # as soon as its task reads it
        kept.rename(flawed)  # for the next attempt; this one ends without data
    until(lambda: local.status(cluster)["state"] not in ("STARTING", "RUNNING"), 90, every=1)
    assert local.status(cluster)["state"] == "DONE"
    expected = np.linspace(0, 1, 512).reshape(8, 64) @ np.full((64, 4), 3.0)
    assert np.allclose(np.load(local.work / "out" / "003.npy"), expected)
    assert "failed" not in local("logs", cluster).stdout


@pytest.mark.slow
def test_inference_says_which_file_is_corrupt(local: Cli) -> None:
    write_inputs(local.work / "in", 5)
    corrupt = local.work / "in" / "003.npy"
    corrupt.write_bytes(corrupt.read_bytes()[:500])
    enter(local, "inference")
    done = local("submit", "profile.yaml", "--wait", *CPU)
    assert done.returncode == 5
    output = local("logs", done.stdout.strip()).stdout
    assert bars(output)[-1].endswith("] 5/5 files")
    reason = output.splitlines()[-1]
    assert re.match(r"failed: 003\.npy: \w.+", reason)
    assert reason in done.stderr
    others = {path.name for path in (local.work / "out").glob("*.npy")}
    assert others == {"000.npy", "001.npy", "002.npy", "004.npy"}  # no part of the corrupt one


def console(page: str) -> list[list[str]]:
    """Return the commands in the console blocks of a page of the cookbook, in words."""
    text = (ROOT / "examples" / page / "README.md").read_text()
    blocks = "".join(re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S))
    lines = blocks.replace("\\\n", " ").splitlines()
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


@pytest.mark.slow
def test_the_steps_of_groups_run_where_they_must(local: Cli) -> None:
    enter(local, "groups")
    ((program, *words),) = console("groups")
    assert program == "gpujobs"
    done = local(*words)
    assert done.returncode == 0, done.stderr
    lines = local("logs", done.stdout.strip()).stdout.splitlines()
    steps = [re.sub(r"\d+ on \S+-(gpu|prep)-\d+", r"\1", line) for line in lines[:-1]]
    assert set(steps) == {"read: prep", "fit: gpu with numpy"}
    assert lines[-1] == "coefficients: 0.0 1.0 2.0 3.0 4.0 5.0 6.0 7.0"


@pytest.mark.slow
def test_an_array_that_is_larger_than_memory_is_spilled_and_correct(local: Cli) -> None:
    local.look_at_memory_often()
    words = [
        *CPU,
        "--set",
        "workers.memory=400MiB",
        "--set",
        "run=[python, spill.py, --size, 1GiB]",
    ]
    output = run_example(local, "spill", *words)
    assert output.splitlines() == [
        "array of 1.00 GiB, NumPy (no CuPy or no GPU in the workers)",
        "mean 0.500, variance 0.0833 (expected: 1/12)",
    ]


@pytest.mark.slow
@pytest.mark.slurm
def test_a_script_of_dask_mpi_runs_unchanged(slurm_backend: SlurmBackend, home: Path) -> None:
    if why := mpi.missing():
        unavailable("slurm", why)
    cli = make_cli(slurm_backend, home, "ordinary")
    site = slurm_backend.site() | {"mpi": mpi.LAUNCHERS["mpirun"]}
    (cli.home / "sites" / "here.yaml").write_text(text_of(site))
    assert run_example(cli, "mpi") == "mean 0.500 on 2 workers\n"
    nothing_left(slurm_backend)


def with_run(name: str, *words: str) -> list[str]:
    """Return the options that let `run` of an example have these arguments, on two CPU workers."""
    argv = json.dumps(["python", f"{name}.py", *words])
    return [*CPU, "--set", "start_workers=2", "--set", f"run={argv}"]


@pytest.mark.slow
def test_optuna_continues_a_study(local: Cli) -> None:
    need_library("optuna")
    run = with_run("search", "--trials", "20", "--gpus", "0.5")
    words = [*run, "--set", "workers.threads=2", "--set", "workers.resources.GPU=1"]
    first, last = run_example(local, "search", *words).splitlines()
    assert first == "GPU workers: 2; trials at a time: 4"  # with the resource of a GPU worker
    assert last.startswith("20 trials, best loss ")
    first, last = run_example(local, "search", *with_run("search", "--trials", "20")).splitlines()
    assert first == "CPU workers: 2; trials at a time: 2"
    assert last.startswith("40 trials, best loss ")


TOGETHER = """
from distributed import Client, Event

def wait_for_both(number):
    Event(str(number)).set()
    return Event(str(1 - number)).wait(60)

with Client() as client:
    trials = client.map(wait_for_both, range(2), resources={"GPU": 1})
    print(client.gather(trials))
"""
"""A program whose two trials, each with `GPU: 1`, wait for each other."""


@pytest.mark.slow
def test_two_trials_run_on_each_gpu(local: Cli) -> None:
    need_library("optuna")
    gpus = with_gpus(local, 1)
    enter(local, "search")
    ((program, *words),) = console("search")
    assert program == "gpujobs"
    done = local(*words, *gpus)
    assert done.returncode == 0, done.stderr
    first, last = local("logs", done.stdout.strip()).stdout.splitlines()
    assert first == "GPU workers: 1; trials at a time: 2"
    assert last.startswith("200 trials, best loss ")
    local.write("together.py", TOGETHER)
    done = local(*words, *gpus, "--set", "run=[python, together.py]")
    assert local("logs", done.stdout.strip()).stdout == "[True, True]\n"


@pytest.mark.slow
def test_xgboost_trains_on_all_workers(local: Cli) -> None:
    need_library("xgboost")
    need_library("pyarrow")
    words = with_run("boosting", "--rows", "40000", "--rounds", "20", "--workers", "2")
    output = run_example(local, "boosting", *words)
    assert "trained on 2 workers, device cpu" in output


@pytest.mark.slow
def test_a_numba_kernel_is_compiled_and_runs_on_each_worker(local: Cli) -> None:
    need_library("numba")
    output = run_example(local, "kernel", *with_run("kernel", "--size", "100000"))
    lines = output.splitlines()
    assert lines[0] == "2 workers compiled the kernel: CPUDispatcher"
    before, after = (float(text) for text in re.findall(r"0\.\d+", lines[1])[:2])
    assert (before, after) == pytest.approx((12**-0.5, 36**-0.5), abs=0.005)


@pytest.mark.slow
def test_arrays_use_numpy_without_cupy(local: Cli) -> None:
    output = run_example(local, "arrays", *with_run("arrays", "--rows", "100000", "--side", "2000"))
    lines = output.splitlines()
    assert lines[0] == "2 workers, tls, NumPy (no CuPy or no GPU in the workers)"
    assert [line.partition(":")[0] for line in lines[1:]] == [
        "mean",
        "sum of x + x.T",
        "tall-skinny SVD",
    ]


@pytest.mark.slow
def test_arrays_run_over_two_protocols(local: Cli) -> None:
    enter(local, "arrays")
    gpus = with_gpus(local, 2, "ucxx", "rmm")
    run = ["python", "arrays.py", "--rows", "50000", "--side", "800"]
    first = {}
    for program, *words in console("arrays"):
        assert program == "gpujobs"
        done = local(*words, *gpus, "--set", f"run={json.dumps(run)}")
        assert done.returncode == 0, done.stderr
        first[words[-1]] = local("logs", done.stdout.strip()).stdout.splitlines()[0]
    kind = "NumPy (no CuPy or no GPU in the workers)"
    assert first == {
        "network.protocol=ucxx": f"2 workers, ucxx, {kind}",
        "network.protocol=tcp": f"2 workers, tls, {kind}",
    }


@pytest.mark.slow
def test_tables_say_what_they_wait_for(local: Cli) -> None:
    need_library("pyarrow")
    enter(local, "tables")
    done = local("submit", "profile.yaml", "--wait", *CPU)
    assert done.returncode == 5
    assert "the workers cannot import cudf: No module named 'dask_cudf'" in done.stderr
    assert "This example waits for NVIDIA GPUs and RAPIDS" in done.stderr
    assert not (local.work / "tables").exists()


@pytest.mark.slow
def test_polars_says_what_it_waits_for(local: Cli) -> None:
    enter(local, "polars")
    done = local("submit", "profile.yaml", "--wait", *CPU)
    assert done.returncode == 5
    assert "the workers cannot import cudf_polars: No module named 'cudf_polars'" in done.stderr
    assert not (local.work / "sales").exists()


@pytest.mark.slow
def test_tables_filter_and_write_with_pandas(local: Cli) -> None:
    need_library("pyarrow")
    local.look_at_memory_often()
    output = run_example(local, "tables", *with_run("tables", "--backend", "pandas"))
    found = re.fullmatch(
        r"(\d+) of 86400 rows are left, with 26 names, in tables/by-name\n", output
    )
    assert found and 40000 < int(found[1]) < 43000  # 0.95 * 0.5 of all
