"""Torque's formats and parsers, on what the real one said."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from gpujobs.errors import InputError
from gpujobs.injob.gpus import visible_devices
from gpujobs.planning.render import render
from gpujobs.schedulers import CommandResult, JobId, JobState, Reply
from gpujobs.schedulers.torque import Torque

from ..support.each import each
from ..support.transcripts import recorded
from .support import plan

TORQUE = Torque()


@pytest.mark.parametrize(
    ("title", "number"),
    [
        ("script with directives", "0.node1"),
        ("array: the id has brackets", "1[].node1"),
        ("gpus with a mode", "11.node1"),
    ],
)
def test_the_id_is_read_from_the_answer_to_a_submission(title: str, number: str) -> None:
    assert TORQUE.parse_submit(recorded("torque", "01-submit-ok.txt", title).stdout) == number


@each(
    ("file", "title", "identity", "state", "code"),
    [
        ("03-status.txt", "running, one attribute a line", "21", "RUNNING", None),
        ("03-status.txt", "pending, states", "25", "PENDING", None),
        ("03-status.txt", "held, states", "22", "PENDING", None),
        ("03-status.txt", "dependent, states", "23", "PENDING", None),
        ("03-status.txt", "one array member", "24[][1]", "RUNNING", None),
        ("04-finished.txt", "done", "27", "COMPLETED", 0),
        ("04-finished.txt", "failed with 3", "28", "FAILED", 3),
        ("04-finished.txt", "segmentation fault", "29", "FAILED", 139),
        ("04-finished.txt", "over its walltime", "30", "TIMEOUT", -11),
        ("04-finished.txt", "deleted while running", "31", "CANCELLED", 143),
        ("04-finished.txt", "deleted while queued", "32", "CANCELLED", None),
        ("queues.txt", "prologue that exits with 1", "5", "FAILED", -2),
    ],
)
def test_a_recorded_job_has_its_state_and_exit_code(
    file: str, title: str, identity: str, state: str, code: int | None
) -> None:
    job = JobId.parse(identity)
    found = TORQUE.parse_status(recorded("torque", file, title), [job])[job]
    assert (found.state.value, found.exit_code) == (state, code)


def test_each_recorded_member_has_its_own_state() -> None:
    ids = [JobId("33[]", n) for n in range(9)]
    found = TORQUE.parse_status(recorded("torque", "04-finished.txt", "array members"), ids)
    assert found.pop(JobId("33[]", 3)).state is JobState.FAILED
    assert {status.state for status in found.values()} == {JobState.COMPLETED}
    assert len(found) == 7


def test_more_may_be_listed_than_was_asked_for() -> None:
    result = recorded("torque", "04-finished.txt", "array")
    assert list(TORQUE.parse_status(result, [JobId("28")])) == [JobId("28")]


def test_a_status_has_the_node_or_the_reason_of_waiting() -> None:
    job = JobId("21")
    found = TORQUE.parse_status(
        recorded("torque", "03-status.txt", "running, one attribute a line"), [job]
    )[job]
    assert (found.node, found.reason) == ("node1", "")
    job = JobId("25")
    found = TORQUE.parse_status(recorded("torque", "03-status.txt", "pending, states"), [job])[job]
    assert found.reason == "Not Running: Not enough of the right type of nodes are available"


@pytest.mark.parametrize(
    ("title", "job", "reason"),
    [
        ("held after it had a comment", "4", "held by a user (qhold; qrls releases it)"),
        ("members held by the slot limit", "2[][1]", "held: as many jobs of its array run as the slot limit allows (max_slot_limit)"),
        ("prologue that exits with 1", "5", "its node could not start it: a prologue failed, for example"),
    ],
)  # fmt: skip
def test_a_hold_and_a_failed_start_replace_an_older_comment(
    title: str, job: str, reason: str
) -> None:
    """The comment of a job may be older than a hold or than a failed start."""
    id_ = JobId.parse(job)
    found = TORQUE.parse_status(recorded("torque", "queues.txt", title), [id_])[id_]
    assert found.reason == reason and not found.stuck


@pytest.mark.parametrize(
    ("title", "job", "state", "reason"),
    [
        ("prologue that exits with 2", "6", JobState.FAILED, "a prologue failed on its node; it was started 37 times"),
        ("prologue that exits with 2, at a start", "71", JobState.FAILED, "a prologue failed on its node; it was started 59 times"),
        ("prologue that exits with 2, at its end", "71", JobState.FAILED, "a prologue failed on its node; it was started 139 times"),
        ("prologue that exited with 2 six times", "78", JobState.RUNNING, ""),
        ("started again by qrerun", "79", JobState.PENDING, "queued"),
    ],
)  # fmt: skip
def test_a_job_that_starts_again_and_again_is_stuck_until_it_runs(
    title: str, job: str, state: JobState, reason: str
) -> None:
    """Its exit code is that of an earlier start, and its session 0 until its script runs."""
    found = TORQUE.parse_status(recorded("torque", "queues.txt", title), [JobId(job)])[JobId(job)]
    code = -14 if state is JobState.FAILED else None
    assert (found.state, found.reason, found.exit_code) == (state, reason, code)
    assert found.stuck is (state is JobState.FAILED)


@pytest.mark.parametrize(
    ("title", "job", "state"),
    [
        ("prologue that exits with 2", "6", JobState.PENDING),
        ("prologue that exits with 2, at a start", "71", JobState.RUNNING),
    ],
)
def test_a_job_that_is_started_again_once_is_not_stuck(
    title: str, job: str, state: JobState
) -> None:
    found = recorded("torque", "queues.txt", title)
    again = replace(found, stdout=re.sub(r"start_count = \d+", "start_count = 2", found.stdout))
    status = TORQUE.parse_status(again, [JobId(job)])[JobId(job)]
    assert (status.state, status.stuck) == (state, False)


@pytest.mark.parametrize("title", ["jobs", "queues", "server"])
def test_answers_that_are_cut_are_none(title: str) -> None:
    answer = recorded("torque", "queues.txt", title)
    assert TORQUE.reply(answer) is Reply.ANSWER
    assert TORQUE.reply(replace(answer, stdout=answer.stdout.rstrip())) is Reply.NONE


def test_no_jobs_at_all_are_an_answer() -> None:
    """Jobs whose ids were given are listed, or an error."""
    assert TORQUE.reply(CommandResult(("qstat", "-t", "-f1"), 0)) is Reply.ANSWER
    assert TORQUE.reply(CommandResult(("qstat", "-t", "-f1", "5.srv"), 0)) is Reply.NONE


def test_jobs_are_asked_for_again_after_qstat_ran_out_of_connections() -> None:
    """Of 6.1.3, which keeps a connection for each id that is unknown, and has ten."""
    ids = [JobId(f"{n}.tqn1") for n in range(30)]
    told = "".join(f"qstat: Unknown Job Id Error {n}.tqn1\n" for n in range(9))
    lost = "Too many open connections.\nUnable to communicate with tqn1(10.87.0.11)\n"
    argv = tuple(TORQUE.status_command(ids, [], "ada"))
    answer = CommandResult(argv, 153, "", told + lost)
    assert TORQUE.reply(answer) is Reply.ANSWER
    more = TORQUE.more_status_commands(ids, answer)
    asked = [word for command in more for word in command[3:]]
    assert sorted(asked) == sorted(f"{n}.tqn1" for n in range(9, 30))
    assert max(map(len, more)) < 3 + 9
    assert TORQUE.reply(CommandResult(argv, 153, "", lost)) is Reply.NONE  # the server is away
    assert TORQUE.more_status_commands(ids, CommandResult(argv, 153, "", told)) == []


def test_the_largest_array_is_that_of_the_server() -> None:
    assert TORQUE.limit_command() == ["qstat", "-B", "-f1"]
    assert TORQUE.parse_limit(recorded("torque", "queues.txt", "server").stdout) == 8
    assert TORQUE.parse_limit("Server: node1\n    server_state = Active\n") is None


@pytest.mark.parametrize(
    ("root", "directive"),
    [
        ("/home/ada/.gpujobs", "/home/ada/.gpujobs/x/logs/torque.log"),
        ("/data/it's(1)", r'"/data/it\'s\(1\)/x/logs/torque.log"'),
        ("/data/a b", "/dev/null"),
        ('/data/a"b', "/dev/null"),
        ("/data/é", "/dev/null"),
    ],
)
def test_the_path_of_the_log_of_torque_is_quoted_for_a_shell(root: str, directive: str) -> None:
    """As measured: pbs_mom expands the path like a shell; nothing is copied to one with a space."""
    assert TORQUE.output(root, "x", array=True) == directive


@each(
    ("state", "code", "expected"),
    [
        ("Q", None, "PENDING"), ("H", None, "PENDING"), ("W", None, "PENDING"), ("T", None, "PENDING"), ("R", None, "RUNNING"),
        ("E", None, "RUNNING"), ("S", None, "SUSPENDED"), ("C", 0, "COMPLETED"), ("C", 1, "FAILED"), ("C", 271, "CANCELLED"),
        ("C", None, "CANCELLED"), ("C", -11, "TIMEOUT"), ("C", -12, "TIMEOUT"), ("C", -10, "OUT_OF_MEMORY"), ("C", -4, "NODE_FAIL"), ("C", 265, "FAILED"),
        ("C", -1, "FAILED"), ("Z", None, "UNKNOWN"), ("", None, "UNKNOWN"),
    ],
)  # fmt: skip
def test_state_and_exit_status_of_torque_are_a_state(
    state: str, code: int | None, expected: str
) -> None:
    text = f"Job Id: 5.srv\n    Job_Name = x\n    job_state = {state}\n" + (
        f"    exit_status = {code}\n" if code is not None else ""
    )
    assert (
        TORQUE.parse_status(CommandResult(("qstat",), 0, text), [JobId("5")])[
            JobId("5")
        ].state.value
        == expected
    )


def test_cancel_of_members_has_no_ranges() -> None:
    """Its qdel knows no 5[1-2]."""
    assert TORQUE.cancel_commands({"5[].srv": [1, 2], "6[].srv": [], "7.srv": []}) == [
        ["qdel", "5[1].srv", "5[2].srv", "6[].srv", "7.srv"]
    ]


def test_unknown_array_is_gone() -> None:
    gone = CommandResult(
        ("qdel",), 153, "", "qdel: Unknown Array Id MSG=cannot find array 5[].srv\n"
    )
    assert TORQUE.already_ended(gone) and TORQUE.reply(gone) is Reply.ANSWER


def test_variables_of_a_job_do_not_pass_for_its_attributes() -> None:
    text = "Job Id: 5.srv\n    Variable_List = A=1,\n\tjob_state = C\n    job_state = R\n\nJob Id: rubbish\n    job_state = C\n"
    found = TORQUE.parse_status(CommandResult(("qstat",), 0, text), [JobId("5")])
    assert {job: status.state for job, status in found.items()} == {JobId("5"): JobState.RUNNING}


@pytest.mark.parametrize("title", ["submit", "status", "status, xml", "cancel"])
def test_a_server_that_is_down_is_no_reply(title: str) -> None:
    assert TORQUE.reply(recorded("torque", "07-server-down.txt", title)) is Reply.NONE


@pytest.mark.parametrize(
    "title",
    [
        "unknown queue",
        "unknown resource",
        "more gpus than there are",
        "walltime over the queue's limit",
        "bad walltime",
        "bad directive",
    ],
)
def test_recorded_refusal_is_final(title: str) -> None:
    assert TORQUE.reply(recorded("torque", "02-submit-rejected.txt", title)) is not Reply.NONE


@pytest.mark.parametrize(
    ("title", "gone"), [("finished", True), ("unknown", True), ("malformed", False)]
)
def test_recorded_answers_to_a_cancel_say_whether_the_job_is_gone(title: str, gone: bool) -> None:
    assert TORQUE.already_ended(recorded("torque", "05-cancel.txt", title)) is gone


def test_unknown_job_is_no_outage() -> None:
    result = recorded("torque", "03-status.txt", "unknown")
    assert (
        TORQUE.reply(result) is not Reply.NONE
        and TORQUE.parse_status(result, [JobId("99999")]) == {}
    )


def test_find_takes_the_array_and_not_its_members() -> None:
    text = "Job Id: 7[].srv\n    Job_Name = svd-1\n\nJob Id: 8.srv\n    Job_Name = svd-12\n\nJob Id: 9.srv\n    Job_Name = svd-1\n"
    assert TORQUE.parse_find(text, "svd-1") == {"7[].srv", "9.srv"}


# -- sites and scripts ---------------------------------------------------------------------------------------------
SITE = """
description: an old Torque
scheduler: torque
queues: {batch: {gpus_per_node: 2, cpus_per_node: 32, memory_per_node: 64GiB, max_walltime: 24h}}
"""


@pytest.fixture
def site(tmp_path: Path) -> str:
    (tmp_path / "old.yaml").write_text(SITE)
    return str(tmp_path / "old.yaml")


def test_the_built_in_request_asks_for_nodes_ppn_and_gpus(tmp_path: Path, site: str) -> None:
    made = plan(tmp_path, {"gpus": 2, "walltime": "1h"}, site)
    assert made.groups[0].lines == ("-q batch", "-l nodes=1:ppn=32:gpus=2", "-l mem=65536mb")
    assert made.groups[0].visible_devices == "scheduler"
    two = plan(tmp_path, {"gpus": 4, "layout": "mpi", "walltime": "1h"}, site)
    assert two.groups[0].lines[1] == "-l nodes=2:ppn=32:gpus=2"
    half = plan(tmp_path, {"gpus": 2, "gpus_per_job": 1, "walltime": "1h"}, site)
    assert half.groups[0].lines[1] == "-l nodes=1:ppn=16:gpus=1"


def test_sites_own_nodes_line_is_kept(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        SITE
        + 'request: ["-q {queue}", "-l nodes={nodes}:ppn=2:gpus={gpus_per_node}:exclusive_process"]\n'
        "visible_devices: {file: PBS_GPUFILE}\n"
    )
    made = plan(
        tmp_path, {"gpus": 4, "layout": "mpi", "walltime": "1h"}, str(tmp_path / "own.yaml")
    )
    assert made.groups[0].lines == ("-q batch", "-l nodes=2:ppn=2:gpus=2:exclusive_process")
    assert made.groups[0].visible_devices == "file:PBS_GPUFILE"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-l select=1:ncpus=2:ngpus=1", "Torque accepts and ignores it"), ("-J 0-3", "only PBS Professional has it"),
        ("-t 0-3", "-t is written by gpujobs"), ("-l nodes=3", "-l nodes is written"), ("-l walltime=1", "-l walltime is written"),
    ],
)  # fmt: skip
def test_lines_that_a_user_may_not_write_are_refused(
    tmp_path: Path, site: str, line: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        plan(tmp_path, {"gpus": 2, "walltime": "1h", "directives": [line]}, site)


def test_the_script_has_an_array_of_torque(tmp_path: Path, site: str) -> None:
    text = render(
        plan(tmp_path, {"gpus": 2, "gpus_per_job": 1, "walltime": "90m"}, site), "svd-0000"
    )[0].text
    assert (
        "#PBS -t 0-1\n" in text and "#PBS -l walltime=01:30:00\n" in text and "#PBS -r n\n" in text
    )
    assert 'id="${PBS_JOBID/\\[*\\]/[]}[$PBS_ARRAYID]"' in text
    assert "/logs/torque.log\n" in text


def test_gpu_file_lists_all_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        recorded("torque", "06-environment.txt", "parallel job")
        .stdout.partition("== gpufile\n")[2]
        .splitlines()[:4]
    )
    (tmp_path / "gpus").write_text("\n".join(lines))
    monkeypatch.setenv("SLURMD_NODENAME", "node2.example.org")
    assert visible_devices("file:PBS_GPUFILE", {"PBS_GPUFILE": str(tmp_path / "gpus")}) == [
        "1",
        "0",
    ]
