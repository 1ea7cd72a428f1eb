"""Clusters in a job of Slurm have all of its GPUs, with whichever option the job has requested them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from ..conftest import SITE, nothing_left, slow_variant
from ..support.backend import Backend
from ..support.cli import ROOT, Cli
from ..support.processes import run, until

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]
STRICT = ROOT / "tests" / "fakes" / "slurm"
"""Has an `srun` that refuses what that of Slurm 26.05 refuses."""
_EVENTS = "[json.loads(line) for line in open(os.environ['GPUJOBS_FOLDER'] + '/workers-1.jsonl') if line.strip()]"
_WORKERS = f"{{one['worker']: one['row'] for one in {_EVENTS} if one['event'] == 'connected'}}"
SHOW = f"import json, os; print(json.dumps({_WORKERS}))"


@pytest.fixture(params=["slurm", SITE])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    found: Backend = request.getfixturevalue(f"{request.param}_backend")
    if found.name != "slurm":
        pytest.skip("for Slurm")
    yield found
    nothing_left(found)


def request_of(kind: str, nodes: int, gpus: int) -> list[str]:
    """Return the options of a job that requests ``gpus`` GPUs on each of its nodes."""
    options = {
        "gpus-per-node": [f"--gpus-per-node={gpus}"],
        "gpus": [f"--gpus={nodes * gpus}"],
        "gpus-per-task": [f"--ntasks-per-node={gpus}", "--gpus-per-task=1"],
        "ntasks-per-gpu": [f"--gpus={nodes * gpus}", "--ntasks-per-gpu=1"],
        "gres": [f"--gres=gpu:{gpus}"],
    }
    return options[kind]


def gpus_of(workers: dict[str, Any]) -> set[tuple[str, str]]:
    """Return the node and the GPU of each worker."""
    return {(one["gpu"]["node"], one["gpu"]["uuid"]) for one in workers.values()}


@pytest.mark.conformance
@pytest.mark.stub
@pytest.mark.parametrize(
    "kind",
    [
        "gpus-per-node", slow_variant("gpus"), slow_variant("gpus-per-task"),
        slow_variant("ntasks-per-gpu"), slow_variant("gres"),
    ],
)  # fmt: skip
def test_a_cluster_in_the_job_has_all_its_gpus(cli: Cli, backend: Backend, kind: str) -> None:
    """The other lines of the script are those of `render --here`."""
    nodes, gpus = min(2, backend.nodes), backend.gpus_per_node
    profile = {"gpus": nodes * gpus, "queue": "main", "run": [cli.python, "-c", SHOW]}
    own = cli("render", "--here", str(cli.write("p.yaml", profile)))
    assert own.returncode == 0, own.stderr
    others = [
        line
        for line in own.stdout.splitlines()
        if line.startswith("#SBATCH") and not {"gres", "gpus", "ntasks", "cpus"} & words_in(line)
    ]
    lines = [f"#SBATCH {option}" for option in request_of(kind, nodes, gpus)]
    command = shlex.join([cli.command, "run", "--here", "p.yaml"])
    path = f"export PATH={shlex.quote(str(STRICT))}:$PATH"
    text = "\n".join(["#!/bin/bash", *others, *lines, path, command, "echo $? > code", ""])
    argv = ["sbatch", "--parsable", "--output=out", "--error=err", str(cli.write("job.sh", text))]
    done = run(argv, env=cli.env, user=cli.user, cwd=cli.work)
    assert done.returncode == 0, done.stderr
    code, err = cli.work / "code", cli.work / "err"
    until(lambda: code.exists() and code.read_text(), 180, lambda: err.read_text())
    assert code.read_text() == "0\n", err.read_text()
    workers = json.loads((cli.work / "out").read_text().splitlines()[-1])
    assert len(workers) == len(gpus_of(workers)) == nodes * gpus
    assert len({node for node, _ in gpus_of(workers)}) == nodes


def words_in(line: str) -> set[str]:
    return set(line.replace("=", "-").split("-"))


@pytest.mark.stub
@pytest.mark.parametrize(
    "line",
    [
        slow_variant("--gpus-per-node={gpus_per_node}"), slow_variant("--gpus={gpus_per_job}"),
        slow_variant("--gres=gpu:{gpus_per_node}"),
    ],
)  # fmt: skip
def test_an_allocation_has_all_its_gpus(cli: Cli, backend: Backend, line: str) -> None:
    setup = f"{cli.site['setup']}\nexport PATH={shlex.quote(str(STRICT))}:$PATH"
    request = ["--partition={queue}", "--nodes={nodes}", line]
    (cli.home / "sites" / "here.yaml").write_text(
        json.dumps(cli.site | {"setup": setup, "request": request})
    )
    nodes, gpus = min(2, backend.nodes), backend.gpus_per_node
    run_words = [cli.python, "-c", SHOW]
    profile = {"gpus": nodes * gpus, "queue": "main", "layout": "allocation", "run": run_words}
    cluster = cli.submit(profile, "--wait")
    workers = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert len(workers) == len(gpus_of(workers)) == nodes * gpus
    backend.wait_empty(60, cluster)
