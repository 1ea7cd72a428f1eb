"""Profiles on real sites: queue, directives and numbers of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpujobs.errors import InputError

from ..support.each import each
from .support import plan

CASES = [
    ("mahti", {"gpus": 8, "account": "project_2001234"}, 2, [
        "--partition=gpumedium", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=128", "--gres=gpu:a100:4",
        "--account=project_2001234"]),
    ("mahti", {"gpus": 1, "gpu_type": "a100_1g.5gb", "account": "project_2001234"}, 1, [
        "--partition=gpusmall", "--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=32", "--gres=gpu:a100_1g.5gb:1",
        "--account=project_2001234"]),
    ("derecho", {"gpus": 16, "account": "ABCD0001", "walltime": "1h"}, 4, [
        "-q main", "-l select=1:ncpus=64:mpiprocs=1:ompthreads=1:mem=480GB:ngpus=4", "-A ABCD0001"]),
    ("gadi", {"gpus": 1, "account": "ab12", "walltime": "6h"}, 1, [
        "-q gpuvolta", "-l ncpus=12", "-l ngpus=1", "-l mem=90GB", "-P ab12", "-l wd", "-l storage=gdata/ab12+scratch/ab12"]),
    ("gadi", {"gpus": 8, "gpus_per_job": 1, "account": "ab12", "walltime": "6h", "workers": {"memory": "80GiB", "rmm_pool_size": 0.8}},
     8, ["-q gpuvolta", "-l ncpus=12", "-l ngpus=1", "-l mem=90GB", "-P ab12", "-l wd", "-l storage=gdata/ab12+scratch/ab12"]),
    ("dtu", {"gpus": 2, "queue": "gpua100", "walltime": "1h"}, 1, [
        "-q gpua100", "-n 8", '-gpu "num=2:mode=exclusive_process"', '-R "span[ptile=8] rusage[mem=5120MB]"']),
    ("myriad", {"gpus": 2, "gpu_type": "a100", "walltime": "1h"}, 1, [
        "-pe smp 18", "-l gpu=2", "-l mem=4G", "-ac allow=L"]),
    ("sge-per-slot", {"gpus": 8, "walltime": "1h"}, 1, ["-pe smp 8", "-l gpu=1", "-l rmem=26G"]),
]  # fmt: skip


@each(("site", "profile", "jobs", "lines"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)])
def test_examples_have_the_lines_of_the_documentation_of_their_site(
    tmp_path: Path, site: str, profile: dict[str, object], jobs: int, lines: list[str]
) -> None:
    made = plan(tmp_path, profile, site)
    assert list(made.groups[0].lines) == lines
    assert made.groups[0].shape.jobs == jobs
    assert made.gpus == profile["gpus"]


def test_a_site_of_whole_nodes_refuses_parts_of_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"whole nodes of 4 GPUs[\s\S]*hint: gpus: 4 or 8"):
        plan(tmp_path, {"gpus": 6, "account": "ABCD0001", "walltime": "1h"}, "derecho")


@each(
    ("gpus", "per_job", "jobs"),
    [(1, 1, 1), (2, 2, 1), (3, 3, 1), (4, 4, 1), (5, 1, 5), (6, 3, 2), (8, 4, 2), (12, 4, 3)],
)
def test_gpus_per_job_is_the_largest_divisor(
    tmp_path: Path, gpus: int, per_job: int, jobs: int
) -> None:
    made = plan(tmp_path, {"gpus": gpus, "account": "project_1"}, "mahti")
    assert (made.groups[0].shape.gpus, made.groups[0].shape.jobs) == (per_job, jobs)
    assert made.n_workers == gpus == len(set(made.worker_names("svd-0000")))


def test_a_profile_of_three_lines_is_enough(tmp_path: Path) -> None:
    text = 'gpus: 8\nwalltime: 2h\nrun: [python, svd.py, --size, "10000"]\n'
    made = plan(tmp_path, text, "mahti", account="project_1")
    assert made.profile.run == ("python", "svd.py", "--size", "10000")
    assert made.worker_names("svd-0000")[:5] == [
        "svd-0000-0-0",
        "svd-0000-0-1",
        "svd-0000-0-2",
        "svd-0000-0-3",
        "svd-0000-1-0",
    ]


def test_names_of_single_gpu_jobs_have_no_suffix(tmp_path: Path) -> None:
    made = plan(tmp_path, {"gpus": 2, "gpus_per_job": 1, "account": "project_1"}, "mahti")
    assert made.worker_names("svd-0000") == ["svd-0000-0", "svd-0000-1"]
