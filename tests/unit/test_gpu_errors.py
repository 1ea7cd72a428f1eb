"""What a job that fails says about its GPUs: what NVML knows, and Xid messages of the kernel."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from gpujobs.clusters.badnodes import failures
from gpujobs.injob import gpuerrors
from gpujobs.injob.archive import build
from gpujobs.injob.gpuerrors import gpu_errors, write_gpu_errors, xids
from gpujobs.injob.names import ARCHIVE
from gpujobs.injob.options import GpuErrorsOptions, SuperviseOptions

from ..support.cli import NVML
from .report_data import START
from .test_bad_nodes import failed_job

KERNEL = """\
[   12.000000] nvidia-nvlink: Nvlink Core is being initialized, major device number 511
[  500.100000] NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.
[  966.503020] NVRM: GPU at PCI:0000:01:00: GPU-b850f46d-d5ea-c752-ddf3-c4453e44d3f7
[  966.503025] NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000
[  967.000000] NVRM: Xid (PCI:0000:C1:00): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.
[  967.100000] NVRM: Xid (PCI:0000:c1:00): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.
[  968.000000] NVRM: Xid (PCI:0000:81:00 GPU-I:05): 48, pid=7, name=secret.py, An uncorrectable double bit error (DBE) has been detected
[  969.000000] NVRM: Xid (PCI:0018:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00
[  970.487249] NVRM: Xid (PCI:0000:00:06): 31, pid=506, name=python3, channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS
[12345.678901] NVRM: The NVIDIA probe routine failed for 1 device(s).
"""  # fmt: skip


@pytest.mark.parametrize(
    ("since", "buses", "found"),
    [
        (900.0, {"0000:01:00", "0000:c1:00"}, ["Xid 31 at 0000:01:00", "Xid 63 at 0000:c1:00"]),
        (900.0, {"0000:81:00", "0018:01:00"}, ["Xid 48 at 0000:81:00", "Xid 149 at 0018:01:00"]),
        (900.0, {"0000:41:00"}, []),  # before the job
        (0.0, {"0000:41:00"}, ["Xid 79 at 0000:41:00"]),
        (
            969.5,
            {"0000:00:06"},
            ["Xid 31 at 0000:00:06"],
        ),  # as the driver 580 writes it, on an H100
        (
            968.5,
            set(),
            ["Xid 149 at 0018:01:00", "Xid 31 at 0000:00:06"],
        ),  # a GPU is lost, and its place not known
        (20000.0, set(), []),
    ],
)
def test_messages_of_the_kernel_about_the_gpus_of_the_job_count(
    since: float, buses: set[str], found: list[str]
) -> None:
    assert xids(KERNEL, since, buses) == found
    assert xids("", since, buses) == []


@pytest.fixture
def kernel(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the output of `dmesg`; without it, the user may not read the kernel's messages."""
    monkeypatch.syspath_prepend(str(NVML))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    program = home / "bin" / "dmesg"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\n/bin/cat {home}/messages || {{ echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1; }}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return home / "messages"


def written(kernel: Path, *devices: str) -> str:
    """Return what the process of a job that has run for a minute writes."""
    result = kernel.with_name("result")
    result.touch()
    write_gpu_errors(GpuErrorsOptions(devices=devices, age=60.0, result=str(result)))
    return result.read_text()


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, ""),
        ({"FAKE_NVML_GPUS": "0"}, ""),  # workers report that there is no driver
        ({"FAKE_NVML_ECC": "5,0,1,0"}, "uncorrected ECC errors at 0000:02:00 (1)"),  # not of GPU 0, which is another job's
        ({"FAKE_NVML_REMAPPED": "9/9/1/1,0/2/1/0,3/1/0/1,4/4/0/0"},
         "remapped rows at 0000:01:00 (2, pending); remapped rows at 0000:02:00 (4, failed)"),
        ({"FAKE_NVML_GPUS": "2"},
         "1 of 3 GPUs visible (the job has GPU 2, but NVML shows only these: 0, 1)"),
        ({"FAKE_NVML_LOST": "1,2"}, "1 of 3 GPUs visible (GPU is lost)"),
        ({"FAKE_NVML_MIG": "-,2,1", "FAKE_NVML_ECC": "0,0,0"}, ""),
    ],
)  # fmt: skip
def test_what_nvml_knows_of_broken_gpus_is_said(
    kernel: Path,
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert written(kernel, "1", "2", "3") == said


def test_messages_since_the_start_of_the_job_are_added_to_what_nvml_says(
    kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    kernel.write_text(
        f"[{now - 4000:12.6f}] NVRM: Xid (PCI:0000:01:00): 94, Contained: SM (0x1). RST: No, D-RST: No\n"
        f"[{now - 50:12.6f}] NVRM: Xid (PCI:0000:01:00): 48, pid=7, An uncorrectable double bit error\n"
        f"[{now - 50:12.6f}] NVRM: Xid (PCI:0000:03:00): 79, GPU has fallen off the bus.\n"
    )
    for lost, said in (
        ("", "Xid 48 at 0000:01:00"),
        ("0", "1 of 2 GPUs visible (GPU is lost); Xid 48 at 0000:01:00; Xid 79 at 0000:03:00"),
    ):
        monkeypatch.setenv("FAKE_NVML_LOST", lost)
        assert written(kernel, "0", "1") == said


@pytest.fixture
def job(home: Path) -> SuperviseOptions:
    (home / ARCHIVE).write_bytes(build())
    return SuperviseOptions(folder=str(home), job=0, gpus=4, workers=("dask_cuda.cli",))


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "0 of 2 GPUs visible (the job has GPU 2, "),
        ({}, "2 of 4 GPUs visible (the job has GPU 2, "),  # the batch scheduler lists none
    ],
)
def test_a_process_of_its_own_looks_at_the_gpus_of_the_job(
    job: SuperviseOptions, environ: dict[str, str], said: str
) -> None:
    environ = {"PYTHONPATH": str(NVML), "FAKE_NVML_GPUS": "2", "PATH": os.defpath, **environ}
    assert gpu_errors(job, environ, 60.0).startswith(said)


def test_a_missing_nvml_and_one_that_hangs_say_nothing(
    job: SuperviseOptions, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "pynvml.py").write_text("def nvmlInit():\n    import time\n    time.sleep(600)\n")
    monkeypatch.setattr(gpuerrors, "_TIMEOUT", 1.0)
    assert gpu_errors(job, {"PYTHONPATH": str(home), "PATH": os.defpath}, 60.0) == ""
    (home / "pynvml.py").write_text("raise ImportError('no pynvml')\n")
    assert gpu_errors(job, {"PYTHONPATH": str(home), "PATH": os.defpath}, 60.0) == ""


@pytest.mark.parametrize(
    ("facts", "sure"),
    [
        ("uncorrected ECC errors at 0000:01:00 (1)", True),
        ("remapped rows at 0000:01:00 (2, pending)", True),
        ("2 of 4 GPUs visible (GPU is lost)", True),
        ("Xid 31 at 0000:01:00; Xid 79 at 0000:01:00", True),
        ("Xid 31 at 0000:01:00; Xid 13 at 0000:01:00; Xid 43 at 0000:01:00", None),  # by a program
        ("", None),
    ],
)
def test_errors_of_gpus_blame_the_node_and_those_of_programs_do_not(
    facts: str, sure: bool | None
) -> None:
    found = list(failures(failed_job(f"worker x ended (exit code 1): y ({facts})"), START + 60))
    assert [one.sure for one in found] == ([] if sure is None else [sure])
