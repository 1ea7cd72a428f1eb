"""A job's supervisor, part by part; as a whole it runs in tests/real."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import Status

from gpujobs.clusters import clusterfolder as folders
from gpujobs.clusters.findings import findings, notes
from gpujobs.clusters.folderstate import read_state
from gpujobs.clusters.owner import silence
from gpujobs.injob import registry
from gpujobs.injob.children import ManagedProcess, with_archive
from gpujobs.injob.events import EventReader
from gpujobs.injob.folder import Ended, EndKind, Folder
from gpujobs.injob.head import NO_CLIENT, Head
from gpujobs.injob.job import FOLDER_TIMEOUT, SCALE, Job, JobExit
from gpujobs.injob.log import Walltime
from gpujobs.injob.names import DRAIN, DRAINED, RUN_NAME, RUN_OF_JOB, UNDRAIN
from gpujobs.injob.network import node_name
from gpujobs.injob.options import (
    RankOptions,
    RetireOptions,
    SuperviseOptions,
    TryUcxxOptions,
    parse,
)
from gpujobs.injob.registry import WorkerRegistry
from gpujobs.injob.supervise import supervise
from gpujobs.injob.workers import JobsWatch, Workers

from ..support.events import dask_workers, write_events
from ..support.jobevents import events_of, facts_of
from ..support.processes import patience


def options(folder: Path, **changes: Any) -> SuperviseOptions:
    for name in ("jobs", "logs"):
        (folder / name).mkdir(exist_ok=True, parents=True)
    return SuperviseOptions(folder=str(folder), job=0, started=time.time(), **changes)


# -- command line ------------------------------------------------------------------------------------
def test_commands_of_a_job_are_parsed_into_their_options() -> None:
    argv = [
        *("supervise", "--job=3", "--folder=/f", "--started=1.5", "--schemes=ucxx,tcp"),
        *("--scheduler", "python", "-m", "s", "--port=0"),
        *("--workers", "dask", "--x"),
        *("--run", "p", "--workers", "--run", "--scheduler"),
    ]
    found = parse(argv)
    assert isinstance(found, SuperviseOptions)
    assert (found.job, found.folder, found.started) == (3, "/f", 1.5)
    assert found.schemes == ("ucxx", "tcp")
    assert found.scheduler == ("python", "-m", "s", "--port=0")
    assert found.workers == ("dask", "--x")
    assert found.run == ("p", "--workers", "--run", "--scheduler")


def test_a_script_in_all_ranks_may_have_any_arguments() -> None:
    script = ("all.py", "--run", "--workers", "4", "--")
    argv = ["supervise", "--job=0", "--folder=/f", "--started=1", "--run-on=ranks"]
    found = parse([*argv, "--workers", "mpirun", *script])
    assert isinstance(found, SuperviseOptions)
    assert found.workers == ("mpirun", *script)
    assert found.run == ()
    words = [
        "rank",
        "--folder=/f",
        "--size=4",
        "--gpus=1",
        "--worker-options",
        '{"a": 1}',
    ]
    rank = parse([*words, "--", *script])
    assert isinstance(rank, RankOptions)
    assert rank.command == script
    assert rank.worker_options == {"a": 1}


def test_retire_and_try_ucxx_are_parsed_into_their_options() -> None:
    assert parse(["retire", "--timeout=5", "--workers=a-0,a-1"]) == RetireOptions(
        timeout=5.0, workers=("a-0", "a-1")
    )
    assert parse(["try-ucxx"]) == TryUcxxOptions(interface=None)
    assert parse(["try-ucxx", "--interface", "ib0"]) == TryUcxxOptions(interface="ib0")


def test_folder_and_number_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        parse(["supervise", "--started=1"])
    monkeypatch.setenv("GPUJOBS_FOLDER", "/f")
    monkeypatch.setenv("GPUJOBS_JOB", "7")
    found = parse(["supervise", "--started=1"])
    assert isinstance(found, SuperviseOptions)
    assert (found.folder, found.job) == ("/f", 7)


# -- time ----------------------------------------------------------------------------------------------
def test_the_walltime_does_not_follow_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    walltime = Walltime(now - 10, 100, 20)
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert 80 < walltime.left() <= 90
    assert not walltime.nearly_over()
    assert 60 < walltime.workers_lifetime() <= 70


@pytest.mark.parametrize(
    ("left", "nearly_over", "explains_signal"),
    [(10, True, True), (70, False, True), (90, False, False)],
)
def test_a_job_knows_that_its_walltime_is_nearly_over(
    left: int, nearly_over: bool, explains_signal: bool
) -> None:
    walltime = Walltime(time.time(), left, 20)
    assert walltime.nearly_over() is nearly_over
    assert walltime.explains_signal() is explains_signal
    endless = Walltime(time.time(), 0, 20)
    assert not endless.nearly_over() and not endless.explains_signal()


def test_a_lease_is_judged_by_the_file_servers_clock(tmp_path: Path) -> None:
    head = Head(options(tmp_path, lease=60, scheduler=("x",)))
    (tmp_path / "head-1").mkdir()
    (tmp_path / "head-1" / "heartbeat").write_text("1.0")  # by clocks that are years apart
    lease = tmp_path / "lease"
    lease.write_text("9999999999.0")
    head._check_lease()
    head._lease_time = 0
    lease.write_text("0.0")
    head._check_lease()
    assert silence(tmp_path) < 5
    os.utime(lease, (lease.stat().st_mtime - 100, lease.stat().st_mtime - 100))
    assert 95 < silence(tmp_path) < 105
    head._lease_time = 0
    with pytest.raises(JobExit, match="silent for 100 s") as caught:
        head._check_lease()
    assert caught.value.kind is EndKind.FAILED
    lease.unlink()
    assert silence(tmp_path) == float("inf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head-1", "jobs", "logs"]


# -- processes -----------------------------------------------------------------------------------------
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
SENDS = f"import os, signal; [os.kill(os.getpid(), n) for n in {tuple(map(int, SIGNALS))}]; print('alive')"


def test_warnings_to_all_processes_of_a_job_kill_none(tmp_path: Path) -> None:
    """Of Grid Engine."""
    environ = {**os.environ, "GPUJOBS_IGNORED_SIGNALS": "USR1 USR2"}
    argv = [sys.executable, "-c", SENDS.replace(f", {int(signal.SIGQUIT)})", ")")]
    process = ManagedProcess("it", argv, tmp_path / "log", environ)
    assert process.wait(patience(20)) and process.exit_code == 0
    assert (tmp_path / "log").read_text() == "alive\n"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_trap_of_run_gets_signals(tmp_path: Path, number: signal.Signals) -> None:
    """Bash can set no trap on a signal that it was started to ignore, as are children of a shell."""
    code = f"trap 'echo got; exit' {number.name}; kill -{number.value} $$; echo ignored"
    starts = (
        "import os, pathlib, sys; from gpujobs.injob.children import ManagedProcess; "
        f"process = ManagedProcess('run', ['bash', '-c', {code!r}], "
        f"pathlib.Path({str(tmp_path / 'log')!r}), dict(os.environ)); process.wait(patience(20))"
    )
    script = f"trap '' {number.name}; {sys.executable} -c \"$0\" & wait"
    subprocess.run(["bash", "-c", script, starts], check=True)
    assert (tmp_path / "log").read_text() == "got\n"


def test_processes_of_dask_survive_warnings_and_their_programs_get_them(tmp_path: Path) -> None:
    program = "import subprocess; print(subprocess.run(['bash', '-c', 'trap \"echo got\" USR1; kill -USR1 $$'], capture_output=True).stdout)"
    code = f"from gpujobs.injob.children import defer_signals; defer_signals(); {SENDS.replace(f', {int(signal.SIGQUIT)})', ')')}; {program}"
    process = ManagedProcess("it", [sys.executable, "-c", code], tmp_path / "log", dict(os.environ))
    assert process.wait(patience(20)) and process.exit_code == 0
    assert (tmp_path / "log").read_text() == "alive\nb'got\\n'\n"


A_MOMENT = 0.2


def test_a_process_says_how_it_ended(tmp_path: Path) -> None:
    killed = ManagedProcess("it", ["sleep", "600"], tmp_path / "log", {})
    assert killed.running and not killed.wait(A_MOMENT)
    killed.kill()
    assert killed.wait(patience(5)) and killed.exit_message() == "it ended (exit code 137)"
    missing = ManagedProcess("it", ["/nosuch/program"], tmp_path / "log", {})
    assert missing.wait(patience(5))
    assert missing.exit_message() == (
        "it ended (exit code 127): gpujobs: cannot start /nosuch/program: No such file or directory"
    )


def test_only_processes_of_dask_import_from_the_archive(tmp_path: Path) -> None:
    archive = tmp_path / "injob.pyz"
    assert with_archive({}, archive)["PYTHONPATH"] == str(archive)
    assert with_archive({"PYTHONPATH": ""}, archive)["PYTHONPATH"] == str(archive)
    assert with_archive({"PYTHONPATH": "/a:/b"}, archive)["PYTHONPATH"] == f"/a:/b:{archive}"


# -- ends ------------------------------------------------------------------------------------------------
class Stopped(Head):
    """A head without a dask scheduler."""

    def work(self) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            self.pause(5)
            self._check_stop()


@pytest.mark.parametrize(
    ("walltime", "kind", "reason"),
    [
        (0, "cancelled", "it received SIGTERM"),
        (600, "cancelled", "it received SIGTERM"),
        (100, "walltime", "the walltime is nearly over"),  # Slurm's signal may be a minute early
    ],
)
def test_a_signal_near_the_walltime_is_its_warning(
    tmp_path: Path, walltime: int, kind: str, reason: str
) -> None:
    assert Stopped(options(tmp_path, walltime=walltime)).run() == 143
    ended = json.loads((tmp_path / "ended").read_text())
    assert ended["kind"] == kind
    assert ended["reason"] == f"the head's job was stopped: {reason}"
    assert facts_of(tmp_path, 0).reason == ended["reason"]


def test_the_log_of_a_job_begins_with_its_number_its_node_and_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Stopped(options(tmp_path)).run()
    first = capsys.readouterr().err.splitlines()[0]
    assert first.endswith(f" gpujobs: job 0 on {node_name()}: the head")


@pytest.mark.parametrize(
    ("nodes", "kind", "reason"),
    [
        (1, "cancelled", "it received SIGTERM"),
        (2, "failed", "Node failure on n2; it received SIGTERM"),
    ],
)
def test_a_signal_to_an_allocation_of_several_nodes_may_mean_that_one_has_failed(
    tmp_path: Path, nodes: int, kind: str, reason: str
) -> None:
    """The job of one node does not live to see that: no launcher is asked."""
    head = Stopped(options(tmp_path, nodes=nodes))
    launcher = ["bash", "-c", "echo 'srun: error: Node failure on n2'; exec sleep 600"]
    process = ManagedProcess("the workers", launcher, tmp_path / "launcher.log", dict(os.environ))
    head.worker_processes = [process]
    try:
        assert head.run() == 143
    finally:
        process.kill()
        process.wait(patience(5))
    ended = json.loads((tmp_path / "ended").read_text())
    assert ended["kind"] == kind
    assert ended["reason"] == f"the head's job was stopped: {reason}"


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [("0", "done", 0), ("7", "cancelled", 143), ("", "cancelled", 143)],
)
def test_run_may_finish_after_a_signal(
    tmp_path: Path, code: str, kind: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that ignores the signal is waited for in vain.
    limit = patience(20) if code else 1.0
    monkeypatch.setattr("gpujobs.injob.head._RUN_CANCEL_TIMEOUT", limit)
    head = Stopped(options(tmp_path))
    trap = f"trap 'exit {code}' TERM" if code else "trap '' TERM"
    script = f"{trap}; touch {tmp_path}/ready; while true; do sleep 0.1; done"
    head.command = ManagedProcess(
        "run:", ["bash", "-c", script], tmp_path / "log", dict(os.environ)
    )
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    assert head.run() == exit_code
    assert head.command.wait(patience(5))
    ended = json.loads((tmp_path / "ended").read_text())
    assert (ended["kind"], ended["exit_code"]) == (kind, exit_code)
    if code == "7":
        assert ended["reason"].endswith("SIGTERM; run: ended with exit code 7")


class Cancelled(Head):
    """A head without a dask scheduler, in a cluster that has been cancelled."""

    def work(self) -> Any:
        while True:
            self.check_end()


def test_run_may_finish_after_a_cancel(tmp_path: Path) -> None:
    """It has the time that it has after the batch scheduler's signal, which may come later or not at all."""
    head = Cancelled(options(tmp_path))
    script = f"trap 'sleep 4; touch {tmp_path}/saved; exit 0' TERM; touch {tmp_path}/ready; while true; do sleep 0.1; done"
    head.command = ManagedProcess(
        "run:", ["bash", "-c", script], tmp_path / "log", dict(os.environ)
    )
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    folders.end(tmp_path, EndKind.CANCELLED, 143, "cancelled by gpujobs")
    assert head.run() == 143
    assert (tmp_path / "saved").exists()


COUNTS = """
import os, signal, sys, time
from pathlib import Path

def stop(number, frame):
    with Path(sys.argv[1], "signals").open("a") as file:
        file.write("SIGTERM")
    time.sleep(3)  # is disturbed by another one
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
Path(sys.argv[1], "ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("signalled", [True, False])
def test_run_gets_sigterm_once(tmp_path: Path, signalled: bool) -> None:
    """Also if the batch scheduler sends it to all processes of the job."""
    head = Cancelled(options(tmp_path))
    argv = [sys.executable, "-c", COUNTS, str(tmp_path)]
    head.command = ManagedProcess("run:", argv, tmp_path / "log", dict(os.environ))
    head._start_witness()
    assert head._witness
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    if signalled:
        for process in (head.command, head._witness):
            process.terminate()
    folders.end(tmp_path, EndKind.CANCELLED, 143, "cancelled by gpujobs")
    assert head.run() == 143
    assert (tmp_path / "signals").read_text() == "SIGTERM"


def test_run_has_all_of_the_time_that_is_left(tmp_path: Path) -> None:
    """Slurm sends its signal up to a minute before the warning that was asked for."""
    head = Stopped(options(tmp_path, walltime=110, warning=60))
    script = f"trap 'sleep 14; exit 0' TERM; touch {tmp_path}/ready; while true; do sleep 0.1; done"
    head.command = ManagedProcess(
        "run:", ["bash", "-c", script], tmp_path / "log", dict(os.environ)
    )
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    assert head.run() == 0  # after more than the 10 s of a job that is cancelled
    assert json.loads((tmp_path / "ended").read_text())["kind"] == "done"


def exited(tmp_path: Path, code: int) -> ManagedProcess:
    process = ManagedProcess(
        "the dask scheduler", ["bash", "-c", f"exit {code}"], tmp_path / "log", {}
    )
    process.wait(patience(5))
    return process


def test_a_shutdown_by_a_client_ends_the_cluster_without_an_error(tmp_path: Path) -> None:
    head = Head(options(tmp_path))
    with pytest.raises(JobExit) as caught:
        head._scheduler_ended(exited(tmp_path, 0))
    assert (caught.value.kind, caught.value.exit_code) == (EndKind.SHUTDOWN, 0)
    head.command = exited(tmp_path, 0)  # `run` called client.shutdown()
    with pytest.raises(JobExit) as caught:
        head._scheduler_ended(exited(tmp_path, 0))
    assert (caught.value.kind, caught.value.reason) == (EndKind.DONE, NO_CLIENT)
    write_events(tmp_path, {"event": "client", "clients": 1}, {"event": "client", "clients": 0})
    with pytest.raises(JobExit) as caught:
        head._scheduler_ended(exited(tmp_path, 0))
    assert (caught.value.kind, caught.value.reason) == (EndKind.DONE, "")
    with pytest.raises(JobExit) as caught:
        head._scheduler_ended(exited(tmp_path, 3))
    assert (caught.value.kind, caught.value.exit_code) == (EndKind.FAILED, 70)


def test_a_command_that_fails_ends_the_cluster_with_its_exit_code(tmp_path: Path) -> None:
    head = Head(options(tmp_path))
    scheduler = ManagedProcess("the dask scheduler", ["sleep", "60"], tmp_path / "log", {})
    with pytest.raises(JobExit, match="run: ended with exit code 9") as caught:
        head._command_ended(exited(tmp_path, 9), scheduler)
    assert (caught.value.kind, caught.value.exit_code) == (EndKind.FAILED, 9)
    scheduler.kill()
    scheduler.wait(patience(5))
    with pytest.raises(JobExit, match=r"the dask scheduler ended \(exit code 137\)"):
        head._command_ended(exited(tmp_path, 9), scheduler)


def test_a_program_that_waits_for_another_dask_scheduler_is_noted_after_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, real = 0.0, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: real + now)
    head, said = Head(options(tmp_path)), "run: has had no client for 5 min, so its workers have no"
    (tmp_path / "head-1").mkdir()
    head.folder.write("head-1/owner", {"job": 0})

    def noted(at: float, clients: int) -> bool:
        nonlocal now
        now = at
        write_events(tmp_path, {"event": "client", "clients": clients})
        head._check_clients()
        return any(note.startswith(said) for note in findings(read_state(tmp_path)))

    assert not noted(1000.0, clients=0)  # `run` has not started
    head._client_time = time.monotonic()
    head.command = ManagedProcess("run", ["sleep", "60"], tmp_path / "log", {})
    assert not noted(1200.0, clients=0) and noted(1310.0, clients=0) and noted(1400.0, clients=0)
    log = (tmp_path / "logs/run.log").read_text()
    assert log.count(f"gpujobs: {said}") == 1 and "Client() connects to them" in log
    assert not noted(1500.0, clients=1) and not noted(1790.0, clients=0)
    assert noted(1900.0, clients=0)
    head.command.kill()
    assert head.command.wait(patience(5))


def test_a_command_whose_tasks_need_more_memory_ends_with_that_reason(tmp_path: Path) -> None:
    head = Head(options(tmp_path))
    scheduler = ManagedProcess("the dask scheduler", ["sleep", "60"], tmp_path / "log", {})
    error = "distributed.scheduler.KilledWorker: Attempted to run task 'f' on 4 different workers"
    code = f"import sys; sys.exit('Traceback (most recent call last):\\n    raise e\\n{error}')"
    command = [sys.executable, "-c", code.replace("'f'", "f")]
    process = ManagedProcess("run:", command, tmp_path / "log", dict(os.environ))
    assert process.wait(patience(20))
    for name, restarts in (("c-0", 1), ("c-1", 3)):
        over = {"event": "over memory", "worker": name, "restarts": restarts, "limit": 2**30}
        write_events(tmp_path, over)
    said = "worker c-1 restarted 3 times: over its memory limit of 1 GiB: memory_per_job"
    with pytest.raises(JobExit, match=f"ended with exit code 1: KilledWorker: {said}"):
        head._command_ended(process, scheduler)
    scheduler.kill()
    scheduler.wait(patience(5))


def test_the_log_of_run_has_a_line_between_attempts(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "run.log"
    for attempt, text in (
        (1, ""),
        (2, "OSError: of the first attempt\ngpujobs: run: starts again (2 of 3 attempts)\n"),
    ):
        more = {"attempt": attempt, "attempts": 3, "start_workers": 0, "run": ("false",)}
        head = Head(options(tmp_path, **more))
        head._start_command()
        assert head.command and head._witness and head.command.wait(patience(20))
        head._witness.kill()
        head._witness.wait(patience(5))
        assert log.read_text() == text
        with pytest.raises(JobExit) as caught:
            head._command_ended(head.command, head._witness)
        assert "of the first" not in caught.value.reason  # which is in `over-1`
        log.write_text("OSError: of the first attempt\n")


GONE = {"1": "job 1 did not start: node2: launch failed"}
VERDICT = {
    "time": 1.0, "gone": GONE, "possible": ["c-0"], "head": True, "unlisted": {}, "undecided": [],
    "asked": True, "usable": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "start_workers", "reason"),
    [
        ({}, 2, "run: cannot start: job 1 did not start: node2: launch failed"),
        ({}, 1, ""),
        ({"possible": ["c-0", "c-2"]}, 2, ""),  # one that was added
        ({"gone": {}, "possible": ["c-0"]}, 2, ""),  # scaled down, and may be scaled up
        ({"gone": {n: f"job {n}" for n in "12345"}}, 6, "run: cannot start: job 1; job 2; job 3; and 2 more"),
        ({"gone": {}, "asked": False}, 2, "run: cannot start: the other jobs have not come in half"),
    ],
)  # fmt: skip
def test_run_waits_for_jobs_that_do_not_come(
    tmp_path: Path, changes: dict[str, Any], start_workers: int, reason: str
) -> None:
    chosen = options(tmp_path / "c", run=("true",), start_workers=start_workers, walltime=100)
    head = Head(replace(chosen, started=time.time() - 60))
    (tmp_path / "c" / "jobs" / "0.now").touch()
    verdict = {**VERDICT, **changes}
    head.folder.write("verdict.json", verdict)
    try:
        head._check_jobs(JobsWatch(head.options, {}, head._events))
        found = ""
    except JobExit as job_exit:
        found = job_exit.reason
        assert (job_exit.kind, job_exit.exit_code) == (EndKind.FAILED, 70)
    assert found.startswith(reason) and bool(found) is bool(reason)
    log = tmp_path / "c" / "logs" / "run.log"
    lines = [f"gpujobs: {text}" for text in verdict["gone"].values()]
    assert sorted(log.read_text().splitlines() if log.exists() else []) == lines
    head = Head(replace(head.options, client_owns=True))
    head._check_jobs(JobsWatch(head.options, {}, head._events))  # its owner replaces jobs


def test_a_job_that_does_not_come_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = Head(options(tmp_path))
    (tmp_path / "jobs" / "0.now").touch()
    head.folder.write("verdict.json", VERDICT)
    for _ in range(2):
        head._check_jobs(JobsWatch(head.options, {}, head._events))
    assert capsys.readouterr().err.count("job 1 did not start: node2: launch failed") == 1


def test_a_job_that_disappears_is_asked_about_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge here takes notes. It cannot decide about job 1 in its first three answers."""
    now, real = 0.0, time.monotonic()
    folder = Folder(str(tmp_path / "c"))
    jobs_options = options(folder.path)
    folder.write("record.json", {"groups": [{"workers": 2}]})
    verdict, asked = folder.path / "verdict.json", []
    judge = (
        "import json, sys, pathlib\nfolder = pathlib.Path(sys.argv[1])\n"
        "number = len(list(folder.glob('asked-*')))\n(folder / f'asked-{number}').touch()\n"
        f"value = {dict(VERDICT, gone={})!r} | {{'undecided': [1] if number < 3 else []}}\n"
        "(folder / 'verdict.json').write_text(json.dumps(value))\n"
    )
    (folder.path / "judge.pyz").write_text(judge)
    monkeypatch.setattr(time, "monotonic", lambda: real + now)
    jobs, process = JobsWatch(jobs_options, {}, EventReader(tmp_path / "workers-1.jsonl")), None
    for second in range(0, 240, 2):
        now = float(second)
        if asked:  # its file has the age that it has by this clock
            written = time.time() - (second - asked[-1]) - 0.5  # clocks of files are coarse
            os.utime(verdict, (written, written))
        jobs.verdict()
        if jobs._judge is not process:
            process = jobs._judge
            asked.append(second)
            assert process is not None
            process._process.wait(patience(20))
    assert asked == [16, 40, 64, 88, 148, 208]  # the answers are read 2 s later


def test_workers_wait_for_a_head_that_does_not_come(tmp_path: Path) -> None:
    workers = Workers(options(tmp_path / "c"))
    workers.folder.write("verdict.json", {**VERDICT, "head": False})
    with pytest.raises(JobExit, match="run: cannot start: job 1 did not start") as caught:
        workers._wait_for_address()
    assert caught.value.kind is EndKind.FAILED


def test_a_head_that_is_restarted_fails(tmp_path: Path) -> None:
    (tmp_path / "head-1").mkdir()
    Folder(str(tmp_path)).write("head-1/owner", {"job": 0})
    (tmp_path / "job-ids").write_text("")
    assert supervise(options(tmp_path, scheduler=("x",), workers=("y",))) == 70
    ended = json.loads((tmp_path / "ended").read_text())
    assert ended["kind"] == "failed"
    assert "the batch scheduler started the head's job again" in ended["reason"]


@pytest.mark.parametrize("claim", ["123[0]", None])
def test_a_job_writes_that_it_has_started(
    tmp_path: Path, claim: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_NAME, "5-n1-9")
    made = options(tmp_path, workers=("x",))
    if claim:
        (tmp_path / "jobs" / "0.claim").write_text(f"{claim}\n")
    Folder(str(tmp_path)).end(Ended(EndKind.CANCELLED, 143, "cancelled by gpujobs"))
    assert supervise(made) == 0
    (started,) = events_of(tmp_path, 0)
    del started["at"]
    assert started == {
        "event": "started",
        "run": "5-n1-9",
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "began": made.started,
        "pid": os.getpid(),
    }
    run = json.loads(os.environ[RUN_OF_JOB])
    assert (run["id"], run["name"], run["started"]) == (claim or "", "5-n1-9", made.started)
    assert json.loads((tmp_path / "ended").read_text())["kind"] == "cancelled"  # as it was


@pytest.mark.parametrize("client_owns", [False, True])
def test_a_job_that_fails_ends_the_cluster_unless_a_client_owns_it(
    tmp_path: Path, client_owns: bool
) -> None:
    class Failing(Workers):
        def work(self) -> Any:
            self.options = options(tmp_path, gpus=2, workers=("x",), client_owns=client_owns)
            self.environ = {"CUDA_VISIBLE_DEVICES": "0"}
            self.start_workers()

    assert Failing(options(tmp_path)).run() == 70
    assert "2 GPUs were requested, but 1 assigned" in facts_of(tmp_path, 0).reason
    assert (tmp_path / "ended").exists() is not client_owns


def test_a_job_that_shall_leave_notes_it_unless_it_is_the_head(tmp_path: Path) -> None:
    other, head = (kind(replace(options(tmp_path), job=1)) for kind in (Job, Head))
    (tmp_path / "leave-2").touch()
    other.check_end()
    assert other.stop_reason == ""
    (tmp_path / "leave-1").touch()
    other.check_end()
    head.check_end()
    assert (other.stop_reason, head.stop_reason) == (SCALE, "")


def test_a_job_whose_folder_was_removed_ends(tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    (folder / "injob.pyz").touch()
    job = Job(SuperviseOptions(folder=str(folder), job=1, started=time.time(), workers=("x",)))
    (folder / "injob.pyz").unlink()
    folder.rmdir()
    job.check_end()  # a file server may be away for a moment
    job._folder_seen -= FOLDER_TIMEOUT + 1
    with pytest.raises(JobExit, match="has been missing for 120 s"):
        job.check_end()


# -- the dask scheduler ----------------------------------------------------------------------------------
def state(name: str) -> SimpleNamespace:
    """Return what the dask scheduler knows of a worker."""
    address, limit = f"tls://{name}", 3 * 2**29
    return SimpleNamespace(name=name, address=address, nthreads=2, extra={}, memory_limit=limit)


def test_the_registry_remembers_all_workers(tmp_path: Path) -> None:
    async def main() -> None:
        scheduler = SimpleNamespace(workers={}, handlers={}, status=Status.running)
        registry = WorkerRegistry(scheduler, str(tmp_path), {})
        for name in ("b-1", "b-0"):
            scheduler.workers[f"tls://{name}"] = state(name)
            registry.add_worker(scheduler, f"tls://{name}")
        del scheduler.workers["tls://b-1"]
        registry.remove_worker(scheduler, "tls://b-1", stimulus_id="x")
        for address in ("tls://b-1", "tls://b-1", "tls://other"):
            registry.log_event("worker-restart-memory", {"worker": address, "pid": 1, "rss": 2})
        registry.log_event("worker-get-client", {"worker": "tls://b-0"})
        while not dask_workers(tmp_path).gone:
            await asyncio.sleep(0.05)

    asyncio.run(main())
    found = dask_workers(tmp_path)
    assert found.connected == {
        "b-0": {
            "address": "tls://b-0",
            "threads": 2,
            "gpu": None,
            "binding": None,
            "memory": int(1.5 * 2**30),
            "run": None,
        }
    }
    assert found.seen == {"b-0", "b-1"}
    assert notes(read_state(tmp_path)) == [
        "worker b-1 restarted 2 times: over its memory limit of 1.5 GiB: memory_per_job"
    ]


def test_the_registry_counts_the_clients_of_users(tmp_path: Path) -> None:
    async def wait_for(number: int) -> None:
        while dask_workers(tmp_path).clients != number:
            await asyncio.sleep(0.05)

    async def main() -> None:
        async with Scheduler(port=0, dashboard_address=":0") as scheduler:
            scheduler.add_plugin(WorkerRegistry(scheduler, str(tmp_path), {}), name="gpujobs")
            async with Client(scheduler.address, asynchronous=True):
                await wait_for(1)
            await wait_for(0)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_dask_scheduler_of_a_cluster_lets_workers_leave_and_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with Scheduler(port=0, dashboard_address=":0") as scheduler:
            WorkerRegistry(scheduler, str(tmp_path), {}).install()
            assert {DRAIN, UNDRAIN, DRAINED} <= set(scheduler.handlers)

    asyncio.run(main())


def test_the_first_worker_is_written_at_once_and_later_ones_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_WRITE_INTERVAL", 3600.0)

    async def main() -> None:
        workers = {f"tls://{name}": state(name) for name in ("b-0", "b-1")}
        scheduler = SimpleNamespace(workers={}, handlers={}, status=Status.running)
        recorder = WorkerRegistry(scheduler, str(tmp_path), {})
        for address, worker in workers.items():
            scheduler.workers[address] = worker
            recorder.add_worker(scheduler, address)
            while "b-0" not in dask_workers(tmp_path).connected:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)

    asyncio.run(main())
    assert list(dask_workers(tmp_path).connected) == ["b-0"]


def test_events_that_the_disk_refuses_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_LATER_INTERVAL", 0.05)
    in_the_way = tmp_path / "workers-1.jsonl"
    in_the_way.mkdir()

    async def main() -> None:
        workers = {"tls://b-0": state("b-0")}
        scheduler = SimpleNamespace(workers=workers, handlers={}, status=Status.running)
        recorder = WorkerRegistry(scheduler, str(tmp_path), {})
        recorder.add_worker(scheduler, "tls://b-0")
        await asyncio.sleep(0.2)
        in_the_way.rmdir()
        while "b-0" not in dask_workers(tmp_path).connected:
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_worker_that_is_paused_for_its_memory_is_in_the_notes_until_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_PAUSED_AFTER", 0.05)
    address, mib = "tls://b-0", 2**20
    worker = SimpleNamespace(
        name="b-0", address=address, nthreads=2, extra={}, memory_limit=512 * mib,
        metrics={"memory": 480 * mib}, status=Status.paused,
    )  # fmt: skip

    async def main() -> None:
        scheduler = SimpleNamespace(workers={address: worker}, handlers={}, status=Status.running)
        recorder = WorkerRegistry(scheduler, str(tmp_path), {})
        recorder.add_worker(scheduler, address)

        async def change(status: Status, used: int, *expected: str) -> None:
            worker.status, worker.metrics["memory"] = status, used * mib
            event = {"action": "worker-status-change", "status": status.name}
            recorder.log_event(address, event)
            recorder.log_event(address, ["action"])
            recorder.log_event("all", event)
            while notes(read_state(tmp_path)) != [*expected]:
                await asyncio.sleep(0.05)

        await change(Status.paused, 480, "worker b-0 is paused: 480 of 512 MiB")
        await change(Status.running, 100)
        # It is one note of one worker, however often it is paused.
        await change(Status.paused, 490, "worker b-0 is paused: 480 of 512 MiB")
        del scheduler.workers[address]
        recorder.remove_worker(scheduler, address, stimulus_id="x")
        recorder.log_event("worker-restart-memory", {"worker": address, "pid": 1, "rss": 2})
        restarted = "worker b-0 restarted once: over its memory limit of 0.5 GiB: memory_per_job"
        await change(Status.paused, 490, restarted)

    asyncio.run(asyncio.wait_for(main(), patience(60)))
    assert capsys.readouterr().err.count("gpujobs: worker b-0 is paused: 480 of 512 MiB") == 1


def test_the_end_of_run_names_the_workers_that_lack_memory(tmp_path: Path) -> None:
    for name in ("jobs", "logs", "head-1"):
        (tmp_path / name).mkdir()
    memory = {"event": "over memory", "limit": 2**29}
    write_events(
        tmp_path,
        {**memory, "worker": "b-0", "restarts": 0, "paused": 480 * 2**20},
        {**memory, "worker": "b-1", "restarts": 2},
    )
    head = Head(SuperviseOptions(folder=str(tmp_path), job=0, started=time.time(), walltime=60))
    head.command = ManagedProcess("run:", ["sleep", "0"], tmp_path / "logs" / "run.log", os.environ)
    head._heartbeat()
    head._report_memory()
    assert head.command.wait(patience(10))
    paused = "worker b-0 is paused: 480 of 512 MiB"
    restarted = "worker b-1 restarted 2 times: over its memory limit of 0.5 GiB: memory_per_job"
    told = (tmp_path / "logs" / "run.log").read_text().splitlines()
    assert told == [f"gpujobs: {paused}", f"gpujobs: {restarted}"]
    ended = head._stopped("the walltime is nearly over")
    assert ended.reason.endswith(f"the walltime is nearly over ({paused}, and 1 more)")


def test_workers_that_leave_as_the_dask_scheduler_closes_stay_in_the_file(tmp_path: Path) -> None:
    """`status` of an ended cluster shows the GPUs that it had."""

    async def main() -> None:
        async with Scheduler(port=0, dashboard_address=":0") as scheduler:
            scheduler.add_plugin(WorkerRegistry(scheduler, str(tmp_path), {}), name="gpujobs")
            async with Worker(scheduler.address, name="p-0") as worker:
                while not dask_workers(tmp_path).connected:
                    await asyncio.sleep(0.05)
                await scheduler.close()
                await worker.finished()
            await asyncio.sleep(1)

    asyncio.run(main())
    assert [*dask_workers(tmp_path).connected] == ["p-0"]


def test_a_full_disk_under_the_log_ends_no_job() -> None:
    code = "from gpujobs.injob.log import log\nlog('a'); log('b'); print('goes on')"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            check=False,
        )
    assert done.stdout == "goes on\n"
