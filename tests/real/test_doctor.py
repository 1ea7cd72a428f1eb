"""`gpujobs doctor`, on a real Slurm and on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..conftest import nothing_left
from ..support.backend import SlurmBackend
from ..support.cli import Cli

pytestmark = pytest.mark.slurm


@pytest.fixture
def backend(slurm_backend: SlurmBackend) -> Iterator[SlurmBackend]:
    yield slurm_backend
    nothing_left(slurm_backend)


def diagnostics(cli: Cli, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    done = cli("doctor", "--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return {item["what"]: item for item in json.loads(done.stdout)["findings"]}


def test_a_site_that_is_right(cli: Cli, backend: SlurmBackend) -> None:
    found = diagnostics(cli, "--run")
    for what in (
        "commands",
        "batch scheduler",
        "directory",
        "job",
        "shared folder",
        "GPUs",
        "scratch space",
        "route",
    ):
        assert found[what]["state"] == "ok", found[what]
    assert found["versions"]["seen"].startswith("the same in the job: python 3.")
    assert "dask-cuda 26" in found["versions"]["seen"]
    assert found["GPUs"]["seen"].count("Fake GPU GPU-node") == 2
    assert "CUDA 13" in found["driver"]["seen"] and found["driver"]["state"] == "ok"
    assert (
        "tls, " in found["transport"]["seen"]
        and "GB/s between two workers (host memory)" in found["transport"]["seen"]
    )
    backend.wait_empty(15)
    assert not [
        path
        for path in (cli.home / ".gpujobs").iterdir()
        if path.name.startswith("doctor-") and len(path.name) > 12
    ]
    for line in cli("doctor").stdout.splitlines():
        assert line.startswith(("ok ", "warning ", "        "))


@pytest.mark.parametrize(
    ("change", "what", "state", "seen"),
    [
        ({"commands": {"sbatch": "/nosuch/sbatch"}}, "commands", "failed", "not found: "),
        ({"directory": "/proc/nosuch"}, "directory", "failed", "/proc/nosuch"),
        (
            {"network": {"interface": "ib7"}},
            "interface",
            "warning",
            "ib7 is not on this host, which has lo",
        ),
        (
            {"network": {"protocols": ["ucxx", "tcp"]}},
            "ucxx",
            "warning",
            "distributed-ucxx is not installed here",
        ),
    ],
    ids=["commands", "directory", "interface", "ucxx"],
)
def test_from_here(
    cli: Cli, backend: SlurmBackend, change: dict[str, Any], what: str, state: str, seen: str
) -> None:
    site = cli.write("s.yaml", backend.site() | change)
    found = diagnostics(cli, "--site", str(site), code=1 if state == "failed" else 0)[what]
    assert found["state"] == state and seen in found["seen"] and found["do"]


@pytest.mark.parametrize(
    ("setup", "what", "seen", "do"),
    [
        ("mkdir -p $HOME/b/dask_cuda; echo 'raise ImportError(\"no cuda.bindings\")' > $HOME/b/dask_cuda/__init__.py; "
         "export PYTHONPATH=$HOME/b:$PYTHONPATH", "job", "no cuda.bindings", "dask-cuda[cu12]"),
        ("export FAKE_NVML_GPUS=0", "job", "ended", ""),
        ("export TMPDIR=/proc", "job", "", ""),
    ],
    ids=["no-dask-cuda", "no-gpu", "no-scratch"],
)  # fmt: skip
def test_from_a_job(
    cli: Cli, backend: SlurmBackend, setup: str, what: str, seen: str, do: str
) -> None:
    site = backend.site()
    site["setup"] += f"\n{setup}"
    found = diagnostics(cli, "--run", "--site", str(cli.write("s.yaml", site)), code=1)[what]
    assert found["state"] == "failed" and seen in found["seen"] and do in found["do"]
    backend.wait_empty(15)


def test_refused_job(cli: Cli, backend: SlurmBackend) -> None:
    site = backend.site()
    site["queues"] = {"nosuch": site["queues"]["main"]}
    found = diagnostics(cli, "--run", "--site", str(cli.write("s.yaml", site)), code=1)["job"]
    assert "nosuch" in found["seen"] and "request" in found["do"]
    assert backend.queue() == []


def test_other_versions_are_told(cli: Cli, backend: SlurmBackend) -> None:
    """A distributed of another version in the job: what is imported there is the same, only its name tag differs."""
    tag = cli.home / "tags" / "dask_cuda-25.2.0.dist-info"
    tag.mkdir(parents=True)
    (tag / "METADATA").write_text("Metadata-Version: 2.1\nName: dask-cuda\nVersion: 25.2.0\n")
    site = backend.site()
    site["setup"] += f"\nexport PYTHONPATH={tag.parent}:$PYTHONPATH"
    found = diagnostics(cli, "--run", "--site", str(cli.write("s.yaml", site)))["versions"]
    assert found["state"] == "warning" and "25.2.0 in the job" in found["seen"]


def test_local(cli: Cli, backend: SlurmBackend) -> None:
    found = diagnostics(
        cli, "--run", "--site", "local", "--set", "gpus=0", "--set", "workers.count=2"
    )
    assert found["job"]["state"] == "ok"
    assert "GB/s" in found["transport"]["seen"]
