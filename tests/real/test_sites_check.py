"""`gpujobs sites check --live --run`, `sites init` and `queues`, on a real Slurm and Grid Engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ..conftest import nothing_left
from ..support.backend import Backend, SlurmBackend
from ..support.cli import NVML, Cli
from ..support.processes import until
from ..support.sge import SgeBackend

pytestmark = [pytest.mark.conformance, pytest.mark.slurm, pytest.mark.sge]


@pytest.fixture(params=["slurm", "sge"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    found: Backend = request.getfixturevalue(f"{request.param}_backend")
    yield found
    nothing_left(found)


def report(cli: Cli, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = cli("sites", "check", *arguments, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


@pytest.mark.slow  # a draft has the same checks, and its job is one of `doctor --run`
@pytest.mark.conformance
def test_a_correct_site_has_no_findings(cli: Cli, backend: Backend) -> None:
    found = report(cli, "here", "--live", "--run")
    assert found["correct"] and not found["findings"]
    checks = {check["name"]: check for check in found["checks"]}
    command = {"slurm": "sbatch --test-only", "sge": "qsub -w v"}[backend.name]
    assert checks["scripts"]["result"].endswith(f"scripts: {command}")
    assert f"2 queues, {backend.nodes} nodes" in checks["live"]["result"]
    assert checks["job"]["state"] == checks["GPUs"]["state"] == "ok"
    backend.wait_empty(15)


@pytest.mark.slow
def test_a_job_of_cpu_workers_passes_the_check(cli: Cli, backend: Backend) -> None:
    queue = "cpu" if "cpu" in cli.site["queues"] else "main"
    found = report(cli, "here", "--live", "--run", "--set", "gpus=0", "--set", f"queue={queue}")
    assert found["correct"] and not found["findings"]
    assert {check["name"]: check["state"] for check in found["checks"]}["job"] == "ok"
    backend.wait_empty(15)


@pytest.mark.conformance("sge")
def test_each_difference_of_a_site_is_a_finding(cli: Cli, backend: Backend) -> None:
    site = cli.site
    site["queues"]["short"] |= {"max_walltime": "20m", "gpus_per_node": 8, "cpus_per_node": 99}
    site["queues"]["nosuch"] = {"gpus_per_node": 4}
    if backend.name == "sge":
        site["cpu_request"] = ["-q {queue}", "-pe nosuch 1", "-l gqu=1"]
    findings = report(cli, str(cli.write("s.yaml", site)), "--live", code=1)["findings"]
    messages = [finding["message"] for finding in findings]
    assert all(finding["file"].endswith("s.yaml") and finding["line"] for finding in findings)
    expected = ["the walltime in queue short is at most 10m", "its nodes have 4 GPUs",
                "there is no queue nosuch; there are main, short", "refuses the script: "]  # fmt: skip
    if backend.name == "sge":
        expected += ["there is no parallel environment nosuch", "there is no resource gqu"]
    for text in expected:
        assert [message for message in messages if text in message], (text, messages)
    assert backend.queue() == []


@pytest.mark.conformance(slow=("pbs", "torque"))
@pytest.mark.parametrize("backend", ["slurm", "sge", "pbs", "torque"], indirect=True)
def test_a_draft_runs_a_job_unchanged(cli: Cli, backend: Backend) -> None:
    done = cli("sites", "init", "--scheduler", backend.name, "-o", "drafted.yaml")
    assert done.returncode == 0, done.stderr
    assert "no findings" in done.stderr and "to be filled in" in done.stderr
    site = str(cli.work / "drafted.yaml")
    found = report(cli, site, "--live")
    assert found["findings"] == []
    assert [check for check in found["checks"] if check["state"] == "failed"] == []
    variables = {"PYTHONPATH": str(NVML), "DASK_CUDA_TEST_SINGLE_GPU": "1"}
    code = "from distributed import Client; assert len(Client().nthreads()) == 2"
    run = [cli.python, "-c", code]
    profile = cli.write("p.yaml", {"gpus": 2, "start_workers": 2, "env": variables, "run": run})
    done = cli("submit", str(profile), "--site", site, "--wait")
    assert done.returncode == 0, done.stderr
    fake_gpus = [f"--set=env.{name}={value}" for name, value in variables.items()]
    done = cli("doctor", "--run", "--site", site, *fake_gpus, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert checks["job"] == checks["GPUs"] == checks["directory"] == "ok"
    backend.wait_empty(15)


QUOTA = """{
   name         per_user
   description  NONE
   enabled      TRUE
   limit        users {*} queues short to gpu=3
}
"""


@pytest.mark.conformance("sge")
@pytest.mark.parametrize("backend", ["sge"], indirect=True)
def test_a_quota_of_gpus_is_in_the_draft(cli: Cli, backend: SgeBackend) -> None:
    path = cli.write("quota", QUOTA)
    backend.sge.command("qconf", "-Arqs", str(path))
    try:
        done = cli("sites", "init", "--scheduler", "sge")
        site = cli.site
        site["queues"]["short"]["max_gpus_per_user"] = 4
        findings = report(cli, str(cli.write("s.yaml", site)), "--live", code=1)["findings"]
    finally:
        backend.sge.command("qconf", "-drqs", "per_user")
    lines = done.stdout.splitlines()
    assert [line.split(":")[0].strip() for line in lines if "max_gpus_per_user: 3" in line] == [
        "short"
    ]
    assert findings[0]["message"] == "sge: one user has at most 3 GPUs in queue short"
    refused = [finding["message"] for finding in findings[1:]]
    assert all("qsub -w v refuses the script" in message for message in refused), refused


@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_partitions_that_are_not_for_all_are_marked_in_the_draft(
    cli: Cli, backend: SlurmBackend
) -> None:
    def short(setting: str, value: str) -> None:
        backend.slurm.command("scontrol", "update", "PartitionName=short", f"{setting}={value}")

    def drafted() -> str:
        done = cli("sites", "init", "--scheduler", "slurm")
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        short("Hidden", "YES")
        hidden = drafted()
        short("Hidden", "NO")
        short("AllowAccounts", "p1,p2")
        limited = drafted()
    finally:
        short("Hidden", "NO")
        short("AllowAccounts", "ALL")
    assert "hides them: short" in hidden and "\n  short:" not in hidden
    (line,) = [line for line in limited.splitlines() if line.startswith("  short:")]
    assert line.endswith("# only for accounts p1, p2")
    assert "#" not in next(line for line in drafted().splitlines() if line.startswith("  short:"))


@pytest.mark.stub
def test_queues_show_the_free_gpus(cli: Cli, backend: Backend) -> None:
    def free() -> dict[str, Any]:
        done = cli("queues", "--json")
        assert done.returncode == 0, done.stderr
        return {queue["queue"]: queue for queue in json.loads(done.stdout)["queues"]}

    found = free()
    assert found["main"]["free_gpus"] == found["short"]["free_gpus"] == 4 * backend.nodes
    assert found["main"]["most_free_gpus"] == 4
    cluster = cli.submit({"gpus": 3, "gpus_per_job": 3})
    until(lambda: free()["main"]["free_gpus"] == 4 * backend.nodes - 3, 60, "GPUs in use")
    assert free()["main"]["most_free_gpus"] == 4
    cli("cancel", cluster)
    backend.wait_empty(15)


def test_queues_estimate_the_start_of_the_smallest_job(cli: Cli, backend: Backend) -> None:
    done = cli("queues", "--estimate", "--json")
    assert done.returncode == 0, done.stderr
    expected = {"slurm": r"\d{4}-\d\d-\d\dT.*", "sge": "Grid Engine reports no time; there are .*"}
    starts = {queue["queue"]: queue["start"] for queue in json.loads(done.stdout)["queues"]}
    assert starts.keys() == cli.site["queues"].keys()
    assert all(re.fullmatch(expected[backend.name], start) for start in starts.values()), starts
    header, *rows = cli("queues", "--estimate").stdout.splitlines()
    assert header.endswith("START") and len(rows) == len(starts)
    assert all(re.search(f"{expected[backend.name]}$", row) for row in rows), rows
    assert "START" not in cli("queues").stdout
    assert backend.queue() == []


@pytest.fixture
def partitions(backend: SlurmBackend, cli: Cli) -> Iterator[str]:
    """The path of a site with the partitions `left`, of one node, and `right`, of three."""
    nodes = {"left": "node1", "right": "node[2-4]"}
    for name in nodes:
        backend.slurm.command("scontrol", "create", f"PartitionName={name}", f"Nodes={nodes[name]}")
    site = cli.site
    main = site["queues"]["main"]  # of equal queues, a job waits in all
    site["queues"] = {"left": main, "right": {**main, "cpus_per_node": main["cpus_per_node"] // 2}}
    yield str(cli.write("two.yaml", site))
    backend.clean()
    for name in nodes:
        backend.slurm.command("scontrol", "delete", f"PartitionName={name}")


def planned_queue(cli: Cli, profile: str, *arguments: str) -> str:
    done = cli("plan", profile, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["jobs"][0]["queue"])


@pytest.mark.stub
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_the_queue_with_free_gpus_is_preferred(
    cli: Cli, backend: SlurmBackend, partitions: str
) -> None:
    profile = str(cli.write("p.yaml", {"gpus": 4, "gpus_per_job": 4}))
    queue = partial(planned_queue, cli, profile, "--site", partitions)
    assert queue("--soonest") == queue() == "left"
    cluster = cli.submit({"gpus": 4, "gpus_per_job": 4}, "--site", partitions, name="fill.yaml")
    until(lambda: queue("--soonest") == "right", 60, "the other queue")
    assert queue() == "left"
    second = cli.submit({"gpus": 4}, "--site", partitions, "--soonest", name="second.yaml")
    until(lambda: "RUNNING" in cli.status(second)["state"], 60, "the second cluster")
    cli("cancel", cluster, second)
    backend.wait_empty(15)


@pytest.mark.stub
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_the_queue_whose_estimated_start_is_first_is_preferred(
    cli: Cli, backend: SlurmBackend, partitions: str
) -> None:
    """No queue has free GPUs: those of `right` are free again in 10 minutes, of `left` in 2 hours."""
    for name, gpus, walltime in (("left", 4, "2h"), ("right", 12, "10m")):
        profile = {"gpus": gpus, "gpus_per_job": 4, "queue": name, "walltime": walltime}
        cli.submit(profile, "--site", partitions, name=f"{name}.yaml")
    until(lambda: backend.slurm.command("squeue", "-h", "-t", "R").count("\n") == 4, 60, "the jobs")
    wanted = str(cli.write("p.yaml", {"gpus": 4, "gpus_per_job": 4}))
    assert planned_queue(cli, wanted, "--site", partitions) == "left"
    assert planned_queue(cli, wanted, "--site", partitions, "--soonest") == "right"
    planned = cli("plan", wanted, "--site", partitions, "--set", "queue=[left, right]", "--soonest")
    differ = "shape of the jobs, directives (equal: walltime, GPUs of a node, GPU type, charge, environment)"
    assert f"note: queue left is not used, it differs from right: {differ}\n" in planned.stdout
    template = Path(partitions).parent / "templates" / "slurm.sh.j2"  # the script that is estimated
    template.parent.mkdir()
    template.write_text("#!/bin/bash\n#SBATCH --mem=9000G\n")
    assert planned_queue(cli, wanted, "--site", partitions, "--soonest") == "left"


def test_no_job_is_run_if_there_are_findings(cli: Cli, backend: Backend) -> None:
    site = cli.site
    site["queues"]["nosuch"] = {"gpus_per_node": 4}
    found = report(cli, str(cli.write("s.yaml", site)), "--live", "--run", code=1)
    (job,) = [check for check in found["checks"] if check["name"] == "job"]
    assert (job["state"], job["result"]) == ("warning", "not run, because there are findings")
    assert backend.queue() == []
