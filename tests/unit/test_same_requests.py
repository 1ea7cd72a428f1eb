"""GPUs of different types, or different nodes, whose jobs the batch scheduler cannot tell apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.doctor.sitereport import check_offline

from .support import error_of, made_plan

SITE = """\
description: test
scheduler: {scheduler}
visible_devices: scheduler
queues:
  q-a100x4: {{name: q, gpus_per_node: 4, gpu_type: a100, cpus_per_node: 64, memory_per_node: 480GiB}}
  q-v100x4: {{name: q, gpus_per_node: 4, gpu_type: v100, cpus_per_node: 64, memory_per_node: 480GiB}}
defaults: {{walltime: 1h}}
"""
OF_TYPE = {
    "pbs": ["-q {queue}", "-l select={nodes}:ngpus={gpus_per_node}:gpu_type={gpu_type}"],
    "lsf": ["-q {queue}", "-n {cpus_per_job}", '-gpu "num={gpus_per_node}:gmodel={gpu_type}"'],
}
SAME = "jobs for GPUs of type {} (queue {}) have the same directives"


def site(home: Path, scheduler: str, text: str = "", *changes: tuple[str, str]) -> None:
    own = SITE.format(scheduler=scheduler) + text
    for change in changes:
        assert change[0] in own
        own = own.replace(*change)
    (home / "s.yaml").write_text(own)


def found(home: Path) -> list[str]:
    """Return line and message of the findings of `sites check`."""
    problems = [finding.problem for finding in check_offline("./s.yaml").findings]
    return [f"{p.position.line}: {p.message}" for p in problems if p.position]


def notes(home: Path, gpus: int = 1, **keys: str) -> list[str]:
    """Return the notes of a plan, except that of an idle timeout."""
    made = made_plan(home, {"gpus": gpus, "gpus_per_job": gpus, **keys}).notes
    return [note for note in made if "without tasks" not in note]


@pytest.mark.parametrize("scheduler", ["pbs", "lsf", "torque", "sge"])
def test_the_built_in_request_names_no_type(home: Path, scheduler: str) -> None:
    site(home, scheduler)
    assert found(home) == [
        "5: queue q-a100x4: " + SAME.format("v100", "q-v100x4"),
        "6: queue q-v100x4: " + SAME.format("a100", "q-a100x4"),
    ]
    error = error_of(home, {"gpus": 1, "gpu_type": "v100"})
    assert SAME.format("a100", "q-a100x4") in error and "gpu_type" in error
    assert "s.yaml:6" in error and "name the type in `request`" in error
    (note,) = notes(home)
    assert SAME.format("v100", "q-v100x4") in note


def test_slurms_names_it(home: Path) -> None:
    site(home, "slurm", "", ("visible_devices: scheduler\n", ""))
    assert found(home) == []
    assert notes(home, gpu_type="v100") == []


@pytest.mark.parametrize("scheduler", OF_TYPE)
def test_a_request_with_the_type_is_no_finding(home: Path, scheduler: str) -> None:
    site(home, scheduler, f"request: {OF_TYPE[scheduler]}\n")
    assert found(home) == []
    plan = made_plan(home, {"gpus": 1, "gpu_type": "v100"})
    assert "v100" in " ".join(plan.groups[0].lines) and notes(home, gpu_type="v100") == []


def test_queues_of_one_type_may_have_equal_directives(home: Path) -> None:
    site(home, "pbs", "", ("gpu_type: v100", "gpu_type: a100, max_walltime: 1h"))
    assert found(home) == [] and notes(home, gpu_type="a100") == []


def test_sizes_of_nodes_are_no_request_for_a_type(home: Path) -> None:
    """A job for small nodes also starts on large ones."""
    site(home, "pbs", "", ("v100, cpus_per_node: 64", "v100, cpus_per_node: 32"))
    assert len(found(home)) == 2


def test_queues_that_jobs_do_not_name_are_findings(home: Path) -> None:
    request = "request: ['-l select={nodes}:ngpus={gpus_per_node}']\n"
    site(home, "pbs", request, ("name: q, ", ""))
    assert len(found(home)) == 2
    site(home, "pbs", "", ("name: q, ", ""))
    assert found(home) == [], "the queues have names of their own"


def test_two_names_of_one_type_are_no_finding(home: Path) -> None:
    site(home, "pbs", "", ("gpu_type: v100", "gpu_types: {a100: a100, large: a100}"))
    assert found(home) == [] and notes(home, gpu_type="large") == []


def test_a_reservation_replaces_the_queue(home: Path) -> None:
    """PBS names a reservation as a queue; its nodes are not those of all queues."""
    site(home, "pbs", "", ("name: q, ", ""))
    profile = {"gpus": 1, "gpu_type": "v100", "reservation": "R123"}
    assert "-q R123" in made_plan(home, profile).groups[0].lines


def test_types_of_one_queue_with_equal_directives_are_findings(home: Path) -> None:
    (home / "s.yaml").write_text(
        "description: test\nscheduler: pbs\nvisible_devices: scheduler\ndefaults: {walltime: 1h}\n"
        "queues:\n  q: {gpus_per_node: 4, gpu_types: {a100: A100, v100: V100}}\n"
    )
    assert found(home) == [
        "6: queue q: " + SAME.format("v100", "q"), "6: queue q: " + SAME.format("a100", "q"),
    ]  # fmt: skip
    assert SAME.format("a100", "q") in error_of(home, {"gpus": 1, "gpu_type": "v100"})
    assert notes(home) == [
        "jobs in queue q get GPUs of any type: a100, v100; `gpu_type` chooses one"
    ]


def test_whole_nodes_of_several_sizes_with_equal_directives_are_findings(home: Path) -> None:
    implied = "request: ['-q {queue}', '-l select={nodes}']\n"
    change = ("gpu_type: v100", "gpu_type: a100")
    small = (
        "x4: {name: q, gpus_per_node: 4, gpu_type: a100",
        "x4: {name: q, exclusive: true, gpus_per_node: 4",
    )
    large = (
        "q-v100x4: {name: q, exclusive: true, gpus_per_node: 4",
        "q-x8: {name: q, exclusive: true, gpus_per_node: 8",
    )
    site(home, "pbs", implied, change, small, large)
    assert found(home) == [
        "5: queue q-a100x4: jobs for nodes of 8 GPUs (queue q-x8) have the same directives",
        "6: queue q-x8: jobs for nodes of 4 GPUs (queue q-a100x4) have the same directives",
    ]
    (note,) = notes(home, gpus=4)
    assert "nodes of 8 GPUs" in note
    site(home, "pbs", "", change, small, large)
    assert found(home) == []
