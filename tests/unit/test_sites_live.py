"""A site file against the report of a batch scheduler: each difference has a line of the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.config.sitefiles import load_site
from gpujobs.doctor.live import Comparison
from gpujobs.schedulers.inventory import LiveNode, LiveQueue, Survey

from .support import SLURM

NODE = LiveNode("n1", "gpu", True, 64, 64, 480 * 2**30, 4, 4, "a100")
SURVEY = Survey((LiveQueue("gpu", 86400),), (NODE, replace(NODE, name="n2")), max_array_size=1000)
TYPED = SLURM.replace("max_nodes: 1", "max_nodes: 1, gpu_type: a100, nodes: 2")


def differences(home: Path, text: str, survey: Survey) -> list[str]:
    (home / "s.yaml").write_text(text)
    found = Comparison(load_site("./s.yaml"), survey).problems()
    return [f"{p.position.line}: {p.message}" for p in found if p.position]


def test_a_file_that_agrees(home: Path) -> None:
    assert differences(home, TYPED + "max_array_size: 1000\n", SURVEY) == []
    lower = TYPED.replace("1d", "1h").replace("480GiB", "400GiB").replace("nodes: 2", "nodes: 1")
    assert differences(home, lower, SURVEY) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("max_walltime: 1d", "max_walltime: 25h"), "5: slurm: the walltime in queue gpu is at most 24h"),
        (("gpus_per_node: 4", "gpus_per_node: 2"), "5: slurm: its nodes have 4 GPUs"),
        (("gpu_type: a100", "gpu_type: h100"), "5: slurm: its nodes have GPUs of type a100, not h100"),
        (("cpus_per_node: 64", "cpus_per_node: 65"), "5: slurm: its nodes have 64 CPUs"),
        (("480GiB", "481GiB"), "5: slurm: its nodes have 480GiB of memory"),
        (("nodes: 2", "nodes: 3"), "5: slurm: it has 2 such nodes"),
        (("defaults:", "max_array_size: 1001\ndefaults:"), "6: slurm: arrays have at most 1000 jobs"),
        (("  gpu:", "  a100:"), "5: slurm: there is no queue a100; there are gpu"),
    ],
)  # fmt: skip
def test_differences(home: Path, change: tuple[str, str], message: str) -> None:
    assert differences(home, TYPED.replace(*change), SURVEY) == [message]


def test_limits_that_the_batch_scheduler_has(home: Path) -> None:
    survey = replace(SURVEY, queues=(LiveQueue("gpu", 86400, max_nodes=1, open=False),))
    found = differences(home, TYPED.replace("max_nodes: 1", "max_nodes: 2"), survey)
    assert found == [
        "5: slurm: jobs in queue gpu have at most 1 node", "5: slurm: queue gpu is closed",
    ]  # fmt: skip


def test_the_gpus_of_one_user(home: Path) -> None:
    text = TYPED.replace("nodes: 2", "nodes: 2, max_gpus_per_user: 8")
    survey = replace(SURVEY, queues=(LiveQueue("gpu", user_gpus={"": 9, "a100": 4}),))
    message = "5: slurm: one user has at most 4 GPUs in queue gpu"
    assert differences(home, text, survey) == [message]
    assert differences(home, text.replace("user: 8", "user: 4"), survey) == []
    assert differences(home, text, SURVEY) == []


def test_names_of_shapes_are_no_queues(home: Path) -> None:
    text = (
        TYPED.replace("  gpu:", "  big:")
        + "request: ['-N {nodes}', '--gres=gpu:{gpus_per_node}']\n"
    )
    assert differences(home, text, SURVEY) == []


def test_gpus_that_are_not_reported_are_not_compared(home: Path) -> None:
    survey = replace(SURVEY, nodes=(replace(NODE, gpus=0, gpu_type=""),))
    assert differences(home, TYPED.replace(", nodes: 2", ""), survey) == []
