"""Groups on real batch schedulers: a GPU group and a CPU group in one cluster."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ..support.backend import Backend
from ..support.cli import ROOT, Cli
from ..support.jobevents import facts_of
from ..support.processes import until
from .programs import SLEEP
from .test_clusters import connected, state

PIPELINE = """
import json
import dask
from distributed import Client, get_worker

def name(dask_worker):
    return dask_worker.name

def where(n):
    return get_worker().name

if __name__ == "__main__":
    with Client() as client:
        names = sorted(client.run(name).values())
        with dask.annotate(resources={"GPU": 1}):
            on_gpus = [dask.delayed(where)(n) for n in range(12)]
        with dask.annotate(resources={"MEMORY": 4}):
            heavy = [dask.delayed(where)(n) for n in range(12, 20)]
        gpus, heavy = dask.compute(on_gpus, heavy, scheduler=client, optimize_graph=False)
        print(json.dumps({"address": client.scheduler.address, "start": names, "gpu": gpus, "heavy": heavy}))
"""
ATTEMPT = """
import json, os, time
from pathlib import Path

if __name__ == "__main__":
    attempt = os.environ["GPUJOBS_ATTEMPT"]
    text = Path(os.environ["GPUJOBS_FOLDER"], f"workers-{attempt}.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines() if line]
    names = {event["worker"] for event in events if event["event"] == "connected"}
    print(json.dumps([attempt, sorted(names)]), flush=True)
    if attempt == "1":
        time.sleep(600)
"""
PREP = {
    "gpus": 0,
    "queue": "cpu",
    "workers": {"count": 2, "threads": 2, "memory": "1GiB", "resources": {"MEMORY": 4}},
}
GROUPS: dict[str, Any] = {"gpu": {"gpus": 4, "gpus_per_job": 2}, "prep": PREP}


@pytest.fixture(autouse=True)
def cpu_queue(backend: Backend) -> None:
    if "cpu" not in backend.site()["queues"]:
        pytest.skip("no queue for CPU workers is known there")


def groups(**changes: dict[str, Any]) -> dict[str, Any]:
    """Return both groups, with ``changes`` of their keys."""
    return {name: {**group, **changes.get(name, {})} for name, group in GROUPS.items()}


def numbers(cli: Cli, cluster: str) -> dict[str, tuple[int, int]]:
    """Return the connected and the wanted workers of each group."""
    found = cli.status(cluster)["workers"]["groups"]
    return {group["name"]: (group["connected"], group["wanted"]) for group in found}


@pytest.mark.conformance
def test_annotated_tasks_land_where_they_must(cli: Cli, backend: Backend) -> None:
    cli.write("pipeline.py", PIPELINE)
    wanted = groups(gpu={"start_workers": 4}, prep={"start_workers": 2})
    profile = {"name": "pipe", "groups": wanted, "run": ["python", "pipeline.py"]}
    promised = json.loads(cli("plan", str(cli.write("p.yaml", profile)), "--json").stdout)
    done = cli("submit", str(cli.write("p.yaml", profile)), "--wait")
    assert done.returncode == 0, done.stderr
    cluster = done.stdout.strip()
    found = json.loads(cli("logs", cluster).stdout)
    assert found["address"].startswith("tls://")
    assert found["start"] == [
        name.replace(promised["cluster"], cluster) for name in sorted(promised["worker_names"])
    ]
    assert len(found["start"]) == 6
    gpu, prep = ({n for n in found["start"] if f"-{group}-" in n} for group in ("gpu", "prep"))
    assert len(gpu) == 4 and set(found["gpu"]) == gpu
    assert len(prep) == 2 and set(found["heavy"]) == prep
    jobs = cli.status(cluster)["jobs"]
    assert [job["group"] for job in jobs] == ["gpu", "gpu", "prep", "prep"]
    assert [job["number"] for job in jobs] == [0, 1, 2, 3]
    backend.wait_empty(10, cluster)


@pytest.mark.slow
def test_each_step_of_the_example_runs_in_its_group(cli: Cli, backend: Backend) -> None:
    shutil.copytree(ROOT / "examples" / "groups", cli.work, dirs_exist_ok=True)
    words = ["--site", "here", "--wait", "--set", "groups.prep.workers.memory=1GiB"]
    done = cli("submit", "profile.yaml", *words)
    assert done.returncode == 0, done.stderr
    steps = re.findall(
        r"^(\w+): (\d+) on \S+?-(\w+)-\d", cli("logs", done.stdout.strip()).stdout, re.M
    )
    assert sum(int(number) for _, number, _ in steps) == 32
    assert {(step, group) for step, _, group in steps} == {("read", "prep"), ("fit", "gpu")}


@pytest.mark.conformance
@pytest.mark.stub
def test_a_group_is_scaled_alone(cli: Cli, backend: Backend) -> None:
    cli.write("sleep.py", SLEEP)
    profile = {"groups": GROUPS, "head": {"group": "prep"}, "run": ["python", "sleep.py", "500"]}
    cluster = cli.submit(profile)
    connected(cli, cluster, 6)
    assert numbers(cli, cluster) == {"gpu": (4, 4), "prep": (2, 2)}
    head = [job for job in cli.status(cluster)["jobs"] if job["head"]]
    assert [job["group"] for job in head] == ["prep"]
    done = cli("scale", cluster, "gpu=2", "prep=3")
    assert done.returncode == 0 and re.search(r"removed \d jobs? of group gpu", done.stderr)
    until(lambda: numbers(cli, cluster) == {"gpu": (2, 2), "prep": (3, 3)}, 60, every=0.5)
    until(lambda: len(cli.gpus(cluster)) == 2, 60, every=0.5)  # the others have left
    assert cli("scale", cluster, "gpu=4").returncode == 0
    until(lambda: numbers(cli, cluster) == {"gpu": (4, 4), "prep": (3, 3)}, 60, every=0.5)
    text = cli("status", cluster).stdout
    assert "gpu      4 of 4 connected" in text and "prep     3 of 3 connected" in text
    assert len({gpu["uuid"] for gpu in cli.gpus(cluster).values()}) == 4
    newest = max(job["number"] for job in cli.status(cluster)["jobs"] if job["group"] == "gpu")
    log = cli("logs", cluster, "--worker", f"{cluster}-gpu-{newest}-0")
    assert f"job {newest} on" in log.stdout
    refused = cli("scale", cluster, "4")
    assert refused.returncode == 2 and "name those to scale" in refused.stderr
    refused = cli("scale", cluster, "other=4")
    assert refused.returncode == 2 and "it has gpu, prep" in refused.stderr
    assert cli("cancel", cluster).returncode == 0


@pytest.mark.conformance("sge", "pbs")
@pytest.mark.stub
def test_a_refused_group_is_named_and_the_others_are_undone(cli: Cli, backend: Backend) -> None:
    site = cli.site
    site["queues"]["cpu"] |= {"name": "nosuchqueue"}
    path = str(cli.write("wrong.yaml", site))
    done = cli("submit", str(cli.write("p.yaml", {"groups": GROUPS})), "--site", path)
    assert done.returncode == 1
    assert "error: group prep: " in done.stderr
    backend.wait_empty(10)
    assert cli("status", "--all", "--json").stdout.count('"id"') == 0


@pytest.mark.slow
@pytest.mark.stub
def test_a_group_that_waits_is_named_and_holds_no_other_up(cli: Cli, backend: Backend) -> None:
    """The first job that starts is the head, of whichever group; `run` waits for `start_workers`."""
    cli.write("sleep.py", SLEEP)
    held = groups(gpu={"directives": [backend.hold], "start_workers": 1})
    cluster = cli.submit({"groups": held, "run": ["python", "sleep.py", "1"]})
    until(lambda: numbers(cli, cluster)["prep"] == (2, 2), 60, every=0.5)
    found = cli.status(cluster)
    assert "2 gpu waiting" in found["reason"] and found["state"] == "RUNNING"
    assert [job["group"] for job in found["jobs"] if job["head"]] == ["prep"]
    assert cli("logs", cluster).stdout == ""  # it has not started: no worker of group gpu
    assert cli("cancel", cluster).returncode == 0


def test_a_broken_group_ends_the_cluster(cli: Cli, backend: Backend) -> None:
    cli.write("sleep.py", SLEEP)
    broken = groups(prep={"environment": {"python": "/nosuch/python"}})
    profile = {"groups": broken, "head": {"group": "gpu"}, "run": ["python", "sleep.py", "500"]}
    cluster = cli.submit({**profile, "start_workers": 6})
    until(lambda: state(cli, cluster) == "FAILED", 60)
    assert "/nosuch/python: No such file" in cli.status(cluster)["reason"]
    backend.wait_empty(20, cluster)


@pytest.mark.stub
def test_limits_count_all_groups(cli: Cli, backend: Backend) -> None:
    site = {**cli.site, "max_queued_jobs": 3}
    path, profile = str(cli.write("few.yaml", site)), str(cli.write("p.yaml", {"groups": GROUPS}))
    done = cli("submit", profile, "--site", path)
    assert done.returncode == 2
    assert "group prep: queue cpu: 4 jobs; the site allows 3 of one user" in done.stderr


@pytest.mark.slow
@pytest.mark.stub
def test_jobs_wait_for_a_head_of_another_group(cli: Cli, backend: Backend) -> None:
    """They wait as long as it is in the queue, not only for `start_timeout`."""
    cli.write("sleep.py", SLEEP)
    held = groups(gpu={"directives": [backend.hold]})
    profile = {"groups": held, "head": {"group": "gpu"}, "start_timeout": "3s"}
    cluster = cli.submit(profile)
    folder = Path(cli.status(cluster)["folder"])
    events = folder / "jobs"
    until(lambda: sum(facts_of(folder, job).node is not None for job in range(9)) == 2, 60)
    until(lambda: all(_age(path) > 6 for path in events.glob("*.jsonl")), 60)
    found = cli.status(cluster)
    assert [job["state"] for job in found["jobs"]][2:] == ["RUNNING", "RUNNING"]
    assert found["state"] != "FAILED"
    assert cli("cancel", cluster).returncode == 0


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.stub(others=True)
@pytest.mark.parametrize("waiting", [False, True])
def test_the_next_attempt_has_all_groups(cli: Cli, backend: Backend, waiting: bool) -> None:
    """With ``waiting``, no job of one group has started when the first attempt ends."""
    if waiting and backend.name not in ("slurm", "sge"):
        pytest.skip("on the others the next attempt waits for such jobs, and these never start")
    cli.write("attempt.py", ATTEMPT)
    prep = {"directives": [backend.hold]} if waiting else {"start_workers": 2}
    wanted = groups(gpu={"start_workers": 4}, prep=prep)
    cluster = cli.submit({"groups": wanted, "requeue": 1, "run": ["python", "attempt.py"]})

    def attempts() -> list[Any]:
        lines = cli("logs", cluster).stdout.splitlines()
        return [json.loads(line) for line in lines if line.startswith("[")]  # LSF sends SIGINT

    until(attempts, 120, "the first attempt", every=0.5)
    jobs = cli.status(cluster)["jobs"]
    assert [(job["attempt"], job["group"]) for job in jobs] == [
        (attempt, group) for attempt in (1, 2) for group in ("gpu", "gpu", "prep", "prep")
    ]
    connected_now = (0, 2) if waiting else (2, 2)
    assert numbers(cli, cluster) == {"gpu": (4, 4), "prep": connected_now}
    backend.kill_job(next(job["id"] for job in jobs if job["head"]))
    backend.wait_empty(120, cluster)
    found = cli.status(cluster)
    assert (found["state"], found["attempt"], found["attempts"]) == ("DONE", 2, 2), found
    names = [
        ["gpu-0-0", "gpu-0-1", "gpu-1-0", "gpu-1-1"],
        ["gpu-4-0", "gpu-4-1", "gpu-5-0", "gpu-5-1"],
    ]
    if not waiting:
        names = [[*names[0], "prep-2", "prep-3"], [*names[1], "prep-6", "prep-7"]]
    assert attempts() == [
        [number, [f"{cluster}-{name}" for name in own]]
        for number, own in zip("12", names, strict=True)
    ]
    never_started = {job["number"] for job in found["jobs"] if not job["node"]}
    assert never_started == ({2, 3, 6, 7} if waiting else set())
    report = json.loads(cli("report", cluster, "--json").stdout)
    assert report["most_gpus"] == 4
    places = [(job["attempt"], job["group"]) for job in report["jobs"]]
    assert places == [(job["attempt"], job["group"]) for job in jobs]
