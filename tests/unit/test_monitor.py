"""The query loop: one query for all clusters, ever more rarely; one read of the folder a report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpujobs.batch.process import System
from gpujobs.clusters import clusterfolder as folders
from gpujobs.clusters.ledger import ClusterRecord, GroupRecord, Ledger, Submission
from gpujobs.clusters.monitor import ClusterMonitor
from gpujobs.clusters.owner import gone_owner, has_owner, renew_lease, write_owner
from gpujobs.clusters.scale import cancel, orphaned
from gpujobs.injob.folder import EndKind
from gpujobs.schedulers import CommandResult

from ..support.events import write_events
from ..support.jobevents import write_job
from ..support.processes import until
from ..support.transcripts import SQUEUE_FOUND_HEADER, SQUEUE_HEADER

SQUEUE = """#!/bin/sh
# squeue prints the file `queue`, and appends its arguments to `calls`.
echo "$@" >> {folder}/calls
cat {folder}/queue 2> /dev/null || {{ echo "squeue: error: $(cat {folder}/error)" >&2; exit 1; }}
"""


class FakeSlurm:
    """Slurm's commands on PATH: squeue prints a file, sacct knows nothing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name, text in (("squeue", SQUEUE.format(folder=folder)), ("sacct", "#!/bin/sh\n")):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        self.lists()

    def lists(self, *rows: str) -> None:
        """Set the rows ``ID|INDEX|STATE`` that squeue prints."""
        lines = [f"{row}|node1|N/A|None|name\n" for row in rows]
        (self.folder / "queue").write_text("".join([SQUEUE_HEADER, *lines]))

    def is_away(self) -> None:
        (self.folder / "queue").unlink()
        (self.folder / "error").write_text("Unable to contact slurm controller")

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    return FakeSlurm(folder, monkeypatch)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "state")


def add(ledger: Ledger, number: str, **changes: object) -> ClusterRecord:
    cluster_id = f"svd-000{number}"
    folder = ledger.folder.parent / cluster_id
    (folder / "jobs").mkdir(parents=True)
    values = {
        "id": cluster_id,
        "site": "here",
        "scheduler": "slurm",
        "folder": str(folder),
        "created": time.time(),
        "groups": (GroupRecord("", workers=1, workers_per_job=1, gpus_per_job=1),),
        "run": (),
        "encrypted": True,
        "poll": 5,
        "submissions": (Submission(number, 0, 1),),
    }
    record = ClusterRecord(**(values | changes))  # type: ignore[arg-type]
    ledger.add(record)
    return record


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock: its only item is added to the time that has passed."""
    ahead = [0.0]
    real, wall = time.monotonic, time.time
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead[0])
    monkeypatch.setattr(time, "time", lambda: wall() + ahead[0])
    yield ahead


def test_all_clusters_share_one_query(slurm: FakeSlurm, ledger: Ledger) -> None:
    slurm.lists("1||RUNNING", "2||PENDING")
    records = [add(ledger, "1"), add(ledger, "2")]
    monitor = ClusterMonitor(records, ledger)
    assert [report.state.value for report in monitor.reports()] == ["STARTING", "PENDING"]
    assert len(slurm.calls) == 1 and "svd-0001,svd-0002" in slurm.calls[0]
    monitor.reports()
    assert len(slurm.calls) == 1  # not due yet


def test_queries_become_rare_while_nothing_changes(
    slurm: FakeSlurm, ledger: Ledger, clock: list[float]
) -> None:
    slurm.lists("1||RUNNING")
    monitor = ClusterMonitor([add(ledger, "1")], ledger)
    for _ in range(1200):
        monitor.reports()
        clock[0] += 1.0
    assert len(slurm.calls) <= 30  # of 240 at the fastest pace, in 20 minutes
    before = len(slurm.calls)
    for _ in range(300):
        monitor.reports()
        clock[0] += 1.0
    assert len(slurm.calls) - before <= 15  # at most three a minute
    monitor.query_soon()
    monitor.reports()
    assert len(slurm.calls) - before <= 16


def test_the_folder_is_read_once_for_a_report(slurm: FakeSlurm, ledger: Ledger) -> None:
    slurm.lists("1||RUNNING")
    record = add(ledger, "1")
    names = ("ended", "workers-1.jsonl", "transport.json")
    for name in names:
        (record.path / name).write_text("{}")
    opened: list[str] = []
    watching = [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and watching and str(arguments[0]).startswith(record.folder):
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(hook)
    monitor = ClusterMonitor([record], ledger)
    for number in (1, 2):
        monitor.report()
        assert [opened.count(name) for name in names] == [number] * len(names)
    watching.clear()


@pytest.mark.parametrize(
    ("exits", "planned", "kept"), [(True, False, False), (False, False, True), (True, True, True)]
)
def test_an_ended_cluster_keeps_no_packages(
    slurm: FakeSlurm, ledger: Ledger, exits: bool, planned: bool, kept: bool
) -> None:
    """They are 1 MB of its folder; without an exit record, a job may still run."""
    slurm.lists("1||COMPLETED")
    record = add(ledger, "1", planned=(Submission("1", 0, 1),) if planned else ())
    names = ("injob.pyz", "judge.pyz", "reserve")
    for name in names:
        (record.path / name).write_bytes(bytes(1000))
    write_job(record.path, 0, "started")
    if exits:
        write_job(record.path, 0, "left", code=0)
    folders.end(record.path, EndKind.DONE, 0, "run has ended")
    assert ClusterMonitor([record], ledger).report().finished
    assert ledger.get(record.id).finished
    assert {(record.path / name).exists() for name in names} == {kept}
    assert (record.path / "ended").exists()


class EndsMeanwhile(System):
    """A host on which a job writes its exit record, and ends, while the batch scheduler is queried."""

    def __init__(self, record: ClusterRecord) -> None:
        self.record = record

    def run(self, argv: Sequence[str], **options: Any) -> CommandResult:
        write_job(self.record.path, 0, "left", code=0)
        return super().run(argv, **options)


def test_a_job_that_ends_during_a_query_has_its_own_end_in_the_last_report(ledger: Ledger) -> None:
    """This machine knows no exit codes: the last report, which the ledger keeps, has the job's own."""
    gone = Submission(f"{socket.gethostname()}:{os.getpid()}@1", 0, 1)  # another process's pid
    record = add(ledger, "1", scheduler="local", submissions=(gone,))
    folders.end(record.path, EndKind.DONE, 0, "run has ended")
    report = ClusterMonitor([record], ledger, system=EndsMeanwhile(record)).report()
    assert [job.state for job in report.jobs] == ["COMPLETED"]
    assert ledger.get(record.id).outcomes == {"0": "COMPLETED"}


def test_a_batch_scheduler_that_does_not_respond_is_named_and_asked_again(
    slurm: FakeSlurm,
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gpujobs.clusters.monitor.QUERY_TIMEOUT", 0.1)
    monitor = ClusterMonitor([add(ledger, "1")], ledger)
    slurm.is_away()
    report = monitor.report()
    assert report.jobs[0].reason == "the batch scheduler does not respond" and report.active
    assert "not available" in caplog.text or "unreachable" in caplog.text
    slurm.lists("1||RUNNING")
    monitor.query_soon()
    assert monitor.report().jobs[0].state == "RUNNING"
    slurm.is_away()
    monitor.query_soon()
    assert monitor.report().jobs[0].state == "RUNNING"  # the last answer is the best there is


def test_outcomes_are_remembered_and_not_queried_again(
    slurm: FakeSlurm, ledger: Ledger, clock: list[float]
) -> None:
    slurm.lists("1||RUNNING")
    record = add(ledger, "1")
    monitor = ClusterMonitor([record], ledger)
    monitor.report()
    slurm.lists("1||TIMEOUT")
    clock[0] += 6
    assert monitor.report().state == "FAILED"
    assert ledger.get("svd-0001").finished
    slurm.lists()
    count = len(slurm.calls)
    found = ClusterMonitor([ledger.get("svd-0001")], ledger).report()
    assert found.jobs[0].state == "TIMEOUT" and len(slurm.calls) == count


@pytest.mark.parametrize("replied", [True, False])
def test_a_cluster_is_not_finished_while_jobs_are_submitted(ledger: Ledger, replied: bool) -> None:
    before = add(ledger, "1")
    ledger.begin_submission(before.id, Submission("", 1, 1))
    if replied:
        ledger.end_submission(before.id, Submission("9", 1, 1))
    ledger.finish(before, {"0": "TIMEOUT"}, {})  # a report from before
    assert not ledger.get(before.id).finished
    ledger.update(before.id, intent=None)
    ledger.finish(ledger.get(before.id), {"0": "TIMEOUT"}, {})
    assert ledger.get(before.id).finished


def test_a_job_that_nothing_lists_is_given_up_after_a_while(
    slurm: FakeSlurm, ledger: Ledger, clock: list[float]
) -> None:
    record = add(ledger, "1", poll=1)
    assert ClusterMonitor([record], ledger).report().state == "PENDING"
    clock[0] += 10  # another process continues to count
    assert ClusterMonitor([ledger.get(record.id)], ledger).report().state == "PENDING"
    clock[0] += 20
    assert ClusterMonitor([ledger.get(record.id)], ledger).report().state == "CANCELLED"


def test_jobs_that_another_process_has_added_are_seen(slurm: FakeSlurm, ledger: Ledger) -> None:
    slurm.lists("1||RUNNING", "9||PENDING")
    monitor = ClusterMonitor([add(ledger, "1")], ledger)
    monitor.report()
    ledger.begin_submission("svd-0001", Submission("", 1, 1))
    ledger.end_submission("svd-0001", Submission("9", 1, 1))
    monitor.query_soon()
    assert [job.id for job in monitor.report().jobs] == ["1", "9"]


@pytest.mark.parametrize("found", [True, False])
def test_an_interrupted_submission_is_adopted_or_given_up(
    slurm: FakeSlurm, ledger: Ledger, clock: list[float], found: bool
) -> None:
    record = add(ledger, "1", submissions=())
    ledger.begin_submission(record.id, Submission("", 0, 1, time=time.time()))
    (slurm.folder / "queue").write_text(SQUEUE_FOUND_HEADER + (f"7|{record.id}\n" if found else ""))
    monitor = ClusterMonitor([ledger.get(record.id)], ledger)
    assert monitor.report().reason == "being submitted"  # it may still be under way
    clock[0] += 130
    report = monitor.report()
    if found:
        assert [job.id for job in report.jobs] == ["7"]
    else:
        ended = json.loads((record.path / "ended").read_text())
        assert (ended["kind"], report.record.finished) == ("failed", True)


def test_cancel_ends_the_folder_even_if_the_batch_scheduler_is_away(
    slurm: FakeSlurm, ledger: Ledger
) -> None:
    record = add(ledger, "1")
    with pytest.raises(Exception, match="scancel"):
        cancel(record, ledger, timeout=0.1)
    assert json.loads((record.path / "ended").read_text())["kind"] == "cancelled"


def test_cancel_ends_when_all_jobs_have_exited(slurm: FakeSlurm, ledger: Ledger) -> None:
    """They find `ended`: a batch scheduler that is away is not waited for then."""
    record = add(ledger, "1")
    scancel = slurm.folder / "scancel"
    scancel.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    scancel.chmod(0o755)

    class Clock(System):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds
            if self.now > 2 and (record.path / "ended").exists():
                write_job(record.path, 0, "left", code=143)

    system = Clock()
    cancel(record, ledger, system=system)
    assert 2 < system.now < 10


def test_an_old_answer_does_not_give_a_job_up(
    slurm: FakeSlurm, ledger: Ledger, clock: list[float]
) -> None:
    monitor = ClusterMonitor([add(ledger, "1", poll=1)], ledger)
    assert monitor.report().jobs[0].reason == "the batch scheduler does not list it"
    slurm.lists()
    (slurm.folder / "queue").write_text("")  # no header: squeue has written nothing
    clock[0] += 70
    found = monitor.report().jobs[0]
    assert (found.state, found.reason) == ("UNKNOWN", "the batch scheduler does not respond")
    slurm.lists("1||RUNNING")
    clock[0] += 70
    assert monitor.report().jobs[0].state == "RUNNING"


def test_a_job_that_is_requeued_after_its_end_is_active_again(
    slurm: FakeSlurm, ledger: Ledger
) -> None:
    slurm.lists("1||NODE_FAIL", "9||RUNNING")
    monitor = ClusterMonitor(
        [add(ledger, "1", submissions=(Submission("1", 0, 1), Submission("9", 1, 1)))], ledger
    )
    assert [job.active for job in monitor.report().jobs] == [False, True]
    slurm.lists("1||PENDING", "9||RUNNING")
    monitor.query_soon()
    assert [job.state.value for job in monitor.report().jobs] == ["PENDING", "RUNNING"]
    slurm.lists("1||RUNNING", "9||RUNNING")
    monitor.query_soon()
    assert [job.state.value for job in monitor.report().jobs] == ["RUNNING", "RUNNING"]


def test_an_owner_lives_by_the_clock_of_the_file_server(
    slurm: FakeSlurm, ledger: Ledger, clock: list[float]
) -> None:
    record = add(ledger, "1", owner="client", submissions=())
    renew_lease(record.path)
    clock[0] += 3600  # of this host
    assert ClusterMonitor([record], ledger).report().reason == "no jobs"
    assert not orphaned(record)
    minute_ago = (record.path / "lease").stat().st_mtime - 61
    os.utime(record.path / "lease", (minute_ago, minute_ago))
    assert ClusterMonitor([record], ledger).report().reason != "no jobs"
    assert orphaned(record)


OWNER = """
import sys
from pathlib import Path
from gpujobs.clusters.owner import renew_lease, write_owner
write_owner(Path(sys.argv[1]))
renew_lease(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_is_the_reason_at_once(slurm: FakeSlurm, ledger: Ledger) -> None:
    """Its lease is new, its jobs are still in the queue; its parent has not asked for its end."""
    slurm.lists("1||RUNNING")
    record = add(ledger, "1", owner="client")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, record.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout and owner.stdout.readline() == "ready\n"
        report = ClusterMonitor([record], ledger).report()
        assert report.state.value == "STARTING" and has_owner(record.path)
        owner.kill()
        until(lambda: gone_owner(record.path), 10)  # a process that has ended, but is still listed
        owner.wait()
        report = ClusterMonitor([record], ledger).report()
        name = f"process {owner.pid} on {socket.gethostname()}"
        assert report.reason == f"the Python process that owned it is gone: {name}"
        assert report.state.value == "FAILED" and report.active
        assert orphaned(record)


@pytest.mark.parametrize(
    "change",
    [{"kernel": "of another host"}, {"kernel": ""}, {"pid": "x"}, {"pid": True}, {"started": -1}],
)
def test_only_a_process_of_this_host_is_known_to_be_gone(
    tmp_path: Path, change: dict[str, object]
) -> None:
    write_owner(tmp_path)
    renew_lease(tmp_path)
    assert has_owner(tmp_path)
    owner = json.loads((tmp_path / "owner").read_text())
    (tmp_path / "owner").write_text(json.dumps({**owner, **change}))
    known = change == {"started": -1}  # the number belongs to another process now
    assert bool(gone_owner(tmp_path)) is known
    assert has_owner(tmp_path) is not known


# -- what is left behind -----------------------------------------------------------------------------
def test_a_batch_scheduler_that_is_gone_hides_no_other_cluster(
    slurm: FakeSlurm, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.lists("1||RUNNING")
    records = [add(ledger, "2", scheduler="plugin"), add(ledger, "1")]
    gone, known = ClusterMonitor(records, ledger).reports()
    assert known.state.value == "STARTING"
    (job,) = gone.jobs
    assert (job.id, job.state.value) == ("2", "UNKNOWN")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "'plugin' is not one of the known batch schedulers" in warning


def test_an_interrupted_submission_to_a_batch_scheduler_that_is_gone_is_reported(
    ledger: Ledger,
) -> None:
    intent = Submission("", first=0, count=1, group="", array=False, time=1.0)
    record = add(ledger, "1", scheduler="plugin", submissions=(), intent=intent)
    assert ClusterMonitor([record], ledger).reports()


def test_a_cluster_whose_owner_died_before_it_submitted_is_cancelled_once(
    slurm: FakeSlurm, ledger: Ledger
) -> None:
    record = add(ledger, "1", submissions=(), owner="client")
    cancel(record, ledger)
    assert ledger.get(record.id).finished
    assert (record.path / "ended").exists() and slurm.calls == []


def test_a_cancel_finds_the_job_of_an_interrupted_submission(
    slurm: FakeSlurm, ledger: Ledger
) -> None:
    intent = Submission("", first=0, count=1, group="", array=False, time=1.0)
    record = add(ledger, "1", submissions=(), intent=intent)
    (slurm.folder / "queue").write_text(f"{SQUEUE_FOUND_HEADER}7|svd-0001\n")
    (slurm.folder / "scancel").write_text(
        f"#!/bin/sh\necho $@ > {slurm.folder}/cancelled\n: > {slurm.folder}/queue\n"
    )
    (slurm.folder / "scancel").chmod(0o755)
    cancel(record, ledger)
    assert (slurm.folder / "cancelled").read_text() == "7\n"


def test_an_answer_from_before_the_start_is_no_requeue(slurm: FakeSlurm, ledger: Ledger) -> None:
    record = add(ledger, "7")
    slurm.lists("7|N/A|PENDING")
    monitor = ClusterMonitor([record], ledger)
    assert monitor.report().jobs[0].reason == ""
    write_job(record.path, 0, "started")
    assert monitor.latest().jobs[0].reason == ""  # the answer is older
    monitor.query_soon()
    assert monitor.report().jobs[0].reason == "requeued"


@pytest.mark.parametrize(
    ("age", "exit_code", "state", "reason"),
    [
        (20, None, "RUNNING", ""),
        (20, 0, "COMPLETED", ""),
        (20, 143, "PENDING", "requeued"),  # a requeue begins with SIGTERM
        (100, None, "PENDING", "requeued"),  # no cache is as old
        (100, 0, "PENDING", "requeued"),
        (-40, None, "RUNNING", ""),  # the clock of the node is ahead
    ],
)
def test_an_answer_of_a_cache_may_be_older_than_the_start(
    slurm: FakeSlurm, ledger: Ledger, age: int, exit_code: int | None, state: str, reason: str
) -> None:
    """Sites keep answers of squeue for up to a minute; this is the first one that we get."""
    record = add(ledger, "7")
    write_job(record.path, 0, "started", began=time.time() - age)
    if exit_code is not None:
        write_job(record.path, 0, "left", code=exit_code)
    slurm.lists("7|N/A|PENDING")
    job = ClusterMonitor([record], ledger).report().jobs[0]
    assert (job.state.value, job.reason) == (state, reason)


@pytest.mark.parametrize(
    ("left", "ended", "reason"),
    [(None, False, ""), (30, False, ""), (5, False, "requeued"), (5, True, "")],
)
def test_a_job_that_waits_and_has_lost_its_workers_was_requeued(
    slurm: FakeSlurm, ledger: Ledger, left: int | None, ended: bool, reason: str
) -> None:
    """``left``: seconds since its worker left; None: it was never there. ``ended``: the cluster."""
    record, now = add(ledger, "7"), time.time()
    write_job(record.path, 0, "started", began=now - 20)
    (record.path / "head-1").mkdir()
    (name,) = record.worker_names(0, "")
    if left is not None:
        for event in ("connected", "disconnected"):
            write_events(record.path, {"event": event, "at": now - left, "worker": name})
    if ended:
        folders.end(record.path, EndKind.DONE, 0, "x")
    slurm.lists("7|N/A|PENDING")
    assert ClusterMonitor([record], ledger).report().jobs[0].reason == reason


def test_a_job_of_which_the_batch_scheduler_said_that_it_runs_was_requeued(
    slurm: FakeSlurm, ledger: Ledger
) -> None:
    record = add(ledger, "7")
    write_job(record.path, 0, "started", began=time.time() - 5)
    monitor = ClusterMonitor([record], ledger)
    answers = {
        "PENDING": "", "PENDING again": "", "RUNNING": "", "PENDING at last": "requeued",
        "PENDING still": "requeued",
    }  # fmt: skip
    for answer, reason in answers.items():
        slurm.lists(f"7|N/A|{answer.split()[0]}")
        monitor.query_soon()
        assert monitor.report().jobs[0].reason == reason


def test_a_job_that_has_ended_says_why_although_its_worker_counts_as_present(
    slurm: FakeSlurm, ledger: Ledger
) -> None:
    """Its dask scheduler was killed, and could not say that the worker left."""
    record, now = add(ledger, "7"), time.time()
    (name,) = record.worker_names(0, "")
    run = {"job": 0, "id": "7", "name": "1-n1-1", "node": "n1", "started": now - 20}
    row = {"address": "tls://10.0.0.1:1", "run": run}
    write_events(record.path, {"event": "connected", "worker": name, "row": row, "at": now})
    (record.path / "lease").touch()
    monitor = ClusterMonitor([record], ledger)
    slurm.lists("7|N/A|RUNNING")
    assert monitor.report().jobs[0].phase == "RUNNING"
    write_job(record.path, 0, "failed", reason="the dask scheduler is gone")
    write_job(record.path, 0, "left", code=70)
    slurm.lists("7|N/A|FAILED")
    monitor.query_soon()
    job = monitor.report().jobs[0]
    assert (job.reason, job.exit_code) == ("the dask scheduler is gone", 70)


def test_a_job_that_has_started_since_the_answer_does_not_wait(
    slurm: FakeSlurm, ledger: Ledger
) -> None:
    record = add(ledger, "7")
    slurm.lists("7|N/A|PENDING")
    monitor = ClusterMonitor([record], ledger)
    assert monitor.report().jobs[0].phase == "WAITING"
    slurm.is_away()

    def starts(seconds: float) -> None:
        write_job(record.path, 0, "started", run=f"{seconds:.0f}-n1-1", began=seconds)

    starts(1.7e9)
    assert monitor.report().jobs[0].phase == "STARTING"
    slurm.lists("7|N/A|PENDING")  # requeued
    monitor.query_soon()
    assert monitor.report().jobs[0].phase == "WAITING"
    starts(1.7e9 + 30)
    assert monitor.latest().jobs[0].phase == "STARTING"
