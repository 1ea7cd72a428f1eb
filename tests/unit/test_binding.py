"""On which CPUs a worker runs, and what users read about it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.cli.status import status_text
from gpujobs.clusters.judge import judge
from gpujobs.clusters.report import cluster_json
from gpujobs.doctor.checks import CheckState
from gpujobs.doctor.facts import _check_cpus
from gpujobs.injob import gpus
from gpujobs.injob.folder import Binding, RegisteredWorker
from gpujobs.injob.gpus import binding_messages, choose_cpus, near_cpus
from gpujobs.injob.names import WorkerSize
from gpujobs.schedulers import JobId, JobState, JobStatus

from ..support.cli import NVML, ROOT
from ..support.each import each
from ..support.folderstate import folder_state
from .report_data import RECORD

FAR = "no CPU of the job is near the GPU"
LEFT, RIGHT = set(range(8)), set(range(8, 16))
"""CPUs near the first GPUs of a node, and near the last ones."""


@each(
    ("own", "others", "allowed", "threads", "cpus", "reason"),
    [
        ([LEFT], [LEFT, RIGHT], LEFT | RIGHT, 1, LEFT, ""),
        ([LEFT], [LEFT, LEFT], {0, 1, 9}, 1, {0, 1}, ""),
        ([LEFT], [LEFT], RIGHT, 1, RIGHT, FAR),
        ([set()], [set()], RIGHT, 1, RIGHT, FAR),  # NVML leaves out the CPUs of other jobs
        ([LEFT], [LEFT] * 4, {3}, 2, {3}, ""),  # it has no other CPU
        ([RIGHT], [RIGHT] * 4, {3}, 1, {3}, FAR),
        ([RIGHT], [RIGHT], {3, 9}, 1, {9}, ""),
        ([RIGHT], [RIGHT], {3, 4, 9}, 2, {3, 4, 9}, "1 for 2 threads"),
        ([RIGHT], [LEFT, RIGHT, RIGHT], {1, 2, 3, 9}, 1, {1, 2, 3, 9}, "1 for 2 threads"),
        ([LEFT], [LEFT, RIGHT, RIGHT], {1, 2, 3, 9}, 1, {1, 2, 3}, ""),
        ([LEFT], [LEFT], {0, 1, 9}, 8, {0, 1, 9}, "2 for 8 threads"),
        ([LEFT, RIGHT], [LEFT, LEFT], LEFT | RIGHT | {16}, 4, LEFT | RIGHT, ""),  # two GPUs
        ([LEFT, RIGHT], [LEFT], {9, 16}, 1, {9}, ""),
        ([LEFT, RIGHT], [LEFT], {9, 16}, 2, {9, 16}, "1 for 2 threads"),
        ([LEFT], [LEFT, LEFT], LEFT | RIGHT, 4, LEFT, ""),  # two workers on the GPU
        ([LEFT], [LEFT, LEFT], LEFT | RIGHT, 5, LEFT | RIGHT, "8 for 10 threads"),
        ([None], [None, LEFT], LEFT | RIGHT, 1, LEFT | RIGHT, ""),
        ([LEFT, None], [LEFT], LEFT | RIGHT, 1, LEFT | RIGHT, ""),
        ([], [], RIGHT, 1, RIGHT, ""),  # no GPU
    ],
)
def test_cpus_near_the_gpus_are_chosen_within_the_allowed_ones(
    own: list[set[int] | None],
    others: list[set[int] | None],
    allowed: set[int],
    threads: int,
    cpus: set[int],
    reason: str,
) -> None:
    found, why = near_cpus(own, others, allowed, threads)
    assert found == cpus and found <= allowed
    assert why.endswith(reason) and bool(why) is bool(reason)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose CPUs 0-3 and 64-67 are on NUMA node 0, 4-7 and 68-71 on node 1; a core has two."""
    monkeypatch.syspath_prepend(str(NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("FAKE_NVML_CPUS", "0,1,2,3,64,65,66,67;4,5,6,7,68,69,70,71;;no")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(gpus, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sysconf", lambda name: 72)
    for cpu in (*range(8), *range(64, 72)):
        core = cpu % 64
        (tmp_path / f"devices/system/node/node{core // 4}/cpu{cpu}").mkdir(parents=True)
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core},{core + 64}\n")
    for bus, numa in (("0000:02:00.0", 1), ("0000:03:00.0", -1)):
        (tmp_path / "bus/pci/devices" / bus).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / bus / "numa_node").write_text(f"{numa}\n")


MIG, MIG2 = (f"MIG-n1-0000-0000-{number:04d}-000000000001" for number in range(2))


@each(
    ("environ", "allowed", "binding"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, {*range(8), *range(64, 72)}, ("4-7,68-71", 4, "1", "1", "")),
        ({"CUDA_VISIBLE_DEVICES": MIG, "FAKE_NVML_MIG": "-,2"}, {3, 4, 68}, ("4,68", 1, "1", "1", "")),
        ({"CUDA_VISIBLE_DEVICES": "2", "FAKE_NVML_MIG": "-,2"}, {3, 4, 68}, ("4,68", 1, "1", "1", "")),
        (WorkerSize().environ([MIG, MIG2]) | {"CUDA_VISIBLE_DEVICES": MIG, "FAKE_NVML_MIG": "-,2"}, {0, 4}, ("0,4", 2, "0-1", "1", "few CPUs of the job are near the GPU: 1 for 2 threads")),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, {0, 1, 64}, ("0-1,64", 2, "0", "1", FAR)),
        ({"CUDA_VISIBLE_DEVICES": "2"}, {0, 1}, ("0-1", 2, "0", "1", FAR)),  # its CPUs are hidden
        ({"CUDA_VISIBLE_DEVICES": "3"}, {0, 1}, ("0-1", 2, "0", "", "")),  # not known
        ({"CUDA_VISIBLE_DEVICES": "GPU-nosuch"}, {0, 5}, ("0,5", 2, "0-1", "", "")),
        ({}, {0, 64}, ("0,64", 1, "0", "", "")),
        (WorkerSize(gpus=2).environ(["0,1", "0,1"]) | {"CUDA_VISIBLE_DEVICES": "0,1"}, {0, 5, 9}, ("0,5", 2, "0-1", "0-1", "")),
        (WorkerSize(per_gpu=2).environ(["0,1", "0,1", "1,0", "1,0"]) | {"CUDA_VISIBLE_DEVICES": "1,0"}, {0, 4}, ("0,4", 2, "0-1", "1", "few CPUs of the job are near the GPU: 1 for 2 threads")),
    ],
)  # fmt: skip
def test_a_worker_chooses_the_cpus_near_its_own_gpus(
    node: None,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    allowed: set[int],
    binding: tuple[object, ...],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    _, found = choose_cpus(1)
    assert tuple(found.values()) == binding


def test_all_threads_are_bound() -> None:
    """Also those that have begun, such as CUDA's; one that is bound closer stays where it is."""
    code = """
import os, threading
from gpujobs.injob.gpus import bind
first, *_, last = sorted(os.sched_getaffinity(0))
def go(cpus):
    if cpus:
        os.sched_setaffinity(0, cpus)
    begun.wait()
    done.wait()
    found.append(os.sched_getaffinity(0))
begun, done, found = threading.Barrier(3), threading.Event(), []
threads = [threading.Thread(target=go, args=(cpus,)) for cpus in (None, {last})]
for thread in threads:
    thread.start()
begun.wait()
bind({last})
bind({first, last})
done.set()
for thread in threads:
    thread.join()
print(found == [{last}] * 2 and os.sched_getaffinity(0) == {last})
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def worker(node: str, binding: Binding | None) -> RegisteredWorker:
    gpu = {"node": node, "uuid": "GPU-1", "model": "A100", "memory": 1}
    return {"address": "tls://x:1", "threads": 1, "gpu": gpu, "binding": binding}  # type: ignore[typeddict-item]


NEAR: Binding = {"cpus": "0-7", "cores": 8, "nodes": "0", "gpu_nodes": "0", "reason": ""}
FAR_AWAY: Binding = {"cpus": "0-7", "cores": 8, "nodes": "0", "gpu_nodes": "1", "reason": FAR}
ONE_CORE: Binding = {"cpus": "0,64", "cores": 1, "nodes": "0", "gpu_nodes": "0", "reason": ""}


def test_far_and_shared_cores_are_warned_of() -> None:
    fine = {"a-0": worker("n1", NEAR), "a-1": worker("n1", NEAR), "a-2": worker("n1", None)}
    fine |= {"a-3": worker("n1", ONE_CORE), "a-4": worker("n2", ONE_CORE)}
    assert binding_messages(fine) == []
    far = {"b-0": worker("n1", FAR_AWAY), "b-1": worker("n2", FAR_AWAY)}
    message = f"{FAR} (workers on NUMA node 0, their GPUs on 1)"
    assert binding_messages(fine | far) == [message]
    shared = far | {"c-0": worker("n3", ONE_CORE), "c-1": worker("n3", ONE_CORE)}
    assert binding_messages(fine | shared) == [
        message,
        "several workers share one core: CPU 0,64 of n3",
    ]


def test_status_and_doctor_show_the_cpus() -> None:
    long: Binding = {**NEAR, "cpus": "0,2,4,6,8,10,12,14,16"}
    workers = {"svd-0000-0-0": worker("n1", long), "svd-0000-0-1": worker("n1", FAR_AWAY)}
    state = folder_state(workers=workers, seen=frozenset(workers))
    running = {JobId("7", 0): JobStatus(JobState.RUNNING)}
    report = judge(RECORD, state, running, now=RECORD.created + 10)
    table = status_text(report).partition("WORKER ")[2].splitlines()
    assert table[0].endswith("USED  CPUS                   NUMA")
    assert table[1].endswith("  0,2,4,6,8,10,12,14,1…  0")
    assert table[2].endswith("  0-7                    0, GPU 1")
    assert f"\n  note     {FAR} (workers on NUMA node 0, their GPUs on 1)\n" in status_text(report)
    (job, *_) = cluster_json(report)["jobs"]  # type: ignore[misc]
    assert [gpu["binding"] for gpu in job["gpus"]] == [long, FAR_AWAY]  # type: ignore[index]
    check = _check_cpus(report)
    assert check.state is CheckState.WARNING and "enforce-binding" in check.remedy
    assert check.result.startswith(FAR)
    assert "svd-0000-0-1: 0-7 (NUMA node 0, GPU 1)" in check.result
    near = replace(report, folder=folder_state(workers={"a": worker("n1", NEAR)}))
    assert (_check_cpus(near).state, _check_cpus(near).result) == (
        CheckState.OK,
        "a: 0-7 (NUMA node 0)",
    )
