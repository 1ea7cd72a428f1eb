"""A sixth batch scheduler that gpujobs has never heard of: a package with an entry point, a site and a template."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..real.test_clusters import connected
from ..real.test_missing_jobs import ended, started
from ..support.backend import FAKE_GPUS
from ..support.cli import ROOT, Cli, text_of, with_stub
from ..support.processes import patience, until

DEMO = ROOT / "tests" / "fakes" / "demo"
SITE = {
    "description": "a batch scheduler of another package",
    "scheduler": "demo",
    "setup": f"{FAKE_GPUS}\nexport GPUJOBS_QUERY_SECONDS=5",
    "poll": "1s",
    "queues": {"main": {"gpus_per_node": 4, "cpus_per_node": 8, "max_walltime": "1d"}},
    "defaults": {"walltime": "10m"},
}
PROFILE = {"gpus": 2, "gpus_per_job": 1, "workers": {"memory": "512MiB", "threads": 1}}


class Demo(Cli):
    """The command line of a user of the demo batch scheduler."""

    def jobs(self, cluster: str) -> list[str]:
        """Return the lines of a cluster's running jobs."""
        listed = subprocess.check_output(["demo-list"], env=self.env, text=True)
        return [line for line in listed.splitlines() if cluster in line and "RUNNING" in line]


@pytest.fixture
def demo(home: Path, request: pytest.FixtureRequest) -> Iterator[Demo]:
    """The plugin installed in a folder on PYTHONPATH, its commands on PATH, and a site that uses it."""
    packages, sites, jobs = home / "packages", home / "sites", home / "jobs"
    information = packages / "demo_batch-1.0.dist-info"
    for folder in (information, sites, jobs):
        folder.mkdir(parents=True)
    shutil.copy(DEMO / "demo_batch.py", packages)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: demo-batch\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[gpujobs.schedulers]\ndemo = demo_batch\n")
    stub = request.node.get_closest_marker("stub")
    (sites / "here.yaml").write_text(text_of(with_stub(SITE) if stub else SITE))
    (sites / "templates").symlink_to(DEMO / "templates")
    made = Demo(
        home,
        {
            "PATH": f"{DEMO / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(packages),
            "DEMO_FOLDER": str(jobs),
            "GPUJOBS_SITE_PATH": str(sites),
            "GPUJOBS_SITE": "here",
        },
    )
    yield made
    until(lambda: not made.jobs(""), 30, "no job left")


def test_plan_and_render_know_the_plugin(demo: Demo) -> None:
    profile = str(demo.write("p.yaml", PROFILE))
    done = demo("plan", profile)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    script = demo("render", profile).stdout
    assert "#DEMO -a 2\n#DEMO -q main\n#DEMO -g 1\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    schema = json.loads(demo("schema", "site").stdout)
    assert "demo" in schema["properties"]["scheduler"]["enum"]


@pytest.mark.stub
def test_a_cluster_of_a_plugin_is_submitted_and_cancelled(demo: Demo) -> None:
    cluster = demo.submit({**PROFILE, "run": ["sleep", "600"]})
    connected(demo, cluster, 2)
    assert {job["state"] for job in demo.status(cluster)["jobs"]} == {"RUNNING"}
    assert len(demo.jobs(cluster)) == 2
    done = demo("cancel", cluster)
    assert done.returncode == 0, done.stderr
    until(lambda: demo.status(cluster)["state"] == "CANCELLED", 30)
    until(lambda: not demo.jobs(cluster), 30)


@pytest.mark.stub
def test_a_job_of_a_plugin_that_never_starts_ends_the_cluster(demo: Demo) -> None:
    """It is deleted while `run` waits for it; the package is not installed in the jobs."""
    groups = {"first": {"gpus": 1}, "second": {"gpus": 1, "directives": ["-h"]}}
    profile = {**PROFILE, "groups": groups, "start_workers": 2, "run": ["true"]}
    del profile["gpus"]
    cluster = demo.submit(profile)
    started(demo, cluster)
    job = demo.status(cluster)["jobs"][1]
    assert job["phase"] == "PENDING"
    subprocess.run(["demo-cancel", job["id"]], env=demo.env, check=True)
    reason = ended(demo, cluster)["reason"]
    assert reason.startswith("run: cannot start: job 1 did not start: ")
    until(lambda: not demo.jobs(cluster), 30, "the other job gives its GPU back")


def test_a_cluster_of_a_plugin_runs_its_program(demo: Demo) -> None:
    code = "from distributed import Client; print(Client().submit(sum, [1, 2]).result())"
    profile = {**PROFILE, "run": ["python", "-c", code]}
    done = demo("submit", str(demo.write("p.yaml", profile)), "--wait")
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    assert demo("logs", cluster).stdout.splitlines()[-1] == "3"
    assert demo.status(cluster)["state"] == "DONE"


PYTHON = """
import json
import gpujobs

with gpujobs.GPUJobQueueCluster(**json.loads(input())) as cluster:
    cluster.scale(2)
    cluster.wait_for_workers(2)
    with cluster.get_client() as client:
        print(client.submit(sum, [1, 2]).result(), [job["state"] for job in cluster.jobs])
with gpujobs.GPUJobQueueCluster.from_profile("p.yaml", quiet=True) as cluster:
    print(type(cluster).__name__, "#DEMO -q main" in cluster.job_header)
"""


@pytest.mark.slow
def test_the_cluster_class_uses_a_plugin(demo: Demo) -> None:
    demo.write("p.yaml", PROFILE)
    keywords = {
        "gpus_per_job": 1,
        "worker_memory": "512MiB",
        "quiet": True,
        "scheduler_options": {"dashboard_address": ":0"},
    }
    done = subprocess.run(
        [demo.python, "-c", PYTHON],
        env=demo.env,
        cwd=demo.work,
        input=json.dumps(keywords),
        capture_output=True,
        text=True,
        timeout=patience(150),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "3 ['RUNNING', 'RUNNING']",
        "GPUJobQueueCluster True",
    ]


def test_a_missing_template_is_named_with_its_path(demo: Demo) -> None:
    (demo.home / "sites" / "templates").unlink()
    done = demo("render", str(demo.write("p.yaml", PROFILE)))
    assert done.returncode == 2
    assert "there is no template demo.sh.j2" in done.stderr
    assert "hint: write " in done.stderr and "sites/templates/demo.sh.j2" in done.stderr


def test_a_package_ships_its_template_beside_its_module(demo: Demo) -> None:
    (demo.home / "sites" / "templates").unlink()
    shutil.copy(DEMO / "templates" / "demo.sh.j2", demo.home / "packages")
    # It replaces no template of gpujobs.
    (demo.home / "packages" / "body.sh.j2").write_text("# of the package\n")
    script = demo("render", str(demo.write("p.yaml", PROFILE))).stdout
    assert "#DEMO -a 2\n#DEMO -q main\n" in script and "injob.pyz" in script
    own = demo.home / "sites" / "templates"
    own.mkdir()
    text = '{% extends "gpujobs/demo.sh.j2" %}{% block prologue %}# of the site{% endblock %}'
    (own / "demo.sh.j2").write_text(text)
    assert "# of the site" in demo("render", str(demo.write("p.yaml", PROFILE))).stdout


def test_without_the_plugin_its_name_is_unknown(demo: Demo) -> None:
    done = demo("plan", str(demo.write("p.yaml", PROFILE)), PYTHONPATH="")
    assert done.returncode == 2
    known = "local, lsf, pbs, sge, slurm, torque"
    assert f"'demo' is not one of the known batch schedulers ({known})" in done.stderr
