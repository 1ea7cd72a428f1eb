"""The judge of submitted clusters: states and phases from record, folder and answers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.clusters.folderstate import FolderState, JobTrace, read_state
from gpujobs.clusters.judge import (
    LOST_TIMEOUT,
    NEVER_STARTED_TIMEOUT,
    UNLISTED_TIMEOUT,
    judge,
    unlisted_since,
)
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Submission
from gpujobs.clusters.report import (
    ClusterReport,
    ClusterState,
    JobPhase,
    cluster_json,
    job_json,
    json_phase,
)
from gpujobs.injob.folder import Ended, EndKind, Gpu, RegisteredWorker
from gpujobs.injob.jobevents import ExitRecord
from gpujobs.injob.transport import Choice
from gpujobs.schedulers import NOT_LISTED, JobId, JobState, JobStatus

from ..support.folderstate import folder_state, job_trace
from ..support.jobevents import write_job

AWAY = JobStatus(JobState.UNKNOWN, reason="the batch scheduler does not respond")
STUCK = JobStatus(JobState.FAILED, "Eqw", "can't chdir", stuck=True)
PENDING = JobStatus(JobState.PENDING, reason="Priority")
RUNNING = JobStatus(JobState.RUNNING, node="node1")
NOW = 1_000_000.0
WORKER = RegisteredWorker(address="tls://h:1", threads=1, gpu=None)
BOTH = {"svd-0000-0-0": WORKER, "svd-0000-0-1": WORKER}
JOB = JobId("7")

RECORD = ClusterRecord(
    id="svd-0000",
    site="here",
    scheduler="sge",
    folder="/nosuch",
    created=NOW,
    groups=(GroupRecord("", workers=2, workers_per_job=2, gpus_per_job=2),),
    run=(),
    encrypted=True,
    submissions=(Submission("7", 0, 1),),
)


def report(
    status: JobStatus | None = None,
    folder: FolderState | None = None,
    record: ClusterRecord = RECORD,
    now: float = NOW,
) -> ClusterReport:
    answers = {} if status is None else {JOB: status}
    return judge(record, folder or FolderState(), answers, now=now)


def states(found: ClusterReport) -> tuple[str, str, str]:
    return found.state.value, found.jobs[0].state.value, json_phase(found.jobs[0])


# -- phases in order -------------------------------------------------------------------------------
def test_the_phase_of_a_job_follows_from_its_state_and_workers() -> None:
    one = folder_state(workers={"svd-0000-0-0": WORKER}, seen=frozenset({"svd-0000-0-0"}))
    both = folder_state(workers=BOTH, seen=BOTH)
    lost = folder_state(seen=BOTH)
    assert states(report()) == ("PENDING", "UNKNOWN", "SUBMITTED")
    assert states(report(PENDING)) == ("PENDING", "PENDING", "PENDING")
    assert report(PENDING).reason == "1 waiting (Priority)"
    assert states(report(RUNNING)) == ("STARTING", "RUNNING", "STARTING")
    assert states(report(RUNNING, one)) == ("RUNNING", "RUNNING", "STARTING")
    assert states(report(RUNNING, both)) == ("RUNNING", "RUNNING", "RUNNING")
    assert states(report(RUNNING, lost))[2] == "LOST"
    assert report(RUNNING, one).connected == 1


def test_a_job_runs_when_its_workers_connect_before_it_is_listed() -> None:
    folder = folder_state(workers=BOTH, seen=BOTH)
    for status in (PENDING, NOT_LISTED, JobStatus(JobState.FAILED), JobStatus(JobState.COMPLETED)):
        found = judge(RECORD, folder, {JOB: status}, now=NOW, connected=BOTH)
        assert states(found)[2] == "RUNNING"
        # Without a connection of its own, a reader knows only a list that may be out of date.
        assert states(report(status, folder))[1] == status.state
    # The job's own exit record is stronger than a list of workers that is a moment old.
    gone = replace(folder, jobs={0: job_trace(left=ExitRecord(0, "node1"))})
    found = judge(RECORD, gone, {JOB: NOT_LISTED}, now=NOW, connected=BOTH)
    assert states(found)[1:] == ("COMPLETED", "ENDED")


def test_a_job_that_writes_is_not_given_up() -> None:
    """However long the batch scheduler has not listed it."""
    record, late = replace(RECORD, unlisted={"0": NOW}), NOW + 3600
    folder = folder_state(jobs={0: job_trace("node1", alive=late - 30)})
    assert states(report(NOT_LISTED, folder, record, late))[1:] == ("UNKNOWN", "STARTING")
    assert states(report(NOT_LISTED, folder, record, late + 60))[1:] == ("FAILED", "FAILED")


def test_signs_of_life_are_logs_and_heartbeats(tmp_path: Path) -> None:
    for name in ("jobs", "head-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "head-1" / "owner").write_text('{"node": "n1", "job": 0}')
    for job in range(3):
        write_job(tmp_path, job, "started")
    for time, name in ((10, "head-1/heartbeat"), (20, "jobs/1.now"), (30, "logs/job-2.log")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time, time))
    jobs = read_state(tmp_path).jobs
    assert {number: job.alive for number, job in jobs.items()} == {0: 10, 1: 20, 2: 30}


def test_a_caller_may_know_the_workers_better() -> None:
    found = judge(RECORD, FolderState(), {JOB: RUNNING}, now=NOW, connected=BOTH)
    assert found.connected == 2 and found.jobs[0].phase is JobPhase.RUNNING


def test_a_requeued_job_waits_again() -> None:
    seen = folder_state(seen=BOTH, jobs={0: job_trace("node1", reason="SIGTERM")})
    # It is stopped as a cancelled one is. Only the next answer of the batch scheduler tells.
    left = ExitRecord(143, "node1")
    stopped = replace(seen, jobs={0: job_trace("node1", reason="SIGTERM", left=left)})
    assert states(report(RUNNING, stopped)) == ("STARTING", "RUNNING", "LOST")
    for folder in (seen, stopped):
        found = report(JobStatus(JobState.PENDING, reason="BeginTime", requeued=True), folder)
        assert states(found) == ("PENDING", "PENDING", "PENDING")
        assert found.jobs[0].reason == "requeued: BeginTime" and found.jobs[0].active
    assert report(PENDING).jobs[0].reason == "Priority"
    assert states(report(JobStatus(JobState.CANCELLED), stopped))[1:] == ("CANCELLED", "ENDED")
    # A cluster that has ended is not started again. A job that was asked to leave is, if the batch
    # scheduler has requeued it instead of cancelling it.
    ended = replace(stopped, ended=Ended(EndKind.CLOSED, 0))
    assert states(report(RUNNING, ended))[1] == "CANCELLED"
    removed = replace(RECORD, removed=(0,))
    assert states(report(RUNNING, stopped, removed))[1:] == ("RUNNING", "LEAVING")
    waits = JobStatus(JobState.PENDING, requeued=True)
    assert states(report(waits, stopped, removed))[1:] == ("PENDING", "LEAVING")
    assert states(report(NOT_LISTED, stopped, removed))[1:] == ("CANCELLED", "ENDED")


def test_a_requeued_head_is_named() -> None:
    ended = Ended(EndKind.CANCELLED, 143, "it received SIGINT", job=0)
    folder = folder_state(ended=ended, jobs={0: job_trace(left=ExitRecord(143, "node1"))}, head=0)
    assert "requeued the head's job" in report(PENDING, folder).reason
    assert report(JobStatus(JobState.CANCELLED), folder).reason == ended.reason
    done = replace(folder, ended=Ended(EndKind.DONE, 0, job=0))
    assert report(PENDING, done).reason == ""  # nothing is lost


def test_a_job_that_was_asked_to_leave_counts_no_more() -> None:
    leaving = replace(RECORD, removed=(0,))
    both = folder_state(workers=BOTH, seen=BOTH)
    found = report(RUNNING, both, leaving)
    assert states(found)[2] == "LEAVING" and found.connected == 0
    started = folder_state(jobs={0: job_trace("node1", left=ExitRecord(143, "node1"))})
    assert states(report(JobStatus(JobState.CANCELLED), started, leaving))[2] == "ENDED"
    assert states(report(JobStatus(JobState.CANCELLED), started))[2] == "FAILED"


def test_a_suspended_job_suspends_its_cluster() -> None:
    suspended = JobStatus(JobState.SUSPENDED)
    both = folder_state(workers=BOTH, seen=BOTH, head=0)
    assert states(report(suspended, both)) == ("SUSPENDED", "SUSPENDED", "SUSPENDED")
    two = replace(
        RECORD,
        groups=RECORD.with_target("", 4),
        submissions=(Submission("7", 0, 1), Submission("8", 1, 1)),
    )
    found = judge(two, both, {JOB: suspended, JobId("8"): PENDING}, now=NOW)
    assert found.reason == "1 waiting (Priority), 1 suspended"


def test_a_head_that_was_lost_with_its_node_has_that_state() -> None:
    # The connections to its dask scheduler, and the list of workers, stay as they were.
    both = folder_state(workers=BOTH, seen=BOTH, head=0)
    node_fail = JobStatus(JobState.NODE_FAIL)
    found = judge(RECORD, both, {JOB: node_fail}, now=NOW, connected=BOTH)
    assert found.jobs[0].state is JobState.NODE_FAIL
    found = judge(RECORD, both, {JOB: NOT_LISTED}, now=NOW, connected=BOTH)
    assert found.jobs[0].state is JobState.RUNNING


@pytest.mark.parametrize(("code", "phase"), [(0, "FAILED"), (1, "FAILED"), (143, "FAILED")])
def test_an_end_before_the_workers_connect_is_a_failed_start(code: int, phase: str) -> None:
    left = folder_state(jobs={0: job_trace(left=ExitRecord(code, "node1"))})
    assert states(report(NOT_LISTED, left))[2] == phase
    # Unless the whole cluster has ended.
    ended = replace(left, ended=Ended(EndKind.DONE, 0, ""))
    assert states(report(NOT_LISTED, ended))[2] == ("ENDED" if code != 1 else "FAILED")


# -- jobs that nothing lists -----------------------------------------------------------------------
def test_a_job_deleted_while_it_waited_is_cancelled() -> None:
    since = unlisted_since(RECORD, FolderState(), {JOB: NOT_LISTED}, NOW)
    assert since == {"0": NOW}
    record = replace(RECORD, unlisted=since)
    soon, late = NOW + NEVER_STARTED_TIMEOUT - 1, NOW + NEVER_STARTED_TIMEOUT + 1
    assert states(report(NOT_LISTED, record=record, now=soon))[1] == "UNKNOWN"
    found = report(NOT_LISTED, record=record, now=late)
    assert states(found) == ("CANCELLED", "CANCELLED", "FAILED")
    assert "it left the queue before it started" in found.reason
    assert unlisted_since(record, FolderState(), {JOB: NOT_LISTED}, late) == since


@pytest.mark.parametrize("trace", [job_trace(claim=JOB), job_trace("node1")], ids=["claim", "node"])
def test_a_job_that_disappeared_after_it_had_started_has_failed(trace: JobTrace) -> None:
    record = replace(RECORD, unlisted={"0": NOW})
    folder = folder_state(jobs={0: trace})
    soon = report(NOT_LISTED, folder, record, NOW + UNLISTED_TIMEOUT - 1)
    assert states(soon)[1] == "UNKNOWN"  # its exit status may still come
    found = report(NOT_LISTED, folder, record, NOW + UNLISTED_TIMEOUT + 1)
    assert states(found)[:2] == ("FAILED", "FAILED")
    assert "without an exit status" in found.reason


def test_a_job_of_a_cluster_that_ended_long_ago_has_ended_as_the_cluster() -> None:
    # The first query after a while: since when the job is unlisted was not recorded before.
    for kind, state in ((EndKind.CANCELLED, "CANCELLED"), (EndKind.FAILED, "FAILED")):
        ended = Ended(kind, 1, "", time=NOW - UNLISTED_TIMEOUT - 1)
        folder = folder_state(ended=ended, jobs={0: job_trace(claim=JOB)})
        record = replace(RECORD, unlisted=unlisted_since(RECORD, folder, {JOB: NOT_LISTED}, NOW))
        found = report(NOT_LISTED, folder, record)
        assert states(found)[:2] == (state, state) and not found.active


@pytest.mark.parametrize("other", [AWAY, RUNNING], ids=["away", "listed again"])
def test_only_answers_count(other: JobStatus) -> None:
    record = replace(RECORD, unlisted={"0": NOW})
    assert unlisted_since(record, FolderState(), {JOB: other}, NOW + 1) == {}


def test_a_process_that_does_not_ask_for_a_job_forgets_nothing_of_it() -> None:
    """One that has seen its end does not ask any more; another one finds that it is not listed."""
    record = replace(RECORD, unlisted={"0": NOW})
    assert unlisted_since(record, FolderState(), {}, NOW + 1) == {"0": NOW}


def test_an_exit_record_needs_no_patience() -> None:
    left = folder_state(jobs={0: job_trace(left=ExitRecord(0, "n1"))}, seen=BOTH)
    assert states(report(NOT_LISTED, left))[1:] == ("COMPLETED", "ENDED")
    assert unlisted_since(RECORD, left, {JOB: NOT_LISTED}, NOW) == {}


def test_a_cancel_that_was_requested_explains_the_state() -> None:
    ended = folder_state(
        ended=Ended(EndKind.CANCELLED, 143, "cancelled by gpujobs"),
        jobs={0: job_trace(claim=JOB)},
    )
    assert states(report(AWAY, ended))[:2] == ("CANCELLED", "UNKNOWN")
    assert states(report(NOT_LISTED, ended))[:2] == ("CANCELLED", "CANCELLED")
    assert states(report(JobStatus(JobState.FAILED), ended))[:2] == ("CANCELLED", "CANCELLED")


def test_a_waiting_job_of_an_ended_cluster_is_gone_at_once() -> None:
    ended = FolderState(ended=Ended(EndKind.DONE, 0, ""))
    assert states(report(NOT_LISTED, ended))[:2] == ("DONE", "CANCELLED")
    started = replace(ended, jobs={0: job_trace(claim=JOB)})
    assert states(report(NOT_LISTED, started))[:2] == ("DONE", "UNKNOWN")


def test_a_failed_job_that_stays_in_the_queue_keeps_its_cluster_active() -> None:
    found = report(STUCK)
    assert states(found)[:2] == ("FAILED", "FAILED") and found.jobs[0].stuck
    assert found.active and found.held == list(found.jobs)


def test_a_held_job_of_an_attempt_is_given_up_when_the_next_one_waits_for_its_end() -> None:
    second = JobId("8")
    submissions = (*RECORD.submissions, Submission("8", first=1, count=1, attempt=2))
    record = replace(RECORD, submissions=submissions, attempts=2)
    waits = {JOB: STUCK, second: JobStatus(JobState.PENDING, "PENDING", "Dependency")}
    found = judge(record, FolderState(), waits, now=NOW)
    assert (found.state, found.attempt) == (ClusterState.PENDING, 2)
    assert [job.number for job in found.held] == [0]


# -- clusters --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (EndKind.DONE, ClusterState.DONE),
        (EndKind.CLOSED, ClusterState.DONE),
        (EndKind.SHUTDOWN, ClusterState.DONE),
        (EndKind.CANCELLED, ClusterState.CANCELLED),
        (EndKind.FAILED, ClusterState.FAILED),
        (EndKind.WALLTIME, ClusterState.FAILED),
    ],
)
def test_the_kind_decides_the_state(kind: EndKind, state: ClusterState) -> None:
    # The reason is prose for people: no state depends on it.
    folder = FolderState(ended=Ended(kind, 3, "cancelled by gpujobs"))
    found = report(RUNNING, folder)
    assert (found.state, found.kind, found.exit_code) == (state, kind, 3)
    assert found.finished and found.active and found.connected == 0


@pytest.mark.parametrize(("code", "state"), [(0, ClusterState.DONE), (143, ClusterState.FAILED)])
def test_a_cluster_without_work_succeeds_unless_its_command_was_stopped(
    code: int, state: ClusterState
) -> None:
    found = report(RUNNING, FolderState(ended=Ended(EndKind.IDLE, code, "without tasks")))
    assert (found.state, found.kind, found.exit_code) == (state, EndKind.IDLE, code)


def test_every_kind_has_a_state() -> None:
    for kind in EndKind:
        assert report(RUNNING, FolderState(ended=Ended(kind, 0, ""))).finished


def test_a_cluster_without_jobs_is_being_submitted() -> None:
    record = replace(RECORD, submissions=(), intent=Submission("", 0, 1))
    assert report(record=record).reason == "being submitted"


def test_a_finished_cluster_keeps_its_outcomes() -> None:
    record = replace(RECORD, finished=True, outcomes={"0": "TIMEOUT"}, reasons={"0": "too long"})
    found = report(record=record)
    assert found.jobs[0].state is JobState.TIMEOUT and found.jobs[0].reason == "too long"


def test_a_number_that_was_submitted_twice_belongs_to_the_job_that_claimed_it() -> None:
    claimed = folder_state(jobs={0: job_trace(claim=JobId("8"))})
    found = judge(RECORD, claimed, {JobId("8"): RUNNING, JOB: PENDING}, now=NOW)
    assert found.jobs[0].id == "8" and found.jobs[0].state is JobState.RUNNING


# -- JSON ------------------------------------------------------------------------------------------
def test_the_json_of_a_job_is_the_same_everywhere() -> None:
    gpu = Gpu(node="node1", uuid="GPU-1", model="A100", memory=2**34)
    with_gpu = RegisteredWorker(address="tls://h:2", threads=1, gpu=gpu)
    workers = {"svd-0000-0-0": with_gpu, "svd-0000-0-1": WORKER}
    folder = folder_state(workers=workers, seen=frozenset(workers), head=0, transport=Choice("tcp"))
    found = report(RUNNING, folder)
    job = job_json(found.jobs[0])
    assert job == {
        "number": 0,
        "attempt": 1,
        "id": "7",
        "phase": "RUNNING",
        "state": "RUNNING",
        "native": "",
        "reason": "",
        "exit_code": None,
        "node": "node1",
        "starts": "",
        "head": True,
        "workers": ["svd-0000-0-0", "svd-0000-0-1"],
        "connected": ["svd-0000-0-0", "svd-0000-0-1"],
        "gpus": [
            {
                "worker": "svd-0000-0-0",
                "node": "node1",
                "uuid": "GPU-1",
                "model": "A100",
                "memory": 2**34,
                "busy": None,
                "used": None,
                "binding": {},
                "mps": False,
            }
        ],
        "log": [],
    }
    cluster = cluster_json(found)
    assert cluster["jobs"] == [job] and cluster["encrypted"] is False
    assert cluster["notes"] == ["not encrypted: dask uses tcp"]


# -- jobs that will not come -----------------------------------------------------------------------
TWO = replace(
    RECORD,
    groups=(GroupRecord("", workers=2, workers_per_job=1, gpus_per_job=1),),
    submissions=(Submission("7", 0, 2, array=True),),
    run=("true",),
)
FIRST, SECOND = "svd-0000-0", "svd-0000-1"


def second(folder: FolderState, status: JobStatus, record: ClusterRecord = TWO) -> ClusterReport:
    """Return the report on a cluster whose head runs and whose second job has ``status``."""
    head = replace(folder.job(0), claim=JobId("7", 0))
    dask = folder.dask.copy()
    if dask.gone.pop(FIRST, None) is not None:
        dask.connected[FIRST] = WORKER
    folder = replace(folder, head=0, jobs={**folder.jobs, 0: head}, dask=dask)
    return judge(record, folder, {JobId("7", 0): RUNNING, JobId("7", 1): status}, now=NOW)


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.UNKNOWN, JobState.COMPLETED])
def test_a_job_whose_workers_stay_away_is_lost(state: JobState) -> None:
    """Torque calls the jobs of a lost node running until the node is back, then completed."""
    status = JobStatus(state, node="node2")
    jobs = {1: job_trace(claim=JobId("7", 1))}
    for seconds, lost in ((LOST_TIMEOUT - 1, False), (LOST_TIMEOUT + 1, True)):
        gone = {SECOND: NOW - seconds}
        folder = folder_state(seen=(FIRST, SECOND), gone=gone, jobs=jobs)
        found = second(folder, status)
        reason = "job 1 ended: node2: its workers have been gone for more than 5 min"
        assert found.gone == ({1: reason} if lost else {})
        assert (found.jobs[1].state is JobState.NODE_FAIL) is lost
        assert found.state is ClusterState.RUNNING
        if lost:  # it is asked for until the batch scheduler, too, knows that it has ended
            assert found.reason == reason and found.jobs[1].in_queue is state.active
        after = replace(folder, ended=Ended(EndKind.DONE, 0, time=NOW), head=0)
        assert (second(after, status).jobs[1].state is JobState.NODE_FAIL) is lost
        owned = second(folder, status, replace(TWO, owner="client"))
        assert owned.jobs[1].state is state  # its owner has a limit of its own
        exited = job_trace(claim=JobId("7", 1), left=ExitRecord(0, "node2"))
        left = replace(folder, jobs={1: exited})
        assert second(left, status).jobs[1].state is not JobState.NODE_FAIL


def test_a_job_that_started_and_brought_no_workers_is_lost() -> None:
    """Counted from when there was a dask scheduler; its own supervisor knows `start_timeout`."""
    limit = LOST_TIMEOUT + TWO.start_timeout
    for began, lost in (({0: 1.0, 1: limit + 1}, False), ({0: limit + 1, 1: limit + 1}, True)):
        jobs = {number: job_trace(began=NOW - seconds) for number, seconds in began.items()}
        jobs[1] = replace(jobs[1], claim=JobId("7", 1))
        folder = folder_state(seen=(FIRST,), jobs=jobs)
        found = second(folder, RUNNING)
        reason = "job 1 ended: node1: it has had no workers for more than 10 min"
        assert found.gone == ({1: reason} if lost else {})


def test_a_job_that_could_not_be_launched_has_failed_with_its_node() -> None:
    found = second(folder_state(seen=(FIRST,)), JobStatus(JobState.COMPLETED, node="node2"))
    assert found.jobs[1].state is JobState.FAILED
    reason = "job 1 did not start: node2: launch failed: its script did not run"
    assert found.gone == {1: reason} and found.reason == reason
    held = JobStatus(JobState.FAILED, reason="launch failed requeued held", stuck=True)
    assert second(FolderState(), held).gone == {
        1: "job 1 did not start: launch failed requeued held"
    }


@pytest.mark.parametrize("status", [PENDING, RUNNING, AWAY, NOT_LISTED])
def test_a_job_that_may_come_is_not_given_up(status: JobStatus) -> None:
    assert not second(folder_state(seen=(FIRST,)), status).gone


def test_a_job_that_was_asked_to_leave_is_not_missed() -> None:
    folder = folder_state(seen=(FIRST,))
    assert not second(folder, JobStatus(JobState.CANCELLED), replace(TWO, removed=(1,))).gone


# -- a cluster of a Python process -----------------------------------------------------------------
OWNED = replace(RECORD, owner="client")
REASON = "svd-0000-0 on node1: the dask scheduler at tls://h:1 is gone"
LEFT = folder_state(
    jobs={0: job_trace(claim=JOB, left=ExitRecord(70, "node1"), reason=REASON)},
    seen=BOTH, address="tls://h:1",
)  # fmt: skip


def test_the_death_of_the_owner_is_the_reason_while_its_jobs_end() -> None:
    folder = folder_state(workers=BOTH, seen=BOTH, address="tls://h:1")
    gone = "process 7 on login1"
    found = judge(OWNED, folder, {JOB: RUNNING}, now=NOW, gone_owner=gone)
    assert (found.state, found.connected) == (ClusterState.FAILED, 0)
    assert found.reason == "the Python process that owned it is gone: process 7 on login1"
    assert found.active
    closed = replace(folder, ended=Ended(EndKind.CLOSED, 0, "closed by its owner", time=NOW))
    assert judge(OWNED, closed, {JOB: RUNNING}, now=NOW, gone_owner=gone).state == "DONE"


def test_the_jobs_of_a_silent_owner_say_why_they_have_ended() -> None:
    """As seen from another host, where the process cannot be looked up."""
    ended = {JOB: JobStatus(JobState.FAILED, node="node1")}
    found = judge(OWNED, LEFT, ended, now=NOW, owner_lives=True)  # its lease is still new
    assert (found.state, found.reason) == (ClusterState.RUNNING, f"no jobs ({REASON})")
    asked = replace(OWNED, removed=(0,))  # by the owner: it lives
    assert judge(asked, LEFT, ended, now=NOW, owner_lives=True).reason == "no jobs"
    found = judge(OWNED, LEFT, ended, now=NOW)
    assert found.state is ClusterState.FAILED
    assert found.reason == f"the Python process that owned it is gone ({REASON})"
    # A folder that others can write tells nothing of the owner.
    found = judge(OWNED, replace(LEFT, refused="others can write it"), ended, now=NOW)
    assert found.state is ClusterState.FAILED
    assert found.reason == f"all its jobs have ended: FAILED ({REASON})"
