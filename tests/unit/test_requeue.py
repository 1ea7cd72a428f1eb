"""Attempts of a cluster: `requeue` of a profile."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.clusters.folderstate import FolderState
from gpujobs.clusters.judge import judge
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.clusters.report import ClusterReport, JobPhase
from gpujobs.clusters.scale import scale
from gpujobs.errors import InputError
from gpujobs.injob.children import ManagedProcess
from gpujobs.injob.events import EventReader, events_file
from gpujobs.injob.folder import Ended, EndKind, Folder
from gpujobs.injob.head import Head
from gpujobs.injob.job import JobExit, clear_for_head, end_attempt
from gpujobs.injob.jobevents import ExitRecord
from gpujobs.injob.names import VERDICT
from gpujobs.injob.options import SuperviseOptions
from gpujobs.injob.supervise import supervise
from gpujobs.injob.workers import JobsWatch
from gpujobs.planning.render import render
from gpujobs.schedulers import JobId, JobState, JobStatus, get_scheduler

from ..support.each import each
from ..support.events import write_events
from ..support.folderstate import folder_state, job_trace
from ..support.processes import patience
from .support import SLURM, error_of, made_plan

RUN = "gpus: 2\ngpus_per_job: 1\nrun: python x.py\nnetwork: {protocol: tcp}\n"


# -- plan ------------------------------------------------------------------------------------------
@each(
    ("name", "ids", "options"),
    [
        ("slurm", ["7", "8"], ["--dependency=afterany:7:8"]),
        ("sge", ["7", "8"], ["-hold_jid", "7,8"]),
        ("pbs", ["7[].s", "8.s"], ["-W", "depend=afterany:7[].s:8.s"]),
        ("torque", ["7[].s", "8.s"], ["-W", "depend=afteranyarray:7[].s,afterany:8.s"]),
        ("lsf", ["7", "8"], ["-w", "ended(7) && ended(8)"]),
        ("local", ["7"], []),
        *((name, [], []) for name in ("slurm", "sge", "pbs", "torque", "lsf")),
    ],
)
def test_jobs_wait_for_others(name: str, ids: list[str], options: list[str]) -> None:
    assert get_scheduler(name)().after_options(ids) == options


def test_each_attempt_has_jobs_of_its_own(home: Path) -> None:
    plan = made_plan(home, RUN + "requeue: 2\nwalltime_exit: 85\n")
    scripts = render(plan, "svd-0000")
    assert [(script.attempt, script.first, script.count) for script in scripts] == [
        (1, 0, 2),
        (2, 2, 2),
        (3, 4, 2),
    ]
    for script in scripts:
        assert f"--attempt={script.attempt} --attempts=3 --walltime-exit=85" in script.text
        assert f"export GPUJOBS_ATTEMPT={script.attempt}\n" in script.text
        assert "#SBATCH --no-requeue\n" in script.text
    assert "the jobs of 3 attempts are submitted at once (`requeue`)" in plan.notes


def test_the_heads_own_job_is_the_last_of_each_attempt(home: Path) -> None:
    (home / "s.yaml").write_text(SLURM.replace("queues:\n", "queues:\n  cpu: {cpus_per_node: 8}\n"))
    scripts = render(made_plan(home, RUN + "requeue: 1\nhead: {cpus: 1}\n"), "svd-0000")
    assert [(script.first, script.count) for script in scripts] == [(2, 1), (0, 2), (5, 1), (3, 2)]


def test_numbers_of_attempts_that_cannot_be_are_refused(home: Path) -> None:
    assert "svd.yaml:5:16: `walltime_exit` asks for another attempt" in error_of(
        home, RUN + "walltime_exit: 85\n"
    )
    assert "`walltime_exit` must be at least 1" in error_of(
        home, RUN + "requeue: 1\nwalltime_exit: 0\n"
    )
    (home / "s.yaml").write_text(f"{SLURM}max_queued_jobs: 6\n")
    message = error_of(home, RUN + "requeue: 3\n")
    assert "svd.yaml:5:10: 2 jobs of 4 attempts; the site allows 6 of one user" in message
    assert "hint: requeue: 2" in message
    assert made_plan(home, RUN + "requeue: 2\n").lifetime.attempts == 3


def test_without_a_batch_scheduler_it_is_ignored(home: Path) -> None:
    plan = made_plan(home, "gpus: 0\nrequeue: 2\nrun: ls\n", "local")
    assert plan.lifetime.attempts == 1
    assert any("`requeue` is ignored: local" in note for note in plan.notes)


# -- in a job --------------------------------------------------------------------------------------
def options(folder: Path, attempt: int, attempts: int, left: int = 5) -> SuperviseOptions:
    for name in ("jobs", "logs"):
        (folder / name).mkdir(exist_ok=True, parents=True)
    started = time.time() - 600 + left
    return SuperviseOptions(
        folder=str(folder),
        job=0,
        started=started,
        walltime=600,
        warning=20,
        attempt=attempt,
        attempts=attempts,
        walltime_exit=85,
        scheduler=("x",),
    )


def command(folder: Path, code: str) -> ManagedProcess:
    text = f"trap '{code}' TERM; touch {folder}/ready; while :; do sleep 0.1; done"
    process = ManagedProcess("run:", ["bash", "-c", text], folder / "log", dict(os.environ))
    while not (folder / "ready").exists():
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("code", "attempt", "attempts", "found"),
    [
        ("exit 0", 1, 1, "done"),
        ("exit 0", 1, 2, "over"),
        ("exit 0", 2, 2, "walltime"),
        ("exit 85", 1, 2, "over"),
        ("exit 85", 2, 2, "walltime"),
        ("exit 143", 1, 2, "over"),
        ("trap - TERM; kill $$", 1, 2, "over"),
        ("exit 143", 2, 2, "walltime"),
        ("exit 3", 1, 2, "failed"),
        ("exit 3", 1, 1, "walltime"),
    ],
)
def test_a_command_that_ends_near_the_walltime_may_begin_the_next_attempt(
    tmp_path: Path, code: str, attempt: int, attempts: int, found: str
) -> None:
    head = Head(options(tmp_path, attempt, attempts))
    process = command(tmp_path, code)
    with pytest.raises(JobExit) as caught:
        head._stop_command(process, "the walltime is nearly over")
    process.kill()
    assert process.wait(patience(20))
    head._exit(caught.value)
    if found == "over":
        assert (tmp_path / f"over-{attempt}").exists() and not (tmp_path / "ended").exists()
        return
    ended = Ended.parse(Folder(str(tmp_path)).read("ended"))
    assert ended.kind.value == found
    assert ("the last of 2 attempts" in ended.reason) is (found == "walltime" and attempts == 2)


@pytest.mark.parametrize(("code", "found"), [(0, "done"), (85, "over"), (3, "failed")])
def test_a_command_that_ends_by_itself_begins_the_next_attempt_only_with_its_exit_code(
    tmp_path: Path, code: int, found: str
) -> None:
    head = Head(options(tmp_path, 1, 2, left=500))
    argv = [sys.executable, "-c", f"raise SystemExit({code})"]
    process = ManagedProcess("run:", argv, tmp_path / "log", dict(os.environ))
    scheduler = ManagedProcess("it", ["true"], tmp_path / "log", dict(os.environ))
    assert process.wait(patience(20)) and scheduler.wait(patience(20))
    with pytest.raises(JobExit) as caught:
        head._command_ended(process, scheduler)
    head._exit(caught.value)
    assert (tmp_path / "over-1").exists() is (found == "over")
    if found != "over":
        assert Folder(str(tmp_path)).read("ended")["kind"] == found


def test_nothing_follows_a_cancel(tmp_path: Path) -> None:
    head = Head(options(tmp_path, 1, 2))
    (tmp_path / "ended").write_text(Ended(EndKind.CANCELLED, 143, "cancelled by gpujobs").json())
    head._exit(JobExit(143, EndKind.WALLTIME, "stopped", again=True))
    assert not (tmp_path / "over-1").exists()


def test_a_new_head_leaves_only_what_is_not_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "head-1").mkdir()
    kept = {"head-1", "workers-1.jsonl", "job-ids", "over-1"}
    for name in (*kept - {"head-1"}, "transport.json", "rank-error"):
        (tmp_path / name).write_text("1")
    clear_for_head(Folder(str(tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_jobs_of_an_attempt_see_the_workers_of_no_other(tmp_path: Path) -> None:
    opened = {"event": "opened", "address": "tls://n1:1"}
    write_events(tmp_path, opened, {"event": "connected", "worker": "a"})
    second = Head(options(tmp_path, 2, 2))
    assert second.scheduler_address() is None and not second.dask().connected
    write_events(tmp_path, {**opened, "address": "tls://n2:1"}, attempt=2)
    assert second.scheduler_address() == "tls://n2:1" and not second.dask().connected
    assert Head(options(tmp_path, 1, 2)).scheduler_address() == "tls://n1:1"


def test_a_verdict_about_the_attempt_before_counts_no_more(tmp_path: Path) -> None:
    verdict = {"time": 1.0, "gone": {}, "possible": [], "head": False, "unlisted": {},
               "undecided": [], "asked": True, "usable": True}  # fmt: skip
    Folder(str(tmp_path)).write(VERDICT, verdict)
    os.utime(tmp_path / VERDICT, (1.0, 1.0))
    first, second = (
        JobsWatch(options(tmp_path, attempt, 2), {}, EventReader(tmp_path / events_file(attempt)))
        for attempt in (1, 2)
    )
    assert first.verdict()["head"] is False and second.verdict() == {}


def test_a_late_job_of_an_earlier_attempt_exits(tmp_path: Path) -> None:
    late = options(tmp_path, 1, 2)
    end_attempt(Folder(str(tmp_path)), 1, "preempted")
    assert supervise(late) == 0
    assert not (tmp_path / "head-1").exists()


def test_a_head_that_is_requeued_all_the_same_ends_its_attempt(tmp_path: Path) -> None:
    """PBS requeues members of arrays: that ends the attempt, and the next one follows."""
    (tmp_path / "head-1").mkdir()
    (tmp_path / "head-1" / "owner").write_text('{"job": 0}')
    assert supervise(options(tmp_path, 1, 2)) == 0
    assert "started the head's job again" in (tmp_path / "over-1").read_text()


# -- report ----------------------------------------------------------------------------------------
RECORD = ClusterRecord(
    id="svd-0001",
    site="s",
    scheduler="slurm",
    folder="/f",
    created=0.0,
    groups=(GroupRecord("", 1, 1, 1),),
    run=("ls",),
    encrypted=True,
    attempts=3,
    submissions=tuple(Submission(str(n + 5), n, 1, attempt=n + 1) for n in range(3)),
)


def report(states: str, folder: FolderState) -> ClusterReport:
    """Return the report on a chain; r, p, c are running, pending and cancelled jobs."""
    known = {"r": JobState.RUNNING, "p": JobState.PENDING, "c": JobState.CANCELLED}
    answers = {JobId(str(n + 5)): JobStatus(known[letter]) for n, letter in enumerate(states)}
    return judge(RECORD, folder, answers, now=1.0)


def worker(number: int) -> FolderState:
    name = f"svd-0001-{number}"
    row = {"address": "tls://a", "threads": 1, "gpu": None}
    return folder_state(head=number, workers={name: row}, seen=frozenset([name]))


def test_a_chain_is_one_cluster() -> None:
    first = report("rpp", worker(0))
    assert (first.state.value, first.reason, first.attempt) == ("RUNNING", "", 1)
    between = report("cpp", worker(0))
    assert (between.state.value, between.attempt, between.connected) == ("PENDING", 2, 0)
    assert between.reason == "1 waiting"
    ended = replace(worker(0), jobs={0: job_trace(left=ExitRecord(0, "n1"))})
    assert report("rpp", ended).attempt == 2
    second = report("crp", worker(1))
    assert (second.state.value, second.attempt, second.connected) == ("RUNNING", 2, 1)
    assert [job.attempt for job in second.jobs] == [1, 2, 3]
    assert second.jobs[0].phase is JobPhase.ENDED
    done = replace(worker(1), ended=Ended(EndKind.DONE, 0))
    last = report("ccc", done)
    assert (last.state.value, last.attempt) == ("DONE", 2)


def test_a_cluster_of_two_attempts_is_not_scaled(home: Path) -> None:
    ledger = Ledger(home / "ledger")
    record = replace(RECORD, folder=str(home / "svd-0001"), attempts=2, finished=True)
    ledger.add(record)
    with pytest.raises(InputError, match="the jobs of all its attempts are submitted"):
        scale(record, {"": 8}, ledger)
