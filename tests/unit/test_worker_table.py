"""`gpujobs status ID`, also with `--watch`: the row of each worker."""

from __future__ import annotations

from gpujobs.cli.status import status_text, worker_table
from gpujobs.clusters.connect import WorkerActivity
from gpujobs.clusters.folderstate import FolderState
from gpujobs.clusters.report import ClusterReport, ClusterState, JobPhase, JobReport, WorkerGpu
from gpujobs.schedulers import JobId, JobState

from .report_data import RECORD

GIB = 2**30


def gpu(worker: str, number: int, busy: float | None, used: int | None) -> WorkerGpu:
    return WorkerGpu(worker, "node1", f"GPU-{number}", "H200", 141 * GIB, busy, used)


def test_a_worker_has_a_row_for_each_gpu() -> None:
    job = JobReport(
        0,
        JobId("7", 0),
        JobPhase.RUNNING,
        JobState.RUNNING,
        node="node1",
        workers=("svd-0", "svd-1", "svd-2", "svd-3"),
        connected=("svd-0", "svd-1", "svd-2"),
        gpus=(
            gpu("svd-0", 0, 80, 10 * GIB),
            gpu("svd-0", 1, 40, 6 * GIB),
            gpu("svd-1", 2, None, None),
        ),
    )
    report = ClusterReport(
        RECORD, ClusterState.RUNNING, None, "", None, (job,), FolderState(), connected=3
    )
    busy = WorkerActivity(executing=1, waiting=3, memory=2 * GIB, memory_limit=64 * GIB, cpu=99.6)
    rows = [line.split("  ") for line in worker_table(report, {"svd-0": busy}).splitlines()[1:]]
    assert [[cell.strip() for cell in row if cell] for row in rows] == [
        ["svd-0", "node1", "1", "3", "100 %", "2GiB of 64GiB", "2 x H200", "60 %", "16GiB"],
        ["svd-1", "node1", "-", "-", "-", "-", "H200", "-", "-"],
        ["svd-2", "node1", "-", "-", "-", "-", "-", "-", "-"],
    ]
    shown = status_text(report).partition("UUID")[2].splitlines()[1:]
    assert [line.split()[0] for line in shown] == ["svd-0", "svd-0", "svd-1", "svd-2"]
    assert shown[-1].split() == ["svd-2", "node1", *"-------"]
