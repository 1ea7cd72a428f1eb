"""Who can connect to the processes of a cluster: their listeners, on a real Slurm."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

import gpujobs

from ..conftest import unavailable
from ..support import mpi
from ..support.backend import SlurmBackend
from ..support.cli import Cli, text_of
from ..support.listeners import Listener, listeners_of
from ..support.on_slurm import backend  # noqa: F401
from ..support.processes import patience, processes_with, until

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]


def running(cli: Cli, **network: Any) -> tuple[str, list[Listener]]:
    """Return a cluster of two workers in two jobs, and the listeners of all its processes."""
    profile = {"gpus": 2, "gpus_per_job": 1, "network": network}
    cluster = cli.submit(profile)
    until(lambda: len(cli.status(cluster)["workers"]["connected"]) == 2, 60)
    tree = [psutil.Process(pid) for pid in processes_with(cluster)]
    pids = {child.pid for process in tree for child in (process, *process.children(recursive=True))}
    return cluster, [found for items in listeners_of(pids).values() for found in items]


def status_of(port: int, path: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
        return int(answer.status)


@pytest.mark.slow
@pytest.mark.parametrize("dashboard", ["local", "on", "off"])
def test_the_dashboard_listens_where_the_profile_says(cli: Cli, dashboard: str) -> None:
    cluster, found = running(cli, dashboard=dashboard)
    lines = cli("connect", cluster).stdout
    tunnel = re.search(r"ssh -N -L (\d+):(\S+):(\d+) (.*)", lines)
    # dask scheduler, nannies and workers accept connections with the cluster's certificate only
    open_to_others = {item.port for item in found if not item.loopback_only}
    local = {item.port for item in found if item.loopback_only}
    assert len(open_to_others) == (6 if dashboard == "on" else 5)
    assert len(local) == (2 if dashboard == "on" else 3)
    if dashboard == "off":
        assert tunnel is None and "dashboard" not in lines
        assert cli("cancel", cluster).returncode == 0
        return
    assert tunnel
    port = int(tunnel[1])
    assert status_of(port, "/status") == 200
    assert (port in open_to_others) is (dashboard == "on")
    head = next(job for job in cli.status(cluster)["jobs"] if job["head"])
    if dashboard == "local":
        assert tunnel[2] == "127.0.0.1" and tunnel[4].startswith("-J ")
        assert tunnel[4].endswith(f"@{head['node']}")
    assert cli("cancel", cluster).returncode == 0


RANGE = range(21000, 21064)


def limited(backend: SlurmBackend) -> dict[str, Any]:
    """Return the site with a range of ports."""
    ports = f"{RANGE[0]}-{RANGE[-1]}"
    return backend.site() | {"network": {"ports": ports}, "mpi": mpi.LAUNCHERS["mpirun"]}


PORTS = """
import json
from distributed import Client

def ports(client):
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    nannies = [worker["nanny"] for worker in workers.values()]
    addresses = [client.scheduler.address, *workers, *nannies]
    return [int(address.rpartition(":")[2]) for address in addresses]

if __name__ == "__main__":
    BEFORE
    with Client() as client:
        client.wait_for_workers(2)
        print(json.dumps(ports(client)), flush=True)
"""
INITIALIZE = "from dask_mpi import initialize; initialize()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "before"),
    [
        ({"layout": "mpi", "run": ["python", "ports.py"]}, ""),
        ({"layout": "mpi", "run_on": "ranks", "run": ["ports.py"]}, INITIALIZE),
    ],
    ids=["mpi", "ranks"],
)
def test_ranks_listen_on_ports_of_the_site(
    cli: Cli, backend: SlurmBackend, profile: dict[str, Any], before: str
) -> None:
    """The addresses of dask's processes: MPI has listeners of its own in them."""
    if why := mpi.missing():
        unavailable("slurm", why)
    (cli.home / "sites" / "here.yaml").write_text(text_of(limited(backend)))
    cli.write("ports.py", PORTS.replace("BEFORE", before or "pass"))
    cluster = cli.submit({"gpus": 2, **profile}, "--wait")
    ports = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert len(set(ports)) == len(ports) == 5
    assert set(ports) <= set(RANGE)


@pytest.mark.slow
def test_the_dask_scheduler_in_python_listens_on_ports_of_the_site(
    backend: SlurmBackend, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dask scheduler of this process takes a port of the range, too."""
    for name, value in {**backend.env(), "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    (home / "here.yaml").write_text(text_of(limited(backend)))
    options = {"dashboard_address": "127.0.0.1:0"}
    with gpujobs.GPUSLURMCluster(
        str(home / "here.yaml"),
        n_workers=1,
        scheduler_options=options,
        worker_memory="1GiB",
        quiet=True,
    ) as cluster:
        cluster.wait_for_workers(1, timeout=patience(90))
        with cluster.get_client() as client:
            workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
        nannies = [worker["nanny"] for worker in workers.values()]
        addresses = [cluster.scheduler_address, *workers, *nannies]
        ports = [int(address.rpartition(":")[2]) for address in addresses]
    assert len(set(ports)) == 3 and set(ports) <= set(RANGE)


@pytest.mark.slow
def test_all_processes_listen_on_ports_of_the_site(cli: Cli, backend: SlurmBackend) -> None:
    """Processes of both jobs are on one host here, and share the range."""
    (cli.home / "sites" / "here.yaml").write_text(text_of(limited(backend)))
    cluster, found = running(cli, dashboard="on")
    ports = {item.port for item in found if not item.loopback_only}
    assert len(ports) == 6
    assert ports <= set(RANGE)
    assert cli("cancel", cluster).returncode == 0
