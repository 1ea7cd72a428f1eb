"""Which GPUs a job and a worker have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpujobs.injob.folder import RegisteredWorker
from gpujobs.injob.gpus import (
    fast_network,
    job_devices,
    shared_gpu_message,
    visible_devices,
    with_named_slices,
    worker_gpu,
)
from gpujobs.injob.names import WorkerSize, worker_devices
from gpujobs.injob.workerhost import sees_gpus

from ..support.cli import NVML, ROOT


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
        (
            "scheduler",
            {"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
            [],
        ),  # of Slurm, for a job without GPUs
        ("exclusive", {"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ("scheduler", {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ["0"]),  # as CUDA reads it
        ("exclusive", {}, None),
        ("exclusive", {"CUDA_VISIBLE_DEVICES": "2"}, ["2"]),
        ("variable:SGE_HGR_gpu", {"SGE_HGR_gpu": "0 3"}, ["0", "3"]),
        ("variable:SGE_HGR_gpu", {"SGE_HGR_gpu": "gpu0 gpu3"}, ["0", "3"]),
        ("variable:X", {"X": "cuda:2,cuda:1"}, ["2", "1"]),
        ("variable:X", {"X": "GPU-aa GPU-bb", "CUDA_VISIBLE_DEVICES": "7"}, ["GPU-aa", "GPU-bb"]),
    ],
)
def test_the_visible_devices_are_read_from_each_source(
    source: str, environ: dict[str, str], devices: list[str] | None
) -> None:
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


def test_isolated_gpus_need_no_variable(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_GPUS", "2")
    assert job_devices("scheduler", 2, {}, explicit=False) == ["0", "1"]
    with pytest.raises(LookupError, match="CUDA_VISIBLE_DEVICES is not set"):
        job_devices("scheduler", 1, {}, explicit=False)  # the node has more: which one is it?


def test_a_wrong_number_of_gpus_is_refused_and_a_whole_node_is_not() -> None:
    assert job_devices("exclusive", 2, {}, explicit=False) is None
    assert job_devices("exclusive", 2, {}, explicit=True) == ["0", "1"]
    for listed in ("0,1,2", ""):
        with pytest.raises(LookupError, match=r"2 GPUs were requested, but [03] assigned"):
            job_devices("scheduler", 2, {"CUDA_VISIBLE_DEVICES": listed}, explicit=False)
    with pytest.raises(LookupError, match=r"step has 1 of the job's 2 GPUs \(0\)"):
        job_devices("scheduler", 2, {"CUDA_VISIBLE_DEVICES": "0"}, explicit=False, step=True)


def test_a_job_without_gpus_is_no_job_with_one() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}
    with pytest.raises(LookupError, match=r"1 GPUs were requested, but 0 assigned \(NoDevFiles\)"):
        job_devices("scheduler", 1, environ, explicit=False)


def test_an_index_above_those_of_the_node_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpujobs.injob.gpus._DRIVER", tmp_path)

    def devices() -> list[str] | None:
        return job_devices("scheduler", 2, {"CUDA_VISIBLE_DEVICES": "1,7"}, explicit=False)

    assert devices() == ["1", "7"]  # without a driver nothing is known
    for number in range(2):
        information = tmp_path / "gpus" / f"0000:0{number}:00.0" / "information"
        information.parent.mkdir(parents=True)
        information.write_text("Model: \t\t NVIDIA H100\n")
    with pytest.raises(LookupError, match="there is no GPU 7: the node has 2"):
        devices()
    (tmp_path / "capabilities" / "gpu0" / "mig" / "gi3").mkdir(parents=True)
    assert devices() == ["1", "7"]  # an index counts slices, too


def test_the_file_of_torque_lists_the_gpus_of_the_node(tmp_path: Path) -> None:
    here = os.uname().nodename.split(".")[0]
    path = tmp_path / "gpufile"
    path.write_text(f"other-gpu0\n{here}-gpu2\n{here}-gpu1\n")
    assert visible_devices("file:PBS_GPUFILE", {"PBS_GPUFILE": str(path)}) == ["2", "1"]
    path.write_text("other-gpu3\n")  # a node that Torque has under another name
    assert visible_devices("file:PBS_GPUFILE", {"PBS_GPUFILE": str(path)}) == ["3"]


def test_a_worker_reports_its_gpu_or_why_it_has_none(
    nvml: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_two_workers_on_one_gpu_are_named() -> None:
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


# -- MIG -----------------------------------------------------------------------------------------------------------
def slice_(gpu: int, number: int) -> str:
    return f"MIG-n1-0000-0000-{number:04d}-{gpu:012d}"


def whole(gpu: int) -> str:
    return f"GPU-n1-0000-0000-0000-{gpu:012d}"


OLD_NAME = f"MIG-{whole(0)}/2/0"


@pytest.mark.parametrize(
    ("mig", "seen", "size", "listed", "workers"),
    [
        ("2,2", "", {}, "0,1,2,3", [slice_(0, 0), slice_(0, 1), slice_(1, 0), slice_(1, 1)]),
        ("2,2", "", {}, "3,2", [slice_(1, 1), slice_(1, 0)]),
        ("2,2", "1:0,1:1", {}, "0,1", [slice_(1, 0), slice_(1, 1)]),  # isolated: it counts its own
        ("2,2", "", {}, None, [slice_(0, 0), slice_(0, 1), slice_(1, 0), slice_(1, 1)]),
        ("2,2", "", {"per_gpu": 2}, "0,2", [slice_(0, 0)] * 2 + [slice_(1, 0)] * 2),
        ("-,2,0,-", "", {}, "0,1,2,3", [f"{whole(0)},{whole(3)}", slice_(1, 0), slice_(1, 1), f"{whole(3)},{whole(0)}"]),
        ("-,2,0,-", "", {"gpus": 2}, "0,3", [f"{whole(0)},{whole(3)}"]),
        ("2,2", "", {}, f"{slice_(1, 1)},{slice_(0, 0)}", [slice_(1, 1), slice_(0, 0)]),
        ("2,2", "", {}, f"{OLD_NAME},{slice_(0, 0)}", [OLD_NAME, slice_(0, 0)]),
        ("-,-", "", {}, "0,1", ["0,1", "1,0"]),
    ],
)  # fmt: skip
def test_each_worker_sees_one_slice(
    nvml: None,
    monkeypatch: pytest.MonkeyPatch,
    mig: str,
    seen: str,
    size: dict[str, int],
    listed: str | None,
    workers: list[str],
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("FAKE_NVML_GPUS", str(len(mig.split(","))))
    monkeypatch.setenv("FAKE_NVML_MIG", mig)
    monkeypatch.setenv("FAKE_NVML_SLICES", seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    worker_size = WorkerSize(**size)
    environ: dict[str, str] = {}
    if listed is not None:
        count = len(listed.split(","))
        devices = job_devices("scheduler", count, {"CUDA_VISIBLE_DEVICES": listed}, explicit=True)
        assert devices
        environ = worker_size.environ(worker_size.devices(devices))
    environ |= with_named_slices(environ)
    assert [worker_devices(f"a-0-{n}", environ) for n in range(len(workers))] == [
        {"CUDA_VISIBLE_DEVICES": devices} for devices in workers
    ]
    assert environ["CUDA_VISIBLE_DEVICES"].count(",") == len(workers) - 1
    for devices in workers:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        gpu, first = worker_gpu(), devices.partition(",")[0]
        if not first.isdigit():
            assert gpu["uuid"] == (slice_(0, 1) if first == OLD_NAME else first)
        assert gpu["memory"] == (2 if first.startswith("MIG") else 16) * 2**30
        assert "error" not in gpu


def test_an_index_that_is_no_slice_is_refused(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the GPU whose slices are those of other jobs, nor the slices of the next one."""
    monkeypatch.setenv("FAKE_NVML_MIG", "0,0,0,1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert "the job has GPU 1, but NVML shows" in worker_gpu()["error"]
    assert worker_gpu()["uuid"] is None
    with pytest.raises(LookupError, match=r"the job has GPU 1, but NVML shows .*: MIG-"):
        with_named_slices(dict(os.environ))
    monkeypatch.setenv("FAKE_NVML_MIG", "0,0,0,0")
    with pytest.raises(LookupError, match="only these: none"):
        with_named_slices(dict(os.environ))


@pytest.mark.parametrize("listed", [f"{slice_(0, 0)},{slice_(0, 1)}", "0,1"])
def test_a_worker_cannot_have_two_slices(
    nvml: None, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    monkeypatch.setenv("FAKE_NVML_MIG", "2")
    size = WorkerSize(gpus=2)
    with pytest.raises(LookupError, match="is a MIG slice: gpus_per_worker must be 1"):
        with_named_slices(size.environ(size.devices(listed.split(","))))


def test_dask_cuda_measures_the_memory_of_a_slice(
    nvml: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole GPU, which it would take, a user may not even read it."""
    code = """
import os
from gpujobs.injob.gpus import let_dask_cuda_measure_slices
from dask_cuda import utils, worker_common
from dask_cuda.worker_common import worker_data_function
first, second = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
data = worker_data_function(device_memory_limit=0.5, memory_limit=2**30)
try:
    data(second)
except Exception as error:
    print(type(error).__name__)
let_dask_cuda_measure_slices()
print(data(second)[1]["device_memory_limit"], utils.parse_device_bytes(0.25), utils.get_cpu_affinity(second) != [])
"""
    names = f"{slice_(0, 0)},{slice_(1, 1)}"
    env = {"PYTHONPATH": f"{NVML}:{ROOT}", "FAKE_NVML_MIG": "2,2", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env, "CUDA_VISIBLE_DEVICES": names},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = ["NVMLError_NoPermission", f"{2**30} {2**29} True"]
    assert done.stdout.splitlines() == lines, done.stderr


def test_workers_of_either_command_may_have_gpus() -> None:
    listed = {"CUDA_VISIBLE_DEVICES": "0"}
    assert sees_gpus("dask_cuda.cli", {}) and sees_gpus("dask_cuda.cli", listed)
    assert sees_gpus("distributed.cli.dask_worker", listed)
    assert not sees_gpus("distributed.cli.dask_worker", {})
