"""What dask's processes talk over: chosen once in the job, told once, the same for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpujobs

from ..support.backend import SlurmBackend, nvml_path
from ..support.cli import ROOT, Cli, text_of, without_dashboard
from ..support.on_slurm import backend  # noqa: F401
from ..support.processes import patience
from .programs import WHO

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]


def submit(
    cli: Cli, site: dict[str, Any], profile: dict[str, Any], code: int = 0
) -> tuple[str, str]:
    cli.write("who.py", WHO)
    site = without_dashboard(site)
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


@pytest.mark.slow
def test_ucxx_only_is_an_end_with_a_reason(cli: Cli, backend: SlurmBackend) -> None:
    site = backend.site() | {"network": {"protocols": ["ucxx", "tcp"]}}
    _, said = submit(cli, site, {"network": {"protocol": "ucxx"}}, code=5)
    assert "ucxx does not work on node" in said


@pytest.mark.slow
def test_fast_network_left_unused_is_told(cli: Cli, backend: SlurmBackend) -> None:
    cluster, _ = submit(cli, backend.site(), {"env": {"WANTED": "2", "FAKE_NVML_NVLINK": "1"}})
    assert "NVLink between 2 GPUs seen and left unused: dask uses tls, not ucxx" in " ".join(
        cli.status(cluster)["notes"]
    )
    assert "NVLink between 2 GPUs seen and left unused" in cli("status", cluster).stdout


@pytest.mark.slow
def test_wrong_interface_names_those_that_exist(cli: Cli, backend: SlurmBackend) -> None:
    _, said = submit(cli, backend.site(), {"network": {"interface": "ib7"}}, code=5)
    assert "has no interface ib7; it has lo" in said


@pytest.mark.slow
def test_not_encrypted_is_told(cli: Cli, backend: SlurmBackend) -> None:
    cluster, said = submit(cli, backend.site(), {"network": {"encryption": False}})
    assert "not encrypted" in said
    assert cli.status(cluster)["encrypted"] is False
    assert "not encrypted: dask uses tcp" in cli("status", cluster).stdout


@pytest.mark.slow
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
        cluster.wait_for_workers(1, timeout=patience(90))
        assert cluster.scheduler_address.startswith("tls://")
        with cluster.get_client() as client:
            assert client.submit(sum, [1, 2]).result() == 3


# -- measured --------------------------------------------------------------------------------------
FAKES = ROOT / "tests" / "fakes"
TOGETHER = """
begun=$HOME/begun-$SLURM_ARRAY_JOB_ID; mkdir -p "$begun"; touch "$begun/$SLURM_ARRAY_TASK_ID"
while [ "$(ls "$begun" | wc -l)" -lt 2 ]; do sleep 0.1; done
"""
"""Setup of a site: the two jobs of a cluster go on when both run."""


def measured(backend: SlurmBackend) -> dict[str, Any]:
    """Return a site whose clusters of two jobs have their rates measured."""
    site = backend.site()
    protocols = {"network": {"protocols": ["ucxx", "tcp"]}}
    return site | protocols | {"setup": f"{site['setup']}\n{TOGETHER}"}


def faked(backend: SlurmBackend, **variables: str) -> dict[str, Any]:
    """Return the keys of a profile whose jobs have stand-ins for ucxx and RMM."""
    path = ":".join([nvml_path(backend), str(FAKES / "ucxx"), str(FAKES / "rmm")])
    return {"env": {"WANTED": "2", "PYTHONPATH": path, **variables}}


def tried(cli: Cli, cluster: str) -> bool:
    """Return whether the protocols were measured for this cluster."""
    return (Path(cli.status(cluster)["folder"]) / "logs" / "trial-peer.log").exists()


@pytest.mark.slow
def test_rates_are_measured_within_a_job_and_between_two(cli: Cli, backend: SlurmBackend) -> None:
    cluster, _ = submit(cli, measured(backend), faked(backend))
    address = json.loads(cli("logs", cluster).stdout.splitlines()[-1])["address"]
    found = cli.status(cluster)["transport"]
    assert address.startswith("ucxx://"), found
    assert (found["protocol"], found["reason"]) == ("ucxx", "")
    for protocol in ("ucxx", "tls"):
        assert found["measured"][protocol]["within"] > 0
        assert found["measured"][protocol]["between"] > 0
    shown = cli("status", cluster).stdout
    assert "network  ucxx: " in shown and "GB/s between jobs; tls: " in shown
    # UCX takes seconds to start: the process of the nannies does not wait for the dask scheduler.
    log = (Path(cli.status(cluster)["folder"]) / "logs" / "job-0.log").read_text()
    assert 0 < log.index("UCX is initialised") < log.index("Start Nanny at")


@pytest.mark.slow
def test_rates_are_kept(cli: Cli, backend: SlurmBackend) -> None:
    site = measured(backend)
    first, _ = submit(cli, site, faked(backend))
    second, _ = submit(cli, site, faked(backend))
    kept = cli.status(second)["transport"]
    assert kept == cli.status(first)["transport"]
    assert tried(cli, first)
    assert not tried(cli, second)
    other, _ = submit(cli, site, faked(backend, UCX_TLS="all"))  # these may differ
    assert tried(cli, other)


@pytest.mark.slow
def test_ucxx_as_the_only_protocol(cli: Cli, backend: SlurmBackend) -> None:
    """The cluster has no certificate."""
    profile = {**faked(backend), "network": {"protocol": "ucxx"}}
    cluster, _ = submit(cli, measured(backend), profile)
    assert json.loads(cli("logs", cluster).stdout.splitlines()[-1])["address"].startswith("ucxx://")
    assert not (Path(cli.status(cluster)["folder"]) / "tls-cert.pem").exists()
    assert cli.status(cluster)["transport"]["measured"]["ucxx"]["within"] > 0


@pytest.mark.slow
def test_tcp_wins_where_it_is_faster(cli: Cli, backend: SlurmBackend) -> None:
    cluster, _ = submit(cli, measured(backend), faked(backend, FAKE_UCXX="slow"))
    assert json.loads(cli("logs", cluster).stdout.splitlines()[-1])["address"].startswith("tls://")
    assert cli.status(cluster)["transport"]["reason"] == "tls is faster here than ucxx"
    assert "tls is faster here than ucxx" in cli("status", cluster).stdout


@pytest.mark.slow
def test_a_transfer_that_hangs_ends(cli: Cli, backend: SlurmBackend) -> None:
    cluster, _ = submit(cli, measured(backend), faked(backend, FAKE_UCXX="hangs"))
    found = cli.status(cluster)["transport"]
    assert found["protocol"] == "tls"
    assert "ucxx does not work on node" in found["reason"] and "no answer" in found["reason"]
    assert found["measured"]["tls"]["within"] > 0


@pytest.mark.slow
def test_the_users_settings_of_ucx_reach_all_processes(cli: Cli, backend: SlurmBackend) -> None:
    profile = faked(backend, UCX_TLS="all")
    cli.write("tls.py", TLS_SETTING)
    cluster, _ = submit(cli, measured(backend), {**profile, "run": ["python", "tls.py"]})
    assert cli("logs", cluster).stdout.splitlines()[-1] == "['all', 'all', 'all']"


TLS_SETTING = """
import os
from distributed import Client

with Client() as client:
    client.wait_for_workers(2)
    found = [*client.run(os.environ.get, "UCX_TLS").values(), os.environ.get("UCX_TLS")]
    print(found, flush=True)
"""

# -- isolated --------------------------------------------------------------------------------------
OTHER_NAMESPACE = """
if [ -z "${ISOLATED:-}" ]; then
    export ISOLATED=1
    exec unshare --mount --map-root-user sh -c \\
        'mount --bind "$0" /proc/driver && exec bash "$@"' "$HOME/driver" "$0" "$@"
fi
"""
"""Setup of a site: the driver lists GPUs for which the node of the job has no device files."""


def isolated(cli: Cli, site: dict[str, Any], setup: str = "") -> dict[str, Any]:
    """Return the site with jobs that cannot open the GPUs of its nodes."""
    for minor in range(4):
        folder = cli.home / "driver" / "nvidia" / "gpus" / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: Fake GPU\nDevice Minor: {minor}\n")
    return site | {"setup": f"{OTHER_NAMESPACE}\n{setup}\n{site['setup']}"}


ALL_WITH = "['{0}', '{0}', '{0}']"
"""The output of `TLS_SETTING`: two workers, and `run`."""
ONE_JOB = {"gpus": 2, "gpus_per_job": 2}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ALL_WITH.format("^sm")),
        (ONE_JOB, ALL_WITH.format("^sm")),  # `gpujobs scale` may add jobs
        ({**ONE_JOB, "requeue": 1}, "[None, None, None]"),  # has one job, and no other later
    ],
    ids=["two-jobs", "one-job", "never-another-job"],
)
@pytest.mark.slow
def test_settings_of_isolated_jobs(
    cli: Cli, backend: SlurmBackend, change: dict[str, Any], expected: str
) -> None:
    base = backend.site() | {"network": {"protocols": ["ucxx", "tcp"]}}
    site = isolated(cli, base if change else measured(backend))
    cli.write("tls.py", TLS_SETTING)
    cluster, _ = submit(cli, site, {**faked(backend), "run": ["python", "tls.py"], **change})
    assert cli.status(cluster)["transport"]["protocol"] == "ucxx"
    assert cli("logs", cluster).stdout.splitlines()[-1] == expected
    assert "UCX keeps your" not in cli("status", cluster).stdout


@pytest.mark.slow
@pytest.mark.parametrize("place", ["site", "profile"])
def test_ones_own_settings_win_and_that_is_said_once(
    cli: Cli, backend: SlurmBackend, place: str
) -> None:
    setup = {"site": "export UCX_TLS=all", "profile": ""}[place]
    own = {"site": {}, "profile": {"UCX_TLS": "all"}}[place]
    cli.write("tls.py", TLS_SETTING)
    site = isolated(cli, measured(backend), setup)
    cluster, said = submit(cli, site, {**faked(backend, **own), "run": ["python", "tls.py"]})
    assert cli("logs", cluster).stdout.splitlines()[-1] == ALL_WITH.format("all")
    remark = "jobs are isolated from each other's GPUs; UCX keeps your UCX_TLS=all"
    assert cli("status", cluster).stdout.count(remark) == 1
    assert said.count(remark) <= 1
    logs = Path(cli.status(cluster)["folder"]) / "logs"
    written = [path.read_text().count(remark) for path in logs.iterdir()]
    assert sum(written) == 1, written
