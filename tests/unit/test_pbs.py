"""OpenPBS's formats and parsers, on what the real one said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpujobs.errors import InputError
from gpujobs.planning.layouts import MpiLayout
from gpujobs.planning.render import render
from gpujobs.schedulers import CommandResult, JobId, JobState, JobStatus, Reply, get_scheduler
from gpujobs.schedulers.pbs import PBS
from gpujobs.schedulers.pbs_inventory import PBSInventory

from ..support.each import each
from ..support.transcripts import recorded
from .support import SITES, plan

PBS_ = PBS()


def qstat(file: str, title: str) -> CommandResult:
    """Return a recorded answer; where it was filtered with egrep, what is left is mended to be JSON again."""
    found = recorded("pbs", file, title)
    text = re.sub(r",(\s*[}\]])", r"\1", re.sub(r"\n\t\t\t},(?=\n\t\t\t\")", "", found.stdout))
    return CommandResult(found.argv, found.exit_code, text, found.stderr)


def one(file: str, title: str, identity: str) -> JobStatus:
    job = JobId.parse(identity)
    return PBS_.parse_status(qstat(file, title), [job])[job]


# -- ids ---------------------------------------------------------------------------------------------------------
@each(
    ("stdout", "number"),
    [
        ("61.node1\n", "61.node1"), ("63[].node1\n", "63[].node1"), ("Charging project ab12\n\n64.gadi-pbs\n", "64.gadi-pbs"),
        ("65\n", "65"), ("6406010.casper-pbs\n", "6406010.casper-pbs"), ("6406010", None), ("", None), ("garbage\n", None), ("qsub: job 12.x ready\n", None), ("12. 3\n", None),
    ],
)  # fmt: skip
def test_the_id_is_read_from_the_answer_of_qsub(stdout: str, number: str | None) -> None:
    assert PBS_.parse_submit(stdout) == number


@pytest.mark.parametrize(
    ("title", "number"),
    [
        ("script with directives", "61.node1"),
        ("array: the id has brackets", "63[].node1"),
        ("gpu type", "73.node1"),
    ],
)
def test_the_id_is_read_from_the_answer_to_a_submission(title: str, number: str) -> None:
    assert PBS_.parse_submit(recorded("pbs", "01-submit-ok.txt", title).stdout) == number


def test_member_of_an_array_is_the_same_everywhere() -> None:
    """In the answer of qsub, in the script's claim, in a cancel, and for people."""
    number = PBS_.parse_submit("63[].node1\n")
    assert number is not None
    job = JobId(number, 4)
    assert JobId.parse("63[].node1[4]") == job == JobId.parse(str(job))  # what the template writes
    assert PBS_.show_id(job) == "63[4]" and PBS_.show_id(JobId("61.node1")) == "61"
    assert PBS_.target(number) == ["63[].node1"]
    assert PBS_.target(number, [4, 5, 7]) == ["63[4-5].node1", "63[7].node1"]
    command = PBS_.status_command([JobId("61.node1"), job, JobId(number, 5)], [], "ada")
    assert command == ["qstat", "-t", "-f", "-F", "json", "-x", "61.node1", "63[].node1"]


def test_server_is_spelled_unlike_in_a_job() -> None:
    text = json.dumps({"Jobs": {"63[4].node1.example.org": {"job_state": "R"}}})
    for server in ("", ".node1", ".node1.example.org"):
        job = JobId(f"63[]{server}", 4)
        found = PBS_.parse_status(CommandResult(("qstat",), 0, text), [job])
        assert found[job].state is JobState.RUNNING


def test_other_server_is_the_default_one_of_all_commands() -> None:
    pbs = PBS("casper-pbs")
    assert pbs.fixed_environment == {"PBS_SERVER": "casper-pbs", "PBS_DEFAULT": "casper-pbs"}
    assert pbs.show_id(JobId("7[].casper-pbs", 1)) == "7[1].casper-pbs"
    assert not PBS_.fixed_environment


def test_jobs_that_the_first_answer_lacks_are_queried_one_by_one() -> None:
    missing = [JobId("62.node1"), JobId("63[].node1", 0), JobId("63[].node1", 1)]
    query = ["qstat", "-t", "-f", "-F", "json"]
    listed = CommandResult(("qstat",), 0, "{}")
    assert PBS_.more_status_commands(missing, listed) == [
        [*query, "-x", "62.node1"],
        [*query, "-x", "63[].node1"],
    ]
    refused = CommandResult(
        ("qstat",), 36, "", "qstat: PBS is not configured to maintain job history\n"
    )
    assert PBS_.more_status_commands(missing[:1], refused) == [[*query, "62.node1"]]


def test_members_of_arrays_are_cancelled_by_commands_of_their_own() -> None:
    jobs = {"5[].srv": [3], "6[].srv": [], "7.srv": [], "8[].srv": [0, 1, 4], "9.srv": []}
    assert PBS_.cancel_commands(jobs) == [
        ["qdel", "7.srv", "9.srv", "6[].srv"],  # lone jobs first
        ["qdel", "5[3].srv"],  # a member is never one of several targets; a range is one target
        ["qdel", "8[0-1].srv"],
        ["qdel", "8[4].srv"],
    ]
    assert PBS_.cancel_commands({}) == []


# -- states ------------------------------------------------------------------------------------------------------
@each(
    ("file", "title", "identity", "state", "code"),
    [
        ("03-status.txt", "running, json", "95", "RUNNING", None),
        ("03-status.txt", "pending, json", "96", "PENDING", None),
        ("03-status.txt", "held, json", "97", "PENDING", None),
        ("03-status.txt", "dependent, json", "98", "PENDING", None),
        ("03-status.txt", "suspended, json", "99", "SUSPENDED", None),
        ("03-status.txt", "waiting for its time, json", "101", "PENDING", None),
        ("03-status.txt", "one array member, json", "100[][2]", "RUNNING", None),
        ("03-status.txt", "nothing left, json", "82", "RUNNING", None),  # E: exiting
        ("04-finished.txt", "done", "107", "COMPLETED", 0),
        ("04-finished.txt", "failed with 3", "108", "FAILED", 3),
        ("04-finished.txt", "segmentation fault", "109", "FAILED", 139),
        ("04-finished.txt", "over its walltime", "110", "TIMEOUT", -29),
        ("04-finished.txt", "over its walltime, traps SIGTERM", "111", "TIMEOUT", -29),
        ("04-finished.txt", "command not found", "112", "FAILED", 254),
        ("04-finished.txt", "deleted while running", "114", "CANCELLED", 143),
        ("04-finished.txt", "deleted while queued", "115", "CANCELLED", None),
        ("04-finished.txt", "output folder missing", "116", "COMPLETED", 0),
        (
            "04-finished.txt",
            "dependency never satisfied (afterok of a failed job)",
            "118",
            "FAILED",
            None,
        ),
    ],
)
def test_a_recorded_job_has_its_state_and_exit_code(
    file: str, title: str, identity: str, state: str, code: int | None
) -> None:
    found = one(file, title, identity)
    assert (found.state.value, found.exit_code) == (state, code)


def test_recorded_members_decide_and_not_their_array() -> None:
    text = recorded("pbs", "04-finished.txt", "array members' exit codes")
    ids = [JobId("113[]", n) for n in range(9)]
    found = PBS_.parse_status(text, ids)  # filtered with egrep, so that it is no JSON
    assert found.pop(JobId("113[]", 3)) == JobStatus(JobState.FAILED, "F", "", 7)
    assert {status.state for status in found.values()} == {JobState.COMPLETED}
    assert JobId("113[]", 8) not in found and len(found) == 7


def test_a_status_has_the_reason_of_waiting_or_the_node() -> None:
    assert one("03-status.txt", "pending, json", "96").reason.startswith(
        "Can Never Run: Insufficient amount of resource"
    )
    held = one("03-status.txt", "held, json", "97")
    assert held.reason == "held by its user (qhold; qrls releases it)" and not held.stuck
    assert one("03-status.txt", "running, json", "95").node == "node1"
    assert one("03-status.txt", "running, json", "95").reason == ""
    assert (
        "depended on"
        in one(
            "04-finished.txt", "dependency never satisfied (afterok of a failed job)", "118"
        ).reason
    )


def status(state: str, substate: int | None = None, code: int | None = None, **more: Any) -> str:
    record = {"job_state": state, "substate": substate, "Exit_status": code, **more}
    text = json.dumps(
        {"Jobs": {"5.srv": {key: value for key, value in record.items() if value is not None}}}
    )
    found = PBS_.parse_status(CommandResult(("qstat",), 0, text), [JobId("5.srv")])
    return found[JobId("5.srv")].state.value


@each(
    ("state", "substate", "code", "expected"),
    [
        ("Q", 10, None, "PENDING"), ("H", 20, None, "PENDING"), ("H", 22, None, "PENDING"), ("W", 30, None, "PENDING"),
        ("T", 0, None, "PENDING"), ("R", 41, None, "RUNNING"), ("R", 42, None, "RUNNING"), ("E", 50, None, "RUNNING"),
        ("E", 51, 0, "RUNNING"), ("B", 70, None, "RUNNING"), ("S", 43, None, "SUSPENDED"), ("S", 45, None, "SUSPENDED"),
        ("U", 43, None, "SUSPENDED"), ("F", 92, 0, "COMPLETED"), ("X", 92, 0, "COMPLETED"), ("X", None, 0, "COMPLETED"),
        ("F", 93, 3, "FAILED"), ("X", 93, 3, "FAILED"), ("F", 92, None, "FAILED"), ("F", 93, 256 + 11, "FAILED"),
        ("F", 91, 271, "CANCELLED"), ("F", 91, 0, "CANCELLED"), ("F", 91, None, "CANCELLED"), ("X", 91, None, "CANCELLED"),
        ("F", 93, -29, "TIMEOUT"), ("F", 93, -28, "TIMEOUT"), ("F", 93, -27, "OUT_OF_MEMORY"), ("F", 93, -26, "OUT_OF_MEMORY"),
        ("F", 93, -25, "FAILED"), ("F", 93, -4, "NODE_FAIL"), ("F", 93, -14, "NODE_FAIL"), ("F", 93, -30, "NODE_FAIL"),
        ("F", 93, -5, "NODE_FAIL"), ("F", 93, -6, "NODE_FAIL"), ("F", 93, -20, "NODE_FAIL"), ("F", 93, -21, "FAILED"),
        ("F", 93, -1, "FAILED"), ("F", 94, None, "UNKNOWN"), ("M", 94, None, "UNKNOWN"), ("F", None, None, "UNKNOWN"),
        ("Y", 1, None, "UNKNOWN"), ("", None, None, "UNKNOWN"),
    ],
)  # fmt: skip
def test_state_and_substate_of_pbs_are_a_state(
    state: str, substate: int | None, code: int | None, expected: str
) -> None:
    assert status(state, substate, code) == expected


def test_a_job_that_could_not_be_started_has_failed() -> None:
    """The comment is in the user guides of ALCF: PBS holds such a job, and it never starts."""
    comment = "job held, too many failed attempts to run"
    assert status("H", 20, None, comment=comment) == "FAILED"
    assert status("H", 20, None, comment="held by ada") == "PENDING"


def test_a_comment_of_older_sites_tells_an_exceeded_walltime() -> None:
    comment = "Job run at Fri Nov 20 at 10:29 on (node1:ncpus=1) and exceeded resource walltime"
    assert status("F", 93, 271, comment=comment) == "TIMEOUT"


def members_of(parent: dict[str, Any], **listed: dict[str, Any]) -> dict[int | None, str]:
    jobs = {"9[].srv": parent, **{f"9[{key[1:]}].srv": value for key, value in listed.items()}}
    ids = [JobId("9[]", n) for n in range(4)]
    found = PBS_.parse_status(CommandResult(("qstat",), 0, json.dumps({"Jobs": jobs})), ids)
    return {job.index: status.state.value for job, status in found.items()}


def test_members_that_have_not_started_are_not_listed() -> None:
    assert set(members_of({"job_state": "Q", "substate": 10}).values()) == {"PENDING"}
    begun = {"job_state": "B", "substate": 70, "array_indices_remaining": "2-3"}
    running = {"job_state": "R", "substate": 42}
    assert members_of(begun, m0=running) == {
        0: "RUNNING",
        2: "PENDING",
        3: "PENDING",
    }  # of 1 nothing is known
    deleted = {"job_state": "F", "substate": 91, "array_indices_remaining": "1-3"}
    ended = {"job_state": "F", "substate": 92, "Exit_status": 0}
    assert members_of(deleted, m0=ended, m1={"job_state": "Q", "substate": 10}) == {
        0: "COMPLETED", 1: "CANCELLED", 2: "CANCELLED", 3: "CANCELLED",
    }  # fmt: skip
    assert members_of(begun, m1={"job_state": "X"})[1] == "CANCELLED"  # deleted, without having run


def test_members_that_ended_before_their_array_was_deleted_have_a_record_of_the_array() -> None:
    """As OpenPBS of 2026 lists them: only the comment is theirs."""
    array = {"job_state": "F", "substate": 91, "Exit_status": 1}
    words = ("finished", "failed", "terminated")
    listed = {f"m{n}": {**array, "comment": f"Subjob {word}"} for n, word in enumerate(words)}
    killed = {**array, "Exit_status": 143, "comment": "Job run at … and terminated by ada@node1"}
    found = members_of(
        {**array, "comment": "Job Array Began at … and terminated"}, **listed, m3=killed
    )
    assert found == {0: "COMPLETED", 1: "FAILED", 2: "CANCELLED", 3: "CANCELLED"}


def test_begin_of_an_array_is_no_reason_why_its_members_wait() -> None:
    comment = "Job Array Began at Fri Nov 20 at 10:29"
    begun = {"job_state": "B", "array_indices_remaining": "2-3", "comment": comment}
    text = json.dumps({"Jobs": {"9[].srv": begun, "9[0].srv": {"job_state": "R"}}})
    job = JobId("9[].srv", 2)
    assert PBS_.parse_status(CommandResult(("qstat",), 0, text), [job])[job].reason == "queued"


def test_attributes_that_are_null_are_empty() -> None:
    names = ("comment", "Hold_Types", "exec_host", "Exit_status", "substate")
    null: dict[str, Any] = dict.fromkeys(names)
    for state, expected in (("Q", "queued"), ("H", "held"), ("F", ""), ("R", ""), ("S", "")):
        job = {**null, "job_state": state, "estimated": {"start_time": None}}
        text = json.dumps({"Jobs": {"5.srv": job}})
        found = PBS_.parse_status(CommandResult(("qstat",), 0, text), [JobId("5")])[JobId("5")]
        assert (found.reason, found.node, found.starts) == (expected, "", ""), state
    resources = dict.fromkeys(("ncpus", "ngpus", "mem", "gpu_type", "Qlist"))
    nodes = {"n1": {"state": "free", "queue": None, "resources_available": resources}}
    (node,) = PBSInventory().parse_nodes(
        CommandResult(("pbsnodes",), 0, json.dumps({"nodes": nodes}))
    )
    assert (node.queue, node.gpu_type, node.memory, node.gpus, node.cpus) == ("", "", None, 0, 0)


STATES = [
    ("pbs", "a busy node and an exclusive one, json", [(True, 0, 3), (False, 0, 0)]),
    ("pbs", "a node that is offline and one that is down, json", [(False, 0, 0)] * 2),
    ("torque", "a node whose slots are all used, xml", [(True, 0, 4), (True, 8, 4)]),
    ("torque", "a node that is offline and one that is down, xml", [(False, 0, 0)] * 2),
]


@pytest.mark.parametrize(("name", "title", "expected"), STATES)
def test_recorded_states_of_nodes_tell_what_is_free(
    name: str, title: str, expected: list[tuple[bool, int, int]]
) -> None:
    inventory = get_scheduler(name).inventory
    assert inventory
    nodes = inventory().parse_nodes(recorded(name, "nodes.txt", title))
    assert [(node.usable, node.free_cpus, node.free_gpus) for node in nodes] == expected
    assert {(node.cpus, node.gpus) for node in nodes} == {(8, 4)}


def test_no_directive_excludes_a_node() -> None:
    refused = recorded("pbs", "nodes.txt", "jobs on other hosts")
    assert PBS_.reply(refused) is Reply.REFUSAL and "Resource_List.select" in refused.message
    assert PBS_.avoid(["node1"]) == ""
    assert PBS_.reply(recorded("pbs", "nodes.txt", "a closed queue")) is Reply.REFUSAL


def test_a_waiting_job_has_its_expected_start() -> None:
    job = {
        "job_state": "Q",
        "substate": 10,
        "estimated": {"start_time": "Sat Nov 21 10:00:00 2026"},
    }
    found = PBS_.parse_status(
        CommandResult(("qstat",), 0, json.dumps({"Jobs": {"5.srv": job}})), [JobId("5")]
    )
    assert found[JobId("5")].starts == "Sat Nov 21 10:00:00 2026"


@each(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        '{"Jobs": []}',
        '{"Jobs": {"5.srv": 3}}',
        '{"Jobs": {"5.srv": {"job_sta',
        "\x00%&",
        '{"Jobs": {}}',
    ],
)
def test_garbled_answer_says_nothing(text: str) -> None:
    found = PBS_.parse_status(CommandResult(("qstat",), 0, text), [JobId("5"), JobId("9[]", 1)])
    assert {status.state for status in found.values()} <= {JobState.UNKNOWN}


def test_an_answer_that_is_no_json_because_of_a_variable_is_read() -> None:
    text = recorded("pbs", "03-status.txt", "running, json").stdout.replace('"workq"', '"a\\q"')
    assert (
        PBS_.parse_status(CommandResult(("qstat",), 0, text), [JobId("95")])[JobId("95")].state
        is JobState.RUNNING
    )


# -- away, refused, gone -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "title",
    [
        "submit",
        "status",
        "status, json",
        "one job, json",
        "cancel",
        "unknown server",
        "no configuration",
    ],
)
def test_a_server_that_is_down_is_no_reply(title: str) -> None:
    result = recorded("pbs", "07-server-down.txt", title)
    assert PBS_.reply(result) is Reply.NONE
    assert PBS_.parse_status(result, [JobId("126")]) == {}


REFUSED = [
    "unknown queue", "unknown resource", "unknown resource in select", "walltime over the queue's limit", "bad walltime", "bad memory",
    "select and nodes together", "select and ngpus together", "array of one", "array too large", "name with a space",
    "root is refused or not", "submit to a disabled queue", "bad directive in the script",
]  # fmt: skip


@each("title", REFUSED)
def test_recorded_refusal_is_final(title: str) -> None:
    result = recorded("pbs", "02-submit-rejected.txt", title)
    assert result.exit_code != 0
    assert PBS_.reply(result) is not Reply.NONE


def test_answers_are_told_from_failures() -> None:
    assert PBS_.reply(recorded("pbs", "03-status.txt", "unknown job id, json")) is Reply.ANSWER
    assert PBS_.reply(recorded("pbs", "04-finished.txt", "not found without -x")) is Reply.ANSWER
    assert (
        PBS_.reply(
            CommandResult(
                ("qstat",), 36, "", "qstat: PBS is not configured to maintain job history 5.node1\n"
            )
        )
        is Reply.ANSWER
    )
    assert PBS_.reply(recorded("pbs", "07-server-down.txt", "one job, json")) is not Reply.ANSWER
    assert PBS_.reply(recorded("pbs", "03-status.txt", "malformed id")) is not Reply.ANSWER


def test_refusals_with_255_and_unknown_jobs_are_no_outage() -> None:
    rerun = "qsub: cannot submit non-rerunable Array Job\nqsub: directive error: -r n\n"
    assert PBS_.reply(CommandResult(("qsub",), 255, "", rerun)) is not Reply.NONE
    assert PBS_.reply(recorded("pbs", "03-status.txt", "unknown job id, json")) is not Reply.NONE
    assert PBS_.reply(CommandResult(("/opt/pbs/bin/qstat",), 255, "", "x")) is Reply.NONE
    assert (
        PBS_.reply(CommandResult(("qstat",), None, problem="qstat did not respond within 60 s"))
        is Reply.NONE
    )


@pytest.mark.parametrize(
    ("file", "title", "gone"),
    [
        ("05-cancel.txt", "unknown", True), ("05-cancel.txt", "known and unknown", True), ("05-cancel.txt", "malformed", False),
        ("05-cancel.txt", "somebody else's", False), ("08-supplement.txt", "cancel of a job that has finished (kept in history)", True),
    ],
)  # fmt: skip
def test_recorded_answers_to_a_cancel_say_whether_the_job_is_gone(
    file: str, title: str, gone: bool
) -> None:
    assert PBS_.already_ended(recorded("pbs", file, title)) is gone


def test_a_job_that_is_not_ours_is_not_cancelled_although_another_is_gone() -> None:
    said = "qdel: Unknown Job Id 99999.node1\nqdel: Unauthorized Request  122.node1\n"
    assert not PBS_.already_ended(CommandResult(("qdel",), 159, "", said))


def test_the_largest_array_is_that_of_the_server() -> None:
    assert PBS_.parse_limit(recorded("pbs", "03-status.txt", "server, json").stdout) == 10000
    assert PBS_.parse_limit("") is None


def test_all_listed_ids_are_found() -> None:
    assert PBS_.parse_find("63[].node1\n61.node1\n\n", "x") == {"63[].node1", "61.node1"}


# -- directives ----------------------------------------------------------------------------------------------------
@each(
    ("line", "options"),
    [
        ("-l select=1:ncpus=2:ngpus=1,walltime=00:30:00", {"-l select", "-l walltime"}), ("-lselect=1:ncpus=4", {"-l select"}),
        ("-l wd", {"-l wd"}), ("-l storage=gdata/ab12+scratch/ab12", {"-l storage"}), ("-q gpu -A p1", {"-q", "-A"}), ("-V", {"-V"}),
        ("-W group_list=x,umask=077", {"-W group_list", "-W umask"}), ("-l filesystems=home:eagle", {"-l filesystems"}), ("-hV", {"-h", "-V"}),
    ],
)  # fmt: skip
def test_the_options_of_a_line_are_recognized(line: str, options: set[str]) -> None:
    assert PBS_.options(line) == options


@pytest.mark.parametrize("line", ["walltime=3", "-l", "-", '-l "a'])
def test_lines_that_are_no_directives_are_errors(line: str) -> None:
    with pytest.raises(ValueError):
        PBS_.options(line)


TAKEN = {"-q", "-l select", "-l walltime", "-A"}


@each(
    ("line", "taken", "clash"),
    [
        ("-l walltime=1:00:00", TAKEN, "-l walltime"), ("-l mem=4gb", TAKEN, "-l select"), ("-lngpus=2", TAKEN, "-l select"),
        ("-l select=2", {"-l ncpus", "-l ngpus"}, "-l ncpus"), ("-l place=excl", TAKEN, ""), ("-l jobfs=1GB", {"-l ncpus"}, ""),
        ("-qother", TAKEN, "-q"), ("-l storage=a,select=3", TAKEN, "-l select"),
    ],
)  # fmt: skip
def test_a_line_that_replaces_another_one_clashes(line: str, taken: set[str], clash: str) -> None:
    assert PBS_.clash(line, taken) == clash


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-l walltime=5:00:00", "written by gpujobs"), ("-l ngpus=4", "-l select is written"), ("-N x", "-N is written"),
        ("-V", "inherits nothing"), ("-W block=true", "wait for the end"), ("-J 0-3", "-J is written"), ("-q other", "-q is written"),
    ],
)  # fmt: skip
def test_lines_that_a_user_may_not_write_are_refused(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan(
            tmp_path,
            {"gpus": 4, "account": "ABCD0001", "walltime": "1h", "directives": [line]},
            "derecho",
        )


def test_lines_that_a_user_may_write_are_kept(tmp_path: Path) -> None:
    profile = {
        "gpus": 4,
        "account": "ABCD0001",
        "walltime": "1h",
        "directives": ["-l job_priority=economy", "-M a@b.org"],
    }
    lines = plan(tmp_path, profile, "derecho").groups[0].lines
    assert lines[-2:] == ("-l job_priority=economy", "-M a@b.org")


# -- sites ---------------------------------------------------------------------------------------------------------
GADI = {"account": "ab12", "walltime": "6h"}


@pytest.mark.parametrize(("gpus", "ncpus"), [(1, 12), (2, 24), (3, 36), (4, 48)])
def test_gadi_wants_twelve_cpus_a_gpu(tmp_path: Path, gpus: int, ncpus: int) -> None:
    lines = plan(tmp_path, {"gpus": gpus, **GADI}, "gadi").groups[0].lines
    assert lines[1:4] == (f"-l ncpus={ncpus}", f"-l ngpus={gpus}", f"-l mem={90 * gpus}GB")


def test_polaris_asks_for_whole_nodes_and_no_gpu(tmp_path: Path) -> None:
    made = plan(tmp_path, {"gpus": 8, "account": "p1", "walltime": "1h"}, "polaris")
    assert made.groups[0].lines == (
        "-q debug", "-l select=1:system=polaris", "-l place=scatter", "-A p1", "-l filesystems=home:eagle",
    )  # fmt: skip
    assert (
        made.groups[0].shape.jobs,
        made.groups[0].shape.gpus,
        made.groups[0].visible_devices,
    ) == (
        2,
        4,
        "exclusive",
    )
    with pytest.raises(InputError, match="whole nodes of 4"):
        plan(tmp_path, {"gpus": 2, "account": "p1", "walltime": "1h"}, "polaris")


def test_mpi_on_derecho_is_one_job_of_several_nodes(tmp_path: Path) -> None:
    made = plan(
        tmp_path, {"gpus": 8, "account": "A1", "walltime": "1h", "layout": "mpi"}, "derecho"
    )
    assert (
        made.groups[0].lines[1] == "-l select=2:ncpus=64:mpiprocs=1:ompthreads=1:mem=480GB:ngpus=4"
    )
    assert isinstance(made.layout, MpiLayout)
    command = made.layout.launcher(made.groups[0].shape)
    assert command == ["mpiexec", "-n", "2", "-ppn", "1"]


def site_text(queue: str, more: str = "") -> str:
    return f"description: x\nscheduler: pbs\n{more}\nqueues:\n  gpu: {queue}\n"


@pytest.mark.parametrize(
    ("queue", "lines"),
    [
        ("{gpus_per_node: 4}", ("-q gpu", "-l select=1:ngpus=2")),
        ("{gpus_per_node: 4, cpus_per_node: 32}", ("-q gpu", "-l select=1:ncpus=16:ngpus=2")),
        (
            "{gpus_per_node: 4, memory_per_node: 64GiB}",
            ("-q gpu", "-l select=1:ngpus=2:mem=32768mb"),
        ),
    ],
)
def test_built_in_request_leaves_out_what_the_site_does_not_say(
    tmp_path: Path, queue: str, lines: tuple[str, ...]
) -> None:
    site = tmp_path / "x.yaml"
    site.write_text(site_text(queue, "visible_devices: scheduler"))
    assert plan(tmp_path, {"gpus": 2, "walltime": "1h"}, str(site)).groups[0].lines == lines


def test_site_must_say_which_gpus_are_the_jobs(tmp_path: Path) -> None:
    site = tmp_path / "x.yaml"
    site.write_text(site_text("{gpus_per_node: 4}"))
    with pytest.raises(InputError, match="itself does not list a job's GPUs"):
        plan(tmp_path, {"gpus": 2, "walltime": "1h"}, str(site))


def test_site_may_have_several_resource_lines(tmp_path: Path) -> None:
    site = tmp_path / "x.yaml"
    site.write_text(
        site_text(
            "{gpus_per_node: 4}",
            "visible_devices: scheduler\ndirectives: [-l place=scatter, -l wd, '-l a=1']",
        )
    )
    assert len(plan(tmp_path, {"gpus": 1, "walltime": "1h"}, str(site)).groups[0].lines) == 5
    site.write_text(
        site_text(
            "{gpus_per_node: 4}", "visible_devices: scheduler\ndirectives: [-l walltime=1:00:00]"
        )
    )
    with pytest.raises(InputError, match="-l walltime is written by gpujobs"):
        plan(tmp_path, {"gpus": 1, "walltime": "1h"}, str(site))


# -- scripts -------------------------------------------------------------------------------------------------------
def test_only_arrays_may_be_started_again(tmp_path: Path) -> None:
    """qsub refuses an array with `-r n`, and sites may have that as the default."""
    array, lone = (
        render(plan(tmp_path, {"gpus": n, "gpus_per_job": 1, **GADI}, "gadi"), "svd-0000")[0].text
        for n in (2, 1)
    )
    assert "#PBS -r y\n" in array and "#PBS -J 0-1\n" in array
    assert "#PBS -r n\n" in lone and "#PBS -J" not in lone
    assert 'id="${PBS_JOBID/\\[*\\]/[]}[$PBS_ARRAY_INDEX]"' in array and 'id="$PBS_JOBID"' in lone
    assert "\r" not in array + lone


def test_directives_stand_before_the_first_command(tmp_path: Path) -> None:
    lines = render(plan(tmp_path, {"gpus": 4, **GADI}, "gadi"), "svd-0000")[0].text.splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#PBS") for line in lines[first:])
    assert sum(line.startswith("#PBS") for line in lines) > 10


def test_output_path_with_a_space_is_quoted() -> None:
    assert (
        PBS_.output("/home/ada lovelace/.gpujobs", "x-1", False)
        == '"/home/ada lovelace/.gpujobs/x-1/logs/pbs.log"'
    )
    assert (
        PBS_.output("/home/ada/.gpujobs", "x-1", True)
        == "/home/ada/.gpujobs/x-1/logs/pbs-^array_index^.log"
    )


def test_sites_of_this_folder_are_there() -> None:
    assert {"gadi", "derecho", "polaris"} <= {path.stem for path in SITES.glob("*.yaml")}


def test_one_class_serves_both() -> None:
    import gpujobs
    from gpujobs.deploy.cluster import class_for

    for name in ("pbs", "torque"):
        assert class_for(name, gpujobs.GPUJobQueueCluster) is gpujobs.GPUPBSCluster


def test_a_member_that_ended_before_its_array_was_deleted_keeps_its_end() -> None:
    deleted = {"job_state": "F", "substate": 91}
    for state in ("F", "X"):
        ended = {"job_state": state, "substate": 92, "Exit_status": 0}
        assert members_of(deleted, m0=ended)[0] == members_of({"job_state": "B"}, m0=ended)[0]
    assert (
        members_of(deleted, m0={"job_state": "F", "substate": 92, "Exit_status": 3})[0] == "FAILED"
    )


def test_an_answer_about_another_job_says_nothing_of_this_one() -> None:
    def found_nothing(*words: str) -> bool:
        return PBS_.found_nothing(
            CommandResult(("qstat", *words), 153, "", "qstat: Unknown Job Id 1.srv\n")
        )

    assert found_nothing("1") and found_nothing("-x", "1")
    assert not found_nothing("2") and not found_nothing("1", "2")
