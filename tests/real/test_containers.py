"""Clusters in containers: a real Charliecloud on a real Slurm, with an image that has its own root folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import fresh_folder, make_cli, nothing_left, slow_variant, unavailable
from ..support import images, mpi
from ..support.backend import Backend, SlurmBackend
from ..support.cli import ROOT, Cli, text_of, without_dashboard
from ..support.images import MARK, Image
from ..support.processes import patience, processes_with, until
from .test_own_modules import FOUND, HELPER, MAIN

pytestmark = [pytest.mark.slurm, pytest.mark.filterwarnings("default")]

PROFILE: dict[str, Any] = {
    "gpus": 4,
    "gpus_per_job": 2,
    "start_workers": 4,
    "run": ["python3", "where.py"],
    "env": {"WANTED": "4", "GREETING": "it's $HOME: me"},
    "environment": {"container": {"image": "mine"}},
}

WHERE = f"""
import json, os, sys
from distributed import Client

def where():
    names = ("OF_IMAGE", "WANTED", "GREETING", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "TMPDIR")
    variables = {{name: os.environ.get(name) for name in names}}
    return {{"image": os.path.exists({MARK!r}), "host": os.path.exists("/etc/os-release"), "prefix": sys.prefix, **variables}}

if __name__ == "__main__":
    with Client() as client:
        client.wait_for_workers(int(os.environ["WANTED"]))
        found = {{"run": where(), "scheduler": client.run_on_scheduler(where), "address": client.scheduler.address}}
        found["workers"] = list(client.run(where).values())
        print(json.dumps(found))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home that is not in /tmp, which ch-run mounts by itself."""
    folder = Path(tempfile.mkdtemp(prefix="gpujobs-home-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["slurm"])
def backend(request: pytest.FixtureRequest, home: Path) -> Iterator[Backend]:
    """A batch scheduler; the jobs end before the home, with the cluster's folder, is removed."""
    if why := images.missing():
        unavailable("charliecloud", why)
    found: Backend = request.getfixturevalue(f"{request.param}_backend")
    yield found
    nothing_left(found)


@pytest.fixture(params=["ordinary"])
def cli(backend: SlurmBackend, home: Path, request: pytest.FixtureRequest) -> Cli:
    made = make_cli(backend, home, request.param)
    made.write("where.py", WHERE)
    return made


@pytest.fixture
def image(cli: Cli, home: Path) -> Image:
    made = Image(home / "image", cli.python, cli.user)
    made.add_mount_point(cli.work)
    made.add_mount_point(home / ".gpujobs")
    return made


OF_THE_NODE = "export PYTHONPATH=/of/the/node LD_LIBRARY_PATH=/of/the/node"


def write_site(cli: Cli, backend: Backend, setup: str = OF_THE_NODE, **keys: Any) -> None:
    """Write the site file; the nodes' own Python has nothing."""
    site = without_dashboard(backend.site()) | {"setup": setup}
    (cli.home / "sites" / "here.yaml").write_text(text_of(site | keys))


def check_places(found: dict[str, Any]) -> None:
    assert len(found["workers"]) == 4
    assert found["address"].startswith("tls://")
    for place in (found["run"], found["scheduler"], *found["workers"]):
        assert (place["image"], place["host"]) == (True, False)
        assert place["prefix"] == "/opt/python"
        assert place["OF_IMAGE"] == "image"
        assert place["GREETING"] == "it's $HOME: me"
        assert place["WANTED"] == "4"  # the profile's has priority over the image's
        assert place["LD_LIBRARY_PATH"] != "/of/the/node"


@pytest.mark.parametrize("cli", ["ordinary", slow_variant("root")], indirect=True)
def test_everything_of_a_cluster_runs_in_the_image(
    cli: Cli, backend: SlurmBackend, image: Image
) -> None:
    write_site(cli, backend, containers=image.site())
    cluster = cli.submit(PROFILE, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    check_places(found)
    assert sorted(place["CUDA_VISIBLE_DEVICES"] for place in found["workers"])[0] == "0,1"
    backend.wait_empty(20, cluster)


@pytest.mark.slow
def test_podman_runs_the_image_and_ends_with_the_job(
    cli: Cli, backend: SlurmBackend, image: Image, tmp_path: Path
) -> None:
    """An ordinary user, without a session and without further user ids."""
    if why := images.podman_missing(fresh_folder(cli.home, "podman"), cli.user):
        pytest.skip(f"no rootless podman, which not each kernel allows: {why}")
    write_site(cli, backend, image.podman_setup(), containers=image.podman_site(cli.user or ""))
    cluster = cli.submit(PROFILE, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    for place in (found["run"], found["scheduler"], *found["workers"]):
        assert (place["image"], place["host"]) == (True, False)
        assert (place["prefix"], place["OF_IMAGE"]) == ("/opt/python", "image")
        assert place["GREETING"] == "it's $HOME: me"
    assert sorted(place["CUDA_VISIBLE_DEVICES"] for place in found["workers"])[0] == "0,1"
    backend.wait_empty(20, cluster)
    cli.write("where.py", "print('here', flush=True)\nimport time\ntime.sleep(600)\n")
    cluster = cli.submit(PROFILE)
    until(lambda: "here" in cli("logs", cluster).stdout, 90, every=1)
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(60, cluster)
    until(lambda: not processes_with(cluster), 30, lambda: str(processes_with(cluster)))


@pytest.mark.slow
def test_the_head_asks_outside_of_the_image(cli: Cli, backend: SlurmBackend, image: Image) -> None:
    """About a job that is deleted from the queue while `run` waits for it."""
    write_site(cli, backend, containers=image.site())
    groups = {"first": {"gpus": 1}, "second": {"gpus": 1, "directives": [backend.hold]}}
    environment = PROFILE["environment"]
    profile = {"groups": groups, "start_workers": 2, "run": ["true"], "environment": environment}
    cluster = cli.submit(profile)
    folder = cli.home / ".gpujobs" / cluster
    until((folder / "scheduler.json").exists, 60)
    backend.kill_job(cli.status(cluster)["jobs"][1]["id"])
    until((folder / "ended").exists, 150, every=1)
    reason = cli.status(cluster)["reason"]
    assert reason.startswith("run: cannot start: job 1 did not start: "), reason
    backend.wait_empty(20)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["gpu", "prep"])
def test_one_group_alone_runs_in_the_image(
    cli: Cli, backend: SlurmBackend, image: Image, head: str
) -> None:
    write_site(cli, backend, backend.site()["setup"], containers=image.site())
    small = {"count": 2, "threads": 1, "memory": "1GiB"}
    prep = {"gpus": 0, "workers": small, "environment": PROFILE["environment"]}
    profile = {key: PROFILE[key] for key in ("start_workers", "run", "env")}
    profile |= {"groups": {"gpu": {"gpus": 2}, "prep": prep}, "head": {"group": head}}
    path = str(cli.write("p.yaml", profile))
    planned = json.loads(cli("plan", path, "--json").stdout)
    in_image = {group["name"]: bool(group["container"]) for group in planned["groups"]}
    assert in_image == {"gpu": False, "prep": True}
    scripts = cli("render", path).stdout.split("#!")[1:]
    assert ["ch-run" in script for script in scripts] == [False, True]
    cluster = cli.submit(profile, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    places = [(place["image"], bool(place["CUDA_VISIBLE_DEVICES"])) for place in found["workers"]]
    assert sorted(places) == [(False, True), (False, True), (True, False), (True, False)]
    assert found["run"]["image"] == found["scheduler"]["image"] == in_image[head]
    backend.wait_empty(20, cluster)


DEVICES = """
import json, os, stat
devices = {}
for folder, _, names in os.walk("/dev"):
    for path in (os.path.join(folder, name) for name in names):
        found = os.lstat(path)
        if stat.S_ISCHR(found.st_mode) and not path.startswith("/dev/pts/"):
            devices[path] = found.st_rdev
print(json.dumps([devices, os.listdir("/sys/class")]))
"""


@pytest.mark.slow
def test_devices_of_the_node_are_visible_in_the_image(
    cli: Cli, backend: SlurmBackend, image: Image
) -> None:
    """Those of InfiniBand are in a folder in /dev, and what UCX reads of them is in /sys."""
    write_site(cli, backend, containers=image.site())
    cli.write("devices.py", DEVICES)
    cluster = cli.submit({**PROFILE, "run": ["python3", "devices.py"]}, "--wait")
    devices, classes = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    on_host, classes_on_host = json.loads(cli.python_run(DEVICES).stdout)
    assert on_host and devices.items() >= on_host.items()
    assert set(classes) >= set(classes_on_host)
    backend.wait_empty(20, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("run_on", ["head", "ranks"])
def test_mpi_ranks_run_in_the_image(
    cli: Cli, backend: SlurmBackend, image: Image, run_on: str
) -> None:
    if why := mpi.missing():
        unavailable("slurm", why)
    write_site(cli, backend, containers=image.site(), mpi=mpi.LAUNCHERS["mpirun"])
    run: list[str] = PROFILE["run"]
    if run_on == "ranks":
        start = WHERE.replace(
            "    with Client", "    from dask_mpi import initialize; initialize()\n    with Client"
        )
        cli.write("where.py", start)
        run = run[1:]
    profile = {**PROFILE, "layout": "mpi", "gpus_per_job": None, "run_on": run_on, "run": run}
    cluster = cli.submit(profile, "--wait")
    check_places(json.loads(cli("logs", cluster).stdout.splitlines()[-1]))
    backend.wait_empty(20, cluster)


@pytest.mark.sge
@pytest.mark.parametrize("backend", ["sge"], indirect=True)
def test_workers_on_grid_engine_run_in_the_image(cli: Cli, backend: Backend, image: Image) -> None:
    write_site(cli, backend, containers=image.site())
    profile = {**PROFILE, "gpus": 2, "gpus_per_job": 1, "env": {"WANTED": "2"}}
    cluster = cli.submit({**profile, "start_workers": 2}, "--wait")
    found = json.loads(cli("logs", cluster).stdout.splitlines()[-1])
    assert [place["prefix"] for place in found["workers"]] == ["/opt/python"] * 2
    assert {place["TMPDIR"] for place in found["workers"]}.isdisjoint({None, ""})
    backend.wait_empty(20, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["workers", "mpi"])
def test_the_example_runs_in_the_image(
    cli: Cli, backend: SlurmBackend, image: Image, layout: str
) -> None:
    if why := mpi.missing():
        unavailable("slurm", why)
    write_site(cli, backend, containers=image.site(), mpi=mpi.LAUNCHERS["mpirun"])
    cli.write("svd.py", (ROOT / "examples" / "svd.py").read_text())
    run = ["python3", "svd.py", "--rows", "20000", "--workers", "2"]
    environment = PROFILE["environment"]
    profile = {"gpus": 2, "layout": layout, "run": run, "environment": environment}
    cluster = cli.submit(profile, "--wait")
    assert "2 workers: 2 CUDA workers" in cli("logs", cluster).stdout
    backend.wait_empty(20, cluster)


@pytest.mark.parametrize("runtime", ["apptainer", "singularity", "pyxis"])
@pytest.mark.slow
def test_other_runtimes_run_the_cluster_in_the_image(
    cli: Cli, backend: SlurmBackend, image: Image, runtime: str
) -> None:
    """A fake starts the image in which only its mounts are visible, and GPUs only if it is asked for them."""
    setup = f"{image.fake_setup(cli.python)}\nexport PYTHONPATH=/of/the/node"
    write_site(cli, backend, setup, containers=image.fake_site(runtime))
    cluster = cli.submit(PROFILE, "--wait")
    check_places(json.loads(cli("logs", cluster).stdout.splitlines()[-1]))
    assert len(image.calls()) == 2  # one for each job
    for call in image.calls():
        assert "PYTHONPATH" not in call["environ"]
        assert not [word for word in call["argv"] if "it's" in word]  # others can read these
    backend.wait_empty(20, cluster)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_other_runtimes_start_the_node_of_an_mpi_job(
    cli: Cli, backend: SlurmBackend, image: Image, runtime: str
) -> None:
    if why := mpi.missing():
        unavailable("slurm", why)
    containers, setup = image.fake_site(runtime), image.fake_setup(cli.python)
    write_site(cli, backend, setup, containers=containers, mpi=mpi.LAUNCHERS["srun"])
    profile = {
        **PROFILE,
        "layout": "mpi",
        "gpus_per_job": None,
        "workers": {"worker_class": "nanny"},
    }
    cluster = cli.submit(profile, "--wait")
    check_places(json.loads(cli("logs", cluster).stdout.splitlines()[-1]))
    assert len(image.calls()) == 2  # the supervisors of the job and of its node
    backend.wait_empty(20, cluster)


@pytest.mark.slow
def test_a_killed_batch_script_leaves_no_process(
    cli: Cli, backend: SlurmBackend, image: Image
) -> None:
    """Apptainer stays between the batch script and the supervisor."""
    write_site(cli, backend, image.fake_setup(cli.python), containers=image.fake_site("apptainer"))
    profile = {**PROFILE, "gpus": 1, "gpus_per_job": 1, "start_workers": 1, "run": ["sleep", "600"]}
    cluster = cli.submit(profile)
    until(lambda: cli.status(cluster)["state"] == "RUNNING", patience(60), "run")
    spool = str(backend.slurm.folder / "spool")
    # The first one: its child runs commands of the batch scheduler for the supervisor.
    script = min(pid for pid in processes_with(spool) if b"slurm_script" in command_of(pid))
    os.kill(script, signal.SIGKILL)
    until(
        lambda: not processes_with(f"{cluster}/injob.pyz"), patience(20), "an end of all processes"
    )
    assert "its batch script was killed" in cli.status(cluster)["reason"]


@pytest.mark.slow
def test_cancel_ends_mpi(cli: Cli, backend: SlurmBackend, image: Image) -> None:
    if why := mpi.missing():
        unavailable("slurm", why)
    write_site(cli, backend, containers=image.site(), mpi=mpi.LAUNCHERS["mpirun"])
    profile = {**PROFILE, "layout": "mpi", "gpus_per_job": None, "run": ["sleep", "600"]}
    cluster = cli.submit(profile)
    until(lambda: len(cli.gpus(cluster)) == 4, patience(60), "all workers")
    assert cli("cancel", cluster).returncode == 0
    backend.wait_empty(20, cluster)
    until(
        lambda: not processes_with(f"{cluster}/injob.pyz"), patience(20), "an end of all processes"
    )


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_doctor_runs_in_the_image(cli: Cli, backend: SlurmBackend, image: Image) -> None:
    defaults = {"walltime": "10m", "environment": PROFILE["environment"]}
    write_site(cli, backend, containers=image.site(), defaults=defaults)
    done = cli("doctor", "--run", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    for name in ("job", "shared folder", "GPUs", "scratch space"):
        assert checks[name]["state"] == "ok", done.stdout
    backend.wait_empty(20)


OWNER = """
import os, sys
from gpujobs import GPUSLURMCluster
if __name__ == "__main__":
    scheduler, image = sys.argv[1:]
    with GPUSLURMCluster(n_workers=2, gpus_per_job=1, container={"image": image}, scheduler=scheduler) as cluster:
        cluster.wait_for_workers(2)
        client = cluster.get_client()
        prefix = lambda: __import__("sys").prefix
        print({*client.run(prefix).values()}, client.run_on_scheduler(prefix) == sys.prefix)
        client.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["local", "job"])
def test_workers_of_a_python_cluster_run_in_the_image(
    cli: Cli, backend: SlurmBackend, image: Image, scheduler: str
) -> None:
    write_site(cli, backend, containers=image.site())
    done = cli.python_run(OWNER, scheduler, "mine")
    assert done.stdout == f"{{'/opt/python'}} {scheduler == 'local'}\n", done.stderr
    backend.wait_empty(20)


@pytest.mark.slow
def test_a_python_cluster_names_its_missing_image(
    cli: Cli, backend: SlurmBackend, image: Image
) -> None:
    write_site(cli, backend, containers=image.site())
    done = cli.python_run(OWNER, "local", "/no/such/image")
    (line,) = [line for line in done.stderr.splitlines() if "JobFailedError" in line]
    assert re.search(r" on node[1-4]: no image /no/such/image", line), line
    backend.wait_empty(20)


LAYOUTS = ["workers", slow_variant("mpi")]
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "image": ({"image": "/no/such/image"}, "no image /no/such/image"),
    "runtime": ({"image": "mine", "runtime": "singularity"}, "no command singularity"),
    "plugin": ({"image": "mine", "runtime": "pyxis"}, "srun has no option --container-image"),
    "bind": ({"image": "mine", "args": ["--bind=/no/such/folder"]}, "/no/such/folder"),
}


def reason_of(cli: Cli, cluster: str) -> str:
    """Return the line that says why a cluster failed, once it has."""
    until(lambda: cli.status(cluster)["state"] == "FAILED", 15, "the end of the cluster")
    reason: str = cli.status(cluster)["reason"]
    assert "\n" not in reason
    assert re.search(r" on node[1-4]\b", reason), reason
    return reason


@pytest.mark.parametrize(
    "fault", ["image", *map(slow_variant, [name for name in FAULTS if name != "image"])]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_container_that_cannot_start_ends_the_cluster(
    cli: Cli, backend: SlurmBackend, image: Image, fault: str, layout: str
) -> None:
    write_site(cli, backend, containers=image.site())
    container, words = FAULTS[fault]
    profile = {"gpus": 4, "layout": layout, "environment": {"container": container}}
    assert words in reason_of(cli, cli.submit(profile))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_image_without_dask_ends_the_cluster(
    cli: Cli, backend: SlurmBackend, image: Image, layout: str
) -> None:
    write_site(cli, backend, containers=image.site(packages=False))
    profile = {"gpus": 4, "layout": layout, "environment": PROFILE["environment"]}
    assert "No module named 'dask'" in reason_of(cli, cli.submit(profile))


FAULTS_OF_FAKES = {
    "image": "no image /no/such/image",
    "runtime": "no command apptainer",
    "dask": "No module named 'dask'",
}
"""Not those that the runtime itself reports: its messages are not those of the fakes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "fault"),
    [*(("apptainer", fault) for fault in FAULTS_OF_FAKES), ("pyxis", "image"), ("pyxis", "dask")],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_runtimes_that_cannot_start_end_the_cluster(
    cli: Cli, backend: SlurmBackend, image: Image, runtime: str, fault: str, layout: str
) -> None:
    setup = "true" if fault == "runtime" else image.fake_setup(cli.python)
    write_site(cli, backend, setup, containers=image.fake_site(runtime, packages=fault != "dask"))
    name = "/no/such/image" if fault == "image" else "mine"
    profile = {"gpus": 4, "layout": layout, "environment": {"container": {"image": name}}}
    assert FAULTS_OF_FAKES[fault] in reason_of(cli, cli.submit(profile))


@pytest.mark.slow
def test_waiting_jobs_are_cancelled_at_the_end(
    cli: Cli, backend: SlurmBackend, image: Image
) -> None:
    """The image has no scancel."""
    write_site(cli, backend, containers=image.site())
    one_node = {
        "gpus": 3,
        "gpus_per_job": 1,
        "cpus_per_job": 16,
        "directives": ["--nodelist=node1"],
    }
    profile = {**PROFILE, **one_node, "start_workers": 1, "env": {"WANTED": "1"}}
    cluster = cli.submit(profile, "--wait")
    states = [job["state"] for job in cli.status(cluster)["jobs"]]
    assert sorted(states) == ["CANCELLED", "CANCELLED", "COMPLETED"]
    backend.wait_empty(20, cluster)


@pytest.mark.slow
def test_waiting_jobs_are_cancelled_at_the_end_of_an_attempt(
    cli: Cli, backend: SlurmBackend, image: Image
) -> None:
    """The next attempt waits for all of them."""
    write_site(cli, backend, containers=image.site())
    one_node = {"cpus_per_job": 16, "directives": ["--nodelist=node1"]}
    first = "import os, time; time.sleep(600 * (os.environ['GPUJOBS_ATTEMPT'] == '1'))"
    profile = {**PROFILE, **one_node, "start_workers": 2, "requeue": 1}
    cluster = cli.submit({**profile, "run": ["python3", "-c", first]})
    until(lambda: cli.status(cluster)["state"] == "RUNNING", patience(60), "run")
    head, *others = cli.status(cluster)["jobs"]
    assert [job["state"] for job in others] == ["PENDING"] * 3
    backend.slurm.command("scancel", "--batch", "--signal=TERM", head["id"])
    until(lambda: cli.status(cluster)["state"] == "DONE", patience(90), "the next attempt")
    states = [job["state"] for job in cli.status(cluster)["jobs"] if job["attempt"] == 1]
    assert states == ["COMPLETED", "CANCELLED"]
    backend.wait_empty(20, cluster)


@pytest.mark.slow
def test_own_modules_are_imported_in_the_image(
    cli: Cli, backend: SlurmBackend, image: Image, home: Path
) -> None:
    """The folder of the program is not the working directory, and mounted nevertheless."""
    write_site(cli, backend, containers=image.site())
    folder = home / "app"
    folder.mkdir()
    image.add_mount_point(folder)
    (folder / "main.py").write_text(MAIN)
    (folder / "helper.py").write_text(HELPER)
    run = ["python3", str(folder / "main.py")]
    cluster = cli.submit({**PROFILE, "run": run}, "--wait")
    assert cli("logs", cluster).stdout == FOUND
