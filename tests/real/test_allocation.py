"""`layout: allocation` on real batch schedulers: one job of several nodes, started by their own launchers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..conftest import make_cli, slow_variant, unavailable
from ..support import mpi
from ..support.backend import SlurmBackend, nvml_path
from ..support.cli import Cli, text_of
from ..support.fakes import FakeBackend
from ..support.on_slurm import backend  # noqa: F401
from ..support.owner import make, site  # noqa: F401 - fixtures
from ..support.processes import patience, processes_with, until
from ..support.sge import SgeBackend
from ..support.slurm_faults import failed_node
from .programs import SAVE, SLEEP, WHO
from .test_clusters import connected, says

pytestmark = [pytest.mark.filterwarnings("default")]
PROFILE: dict[str, Any] = {"layout": "allocation", "gpus": 8, "env": {"WANTED": "8"}}
BROKEN = "raise ImportError('there is no MPI here')\n"


def environ(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def supervisors(cluster: str, command: str) -> dict[str, int]:
    """Return the supervisors of a cluster, of its job or of its nodes, by node."""
    found = {
        environ(pid).get("SLURMD_NODENAME", ""): pid
        for pid in processes_with(f"{cluster}/injob.pyz")
        if command in words(pid)[:4] and words(pid)[0] != "sh"
    }
    assert found
    return found


@pytest.mark.parametrize(
    ("launcher", "worker_class"),
    [
        ("built in", "cuda"),
        slow_variant("built in", "nanny"),
        slow_variant("mpirun", "cuda"),
        slow_variant("mpiexec", "cuda"),
    ],
)
def test_every_gpu_of_four_nodes_has_one_worker(
    cli: Cli, backend: SlurmBackend, home: Path, launcher: str, worker_class: str
) -> None:
    """The launchers of MPI need no mpi4py and no dask-mpi in the environment."""
    broken = cli.work / "broken"
    broken.mkdir()
    for name in ("mpi4py", "dask_mpi"):
        (broken / f"{name}.py").write_text(BROKEN)
    if launcher != "built in":
        if why := mpi.missing():
            unavailable("mpi", why)
        site = backend.site() | {"mpi": mpi.LAUNCHERS[launcher]}
        (home / "sites" / "here.yaml").write_text(text_of(site))
    env = {"WANTED": "16", "PYTHONPATH": f"{broken}:{nvml_path(backend)}"}
    profile: dict[str, Any] = {
        "layout": "allocation" if launcher == "built in" else "mpi",
        "gpus": 16,
        "run": ["python", "who.py"],
        "env": env,
        "workers": {"worker_class": worker_class},
    }
    cli.write("who.py", WHO)
    promised = json.loads(cli("plan", str(cli.write("p.yaml", profile)), "--json").stdout)
    assert [(jobs["count"], jobs["nodes"]) for jobs in promised["jobs"]] == [(1, 4)]
    cluster = cli.submit(profile, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert sorted(found["workers"]) == sorted(
        name.replace("p-0000", cluster) for name in promised["worker_names"]
    )
    numbers: dict[str, set[str]] = {}
    for name, (_, node, _) in found["workers"].items():
        numbers.setdefault(node, set()).add(name.split("-")[-2])
    assert sorted(map(len, numbers.values())) == [1, 1, 1, 1]  # a node has one number
    assert len({gpu["uuid"] for gpu in cli.gpus(cluster).values()}) == 16
    backend.wait_empty(20, cluster)


WHOLE_NODES = {
    "request": ["-q {queue}", "-pe whole {cpus_per_job}", "-l slot_gpu={gpus_per_cpu}"],
    "visible_devices": "exclusive",
}


@pytest.mark.sge
@pytest.mark.parametrize("end", [slow_variant("run"), "cancel"])
def test_grid_engine_starts_each_node_and_ends_it(
    sge_backend: SgeBackend, home: Path, end: str
) -> None:
    """`qrsh -inherit` starts each node, also the first one."""
    cli = make_cli(sge_backend, home, "ordinary")
    site = sge_backend.site() | WHOLE_NODES
    site["queues"]["main"] |= {"gpu_fractions": True, "exclusive": True}
    (home / "sites" / "here.yaml").write_text(text_of(site))
    cli.write("who.py", WHO)
    cli.write("sleep.py", SLEEP)
    run = ["python", *(["who.py"] if end == "run" else ["sleep.py", "600"])]
    cluster = cli.submit({**PROFILE, "queue": "main", "run": run})
    says(cli, cluster, "address" if end == "run" else "here", 180)
    if end == "run":
        found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
        assert sorted(found["workers"]) == [
            f"{cluster}-{n}-{gpu}" for n in range(2) for gpu in range(4)
        ]
    else:
        assert len(cli.gpus(cluster)) == 8
        assert cli("cancel", cluster).returncode == 0
    sge_backend.wait_empty(60, cluster)
    until(lambda: not processes_with(cluster), 15)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["run", "cancel"])
def test_lsf_starts_each_node_and_ends_it(lsf_backend: FakeBackend, home: Path, end: str) -> None:
    """`blaunch HOST` starts each node."""
    cli = make_cli(lsf_backend, home, "ordinary")
    cli.write("who.py", WHO)
    cli.write("sleep.py", SLEEP)
    run = ["python", *(["who.py"] if end == "run" else ["sleep.py", "600"])]
    cluster = cli.submit(
        {**PROFILE, "queue": "main", "run": run}, *(["--wait"] if end == "run" else [])
    )
    if end == "run":
        found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
        names = [f"{cluster}-{n}-{gpu}" for n in range(2) for gpu in range(4)]
        assert sorted(found["workers"]) == names
    else:
        says(cli, cluster, "here", 180)
        assert {gpu["node"] for gpu in cli.gpus(cluster).values()} == {"node1", "node2"}
        assert cli("cancel", cluster).returncode == 0
    lsf_backend.wait_empty(60, cluster)
    until(lambda: not processes_with(cluster), 15)


@pytest.mark.slow
def test_one_node_needs_no_launcher(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit({**PROFILE, "gpus": 4}, "--wait")
    names = [f"{cluster}-0-{gpu}" for gpu in range(4)]
    assert cli.status(cluster)["workers"]["connected"] == names
    refused = cli("scale", cluster, "8")
    assert refused.returncode == 2 and "one allocation" in refused.stderr
    script = next((Path(cli.status(cluster)["folder"]) / "scripts").iterdir()).read_text()
    assert "srun" not in script and "ranks.sh" not in script
    cli("cancel", cluster)
    backend.wait_empty(20, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["node", "supervisor", "launcher", "cancel"])
def test_nothing_is_left_on_any_node(cli: Cli, backend: SlurmBackend, killed: str) -> None:
    cli.write("sleep.py", SLEEP)
    cluster = cli.submit({**PROFILE, "run": ["python", "sleep.py", "600"]})
    says(cli, cluster, "here", 180)
    nodes = supervisors(cluster, "node")
    (job,) = supervisors(cluster, "supervise").values()
    assert len(nodes) == 2
    if killed == "cancel":
        assert cli("cancel", cluster).returncode == 0
    elif killed == "supervisor":
        os.kill(job, signal.SIGKILL)
    elif killed == "launcher":
        launchers = [
            pid
            for pid in processes_with(f"{cluster}/jobs/0.ranks.sh")
            if Path(words(pid)[0]).name == "srun"
        ]
        os.kill(min(launchers), signal.SIGKILL)
    else:
        os.kill(nodes[max(nodes)], signal.SIGKILL)
    backend.wait_empty(60, cluster)
    until(lambda: not processes_with(cluster), 30)
    found = cli.status(cluster)
    assert found["state"] == ("CANCELLED" if killed == "cancel" else "FAILED"), found
    assert killed not in ("node", "launcher") or "the launcher (srun) ended" in found["reason"]


def one_gpu(backend: SlurmBackend) -> dict[str, Any]:
    """Return the queues of nodes of which jobs use one GPU."""
    return {"main": backend.site()["queues"]["main"] | {"gpus_per_node": 1}}


@pytest.mark.slow
@pytest.mark.stub
def test_it_grows_by_jobs_of_its_shape(cli: Cli, backend: SlurmBackend, home: Path) -> None:
    site = json.loads((home / "sites" / "here.yaml").read_text())
    (home / "sites" / "here.yaml").write_text(text_of(site | {"queues": one_gpu(backend)}))
    cli.write("sleep.py", SLEEP)
    cluster = cli.submit({**PROFILE, "gpus": 2, "run": ["python", "sleep.py", "600"]})
    says(cli, cluster, "here", 180)
    grown = cli("scale", cluster, "3")
    assert grown.returncode == 0 and "3 workers are 2 jobs of 2" in grown.stderr, grown.stderr
    connected(cli, cluster, 4)
    found = cli.status(cluster)
    assert found["workers"]["connected"] == [f"{cluster}-{node}" for node in range(4)]
    assert [job["head"] for job in found["jobs"]] == [True, False]
    assert len({gpu["uuid"] for gpu in cli.gpus(cluster).values()}) == 4
    shrunk = cli("scale", cluster, "0")
    assert shrunk.returncode == 0 and "the head's job stays" in shrunk.stderr, shrunk.stderr
    until(lambda: len(backend.queue()) == 1, 60, "the base alone")
    found = cli.status(cluster)
    assert found["state"] == "RUNNING", found
    assert found["workers"]["connected"] == [f"{cluster}-0", f"{cluster}-1"]
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(30, cluster)
    until(lambda: not processes_with(cluster), 15)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["local", "job"])
def test_a_python_cluster_grows(
    make: Callable[..., Any], backend: SlurmBackend, scheduler: str
) -> None:
    own = {"scheduler_options": {}} if scheduler == "job" else {}
    cluster = make(
        layout="allocation",
        n_workers=2,
        scheduler=scheduler,
        changes={"queues": one_gpu(backend)},
        **own,
    )
    cluster.wait_for_workers(2, timeout=patience(120))
    (base,) = backend.queue()
    client = cluster.get_client()
    data = client.map(lambda number: number, range(20))
    cluster.scale(4)
    cluster.wait_for_workers(4, timeout=patience(120))
    assert cluster.observed == cluster.plan == {f"{cluster.id}-{node}" for node in range(4)}
    places = client.run(lambda: __import__("os").environ["SLURMD_NODENAME"])
    assert len(set(places.values())) == 4
    data += client.map(lambda number: number, range(20, 40))
    cluster.scale(2)
    until(lambda: len(backend.queue()) == 1, 60, "one job")
    assert scheduler == "local" or backend.queue()[0] == base
    assert client.gather(data) == list(range(40))
    client.close()


FAILS = """
import os, signal, time
if os.environ["SLURMD_NODENAME"] == os.environ["BROKEN_NODE"]:
    raise ImportError("broken on purpose")
"""


@pytest.mark.parametrize("keep_going", [slow_variant(False), True])
def test_a_failed_node_is_reported(cli: Cli, backend: SlurmBackend, keep_going: bool) -> None:
    cli.write("fails.py", FAILS)
    cli.write("sleep.py", SLEEP)
    profile = {
        **PROFILE,
        "run": ["python", "sleep.py", "600"],
        "env": {"BROKEN_NODE": "node2"},
        "workers": {"preload": [str(cli.work / "fails.py")]},
        "options": {},
        "start_workers": 4,
        "keep_going": keep_going,
    }
    cluster = cli.submit(profile)
    said = "broken on purpose"
    if keep_going:
        connected(cli, cluster, 4)
        says(cli, cluster, "here", 180)
        until(lambda: said in cli("status", cluster).stdout, 60, "the lost node in status")
        found = cli.status(cluster)
        assert found["state"] == "RUNNING"
        assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(120, cluster)
    found = cli.status(cluster)
    if not keep_going:
        assert found["state"] == "FAILED" and found["exit_code"] == 70
        assert said in found["reason"] and "node2" in found["reason"]
    assert said in cli("report", cluster).stdout
    until(lambda: not processes_with(cluster), 15)


@pytest.mark.slow
@pytest.mark.stub
@pytest.mark.parametrize("seconds", [0, 600])
def test_nothing_is_left_after_the_walltime(cli: Cli, backend: SlurmBackend, seconds: int) -> None:
    """`run` ends when it is asked to, or does not: then the batch scheduler kills the job."""
    cli.write("save.py", SAVE)
    run = ["python", "save.py", str(seconds)]
    cluster = cli.submit({**PROFILE, "run": run, "walltime": "1m"})
    says(cli, cluster, "SIGTERM", 120)
    backend.wait_empty(120, cluster)
    until(lambda: not processes_with(cluster), 15)
    found = cli.status(cluster)
    assert found["state"] == "FAILED" and "walltime" in found["reason"], found


@pytest.mark.stub
@pytest.mark.parametrize(
    ("keep_going", "noticed"),
    [(False, True), slow_variant(False, False), slow_variant(True, True)],
)
def test_a_lost_node_is_reported(
    cli: Cli, backend: SlurmBackend, keep_going: bool, noticed: bool
) -> None:
    """Slurm ends the job when it notices that, unless the job has `--no-kill`; gpujobs may notice it earlier."""
    cli.write("sleep.py", SLEEP)
    profile = {
        **PROFILE,
        "run": ["python", "sleep.py", "600"],
        "directives": ["--no-kill"] if keep_going else [],
        "keep_going": keep_going,
    }
    cluster = cli.submit(profile)
    says(cli, cluster, "here", 180)
    (head,) = supervisors(cluster, "supervise")
    (node,) = set(supervisors(cluster, "node")) - {head}
    with failed_node(backend.slurm, node, noticed=noticed):
        if keep_going:
            until(lambda: f"on {node}" in cli("status", cluster).stdout, 120, "the lost node")
            found = cli.status(cluster)
            assert found["state"] == "RUNNING" and len(found["workers"]["connected"]) == 4
            assert cli("cancel", cluster).returncode == 0
        backend.wait_empty(120, cluster)
    found = cli.status(cluster)
    assert found["state"] == ("CANCELLED" if keep_going else "FAILED"), found
    assert keep_going or f"on {node}" in found["reason"], found
    assert f"on {node}" in cli("report", cluster).stdout
    until(lambda: not processes_with(cluster), 15)
