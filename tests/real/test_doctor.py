"""`gpujobs doctor`, on a real Slurm and on this machine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ..support.backend import SlurmBackend, nvml_path
from ..support.cli import ROOT, Cli
from ..support.on_slurm import backend  # noqa: F401

pytestmark = pytest.mark.slurm
FAKES = ROOT / "tests" / "fakes"


def checks(cli: Cli, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    done = cli("doctor", "--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_valid_site_passes_every_check(cli: Cli, backend: SlurmBackend) -> None:
    found = checks(cli, "--run")
    for name in (
        "commands",
        "batch scheduler",
        "directory",
        "job",
        "shared folder",
        "GPUs",
        "CPUs",
        "scratch space",
        "route",
    ):
        assert found[name]["state"] == "ok", found[name]
    assert found["versions"]["result"].startswith("the same in the job: python 3.")
    assert "dask-cuda 26" in found["versions"]["result"]
    assert found["GPUs"]["result"].count("Fake GPU GPU-node") == 2
    assert re.fullmatch(
        r"doctor-\w+-0-0: \S+ \(NUMA node \S+\); doctor-\w+-0-1: .*", found["CPUs"]["result"]
    )
    assert "CUDA 13" in found["driver"]["result"] and found["driver"]["state"] == "ok"
    assert (
        "tls, " in found["transport"]["result"]
        and "GB/s between two workers (host memory)" in found["transport"]["result"]
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
    ("change", "name", "state", "result"),
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
def test_a_fault_that_this_host_sees_has_a_remedy(
    cli: Cli, backend: SlurmBackend, change: dict[str, Any], name: str, state: str, result: str
) -> None:
    site = cli.write("s.yaml", backend.site() | change)
    found = checks(cli, "--site", str(site), code=1 if state == "failed" else 0)[name]
    assert found["state"] == state and result in found["result"] and found["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "name", "result", "remedy"),
    [
        ("mkdir -p $HOME/b/dask_cuda; echo 'raise ImportError(\"no cuda.bindings\")' > $HOME/b/dask_cuda/__init__.py; "
         "export PYTHONPATH=$HOME/b:$PYTHONPATH", "job", "no cuda.bindings", "dask-cuda[cu12]"),
        ("export FAKE_NVML_GPUS=0", "job", "ended", ""),
        ("export TMPDIR=/proc", "job", "", ""),
    ],
    ids=["no-dask-cuda", "no-gpu", "no-scratch"],
)  # fmt: skip
def test_a_fault_that_a_job_sees_has_a_remedy(
    cli: Cli, backend: SlurmBackend, setup: str, name: str, result: str, remedy: str
) -> None:
    site = backend.site()
    site["setup"] += f"\n{setup}"
    found = checks(cli, "--run", "--site", str(cli.write("s.yaml", site)), code=1)[name]
    assert found["state"] == "failed" and result in found["result"] and remedy in found["remedy"]
    backend.wait_empty(15)


@pytest.mark.slow
def test_a_job_of_a_whole_node_sees_its_four_gpus(cli: Cli, backend: SlurmBackend) -> None:
    site = backend.site()
    site["queues"] = {"main": {**site["queues"]["main"], "exclusive": True}}
    found = checks(cli, "--run", "--site", str(cli.write("s.yaml", site)))
    assert found["job"]["state"] == found["GPUs"]["state"] == "ok"
    assert found["GPUs"]["result"].count("Fake GPU GPU-node") == 4
    backend.wait_empty(15)


def test_a_job_that_no_queue_takes_is_not_blamed_on_the_user(
    cli: Cli, backend: SlurmBackend
) -> None:
    site = backend.site()
    site["queues"] = {"main": {**site["queues"]["main"], "max_walltime": "5m"}}
    done = cli("doctor", "--run", "--site", str(cli.write("s.yaml", site)))
    assert (
        done.returncode == 2
        and "the job of doctor --run: queue main: walltime 10m is more" in done.stderr
    )
    assert "--set" not in done.stderr
    assert backend.queue() == []


def test_a_refused_job_fails_the_check_and_leaves_nothing(cli: Cli, backend: SlurmBackend) -> None:
    site = backend.site()
    site["queues"] = {"nosuch": site["queues"]["main"]}
    found = checks(cli, "--run", "--site", str(cli.write("s.yaml", site)), code=1)["job"]
    assert "nosuch" in found["result"] and "request" in found["remedy"]
    assert backend.queue() == []


@pytest.mark.slow
def test_another_version_in_the_job_is_a_warning_and_one_too_old_fails(
    cli: Cli, backend: SlurmBackend
) -> None:
    """Another version of dask-cuda in the job: only its metadata differ, the code is the same."""
    for version, code, state, result in (
        ("26.8.99", 0, "warning", "26.8.99 in the job"),
        ("25.2.0", 1, "failed", "dask-cuda 25.2.0 in the job is too old"),
    ):
        tag = cli.home / version / f"dask_cuda-{version}.dist-info"
        tag.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: dask-cuda\nVersion: {version}\n"
        (tag / "METADATA").write_text(text)
        site = backend.site()
        site["setup"] += f"\nexport PYTHONPATH={tag.parent}:$PYTHONPATH"
        path = str(cli.write("s.yaml", site))
        found = checks(cli, "--run", "--site", path, code=code)["versions"]
        assert found["state"] == state and result in found["result"]


@pytest.mark.slow
def test_the_rates_of_ucxx_in_a_job_are_measured(cli: Cli, backend: SlurmBackend) -> None:
    """The measured rates within a job."""
    paths = [nvml_path(backend), str(FAKES / "ucxx"), str(FAKES / "rmm")]
    site = backend.site() | {"network": {"protocols": ["ucxx", "tcp"]}}
    site["setup"] += f"\nexport PYTHONPATH={':'.join(paths)}"
    path = str(cli.write("s.yaml", site))
    number = r"[\d.]+(e[+-]\d+)?"
    found = checks(cli, "--run", "--site", path)["transport"]
    assert found["state"] == "ok", found
    assert re.search(
        rf"^ucxx, {number} GB/s between two workers \(GPU memory\); "
        rf"ucxx: {number} GB/s within a job; tls: {number} GB/s within a job$",
        found["result"],
    ), found
    slow = {**site, "setup": f"{site['setup']}\nexport FAKE_UCXX=slow UCX_TLS=other"}
    found = checks(cli, "--run", "--site", str(cli.write("s.yaml", slow)))["transport"]
    assert found["state"] == "warning", found
    assert found["result"].startswith("ucxx, ") and "; ucxx: " in found["result"]
    assert "tls is faster here than ucxx" in found["result"]
    backend.wait_empty(15)


@pytest.mark.slow
def test_the_local_site_passes_the_check_of_its_job(cli: Cli, backend: SlurmBackend) -> None:
    found = checks(cli, "--run", "--site", "local", "--set", "gpus=0", "--set", "workers.count=2")
    assert found["job"]["state"] == "ok"
    assert "GB/s" in found["transport"]["result"]
