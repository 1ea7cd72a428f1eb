"""The examples of notebooks and workflow managers, on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ..conftest import need_library
from ..support.cli import ROOT, Cli
from ..support.processes import run
from .test_examples import local  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

CPU = {"gpus": 0, "workers": {"count": 1}}
NOTEBOOK = ROOT / "examples" / "notebook"


def test_the_notebook_connects_and_scales(local: Cli) -> None:
    words = ["--set", "gpus=0", "--set", "workers.count=1"]
    done = local("submit", "examples/notebook/profile.yaml", "--wait", *words)
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    cells = json.loads((NOTEBOOK / "cluster.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "notebook-7f3a" in code
    shown = "\nprint(round(float(x.mean().compute(scheduler='threads')), 3))\n"
    done = local.python_run(code.replace("notebook-7f3a", cluster) + shown)
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stderr
    assert local.status(cluster)["state"] == "RUNNING"  # the notebook has gone
    assert len(local.status(cluster)["jobs"]) == 2


LABEXTENSION = """
import asyncio, importlib
import dask

async def main():
    # As make_cluster() of dask_labextension.manager.
    module = importlib.import_module(dask.config.get("labextension.factory.module"))
    factory = getattr(module, dask.config.get("labextension.factory.class"))
    kwargs = dask.config.get("labextension.factory.kwargs")
    kwargs = {key.replace("-", "_"): entry for key, entry in kwargs.items()}
    cluster = await factory(*dask.config.get("labextension.factory.args"), **kwargs, asynchronous=True)
    await cluster.scale(dask.config.get("labextension.default.workers"))
    while not cluster.scheduler_info["workers"]:
        await asyncio.sleep(0.2)
    print(len(cluster.scheduler_info["workers"]), bool(cluster.dashboard_link))
    await cluster.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_the_factory_of_dask_labextension(local: Cli) -> None:
    config = local.home / ".config" / "dask"
    config.mkdir(parents=True)
    text = (NOTEBOOK / "labextension.yaml").read_text()
    assert "gpus_per_job: 1" in text
    (config / "labextension.yaml").write_text(text.replace("gpus_per_job: 1", "gpus_per_job: 0"))
    done = local.python_run(LABEXTENSION)
    assert (done.returncode, done.stdout) == (0, "1 True\n"), done.stderr


def test_jupyter_in_the_head_listens_on_the_loopback_interface(local: Cli) -> None:
    plan = local(
        "plan", "examples/notebook/jupyter.yaml", "--set", "gpus=0", "--set", "workers.count=1"
    )
    assert plan.returncode == 0, plan.stderr
    assert "jupyter lab --no-browser --ip=127.0.0.1" in plan.stdout


def test_a_flow_of_prefect(local: Cli) -> None:
    """Prefect is replaced by decorators that return the function."""
    local.write("prefect.py", "def task(function):\n    return function\n\nflow = task\n")
    env = {**local.env, "PYTHONPATH": str(local.work)}
    command = [sys.executable, "examples/workflows/flow.py"]
    done = run([*command, json.dumps(CPU)], env=env, cwd=local.work, timeout=180)
    assert (done.returncode, done.stdout) == (0, "0.5\n"), done.stderr
    done = run(
        [*command, json.dumps({**CPU, "run": ["sh", "-c", "exit 3"]})], env=env, cwd=local.work
    )
    assert "JobFailedError" in done.stderr and "exit code 3" in done.stderr


def test_snakemake(local: Cli) -> None:
    need_library("snakemake")
    file = ["--snakefile", "examples/workflows/Snakefile", "--cores", "1"]
    options = "gpujobs=--set gpus=0 --set workers.count=1"
    env = {**local.env, "PATH": f"{Path(local.command).parent}:{local.env['PATH']}"}
    done = run(
        [sys.executable, "-m", "snakemake", *file, "--config", options], env=env, cwd=local.work
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((local.work / "mean.json").read_text()) == {"mean": 0.5}
    cluster = json.loads((local.work / "cluster.json").read_text())
    assert local.status(cluster["cluster"])["state"] == "DONE"
