"""The JSON of release 0.2.0: every key is still there, with a value of the same type.

`json_of_release_0.2.0.json` has the keys that this release printed for the same clusters and files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpujobs.cli.main import main
from gpujobs.cli.status import status_json
from gpujobs.cli.usage_text import usage_json
from gpujobs.clusters.judge import judge
from gpujobs.injob.folder import Gpu, RegisteredWorker
from gpujobs.injob.transport import Choice, Measured
from gpujobs.schedulers import JobId, JobState, JobStatus

from ..support.folderstate import folder_state, job_trace
from .report_data import RECORD, START, WORKERS, usage

RELEASED: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[1] / "data" / "json_of_release_0.2.0.json").read_text()
)
SITE = """\
description: a site of a test
scheduler: slurm
contact: me@example.org
source: https://example.org
account: {directive: "--account={account}", required: false}
queues:
  gpu: {gpus_per_node: 4, cpus_per_node: 64, memory_per_node: 256GiB, max_walltime: 24h}
"""
PROFILE = "gpus: 8\ngpus_per_job: 4\nwalltime: 2h\nrun: [python, x.py]\n"
GROUPS = """\
groups:
  fit: {gpus: 4}
  prep: {gpus: 0, queue: gpu, workers: {count: 2}}
walltime: 1h
"""


def keys(value: Any, place: str = "") -> Iterator[str]:
    """Yield the place and the type of all values."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from keys(item, f"{place}.{key}" if place else key)
        return
    yield f"{place}: {type(value).__name__}"
    if isinstance(value, list):
        for item in value:
            yield from keys(item, f"{place}[]")


def printed(folder: Path, *words: str) -> Any:
    (folder / "s.yaml").write_text(SITE)
    done = CliRunner().invoke(main, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def status(folder: Path) -> Any:
    gpu = Gpu(node="node1", uuid="GPU-a-0", model="A100", memory=2**34, fast=[])
    state = folder_state(
        workers={WORKERS[0]: RegisteredWorker(address="tls://h:1", threads=1, gpu=gpu)},
        seen=frozenset(WORKERS[:1]),
        address="tls://h:1",
        head=0,
        jobs={0: job_trace(claim=JobId("7", 0))},
        transport=Choice("tls", "x", {"tls": Measured(1.0, None)}),
    )
    answers = {
        JobId("7", 0): JobStatus(JobState.RUNNING, node="node1"),
        JobId("7", 1): JobStatus(JobState.PENDING, reason="Priority"),
        JobId("8"): JobStatus(JobState.FAILED),
    }
    return json.loads(status_json([judge(RECORD, state, answers, now=START + 60)]))


def plan(folder: Path, profile: str = PROFILE) -> Any:
    (folder / "p.yaml").write_text(profile)
    return printed(folder, "plan", "p.yaml", "--site", "./s.yaml")


COMMANDS: dict[str, Callable[[Path], Any]] = {
    "status": status,
    "report": lambda folder: json.loads(json.dumps(usage_json(usage()))),
    "plan": plan,
    "plan of groups": lambda folder: plan(folder, GROUPS),
    "sites list": lambda folder: printed(folder, "sites", "list"),
}


@pytest.mark.parametrize("command", RELEASED)
def test_the_json_of_the_release_is_unchanged(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GPUJOBS_SITE_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    missing = set(RELEASED[command]).difference(keys(COMMANDS[command](tmp_path)))
    assert not missing
