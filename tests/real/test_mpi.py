"""`layout: mpi` on a real Slurm with real MPI libraries: 2 nodes, with 2 GPUs each for their users."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgpack import _cmsgpack

from gpujobs.config.spec import load_spec
from gpujobs.planning.plan import Machine, make_plan
from gpujobs.planning.render import render
from gpujobs.schedulers.base import get_scheduler

from ..conftest import make_cli, nothing_left, slow_variant, unavailable
from ..support import mpi
from ..support.backend import SlurmBackend, nvml_path
from ..support.cli import ROOT, Cli, text_of, without_dashboard
from ..support.processes import patience, processes_with, run, until
from .programs import SLEEP, WHO
from .test_clusters import connected, says

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]


@pytest.fixture
def backend(slurm_backend: SlurmBackend) -> Iterator[SlurmBackend]:
    if why := mpi.missing():
        unavailable("slurm", why)
    yield slurm_backend
    nothing_left(slurm_backend)


@pytest.fixture(params=["mpirun", pytest.param("srun", marks=pytest.mark.slow)])
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def site_with(backend: SlurmBackend, launcher: dict[str, Any], gpus: int = 2) -> str:
    """Return a site file with this launcher of MPI, and this number of GPUs on each node."""
    site = without_dashboard(backend.site())
    queue = site["queues"]["main"] | {"gpus_per_node": gpus}
    return text_of(site | {"mpi": launcher, "queues": {"main": queue}})


@pytest.fixture
def cli(backend: SlurmBackend, home: Path, launcher: str) -> Cli:
    made = make_cli(backend, home, "ordinary")
    (home / "sites" / "here.yaml").write_text(site_with(backend, mpi.LAUNCHERS[launcher]))
    return made


PROFILE: dict[str, Any] = {"layout": "mpi", "gpus": 4, "env": {"WANTED": "4"}}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
def test_folders_that_other_users_left_do_not_stop_the_launcher(
    cli: Cli, backend: SlurmBackend, home: Path
) -> None:
    """Open MPI names its session folder after its pid, and pids return."""
    scratch = home / "scratch"
    scratch.mkdir()
    scratch.chmod(0o1777)
    for pid in range(1, 1 + int(Path("/proc/sys/kernel/pid_max").read_text())):
        (scratch / f"ompi.{pid}").mkdir(mode=0o700)
    profile = {**PROFILE, "run": ["true"], "env": {"TMPDIR": str(scratch)}}
    cluster = cli.submit(profile)
    until(lambda: cli.status(cluster)["state"] in ("DONE", "FAILED"), 60, "the end of the cluster")
    assert cli.status(cluster)["state"] == "DONE", cli.status(cluster)["reason"]
    backend.wait_empty(20, cluster)
    assert not list(scratch.glob("gpujobs-*"))


@pytest.mark.parametrize("worker_class", ["cuda", slow_variant("nanny")])
@pytest.mark.parametrize(
    "launcher", ["mpirun", slow_variant("srun"), slow_variant("mpiexec")], indirect=True
)
def test_every_gpu_has_one_worker(cli: Cli, backend: SlurmBackend, worker_class: str) -> None:
    profile = {**PROFILE, "run": ["python", "who.py"], "workers": {"worker_class": worker_class}}
    cli.write("who.py", WHO)
    promised = json.loads(cli("plan", str(cli.write("p.yaml", profile)), "--json").stdout)
    assert promised["gpus"] == promised["workers"] == 4
    assert [(jobs["count"], jobs["nodes"]) for jobs in promised["jobs"]] == [(1, 2)]
    cluster = cli.submit(profile, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert found["address"].startswith("tls://")
    assert sorted(found["workers"]) == sorted(
        name.replace("p-0000", cluster) for name in promised["worker_names"]
    )
    per_node: dict[str, list[list[str]]] = {}
    for devices, node, _ in found["workers"].values():
        per_node.setdefault(node, []).append(devices.split(","))
    assert len(per_node) == 2
    for lists in per_node.values():
        assert sorted(devices[0] for devices in lists) == ["0", "1"]
        assert all(
            sorted(devices) == ["0", "1"] for devices in lists
        )  # all of the node's are visible
    assert len({gpu["uuid"] for gpu in cli.gpus(cluster).values()}) == 4
    assert len(cli.status(cluster)["jobs"]) == 1
    backend.wait_empty(20, cluster)


SCRIPT = """
import json, os, sys
from {module} import initialize
from distributed import Client

def who(dask_worker):
    return dask_worker.name, [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SLURMD_NODENAME"], dask_worker.nthreads if hasattr(dask_worker, "nthreads") else 0]

if __name__ == "__main__":
    initialize({keywords})
    with Client() as client:
        client.wait_for_workers(4)
        found = dict(client.run(who).values())
        print(json.dumps({{"workers": found, "address": client.scheduler.address, "argv": sys.argv}}), flush=True)
    {end}
"""


AGENT = """#!/bin/sh
# In place of ssh: the other node knows nothing of the job's environment.
host=$1; shift
exec env -i HOME="$HOME" PATH=/usr/bin:/bin SLURMD_NODENAME="$host" OWN=remote sh -c "$*"
"""
NANNIES = """
import ctypes, json, os
from distributed import Client

def look():
    ctypes.CDLL("libwanted.so")  # only exec reads LD_LIBRARY_PATH
    import wanted
    return {name: os.environ.get(name) for name in %r}

def http(dask_worker):
    return dask_worker.http_server.address

with Client() as client:
    client.wait_for_workers(8)
    assert set(client.run(http).values()) == {"127.0.0.1"}
    print(json.dumps(list(client.run(look, nanny=True).values())))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
def test_ranks_on_other_nodes_have_the_environment_of_the_job(
    cli: Cli, backend: SlurmBackend, home: Path
) -> None:
    """Open MPI starts its ranks through an agent like ssh, which passes no variables."""
    agent = cli.write("agent", AGENT)
    agent.chmod(0o755)
    extra = cli.work / "extra folder"
    extra.mkdir()
    (extra / "wanted.py").touch()
    (extra / "libwanted.so").symlink_to(_cmsgpack.__file__)
    names = ["OWN", "SET", "UNSET", "ODD", "SLURM_JOB_ID", "SLURMD_NODENAME"]
    cli.write("look.py", NANNIES % names)
    launchers = mpi.LAUNCHERS["mpirun"]
    setup = [
        launchers["setup"],
        f"export PRTE_MCA_plm=ssh PRTE_MCA_plm_ssh_agent={agent}",
        # Both daemons have the name of this host: the ranks disagree on whether nodes are shared.
        "export OMPI_MCA_coll=^han",
        f'export PYTHONPATH="{extra}:$PYTHONPATH" LD_LIBRARY_PATH="{extra}:$LD_LIBRARY_PATH"',
        "export SET=by-setup; unset UNSET",
    ]
    # Of a whole node, a rank without the job's environment knows the GPUs.
    site = backend.site() | {"mpi": {**launchers, "setup": "\n".join(setup)}}
    (home / "sites" / "here.yaml").write_text(text_of(site))
    odd = "it's $HOME `ls`"
    profile = {
        **PROFILE,
        "gpus": 8,
        "run": ["python", "look.py"],
        "env": {"OWN": "profile", "ODD": odd},
    }
    cluster = cli.submit(profile, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert len(found) == 8
    for variables in found:
        node = variables.pop("SLURMD_NODENAME")
        assert node in ("node1", "node2", "node3", "node4")
        assert variables == {
            "OWN": "profile",
            "SET": "by-setup",
            "UNSET": None,
            "ODD": odd,
            "SLURM_JOB_ID": None,
        }
    backend.wait_empty(20, cluster)


AFFINITY = "import os; print(sorted(os.sched_getaffinity(0)))"


@pytest.mark.parametrize(
    ("scheduler", "library"),
    [
        ("local", "openmpi"),
        ("local", "mpich"),
        ("pbs", "openmpi"),
        ("pbs", "mpich"),
        ("torque", "openmpi"),
        ("lsf", "openmpi"),
        ("sge", "mpich"),
    ],
)
def test_built_in_launchers_leave_all_cores_to_a_rank(scheduler: str, library: str) -> None:
    """A rank starts several workers: bound to one core, they would share it."""
    if why := mpi.missing():
        unavailable("slurm", why)
    program, *options = get_scheduler(scheduler).mpi_command
    folder = mpi.PREFIX if library == "openmpi" else mpi.PREFIX / "mpich"
    values = {"ranks": 1, "ranks_per_node": 1, "nodes": 1}
    argv = [str(folder / "bin" / program), *(word.format(**values) for word in options)]
    env = {**os.environ, **mpi.AS_ROOT}
    done = run([*argv, sys.executable, "-c", AFFINITY], env=env)
    assert done.stdout == f"{sorted(os.sched_getaffinity(0))}\n", done.stderr


def test_on_this_machine_there_may_be_more_ranks_than_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := mpi.missing():
        unavailable("slurm", why)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "p.yaml"
    path.write_text("layout: mpi\nrun_on: ranks\ngpus: 2\nrun: [svd.py]\n")
    machine = Machine(gpus=("0", "1"), cpus=2, memory=2**33, busy={})
    planned = make_plan(load_spec(path, site="local"), python=sys.executable, machine=machine)
    (script,) = render(planned, "p-0000")
    exports = re.findall(r"^export .*oversubscribe.*$", script.text, re.M)
    program = mpi.PREFIX / "bin" / get_scheduler("local").mpi_command[0]
    launch = f"{program} -n {2 * (os.cpu_count() or 1) + 1} true"
    env = {**os.environ, **mpi.AS_ROOT}
    assert "not enough slots" in run(["bash", "-c", launch], env=env).stderr
    done = run(["bash", "-c", "\n".join([*exports, launch])], env=env)
    assert len(exports) == 2 and done.returncode == 0, done.stderr


# -- the user's script in all ranks ----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "keywords"),
    [
        ("gpujobs.mpi", 'worker_class="dask_cuda.CUDAWorker"'),
        (
            "gpujobs.mpi",
            'worker_class="dask_cuda.CUDAWorker", worker_options={"rmm_managed_memory": True}',
        ),
        ("dask_mpi", ""),
    ],
    ids=["first-snippet", "second-snippet", "dask-mpi-itself"],
)
def test_a_script_runs_in_all_ranks(
    cli: Cli, backend: SlurmBackend, module: str, keywords: str
) -> None:
    cli.write("all.py", SCRIPT.format(module=module, keywords=keywords, end="pass"))
    profile = {
        **PROFILE,
        "env": {"PYTHONPATH": f"{nvml_path(backend)}:{ROOT}/tests/fakes/rmm"},
        "run_on": "ranks",
        "run": ["all.py", "--size", "10 000"],
        "workers": {"threads": 2},
    }
    promised = json.loads(cli("plan", str(cli.write("p.yaml", profile)), "--json").stdout)
    cluster = cli.submit(profile, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert found["argv"][1:] == ["--size", "10 000"]
    assert found["address"].startswith("tls://")
    assert sorted(found["workers"]) == sorted(
        name.replace("p-0000", cluster) for name in promised["worker_names"]
    )
    assert (
        len({(node, devices.split(",")[0]) for devices, node, _ in found["workers"].values()}) == 4
    )
    assert len({gpu["uuid"] for gpu in cli.gpus(cluster).values()}) == 4
    everything = cli("logs", cluster, "--all").stdout
    assert everything.count("fake rmm: managed_memory=True") == (4 if "rmm" in keywords else 0)
    backend.wait_empty(20, cluster)


@pytest.mark.slow
def test_one_node_has_names_of_node_0(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit({**PROFILE, "gpus": 2}, "--wait")
    names = [f"{cluster}-0-{gpu}" for gpu in range(2)]
    assert cli.status(cluster)["workers"]["connected"] == names
    assert cli.status(cluster)["jobs"][0]["workers"] == names
    refused = cli("scale", cluster, "8")
    assert refused.returncode == 2 and "one allocation" in refused.stderr
    cli("cancel", cluster)
    backend.wait_empty(20, cluster)


# -- what fails is told within seconds, and the allocation ends ------------------------------------------------------
BROKEN = "raise ImportError('broken on purpose')\n"
DEATHS: dict[str, tuple[dict[str, Any], str]] = {
    "wrong-option": (
        {"workers": {"options": {"pid_file": "/nosuch/w.pid"}}},
        r"worker \S+-\d on node\d ended .*nosuch/w.pid",
    ),
    "no-gpu": ({"env": {"FAKE_NVML_GPUS": "0"}}, r"worker \S+-\d on node\d ended "),
    "fewer-gpus": (
        {"gpus": 8, "env": {"FAKE_NVML_GPUS": "2"}},
        r"worker \S+-\d on node\d ended .*Invalid.*[23] \(2 of 4 GPUs visible",
    ),
    "broken-dask-mpi": (
        {"env": {"PYTHONPATH": "broken"}, "run_on": "ranks", "run": ["all.py"]},
        r"rank \d on node\d: .*broken on purpose",
    ),
    "command-fails": (
        {"run": ["python", "-c", "raise SystemExit(9)"]},
        "run: ended with exit code 9",
    ),
}


OFTEN = ("wrong-option",)


@pytest.mark.parametrize("case", [case if case in OFTEN else slow_variant(case) for case in DEATHS])
def test_what_dies_ends_the_allocation(
    cli: Cli, backend: SlurmBackend, home: Path, launcher: str, case: str
) -> None:
    (cli.work / "broken").mkdir()
    (cli.work / "broken" / "dask_mpi.py").write_text(BROKEN)
    change, said = DEATHS[case]
    if "gpus" in change:
        site = site_with(backend, mpi.LAUNCHERS[launcher], change["gpus"] // 2)
        (home / "sites" / "here.yaml").write_text(site)
    env = {**PROFILE["env"], **change.get("env", {})}
    if case == "broken-dask-mpi":
        env["PYTHONPATH"] = f"{cli.work}/broken:{nvml_path(backend)}"
    done = cli("submit", str(cli.write("p.yaml", {**PROFILE, **change, "env": env})), "--wait")
    assert done.returncode == 5
    assert re.search(said, done.stderr), done.stderr
    backend.wait_empty(15, done.stdout.strip())
    code = cli.status(done.stdout.strip())["exit_code"]
    assert code == {"command-fails": 9, "broken-dask-mpi": 1}.get(case, 70)


@pytest.mark.slow
def test_a_dead_node_ends_the_allocation(cli: Cli, backend: SlurmBackend) -> None:
    cluster = cli.submit(PROFILE)
    connected(cli, cluster, 4)
    nodes = [
        pid for pid in processes_with(f"{cluster}/injob.pyz") if b".pyz\0node\0" in cmdline(pid)
    ]
    assert nodes
    os.kill(nodes[-1], signal.SIGKILL)
    backend.wait_empty(15, cluster)
    assert cli.status(cluster)["exit_code"] == 70
    assert re.search(r"the launcher \(\w+\) ended", cli.status(cluster)["reason"])


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
def test_a_launcher_of_another_mpi_is_named_by_the_size_of_its_world(
    cli: Cli, backend: SlurmBackend, home: Path
) -> None:
    """Open MPI's ranks under an srun that does not speak to them: each would be rank 0 of 1."""
    command = [word for word in mpi.LAUNCHERS["srun"]["command"] if "pmi2" not in word]
    command.insert(1, "--mpi=none")
    site = site_with(backend, {**mpi.LAUNCHERS["mpirun"], "command": command})
    (home / "sites" / "here.yaml").write_text(site)
    cli.write("all.py", SCRIPT.format(module="dask_mpi", keywords="", end=""))
    script = {**PROFILE, "run_on": "ranks", "run": ["all.py"]}
    done = cli("submit", str(cli.write("p.yaml", script)), "--wait")
    assert done.returncode == 5
    assert "the size of MPI's world is 1, not 6" in done.stderr
    backend.wait_empty(15, done.stdout.strip())


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("from dask_mpi import initialize\ninitialize()\nfrom distributed import Client\nClient()", 1, "the script needs `if __name__"),
        (SCRIPT.format(module="dask_mpi", keywords="", end="sys.exit(7)"), 7, "rank 1 on node1: exit code 7"),
        (SCRIPT.format(module="dask_mpi", keywords="", end="raise ValueError('no good')"), 1, "ValueError: no good"),
        (SCRIPT.format(module="dask_mpi", keywords='worker_options={"name": "x"}', end=""), 1, "`name` is set by gpujobs"),
        (SCRIPT.format(module="dask_mpi", keywords='worker_class="distributed.Worker"', end=""), 1, "profile plans dask_cuda"),
    ],
    ids=["no-main-guard", "exit-code", "exception", "reserved-option", "other-class"],
)  # fmt: skip
def test_a_script_that_fails_ends_the_cluster_with_its_exit_code(
    cli: Cli, backend: SlurmBackend, script: str, code: int, said: str
) -> None:
    cli.write("all.py", script)
    done = cli(
        "submit",
        str(cli.write("p.yaml", {**PROFILE, "run_on": "ranks", "run": ["all.py"]})),
        "--wait",
    )
    assert done.returncode == 5
    assert said in done.stderr
    cluster = done.stdout.strip()
    backend.wait_empty(15, cluster)
    assert cli.status(cluster)["exit_code"] == code


EARLY = """
import sys
from dask_mpi import initialize
from distributed import Client

if __name__ == "__main__":
    initialize()
    if sys.argv[1] != "0":
        with Client() as client:
            client.wait_for_workers(int(sys.argv[1]))
    print("over")
"""
LATE = """
import os, time
if os.environ["CUDA_VISIBLE_DEVICES"].startswith("1"):
    time.sleep(120)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
@pytest.mark.parametrize("workers_first", [0, 1])
def test_a_script_that_ends_before_a_worker_has_started_ends_the_cluster(
    cli: Cli, backend: SlurmBackend, workers_first: int
) -> None:
    """The worker would wait for the dask scheduler, which is gone; its launcher for its rank."""
    cli.write("early.py", EARLY)
    cli.write("late.py", LATE)
    workers = {"preload": [str(cli.work / "late.py")]}
    run = ["early.py", str(workers_first)]
    profile = {"layout": "mpi", "gpus": 2, "run_on": "ranks", "run": run}
    cluster = cli.submit({**profile, "workers": workers, "start_timeout": "1h"})
    until(lambda: cli.status(cluster)["state"] in ("DONE", "FAILED"), 120, cluster, every=0.5)
    assert cli.status(cluster)["state"] == "DONE", cli.status(cluster)["reason"]
    assert cli("logs", cluster).stdout.startswith("over\n")
    stopped = "run is over; the workers that were still starting are stopped"
    assert stopped in cli("logs", cluster, "--all").stdout or not workers_first
    backend.wait_empty(30, cluster)
    until(lambda: not processes_with(cluster), 30)


@pytest.mark.slow
def test_cancel_ends_all_ranks(cli: Cli, backend: SlurmBackend) -> None:
    cli.write("sleep.py", SLEEP)
    cluster = cli.submit({**PROFILE, "run": ["python", "sleep.py", "600"]})
    says(cli, cluster, "here", 180)
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(15, cluster)
    until(lambda: not processes_with(cluster), 15)


# -- the end without work ----------------------------------------------------------------------------------------------
WORK = """
import sys, time
from pathlib import Path
import distributed, gpujobs  # before the cluster runs: its timeout is short
gpujobs.ClusterHandle(sys.argv[1]).wait_for_address()

cluster, folder, hold, kind = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
client = gpujobs.connect(cluster)
task = client.submit(abs, -1, resources={"NONE": 1}) if kind == "idle" else None
time.sleep(hold)
assert not (folder / "ended").exists()
if task is None:
    client.close()
else:
    task.release()
while not (folder / "ended").exists():
    time.sleep(0.5)
print("ended")
"""
"""`idle`: a task that waits for a worker keeps the cluster; `client`: the client does."""
SCRIPT_WITHOUT_WORK = """
from dask_mpi import initialize
from distributed import Client
import time

if __name__ == "__main__":
    initialize()
    with Client() as client:
        print("here", flush=True)
        time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
@pytest.mark.parametrize(
    ("kind", "what"), [("idle", "tasks"), ("client", "clients")], ids=["idle", "client"]
)
def test_a_cluster_of_mpi_ends_without_work(
    cli: Cli, backend: SlurmBackend, kind: str, what: str
) -> None:
    seconds = math.ceil(patience(8))
    times = {"idle_timeout": "1h", "client_timeout": "1h", f"{kind}_timeout": f"{seconds}s"}
    cluster = cli.submit({**PROFILE, **times})
    folder = cli.status(cluster)["folder"]
    done = cli.python_run(WORK, cluster, folder, str(1.5 * seconds), kind)
    assert done.stdout.strip().endswith("ended"), done.stderr
    found = cli.status(cluster)
    assert (found["kind"], found["state"], found["exit_code"]) == ("idle", "DONE", 0)
    assert found["reason"] == f"the cluster was without {what} for {seconds} s"
    backend.wait_empty(20, cluster)
    until(lambda: not processes_with(cluster), 20)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
def test_a_script_in_all_ranks_without_tasks_fails_as_idle(cli: Cli, backend: SlurmBackend) -> None:
    """Its work is not done: the cluster fails."""
    cli.write("all.py", SCRIPT_WITHOUT_WORK)
    ranks = {"run_on": "ranks", "run": ["all.py"]}
    cluster = cli.submit({**PROFILE, **ranks, "idle_timeout": "10s"})
    until(lambda: cli.status(cluster)["kind"] is not None, 120, cluster, every=0.5)
    found = cli.status(cluster)
    assert (found["kind"], found["state"]) == ("idle", "FAILED"), found["reason"]
    assert found["reason"] == "the cluster was without tasks for 10 s"
    warned = r"here\n\S+: UserWarning: the cluster ends in \d s, if it stays without tasks\n  warnings.warn\(msg\)\n"
    assert re.fullmatch(warned, cli("logs", cluster).stdout)
    backend.wait_empty(20, cluster)
    until(lambda: not processes_with(cluster), 20)


# -- from Python -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["local", "job"])
@pytest.mark.parametrize("launcher", ["mpirun"], indirect=True)
def test_the_cluster_class_refuses_the_layout_mpi(
    backend: SlurmBackend,
    home: Path,
    launcher: str,
    scheduler: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gpujobs
    from gpujobs.errors import InputError

    for name, value in {**backend.env(), "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    site = home / "here.yaml"
    site.write_text(site_with(backend, mpi.LAUNCHERS[launcher]))
    with pytest.raises(InputError, match="a number of GPUs"):
        gpujobs.GPUSLURMCluster(str(site), layout="mpi")
    options: dict[str, Any] = (
        {"scheduler_options": {"dashboard_address": ":0"}} if scheduler == "local" else {}
    )
    with gpujobs.GPUSLURMCluster(
        str(site),
        layout="mpi",
        n_workers=4,
        scheduler=scheduler,
        quiet=True,
        worker_memory="1GiB",
        **options,
    ) as cluster:
        cluster.wait_for_workers(4, timeout=patience(120))
        assert (
            cluster.observed
            == cluster.plan
            == {f"{cluster.id}-{rank}-{gpu}" for rank in range(2) for gpu in range(2)}
        )
        assert len(cluster.jobs) == 1
        for change in (lambda: cluster.scale(2), lambda: cluster.adapt(minimum=0, maximum=4)):
            with pytest.raises(InputError, match="one allocation"):
                change()
    backend.wait_empty(30)
