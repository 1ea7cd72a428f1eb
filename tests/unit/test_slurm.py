"""Slurm's formats and parsers."""

from __future__ import annotations

import pytest

from gpujobs.injob.names import ranges
from gpujobs.schedulers import CommandResult, JobId, JobState, JobStatus, Reply
from gpujobs.schedulers.formats import members
from gpujobs.schedulers.slurm import Slurm

from ..support.each import each

SLURM = Slurm()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (59, "00:00:59"),
        (3600, "01:00:00"),
        (86399, "23:59:59"),
        (86400, "1-00:00:00"),
        (172861, "2-00:01:01"),
    ],
)
def test_a_walltime_is_days_hours_minutes_and_seconds(seconds: int, text: str) -> None:
    assert SLURM.walltime(seconds) == text


@pytest.mark.parametrize(
    ("stdout", "number"),
    [
        ("42\n", "42"),
        ("42;cluster\n", "42"),
        ("sbatch: warning: maintenance\n\n43\n", "43"),
        ("", None),
        ("garbage\n", None),
        ("42 x\n", None),
    ],
)
def test_the_id_is_read_from_the_answer_of_sbatch(stdout: str, number: str | None) -> None:
    assert SLURM.parse_submit(stdout) == number


LISTED = """\
9|4-6,8%4|PENDING||N/A|JobArrayTaskLimit|foo-1
10|N/A|PENDING||2026-11-20T13:44:49|Resources|foo-1
9|0|RUNNING|node1|2026-11-20T12:44:49|None|foo-1
9|1|COMPLETED|node2|2026-11-20T12:44:49|None|foo-1
9|2|NODE_FAIL|node3|2026-11-20T12:44:49|None|foo-1
9|3|FUNNY_STATE|node4|2026-11-20T12:44:49|None|foo-1
77|N/A|RUNNING|node4|2026-11-20T12:44:49|None|some|body's job
not a line
"""


def test_squeue_tells_the_states_of_arrays_and_jobs() -> None:
    ids = [JobId("9", n) for n in range(10)] + [JobId("10"), JobId("99")]
    found = SLURM.parse_status(CommandResult(("squeue",), 0, LISTED), ids)
    assert {job.index: status.state.value for job, status in found.items() if job.submission == "9"} == {
        0: "RUNNING", 1: "COMPLETED", 2: "NODE_FAIL", 3: "UNKNOWN", 4: "PENDING", 5: "PENDING", 6: "PENDING", 8: "PENDING",
    }  # fmt: skip
    assert found[JobId("9", 3)].native == "FUNNY_STATE"
    assert found[JobId("9", 4)].reason == "JobArrayTaskLimit"
    assert found[JobId("10")].starts == "2026-11-20T13:44:49"
    assert JobId("99") not in found and JobId("9", 7) not in found  # not listed is not finished


@each(
    ("native", "state"),
    [
        ("PENDING", "PENDING"), ("CONFIGURING", "PENDING"), ("REQUEUED", "PENDING"), ("REQUEUE_HOLD", "PENDING"),
        ("SPECIAL_EXIT", "FAILED"), ("RUNNING", "RUNNING"), ("COMPLETING", "RUNNING"), ("RESIZING", "RUNNING"),
        ("EXPEDITING", "PENDING"), ("SIGNALING", "RUNNING"), ("STAGE_OUT", "RUNNING"), ("SUSPENDED", "SUSPENDED"), ("STOPPED", "SUSPENDED"),
        ("COMPLETED", "COMPLETED"), ("FAILED", "FAILED"), ("BOOT_FAIL", "FAILED"), ("CANCELLED", "CANCELLED"),
        ("REVOKED", "CANCELLED"), ("TIMEOUT", "TIMEOUT"), ("DEADLINE", "TIMEOUT"), ("PREEMPTED", "PREEMPTED"),
        ("NODE_FAIL", "NODE_FAIL"), ("OUT_OF_MEMORY", "OUT_OF_MEMORY"), ("", "UNKNOWN"), ("NEW", "UNKNOWN"),
    ],
)  # fmt: skip
def test_words_of_slurm_are_a_state(native: str, state: str) -> None:
    line = f"5|N/A|{native}|n1|N/A|None|x-1\n"
    assert (
        SLURM.parse_status(CommandResult(("squeue",), 0, line), [JobId("5")])[
            JobId("5")
        ].state.value
        == state
    )


@pytest.mark.parametrize(
    ("native", "reason"),
    [
        ("PENDING", "launch failed requeued held"),  # as squeue of Slurm 22.05 prints it
        ("PENDING", "launch_failed_requeued_held"),  # and as its scontrol does
        ("PENDING", "user env retrieval failed requeued held"),  # 25.05 and newer
        ("REQUEUE_HOLD", "launch failure limit exceeded requeued held"),
        ("PENDING", "JobHoldMaxRequeue"),
        ("SPECIAL_EXIT", "JobHeldUser"),
        ("PENDING", "some new reason requeued held"),
    ],
)
def test_a_job_that_is_held_after_a_failure_has_failed(native: str, reason: str) -> None:
    found = status_of(f"64|N/A|{native}||2026-11-20T13:44:49|{reason}|dask-5376\n")
    assert (found.state, found.native, found.stuck) == (JobState.FAILED, native, True)
    assert found.starts == "" and ": " in found.reason


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETED", "TIMEOUT", "RUNNING"])
def test_only_a_job_that_waits_is_held(state: str) -> None:
    """Slurm keeps the reason of a held job that is cancelled."""
    found = status_of(f"64|N/A|{state}||N/A|launch failed requeued held|dask-5376\n")
    assert found.state is JobState(state) and not found.stuck and not found.waits


@pytest.mark.parametrize(
    ("native", "reason", "words"),
    [
        ("PENDING", "JobHeldUser", "held by its user"),
        ("PENDING", "JobHeldAdmin", "held by an administrator"),
        ("REQUEUE_HOLD", "job requeued in held state", "scontrol requeuehold"),
        ("PENDING", "PartitionNodeLimit", "than the partition allows"),
        ("PENDING", "Resources", "Resources"),
    ],
)
def test_a_job_that_a_person_holds_waits(native: str, reason: str, words: str) -> None:
    found = status_of(f"64|N/A|{native}||N/A|{reason}|dask-5376\n")
    assert (found.state, found.stuck) == (JobState.PENDING, False)
    assert found.reason.startswith(reason) and words in found.reason


def status_of(line: str) -> JobStatus:
    return SLURM.parse_status(CommandResult(("squeue",), 0, line), [JobId("64")])[JobId("64")]


ACCOUNTED = """\
20_0|COMPLETED|0:0|node1
20_1|CANCELLED by 1000|0:15|node2
20_[2-3]|CANCELLED by 1000|0:0|None assigned
21|TIMEOUT|0:0|node1
22|FAILED|3:0|node1
23|OUT_OF_MEMORY|0:125|node1
24|FAILED|0:9|node1
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [("137:0", 137), ("255:0", 255), ("9:0", 9), ("0:9", 137), ("0:0", 0), ("137:9", 137)],
)
def test_exit_codes_of_the_accounting_are_those_of_a_shell(text: str, code: int) -> None:
    """From 25.11 on, sacct does not subtract 128 from those above it."""
    done = CommandResult(("sacct",), 0, f"5|FAILED|{text}|n1\n")
    assert SLURM.parse_accounting(done, [JobId("5")])[JobId("5")].exit_code == code


def test_the_accounting_tells_how_jobs_ended() -> None:
    ids = [JobId("20", n) for n in range(4)] + [JobId(str(n)) for n in range(21, 26)]
    found = SLURM.parse_accounting(CommandResult(("sacct",), 0, ACCOUNTED), ids)
    assert found[JobId("20", 0)].state is JobState.COMPLETED
    assert found[JobId("20", 1)].state is JobState.CANCELLED
    assert (found[JobId("20", 1)].cancelled_by, found[JobId("20", 1)].reason) == (1000, "")
    assert found[JobId("20", 3)].state is JobState.CANCELLED
    assert found[JobId("21")].state is JobState.TIMEOUT
    assert (found[JobId("22")].state, found[JobId("22")].exit_code) == (JobState.FAILED, 3)
    assert found[JobId("23")].state is JobState.OUT_OF_MEMORY
    assert found[JobId("24")].exit_code == 137
    assert JobId("25") not in found
    disabled = CommandResult(("sacct",), 1, "", "Slurm accounting storage is disabled\n")
    assert SLURM.parse_accounting(disabled, ids) == {}


@each(
    ("stderr", "away"),
    [
        (
            "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
            True,
        ),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", True),
        (
            "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
            True,
        ),
        ("slurm_load_jobs error: Connection refused", True),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", True),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            False,
        ),
        ("sbatch: error: invalid partition specified: nope", False),
        ("sbatch: error: Invalid generic resource (gres) specification", False),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", False),
    ],
)
def test_away_is_told_from_refused(stderr: str, away: bool) -> None:
    assert (SLURM.reply(CommandResult(("sbatch",), 1, "", stderr)) is Reply.NONE) is away


def test_cancel_is_one_call() -> None:
    assert SLURM.cancel_commands({"7": [], "8": [0, 1, 2, 5]}) == [["scancel", "7", "8_[0-2,5]"]]


def test_binding_of_gpus_that_is_switched_off_is_allowed() -> None:
    for line in ("--gpu-bind=none", "--gpu-bind=verbose,none"):
        assert not SLURM.options(line) & SLURM.refused.keys()
    assert SLURM.options("--gpu-bind=closest --qos=x") == {"gpu-bind", "qos"}


def test_ids_are_spelled_as_scancel_takes_them() -> None:
    assert (SLURM.show_id(JobId("7")), SLURM.show_id(JobId("7", 3))) == ("7", "7_3")


def test_multi_cluster_name_is_in_every_command() -> None:
    slurm = Slurm("escape")
    commands = [
        slurm.submit_command(), slurm.status_command([], ["x"], "ada"), slurm.accounting_command([JobId("1")]), slurm.cancel_command(["1"]),
        slurm.find_command("x", "ada"), slurm.estimate_command(), slurm.limit_command(),
    ]  # fmt: skip
    assert all("--clusters=escape" in command for command in commands if command)


def test_the_largest_array_is_one_less_than_the_limit_of_slurm() -> None:
    assert SLURM.parse_limit("MaxArraySize            = 1001\nMaxJobCount = 10000\n") == 1000
    assert SLURM.parse_limit("") is None


@pytest.mark.parametrize("line", ["--partition=a,bb", "--part a,bb", "-p a,bb", "-pa,bb"])
def test_an_estimate_names_one_partition(line: str) -> None:
    """A list with an empty partition ends slurmctld before 25.11.7 and 26.05.2."""
    scripts = SLURM.queue_by_queue(f"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH {line}\necho a,b\n")
    first = f"#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH {line[:-4]}a\necho a,b\n"
    assert scripts == [first, first.replace(f"{line[:-4]}a\n", f"{line[:-4]}bb\n")]
    assert SLURM.queue_by_queue(first) == [first]


def test_an_estimate_is_a_start_or_empty() -> None:
    starts = "sbatch: Job 16 to start at 2026-11-20T12:44:53 using 1 processors on nodes node1 in partition main\n"
    assert SLURM.parse_estimate(CommandResult(("sbatch",), 0, "", starts)) == "2026-11-20T12:44:53"
    impossible = "allocation failure: Requested node configuration is not available\n"
    assert SLURM.parse_estimate(CommandResult(("sbatch",), 1, "", impossible)) == ""


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", [3]),
        ("[1-3,5%2]", [1, 2, 3, 5]),
        ("1-9:4", [1, 5, 9]),
        ("N/A", []),
        ("", []),
        ("0-2,7", [0, 1, 2, 7]),
        ("1,...", []),
    ],
)
def test_a_list_of_members_is_read_as_its_numbers(text: str, numbers: list[int]) -> None:
    assert members(text) == numbers


def test_consecutive_numbers_are_written_as_ranges() -> None:
    assert ranges({1, 2, 3, 5, 9, 8}) == "1-3,5,8-9"
    assert ranges([4]) == "4"
