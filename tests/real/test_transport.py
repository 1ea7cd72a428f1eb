"""What dask's processes talk over: chosen once in the job, told once, the same for all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import gpujobs

from ..conftest import nothing_left
from ..support.backend import SlurmBackend
from ..support.cli import Cli, text_of
from .programs import WHO

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]


@pytest.fixture
def backend(slurm_backend: SlurmBackend) -> Iterator[SlurmBackend]:
    yield slurm_backend
    nothing_left(slurm_backend)


def submit(
    cli: Cli, site: dict[str, Any], profile: dict[str, Any], code: int = 0
) -> tuple[str, str]:
    cli.write("who.py", WHO)
    asked = {
        "gpus": 2,
        "gpus_per_job": 1,
        "start_workers": 2,
        "env": {"WANTED": "2"},
        "run": ["python", "who.py"],
        **profile,
    }
    done = cli(
        "submit",
        str(cli.write("p.yaml", asked)),
        "--site",
        str(cli.write("s.yaml", site)),
        "--wait",
    )
    assert done.returncode == code, done.stderr
    return done.stdout.strip(), done.stderr


def test_ucxx_that_does_not_work_falls_back_once_and_says_so(
    cli: Cli, backend: SlurmBackend
) -> None:
    cluster, said = submit(cli, backend.site() | {"network": {"protocols": ["ucxx", "tcp"]}}, {})
    assert "not encrypted" in said  # ucxx would be, and the site allows it
    assert json.loads(cli("logs", cluster).stdout.splitlines()[-1])["address"].startswith("tls://")
    shown = cli("status", cluster).stdout
    assert shown.count("ucxx does not work on node") == 1
    assert "note     not encrypted: dask uses" not in shown  # it uses tcp with TLS after all
    found = cli.status(cluster)
    assert found["encrypted"] is True


def test_ucxx_only_is_an_end_with_a_reason(cli: Cli, backend: SlurmBackend) -> None:
    site = backend.site() | {"network": {"protocols": ["ucxx", "tcp"]}}
    _, said = submit(cli, site, {"network": {"protocol": "ucxx"}}, code=5)
    assert "ucxx does not work on node" in said


def test_fast_network_left_unused_is_told(cli: Cli, backend: SlurmBackend) -> None:
    cluster, _ = submit(cli, backend.site(), {"env": {"WANTED": "2", "FAKE_NVML_NVLINK": "1"}})
    assert "NVLink seen and left unused: dask uses tls, not ucxx" in " ".join(
        cli.status(cluster)["notes"]
    )
    assert "NVLink seen and left unused" in cli("status", cluster).stdout


def test_wrong_interface_names_those_that_exist(cli: Cli, backend: SlurmBackend) -> None:
    _, said = submit(cli, backend.site(), {"network": {"interface": "ib7"}}, code=5)
    assert "has no interface ib7; it has lo" in said


def test_not_encrypted_is_told(cli: Cli, backend: SlurmBackend) -> None:
    cluster, said = submit(cli, backend.site(), {"network": {"encryption": False}})
    assert "not encrypted" in said
    assert cli.status(cluster)["encrypted"] is False
    assert "not encrypted: dask uses tcp" in cli("status", cluster).stdout


@pytest.mark.parametrize("scheduler", ["local", "job"])
def test_cluster_class_falls_back(
    backend: SlurmBackend, home: Any, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**backend.env(), "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    site = home / "s.yaml"
    site.write_text(text_of(backend.site() | {"network": {"protocols": ["ucxx", "tcp"]}}))
    options: dict[str, Any] = (
        {"scheduler_options": {"dashboard_address": ":0"}} if scheduler == "local" else {}
    )
    with gpujobs.GPUSLURMCluster(
        str(site), n_workers=1, scheduler=scheduler, quiet=True, worker_memory="1GiB", **options
    ) as cluster:
        cluster.wait_for_workers(1, timeout=90)
        assert cluster.scheduler_address.startswith("tls://")
        with cluster.get_client() as client:
            assert client.submit(sum, [1, 2]).result() == 3
