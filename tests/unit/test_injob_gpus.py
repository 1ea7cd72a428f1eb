"""Which GPUs a job and a worker have."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gpujobs.injob.folder import RegisteredWorker
from gpujobs.injob.gpus import (
    fast_network,
    job_devices,
    shared_gpu_message,
    visible_devices,
    worker_gpu,
)

from ..support.cli import NVML


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)


@pytest.mark.parametrize(
    ("source", "environ", "devices"),
    [
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "0,1"}, ["0", "1"]),
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "1,0"}, ["1", "0"]),  # any order, and kept
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}, ["GPU-aa", "GPU-bb"]),
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "MIG-1"}, ["MIG-1"]),
        ("scheduler", {"CUDA_VISIBLE_DEVICES": ""}, []),
        ("exclusive", {}, None),
        ("exclusive", {"CUDA_VISIBLE_DEVICES": "2"}, ["2"]),
        ("variable:SGE_HGR_gpu", {"SGE_HGR_gpu": "0 3"}, ["0", "3"]),
        ("variable:SGE_HGR_gpu", {"SGE_HGR_gpu": "gpu0 gpu3"}, ["0", "3"]),
        ("variable:X", {"X": "cuda:2,cuda:1"}, ["2", "1"]),
        ("variable:X", {"X": "GPU-aa GPU-bb", "CUDA_VISIBLE_DEVICES": "7"}, ["GPU-aa", "GPU-bb"]),
    ],
)
def test_visible_devices(source: str, environ: dict[str, str], devices: list[str] | None) -> None:
    assert visible_devices(source, environ) == devices


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("scheduler", "CUDA_VISIBLE_DEVICES is not set"),
        ("variable:X", r"\$X is empty"),
        ("file:X", r"\$X names no file"),
    ],
)
def test_a_missing_list_is_an_error(source: str, message: str) -> None:
    with pytest.raises(LookupError, match=message):
        visible_devices(source, {})


def test_isolated_gpus_without_a_variable(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_GPUS", "2")
    assert job_devices("scheduler", 2, {}, explicit=False) == ["0", "1"]
    with pytest.raises(LookupError, match="CUDA_VISIBLE_DEVICES is not set"):
        job_devices("scheduler", 1, {}, explicit=False)  # the node has more: which one is it?


def test_whole_nodes_and_wrong_numbers() -> None:
    assert job_devices("exclusive", 2, {}, explicit=False) is None
    assert job_devices("exclusive", 2, {}, explicit=True) == ["0", "1"]
    for listed in ("0,1,2", ""):
        with pytest.raises(LookupError, match=r"2 GPUs were requested, but [03] assigned"):
            job_devices("scheduler", 2, {"CUDA_VISIBLE_DEVICES": listed}, explicit=False)


def test_file_of_torque(tmp_path: Path) -> None:
    here = os.uname().nodename.split(".")[0]
    path = tmp_path / "gpufile"
    path.write_text(f"other-gpu0\n{here}-gpu2\n{here}-gpu1\n")
    assert visible_devices("file:PBS_GPUFILE", {"PBS_GPUFILE": str(path)}) == ["2", "1"]
    path.write_text("other-gpu3\n")  # a node that Torque has under another name
    assert visible_devices("file:PBS_GPUFILE", {"PBS_GPUFILE": str(path)}) == ["3"]


def test_gpu_of_a_worker(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert worker_gpu() == {
        "node": "node7",
        "uuid": "GPU-node7-0000-0000-0000-000000000002",
        "model": "Fake GPU",
        "memory": 16 * 2**30,
        "fast": fast_network(),
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-node7-0000-0000-0000-000000000001,0")
    assert str(worker_gpu()["uuid"]).endswith("1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-nosuch")
    assert worker_gpu()["uuid"] == "MIG-nosuch" and "NotFound" in worker_gpu()["error"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert worker_gpu()["uuid"] is None


def test_an_index_is_no_identity(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job whose GPUs are isolated counts them from 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not in the job's Python
    gpu = worker_gpu()
    assert gpu["uuid"] is None and "pynvml" in gpu["error"]
    workers: dict[str, RegisteredWorker] = {
        name: {"address": "tls://x:1", "threads": 1, "gpu": gpu} for name in ("a-0", "a-1")
    }
    assert shared_gpu_message(workers) == ""


def test_two_workers_on_one_gpu() -> None:
    def worker(node: str, uuid: str | None) -> RegisteredWorker:
        return {"address": "tls://x:1", "threads": 1, "gpu": {"node": node, "uuid": uuid}}

    fine = {
        "a-0": worker("n1", "GPU-1"),
        "a-1": worker("n1", "GPU-2"),
        "a-2": worker("n2", "GPU-1"),
        "c": worker("n1", None),
        "d": worker("n1", None),
    }
    assert shared_gpu_message(fine) == ""
    shared = fine | {"b-0": worker("n1", "GPU-1")}
    assert shared_gpu_message(shared) == "workers a-0 and b-0 share GPU GPU-1 on n1"
