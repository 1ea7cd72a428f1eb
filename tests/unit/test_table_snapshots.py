"""Every table of the command line on terminals of 60, 80 and 160 columns, with and without colours.

``GPUJOBS_UPDATE_GOLDEN=1 pytest tests/unit/test_table_snapshots.py`` writes the files of `snapshots`
again, in which ``<red>…</>`` stands for a colour.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest

from gpujobs.cli.cluster_commands import leftover_table
from gpujobs.cli.live import with_labels, with_states
from gpujobs.cli.site_commands import sites_table
from gpujobs.cli.status import status_table, status_text, worker_table
from gpujobs.cli.usage_text import nodes_text, usage_text
from gpujobs.clusters.badnodes import NodeFailure, rows
from gpujobs.clusters.cleanup import Leftover
from gpujobs.clusters.connect import WorkerActivity
from gpujobs.clusters.freequeues import FreeQueue, queues_text
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import Submission
from gpujobs.clusters.report import ClusterReport
from gpujobs.doctor.checks import checks_text, failed, passed, warning
from gpujobs.injob.folder import Ended, EndKind, Gpu, RegisteredWorker
from gpujobs.injob.jobevents import ExitRecord
from gpujobs.schedulers import JobId, JobState, JobStatus

from ..support.folderstate import folder_state, job_trace
from .report_data import GROUPED, RECORD, START, WORKERS, grouped_history, usage

FOLDER = Path(__file__).parent / "snapshots"
COLUMNS = (60, 80, 160)
NOW = START + 5000
DAY = 86400


def worker(number: int) -> RegisteredWorker:
    gpu = Gpu(
        node="gpu001",
        uuid=f"GPU-0242ac12-5bf5-11ee-8c99-{number:012}",
        model="NVIDIA A100-SXM4-80GB",
        memory=80 * 2**30,
        fast=[],
    )
    return RegisteredWorker(
        address="tls://10.0.0.1:40000", threads=8, gpu=gpu, memory=2**36,
        binding={"cpus": "0-7,64-71", "gpu_numa": "0"},
    )  # fmt: skip


def running() -> ClusterReport:
    """A job with workers, and nine that wait."""
    state = folder_state(
        workers={name: worker(number) for number, name in enumerate(WORKERS[:2])},
        seen=frozenset(WORKERS[:2]),
        address="tls://10.0.0.1:8786",
        head=0,
        jobs={0: job_trace("gpu001", began=START + 1000, claim=JobId("7", 0))},
    )
    waits = JobStatus(JobState.PENDING, reason="Resources")
    answers = {JobId("7", number): waits for number in range(10)}
    answers[JobId("7", 0)] = JobStatus(JobState.RUNNING, node="gpu001")
    group = replace(RECORD.groups[0], workers=20)
    submitted = Submission("7", 0, 10, array=True, time=START)
    record = replace(RECORD, groups=(group,), submissions=(submitted,))
    return judge(record, state, answers, now=NOW)


def ended(name: str, kind: EndKind, reason: str, code: int, days: int) -> ClusterReport:
    record = replace(
        RECORD, id=name, site="perlmutter", created=START - days * DAY, submissions=(Submission("8", 0, 1),),
    )  # fmt: skip
    began = record.created + 60
    state = folder_state(
        ended=Ended(kind, code, reason, 0, began + 5400),
        jobs={0: job_trace("gpu002", began=began, left=ExitRecord(code, "gpu002"))},
        head=0,
    )
    return judge(record, state, {JobId("8"): JobStatus(JobState.COMPLETED)}, now=NOW)


def clusters() -> list[ClusterReport]:
    error = "run: ended with exit code 1: ValueError: cannot reshape array of size 12"
    return [
        running(),
        ended("lasso-77aa", EndKind.FAILED, error, 1, 1),
        ended("long-beef", EndKind.WALLTIME, "run: the walltime of 4h is nearly over", 143, 0),
        ended("old-0000", EndKind.DONE, "", 0, 400),
    ]


def workers_text(columns: int | None) -> str:
    activities = {WORKERS[0]: WorkerActivity(2, 14, 3 * 2**30, 64 * 2**30, 187.0)}
    return worker_table(running(), activities, columns)


def failures_text(columns: int | None) -> str:
    reason = "worker svd-0000-1 ended (exit code 1): NVMLError_GpuIsLost: GPU is lost"
    one = NodeFailure(START, "perlmutter", "gpu017", "svd-0000", "7_1", START - 60, reason, True)
    return nodes_text(rows([one], NOW), columns)


def sites_text(columns: int | None) -> str:
    site = {
        "name": "perlmutter", "scheduler": "slurm", "not_verified": 3, "verified": "2026-11-24",
        "path": "/opt/gpujobs/share/gpujobs/site_configs/perlmutter.yaml",
        "description": "NERSC Perlmutter, nodes of four A100 with 40 or 80 GB",
    }  # fmt: skip
    return sites_table([site, {**site, "name": "delta", "verified": None}], columns)


def free_text(columns: int | None) -> str:
    gpu = FreeQueue("gpu", "gpu", "a100", 4, 120, 118, 480, 37, 4, 2368, 2 * DAY)
    return queues_text([gpu, replace(gpu, queue="interactive", start="14:05")], columns)


def leftovers_text(columns: int | None) -> str:
    path = Path("/scratch/project_465000001/someone/.gpujobs")
    found = [
        Leftover(path / "lasso-77aa", NOW - 40 * DAY, 5 * 2**30, 212, clusters()[1].record),
        Leftover(path / "sent" / "new-1", NOW - 3 * 3600, 2**20, 4),
    ]
    return leftover_table(found, columns)


def checks(columns: int | None) -> str:
    return checks_text(
        [
            passed("commands", "sbatch, scancel, squeue"),
            warning("interface", "hsn0 is not on this host", 'scheduler="job" on this host'),
            failed("batch scheduler", "slurm does not answer on this host: squeue failed"),
        ],
        columns,
    )


TABLES: dict[str, Callable[[int | None], str]] = {
    "status": lambda columns: status_table(clusters(), columns),
    "status-of-one": lambda columns: status_text(running(), columns=columns),
    "status-failed": lambda columns: status_text(clusters()[2], columns=columns),
    "workers": workers_text,
    "report": lambda columns: usage_text(usage(grouped_history(), GROUPED), columns),
    "nodes": failures_text,
    "sites-list": sites_text,
    "queues": free_text,
    "clean": leftovers_text,
    "doctor": checks,
}
COLOURS = {click.style("x", fg=name).split("x")[0]: name for name in ("red", "green", "yellow")}
RESET = click.style("x", fg="red").split("x")[1]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: NOW)


def tagged(text: str) -> str:
    """Return text with colours, each as ``<red>…</>``."""
    text = with_states(with_labels(text))
    for code, name in COLOURS.items():
        text = text.replace(code, f"<{name}>")
    return text.replace(RESET, "</>")


@pytest.mark.parametrize("name", TABLES)
def test_a_table_looks_as_its_snapshot(name: str) -> None:
    texts = {columns: TABLES[name](columns) for columns in COLUMNS}
    shown = "\n".join(f"== {columns} ==\n{tagged(text)}\n" for columns, text in texts.items())
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GPUJOBS_UPDATE_GOLDEN"):
        path.write_text(shown)
    assert shown == path.read_text()
    assert "\x1b" not in shown
    for text in texts.values():  # without colours, nothing else differs
        assert re.sub(r"<(red|green|yellow)>|</>", "", tagged(text)) == text


@pytest.mark.parametrize(
    "name", [name for name in TABLES if name not in ("doctor", "status-failed")]
)
def test_the_rows_of_a_table_fit_the_terminal(name: str) -> None:
    """Lines of facts above a table begin with a space, or have a colon; they may be long."""
    for columns in COLUMNS:
        lines = TABLES[name](columns).splitlines()
        tables = [line for line in lines if not line.startswith("  ") and ": " not in line]
        assert max(map(len, tables)) <= columns
