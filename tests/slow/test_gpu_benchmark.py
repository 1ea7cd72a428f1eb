"""The benchmark for real GPUs, on a machine that has none: each kind of step finds something."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import unavailable
from ..support import mpi, slurm
from ..support.cli import ROOT
from ..support.processes import patience

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]


def test_every_step_has_a_result(tmp_path: Path) -> None:
    if why := slurm.missing():
        unavailable("slurm", why)
    argv = [sys.executable, ROOT / "benchmarks" / "gpu" / "run.py", "--fake", "--output", tmp_path]
    argv += ["--only", "auto", "reference", "tcp", "tls", "one-gpu-jobs", "mpi", "start-auto"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patience(500), check=False)
    assert done.returncode == 0, done.stderr
    steps = {
        step["name"]: step for step in json.loads((tmp_path / "results.json").read_text())["steps"]
    }
    log = (tmp_path / "log.txt").read_text()[-8000:]
    expected = {
        "auto": "tls",
        "reference": "tcp",
        "tcp": "tcp",
        "tls": "tls",
        "one-gpu-jobs": "tls",
    }
    if not mpi.missing():
        expected["mpi"] = "tls"
    for name, scheme in expected.items():
        step = steps[name]
        assert "error" not in step, f"{name}: {step['error']}\n{log}"
        assert (step["scheme"], step["workers"]) == (scheme, 2)
        assert step["seconds to workers"] > 0
        assert step["transfer"]["GB/s"] > 0
        assert step["transpose"]["seconds"] > 0
        assert step["svd"]["seconds"] > 0
        runs = step["svd"]["runs"]
        assert (
            len(runs) >= 3 or runs[-1]["seconds"] > 3
        )  # on a busy machine, a long one is the last
        if name != "reference":
            assert step["one worker per GPU"]
            assert len({gpu["uuid"] for gpu in step["gpus"].values()}) == 2
    assert "no devices" in steps["isolated-jobs"]["error"]
    table = (tmp_path / "results.md").read_text()
    assert "| auto / reference |" in table
    assert "nan" not in table


def test_copies_are_compared_by_the_cpus_of_their_processes() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    argv = [
        sys.executable,
        ROOT / "benchmarks" / "binding.py",
        "--fake",
        "--rounds=1",
        "--size=80000",
    ]
    env = {**os.environ, "FAKE_NVML_CPUS": f"{cpus[-1]};{cpus[0]}"}
    done = subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=patience(100), check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("|")]
    names = ["CPUs", "---", "all", "near", "dask-cuda", *(["far"] if len(cpus) > 1 else [])]
    assert [row[1].strip() for row in rows] == names
    assert all("GB/s" in cell for row in rows[2:] for cell in row[2:5])
