"""The history of a cluster of two jobs with two GPUs each, of which one is lost and replaced.

Also with groups: one of these jobs, and one of a job without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpujobs.clusters.history import Connection, History, connections, gpu_samples
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Submission
from gpujobs.clusters.targets import Target, Targets
from gpujobs.clusters.usage import UsageReport, make_usage
from gpujobs.injob.folder import Ended, EndKind
from gpujobs.injob.jobevents import ExitRecord
from gpujobs.schedulers import JobId, JobState, JobStatus

from ..support.folderstate import folder_state, job_trace

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
)
TARGETS = Targets((Target(START, 2), Target(START + 60, 4)))
WORKERS = [f"{NAME}-{job}-{gpu}" for job in range(3) for gpu in range(2)]


GROUPED_WORKERS = [worker.replace(NAME, f"{NAME}-fit") for worker in WORKERS]
GPUS = {f"{NAME}-{job}-{gpu}": f"GPU-{'abc'[job]}-{gpu}" for job in range(3) for gpu in range(2)}
PREP = f"{NAME}-prep-3"
GROUPED = replace(
    RECORD,
    groups=(
        replace(RECORD.groups[0], name="fit"),
        GroupRecord("prep", workers=1, workers_per_job=1, gpus_per_job=0, walltime=3600),
    ),
    submissions=(
        *(replace(one, group="fit") for one in RECORD.submissions),
        Submission("9", 3, 1, group="prep", time=START),
    ),
)
"""The same cluster, with the jobs in a group `fit`, and a group `prep` of one CPU worker."""


def event(hours: float, kind: str, worker: str) -> dict[str, Any]:
    found = {"at": START + hours * HOUR, "event": kind, "worker": worker}
    return found | ({"row": {"gpu": {"uuid": GPUS[worker]}}} if kind == "connected" else {})


EVENTS = [
    *(event(0.25, "connected", worker) for worker in WORKERS[:4]),
    event(1.0, "disconnected", WORKERS[2]),
    event(1.25, "disconnected", WORKERS[3]),
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
    past = tuple(connections(EVENTS))
    return History(starts, ends, past, tuple(gpus))


def grouped_history() -> History:
    """The history of `GROUPED`; job 3 runs for the first hour."""
    past = history()

    def name(worker: str) -> str:
        return worker.replace(NAME, f"{NAME}-fit")

    own = Connection(PREP, START, START + HOUR)
    return replace(
        past,
        started={**past.started, 3: START},
        ended={**past.ended, 3: START + HOUR},
        connections=(*(replace(one, worker=name(one.worker)) for one in past.connections), own),
    )


CLOSED = Ended(EndKind.CLOSED, 0, time=START + 3 * HOUR)


def usage(
    past: History | None = None, record: ClusterRecord = RECORD, ended: Ended = CLOSED
) -> UsageReport:
    """Return the report three hours after the submission."""
    folder = folder_state(
        ended=ended,
        seen=frozenset((*WORKERS, *GROUPED_WORKERS, PREP)),
        jobs={
            0: job_trace(left=ExitRecord(0, "node1")),
            1: job_trace(left=ExitRecord(1, "node2"), reason=REASON),
            2: job_trace(left=ExitRecord(0, "node3")),
        },
    )
    done = JobStatus(JobState.COMPLETED)
    answers = {JobId(*job): done for job in (("7", 0), ("8",), ("9",))}
    answers[JobId("7", 1)] = JobStatus(JobState.FAILED)
    report = judge(record, folder, answers, now=START + 3 * HOUR)
    targets = TARGETS if record is RECORD else Targets(tuple(record.first_targets))
    return make_usage(report, past or history(), targets, START + 3 * HOUR)
