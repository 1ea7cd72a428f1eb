"""`gpujobs run --here` and `gpujobs.here()`: clusters on the nodes and GPUs of a job that exists already."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..conftest import make_cli, slow_variant
from ..support.backend import FAKE_GPUS, SlurmBackend, nvml_path
from ..support.cli import ROOT, Cli
from ..support.on_slurm import backend  # noqa: F401
from ..support.processes import as_user, patience, processes_with, run, until
from ..support.sge import SgeBackend
from .programs import SLEEP, WHO
from .test_requests_of_jobs import STRICT

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]
JOB = ("--nodes=2", "--gres=gpu:4", "--mem=16G", "--cpus-per-task=8", "--time=10")
ENDS_ALONE = 60
"""Seconds in which a cluster ends after its job has: a supervisor on a node waits for the head for 30 s."""


@pytest.fixture
def cli(cli: Cli) -> Cli:
    return with_programs(cli)


def with_programs(made: Cli) -> Cli:
    made.write("who.py", WHO)
    made.write("sleep.py", SLEEP)
    return made


def run_here(cli: Cli, *words: str) -> list[str]:
    return [cli.command, "run", "--here", *words]


def in_salloc(cli: Cli, gpus: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new allocation, from this host, which for Slurm is none of its nodes.

    ``gpus``: the option that requests them. Its `srun` is as strict as that of Slurm 26.05.
    """
    argv = ["salloc", "--quiet", "--nodes=2", gpus, *JOB[2:], *words]
    env = cli.env | {"PATH": f"{STRICT}:{cli.env['PATH']}"}
    return run(argv, env=env, user=cli.user, timeout=180, cwd=cli.work)


def batch(cli: Cli, *lines: str, job: tuple[str, ...] = JOB) -> str:
    """Submit an own batch script, whose output goes to `out` and `err`; return the id of its job."""
    script = cli.write("job.sh", "\n".join(["#!/bin/bash", *lines, "echo $? > code", ""]))
    argv = ["sbatch", "--parsable", "--output=out", "--error=err", *job, str(script)]
    done = run(argv, env=cli.env, user=cli.user, cwd=cli.work)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ended(cli: Cli, seconds: float = 120) -> tuple[int, str, str]:
    """Return the exit code, the output and the messages of the command of `batch`, once it has ended."""
    code, err = cli.work / "code", cli.work / "err"
    until(lambda: code.exists() and code.read_text(), seconds, lambda: err.read_text())
    return int(code.read_text()), (cli.work / "out").read_text(), err.read_text()


def workers_in(output: str) -> dict[str, list[str]]:
    """Return the workers that WHO has printed: CUDA_VISIBLE_DEVICES, node, OWN, by name."""
    found: dict[str, list[str]] = json.loads(output.splitlines()[-1])["workers"]
    return found


def the_cluster(cli: Cli) -> dict[str, Any]:
    """Return the only cluster of the user."""
    (found,) = json.loads(cli("status", "--all", "--json").stdout)["clusters"]
    return dict(found)


def test_run_here_outside_of_a_job_is_refused(cli: Cli) -> None:
    done = cli("run", "--here", "--", "python", "who.py")
    assert done.returncode == 2
    assert "in no job of a batch scheduler" in done.stderr and "gpujobs submit" in done.stderr
    done = cli("run", "who.py")
    assert done.returncode == 2 and "needs --here" in done.stderr


@pytest.mark.parametrize("gpus", ["--gpus-per-node=4", slow_variant("--gpus=8")])
def test_a_job_of_salloc_has_workers_on_all_its_gpus(
    cli: Cli, backend: SlurmBackend, gpus: str
) -> None:
    """The profile asks for other GPUs, and for a queue: this job has decided that.

    With ``--gpus``, a step without options of its own would get one of the GPUs.
    """
    profile = {"gpus": 1, "queue": "short", "env": {"WANTED": "8"}, "run": ["python", "who.py"]}
    done = in_salloc(cli, gpus, *run_here(cli, str(cli.write("p.yaml", profile))))
    assert done.returncode == 0, done.stderr
    workers = workers_in(done.stdout)
    assert {node for _, node, _ in workers.values()} == {"node1", "node2"} and len(workers) == 8
    assert "2 nodes with 4 GPUs; not used: `gpus`, `queue` of the profile" in done.stderr
    cluster = the_cluster(cli)
    assert cluster["state"] == "DONE"
    until(lambda: not processes_with(cluster["id"]), 15)


@pytest.mark.slow
def test_an_own_batch_script_needs_no_site(cli: Cli, backend: SlurmBackend) -> None:
    """Its environment reaches all nodes, and its caller gets the exit code of the command.

    Its job has tasks with a GPU each, which `srun` would take for an option of each step.
    """
    job = (*JOB[:1], "--ntasks-per-node=4", "--gpus-per-task=1", "--mem=16G", "--time=10")
    del cli.env["GPUJOBS_SITE"]
    exports = (
        f"export PYTHONPATH={nvml_path(backend)} DASK_CUDA_TEST_SINGLE_GPU=1 WANTED=8 OWN=mine"
    )
    fails = shlex.join(["python", "-c", "import sys; sys.exit(3)"])
    command = shlex.join(run_here(cli, "--"))
    batch(cli, exports, f"{command} python who.py && {command} {fails}", job=job)
    code, out, err = ended(cli)
    assert code == 3, err
    workers = workers_in(out)
    assert len(workers) == 8 and {own for _, _, own in workers.values()} == {"mine"}


PYTHON = """
        def place(dask_worker):
            import os
            return os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]

        places = sorted(client.run(place).values())
        try:
            cluster.scale(4)
        except ValueError as error:
            print(json.dumps([places, type(cluster).__name__, str(error)]))
"""


@pytest.mark.slow
def test_a_local_cluster_in_python_uses_all_nodes_of_its_job(
    cli: Cli, backend: SlurmBackend
) -> None:
    page = (ROOT / "docs" / "here.md").read_text()
    block = page.split("<!-- python here -->\n```python\n")[1].split("```")[0]
    program = cli.write("program.py", f"import json\n{block}{PYTHON}")
    outside = run([cli.python, str(program)], env=cli.env, user=cli.user, cwd=cli.work)
    assert outside.returncode == 1 and "in no job of a batch scheduler" in outside.stderr
    batch(cli, shlex.join([cli.python, str(program)]))
    code, out, err = ended(cli)
    assert code == 0, err
    places, name, refused = json.loads(out.splitlines()[-1])
    assert places == [[node, str(gpu)] for node in ("node1", "node2") for gpu in range(4)]
    assert name == "GPULocalCluster" and "one allocation" in refused
    until(lambda: not processes_with(the_cluster(cli)["id"]), 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "scancel",
        pytest.param("SIGINT", marks=pytest.mark.stub),
        pytest.param("SIGHUP", marks=pytest.mark.stub),
        "SIGKILL",
    ],
)
def test_nothing_is_left_on_any_node(cli: Cli, backend: SlurmBackend, end: str) -> None:
    job = batch(
        cli, f"{shlex.join(run_here(cli, '--'))} python sleep.py 600 & echo $! > pid; wait $!"
    )
    until(lambda: (cli.work / "out").exists() and "here" in (cli.work / "out").read_text(), 120)
    cluster = the_cluster(cli)
    assert cluster["state"] == "RUNNING"
    if end == "scancel":
        backend.kill_job(job)
    else:
        os.kill(int((cli.work / "pid").read_text()), signal.Signals[end])
        code = -signal.SIGKILL if end == "SIGKILL" else 128 + signal.Signals[end]
        assert ended(cli)[0] in (code, 137)
    backend.wait_empty(60)
    until(lambda: not processes_with(cluster["id"]), ENDS_ALONE)
    found = cli.status(cluster["id"])
    assert found["state"] == ("FAILED" if end == "SIGKILL" else "CANCELLED"), found


@pytest.mark.slow
@pytest.mark.stub
def test_ctrl_c_in_salloc_cancels_the_cluster(cli: Cli, backend: SlurmBackend) -> None:
    argv = ["salloc", "--quiet", *JOB, *run_here(cli, "--", "python", "sleep.py", "600")]
    process = subprocess.Popen(
        argv, env=cli.env, cwd=cli.work, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True, **as_user(cli.user),
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "here\n"
    cluster = the_cluster(cli)["id"]
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=patience(60))
    assert process.returncode != 0
    until(lambda: not processes_with(cluster), 15)
    assert cli.status(cluster)["state"] == "CANCELLED"


@pytest.mark.slow
def test_render_prints_lines_that_sbatch_accepts(cli: Cli) -> None:
    profile = cli.write("p.yaml", {"gpus": 8, "walltime": "1h", "run": ["python", "who.py"]})
    done = cli("render", "--here", "p.yaml")
    assert done.returncode == 0, done.stderr
    *directives, command = done.stdout.splitlines()
    assert command == "gpujobs run --here p.yaml" and "#SBATCH --time=01:00:00" in directives
    assert not [line for line in directives if not line.startswith("#SBATCH --")]
    # They are valid, and ask for all GPUs in one job.
    test = cli.write("own.sh", "\n".join(["#!/bin/bash", *directives, command, ""]))
    argv = ["sbatch", "--test-only", str(test)]
    checked = run(argv, env=cli.env, user=cli.user, cwd=profile.parent)
    assert checked.returncode == 0 and "node[1-2]" in checked.stderr, checked.stderr


def in_grid_engine(cli: Cli, lines: list[str], *words: str) -> list[str]:
    """Run an own batch script in Grid Engine, which takes no variables over; return its output."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in cli.env.items()]
    command = shlex.join(run_here(cli, "--", "python", "who.py"))
    script = cli.write("job.sh", "\n".join([*exports, *lines, command, ""]))
    argv = ["qsub", "-sync", "y", "-cwd", "-S", "/bin/bash", "-o", "out", "-e", "err", *words]
    done = run([*argv, str(script)], env=cli.env, user=cli.user, cwd=cli.work, timeout=180)
    assert done.returncode == 0, done.stderr + (cli.work / "err").read_text()
    assert the_cluster(cli)["state"] == "DONE"
    return (cli.work / "out").read_text().splitlines()


@pytest.mark.sge
@pytest.mark.slow
def test_a_job_of_grid_engine_uses_the_gpus_that_it_was_given(
    sge_backend: SgeBackend, home: Path
) -> None:
    """The site file says how a job finds its GPUs: two of the four of its node."""
    cli = with_programs(make_cli(sge_backend, home, "ordinary"))
    lines = ["export WANTED=2", "echo $SGE_HGR_gpu"]
    own, *_, printed = in_grid_engine(cli, lines, "-pe", "smp", "4", "-l", "gpu=2")
    gpus = {devices.split(",")[0] for devices, _, _ in workers_in(printed).values()}
    assert gpus == set(own.split()) and len(gpus) == 2


@pytest.mark.sge
@pytest.mark.slow
def test_a_job_on_two_nodes_of_grid_engine_has_workers_on_both(
    sge_backend: SgeBackend, home: Path
) -> None:
    """`qrsh -inherit` takes no variables over; those of the script reach the other node all the same."""
    cli = with_programs(make_cli(sge_backend, home, "ordinary"))
    del cli.env["GPUJOBS_SITE"]
    lines = [FAKE_GPUS, "export WANTED=8 OWN=mine"]
    printed = in_grid_engine(cli, lines, "-pe", "whole", "32", "-l", "slot_gpu=0.25")[-1]
    workers = workers_in(printed)
    assert len(workers) == 8 and {own for _, _, own in workers.values()} == {"mine"}
    assert {node for _, node, _ in workers.values()} == {"node1", "node2"}
