"""Machines without a batch scheduler: a job on all of them through a real sshd."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ..conftest import fresh_folder, unavailable
from ..support.cli import NVML, STUB, Cli, text_of
from ..support.machines import Machines, missing
from ..support.processes import patience, processes_with, until
from .programs import SLEEP, WHO
from .test_clusters import says

BOTH = "ws1,ws2"
GPUS = {"FAKE_NVML_GPUS": "2"}
PROFILE = {
    "gpus": "auto",
    "env": {"PYTHONPATH": str(NVML), "DASK_CUDA_TEST_SINGLE_GPU": "1", **GPUS},
    "network": {"dashboard": "off"},
}


@pytest.fixture
def machines(home: Path, shared_folder: Path) -> Iterator[Machines]:
    """Two machines with two GPUs each, of which the second one's first is in use."""
    if why := missing():
        unavailable("ssh", why)
    env = {"ws1": GPUS, "ws2": {**GPUS, "FAKE_NVML_BUSY": "0"}}
    with Machines(fresh_folder(shared_folder, "machines"), home, env).running() as booted:
        yield booted


@pytest.fixture
def cli(machines: Machines, request: pytest.FixtureRequest) -> Cli:
    """The command line on a third machine, without GPUs, with the site `two` of both."""
    home = machines.home
    path = f"{home}/bin:{os.environ['PATH']}"
    env = {"PATH": path, "GPUJOBS_SITE_PATH": str(home / "sites"), "GPUJOBS_SITE": "two"}
    made = Cli(home, env, None)
    made.site = {
        "description": "two machines", "scheduler": "local", "machines": BOTH.split(","),
        "queues": {"local": {}},
    }  # fmt: skip
    profile = dict(PROFILE)
    if request.node.get_closest_marker("stub"):
        profile["env"] = {**PROFILE["env"], "PYTHONPATH": f"{STUB}:{NVML}"}  # type: ignore[dict-item]
    (home / "sites").mkdir()
    (home / "sites" / "two.yaml").write_text(text_of(made.site))
    made.write("p.yaml", profile)
    made.write("who.py", WHO)
    made.write("sleep.py", SLEEP)
    return made


def nothing_is_left(cluster: str) -> None:
    until(lambda: not processes_with(cluster), 30, lambda: str(processes_with(cluster)))


def start(cli: Cli) -> str:
    """Submit a cluster that runs until it is stopped; return its id."""
    done = cli("submit", "p.yaml", "--set", "run=[python, sleep.py, '600']")
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    says(cli, cluster, "here", 120)
    return cluster


def test_a_job_has_the_same_number_of_free_gpus_of_each_machine(cli: Cli) -> None:
    done = cli("submit", "p.yaml", "--wait", "--set", "run=[python, who.py]", WANTED="2")
    assert done.returncode == 0, done.stderr
    assert "machines ws1, ws2: 1 GPU of each, by ssh" in done.stderr
    cluster = done.stdout.split()[0]
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert sorted(place[:2] for place in found["workers"].values()) == [["0", "ws1"], ["1", "ws2"]]
    assert found["address"].startswith("tls://")
    nothing_is_left(cluster)


@pytest.mark.slow
def test_run_here_on_machines_uses_them_in_a_folder_with_a_space(cli: Cli) -> None:
    home = cli.home / "a home"
    site = {**cli.site, "directory": str(home), "network": {"protocols": ["tcp"]}}
    del site["machines"]
    (cli.home / "sites" / "one.yaml").write_text(text_of(site))
    words = ["run", "--here", "--site", "one", "--machines", BOTH, "p.yaml", "--", "python"]
    done = cli(*words, "who.py", timeout=120)
    assert done.returncode == 0, done.stderr
    places = json.loads(done.stdout.splitlines()[-1])["workers"].values()
    assert {place[1] for place in places} == {"ws1", "ws2"}
    nothing_is_left(str(home))


@pytest.mark.stub
def test_ctrl_c_leaves_nothing_on_any_machine(cli: Cli) -> None:
    words = ["run", "--here", "--machines", BOTH, "p.yaml", "--", "python", "sleep.py", "600"]
    running = cli.start(*words)
    until(lambda: "here" in "".join(log.read_text() for log in logs(cli)), 120)
    (cluster,) = [path.parents[1].name for path in logs(cli)]
    assert len(nodes_of(cluster)) == 2
    os.killpg(running.pid, signal.SIGINT)
    running.communicate(timeout=patience(60))
    assert running.returncode == 130
    nothing_is_left(cluster)


def logs(cli: Cli) -> list[Path]:
    return list((cli.home / ".gpujobs").glob("*/logs/run.log"))


def nodes_of(cluster: str) -> list[psutil.Process]:
    """Return the supervisors of the nodes of a cluster."""
    found = [psutil.Process(pid) for pid in processes_with(cluster)]
    return [one for one in found if one.cmdline()[2:3] == ["node"]]


@pytest.mark.stub
def test_nothing_is_left_on_a_machine_when_all_else_is_killed(cli: Cli, machines: Machines) -> None:
    """Nobody writes that the cluster has ended: the connections are gone."""
    cluster = start(cli)
    found = [psutil.Process(pid) for pid in processes_with(cluster)]
    there = {network(psutil.Process(one.pid)) for one in machines.daemons.values()} - {network()}
    here = [one for one in found if network(one) == network()]
    assert len(nodes_of(cluster)) == 2 and len(there) == 2 and here
    for one in here:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended with the one before
            one.kill()
    nothing_is_left(cluster)


def network(process: psutil.Process | None = None) -> str:
    return str(Path(f"/proc/{process.pid if process else 'self'}/ns/net").readlink())


@pytest.mark.waits
@pytest.mark.stub
def test_a_machine_that_disappears_ends_the_cluster_by_its_name(
    cli: Cli, machines: Machines
) -> None:
    cluster = start(cli)
    machines.disconnect("ws2")
    until(lambda: cli.status(cluster)["state"] == "FAILED", 120, lambda: str(cli.status(cluster)))
    assert "ws2" in cli.status(cluster)["reason"]
    nothing_is_left(cluster)


@pytest.mark.parametrize("state", ["down", "refuses"])
def test_a_machine_that_is_down_is_named_before_anything_starts(
    cli: Cli, machines: Machines, state: str
) -> None:
    if state == "down":
        machines.disconnect("ws2")
    else:
        (machines.folder / "authorized").write_text("")
    done = cli("submit", "p.yaml", "--set", "run=[python, who.py]")
    assert done.returncode == 3
    first = "ws2" if state == "down" else "ws1"  # which has the key no more, either
    assert f"machine {first} cannot be used: " in done.stderr
    assert f"hint: `ssh {first} {cli.python} -V` must work without a password" in done.stderr
    assert not logs(cli) and not (cli.home / ".gpujobs").exists()


def test_gpus_of_another_cluster_and_too_many_are_refused(cli: Cli) -> None:
    """The workers of the first cluster need a while until a GPU shows them."""
    first = cli("submit", "p.yaml", "--set", "run=[python, sleep.py, '600']")
    assert first.returncode == 0, first.stderr
    second = cli("plan", "p.yaml")
    assert second.returncode == 2
    used = f"ws2 has 0 free GPUs; GPU 0 is used by process 4242; GPU 1 is used by cluster {first.stdout.strip()}"
    assert used in second.stderr
    assert cli("cancel", first.stdout.strip()).returncode == 0
    nothing_is_left(first.stdout.strip())
    many = cli("plan", "p.yaml", "--set", "gpus=4")
    assert "2 GPUs of each machine wanted; ws2 has 1 free GPU" in many.stderr
    odd = cli("plan", "p.yaml", "--set", "gpus=3")
    assert "3 GPUs on 2 machines" in odd.stderr and "hint: gpus: 2 or 4" in odd.stderr


PYTHON = """
import sys
from gpujobs import GPULocalCluster

if __name__ == "__main__":
    with GPULocalCluster(WHERE, env=ENV) as cluster:
        client = cluster.get_client()
        print(cluster.id, *sorted(client.run(lambda: __import__("os").uname().nodename).values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ['machines=["ws1", "ws2"]', "site='two'"])
def test_a_local_cluster_in_python_has_workers_on_all_machines(cli: Cli, where: str) -> None:
    program = PYTHON.replace("ENV", repr(PROFILE["env"])).replace("WHERE", where)
    done = cli.python_run(program, timeout=180)
    assert done.returncode == 0, done.stderr
    cluster, *nodes = done.stdout.splitlines()[-1].split()
    assert nodes == ["ws1", "ws2"]
    nothing_is_left(cluster)


def test_a_command_line_of_ssh_has_no_secret_and_no_option_of_a_name(cli: Cli) -> None:
    calls = cli.home / "calls"
    wrapper = cli.home / "bin" / "ssh"
    first, second = wrapper.read_text().splitlines()
    wrapper.write_text(f'{first}\necho "$*" >> {calls}\n{second}\n')
    done = cli("submit", "p.yaml", "--wait", "--set", "run=[echo]", "--set", "env.TOKEN=hidden")
    assert done.returncode == 0, done.stderr
    lines = calls.read_text().splitlines()
    assert len(lines) == 4 and "hidden" not in calls.read_text()
    assert all("-oBatchMode=yes" in line and "-oConnectTimeout=10" in line for line in lines)
    assert {shlex.split(line.partition(" -- ")[2])[0] for line in lines} == {"ws1", "ws2"}
    nothing_is_left(done.stdout.split()[0])
