"""LSF's formats and parsers, on what an open relative of it printed and on what IBM documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpujobs.errors import InputError
from gpujobs.planning.render import render
from gpujobs.schedulers import CommandResult, JobId, JobState, JobStatus, Reply
from gpujobs.schedulers.lsf import LSF

from ..support.each import each
from ..support.transcripts import recorded
from .support import plan

SCHEDULER = LSF()


def said(file: str, title: str) -> CommandResult:
    return recorded("lsf", file, title)


# -- what a script says --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "0:01"), (60, "0:01"), (61, "0:02"), (3600, "1:00"), (86399, "24:00"), (86400, "24:00")],
)
def test_walltime_is_minutes_rounded_up(seconds: int, text: str) -> None:
    assert SCHEDULER.walltime(seconds) == text


def test_output_is_always_set_and_quoted() -> None:
    assert (
        SCHEDULER.output("/home/ada/.gpujobs", "x-1", False)
        == "/home/ada/.gpujobs/x-1/logs/lsf-%J.log"
    )
    assert SCHEDULER.output("/my folder", "x-1", True) == '"/my folder/x-1/logs/lsf-%J.%I.log"'


@each(
    ("line", "options"),
    [
        ('-R "span[hosts=1] rusage[mem=5GB]"', {"-R"}), ('-gpu "num=2:mode=shared"', {"-gpu"}), ("-gpu -", {"-gpu"}),
        ("-n 8 -q x", {"-n", "-q"}), ("-Is bash", {"-I"}), ("-XF", {"-I"}), ("-K", {"-K"}), ('-alloc_flags "gpumps smt1"', {"-alloc_flags"}),
    ],
)  # fmt: skip
def test_the_options_of_a_line_are_recognized(line: str, options: set[str]) -> None:
    assert SCHEDULER.options(line) == options


SITE: dict[str, Any] = {
    "description": "x", "scheduler": "lsf",
    "queues": {"gpu": {"gpus_per_node": 4, "cpus_per_node": 32, "memory_per_node": "256GiB"}},
}  # fmt: skip


def lines(folder: Path, profile: dict[str, Any], **site: Any) -> list[str]:
    import json

    path = folder / "own.yaml"
    path.write_text(json.dumps({**SITE, **site}))
    return list(plan(folder, {"walltime": "1h", **profile}, str(path)).groups[0].lines)


def test_built_in_request_has_one_r(tmp_path: Path) -> None:
    assert lines(tmp_path, {"gpus": 2, "account": "p1"}) == [
        "-q gpu", "-n 16", '-gpu "num=2:mode=shared:j_exclusive=yes"', '-R "span[ptile=16] rusage[mem=131072MB]"', "-P p1",
    ]  # fmt: skip
    queues = {"gpu": {"gpus_per_node": 4, "cpus_per_node": 32}}
    assert lines(tmp_path, {"gpus": 2}, queues=queues)[3:] == ['-R "span[ptile=16]"']
    assert lines(tmp_path, {"gpus": 2}, queues={"gpu": {"gpus_per_node": 4}}) == [
        "-q gpu",
        '-gpu "num=2:mode=shared:j_exclusive=yes"',
    ]
    mpi = {"gpus": 8, "layout": "mpi", "run": ["python", "x.py"]}
    assert lines(tmp_path, mpi)[1:] == [
        "-n 64",
        '-gpu "num=4:mode=shared:j_exclusive=yes"',
        '-R "span[ptile=32] rusage[mem=262144MB]"',
    ]


def test_older_requests_of_gpus_become_one_r(tmp_path: Path) -> None:
    request = [
        "-q {queue}",
        "-n {cpus_per_job}",
        "-R a100",
        "-R rusage[ngpus_excl_p={gpus_per_node}]",
        "-R span[hosts=1]",
    ]
    directives = ['-R "rusage[mem={memory_per_cpu:MB}]"']
    assert lines(tmp_path, {"gpus": 2}, request=request, directives=directives) == [
        "-q gpu", "-n 16", '-R "select[a100] rusage[ngpus_excl_p=2:mem=8192] span[hosts=1]"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        (["-n 2", "-R a", "-R b"], ["-n 2", '-R "select[a && b]"']),
        (["-R span[hosts=1] -R rusage[mem=5]"], ['-R "span[hosts=1] rusage[mem=5]"']),
        (["-R span[hosts=1]", "-x"], ["-R span[hosts=1]", "-x"]),
        (["-R a", '-R "rusage[x=1] || rusage[y=1]"'], ["-R a", '-R "rusage[x=1] || rusage[y=1]"']),
        (["-R a", "-R 'b"], ["-R a", "-R 'b"]),
        (["", "-R a"], ["", "-R a"]),
    ],
)  # fmt: skip
def test_several_r_become_one(given: list[str], joined: list[str]) -> None:
    assert SCHEDULER.joined(given) == joined


@each(
    ("directive", "why"),
    [
        ('-R "span[hosts=1]"', "-R is written by"), ("-q other", "-q is written by"), ('-gpu "num=1"', "-gpu is written by"),
        ("-J mine", "-J is written by"), ("-o x", "-o is written by"), ("-W 5", "-W is written by"), ("-K", "wait for the job"),
        ("-Is", "interactive"), ("-n 4", "-n is written by"),
    ],
)  # fmt: skip
def test_directives_that_are_not_the_users_are_refused(
    tmp_path: Path, directive: str, why: str
) -> None:
    with pytest.raises(InputError, match=why):
        lines(tmp_path, {"gpus": 2, "directives": [directive]})


def test_the_script_of_an_array_has_its_members(tmp_path: Path) -> None:
    text = render(
        plan(
            tmp_path, {"gpus": 4, "gpus_per_job": 2, "queue": "gpua100", "walltime": "90m"}, "dtu"
        ),
        "svd-0000",
    )[0].text
    assert '#BSUB -J "svd-0000[1-2]"\n' in text and "#BSUB -W 1:30\n" in text
    assert "GPUJOBS_JOB=$((-1 + LSB_JOBINDEX))" in text  # LSF counts from 1


# -- submit --------------------------------------------------------------------------------------------------------
def test_the_id_is_read_from_the_answer_of_bsub() -> None:
    assert SCHEDULER.parse_submit(said("submit.txt", "script on standard input").stdout) == "61"
    assert SCHEDULER.parse_submit(said("submit.txt", "array").stdout) == "63"
    assert SCHEDULER.parse_submit(said("submit.txt", "quiet or machine readable").stdout) is None
    assert (
        SCHEDULER.parse_submit(
            "This job is charged to p1.\nJob <7> is submitted to queue <x>.\nThank you\n"
        )
        == "7"
    )
    assert SCHEDULER.parse_submit("Job <") is None


REFUSALS = [
    "unknown queue",
    "unknown resource",
    "malformed -R",
    "run limit over the queue's",
    "bad run limit",
    "bad -n",
]


@pytest.mark.parametrize("title", REFUSALS)
def test_a_refusal_is_no_absence(title: str) -> None:
    result = said("submit.txt", title)
    assert result.exit_code == 255 and SCHEDULER.reply(result) is not Reply.NONE


@pytest.mark.parametrize("title", ["submit", "status", "cancel", "cluster"])
def test_a_server_that_is_down_is_no_answer(title: str) -> None:
    assert (
        SCHEDULER.reply(said("server-down.txt", title)) is Reply.NONE
    )  # they never return, and lsid says that LIM is down
    stderr = said("server-down.txt", "submit").stderr
    assert SCHEDULER.reply(CommandResult(("bsub",), 255, "", stderr)) is Reply.NONE


@pytest.mark.parametrize(
    "words",
    [
        "Failed in an LSF library call: LIM is down; try later. Job not submitted.", "Cannot connect to LSF. Please wait ...",
        "Contacting batch daemon: Communication timeout. Job not submitted.", "Timeout on connect call to server",
        "Connection refused by server", "Batch daemon cannot fork",
    ],
)  # fmt: skip
def test_a_server_that_is_away_for_a_moment_is_no_answer(words: str) -> None:
    assert SCHEDULER.reply(CommandResult(("bsub",), 255, "", words)) is Reply.NONE
    assert SCHEDULER.reply(CommandResult(("bsub",), 0, "", words)) is not Reply.NONE


def test_jobs_are_found_by_the_whole_name_only() -> None:
    listed = said("status.txt", "wide, all states").stdout
    assert SCHEDULER.parse_find(listed, "array") == {"102"}
    assert SCHEDULER.parse_find(listed, "finished") == {"103"}
    assert SCHEDULER.parse_find(listed, "arr") == {"1"}
    assert SCHEDULER.parse_find(listed, "ar") == set()
    assert SCHEDULER.reply(said("status.txt", "wide, all states")) is Reply.ANSWER
    for title in ("nothing left", "unknown job id", "unknown user"):  # no job is an answer
        assert SCHEDULER.reply(said("status.txt", title)) is Reply.ANSWER, title
    assert SCHEDULER.reply(CommandResult(("bjobs",), 255, "", "No job found\n")) is Reply.ANSWER
    assert SCHEDULER.reply(said("server-down.txt", "status")) is not Reply.ANSWER
    assert (
        SCHEDULER.reply(CommandResult(("bjobs",), 255, "", "Batch daemon internal error\n"))
        is not Reply.ANSWER
    )


def test_the_largest_array_is_that_of_bparams() -> None:
    said = "The maximum number of elements in a job array:\n    MAX_JOB_ARRAY_SIZE = 5000\n"
    assert SCHEDULER.parse_limit(said) == 5000
    assert SCHEDULER.parse_limit("") is None


# -- watch ---------------------------------------------------------------------------------------------------------
def test_bjobs_tells_the_states_of_arrays_and_jobs() -> None:
    ids = [JobId("102", n) for n in range(1, 10)] + [
        JobId(str(n)) for n in (7, 10, 12, 84, 97, 98, 99, 101, 103, 104, 5)
    ]
    found = SCHEDULER.parse_status(said("status.txt", "wide, all states"), ids)
    states = {str(job): status.state.value for job, status in found.items()}
    assert states == {
        "102[1]": "RUNNING", "102[2]": "RUNNING", **{f"102[{n}]": "PENDING" for n in range(3, 9)}, "7": "COMPLETED",
        "10": "CANCELLED", "12": "FAILED", "84": "CANCELLED", "97": "RUNNING", "98": "PENDING", "99": "PENDING", "101": "SUSPENDED",
        "103": "COMPLETED", "104": "FAILED",
    }  # fmt: skip
    assert found[JobId("97")].node == "node1"  # node1:node1
    assert found[JobId("98")].node == ""
    assert found[JobId("99")].native == "PSUSP" and "bresume" in found[JobId("99")].reason
    assert JobId("102", 9) not in found and JobId("5") not in found  # not listed is not finished


def test_an_unknown_job_hides_no_known_one() -> None:
    found = SCHEDULER.parse_status(
        said("status.txt", "known and unknown"), [JobId("97"), JobId("99999")]
    )
    assert {str(job): status.state for job, status in found.items()} == {"97": JobState.RUNNING}
    for title in ("unknown job id", "nothing left", "malformed id"):
        assert SCHEDULER.parse_status(said("status.txt", title), [JobId("97")]) == {}


@each(
    ("native", "state"),
    [
        ("PEND", "PENDING"), ("PSUSP", "PENDING"), ("WAIT", "PENDING"), ("FWD_PEND", "PENDING"), ("RUN", "RUNNING"), ("PROV", "RUNNING"),
        ("USUSP", "SUSPENDED"), ("SSUSP", "SUSPENDED"), ("DONE", "COMPLETED"), ("EXIT", "FAILED"), ("ZOMBI", "NODE_FAIL"),
        ("UNKWN", "UNKNOWN"), ("NEW", "UNKNOWN"),
    ],
)  # fmt: skip
def test_words_of_lsf_are_a_state(native: str, state: str) -> None:
    line = (
        f"5       ada     {native:5} normal     login       2*node1:4*node2 svd-1[3] Nov 20 10:31\n"
    )
    found = SCHEDULER.parse_status(CommandResult(("bjobs",), 0, line), [JobId("5", 3)])
    status = found[JobId("5", 3)]
    assert (status.state, status.native) == (JobState(state), native)
    assert (status.node, status.stuck, bool(status.reason)) == (
        "node1,node2",
        False,
        native == "PSUSP",
    )


def test_details_are_asked_of_what_waits_and_what_failed() -> None:
    listed = SCHEDULER.parse_status(
        said("status.txt", "wide, all states"),
        [JobId("102", n) for n in range(1, 9)] + [JobId(n) for n in ("84", "97", "103", "104")],
    )
    # One waiting member speaks for its array; what never started needs no question.
    assert SCHEDULER.detail_command(listed) == ["bjobs", "-UF", "102[8]", "104"]
    assert SCHEDULER.detail_command({JobId("97"): JobStatus(JobState.RUNNING)}) is None


def test_details_tell_why_jobs_wait_and_how_they_failed() -> None:
    pending = said("status.txt", "long, pending")
    listed = {
        JobId("98"): JobStatus(JobState.PENDING, "PEND"),
        JobId("98", 2): JobStatus(JobState.PENDING, "PEND"),
    }
    reason = "Job's requirements for reserving resource (ngpus) not satisfied: 2 hosts"
    assert {status.reason for status in SCHEDULER.parse_detail(pending, listed).values()} == {
        reason
    }
    for title in ("long, failed", "UF"):
        failed = {JobId("104"): JobStatus(JobState.FAILED, "EXIT", node="node1")}
        found = SCHEDULER.parse_detail(said("status.txt", title), failed)
        assert found == {
            JobId("104"): JobStatus(JobState.FAILED, "EXIT", exit_code=3, node="node1")
        }
    late = {JobId("108"): JobStatus(JobState.FAILED, "EXIT")}
    found = SCHEDULER.parse_detail(
        said("finished.txt", "bjobs -l of the job over its run limit"), late
    )
    assert (found[JobId("108")].state, found[JobId("108")].exit_code) == (JobState.TIMEOUT, 140)
    assert (
        SCHEDULER.parse_detail(
            CommandResult(("bjobs",), 255, "", "Job <98> is not found\n"), listed
        )
        == {}
    )


HISTORY = {
    "done": ("COMPLETED", 0), "failed with 3": ("FAILED", 3), "segmentation fault": ("FAILED", 139), "over its run limit": ("TIMEOUT", 140),
    "killed while running": ("COMPLETED", 0), "killed while pending": ("CANCELLED", None), "over its memory limit": ("FAILED", 255),
}  # fmt: skip


@pytest.mark.parametrize("title", HISTORY)
def test_the_history_of_a_job_tells_its_state_and_exit_code(title: str) -> None:
    result = said("finished.txt", title)
    # The recording cut the first line of bhist off; it has the script in it, which may say anything.
    first = "\nJob <5>, Job Name <x>, User <alice>, Project <default>, Command <#!/bin/bash;exit 9;# Fri Nov 20 10:39:29: Exited with exit code 9>\n"
    history = CommandResult(
        ("bhist",), 0, first + result.stdout[result.stdout.index("Submitted from host") - 21 :]
    )
    found = SCHEDULER.parse_accounting(history, [JobId("5")])[JobId("5")]
    assert (found.state.value, found.exit_code) == HISTORY[title]


def test_the_history_tells_ends_only_of_members_that_have_ended() -> None:
    ids = [JobId("111", n) for n in range(1, 9)]
    found = SCHEDULER.parse_accounting(said("finished.txt", "array"), ids)
    assert {job.index: (status.state.value, status.exit_code) for job, status in found.items()} == {
        2: ("COMPLETED", 0),
        3: ("FAILED", 7),
    }
    first = "Job <109>, Job Name <x>, Command <y>\n"
    running = said("finished.txt", "over its run limit, traps the warning").stdout
    assert (
        SCHEDULER.parse_accounting(
            CommandResult(("bhist",), 0, first + running[running.index("Fri") :]), [JobId("109")]
        )
        == {}
    )
    assert SCHEDULER.parse_accounting(said("finished.txt", "bhist of an unknown"), ids) == {}


@each(
    ("words", "state", "code"),
    [
        ("Exited with exit code 140. The CPU time used is 0.1 seconds;\nTERM_RUNLIMIT: job killed after reaching LSF run time limit;", "TIMEOUT", 140),
        ("Exited with exit code 143. The CPU time used is 0.1 seconds;\nTERM_MEMLIMIT: job killed after reaching LSF memory usage limit;", "OUT_OF_MEMORY", 143),
        ("Exited with exit code 130. The CPU time used is 0.1 seconds;\nTERM_OWNER: job killed by owner;", "CANCELLED", 130),
        ("Exited by signal 2. The CPU time used is 0.1 seconds;\nTERM_PREEMPT: job killed after preemption;", "PREEMPTED", 130),
        ("Exited by LSF signal 9. The CPU time used is 0.1 seconds;\nTERM_EXTERNAL_SIGNAL: job killed by a signal external to LSF;", "FAILED", 137),
        ("Exited with exit code 1. The CPU time used is 0.1 seconds;\nTERM_ZOMBIE: job exited while LSF is not available;", "NODE_FAIL", 1),
        ("Exited with exit code 127. The CPU time used is 0.1 seconds;\n", "FAILED", 127),
        ("Exited with exit code 130. The CPU time used is 0.1 seconds;\n", "CANCELLED", 130),
        ("Exited with exit code 143. The CPU time used is 0.1 seconds;\n", "CANCELLED", 143),
        ("Exited with exit code 140. The CPU time used is 0.1 seconds;\n", "TIMEOUT", 140),
        ("Exited; TERM_ADMIN: job killed by root or LSF administrator;\n", "CANCELLED", None),
        ("Exited by signal 24. The CPU time used is 0.1 seconds;\nTERM_CPULIMIT;", "TIMEOUT", 152),
    ],
)  # fmt: skip
def test_termination_reasons_of_ibm_are_states_and_exit_codes(
    words: str, state: str, code: int | None
) -> None:
    stamp = "Thu Mar 13 17:32:06: "
    event, _, term = words.partition("\n")
    text = f"\nJob <5[2]>, Job Name <x[2]>, User <ada>\n{stamp}Started 1 Task(s) on Host(s) <n1>;\n{stamp}{event}\n"
    text += f"{stamp}Completed <exit>; {term}\n" if term else ""
    wrapped = "\n".join(
        line[:79] + ("\n" + " " * 21 + line[79:] if line[79:] else "") for line in text.split("\n")
    )
    for answer in (text, wrapped):
        found = SCHEDULER.parse_accounting(CommandResult(("bhist",), 0, answer), [JobId("5", 2)])[
            JobId("5", 2)
        ]
        assert (found.state.value, found.exit_code) == (state, code)
        reasons = (term.partition(": ")[2].rstrip(";"), term.rstrip(";"))
        assert not term or found.reason in reasons


def test_commands_name_each_submission_once() -> None:
    ids = [JobId("12", 1), JobId("12", 2), JobId("9")]
    assert SCHEDULER.status_command(ids, ["x"], "ada") == ["bjobs", "-a", "-w", "12", "9"]
    assert SCHEDULER.accounting_command(ids) == ["bhist", "-n", "10", "-l", "12", "9"]


# -- cancel --------------------------------------------------------------------------------------------------------
def test_cancel_is_one_call() -> None:
    jobs = {"7": [], "8": [1, 2, 3, 5]}
    assert SCHEDULER.cancel_commands(jobs) == [["bkill", "7", "8[1-3,5]"]]
    assert SCHEDULER.show_id(JobId("8", 3)) == "8[3]"


@pytest.mark.parametrize(
    ("title", "gone"),
    [("array", True), ("finished", True), ("unknown", True), ("known and unknown", True), ("malformed", False), ("somebody else's", False)],
)  # fmt: skip
def test_a_cancel_that_came_too_late_is_no_failure(title: str, gone: bool) -> None:
    result = said("cancel.txt", title)
    assert result.exit_code == 255
    assert SCHEDULER.already_ended(result) is gone


def test_one_denied_job_is_a_failure() -> None:
    stderr = said("cancel.txt", "finished").stderr + said("cancel.txt", "somebody else's").stderr
    assert not SCHEDULER.already_ended(CommandResult(("bkill",), 255, "", stderr))


def test_options_that_relatives_do_not_have_get_a_remedy() -> None:
    """The message is a page of usage."""
    refused = said("submit.txt", "gpu option of IBM LSF, not in this one")
    assert "sites init" in SCHEDULER.remedy(refused)
    assert SCHEDULER.remedy(said("requests.txt", "no -rn")).startswith("leave out `requeue`")
    assert SCHEDULER.remedy(said("requests.txt", "reservation")).startswith(
        "leave out `reservation`"
    )
    assert SCHEDULER.remedy(said("submit.txt", "unknown queue")) == ""


def test_the_reason_of_a_job_that_avoids_a_node_is_not_its_request() -> None:
    result = said("requests.txt", "pending, and avoids a node")
    assert SCHEDULER.avoid(["node1"]) == """-R "select[hname!='node1']\""""
    assert "Requested Resources <select[hname!='node1'] rusage[ngpus=4]>" in result.stdout
    pending = {JobId("12"): JobStatus(JobState.PENDING, "PEND")}
    (found,) = SCHEDULER.parse_detail(result, pending).values()
    reason = "Job slot limit reached: 1 host; Job's resource requirements not satisfied: 1 host"
    assert found == JobStatus(JobState.PENDING, "PEND", reason)
