"""GPU memory in the output of `gpujobs plan`: what dask-cuda does with the values."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.cli.plan_text import memory_text
from gpujobs.planning.workeroptions import words

from ..support.each import each
from .support import SLURM, made_plan


def text_of(home: Path, profile: str) -> str:
    plan = made_plan(home, profile)
    return memory_text(plan, plan.groups[0])


@each(
    ("workers", "text"),
    [
        ("{}", "spills to host above 80% of the GPU's memory"),
        ("{device_memory_limit: 0.5}", "spills to host above 50% of the GPU's memory"),
        ("{device_memory_limit: 12GiB}", "spills to host above 12GiB"),
        ("{device_memory_limit: 0}", "no spilling to host"),
        ("{device_memory_limit: auto}", "no spilling to host"),
        ("{device_memory_limit: default}", "spills to host above 80% of the GPU's memory"),
        ("{device_memory_limit: 0.0}", "no spilling to host"),
        ("{device_memory_limit: 1}", "spills to host above 100% of the GPU's memory"),
        ("{device_memory_limit: 0, rmm_pool_size: 0}", "no spilling to host"),
        ("{rmm_pool_size: 1}", "spills to host above 80% of the GPU's memory, RMM pool of 100% of the GPU's memory"),
        ("{enable_cudf_spill: true}", "cuDF spills by itself"),
        ("{rmm_async: true, rmm_pool_size: 0}", "spills to host above 80% of the GPU's memory, RMM's asynchronous allocator"),
    ],
)  # fmt: skip
def test_plan_describes_dask_cuda(home: Path, workers: str, text: str) -> None:
    assert text_of(home, f"gpus: 1\nworkers: {workers}\n") == text


def test_fractions_of_a_known_gpu_are_shown_as_sizes(home: Path) -> None:
    (home / "s.yaml").write_text(
        SLURM.replace("gpus_per_node: 4", "gpus_per_node: 4, gpu_memory: 80GiB")
    )
    found = text_of(home, "gpus: 1\nworkers: {rmm_pool_size: 0.5}\n")
    assert found == "GPU 80GiB, spills to host above 64GiB (80% of the GPU's memory), RMM pool of 40GiB (50% of the GPU's memory)"  # fmt: skip


@pytest.mark.parametrize(
    ("value", "passed"), [("0", "0"), ("0.0", "0"), ("1", "1.0"), ("0.8", "0.8")]
)
def test_dask_cuda_gets_a_fraction(home: Path, value: str, passed: str) -> None:
    """It takes ``1`` for one byte."""
    profile = made_plan(home, f"gpus: 1\nworkers: {{device_memory_limit: {value}}}\n").profile
    assert f"--device-memory-limit={passed}" in words(profile.workers, gpus=True)


def test_dask_cuda_has_no_limit_for_0() -> None:
    from dask_cuda.utils import parse_device_memory_limit

    assert parse_device_memory_limit("0") is None
