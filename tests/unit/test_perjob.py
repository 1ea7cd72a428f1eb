"""`cpus_per_job` and `memory_per_job`: what one job asks for, and how its workers divide it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .support import error_of, made_plan


def test_a_job_has_the_cpus_and_the_memory_that_it_asks_for(home: Path) -> None:
    plan = made_plan(home, "gpus: 4\ngpus_per_job: 2\ncpus_per_job: 8\nmemory_per_job: 28GB\n")
    assert "--cpus-per-task=8" in plan.groups[0].lines and "--mem=28672M" in plan.groups[0].lines
    assert (plan.groups[0].shape.worker_threads, plan.groups[0].shape.worker_memory) == (
        4,
        14 * 2**30,
    )


def test_the_workers_keys_have_priority(home: Path) -> None:
    keys = {"gpus": 2, "cpus_per_job": 8, "memory_per_job": "28GiB"}
    plan = made_plan(home, json.dumps({**keys, "workers": {"threads": 1, "memory": "4GiB"}}))
    assert (plan.groups[0].shape.worker_threads, plan.groups[0].shape.worker_memory) == (
        1,
        4 * 2**30,
    )
    assert plan.groups[0].shape.cpus == 8


def test_cpu_workers_have_all_of_their_job(home: Path) -> None:
    plan = made_plan(home, "gpus: 0\nqueue: gpu\ncpus_per_job: 8\nmemory_per_job: 28GiB\n")
    shape = plan.groups[0].shape
    assert (shape.cpus, shape.worker_threads, shape.worker_memory) == (8, 8, 28 * 2**30)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ("gpus: 4\ncpus_per_job: 65", "jobs of 65 CPUs on 1 node; its nodes have 64"),
        ("gpus: 0\nqueue: gpu\ncpus_per_job: 65", "jobs of 65 CPUs on 1 node; its nodes have 64"),
        ("gpus: 4\ncpus_per_job: 3", "3 CPUs on a node are too few for its 4 workers"),
        ("gpus: 4\nmemory_per_job: 481GiB", "jobs of 481GiB on 1 node; its nodes have 480GiB"),
        ("gpus: 4\ncpus_per_job: 4\nworkers: {threads: 2}", "the job has 4 CPUs on a node"),
        (
            "gpus: 4\nmemory_per_job: 8GiB\nworkers: {memory: 3GiB}",
            "4 workers of 3GiB; the job has 8GiB on a node",
        ),
    ],
)
def test_more_than_a_node_and_less_than_the_workers_need_are_refused(
    home: Path, keys: str, error: str
) -> None:
    assert error in error_of(home, keys + "\n")


def test_a_number_that_no_line_requests_is_noted(home: Path) -> None:
    text = (
        home / "s.yaml"
    ).read_text() + 'request: ["--partition={queue}", "--gpus={gpus_per_job}"]\n'
    (home / "own.yaml").write_text(text)
    keys = "gpus: 4\ncpus_per_job: 8\nmemory_per_job: 28GiB\nidle_timeout: 0\n"
    notes = made_plan(home, keys, "own.yaml").notes
    assert [note.split(" ")[0] for note in notes] == ["cpus_per_job", "memory_per_job"]
    assert made_plan(home, keys).notes == ()
