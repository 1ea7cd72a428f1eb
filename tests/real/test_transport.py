"""What dask's processes talk over: chosen once in the job, told once, the same for all."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import gpujobs

from ..support.backend import SlurmBackend, nvml_path
from ..support.cli import ROOT, Cli, text_of, without_dashboard
from ..support.on_slurm import backend  # noqa: F401
from ..support.processes import patience, processes_with, until
from .programs import WHO
from .test_allocation import supervisors

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


# -- checked, and measured -------------------------------------------------------------------------
FAKES = ROOT / "tests" / "fakes"


def with_ucxx(backend: SlurmBackend) -> dict[str, Any]:
    """Return a site that lists ucxx."""
    return backend.site() | {"network": {"protocols": ["ucxx", "tcp"]}}


def faked(backend: SlurmBackend, **variables: str) -> dict[str, Any]:
    """Return the keys of a profile whose jobs have stand-ins for ucxx and RMM."""
    path = ":".join([nvml_path(backend), str(FAKES / "ucxx"), str(FAKES / "rmm")])
    return {"env": {"WANTED": "2", "PYTHONPATH": path, **variables}}


def tried(cli: Cli, cluster: str) -> bool:
    """Return whether this cluster has checked that ucxx works."""
    return (Path(cli.status(cluster)["folder"]) / "logs" / "try-ucxx.log").exists()


@pytest.mark.slow  # one that does not work is tried in the same way
def test_ucxx_that_works_is_used_without_a_measurement(cli: Cli, backend: SlurmBackend) -> None:
    cluster, _ = submit(cli, with_ucxx(backend), faked(backend))
    address = json.loads(cli("logs", cluster).stdout.splitlines()[-1])["address"]
    found = cli.status(cluster)["transport"]
    assert address.startswith("ucxx://"), found
    assert (found["protocol"], found["reason"]) == ("ucxx", "")
    assert found["measured"] == {"ucxx": {"within": None, "between": None, "problem": ""}}
    assert tried(cli, cluster)
    # UCX takes seconds to start: the process of the nannies does not wait for the dask scheduler,
    # and that one not for the check.
    for name, later in (("job-0.log", "Start Nanny at"), ("scheduler.log", "Scheduler at")):
        log = (Path(cli.status(cluster)["folder"]) / "logs" / name).read_text()
        assert 0 <= log.index("UCX is initialised") < log.index(later)


@pytest.mark.slow
def test_rates_of_the_doctor_are_kept(cli: Cli, backend: SlurmBackend) -> None:
    """`doctor --run` measures within a job, and between two with `gpus_per_job`."""
    profile = faked(backend)
    site = str(cli.write("s.yaml", without_dashboard(with_ucxx(backend))))
    environment = [f"env.PYTHONPATH={profile['env']['PYTHONPATH']}"]
    for settings in ([], ["gpus_per_job=1"]):
        options = [word for one in (*environment, *settings) for word in ("--set", one)]
        done = cli("doctor", "--run", "--site", site, *options)
        assert done.returncode == 0, done.stdout + done.stderr
    cluster, _ = submit(cli, with_ucxx(backend), profile)
    found = cli.status(cluster)["transport"]
    for protocol in ("ucxx", "tls"):
        assert found["measured"][protocol]["within"] > 0
        assert found["measured"][protocol]["between"] > 0
    shown = cli("status", cluster).stdout
    assert "network  ucxx: " in shown and "GB/s between jobs; tls: " in shown
    assert not tried(cli, cluster)
    other, _ = submit(cli, with_ucxx(backend), faked(backend, UCX_TLS="all"))  # may be slower
    assert tried(cli, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("slow", "tls is faster here than ucxx"), ("hangs", "no answer within 40 s")],
)
def test_tcp_is_used_where_the_doctor_has_found_it_better(
    cli: Cli, backend: SlurmBackend, how: str, reason: str
) -> None:
    profile = faked(backend)
    # The check of ucxx alone has no transfers as slow as these.
    setup = f"case $SLURM_JOB_NAME in doctor-*) export FAKE_UCXX={how};; esac"
    site = without_dashboard(with_ucxx(backend))
    site["network"] = {"protocols": ["tcp", "ucxx"]}
    site["setup"] = f"{setup}\n{site['setup']}"
    path = str(cli.write("s.yaml", site))
    options = ["--site", path, "--set", f"env.PYTHONPATH={profile['env']['PYTHONPATH']}"]
    done = cli("doctor", "--run", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    site["network"] = {"protocols": ["ucxx", "tcp"]}
    cluster, _ = submit(cli, site, profile)
    assert json.loads(cli("logs", cluster).stdout.splitlines()[-1])["address"].startswith("tls://")
    assert reason in cli.status(cluster)["transport"]["reason"]
    assert reason in " ".join(cli("status", cluster).stdout.split())


@pytest.mark.slow
def test_ucxx_as_the_only_protocol_needs_no_certificate(cli: Cli, backend: SlurmBackend) -> None:
    """The cluster has no certificate."""
    profile = {**faked(backend), "network": {"protocol": "ucxx"}}
    cluster, _ = submit(cli, with_ucxx(backend), profile)
    assert json.loads(cli("logs", cluster).stdout.splitlines()[-1])["address"].startswith("ucxx://")
    assert not (Path(cli.status(cluster)["folder"]) / "tls-cert.pem").exists()


@pytest.mark.slow
def test_a_check_that_hangs_ends(cli: Cli, backend: SlurmBackend) -> None:
    cluster, _ = submit(cli, with_ucxx(backend), faked(backend, FAKE_UCXX="hangs"))
    found = cli.status(cluster)["transport"]
    assert found["protocol"] == "tls"
    assert "ucxx does not work on node" in found["reason"] and "no answer" in found["reason"]


@pytest.mark.slow
def test_the_users_settings_of_ucx_reach_all_processes(cli: Cli, backend: SlurmBackend) -> None:
    profile = faked(backend, UCX_TLS="all")
    cli.write("tls.py", TLS_SETTING)
    cluster, _ = submit(cli, with_ucxx(backend), {**profile, "run": ["python", "tls.py"]})
    assert cli("logs", cluster).stdout.splitlines()[-1] == "['all', 'all', 'all']"


TLS_SETTING = """
import os
from distributed import Client

with Client() as client:
    client.wait_for_workers(2)
    found = [*client.run(os.environ.get, "UCX_TLS").values(), os.environ.get("UCX_TLS")]
    print(found, flush=True)
"""

# -- workers initialise UCX while ucxx is tried, and the dask scheduler starts ---------------------
LOOK = """
import json
from distributed import Client

def look(dask_worker):
    import os, sys
    ucx = sys.modules["distributed_ucxx.ucxx"]
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "UCX_TLS")
    own = {name: os.environ.get(name) for name in names}
    return {"pid": os.getpid(), "ucx": ucx.initialised, "parent": os.getppid(), **own}

def workers(client):
    return [worker for _, worker in sorted(client.run(look).items())]

with Client() as client:
    client.wait_for_workers(2)
    first = workers(client)
    client.restart()
    print(json.dumps([first, workers(client)]), flush=True)
"""
ONE_JOB_OF_TWO = {"gpus": 2, "gpus_per_job": 2, "run": ["python", "look.py"]}
INITIALISED = re.compile(r"UCX is initialised in process (\d+)")


def log_of_workers(cli: Cli, cluster: str) -> str:
    return (Path(cli.status(cluster)["folder"]) / "logs" / "job-0.log").read_text()


def initialised(log: str) -> list[int]:
    """Return the processes of a job's workers that have initialised UCX."""
    return list(map(int, INITIALISED.findall(log)))


def looked(cli: Cli, cluster: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the first workers, and those after a restart, as `LOOK` has seen them."""
    first, again = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    return first, again


@pytest.mark.parametrize("worker_class", ["cuda", pytest.param("nanny", marks=pytest.mark.slow)])
def test_the_first_workers_have_initialised_ucx_before_the_dask_scheduler_listens(
    cli: Cli, backend: SlurmBackend, worker_class: str
) -> None:
    cli.write("look.py", LOOK)
    workers = {"worker_class": worker_class}
    own = {"UCX_TLS": "all", "FAKE_UCXX": "after 3"}  # with the process of the nannies
    profile = {**faked(backend, **own), **ONE_JOB_OF_TWO, "workers": workers}
    cluster, _ = submit(cli, with_ucxx(backend), profile)
    first, again = looked(cli, cluster)
    log = log_of_workers(cli, cluster)
    before, _, after = log.partition("Start Nanny at")
    prepared = {worker["pid"] for worker in first}
    assert len(prepared) == 2 and prepared <= set(initialised(before))
    assert {worker["pid"] for worker in again} <= set(initialised(after))  # forked as usual
    assert len({worker["parent"] for worker in (*first, *again)}) == 1
    for workers_then in (first, again):
        assert {worker["ucx"] for worker in workers_then} == {"0,1", "1,0"}
        assert all(worker["CUDA_VISIBLE_DEVICES"] == worker["ucx"] for worker in workers_then)
        assert all(worker["UCX_TLS"] == "all" for worker in workers_then)
    assert "not forked" not in log
    until(lambda: not processes_with(cluster), 30, "no process of the cluster")


@pytest.mark.slow
def test_workers_that_share_a_gpu_initialise_ucx_before_they_start(
    cli: Cli, backend: SlurmBackend
) -> None:
    cli.write("look.py", LOOK.replace("wait_for_workers(2)", "wait_for_workers(4)"))
    workers = {"workers_per_gpu": 2, "mps": True}
    profile = {
        **faked(backend, FAKE_UCXX="after 5"),
        **ONE_JOB_OF_TWO,
        "start_workers": 4,
        "workers": workers,
    }
    site = with_ucxx(backend)
    site["setup"] += f" PATH={FAKES}/mps:$PATH FAKE_MPS_FOLDER={cli.work}"
    cluster, _ = submit(cli, site, profile)
    first, again = looked(cli, cluster)
    before, _, after = log_of_workers(cli, cluster).partition("Start Nanny at")
    assert len(first) == 4
    assert {worker["pid"] for worker in first} <= set(initialised(before))
    assert {worker["pid"] for worker in again} <= set(initialised(after))
    for worker in (*first, *again):
        assert worker["CUDA_VISIBLE_DEVICES"] == worker["ucx"]
        assert worker["CUDA_MPS_PIPE_DIRECTORY"]
    for workers_then in (first, again):
        seen = sorted(worker["ucx"] for worker in workers_then)
        assert seen[0] == seen[1] != seen[2] == seen[3]


@pytest.mark.slow
def test_no_prepared_worker_stays_if_ucxx_does_not_work(cli: Cli, backend: SlurmBackend) -> None:
    profile = {**faked(backend, FAKE_UCXX="fails"), **ONE_JOB_OF_TWO}
    cli.write("pids.py", PIDS)
    cluster, _ = submit(cli, with_ucxx(backend), {**profile, "run": ["python", "pids.py"]})
    assert cli.status(cluster)["transport"]["protocol"] == "tls"
    pids = initialised(log_of_workers(cli, cluster))
    assert len(pids) == 3  # that of the nannies, and two for workers
    running = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert not set(pids) & set(running)


PIDS = """
import json, os
from distributed import Client

with Client() as client:
    client.wait_for_workers(2)
    print(json.dumps([int(name) for name in os.listdir("/proc") if name.isdecimal()]), flush=True)
"""


@pytest.mark.slow
def test_no_prepared_worker_stays_after_the_death_of_the_supervisor(
    cli: Cli, backend: SlurmBackend
) -> None:
    profile = {**faked(backend, FAKE_UCXX="hangs"), **ONE_JOB_OF_TWO}
    site = str(cli.write("s.yaml", without_dashboard(with_ucxx(backend))))
    cli.write("look.py", LOOK)
    done = cli("submit", str(cli.write("p.yaml", profile)), "--site", site)
    cluster = done.stdout.strip()

    def prepared() -> list[int]:
        path = Path(cli.status(cluster)["folder"]) / "logs" / "job-0.log"
        return initialised(path.read_text()) if path.exists() else []

    until(lambda: len(prepared()) == 3, 60, "two prepared workers")
    (supervisor,) = supervisors(cluster, "supervise").values()
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not processes_with(cluster), 30, "no process of the cluster")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "workers"),
    [
        ({"FAKE_NVML_EXCLUSIVE": "1"}, {}),  # the check of ucxx needs the GPU
        (
            {"DASK_DISTRIBUTED__NANNY__ENVIRON__CUDA_CACHE_PATH": "/cache", "FAKE_UCXX": "after 3"},
            {},
        ),
        ({}, {"preload": ["json"]}),  # before which UCX is not initialised
    ],
)
def test_a_worker_gets_ucx_by_its_own_settings(
    cli: Cli, backend: SlurmBackend, own: dict[str, str], workers: dict[str, Any]
) -> None:
    cli.write("look.py", LOOK)
    profile = {**faked(backend, **own), **ONE_JOB_OF_TWO, "workers": workers}
    cluster, _ = submit(cli, with_ucxx(backend), profile)
    first, _ = looked(cli, cluster)
    before, _, after = log_of_workers(cli, cluster).partition("Start Nanny at")
    place = before if "NANNY__ENVIRON" in str(own) else after
    assert {worker["pid"] for worker in first} <= set(initialised(place))
    assert {worker["ucx"] for worker in first} == {"0,1", "1,0"}


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
def test_isolated_jobs_get_settings_of_ucx(
    cli: Cli, backend: SlurmBackend, change: dict[str, Any], expected: str
) -> None:
    site = isolated(cli, with_ucxx(backend))
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
    site = isolated(cli, with_ucxx(backend), setup)
    cluster, said = submit(cli, site, {**faked(backend, **own), "run": ["python", "tls.py"]})
    assert cli("logs", cluster).stdout.splitlines()[-1] == ALL_WITH.format("all")
    remark = "jobs are isolated from each other's GPUs; UCX keeps your UCX_TLS=all"
    assert cli("status", cluster).stdout.count(remark) == 1
    assert said.count(remark) <= 1
    logs = Path(cli.status(cluster)["folder"]) / "logs"
    written = [path.read_text().count(remark) for path in logs.iterdir()]
    assert sum(written) == 1, written
