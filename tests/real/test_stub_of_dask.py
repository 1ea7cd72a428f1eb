"""The stub of dask (mark ``stub``) leaves the same files as dask in a cluster's folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpujobs.injob.events import events_file

from ..conftest import fresh_folder, make_cli
from ..support.backend import Backend
from ..support.cli import Cli
from ..support.events import dask_workers
from ..support.jobevents import has_left
from ..support.processes import until
from .test_clusters import connected, says

FINISH = """
import pathlib, sys, time
print("here", flush=True)
while not pathlib.Path("finish").exists():
    time.sleep(0.2)
sys.exit("it is bad")
"""


def life_of_a_cluster(cli: Cli, backend: Backend, worker_class: str) -> dict[str, object]:
    """Run a cluster whose second job leaves, until `run` fails; return its files."""
    cli.write("run.py", FINISH)
    profile = {
        "gpus": 4, "gpus_per_job": 2, "start_workers": 4, "run": ["python", "run.py"],
        "workers": {"worker_class": worker_class},
    }  # fmt: skip
    cluster = cli.submit(profile)
    folder = cli.home / ".gpujobs" / cluster
    connected(cli, cluster, 4)
    says(cli, cluster, "here")
    head = json.loads((folder / "head-1" / "owner").read_text())["job"]
    other = 1 - head
    done = cli("scale", cluster, "2")
    assert done.returncode == 0, done.stderr
    until(lambda: has_left(folder, other), 60, "the end of a job")
    until(lambda: len(dask_workers(folder).connected) == 2, 60, "two workers")
    cli.write("finish", "")
    until((folder / "ended").exists, 30, "the end")
    backend.wait_empty(30, cluster)
    return shapes(folder, {f"{cluster}-{head}": "HEAD", f"{cluster}-{other}": "OTHER"}, head)


def read(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def shapes(folder: Path, names: dict[str, str], head: int) -> dict[str, object]:
    """Return what the files have in common whatever dask is: keys, types, events, kind and reason of the end."""

    def renamed(text: str) -> str:
        for name, new in names.items():
            text = text.replace(name, new)
        return text

    def shape(value: object) -> object:
        if isinstance(value, dict):
            return {renamed(key): shape(value[key]) for key in value}
        if isinstance(value, list):
            return sorted(map(str, map(shape, value)))
        return type(value).__name__

    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".now":  # only a job that lives long enough has looked at the clock
            continue
        name = str(path.relative_to(folder))
        for pattern in (
            rf"(jobs/|leave-|job-|usage/)({head}|{1 - head})\b",
            rf"(slurm-)\d+_({head}|{1 - head})\b",
        ):
            name = re.sub(
                pattern, lambda m: f"{m[1]}{'HEAD' if m[2] == str(head) else 'OTHER'}", name
            )
        found[name] = path.is_dir()
        if path.name == "ended":
            found[name] = shape(read(path))
        elif path.match("jobs/*.jsonl"):
            found[name] = [
                shape(json.loads(line)) for line in path.read_text().splitlines() if line
            ]
    ended, workers = read(folder / "ended"), dask_workers(folder)
    found["end"] = ended["kind"], ended["exit_code"], ended["reason"]
    found["workers"] = shape(workers.connected)
    found["uuids"] = len({(worker["gpu"] or {})["uuid"] for worker in workers.connected.values()})
    lines = (folder / events_file(1)).read_text().splitlines()
    events = [json.loads(line) for line in lines if line]
    kinds = ("opened", "connected", "disconnected", "closed")
    found["events"] = sorted(
        (renamed(one.get("worker", "")), one["event"]) for one in events if one["event"] in kinds
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("worker_class", ["cuda", pytest.param("nanny", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["slurm"], indirect=True)
def test_files_are_those_of_dask(backend: Backend, shared_folder: Path, worker_class: str) -> None:
    with_dask, with_stub = (
        life_of_a_cluster(
            make_cli(backend, fresh_folder(shared_folder, "home"), "ordinary", stub=stub),
            backend,
            worker_class,
        )
        for stub in (False, True)
    )
    assert with_stub == with_dask
