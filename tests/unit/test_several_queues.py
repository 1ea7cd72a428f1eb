"""A list in `queue`, and `--soonest`: one job in all equal queues, where the batch scheduler can do that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.errors import InputError
from gpujobs.planning.plan import make_plan
from gpujobs.planning.render import render

from .support import PYTHON, made_plan, make_spec

NODE = "gpus_per_node: 4, cpus_per_node: 16, memory_per_node: 64GiB"
SITE = f"""\
description: x
scheduler: SCHEDULER
visible_devices: scheduler
queues:
  a: {{{NODE}}}
  b: {{{NODE}, name: bb, max_walltime: 2h}}
  other: {{{NODE.replace("64GiB", "32GiB")}}}
  setup: {{{NODE}, setup: module load x}}
  quick: {{{NODE}, max_walltime: 10m}}
  typed: {{{NODE}, gpu_type: a100}}
  hidden: {{{NODE}, auto: false}}
  cpu: {{cpus_per_node: 16}}
defaults: {{walltime: 1h}}
"""
SAME = "queues a and b are equal: each job starts where it can first"


@pytest.fixture(params=["slurm", "lsf", "pbs"])
def scheduler(home: Path, request: pytest.FixtureRequest) -> str:
    (home / "s.yaml").write_text(SITE.replace("SCHEDULER", request.param))
    return str(request.param)


def test_one_job_waits_in_all_equal_queues(home: Path, scheduler: str) -> None:
    plan = made_plan(home, {"gpus": 2, "queue": ["a", "b"]})
    line = {
        "slurm": "\n#SBATCH --partition=a,bb\n",
        "lsf": '\n#BSUB -q "a bb"\n',
        "pbs": "\n#PBS -q a\n",  # a job has one queue there
    }
    assert line[scheduler] in render(plan, "p-0000")[0].text
    assert (SAME in plan.notes) == (scheduler != "pbs")
    assert plan.groups[0].queue_key == "a"


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            "other",
            "shape of the jobs, directives (equal: walltime, GPUs of a node, GPU type, charge, environment)",
        ),
        (
            "setup",
            "environment (equal: shape of the jobs, walltime, directives, GPUs of a node, GPU type, charge)",
        ),
        ("quick", "walltime 1h is more than its 10m"),
        (
            "typed",
            "directives, GPU type (equal: shape of the jobs, walltime, GPUs of a node, charge, environment)",
        ),
        ("cpu", "it has no GPUs"),
    ],
)
def test_queues_that_differ_are_left_out_with_a_note(home: Path, other: str, reason: str) -> None:
    (home / "s.yaml").write_text(SITE.replace("SCHEDULER", "slurm"))
    plan = made_plan(home, {"gpus": 2, "queue": ["a", other]})
    assert f"queue {other} is not used, it differs from a: {reason}" in plan.notes
    assert plan.groups[0].queue == "a"


def test_the_first_of_the_list_that_fits_is_taken(home: Path) -> None:
    (home / "s.yaml").write_text(SITE.replace("SCHEDULER", "pbs"))
    assert made_plan(home, {"gpus": 2, "queue": ["quick", "b", "a"]}).groups[0].queue == "bb"
    with pytest.raises(InputError, match="no queue `c`; it has a, b"):
        made_plan(home, {"gpus": 2, "queue": ["a", "c"]})


def test_the_order_of_soonest_decides(home: Path, scheduler: str) -> None:
    site = str(home / "s.yaml")
    spec = make_spec(home, {"gpus": 2}, site)
    plan = make_plan(replace(spec, queue_order=("b", "a", "cpu", "other")), python=PYTHON)
    assert plan.groups[0].queue == ("bb" if scheduler == "pbs" else "bb,a")
    assert not any("is not used" in note for note in plan.notes)  # they were not asked for
    listed = make_spec(home, {"gpus": 2, "queue": ["a", "b"]}, site)
    plan = make_plan(replace(listed, queue_order=("b", "a")), python=PYTHON)
    assert plan.groups[0].queue_key == "b"
