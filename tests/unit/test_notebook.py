"""A cluster in a notebook: its rows, and their HTML."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import gpujobs
from gpujobs.clusters.folderstate import FolderState
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.clusters.notebook import SHOWN_JOBS, Card, card_html
from gpujobs.clusters.report import HEAD_JOB, ONLY_GROUP, ClusterReport, JobPhase, group_rows
from gpujobs.injob.folder import Gpu, RegisteredWorker
from gpujobs.injob.jobevents import ExitRecord
from gpujobs.injob.names import HEAD
from gpujobs.schedulers import JobId, JobState, JobStatus

from ..support.folderstate import folder_state, job_trace

NAME = "svd-0000"
HOSTILE = """</td><script>alert(1)</script><img src=x onerror="alert(2)">' onclick='alert(3)"""
RECORD = ClusterRecord(
    id=NAME,
    site="here",
    scheduler="slurm",
    folder="/nosuch",
    created=0.0,
    groups=(
        GroupRecord("gpu", workers=3, workers_per_job=1, gpus_per_job=1),
        GroupRecord("prep", workers=1, workers_per_job=1, gpus_per_job=0),
    ),
    run=(),
    encrypted=True,
    submissions=(
        Submission("6", 0, 1, group=HEAD),
        Submission("7", 1, 5, group="gpu", array=True),
        Submission("8", 6, 1, group="prep"),
    ),
)
WORKER = f"{NAME}-gpu-1"


def report(reason: str = "Priority", record: ClusterRecord = RECORD) -> ClusterReport:
    """Return the report of a cluster whose group `gpu` has jobs in all states."""
    gpu: Gpu = {"node": "node1", "uuid": "GPU-1", "model": "A100", "memory": 2**35}
    folder = folder_state(
        workers={WORKER: RegisteredWorker(address="a", threads=1, gpu=gpu, memory=2**30)},
        seen=frozenset({WORKER}),
        jobs={3: job_trace(left=ExitRecord(3, "node3"), reason=reason)},
        head=0,
    )
    jobs = [JobId("6"), *(JobId("7", n) for n in range(5)), JobId("8")]
    pending = JobStatus(JobState.PENDING, reason=reason)
    answers = [
        JobStatus(JobState.RUNNING),
        JobStatus(JobState.RUNNING),
        JobStatus(JobState.RUNNING),
        JobStatus(JobState.FAILED),
        pending,
        pending,
        JobStatus(JobState.PENDING, starts="12:30"),
    ]
    return judge(record, folder, dict(zip(jobs, answers, strict=True)), now=0.0)


def test_each_group_has_a_row() -> None:
    gpu, prep, head = group_rows(report())
    assert (gpu.name, gpu.connected, gpu.wanted, gpu.percent) == ("gpu", 1, 3, 33)
    assert gpu.jobs == ("1 starting", "1 running")
    assert gpu.waiting == ("2: Priority",)
    assert gpu.failed == ("1: Priority (exit code 3)",)
    assert (gpu.gpus, gpu.memory) == ("1 A100, 32GiB", "1GiB")
    assert (prep.name, prep.connected, prep.wanted, prep.waiting) == (
        "prep",
        0,
        1,
        ("1: starts 12:30",),
    )
    assert (prep.jobs, prep.failed, prep.gpus, prep.memory) == ((), (), "", "")
    assert (head.name, head.jobs, head.wanted) == (HEAD_JOB, ("1 running",), 0)


def test_a_cluster_without_groups_has_one_row() -> None:
    record = replace(
        RECORD,
        groups=(GroupRecord("", workers=0, workers_per_job=1, gpus_per_job=1),),
        submissions=(),
    )
    (row,) = group_rows(judge(record, FolderState(), {}, now=0.0))
    assert (row.name, row.wanted, row.percent, row.waiting) == (ONLY_GROUP, 0, 0, ())


def test_many_reasons_are_cut_short() -> None:
    found = report()
    pending = [job for job in found.jobs if job.group == "gpu" and job.phase is JobPhase.WAITING]
    jobs = [replace(pending[0], number=n, reason=f"reason {n // 2}") for n in range(10)]
    row, *_ = group_rows(replace(found, jobs=tuple(jobs)))
    assert row.waiting == ("2: reason 0", "2: reason 1", "2: reason 2", "4 with other reasons")


def test_jobs_of_other_attempts_do_not_count() -> None:
    found = report()
    later = tuple(replace(job, attempt=2) for job in found.jobs)
    row, *_ = group_rows(replace(found, jobs=(*found.jobs, *later)))
    assert row.waiting == ("2: Priority",)


class Tags(HTMLParser):
    """Collects the names of all elements and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(name for name, _ in attrs)}


def test_html_is_escaped() -> None:
    card = Card(
        report(HOSTILE, replace(RECORD, site=HOSTILE, notes=(HOSTILE,))),
        title=HOSTILE,
        dashboard=f"http://127.0.0.1/{HOSTILE}",
        problem=HOSTILE,
        adaptive=["gpu"],
    )
    page = card_html(card)
    plain = card_html(Card(report(), ""))
    allowed = Tags(plain).found | {"a", "href", "target", "rel"}
    assert Tags(page).found <= allowed and "alert(1)" in page
    assert not {"script", "img", "onerror", "onclick", "src"} & Tags(page).found


def test_the_page_has_the_reasons() -> None:
    page = re.sub(
        r"\s+", " ", card_html(Card(report("Resources"), "GPUSLURMCluster", adaptive=["gpu"]))
    )
    for text in (
        "GPUSLURMCluster",
        NAME,
        "1 / 3",
        "adaptive",
        "2: Resources",
        "1: Resources (exit code 3)",
        "1 A100, 32GiB",
        "WAITING",
    ):
        assert text in page, text
    assert "<script" not in page and "http" not in page


@pytest.mark.parametrize(
    ("link", "linked"),
    [
        ("http://127.0.0.1:8787/status", True), ("https://hub/user/ada/proxy/8787/status", True), ("/user/ada/proxy/8787/status", True),
        ("javascript:alert(1)", False), ("data:text/html,x", False), ("http://[", False),
    ],
)  # fmt: skip
def test_only_links_to_pages_can_be_clicked(link: str, linked: bool) -> None:
    page = card_html(Card(report(), "", dashboard=link))
    assert (f'href="{link}"' in page) is linked
    assert link in page


def test_the_card_says_once_why_a_group_gets_no_more_jobs() -> None:
    groups = (replace(RECORD.groups[0], error="3 jobs in a row ended"), RECORD.groups[1])
    page = card_html(Card(report(record=replace(RECORD, groups=groups)), ""))
    assert page.count("no more jobs: 3 jobs in a row ended") == 1


def test_many_jobs_are_cut_short() -> None:
    found = report()
    old = replace(found.jobs[3], phase=JobPhase.ENDED, in_vain=True)
    jobs = [replace(old, number=10 + n, id=f"old-{n}.") for n in range(SHOWN_JOBS)]
    page = card_html(Card(replace(found, jobs=(*found.jobs, *jobs)), ""))
    assert "and 7 older jobs" in page and "old-49." in page and "old-5." not in page
    assert "Priority" in page  # waiting jobs are listed first


def test_a_handle_is_displayed(home: object) -> None:
    Ledger().add(
        replace(RECORD, finished=True, outcomes={"3": "FAILED"}, reasons={"3": "no memory"})
    )
    page = gpujobs.ClusterHandle(NAME)._repr_html_()
    assert "ClusterHandle" in page and "1: no memory" in page
