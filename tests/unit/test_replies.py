"""What is an answer of a batch scheduler, and what is none: judged by `reply`, before the output is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpujobs.batch import process
from gpujobs.batch.client import SchedulerClient, user_name
from gpujobs.batch.process import System
from gpujobs.errors import UnavailableError
from gpujobs.schedulers import CommandResult, JobId, Reply, Scheduler, get_scheduler

from ..support.transcripts import SQUEUE_FOUND_HEADER, SQUEUE_HEADER, recorded

SCHEDULERS = ["slurm", "pbs", "torque", "sge", "lsf", "local"]
JOBS, NAMES = [JobId("5", 1)], ["svd-7f3a"]

LISTED = {
    "slurm": f"{SQUEUE_HEADER}5|1|RUNNING|n1|N/A|None|svd-7f3a\n",
    "pbs": '{\n\t"timestamp":1,\n\t"Jobs":{\n\t\t"5[1].s":{"job_state":"R"}\n\t}\n}\n',
    "torque": "Job Id: 5[1].s\n    job_state = R\n",
    "sge": "<?xml version='1.0'?><job_info><queue_info></queue_info></job_info>\n",
    "lsf": "JOBID   USER    STAT  QUEUE  FROM_HOST  EXEC_HOST  JOB_NAME  SUBMIT_TIME\n"
    "5       alice   RUN   normal node1      node1      svd-7f3a[1]  Nov 20 10:39\n",
    "local": "h:1@1 0 RUNNING\n",
}


def status_command(scheduler: Scheduler) -> tuple[str, ...]:
    return tuple(scheduler.status_command(JOBS, NAMES, "alice"))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_empty_or_damaged_list_of_jobs_is_no_answer(name: str) -> None:
    scheduler = get_scheduler(name)()
    argv, whole = status_command(scheduler), LISTED[name]
    assert scheduler.reply(CommandResult(argv, 0, whole)) is Reply.ANSWER
    assert scheduler.reply(CommandResult(argv, 0, "")) is Reply.NONE
    if name != "local":  # our own program
        for damaged in ("\x00\x17garbled", whole[: len(whole) // 2]):
            assert scheduler.reply(CommandResult(argv, 0, damaged)) is not Reply.ANSWER, damaged


@pytest.mark.parametrize(
    ("name", "stdout"),
    [
        ("slurm", SQUEUE_FOUND_HEADER),
        ("slurm", f"CLUSTER: gpu\n{SQUEUE_FOUND_HEADER}5|svd-7f3a\n"),
        ("pbs", ""),
        ("pbs", "5[].node1\n6.node1\n"),
        ("torque", ""),
    ],
)
def test_no_jobs_of_a_name_are_an_answer(name: str, stdout: str) -> None:
    scheduler = get_scheduler(name)()
    argv = tuple(scheduler.find_command("svd-7f3a", "alice"))
    assert scheduler.reply(CommandResult(argv, 0, stdout)) is Reply.ANSWER
    assert scheduler.reply(CommandResult(argv, 0, "5|\x00")) is Reply.NONE


def test_a_user_that_squeue_cannot_resolve_is_no_answer() -> None:
    """Recorded on 22.05: the header, an error, and exit code 0."""
    slurm = get_scheduler("slurm")()
    said = CommandResult(
        status_command(slurm), 0, SQUEUE_HEADER, "squeue: error: Invalid user: 4711\n\n"
    )
    assert slurm.reply(said) is Reply.NONE


def test_squeue_selects_by_the_process_s_own_number() -> None:
    """--me, whatever $LOGNAME is; squeue of 22.05 refuses it for a number without a name."""
    slurm = get_scheduler("slurm")()
    assert "--me" in status_command(slurm)
    unnamed = slurm.find_command("svd-7f3a", "4711")
    assert "--me" not in unnamed and "--name=svd-7f3a" in unnamed


def test_the_name_of_the_user_comes_from_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    own = user_name()
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.setenv("USER", "somebody")
    assert user_name() == own != "somebody"
    monkeypatch.setattr(os, "getuid", lambda: 471147)
    assert user_name() == "471147"


MUNGE = """sbatch: error: If munged is up, restart with --num-threads=10
sbatch: error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory (Did you start munged?)
sbatch: error: slurm_send_node_msg: auth_g_create: REQUEST_SUBMIT_BATCH_JOB has authentication error
sbatch: error: Batch job submission failed: Protocol authentication error
"""
TRQAUTHD = """socket_connect_unix failed: 15137
qsub: cannot connect to server (null) (errno=15137) could not connect to trqauthd
"""


@pytest.mark.parametrize(
    ("name", "stderr", "why"),
    [
        ("slurm", MUNGE, "munged does not run on this host"),
        ("torque", TRQAUTHD, "trqauthd does not run on this host"),
        ("torque", "pbs_iff: cannot connect to host\n", "pbs_iff cannot authorize this user"),
    ],
)
def test_a_daemon_that_does_not_run_on_this_host_is_named_at_once(
    tmp_path: Path, name: str, stderr: str, why: str
) -> None:
    """It is named, and a submission does not wait for it as for a server that is away."""
    scheduler = get_scheduler(name)()
    commands = {}
    for command in ("sbatch", "squeue", "qsub", "qstat"):
        (tmp_path / command).write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{stderr}END\nexit 33\n")
        (tmp_path / command).chmod(0o755)
        commands[command] = str(tmp_path / command)
    waited: list[float] = []

    class Clock(System):
        def monotonic(self) -> float:
            return sum(waited)

        def sleep(self, seconds: float) -> None:
            waited.append(seconds)

    client = SchedulerClient(scheduler, commands, system=Clock())
    with pytest.raises(UnavailableError, match=why):
        client.submit("#!/bin/sh\n", "svd-7f3a", [], tmp_path)
    with pytest.raises(UnavailableError, match=why):
        client.find("svd-7f3a")
    assert sum(waited) < 20


QUEUE_FULL = "sbatch: error: Slurm job queue full, sleeping and retrying\n"


def test_a_full_queue_is_reported_in_its_own_words(tmp_path: Path) -> None:
    """sbatch tries again for two minutes by itself, and is stopped."""

    class Full(System):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

        def run(self, argv: Any, *, timeout: float, **_: Any) -> CommandResult:
            words = tuple(argv)
            if words[0] == "squeue":
                return CommandResult(words, 0, SQUEUE_FOUND_HEADER)
            self.now += timeout
            problem = f"sbatch did not respond within {timeout:.0f} s"
            return CommandResult(words, None, "", QUEUE_FULL, problem)

    system = Full()
    client = SchedulerClient(get_scheduler("slurm")(), system=system)
    with pytest.raises(UnavailableError) as failure:
        client.submit("#!/bin/sh\n", "svd-7f3a", [], tmp_path)
    assert "slurm has not accepted the job for 90 s" in str(failure.value)
    assert QUEUE_FULL.strip() in str(failure.value)
    assert failure.value.exit_code == 3 and system.now < 110


@pytest.mark.parametrize("title", ["submit", "status", "status, json", "cancel"])
def test_a_server_that_is_away_is_no_fault_of_this_host(title: str) -> None:
    pbs = get_scheduler("pbs")()
    result = recorded("pbs", "07-server-down.txt", title)
    assert pbs.reply(result) is Reply.NONE and not pbs.host_fault(result)


def test_the_output_of_a_command_that_does_not_end_is_reported(tmp_path: Path) -> None:
    """Recorded on 22.05 with MaxJobCount reached: sbatch sleeps for two minutes."""
    text = "sbatch: error: Slurm job queue full, sleeping and retrying"
    script = tmp_path / "sbatch"
    script.write_text(f"#!/bin/sh\necho '{text}' >&2\nsleep 60\n")
    script.chmod(0o755)
    stopped = process.run([str(script)], timeout=1)
    assert stopped.exit_code is None
    assert stopped.first_line == f"{script} did not respond within 1 s: {text}"
    assert get_scheduler("slurm")().reply(stopped) is Reply.NONE


@pytest.mark.parametrize(
    ("name", "stderr", "certain"),
    [
        (
            "slurm",
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv",
            False,
        ),
        (
            "slurm",
            "Batch job submission failed: Unable to contact slurm controller (connect failure)",
            True,
        ),
        ("slurm", "Unable to contact slurm controller (receive failure)", False),
        ("pbs", "Connection refused\nqsub: cannot connect to server node1 (errno=15010)", True),
        ("pbs", "qsub: End of File", False),
        ("torque", "qsub: cannot connect to server node1 (errno=111) Connection refused", True),
        ("lsf", "Contacting batch daemon: Communication timeout. Job not submitted.", True),
        ("lsf", "batch system daemon not responding ... still trying", False),
        ("sge", "error: commlib error: got select error (Connection refused)", True),
        (
            "sge",
            "failed receiving gdi request response for mid=1 (got syncron message receive timeout error).",
            False,
        ),
    ],
)
def test_some_failures_are_certain_to_have_submitted_nothing(
    name: str, stderr: str, certain: bool
) -> None:
    assert bool(get_scheduler(name)().unsent.search(stderr)) is certain


@pytest.mark.parametrize("again", [True, False])
def test_a_submission_without_a_reply_is_tried_once_more_when_it_cannot_be_there(
    tmp_path: Path, again: bool
) -> None:
    class Lossy(System):
        now = 0.0

        def __init__(self) -> None:
            self.sent: list[float] = []

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

        def run(self, argv: Any, **_: Any) -> CommandResult:
            words = tuple(argv)
            if words[0] == "squeue":
                return CommandResult(words, 0, SQUEUE_FOUND_HEADER)
            self.sent.append(self.now)
            if again and len(self.sent) == 2:
                return CommandResult(words, 0, "7\n")
            return CommandResult(words, 1, "", "sbatch: error: Socket timed out on send/recv")

    system = Lossy()
    client = SchedulerClient(get_scheduler("slurm")(), system=system)
    if again:
        assert client.submit("#!/bin/sh\n", "svd-7f3a", [], tmp_path) == "7"
    else:
        with pytest.raises(UnavailableError, match="has not accepted the job"):
            client.submit("#!/bin/sh\n", "svd-7f3a", [], tmp_path)
    first, second = system.sent
    assert first == 0 and 90 <= second < 110
