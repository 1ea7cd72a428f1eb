"""The examples of workflow managers, on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import need_library
from ..support.cli import Cli
from ..support.processes import patience, run
from .test_examples import enter
from .test_examples import local as empty  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

CPU = {"gpus": 0, "workers": {"count": 1}}
OPTIONS = "--set gpus=0 --set workers.count=1"
"""The same, as options of `gpujobs submit`."""


@pytest.fixture
def local(empty: Cli) -> Cli:
    """The command line in the folder of the examples."""
    enter(empty, "workflows")
    return empty


def path_with_command(cli: Cli) -> str:
    """Return a PATH on which `gpujobs` is found."""
    return f"{Path(cli.command).parent}:{cli.env['PATH']}"


def test_tasks_of_a_flow_run_and_fail_as_their_clusters(local: Cli) -> None:
    """Prefect is replaced by decorators that return the function."""
    local.write("prefect.py", "def task(function):\n    return function\n\nflow = task\n")
    env = {**local.env, "PYTHONPATH": str(local.work)}
    command = [sys.executable, "flow.py"]
    done = run([*command, json.dumps(CPU)], env=env, cwd=local.work, timeout=180)
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stderr
    done = run(
        [*command, json.dumps({**CPU, "run": ["sh", "-c", "exit 3"]})], env=env, cwd=local.work
    )
    assert "JobFailedError" in done.stderr and "exit code 3" in done.stderr


def test_a_flow_of_the_real_prefect_computes_on_a_cluster(local: Cli) -> None:
    """Without the stand-in: Prefect starts a temporary server for the flow."""
    need_library("prefect")
    startup = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(patience(60)))}
    env = {**local.env, "DO_NOT_TRACK": "1", **startup}
    command = [sys.executable, "flow.py", json.dumps(CPU)]
    done = run(command, env=env, cwd=local.work, timeout=180)
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stderr


def snakemake(local: Cli, options: str) -> subprocess.CompletedProcess[str]:
    """Run the Snakefile with these options of `gpujobs submit`."""
    need_library("snakemake")
    file = ["--cores", "1"]
    command = [sys.executable, "-m", "snakemake", *file, "--config", f"gpujobs={options}"]
    env = {**local.env, "PATH": path_with_command(local)}
    return run(command, env=env, cwd=local.work, timeout=180)


def test_a_step_of_snakemake_runs_on_a_cluster(local: Cli) -> None:
    done = snakemake(local, OPTIONS)
    assert done.returncode == 0, done.stderr
    assert json.loads((local.work / "mean.json").read_text()) == {"mean": 0.5}
    cluster = json.loads((local.work / "cluster.json").read_text())
    assert local.status(cluster["cluster"])["state"] == "DONE"


def test_a_failed_cluster_fails_the_step_of_snakemake(local: Cli) -> None:
    done = snakemake(local, f"--set 'run=[sh, -c, exit 3]' {OPTIONS}")
    assert done.returncode == 1
    assert "run: ended with exit code 3" in done.stderr
    assert not (local.work / "mean.json").exists()


def test_the_script_of_nextflow_runs_on_a_cluster(local: Cli) -> None:
    """The script of the process, as Nextflow runs it: `bash -ue` in a folder of the task."""
    text = (local.work / "main.nf").read_text()
    (script,) = re.findall(r'"""\n(.*?)"""', text, re.S)
    values = {"$projectDir": str(local.work), "$params.gpujobs": OPTIONS}
    for name, value in values.items():
        assert name in script
        script = script.replace(name, value)
    task = local.work / "task"
    task.mkdir()
    env = {**local.env, "PATH": path_with_command(local)}
    command = ["bash", "-ue", "-c", script.replace("\\\\", "\\")]
    done = run(command, env=env, cwd=task, timeout=180)
    assert done.returncode == 0, done.stderr
    assert json.loads((task / "mean.json").read_text()) == {"mean": 0.5}
    cluster = json.loads((task / "cluster.json").read_text())
    assert local.status(cluster["cluster"])["state"] == "DONE"
