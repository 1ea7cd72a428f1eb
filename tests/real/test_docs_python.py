"""The Python blocks of the documentation, executed on the real Slurm or on this machine.

The comment above a block says how it is executed:

- ``alone``: by itself, on a Slurm that is called delta
- ``opens NAME``: the same, and its cluster stays for the blocks ``with NAME``
- ``run``: as `run` of a cluster, with these settings
- ``local``: on this machine, with fake GPUs and a fake ucxx
- ``quoted``: not here: the code of this package has these lines (see test_add_a_scheduler.py)
- ``here``: in a job, by test_here.py
- ``laptop``: through an sshd, by test_laptop.py
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest

import gpujobs

from ..conftest import nothing_left, unavailable
from ..support import mpi
from ..support.backend import SlurmBackend
from ..support.cli import NVML, ROOT, text_of
from ..support.processes import patience, run

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.filterwarnings("default")]

BLOCK = re.compile(
    r"^<!-- python (?P<mark>[^>\n]+) -->\n```python\n(?P<text>.*?)^```$", re.M | re.S
)
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    (f"{path.stem}-{n}", found["mark"].split(), found["text"])
    for path in PAGES
    for n, found in enumerate(BLOCK.finditer(path.read_text()))
]
CLUSTER = "svd-7f3a"
"""The id of a cluster in the documentation."""

NAMES = """
import dask, gpujobs

def read(file):
    return [file]

def train(table):
    return len(table)

def generate(prompt):
    return prompt.upper()

fit, merge = dask.delayed(train), list
files, prompts, tables = ["a", "b"], ["c"], [[1], [2]]
"""
"""Names that the blocks use and do not define."""


def kind(*words: str) -> list[object]:
    """Return the blocks whose comment begins with these words."""
    return [
        pytest.param(mark[len(words) :], text, id=name)
        for name, mark, text in BLOCKS
        if tuple(mark[: len(words)]) == words
    ]


def execute(text: str, names: dict[str, Any]) -> None:
    """Execute a block, which may contain `await`, with these names."""
    code = compile(text, "documentation", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


def names() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "__main__"}  # functions travel by value
    exec(NAMES, found)
    return found


def close(found: dict[str, Any]) -> None:
    """Close the clients and the clusters of a block."""
    for kinds in ("Client", "Cluster"):
        for value in found.values():
            if type(value).__name__.endswith(kinds) and value.status not in ("closed", "failed"):
                value.close()


@pytest.fixture
def delta(
    slurm_backend: SlurmBackend, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The private Slurm with the name of a site of the documentation; the working folder."""
    if why := mpi.missing():
        unavailable("slurm", why)
    site = slurm_backend.site() | {"mpi": mpi.LAUNCHERS["mpirun"]}
    (home / "delta.yaml").write_text(text_of(site))
    variables = {**slurm_backend.env(), "HOME": str(home), "GPUJOBS_SITE_PATH": str(home)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)
    (home / "svd.yaml").write_text("gpus: 4\nwalltime: 10m\n")
    (home / "profile.yaml").write_text(
        "gpus: 2\nwalltime: 10m\nrun: [python, svd.py]\nsite: delta\n"
    )
    (home / "svd.py").write_text("from distributed import Client\nClient().close()\n")
    yield home
    nothing_left(slurm_backend)


@pytest.mark.parametrize(("words", "text"), kind("alone"))
def test_blocks_that_stand_alone_run(words: list[str], text: str, delta: Path) -> None:
    if CLUSTER in text:
        cluster = gpujobs.submit({"gpus": 1, "name": "svd", "walltime": "10m"}, site="delta")
        cluster.wait(timeout=patience(60))
        text = text.replace(CLUSTER, cluster.id)
    found = names()
    try:
        execute(text, found)
        if "report" in found:
            assert found["report"].state == "DONE"
    finally:
        close(found)


@pytest.mark.parametrize("chain", [mark[1] for _, mark, _ in BLOCKS if mark[0] == "opens"])
@pytest.mark.timeout(400)
def test_blocks_on_one_cluster_run_in_their_order(chain: str, delta: Path) -> None:
    """The blocks that use a cluster, in the order of the pages."""
    found = names()
    ((_, opening),) = (block.values for block in kind("opens", chain))
    try:
        execute(opening, found)
        for block in kind("with", chain):
            execute(block.values[1], found)
            if "models" in found:
                models = found["client"].gather(found["models"])
                assert dask.compute(models) == ([1, 1],)
    finally:
        close(found)


@pytest.mark.parametrize(("words", "text"), kind("run"))
def test_blocks_run_as_the_command_of_a_cluster(words: list[str], text: str, delta: Path) -> None:
    (delta / "program.py").write_text(text)
    settings = dict(word.split("=") for word in words)
    ranks = settings.get("run_on") == "ranks"
    command = ["program.py"] if ranks else ["python", "program.py"]
    profile = {"gpus": 2, "walltime": "10m", "run": command}
    cluster = gpujobs.submit(profile, site="delta", settings=settings)
    assert cluster.wait(timeout=patience(120)).state == "DONE"
    assert list(cluster.logs())


@pytest.mark.parametrize(("words", "text"), kind("local"))
def test_blocks_for_this_machine_run(words: list[str], text: str, home: Path) -> None:
    fakes = [NVML, NVML.parent / "ucxx", NVML.parent / "rmm"]
    path = os.pathsep.join(map(str, fakes))
    env = {**os.environ, "HOME": str(home), "PYTHONPATH": path, "DASK_CUDA_TEST_SINGLE_GPU": "1"}
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    code = f"import gpujobs\nif __name__ == '__main__':\n{lines}    cluster.close()\n"
    done = run(
        [sys.executable, "-c", code],
        env=env | {"FAKE_NVML_GPUS": "2"}, cwd=home, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
