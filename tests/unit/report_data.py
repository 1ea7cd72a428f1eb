"""The history of a cluster of two jobs with two GPUs each, of which one is lost and replaced."""

from __future__ import annotations

from typing import Any

from gpujobs.clusters.folderstate import ExitRecord, FolderState
from gpujobs.clusters.gpuhours import make_usage
from gpujobs.clusters.history import History, connections, gpu_samples
from gpujobs.clusters.judge import judge
from gpujobs.clusters.records import ClusterRecord, GroupRecord, Submission, Target
from gpujobs.clusters.usage import UsageReport
from gpujobs.injob.folder import Ended, EndKind
from gpujobs.schedulers import JobId, JobState, JobStatus

START = 1_800_000_000.0
HOUR = 3600.0
NAME = "svd-0000"
REASON = "<script>alert(1)</script> & the node failed"

RECORD = ClusterRecord(
    id=NAME,
    site="here",
    scheduler="slurm",
    folder="/nosuch",
    created=START,
    groups=(GroupRecord("", workers=4, workers_per_job=2, gpus_per_job=2, walltime=4 * 3600),),
    run=(),
    encrypted=True,
    submissions=(
        Submission("7", 0, 2, array=True, time=START),
        Submission("8", 2, 1, time=START + 1.5 * HOUR),
    ),
    targets=(Target(START, 2), Target(START + 60, 4)),
)
WORKERS = [f"{NAME}-{job}-{gpu}" for job in range(3) for gpu in range(2)]


def event(hours: float, kind: str, worker: str) -> dict[str, Any]:
    return {"time": START + hours * HOUR, "event": kind, "worker": worker}


EVENTS = [
    *(event(0.25, "connected", worker) for worker in WORKERS[:4]),
    *(event(1.25, "disconnected", worker) for worker in WORKERS[2:4]),
    *(event(2.0, "connected", worker) for worker in WORKERS[4:]),
]


def lines(start: float, end: float, busy: tuple[int, int], uuid: str) -> list[dict[str, Any]]:
    """Return a sample of two GPUs every six minutes."""
    header = {"gpus": [{"uuid": f"GPU-{uuid}-{n}", "memory": 2**34} for n in range(2)]}
    count = round((end - start) * 10)
    return [header] + [
        {
            "time": START + (start + n / 10) * HOUR,
            "seconds": 360.0,
            "busy": list(busy),
            "used": [2**33, 2**32 + n * 2**27],
        }
        for n in range(1, count + 1)
    ]


def history() -> History:
    """Job 0 runs from 0.2 h to 3 h, job 1 from 0.2 h to 1.25 h, job 2 from 1.75 h to 3 h."""
    gpus = [
        *gpu_samples(0, "node1", lines(0.2, 3.0, (100, 50), "a")),
        *gpu_samples(1, "node2", lines(0.2, 1.2, (50, 50), "b")),
        *gpu_samples(2, "node3", lines(1.75, 2.95, (100, 100), "c")),
    ]
    starts = {0: START + 0.2 * HOUR, 1: START + 0.2 * HOUR, 2: START + 1.75 * HOUR}
    ends = {0: START + 3 * HOUR, 1: START + 1.25 * HOUR, 2: START + 3 * HOUR}
    return History(starts, ends, tuple(connections(EVENTS)), tuple(gpus))


def usage(past: History | None = None, record: ClusterRecord = RECORD) -> UsageReport:
    """Return the report three hours after the submission."""
    folder = FolderState(
        ended=Ended(EndKind.CLOSED, 0, time=START + 3 * HOUR),
        seen=frozenset(WORKERS),
        exits={0: ExitRecord(0, "node1"), 1: ExitRecord(1, "node2"), 2: ExitRecord(0, "node3")},
        reasons={1: REASON},
    )
    done = JobStatus(JobState.COMPLETED)
    answers = {JobId("7", 0): done, JobId("7", 1): JobStatus(JobState.FAILED), JobId("8"): done}
    report = judge(record, folder, answers, now=START + 3 * HOUR)
    return make_usage(report, past or history(), START + 3 * HOUR)
